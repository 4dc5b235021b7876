"""The kernel of checksums on a GPU, compared with the checksums of a CPU and with torch's own cast."""

import pytest
import torch

from camshaft.digest import BLOCK, Digests, digest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="requires CUDA")]


def test_checksums_equal_those_of_the_cpu() -> None:
    random = torch.Generator().manual_seed(0)
    shapes = [(), (2,), (7, 11), (1001, 1000), (4 * BLOCK,), (3, BLOCK // 2 + 4)]
    tensors = {str(shape): torch.randn(shape, generator=random).to(dtype)
               for dtype in (torch.float32, torch.bfloat16) for shape in shapes}  # fmt: skip
    digests = Digests()
    for name, tensor in tensors.items():
        digests.add(name, tensor.cuda())
    assert digests.numbers() == {name: digest(tensor) for name, tensor in tensors.items()}


def test_checksum_of_a_cast_equals_that_of_the_cast_tensor() -> None:
    """Every exponent, ties of rounding, and NaN, which torch casts to other bits on a GPU than on a CPU."""
    random = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**20,), generator=random, dtype=torch.int64).int()
    tensors = {"bits": bits.view(torch.float32), "ties": (bits & ~0x7FFF).view(torch.float32)}
    tensors |= {
        "nan": torch.tensor([torch.nan, -torch.nan, 1.0, torch.inf]),
        "odd": torch.randn(1001, generator=random),
    }
    digests = Digests()
    for name, tensor in tensors.items():
        digests.add(name, tensor.cuda(), torch.bfloat16)
    assert digests.numbers() == {name: digest(tensor.cuda().bfloat16()) for name, tensor in tensors.items()}
