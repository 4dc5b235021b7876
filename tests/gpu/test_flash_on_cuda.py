"""Flash attention with shared prefixes, and checksums, by the kernels of a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.dense_attention import dense_attention
from torch import Tensor

from camshaft.contracts.engine.harness import EngineHarness
from camshaft.digest import BLOCK, digest
from camshaft.engine import engine_class
from camshaft.models.attention import packed_attention, packed_kwargs
from camshaft.models.flash import Bounds, packed_flash_attention
from camshaft.models.packing import Packing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="requires CUDA")]

PACKINGS = {
    "segments": Packing([300, 1, 900, 77]),
    "shared": Packing([400, 33, 128, 257, 5, 640, 1], prefix_of=[None, 0, 0, 0, None, None, 5]),
    "one group": Packing([1024, 300, 300, 300], prefix_of=[None, 0, 0, 0]),
}


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=["grouped", "equal"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS.keys())
def test_outputs_and_gradients_equal_those_of_float64(packing: Packing, dim: int, heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    shapes = [(count, packing.size, dim) for count in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    grad = torch.randn(packing.size, heads[0], dim, device="cuda").bfloat16()
    ends = torch.tensor([0, *packing.ends.tolist()], dtype=torch.int32, device="cuda")
    bounds = Bounds(ends, ends, max(packing.lengths), max(packing.lengths))
    leaves: Any = [tensor.clone().requires_grad_() for tensor in inputs]
    out = packed_flash_attention(*leaves, bounds=bounds, packing=packing)
    actual = [out, *torch.autograd.grad(out, leaves, grad)]
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    out = dense_attention(*exact, lengths=packing.lengths, parents=packing.prefix_of)
    expected = [out, *torch.autograd.grad(out, exact, grad.double())]
    errors = [error(a.detach(), e.detach()) for a, e in zip(actual, expected, strict=True)]
    assert max(errors) < 1e-2, errors


def test_a_sliding_window_excludes_earlier_tokens() -> None:
    torch.manual_seed(0)
    packing, layer = Packing([300, 77]), torch.nn.Identity()
    query, key, value = (torch.randn(1, count, 377, 64).bfloat16() for count in (4, 2, 2))
    expected, _ = packed_attention(
        layer, query.double(), key.double(), value.double(), sliding_window=50, **packed_kwargs(packing, "cpu")
    )
    actual, _ = packed_attention(
        layer, query.cuda(), key.cuda(), value.cuda(), sliding_window=50, **packed_kwargs(packing, "cuda")
    )
    assert error(actual.cpu(), expected) < 1e-2


@pytest.mark.parametrize("head", ["causal_lm", "value"])
@pytest.mark.parametrize("strategy", ["fsdp2", "reference"])
def test_rows_with_a_common_prompt_equal_separate_rows(strategy: str, head: Any, tmp_path: Path) -> None:
    harness = EngineHarness(engine_class(strategy), tmp_path, "cuda")
    results = []
    for dtype, share in (("bfloat16", True), ("bfloat16", False), ("float32", False)):
        engine: Any = harness.build(
            head=head,
            use_prefix_grouper=share,
            options={"mixed_precision": {"param_dtype": dtype}},
        )
        counts: list[int] = []
        engine.module.register_forward_pre_hook(lambda module, args, counts=counts: counts.append(len(args[0])))
        results.append((harness.step(engine, harness.shared_prompt_batch), counts))
    (shared, computed), (separate, all_tokens), (exact, _) = results
    assert sum(computed) < sum(all_tokens)
    for name, expected in exact.gradients.items():
        distance, rounding = ((result.gradients[name] - expected).norm() for result in (shared, separate))
        assert distance <= 3 * rounding + 1e-2 * expected.norm(), name
    assert shared.loss == pytest.approx(exact.loss, rel=2e-2, abs=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (7, 11), (3, BLOCK // 2 + 5), (1000, 3000)])
def test_checksums_equal_those_of_the_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    for variant in (tensor, tensor[..., 1:] if shape else tensor):
        assert digest(variant.cuda()) == digest(variant)
