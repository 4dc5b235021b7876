"""A weight sync gathers a bucket while the generator loads the previous one, with two buckets in memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_servers import fake_server
from support.forked_python import fork_python
from support.gated_rollouts import FOLDER, GATED, LAST, Progress, WorkerReplies, numbered_weights
from support.tiny import tiny_folder
from torch import Tensor

from camshaft.config import RolloutEngineConfig
from camshaft.config.engine import EngineModel
from camshaft.digest import digest
from camshaft.errors import RolloutError
from camshaft.models.loader import stored_weights
from camshaft.planning.tensor_memory import TensorMemory
from camshaft.rollout import build_rollout
from camshaft.rollout.process import rollout as process
from camshaft.rollout.weights.buckets import Assembler, pack_buckets
from camshaft.rollout.weights.transport import BUFFERS, SharedMemory

pytestmark = pytest.mark.timeout(240)

MEGABYTE = 2**20
STATE = {"identity": "a", "version": None, "logprobs_mode": "processed_logprobs", "generation_config": "vllm",
         "max_model_len": 1024, "dtype": "float32", "device": ""}  # fmt: skip


def model_weights() -> tuple[str, list[tuple[str, Tensor]]]:
    """Return a model and its weights. The first `NUM_LARGE` are an eighth larger than a bucket of a megabyte."""
    folder = str(tiny_folder(hidden=128, intermediate=2304))
    weights = sorted(stored_weights(EngineModel(path=folder)), key=lambda weight: -weight[1].nbytes)
    assert [weight.nbytes for _, weight in weights[:NUM_LARGE]] == [MEGABYTE * 9 // 8] * NUM_LARGE
    return folder, weights


NUM_LARGE = 6


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of rollouts, because importing torch takes longer than the tests."""
    monkeypatch.setattr(process, "start_python", fork_python)


@pytest.fixture
def progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Progress:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(LAST, str(NUM_LARGE - 1))
    return Progress(tmp_path, NUM_LARGE - 1)


def test_a_process_loads_a_bucket_while_the_next_one_is_gathered(progress: Progress) -> None:
    folder, weights = model_weights()
    config = RolloutEngineConfig(model_path=folder, update_weights_bucket_megabytes=1, engine_kwargs={"rollout": GATED})
    rollout = build_rollout("process", config)
    rollout.load_weights(progress.gathered(weights))
    assert rollout.weight_digests() == {name: digest(weight) for name, weight in weights}


def test_the_first_sync_asks_for_dtypes_between_buckets() -> None:
    folder, weights = model_weights()
    rollout = build_rollout("process", RolloutEngineConfig(model_path=folder, update_weights_bucket_megabytes=1))
    cast = ((name, weight.to(rollout.sync_dtype(name, weight))) for name, weight in weights)
    rollout.load_weights(cast)
    assert rollout.weight_digests() == {name: digest(weight) for name, weight in weights}


def server_rollout(url: str, folder: str, **options: Any) -> Any:
    kwargs = {"vllm_server_base_url": url, **options}
    return build_rollout(
        "server", RolloutEngineConfig(model_path=folder, update_weights_bucket_megabytes=1, engine_kwargs=kwargs)
    )


@pytest.mark.parametrize("transport", ["shared_memory", "broadcast", "device_broadcast"])
def test_a_server_loads_a_bucket_while_the_next_one_is_gathered(transport: str, progress: Progress) -> None:
    folder, weights = model_weights()
    worker = WorkerReplies(dict(STATE), progress)
    with fake_server(worker) as fake:
        rollout = server_rollout(fake.url, folder, weight_transfer=transport)
        rollout.load_weights(progress.gathered(weights))
        assert rollout.weight_digests() == {name: digest(weight) for name, weight in weights}
    assert all(torch.equal(worker.weights[name], weight) for name, weight in weights)
    assert [handle["means"] for handle in worker.handles] == [transport.removeprefix("device_")]


def test_an_error_of_a_bucket_ends_the_sync(progress: Progress) -> None:
    """The error of a bucket is raised although the next one is already gathered; the weights are then invalid."""
    folder, weights = model_weights()

    class Rejects(WorkerReplies):
        def bucket(self, **_: Any) -> None:
            raise RolloutError("this bucket is broken")

    with fake_server(Rejects(dict(STATE))) as fake:
        rollout = server_rollout(fake.url, folder)
        with pytest.raises(RolloutError, match="this bucket is broken"):
            rollout.load_weights(progress.gathered(weights))
        assert not rollout.has_weights()
    assert progress.has("gathered", 1)
    assert not progress.has("gathered", len(weights) - 1)


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_no_more_buckets_than_buffers_are_in_memory(num_buffers: int) -> None:
    size, count = 2**18, 12
    weights = dict(numbered_weights(count, size // 2))

    def gathered() -> Iterator[tuple[str, Tensor]]:
        return ((name, weight + 0) for name, weight in weights.items())  # a new tensor, as of a collective

    with TensorMemory() as memory:
        buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(num_buffers)]
        numbers = [bucket.buffer for bucket in pack_buckets(gathered(), buffers)]
        # The last weight lives until the next one exists.
        assert num_buffers * size < memory.peak <= num_buffers * size + 2 * (size // 2)
    assert numbers == [number % num_buffers for number in range(count // 2)]


def test_a_late_read_still_gets_the_bucket() -> None:
    """The first bucket is read after the second one was packed."""
    sender, weights = SharedMemory(1024), numbered_weights(4, 1024)
    stream = pack_buckets(weights, sender.buffers)
    assert len(sender.buffers) == BUFFERS == 2
    first, second = next(stream), next(stream)
    assert (first.buffer, second.buffer) == (0, 1)
    for bucket, (name, weight) in zip((first, second), weights, strict=False):
        ((restored_name, restored),) = Assembler("cpu").unpack(bucket.pieces, sender.buffers[bucket.buffer])
        assert restored_name == name
        assert torch.equal(restored, weight)
