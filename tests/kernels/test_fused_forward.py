"""The fused forward of a decode step, run by Triton's interpreter, compared with the model's own forward."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.emulated_cuda import DEVICE, emulated_cuda

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.contracts.rollout.harness import Case, RolloutHarness
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin.cuda import graphs
from camshaft.rollout.builtin.rollout import TorchRollout

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("interpreted")]

FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "qwen2": ({}, 3),
    "qwen3": ({}, 2),
    "llama": ({"tie_embeddings": False}, 2),
    "mistral": ({"sliding_window": 5}, 2),
    "gpt2": ({}, 0),
}
"""Sizes, and number of joined groups of weights in a layer: projections of attention, their biases, gate and up."""

SAMPLING = SamplingParams(4, ignore_eos=True)


class Captured(TorchRollout):
    """The built-in generator with CUDA graphs."""

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config.model_copy(update={"enforce_eager": False}))


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutHarness]:
    monkeypatch.setattr(graphs, "MIN_STEPS", 1)
    with emulated_cuda():
        yield RolloutHarness(Captured, tmp_path, DEVICE)


def fused_of(case: Case) -> Any:
    rollout: Any = case.rollout
    return rollout.graphs.fused


def generate(harness: RolloutHarness, case: Case) -> None:
    """Generate, and compare the log-probs with those of `transformers`."""
    prompts = harness.prompts(3, 11, 1).select([0, 1, 1, 2])
    out = case.rollout.generate_sequences(prompts, SAMPLING, torch.arange(4))
    case.check_log_probs(prompts, out, SAMPLING)


@pytest.mark.parametrize(
    "family", [family if family == "qwen3" else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_families_are_fused(family: str, harness: RolloutHarness) -> None:
    sizes, groups = FAMILIES[family]
    case = harness.case(family, sizes)
    generate(harness, case)
    rollout: Any = case.rollout
    assert fused_of(case).reason is None
    assert len(rollout.model._joined) == groups * rollout.model.hf.config.num_hidden_layers


def test_new_weights_are_used_after_sleep_and_without(harness: RolloutHarness) -> None:
    """Joined weights are written in place by each load, and allocated again after `sleep`."""
    case = harness.case("qwen2")
    generate(harness, case)
    rollout: Any = case.rollout
    joined = next(iter(rollout.model._joined.values()))
    for asleep in (False, True):
        if asleep:
            rollout.sleep()
            assert not rollout.model._joined
            rollout.wake_up()
        for weight in case.oracle.parameters():
            weight.data += 0.1 * torch.randn_like(weight)
        rollout.load_weights(case.weights())
        generate(harness, case)
        assert (next(iter(rollout.model._joined.values())) is joined) == (not asleep)


def test_sleep_frees_the_weights(harness: RolloutHarness) -> None:
    case = harness.case("qwen2")
    generate(harness, case)
    rollout: Any = case.rollout
    weights = [weakref.ref(tensor) for tensor in rollout.model._joined.values()]
    rollout.sleep()
    gc.collect()
    assert weights
    assert not any(weight() is not None for weight in weights)


WRONG: dict[str, tuple[str, Any, str]] = {
    "activation": ("silu_mul", lambda gate, up: gate * up, "traced logits differ by"),
    "rotation": (
        "attend_rotated",
        lambda slots, module, query, key, value, rotation, *options: slots.attend(module, query, key, value, *options),
        "traced logits differ by",
    ),
    "failure": ("rms_norm", lambda *_: 1 / 0, "ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_fusion_is_not_used(wrong: str, harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    from camshaft.rollout.builtin.cuda import fused_forward

    name, replacement, reason = WRONG[wrong]
    monkeypatch.setattr(fused_forward, name, replacement)
    case = harness.case("qwen2")
    generate(harness, case)
    assert reason in fused_of(case).reason


def test_a_model_that_cannot_be_traced_is_not_fused(harness: RolloutHarness) -> None:
    case = harness.case("qwen2")
    rollout: Any = case.rollout
    norm = rollout.model.hf.model.norm
    original = norm.forward
    norm.forward = lambda x: original(x) * (1.0 if float(x.sum()) else 0.0)
    generate(harness, case)
    assert "reads the values" in fused_of(case).reason
