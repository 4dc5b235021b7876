"""The built-in generator keeps the rollout contract for soft-caps, sinks and recurrent states, eager and captured."""

from pathlib import Path
from typing import Any

import pytest
from support.recorders import OperatorCapture
from support.tiny import CHANGED_SCORES, LINEAR

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.contracts.rollout.harness import Case, RolloutHarness
from camshaft.contracts.rollout.suite import RULES
from camshaft.contracts.rules import Rule
from camshaft.rollout.builtin.cuda import graphs
from camshaft.rollout.builtin.cuda.graphs import CUDAGraphDecoder, full_length_step
from camshaft.rollout.builtin.rollout import TorchRollout

SIZES: dict[str, dict[str, Any]] = {
    **CHANGED_SCORES,
    "qwen3_5_text": LINEAR,
    "qwen3_next": {**LINEAR, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}

FAST = {
    "rows do not depend on the batch", "prompts of mixed lengths", "sleep and wake",
    "kept rows have the tokens of computed ones",
}  # fmt: skip

OTHER_MODELS = {"weight errors name the weight", "stop strings end a row"}
"""Rules that name weights of dense layers, or depend on the text that one model samples."""

CASES = [
    pytest.param(
        family, rule, marks=[pytest.mark.slow] * (rule.name not in FAST), id=f"{family}-{rule.name.replace(' ', '_')}"
    )
    for family in SIZES
    for rule in RULES
    if rule.name not in OTHER_MODELS or family == "qwen3_5_text"
]


class Captured(TorchRollout):
    """The built-in generator with captured steps, with a CPU stand-in for CUDA graphs."""

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        self.graphs = CUDAGraphDecoder(self.decoder, self.cache, OperatorCapture(), full_length_step)


class FamilyHarness(RolloutHarness):
    """The harness of the contract with another default model."""

    def __init__(self, rollout_class: type[TorchRollout], folder: Path, family: str):
        super().__init__(rollout_class, folder)
        self.family = family

    def empty_case(self, family: str = "qwen2", sizes: dict[str, Any] | None = None, **config: Any) -> Case:
        if family == "qwen2":
            family, sizes = self.family, SIZES[self.family] | (sizes or {})
        return super().empty_case(family, sizes, **config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(("family", "rule"), CASES)
@pytest.mark.parametrize("rollout", [TorchRollout, Captured])
def test_generator_keeps_rule(
    family: str, rule: Rule, rollout: type[TorchRollout], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MIN_STEPS", 1)
    rule.check(FamilyHarness(rollout, folder, family))
