"""The small kernels of a decode step, run by Triton's interpreter, compared with torch operators."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2Config

from camshaft.models.blockwise import Scores
from camshaft.models.cpu import rms_norm
from camshaft.rollout import sampling as torch_sampling
from camshaft.rollout.builtin.kv_cache import KVCache

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("interpreted")]

DTYPES = (torch.float32, torch.bfloat16)
LAYER: Any = SimpleNamespace(layer_idx=0)


@pytest.fixture
def fused(interpreted: None) -> ModuleType:
    from camshaft.rollout.builtin.cuda import fused_kernels

    return fused_kernels


def close(actual: Tensor, expected: Tensor) -> None:
    """Allow for the interpreter, which truncates to bfloat16 where a GPU rounds, up to twice in a kernel."""
    step = 4 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=step, atol=step)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 48, 200])
def test_norm_rounds_like_the_model(fused: ModuleType, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((5, 1, width), (5, 1, width), (width,)))
    close(fused.rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5))
    total, normed = fused.add_rms_norm(x, residual, weight, 1e-5)
    close(total, x + residual)
    close(normed, rms_norm(x + residual, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [24, 1030])
def test_gated_activation_of_joined_projections(fused: ModuleType, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(3, 1, 2 * width).mul(3).to(dtype).split(width, dim=-1)
    close(fused.silu_mul(gate, up), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(4, 2, 16), (3, 1, 40)])
def test_rotation_before_attention(
    interpreted: None, heads: int, key_heads: int, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotating in the kernel stores the same keys and yields the same attention as rotating before."""
    from camshaft.rollout.builtin.cuda import kernels

    torch.manual_seed(0)
    monkeypatch.setattr(kernels, "count_multiprocessors", lambda device: 1)
    positions = torch.tensor([0, 3, 17])
    joined = torch.randn(3, 1, (heads + 2 * key_heads) * dim).to(dtype)
    query, key, value = (
        part.unflatten(-1, (-1, dim)).transpose(1, 2)
        for part in joined.split([heads * dim, key_heads * dim, key_heads * dim], dim=-1)
    )
    cos, sin = torch.randn(2, 3, 1, 1, dim).to(dtype)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    results = []
    for rotation in (None, (cos, sin)):
        cache = KVCache(Qwen2Config(num_hidden_layers=1), 64)
        cache.reserve(4, 32)
        step = kernels.TritonDecodeStep(cache, positions)
        inputs = (query, key) if rotation else (rotated(query), rotated(key))
        results.append(
            [step.attend(LAYER, *inputs, value, Scores(0.3), None, rotation), *cache.layer(LAYER, key, value)]
        )
    for actual, expected in zip(results[1], results[0], strict=True):
        close(actual, expected)


@pytest.fixture
def draw(interpreted: None) -> Any:
    from camshaft.rollout.builtin.cuda.sampling import draw

    return draw


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 2048, 5000])
def test_sampled_tokens_invert_the_cdf(draw: Any, size: int, dtype: torch.dtype) -> None:
    """Each token is the one whose interval of the CDF, computed in float64, contains the uniform number."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, size, generator=generator).mul(3).to(dtype)
    uniforms = torch.rand(64, generator=generator, dtype=torch.float64)
    tokens, log_probs = draw(logits, uniforms, 0.7)
    exact = (logits.double() / 0.7).log_softmax(-1)
    torch.testing.assert_close(log_probs.double(), exact.gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    cdf = exact.exp().cumsum(-1)
    upper = cdf.gather(1, tokens[:, None])[:, 0]
    lower = upper - exact.exp().gather(1, tokens[:, None])[:, 0]
    assert bool(((lower - 1e-6 <= uniforms) & (uniforms <= upper + 1e-6)).all())


def test_excluded_tokens_are_never_sampled(draw: Any) -> None:
    """Uniform numbers at both ends, rows with a single token, and blocks without any."""
    scores = torch.full((4, 5000), -torch.inf)
    for row, tokens in enumerate(([0], [4999], [10, 4500], [2047, 2048])):
        scores[row, tokens] = 1.0
    for uniform in (0.0, 0.5 - 2.0**-30, 0.5, 1 - 2.0**-53):
        tokens, log_probs = draw(scores, torch.full((4,), uniform, dtype=torch.float64))
        assert bool(scores.gather(1, tokens[:, None]).isfinite().all())
        assert tokens[2:].tolist() == ([10, 2047] if uniform < 0.5 else [4500, 2048])
        torch.testing.assert_close(log_probs, torch.tensor([1.0, 1.0, 0.5, 0.5]).log())


def test_tokens_equal_those_of_the_torch_operators(draw: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(200, 3000, generator=generator)
    uniforms = torch.rand(200, generator=generator, dtype=torch.float64)
    (tokens, log_probs), (expected, expected_log_probs) = draw(scores, uniforms), torch_sampling.draw(scores, uniforms)
    assert (tokens == expected).float().mean() > 0.98  # a number near a boundary falls on either side by rounding
    same = tokens == expected
    torch.testing.assert_close(log_probs[same], expected_log_probs[same], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_invalid_scores_give_invalid_log_probs(draw: Any, value: float) -> None:
    scores = torch.zeros(3, 4000)
    scores[1, 3000] = value
    tokens, log_probs = draw(scores, torch.full((3,), 0.25, dtype=torch.float64))
    assert log_probs.isfinite().tolist() == [True, False, True]
    assert bool((tokens < 4000).all())
