"""The attention kernels of the KV cache, run by Triton's interpreter, compared with attention in float64."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.interpreter import fixed_dot
from torch import Tensor
from transformers import Qwen2Config

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.contracts.rollout.harness import RolloutHarness
from camshaft.models.blockwise import Scores
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin.cuda import graphs
from camshaft.rollout.builtin.cuda.graphs import CUDAGraphCapture, CUDAGraphDecoder
from camshaft.rollout.builtin.kv_cache import KVCache
from camshaft.rollout.builtin.rollout import TorchRollout

pytestmark = pytest.mark.interpreted

LAYER: Any = SimpleNamespace(layer_idx=0)
POSITIONS = [0, 3, 15, 16, 70, 127, 128, 255]
SHAPES = {
    "shared heads": (4, 2, 16, 16),
    "one for all": (6, 1, 64, 64),
    "each its own": (3, 3, 32, 32),
    "odd sizes": (4, 2, 40, 24),
    "more than a tile": (40, 2, 8, 8),
}
"""Query heads, key heads, size of keys, size of values."""

SPLITS = {"whole rows": (1, None), "as they come": (40, None), "eight splits": (40, 16)}
"""Number of processors, and positions per block."""


@pytest.fixture
def kernels(interpreted: None) -> Iterator[ModuleType]:
    from camshaft.rollout.builtin.cuda import kernels

    with fixed_dot():
        yield kernels


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return random (B, H, D) rows with the strides of a model, where heads are dimension 2 of (B, 1, H, D)."""
    return torch.randn(*shape).to(dtype).transpose(1, 2)


def attention_of_row(
    query: Tensor, keys: Tensor, values: Tensor, position: int, how: Scores, sinks: Tensor | None
) -> Tensor:
    """Return the (H, D) attention of one row's token over the keys and values of its slot, head by head in float64."""
    first = 0 if how.window is None else max(0, position + 1 - how.window)
    shared = len(query) // len(keys)
    mixed = []
    for head, one in enumerate(query.double()):
        visible = slice(first, position + 1)
        scores = keys[head // shared, visible].double() @ one * how.scale
        if how.softcap is not None:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        weights = scores.exp() / (scores.exp().sum() + (0 if sinks is None else sinks[head].double().exp()))
        mixed.append(weights @ values[head // shared, visible].double())
    return torch.stack(mixed)


@pytest.fixture(params=SPLITS)
def split(request: pytest.FixtureRequest, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force the number of splits per row, and fill new allocations with NaN."""
    processors, block = SPLITS[request.param]
    monkeypatch.setattr(kernels, "count_multiprocessors", lambda device: processors)
    real = kernels.block_config
    monkeypatch.setattr(kernels, "block_config", lambda *of: real(*of) | ({} if block is None else {"BLOCK": block}))
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, torch.nan, **options))
    return request.param


def cases() -> Iterator[Any]:
    """Return each shape with each window; the window changes little beyond the shapes with odd sizes and many tiles."""
    for shape in SHAPES:
        for window in (None, 1, 50):
            slow = window == 50 and shape not in ("odd sizes", "more than a tile")
            yield pytest.param(shape, window, marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize(("shape", "window"), list(cases()))
def test_attention_matches_the_oracle_for_each_row(
    kernels: ModuleType, split: str, shape: str, window: int | None
) -> None:
    splits = check(kernels, torch.float32, SHAPES[shape], window, 1e-5)
    if split != "as they come":
        assert (splits > 1) == (split == "eight splits" and window != 1)
    if (split, SHAPES[shape][1], window) == ("eight splits", 2, None):
        assert splits == 8


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 1.5e-2), pytest.param(torch.float16, 2e-3, marks=pytest.mark.slow)]
)
def test_half_precision_is_near(kernels: ModuleType, split: str, dtype: torch.dtype, tolerance: float) -> None:
    check(kernels, dtype, SHAPES["shared heads"], None, tolerance)
    check(kernels, dtype, SHAPES["odd sizes"], 50, tolerance)


@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.8, False), (None, True), (0.8, True)])
def test_soft_capped_scores_and_sinks_match_the_oracle(
    kernels: ModuleType, split: str, softcap: float | None, with_sinks: bool
) -> None:
    check(kernels, torch.float32, SHAPES["odd sizes"], 50, 1e-5, softcap, with_sinks)
    check(kernels, torch.float32, SHAPES["each its own"], None, 1e-5, softcap, with_sinks)
    check(kernels, torch.bfloat16, SHAPES["shared heads"], None, 1.5e-2, softcap, with_sinks)


def check(
    kernels: ModuleType,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    window: int | None,
    tolerance: float,
    softcap: float | None = None,
    with_sinks: bool = False,
) -> int:
    """Compare one call with the oracle. The call writes only the new positions and reads only within each row.

    Return the number of splits.
    """
    torch.manual_seed(0)
    heads, key_heads, dim, value_dim = shape
    rows = len(POSITIONS)
    cache = KVCache(Qwen2Config(num_hidden_layers=1), 300)
    cache.reserve(rows + 2, 256)
    query = drawn(rows, 1, heads, dim, dtype=dtype)
    key, value = (drawn(rows, 1, key_heads, size, dtype=dtype) for size in (dim, value_dim))
    stored = cache.layer(LAYER, key, value)
    for block in stored:
        block.normal_()
        for row, position in enumerate(POSITIONS):
            block[row, :, position + 1 :] = torch.nan
    reference = [block.clone() for block in stored]
    for block, new in zip(reference, (key, value), strict=True):
        for row, position in enumerate(POSITIONS):
            block[row, :, position] = new[row, :, 0]
    step = kernels.TritonDecodeStep(cache, torch.tensor(POSITIONS))
    how, sinks = Scores(0.3, window, softcap), 3 * torch.randn(heads).to(dtype) if with_sinks else None
    actual = step.attend(LAYER, query, key, value, how, sinks)
    assert (actual.shape, actual.dtype) == ((rows, 1, heads, value_dim), dtype)
    for block, expected in zip(stored, reference, strict=True):
        assert torch.equal(block.nan_to_num(99), expected.nan_to_num(99))
    for row, position in enumerate(POSITIONS):
        keys, values = (block[row] for block in reference)
        expected = attention_of_row(query[row, :, 0], keys, values, position, how, sinks)
        torch.testing.assert_close(actual[row, 0].double(), expected, atol=tolerance, rtol=tolerance)
    block = kernels.block_config(dtype, max(kernels._tile_size(size) for size in (dim, value_dim)))["BLOCK"]
    return step._splits(rows * key_heads, block, window)


def test_kernels_are_compiled_for_few_numbers_of_splits(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of rows of a model with two key heads on 132 multiprocessors."""
    monkeypatch.setattr(kernels, "count_multiprocessors", lambda device: 132)
    cache = KVCache(Qwen2Config(num_hidden_layers=1), 4096)
    cache.reserve(1, 4096)
    step = kernels.TritonDecodeStep(cache, torch.zeros(1))
    splits = {rows: step._splits(2 * rows, 64, None) for rows in range(1, 513)}
    assert set(splits.values()) == {1, 2, 4, 8, 16, 32}
    assert all(2 * rows * number >= 2 * 132 for rows, number in splits.items() if number < 32)


class EachTime(CUDAGraphCapture):
    """A capture that records nothing: replay calls the function again."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        return function

    def release(self) -> None: ...


@pytest.mark.parametrize(
    ("family", "sizes"), [pytest.param("qwen2", {}, marks=pytest.mark.slow), ("mistral", {"sliding_window": 5})]
)
def test_a_model_generates_correctly_with_the_kernels(
    kernels: ModuleType, family: str, sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithKernels(TorchRollout):
        def __init__(self, config: RolloutEngineConfig):
            super().__init__(config)
            self.graphs = CUDAGraphDecoder(self.decoder, self.cache, EachTime(), kernels.TritonDecodeStep)

    monkeypatch.setattr(kernels, "count_multiprocessors", lambda device: 8)
    harness = RolloutHarness(WithKernels, tmp_path)
    case, prompts = harness.case(family, sizes, max_num_seqs=3), harness.prompts(3, 60, 1).select([0, 0, 0, 1, 2])
    sampling = SamplingParams(16, stop_token_ids=(10, 11, 12))
    out = case.rollout.generate_sequences(prompts, sampling, torch.arange(5))
    case.check_log_probs(prompts, out, sampling)


def test_kernels_report_unsupported_inputs(kernels: ModuleType) -> None:
    for dtype, dim, can in ((torch.float64, 8, False), (torch.float32, 257, False), (torch.bfloat16, 256, True)):
        cache = KVCache(Qwen2Config(num_hidden_layers=1), 300)
        cache.reserve(1, 1)
        key = torch.zeros(1, 1, 1, dim, dtype=dtype)
        cache.layer(LAYER, key, key)
        assert kernels.supports_cache(cache) == can


def test_steps_on_a_gpu_use_the_kernels_if_supported(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "count_multiprocessors", lambda device: 3)
    monkeypatch.setattr(graphs, "full_length_step", lambda cache, positions: "whole")
    positions: Any = SimpleNamespace(is_cuda=True, device="cuda")
    cache = KVCache(Qwen2Config(num_hidden_layers=1), 300)
    assert isinstance(graphs.device_step(cache, positions), kernels.TritonDecodeStep)
    assert graphs.device_step(cache, SimpleNamespace(is_cuda=False)) == "whole"  # pyright: ignore
    for name, value in (("supports_cache", lambda cache: False), ("supports_triton", lambda tensor: False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"{(kernels if name == 'supports_cache' else graphs).__name__}.{name}", value)
            assert graphs.device_step(cache, positions) == "whole"
