"""Weight transport between real processes: shared memory, broadcast, and killed peers."""

import base64
import json
import os
import pickle
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.weight_peers import Peer, receive_weights, send_by_broadcast, share_memory

from camshaft.digest import digest
from camshaft.errors import RolloutError
from camshaft.rollout.weights import transport
from camshaft.rollout.weights.buckets import pack_buckets
from camshaft.rollout.weights.transport import (
    Broadcast,
    Sender,
    SharedMemory,
    decode_device_handle,
    encode_device_handle,
    open_receiver,
    open_sender,
)

pytestmark = pytest.mark.timeout(120)

WEIGHTS = {f"w{i}": torch.randn(50, 13, generator=torch.Generator().manual_seed(i)) for i in range(5)}
SIZE = 3000
"""Bytes of a bucket: one tensor is 2600."""


@pytest.fixture(scope="module")
def pool() -> Iterator[list[Peer]]:
    """Two receivers; a test that ended one has it replaced."""
    started = [Peer(receive_weights, 1), Peer(receive_weights, 2)]
    assert [other.hear() for other in started] == ["ready", "ready"]
    yield started
    for other in started:
        other.end()


@pytest.fixture
def others(pool: list[Peer]) -> list[Peer]:
    for rank, other in enumerate(pool, start=1):
        if not other.process.is_alive():
            pool[rank - 1] = Peer(receive_weights, rank)
            assert pool[rank - 1].hear() == "ready"
    return pool


def meet(sender: Sender, others: list[Peer]) -> None:
    for other in others:
        other.tell(sender.handle())
    sender.connect()
    for other in others:
        assert other.hear() == "open"


def send_all(sender: Sender, others: list[Peer]) -> dict[str, int]:
    """Return the receivers' reports."""
    reports: dict[str, int] = {}
    for bucket in pack_buckets(WEIGHTS.items(), sender.buffers):
        for other in others:
            other.tell({"pieces": bucket.pieces, "buffer": bucket.buffer, "used": bucket.num_bytes})
        sender.push(bucket.buffer, bucket.num_bytes)
        answers = [other.hear() for other in others]
        assert all(answer == answers[0] for answer in answers)
        reports |= answers[0]
    return reports


DIGESTS = {name: digest(weight) for name, weight in WEIGHTS.items()}


def test_shared_memory_transfers_repeatedly(others: list[Peer]) -> None:
    sender = open_sender(torch.device("cpu"), SIZE)
    meet(sender, others)
    assert send_all(sender, others) == DIGESTS
    assert send_all(sender, others) == DIGESTS
    place = os.readlink(f"/proc/self/fd/{sender.handle()['file']}")
    assert place.startswith("/memfd:"), "a file would have to be removed"


def test_broadcast_reaches_all_receivers(others: list[Peer]) -> None:
    sender = Broadcast(torch.device("cpu"), SIZE, "127.0.0.1", receivers=2)
    meet(sender, others)
    assert send_all(sender, others) == DIGESTS
    assert send_all(sender, others) == DIGESTS


def push_often(sender: Sender, other: Peer) -> None:
    """Send repeatedly, because small messages are sent before a missing receiver is detected."""
    for _ in range(50):
        other.tell({"pieces": [], "buffer": 0, "used": SIZE})
        sender.push(0, SIZE)


@pytest.mark.alone
def test_killed_receiver_ends_broadcast_within_seconds(others: list[Peer]) -> None:
    sender = Broadcast(torch.device("cpu"), SIZE, "127.0.0.1", receivers=2, seconds=600)
    meet(sender, others)
    others[1].end()
    with pytest.raises(RolloutError, match="weight broadcast failed"):
        push_often(sender, others[0])
    others[0].end()


@pytest.mark.alone
def test_stopped_receiver_ends_broadcast_after_its_timeout(others: list[Peer]) -> None:
    sender = Broadcast(torch.device("cpu"), 2**24, "127.0.0.1", seconds=2)
    meet(sender, others[:1])
    os.kill(others[0].pid, signal.SIGSTOP)
    with pytest.raises(RolloutError, match="weight broadcast failed"):
        sender.push(0, 2**24)
    others[0].end()


def test_broadcast_without_receivers_times_out() -> None:
    sender = Broadcast(torch.device("cpu"), SIZE, "127.0.0.1", seconds=1)
    with pytest.raises(RolloutError, match="2 processes of the weight broadcast did not connect"):
        sender.connect()


@pytest.mark.alone
def test_killed_sender_ends_receiver_within_seconds() -> None:
    sender = Peer(send_by_broadcast, SIZE)
    try:
        receiver = open_receiver(sender.hear())
        assert sender.hear() == "met"
    finally:
        sender.end()
    with pytest.raises(RolloutError, match="weight broadcast failed"):
        receiver.pull(0, SIZE)


def test_memory_of_an_ended_process_is_an_error() -> None:
    sender = Peer(share_memory, 2**20)
    handle = sender.hear()
    receiver = open_receiver(handle)
    sender.end()
    assert bool((receiver.pull(1, 2**20) == 7).all()), "memory stays until the last mapping is closed"
    with pytest.raises(RolloutError, match=f"cannot open the shared weights of process {handle['process']}"):
        open_receiver(handle)


def test_reused_file_descriptor_is_detected() -> None:
    first = SharedMemory(8)
    handle = first.handle()
    first.close()
    second = SharedMemory(8)
    assert second.handle()["file"] == handle["file"], "a free file number is reused"
    with pytest.raises(RolloutError, match="not the memory that the sender announced"):
        open_receiver(handle)


def test_close_frees_the_memory() -> None:
    def shared_bytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssShmem"))

    before, sender = shared_bytes(), SharedMemory(2**26)
    sender.buffers[0].fill_(1)
    assert shared_bytes() - before >= 2**26
    sender.close()
    assert shared_bytes() - before < 2**20


def test_unreachable_sender_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"means": "broadcast", "host": "127.0.0.1", "port": port, "world": 2, "size": 8, "seconds": 1}
    with pytest.raises(RolloutError, match=f"sender of the weights at 127.0.0.1:{port} does not answer"):
        open_receiver(settings)


def test_unknown_transport_is_named() -> None:
    with pytest.raises(RolloutError, match="unknown weight transport 'pigeon'"):
        open_receiver({"means": "pigeon"})


# -- handles of device memory ----------------------------------------------------------------------


class Planted:
    """An object whose pickle writes a file when it is loaded."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def test_a_planted_pickle_is_not_loaded(tmp_path: Path) -> None:
    """The earlier handles were pickles, which a client of the server's port can send."""
    planted = base64.b64encode(pickle.dumps(Planted(tmp_path / "RAN"))).decode()
    valid = encode_device_handle(SHARED)
    for handle in (
        {"means": "device_memory", "tensor": planted},
        valid | {"device": planted},
        {name: planted if isinstance(value, str) and name != "means" else value for name, value in valid.items()},
    ):
        with pytest.raises((RolloutError, RuntimeError, AssertionError)):  # the last needs a device
            open_receiver(handle)
    assert not (tmp_path / "RAN").exists()


SHARED = (
    torch.Tensor, torch.Size([3000]), (1,), 0, torch.UntypedStorage, torch.uint8, 1, b"\x00handle", 4096, 512, False,
    b"reference", 3, b"event", True,
)  # fmt: skip
"""Arguments with which torch opens a shared vector, as returned by `reduce_tensor` on a CUDA device."""


@pytest.mark.parametrize(
    ("setting", "changes"), [("expandable_segments:True", ["False", "True"]), ("expandable_segments:False", [])]
)
def test_shared_device_memory_is_not_in_expandable_segments(
    setting: str, changes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    allocate = torch.empty
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"max_split_size_mb:64, {setting}")
    monkeypatch.setattr(transport, "release_cache", lambda device: calls.append("cache released"))
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", calls.append)

    def on_host(size: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
        calls.append(f"allocated on {device}")
        return allocate(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", on_host)
    open_sender(torch.device("cuda"), 8)
    settings = [f"max_split_size_mb:64,expandable_segments:{value}" for value in changes]
    assert calls == ["cache released"] * bool(changes) + [*settings[:1], "allocated on cuda", *settings[1:]]


def test_a_device_handle_is_json() -> None:
    assert decode_device_handle(json.loads(json.dumps(encode_device_handle(SHARED)))) == SHARED


@pytest.mark.parametrize("change", [{"storage_handle": "not base64!"}, {"device": None}, {"event_handle": 3}])
def test_an_invalid_device_handle_is_an_error(change: dict[str, Any]) -> None:
    with pytest.raises(RolloutError, match="the handle of shared device memory is invalid"):
        decode_device_handle(encode_device_handle(SHARED) | change)
