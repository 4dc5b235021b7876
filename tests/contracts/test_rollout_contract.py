"""Every generator of this package keeps every rule of the contract, and the contract notices who does not."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.ragged import Ragged
from camshaft.rollout import ROLLOUTS, rollout_class
from camshaft.rollout.base import BaseRollout, Generation, SamplingParams
from camshaft.rollout.contract import RULES, check_rollout
from camshaft.rollout.lab import RolloutLab
from camshaft.rollout.torch_rollout import TorchRollout
from camshaft.rules import Rule, Violation

BY_NAME = {rule.name: rule for rule in RULES}
HERE = ("torch", "hf")
"""Generators that need no library beyond the package's own."""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models are written once and read by all rules."""
    return tmp_path_factory.mktemp("rollout")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name.replace(" ", "_"))
@pytest.mark.parametrize("name", HERE)
def test_rollout_keeps_rule(name: str, rule: Rule, scratch: Path) -> None:
    rule.check(RolloutLab(rollout_class(name), scratch))


def test_both_generators_that_need_no_other_library_are_tried() -> None:
    assert set(HERE) <= set(ROLLOUTS)


class KeepsFirstWeights(TorchRollout):
    """Takes weights once, and later ones not at all."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        kept = {name: tensor.clone() for name, tensor in weights}
        self.first = self.__dict__.get("first") or kept
        super().load_weights(self.first.items() if kept.keys() == self.first.keys() else kept.items())


class ForgetsTemperature(TorchRollout):
    """Samples with the temperature and top_p asked for, but answers with log-probs of the bare model."""

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        out = super().generate_sequences(prompts, sampling, seeds)
        return replace(out, log_probs=out.log_probs.map(lambda values: values * sampling.temperature))


class IgnoresTopP(TorchRollout):
    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        return super().generate_sequences(prompts, replace(sampling, top_p=1.0), seeds)


class IgnoresSeeds(TorchRollout):
    def seeds_of_call(self, num_rows: int, seeds: Tensor | None) -> Tensor:
        return super().seeds_of_call(num_rows, None)


class OneSeedForAll(TorchRollout):
    """Equal prompts get equal responses."""

    def seeds_of_call(self, num_rows: int, seeds: Tensor | None) -> Tensor:
        return super().seeds_of_call(num_rows, seeds)[:1].expand(num_rows)


class ReversesRows(TorchRollout):
    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        out = super().generate_sequences(prompts, sampling, seeds)
        back = list(range(len(prompts)))[::-1]
        return Generation(out.responses.select(back), out.log_probs.select(back), out.finished[back])


class DropsTheEnd(TorchRollout):
    """Cuts the stop token off."""

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        out = super().generate_sequences(prompts, sampling, seeds)
        lengths = out.responses.lengths - out.finished.long()
        return replace(out, responses=out.responses.prefix(lengths), log_probs=out.log_probs.prefix(lengths))


class IgnoresWindows(TorchRollout):
    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        self.pool.windows = [None] * self.pool.num_layers
        for module in self.model.hf.modules():
            module.__dict__.update({"sliding_window": None} if "sliding_window" in module.__dict__ else {})
        self.model.hf.config.sliding_window = None


class StopsAtNothing(TorchRollout):
    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        self.model.stop_ids = ()


class NeverForgets(TorchRollout):
    """Goes on with old weights after sleep and after a load that failed."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.model._loaded = True
        super().load_weights(weights)
        self.kept = [(name, weight.clone()) for name, weight in self.model.hf.named_parameters()]

    def wake_up(self) -> None:
        super().wake_up()
        super().load_weights(self.kept)


class MovesTheRandomState(TorchRollout):
    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        torch.rand(1)
        return super().generate_sequences(prompts, sampling, seeds)


CAUGHT_BY: dict[type[BaseRollout], str] = {
    KeepsFirstWeights: "the last weights count",
    ForgetsTemperature: "log probs are those of the distribution",
    IgnoresTopP: "log probs are those of the distribution",
    IgnoresSeeds: "seeds decide",
    OneSeedForAll: "frequencies follow the distribution",
    ReversesRows: "many short and a few long prompts",
    DropsTheEnd: "rows end",
    IgnoresWindows: "families",
    StopsAtNothing: "the models own end is honoured",
    NeverForgets: "sleep and wake",
    MovesTheRandomState: "seeds decide",
}


@pytest.mark.parametrize("broken", CAUGHT_BY, ids=lambda cls: cls.__name__)
def test_contract_names_the_rule_that_a_broken_rollout_breaks(broken: type[BaseRollout], scratch: Path) -> None:
    with pytest.raises(Violation):
        BY_NAME[CAUGHT_BY[broken]].check(RolloutLab(broken, scratch))


def test_every_rule_has_a_meaning_of_one_line_and_its_own_name() -> None:
    assert len(BY_NAME) == len(RULES)
    for rule in RULES:
        assert rule.meaning.endswith("."), rule.name


def test_a_rollout_that_crashes_breaks_rules_and_the_others_still_run(scratch: Path) -> None:
    class Crashes(TorchRollout):
        def sleep(self) -> None:
            raise ZeroDivisionError("boom")

    rules = [BY_NAME["sleep and wake"], BY_NAME["no prompts"]]
    findings = list(check_rollout(Crashes, str(scratch), rules))
    assert [finding.rule for finding in findings] == rules
    assert findings[0].problem == "ZeroDivisionError: boom"
    assert findings[1].problem is None


def test_a_rollout_without_a_method_fails_at_construction_and_by_name() -> None:
    class Half(BaseRollout):
        def sleep(self) -> None: ...

    with pytest.raises(TypeError, match="generate_sequences"):
        Half(RolloutEngineConfig(model_path="nowhere"))  # pyright: ignore[reportAbstractUsage]
