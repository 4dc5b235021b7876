"""CUDA graphs of decode steps with the GPU kernels; skipped without a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.contracts.rollout.harness import Case, RolloutHarness, expect_close
from camshaft.contracts.rollout.suite import RULES
from camshaft.contracts.rules import Rule
from camshaft.ragged import Ragged
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin.cuda import graphs
from camshaft.rollout.builtin.rollout import TorchRollout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a CUDA device")]

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {"tie_embeddings": False},
    "mistral": {"sliding_window": 5},
    "gpt2": {},
}


class Recorded(TorchRollout):
    """The built-in generator with CUDA graph capture enabled."""

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config.model_copy(update={"enforce_eager": False}))


def prompts_of(harness: RolloutHarness) -> Ragged:
    return harness.prompts(3, 11, 1, 5, 62).select([0, 1, 1, 2, *[3] * 10, *[4] * 4])


def replays(case: Case) -> dict[int, Any]:
    rollout: Any = case.rollout
    return dict(rollout.graphs.replays)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_match_eager_steps(family: str, tmp_path: Path) -> None:
    harness, sampling = RolloutHarness(TorchRollout, tmp_path, "cuda"), SamplingParams(24, temperature=0)
    responses = []
    for eager in (True, False):
        case = harness.case(family, FAMILIES[family], max_num_seqs=7, enforce_eager=eager)
        out = case.rollout.generate_sequences(prompts_of(harness), sampling)
        expect_close(out.log_probs, case.log_probs(prompts_of(harness), out.responses, sampling), 1e-3, "log-probs")
        responses.append([row.tolist() for row in out.responses.rows()])
        assert eager or replays(case)
    assert responses[0] == responses[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_near(family: str, tmp_path: Path) -> None:
    """Graphs agree with eager steps, which round differently, within the tolerance of the contract."""
    harness, sampling = RolloutHarness(Recorded, tmp_path, "cuda"), SamplingParams(24)
    case = harness.empty_case(family, FAMILIES[family], dtype="bfloat16", max_num_seqs=7)
    for weight in case.oracle.parameters():
        weight.data /= 4 if weight.ndim > 1 else 1
    case.rollout.load_weights(case.weights())
    out = case.rollout.generate_sequences(prompts_of(harness), sampling)
    expected = case.log_probs(prompts_of(harness), out.responses, sampling)
    assert replays(case)
    assert (out.log_probs.values.double() - expected.values).abs().mean() < 2e-2


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name.replace(" ", "_"))
def test_captured_steps_keep_rule(rule: Rule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MIN_STEPS", 1)
    harness = RolloutHarness(Recorded, tmp_path, "cuda")
    rule.check(harness)


def test_a_second_generation_captures_nothing_and_sleep_frees_all(tmp_path: Path) -> None:
    harness = RolloutHarness(Recorded, tmp_path, "cuda")
    case, sampling = harness.case(max_num_seqs=7), SamplingParams(24, temperature=0, ignore_eos=True)
    case.rollout.generate_sequences(prompts_of(harness), sampling)
    first = case.rollout.generate_sequences(prompts_of(harness), sampling)
    before = replays(case)
    second = case.rollout.generate_sequences(prompts_of(harness), sampling)
    assert replays(case) == before
    assert torch.equal(first.responses.values, second.responses.values)
    case.rollout.sleep()
    assert not replays(case)
    case.rollout.wake_up()
    case.rollout.load_weights(case.weights())
    asleep_between = case.rollout.generate_sequences(prompts_of(harness), sampling)
    assert torch.equal(first.responses.values, asleep_between.responses.values)
