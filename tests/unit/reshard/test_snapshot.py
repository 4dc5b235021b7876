"""Snapshots of weights in host memory, and the checksums that find a snapshot that is torn, stale or damaged."""

import mmap
import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.tiny import tiny_folder
from torch import Tensor

from camshaft.config import EngineConfig, EngineModel, RolloutEngineConfig
from camshaft.digest import digest
from camshaft.engine.single import SingleDeviceEngine
from camshaft.errors import RolloutError
from camshaft.reshard import Publisher, Snapshot, receive, snapshot
from camshaft.reshard.snapshot import SnapshotMemory
from camshaft.rollout.builtin.rollout import TorchRollout
from camshaft.rollout.weights.buckets import Bucket
from camshaft.rollout.weights.transport import open_memory

NORM = "model.norm.weight"


@pytest.fixture
def engine() -> SingleDeviceEngine:
    engine = SingleDeviceEngine(EngineConfig(model=EngineModel(path=str(tiny_folder()))))
    engine.init_model()
    return engine


def build(dtype: str = "float32") -> TorchRollout:
    return TorchRollout(RolloutEngineConfig(model_path=str(tiny_folder()), dtype=dtype))  # pyright: ignore


@torch.no_grad()
def train(engine: SingleDeviceEngine) -> None:
    for parameter in engine.module.parameters():
        parameter.add_(0.5)


def publisher_of(engine: SingleDeviceEngine, rollout: TorchRollout) -> Publisher:
    publisher = Publisher(engine, writes=True)
    sources = publisher.source_dtypes()
    publisher.dtypes = {name: rollout.sync_dtype(name, torch.empty(0, dtype=d)) for name, d in sources.items()}
    return publisher


def publish(publisher: Publisher, version: int) -> Snapshot:
    published = publisher.publish(version)
    assert published is not None
    return published


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("segment", [snapshot.SEGMENT, 4 * mmap.ALLOCATIONGRANULARITY])
def test_a_rollout_loads_what_was_published(
    engine: SingleDeviceEngine, segment: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "SEGMENT", segment)
    rollout = build(dtype)
    publisher = publisher_of(engine, rollout)
    for version in (3, 4):
        expected = {
            name: weight.detach().to(getattr(torch, dtype), copy=True) for name, weight in engine.named_weights()
        }
        published = publish(publisher, version)
        assert published.digests == {name: digest(weight) for name, weight in expected.items()}
        train(engine)  # does not change what was published
        sync = receive(published, rollout)
        assert rollout.version == sync.version == version
        loaded = dict(rollout.model.hf.named_parameters())
        assert all(torch.equal(loaded[name], expected[name]) for name in loaded)
        assert sync.bytes == sum(weight.nbytes for weight in expected.values())
        assert 0 < published.check_seconds < sync.check_seconds
    assert len(publisher._memories[0].segments) == (2 if segment == 2**26 else sync.bytes // segment + 2)


def test_only_one_rank_of_a_machine_writes(engine: SingleDeviceEngine) -> None:
    publisher = publisher_of(engine, build())
    publisher.writes = False
    assert publisher.publish(1) is None
    assert not publisher._memories


class WritesNothing(SnapshotMemory):
    """Announce weights without writing them."""

    def __init__(self, memory: SnapshotMemory, buckets: list[Bucket]):
        self._memory, self.buckets = memory._memory, buckets

    def write(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[Bucket]:
        list(weights)
        yield from self.buckets


def test_a_stale_snapshot_is_found(engine: SingleDeviceEngine) -> None:
    rollout = build()
    publisher = publisher_of(engine, rollout)
    first = publish(publisher, 1)
    receive(first, rollout)
    train(engine)
    publisher._memories.append(WritesNothing(publisher._memories.pop(), first.buckets))
    with pytest.raises(RolloutError, match=r"weight sync 2: .*model\.embed_tokens\.weight.*: stale, unchanged"):
        receive(publish(publisher, 2), rollout)


def test_a_snapshot_that_was_overwritten_is_found(engine: SingleDeviceEngine) -> None:
    rollout = build()
    publisher = publisher_of(engine, rollout)
    first = publish(publisher, 1)
    train(engine)
    publish(publisher, 2)  # into the memory that the reader of version 1 still needs
    with pytest.raises(RolloutError, match=r"weight sync 1: .*different from the weights sent by the engine"):
        receive(first, rollout)


@pytest.mark.parametrize("snapshots", [1, 2, 3])
def test_a_publication_overwrites_the_oldest_snapshot(engine: SingleDeviceEngine, snapshots: int) -> None:
    rollout = build()
    publisher = publisher_of(engine, rollout)
    publisher.snapshots = snapshots
    published: list[Snapshot] = []
    for version in range(5):
        published.append(publish(publisher, version))
        train(engine)
        for readable in published[-snapshots:]:  # in any order, and as often as wanted
            assert receive(readable, rollout).version == readable.version
        for overwritten in published[:-snapshots]:
            with pytest.raises(RolloutError, match="differ from those of the engine"):
                receive(overwritten, rollout)
    assert len({snapshot.memory["inode"] for snapshot in published}) == snapshots


def test_a_damaged_weight_is_named(engine: SingleDeviceEngine) -> None:
    rollout = build()
    published = publish(publisher_of(engine, rollout), 1)
    piece = next(piece for bucket in published.buckets for piece in bucket.pieces if piece.name == NORM)
    open_memory(published.memory)[piece.at] ^= 1
    with pytest.raises(RolloutError, match=rf"engine\. {NORM}: different from the weights sent"):
        receive(published, rollout)


def test_a_rollout_reads_only_snapshots_of_its_machine(engine: SingleDeviceEngine) -> None:
    rollout = build()
    elsewhere = replace(publish(publisher_of(engine, rollout), 1), machine="another")
    with pytest.raises(RolloutError, match="the published weights are on machine another, and this rollout is on"):
        receive(elsewhere, rollout)


def test_a_rollout_on_another_machine_reads_a_portable_snapshot(
    engine: SingleDeviceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "SEGMENT", 4 * mmap.ALLOCATIONGRANULARITY)
    rollout = build()
    publisher = publisher_of(engine, rollout)
    published = publish(publisher, 1)
    portable = replace(pickle.loads(pickle.dumps(publisher.portable())), machine="another")
    assert published.num_bytes <= portable.content.nbytes < published.num_bytes + snapshot.SEGMENT
    receive(portable, rollout)
    assert rollout.weight_digests() == published.digests
    portable.content[0] ^= 1
    with pytest.raises(RolloutError, match="different from the weights sent"):
        receive(portable, rollout)
