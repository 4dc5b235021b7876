"""A digest changes with every bit, its position, the shape and the dtype, and with nothing else."""

import hashlib
import struct

import pytest
import torch
from torch import Tensor

from camshaft.digest import BLOCK, Digests, digest
from camshaft.digest import checksums as module


def in_plain_python(tensor: Tensor) -> int:
    """Compute the definition with Python integers."""
    data = b"".join(bytes(element.view(torch.uint8).tolist()) for element in tensor.flatten()[:, None])
    data += bytes(-len(data) % (4 * BLOCK))
    drawn = hashlib.shake_128(b"the digest of a tensor").digest(8 * BLOCK)
    factors = [number | 1 for number in struct.unpack(f"<{BLOCK}Q", drawn)]
    words = struct.unpack(f"<{len(data) // 4}i", data)
    hasher = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=8)
    for start in range(0, len(words), BLOCK):
        block = zip(words[start : start + BLOCK], factors, strict=True)
        hasher.update(struct.pack("<Q", sum(word * factor for word, factor in block) % 2**64))
    return int.from_bytes(hasher.digest(), "little")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (7, 11), (3, BLOCK // 2 + 5)])
def test_a_digest_matches_its_definition_in_python(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    assert digest(tensor) == in_plain_python(tensor)


def test_every_bit_counts() -> None:
    tensor = torch.randn(5, 3, generator=torch.Generator().manual_seed(2)).bfloat16()
    digests = {digest(tensor)}
    for byte in range(30):
        for bit in range(8):
            other = tensor.clone()
            other.view(torch.uint8).view(-1)[byte] ^= 1 << bit
            digests.add(digest(other))
    assert len(digests) == 1 + 30 * 8


def test_transmission_errors_change_the_digest() -> None:
    tensor = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    rows, columns = tensor.clone(), tensor.clone()
    rows[[3, 40]] = rows[[40, 3]]
    columns[:, [0, 1]] = columns[:, [1, 0]]
    wrong = {
        "transposed": tensor.t(),
        "rows swapped": rows,
        "columns swapped": columns,
        "negated": -tensor,
        "of the last step": tensor * (1 + 2**-23),
        "zero": torch.zeros_like(tensor),
        "other shape": tensor.view(32, 128),
        "other dtype": tensor.view(torch.int32),
        "less": tensor[:-1],
        "shifted": tensor.roll(1),
        "doubles negated": -tensor.double(),
        "doubles": tensor.double(),
    }
    assert len({digest(tensor), *map(digest, wrong.values())}) == 1 + len(wrong)


def test_digests_distinguish_trailing_zeros_and_empty_tensors() -> None:
    tensors = [torch.zeros(shape) for shape in [(0,), (0, 1), (1,), (2,), (BLOCK,), (BLOCK + 1,)]]
    assert len(set(map(digest, tensors))) == len(tensors)


def test_strides_and_offsets_do_not_count() -> None:
    base = torch.randn(40, 6, 50, generator=torch.Generator().manual_seed(4)).bfloat16()
    views = [base.transpose(0, 2), base[1:, ::2], base[:, :, 1:].permute(1, 2, 0), base.view(-1)[1:], base.view(-1)[3:]]
    views += [base[0, 0].expand(7, 50), base[:, :, 0], base.mT]
    for view in views:
        assert digest(view) == digest(view.contiguous()), (view.shape, view.stride())


def test_large_tensors_are_read_in_chunks_that_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(300, 1001, generator=torch.Generator().manual_seed(5))
    turned = tensor.t().contiguous().t()
    long_rows = torch.randn(2, 5 * BLOCK, generator=torch.Generator().manual_seed(6)).t().contiguous().t()
    digests = digest(tensor), digest(turned), digest(long_rows)
    assert digests[0] == digests[1]
    monkeypatch.setitem(module.CHUNK, "cpu", BLOCK)
    assert (digest(tensor), digest(turned), digest(long_rows)) == digests
    assert digest(long_rows.contiguous()) == digests[2]
    monkeypatch.setitem(module.CHUNK, "cpu", 2**24)
    assert (digest(tensor), digest(turned), digest(long_rows)) == digests


def test_weights_that_are_trained_have_digests_too() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    assert digest(weight) == digest(torch.ones(4))
    with torch.no_grad():
        weight += 1
    assert digest(weight) == digest(torch.full((4,), 2.0))


def test_many_digests_equal_single_ones_although_the_tensors_change() -> None:
    tensors = {f"{size}": torch.randn(size) for size in (0, 1, 70_000, 3)}
    expected = {name: digest(tensor) for name, tensor in tensors.items()}
    digests = Digests()
    for name, tensor in tensors.items():
        digests.add(name, tensor)
        tensor.zero_()
    assert digests.numbers() == expected
