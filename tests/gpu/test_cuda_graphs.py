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


def test_decode_steps_are_fused(tmp_path: Path) -> None:
    """The small kernels round like the model: the fused forward passes its comparison in bfloat16 and float32."""
    for family in ("qwen2", "qwen3", "llama", "mistral"):
        for dtype in ("float32", "bfloat16"):
            case = RolloutHarness(Recorded, tmp_path, "cuda").case(family, FAMILIES.get(family, {}), dtype=dtype)
            case.rollout.generate_sequences(prompts_of(RolloutHarness(Recorded, tmp_path, "cuda")), SamplingParams(24))
            rollout: Any = case.rollout
            assert rollout.graphs.fused.reason is None, (family, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_small_kernels_round_like_the_model(dtype: torch.dtype) -> None:
    from camshaft.models.cpu import rms_norm
    from camshaft.rollout.builtin.cuda import fused_kernels

    torch.manual_seed(0)
    x, residual, weight = (
        torch.randn(*shape, device="cuda").to(dtype) for shape in ((256, 1536), (256, 1536), (1536,))
    )
    total, normed = fused_kernels.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(normed, rms_norm(total, weight, 1e-6), rtol=2 * step, atol=step)
    gate, up = torch.randn(256, 2 * 8960, device="cuda").to(dtype).split(8960, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    # Each side rounds an exponential (two units in the last place), a sum, a division (two) and two products.
    torch.testing.assert_close(fused_kernels.silu_mul(gate, up), expected, rtol=8 * step, atol=step)


def test_sampling_kernel_inverts_the_cdf() -> None:
    from camshaft.rollout.builtin.cuda.sampling import draw

    logits = torch.randn(256, 151_936, device="cuda").mul(2)
    uniforms = torch.rand(256, device="cuda", dtype=torch.float64)
    tokens, log_probs = draw(logits, uniforms, 0.8)
    exact = (logits.double() / 0.8).log_softmax(-1)
    torch.testing.assert_close(log_probs.double(), exact.gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    upper = exact.exp().cumsum(-1).gather(1, tokens[:, None])[:, 0]
    lower = upper - log_probs.double().exp()
    assert bool(((lower - 1e-6 <= uniforms) & (uniforms <= upper + 1e-6)).all())
