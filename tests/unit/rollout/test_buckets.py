"""Weights packed into buckets of any size are restored unchanged."""

import json
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from camshaft.errors import RolloutError
from camshaft.rollout.weights.buckets import Assembler, Piece, pack_buckets

WEIGHTS: dict[str, Tensor] = {
    "matrix": torch.randn(7, 5, generator=torch.Generator().manual_seed(0)),
    "half": torch.randn(9, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "strided": torch.arange(10.0)[::5][:1],
    "nothing": torch.empty(0, 4),
    "mask": torch.tensor([True, False, True]),
    "turned": torch.randn(6, 4, generator=torch.Generator().manual_seed(2)).t(),
    "trained": torch.nn.Parameter(torch.ones(3)),
}


def round_trip(weights: dict[str, Tensor], size: int) -> Iterator[tuple[str, Tensor]]:
    """Pack the weights, transfer pieces as JSON and buckets as bytes, and restore the tensors."""
    buffers, assembler = [torch.empty(size, dtype=torch.uint8) for _ in range(2)], Assembler("cpu")
    for number, bucket in enumerate(pack_buckets(weights.items(), buffers)):
        assert 0 <= bucket.num_bytes <= size
        assert bucket.buffer == number % 2
        received = json.loads(json.dumps([vars(piece) for piece in bucket.pieces]))
        sent = buffers[bucket.buffer][: bucket.num_bytes].clone()
        buffers[bucket.buffer].fill_(255)
        yield from assembler.unpack([Piece(**{**piece, "shape": tuple(piece["shape"])}) for piece in received], sent)
    assembler.finish()


@given(size=st.integers(1, 400), order=st.permutations(list(WEIGHTS)))
def test_any_bucket_size_restores_all_tensors_in_order(size: int, order: list[str]) -> None:
    restored = list(round_trip({name: WEIGHTS[name] for name in order}, size))
    assert [name for name, _ in restored] == order
    for name, tensor in restored:
        assert tensor.dtype == WEIGHTS[name].dtype
        assert torch.equal(tensor, WEIGHTS[name]), name


def test_no_weights_need_no_bucket() -> None:
    assert list(pack_buckets([], [torch.empty(8, dtype=torch.uint8)])) == []


def test_small_tensors_share_a_bucket_and_large_ones_are_split() -> None:
    buffer = torch.empty(64, dtype=torch.uint8)
    small = [(str(i), torch.zeros(4)) for i in range(8)]
    assert [len(bucket.pieces) for bucket in pack_buckets(small, [buffer])] == [4, 4]
    large = [("large", torch.zeros(40))]
    spans = [(bucket.pieces[0].start, bucket.num_bytes) for bucket in pack_buckets(large, [buffer])]
    assert spans == [(0, 64), (64, 64), (128, 32)]


def test_restored_tensors_own_their_memory() -> None:
    buffer = torch.empty(64, dtype=torch.uint8)
    (bucket,) = pack_buckets([("ones", torch.ones(4))], [buffer])
    ((_, tensor),) = Assembler("cpu").unpack(bucket.pieces, buffer)
    buffer.zero_()
    assert torch.equal(tensor, torch.ones(4))


def buckets_of_eight() -> list[tuple[list[Piece], Tensor]]:
    buffer = torch.empty(8, dtype=torch.uint8)
    buckets = pack_buckets([("w", torch.arange(6.0))], [buffer])
    return [(bucket.pieces, buffer[: bucket.num_bytes].clone()) for bucket in buckets]


def assemble(buckets: list[tuple[list[Piece], Tensor]]) -> None:
    assembler = Assembler("cpu")
    for bucket in buckets:
        list(assembler.unpack(*bucket))
    assembler.finish()


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 1], "'w' is incomplete: received 16 of 24 bytes"),
        ([0, 2], "received weight 'w' at byte 16, expected 'w' at byte 8"),
        ([1, 2], "received weight 'w' at byte 8, expected a new weight at byte 0"),
        ([0, 1, 1], "received weight 'w' at byte 8, expected 'w' at byte 16"),
    ],
)
def test_lost_or_duplicate_bucket_is_named(order: list[int], message: str) -> None:
    buckets = buckets_of_eight()
    with pytest.raises(RolloutError, match=message):
        assemble([buckets[number] for number in order])


def test_device_is_synchronized_before_each_side_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The meta device records the order: both sides synchronize before they hand a bucket on."""
    events: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: events.append(f"{device} is done"))
    assembler = Assembler("meta")
    buffers = [torch.empty(16, dtype=torch.uint8, device="meta") for _ in range(2)]
    for bucket in pack_buckets([("w", torch.ones(6, device="meta"))], buffers):
        events.append("told")
        for _ in assembler.unpack(bucket.pieces, buffers[bucket.buffer][: bucket.num_bytes]):
            events.append("loaded")
        events.append("taken")
    one = ["meta is done", "told", "meta is done", "taken"]
    assert events == [*one, *one[:2], "loaded", *one[2:]]
