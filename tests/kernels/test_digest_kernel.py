"""The kernel of checksums, run by Triton's interpreter and compiled, compared with exact sums in torch."""

from pathlib import Path

import pytest
import torch
from support.compiled import resources
from support.emulated_cuda import DEVICE, emulated_cuda

from camshaft.digest import BLOCK, Digests, block_factors, checksums, digest

SHAPES = [(), (2,), (7, 11), (3, BLOCK // 2 + 4), (4 * BLOCK,)]


@pytest.mark.interpreted
def test_sums_are_exact(interpreted: None) -> None:
    from camshaft.digest.kernel import block_sums

    random = torch.Generator().manual_seed(0)
    words = [0, 1, BLOCK - 1, 0, BLOCK, 2 * BLOCK + 5]
    tensors = [torch.randint(-(2**31), 2**31, (count,), generator=random).int() for count in words]
    factors = block_factors(torch.device("cpu"))
    sums, blocks = block_sums(tensors, factors)
    for tensor, actual in zip(tensors, sums.split(blocks), strict=True):
        padded = torch.nn.functional.pad(tensor.long(), (0, -len(tensor) % BLOCK)).view(-1, BLOCK)
        assert torch.equal(actual, (padded * factors).sum(dim=1)), len(tensor)


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


@pytest.mark.interpreted
def test_checksum_of_a_cast_equals_that_of_the_cast_tensor(interpreted: None) -> None:
    random = torch.Generator().manual_seed(0)
    tensors = {str(shape): torch.randn(shape, generator=random) for shape in SHAPES}
    tensors["special"] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-40, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8])
    with emulated_cuda() as device:
        digests = Digests()
        for name, tensor in tensors.items():
            digests.add(name, tensor.to(DEVICE), torch.bfloat16)
        assert digests.numbers() == {name: digest(tensor.bfloat16()) for name, tensor in tensors.items()}
        assert device.launches["triton._block_sums_kernel"] == 1  # one launch for all


@pytest.mark.interpreted
def test_a_full_queue_is_computed(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "QUEUE_BYTES", 1024)
    tensors = {str(number): torch.full((128,), float(number)) for number in range(5)}
    with emulated_cuda() as device:
        digests = Digests()
        for name, tensor in tensors.items():
            digests.add(name, tensor.to(DEVICE))
        assert device.launches["triton._block_sums_kernel"] == 2  # of two tensors each
        expected = {name: digest(tensor) for name, tensor in tensors.items()}
        assert digests.numbers() == expected
        live = Digests(live=True)
        for name, tensor in tensors.items():
            live.add(name, tensor.to(DEVICE))
        assert (live.numbers(), device.launches["triton._block_sums_kernel"]) == (expected, 4)


@pytest.mark.compiled
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("capability", [80, 90])
def test_kernel_compiles_without_spills(capability: int, cast: bool, tmp_path: Path) -> None:
    from camshaft.digest import kernel

    types = {"table": "*i64", "owners": "*i64", "factors": "*i64", "sums": "*i64"}
    constants = {"BLOCK": BLOCK, "STEP": kernel.STEP, "CAST": cast}
    used = resources(kernel._block_sums_kernel, types, constants, {"num_warps": 4}, capability, tmp_path)
    assert used["STACK"] == 0, used
