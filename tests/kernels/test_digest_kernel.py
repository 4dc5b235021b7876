"""The kernel of checksums, run by Triton's interpreter and compiled, compared with exact sums in torch."""

from pathlib import Path

import pytest
import torch
from support.compiled import resources
from support.emulated_cuda import DEVICE, emulated_cuda

from camshaft.digest import BLOCK, block_factors, digest

SHAPES = [(), (2,), (7, 11), (3, BLOCK // 2 + 4), (4 * BLOCK,)]


@pytest.mark.interpreted
@pytest.mark.parametrize("words", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 5])
def test_sums_are_exact(interpreted: None, words: int) -> None:
    from camshaft.digest.kernel import block_sums

    random = torch.Generator().manual_seed(words)
    values = torch.randint(-(2**31), 2**31, (words,), generator=random, dtype=torch.int64).int()
    factors = block_factors(torch.device("cpu"))
    padded = torch.nn.functional.pad(values.long(), (0, -words % BLOCK)).view(-1, BLOCK)
    assert torch.equal(block_sums(values, factors), (padded * factors).sum(dim=1))


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_checksums_equal_those_of_the_cpu(interpreted: None, dtype: torch.dtype) -> None:
    """Tensors that the kernel does not support, such as transposed ones, take the path of torch operators."""
    random = torch.Generator().manual_seed(0)
    tensors = [(torch.randn(shape, generator=random) * 3).to(dtype) for shape in SHAPES]
    with emulated_cuda() as device:
        for tensor in (*tensors, tensors[2].t(), tensors[4][1:]):
            assert digest(tensor.to(DEVICE)) == digest(tensor), tensor.shape
        assert device.launches["triton._block_sums_kernel"] >= 2


@pytest.mark.compiled
@pytest.mark.parametrize("capability", [80, 90])
def test_kernel_compiles_without_spills(capability: int, tmp_path: Path) -> None:
    from camshaft.digest import kernel

    types = {"words": "*i32", "factors": "*i64", "sums": "*i64", "count": "i32"}
    constants = {"BLOCK": BLOCK, "STEP": kernel.STEP}
    used = resources(kernel._block_sums_kernel, types, constants, {"num_warps": 8}, capability, tmp_path)
    assert used["STACK"] == 0, used
