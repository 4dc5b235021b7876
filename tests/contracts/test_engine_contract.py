"""Every engine of the package follows every rule of the contract, and every rule detects a broken engine."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from support.broken_engines import CAUGHT_BY, PatchesTransformers
from support.optional_engines import OPTIONAL_ENGINES

from camshaft.config.engine import EngineConfig, LoRAConfig
from camshaft.contracts.engine.harness import EngineHarness
from camshaft.contracts.engine.ranks import check_engine_on_ranks
from camshaft.contracts.engine.suite import RULES, check_engine
from camshaft.contracts.rules import Rule, Violation, find_problem
from camshaft.engine import ENGINES, StepContext, StepHyperparameters, engine_class
from camshaft.engine.single import SingleDeviceEngine
from camshaft.errors import EngineError
from camshaft.models.packed import PackedModel

BY_NAME = {rule.name: rule for rule in RULES}
STRATEGIES = tuple(
    name
    for name in tuple({path: name for name, path in reversed(ENGINES.items())}.values())[::-1]
    if name not in OPTIONAL_ENGINES
)
"""One name per engine."""
FAST_ON_SHARDED = {"step equals oracle", "resume is bitwise"}
"""Rules that `make test` checks on one rank of a sharded engine, because it checks all rules on two ranks."""


def cases() -> Iterator[Any]:
    for strategy in STRATEGIES:
        for rule in RULES:
            marks = [pytest.mark.slow] * (strategy != "reference" and rule.name not in FAST_ON_SHARDED)
            yield pytest.param(strategy, rule, id=f"{strategy}-{rule.name.replace(' ', '_')}", marks=marks)


@pytest.mark.parametrize(("strategy", "rule"), list(cases()))
def test_engine_keeps_rule(strategy: str, rule: Rule, tmp_path: Path) -> None:
    rule.check(EngineHarness(engine_class(strategy), tmp_path))


@pytest.mark.parametrize("broken", CAUGHT_BY, ids=lambda cls: cls.__name__)
def test_contract_names_the_rule_that_a_broken_engine_breaks(
    broken: type[SingleDeviceEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken is PatchesTransformers:
        import transformers.models.qwen2.modeling_qwen2 as modeling

        monkeypatch.setattr(modeling.Qwen2Attention, "forward", modeling.Qwen2Attention.forward)
    with pytest.raises(Violation):
        BY_NAME[CAUGHT_BY[broken]].check(EngineHarness(broken, tmp_path))


def test_every_rule_has_a_meaning_and_its_own_name() -> None:
    assert len(BY_NAME) == len(RULES)
    for rule in RULES:
        assert rule.meaning.endswith("."), rule.name


def test_every_rule_has_an_engine_that_breaks_it() -> None:
    assert set(CAUGHT_BY.values()) == set(BY_NAME)


def test_a_crashing_engine_does_not_stop_other_rules(tmp_path: Path) -> None:
    class Crashes(SingleDeviceEngine):
        def optimizer_step(self) -> float:
            raise ZeroDivisionError("boom")

    rules = [BY_NAME["step equals oracle"], BY_NAME["predictions"]]
    verdicts = list(check_engine(Crashes, str(tmp_path), rules))
    assert [verdict.rule for verdict in verdicts] == rules
    problem = verdicts[0].problem
    assert problem is not None
    assert re.fullmatch(rf"ZeroDivisionError: boom \({re.escape(__file__)}:\d+ in .*Crashes\.optimizer_step\)", problem)
    assert verdicts[1].problem is None


def test_a_crash_outside_the_package_of_an_engine_names_its_caller() -> None:
    class Loads(SingleDeviceEngine):
        def build_model(self) -> PackedModel:
            return json.loads("{")

    problem = find_problem(lambda: Loads.build_model(cast(Any, None)), Loads)
    assert problem is not None
    assert re.search(rf"\({re.escape(__file__)}:\d+ in .*Loads\.build_model\)$", problem)
    problem = find_problem(lambda: SingleDeviceEngine(EngineConfig.model_construct()), SingleDeviceEngine)
    assert problem is not None
    assert re.search(r"camshaft/config/engine\.py:\d+ in EngineCapabilities\.validate\)$", problem)


def test_an_engine_for_one_rank_is_not_checked_on_several(tmp_path: Path) -> None:
    (verdict,) = check_engine_on_ranks(SingleDeviceEngine, 2, str(tmp_path))
    assert verdict.problem == (
        "SingleDeviceEngine supports only one rank (capabilities.multiple_ranks=False), but 2 were requested; check it "
        "on one rank"
    )


class DeclaresNothing(SingleDeviceEngine):
    """An engine without the features that capabilities declare one by one."""

    capabilities = dataclasses.replace(
        SingleDeviceEngine.capabilities,
        supports_lora_groups=False,
        supports_step_hyperparameters=False,
        supports_target_log_probs=False,
    )

    def optimizer_step(self) -> float:
        return super().optimizer_step()


def test_an_engine_that_declares_no_feature_keeps_the_rules(tmp_path: Path) -> None:
    names = ("interface", "hyperparameters of a step", "predictions", "free targets", "adapter", "adapter groups")
    verdicts = check_engine(DeclaresNothing, str(tmp_path), [BY_NAME[name] for name in names])
    assert [verdict.problem for verdict in verdicts] == [None] * len(names)

    class Claims(DeclaresNothing):
        capabilities = SingleDeviceEngine.capabilities

    problem = next(check_engine(Claims, str(tmp_path), [BY_NAME["interface"]])).problem
    assert problem is not None
    assert "hyperparameters" in problem


def test_features_that_an_engine_does_not_declare_are_refused(tmp_path: Path) -> None:
    class Undeclared(SingleDeviceEngine):
        capabilities = DeclaresNothing.capabilities

    harness = EngineHarness(Undeclared, tmp_path)
    engine = harness.build()
    with engine.train_mode():
        with pytest.raises(EngineError, match="target_log_probs, but this engine with head=causal_lm supports only"):
            engine.forward_backward_step(harness.batch, StepContext(outputs=("target_log_probs",)))
        engine.forward_backward_step(harness.batch)
        with pytest.raises(EngineError, match="Undeclared does not support hyperparameters of a step"):
            engine.optimizer_step(StepHyperparameters(0.1, (0.9, 0.95), 1e-12, 0.0))
        assert engine.optimizer_step() > 0
    with pytest.raises(EngineError, match=r"does not support lora\.train_mlp=False"):
        harness.build(lora=LoRAConfig(rank=2, train_mlp=False))


def test_an_empty_engine_violates_the_interface(tmp_path: Path) -> None:
    from camshaft.engine.base import BaseEngine

    class Nothing(BaseEngine):
        pass

    with pytest.raises(Violation, match=r"does not implement .*forward_backward_step, .*unshard_data"):
        BY_NAME["interface"].check(EngineHarness(Nothing, tmp_path))


def test_an_engine_that_cannot_be_constructed_gives_one_verdict(tmp_path: Path) -> None:
    class Picky(SingleDeviceEngine):
        def __init__(self, config: EngineConfig):
            raise EngineError("no license")

    (verdict,) = check_engine(Picky, str(tmp_path))
    assert (verdict.rule.name, verdict.problem) == (
        "interface",
        "Picky cannot be constructed: EngineError: no license",
    )


def test_an_engine_without_a_method_cannot_be_constructed(tmp_path: Path) -> None:
    from camshaft.engine.base import BaseEngine

    class Half(BaseEngine):
        def init_model(self) -> None: ...

    with pytest.raises(TypeError, match="forward_backward_step"):
        Half(EngineHarness(SingleDeviceEngine, tmp_path).config())  # pyright: ignore[reportAbstractUsage]
