"""Samples from processes of their own: the same tokens, while models are trained, and after the death of a process."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.tinker_clients import (
    Client,
    ClientModel,
    Failed,
    InProcessRole,
    RunningServer,
    datum,
    read_samples,
    running_server,
)
from support.tiny import tiny_folder

from camshaft.config.serve import ServeConfig, read_serve_config
from camshaft.controller.process_pool import ProcessPool
from camshaft.errors import ConfigError, WorkerError
from camshaft.reshard import Snapshot, SnapshotMemory
from camshaft.roles.served import ServedWorker
from camshaft.roles.versions import LostWeightsError, PublishedVersions, ReceivedVersions
from camshaft.rollout import BaseRollout, ExpectedWeights, RolloutEngineConfig, build_rollout
from camshaft.service import sampling as samplers
from camshaft.service.errors import CommandError
from camshaft.service.process import RoleProcess

DATA = [datum([5, 6, 7, 8, 9]), datum([10, 12, 14], weights=[0.5, -2.0]), datum([20, 21, 22, 23])]
PROMPT = [5, 6]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    with running_server(folder, sampling_ranks=1, max_models=3, max_versions=2, save_every=2) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    yield server.client()
    server.finish()


def train(model: ClientModel) -> None:
    model.run(DATA)
    model.update(learning_rate=0.05)


def all_samples(client: Client) -> list[Any]:
    """Return samples of base weights, of five versions of an adapter, and of saved weights, in another order."""
    model, samplers = client.create_model(0, seed=3), [client.sampler(50, base_model="tiny")]
    for step in range(5):  # more versions than are kept in memory
        samplers.append(model.publish(step))
        train(model)
    path = model.call("save_weights_for_sampler", path="saved")["path"]
    samplers.append(client.sampler(51, model_path=path))
    full = client.create_model(1, rank=0)
    train(full)
    samplers.append(full.publish(60))
    return [client.sample(sampler, 1, PROMPT, 4, seed=1, stop=[]) for sampler in reversed(samplers)]


@pytest.fixture(scope="module")
def shared_samples(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Samples of a server on which one rank trains and samples."""
    with running_server(tmp_path_factory.mktemp("shared"), worker=ServedWorker, max_models=2) as server:
        return all_samples(server.client())


@pytest.mark.parametrize("ranks", [1, 2])
def test_samples_equal_those_of_a_rank_that_also_trains(tmp_path: Path, ranks: int, shared_samples: list[Any]) -> None:
    options: dict[str, Any] = {"ranks": ranks, "sampling_ranks": ranks, "max_models": 2, "max_versions": 2}
    with running_server(tmp_path, **options) as server:
        own = all_samples(server.client())
    assert len({tuple(samples[0].tokens) for samples in own}) > 4
    for samples, expected in zip(own, shared_samples, strict=True):
        for one, other in zip(samples, expected, strict=True):
            assert one.tokens == other.tokens
            # Two ranks add gradients in another order than one, so the weights of the later versions differ slightly.
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-6 if ranks == 1 else 1e-3)


class HeldWorker(ServedWorker):
    """A worker whose training waits until `end` is set."""

    began, end = threading.Event(), threading.Event()
    weights: PublishedVersions

    def __init__(self, config: ServeConfig):
        super().__init__(config)
        self.began.clear()
        self.end.clear()
        HeldWorker.weights = self.versions

    def forward_backward(self, model_id: str, rows: Any, loss: str, options: Any, forward_only: bool) -> Any:
        self.began.set()
        assert self.end.wait(60)
        return super().forward_backward(model_id, rows, loss, options, forward_only)


def test_samples_do_not_wait_for_training(tmp_path: Path) -> None:
    """Those of weights that are not published yet wait, and do not hold up the others."""
    with running_server(tmp_path, worker=HeldWorker, sampling_ranks=1) as server:
        client = server.client()
        model = client.create_model()
        sampler, other = model.publish(0), client.sampler(1, base_model="tiny")
        promise = model.train(model.next(), DATA)
        assert HeldWorker.began.wait(60)
        unpublished = client.submit_sample(other, 0, PROMPT, seed=1)
        for number in range(3):
            assert client.sample(sampler, number, PROMPT, 2, seed=1)
        futures = [server.service.futures.find(each["request_id"]) for each in (promise, unpublished)]
        assert all(future is not None and future.is_pending for future in futures)
        times = server.service.queue.times.now(client.session)
        assert times.train > 0 < times.sample
        HeldWorker.end.set()
        assert model.wait(promise)
        assert read_samples(client.wait(unpublished))


def test_a_postponed_sample_of_an_ended_session_leaves_no_weights(tmp_path: Path) -> None:
    with running_server(tmp_path, worker=HeldWorker, sampling_ranks=1) as server:
        client = server.client()
        model = client.create_model()
        model.train(model.next(), DATA)
        assert HeldWorker.began.wait(60)
        promise = client.submit_sample(client.sampler(0, base_model="tiny"), 0, PROMPT)
        future = server.service.futures.find(promise["request_id"])
        (name,) = server.service.versions.identifiers()
        ending = threading.Thread(target=server.finish)
        ending.start()
        while any(session.identifier == client.session for session in server.service.sessions):
            time.sleep(0.01)
        HeldWorker.end.set()
        ending.join()
        assert future is not None
        assert future.wait(60)  # with samples, or with the error that the session has ended
        assert name not in HeldWorker.weights


def test_weights_that_are_published_during_a_restart_are_kept(tmp_path: Path) -> None:
    """The server removes files that no sampler uses after the commands that are left in the log."""
    with running_server(tmp_path, worker=HeldWorker) as server:
        client = server.client()
        model = client.create_model()
        model.train(1, DATA)
        promise = model.command("save_weights_for_sampler", 2, sampling_session_seq_id=0)
        threading.Timer(1.0, HeldWorker.end.set).start()  # while the server waits for its command to end
    with running_server(tmp_path, worker=ServedWorker) as server:
        client = Client(server.url, server.key, "tiny", session=client.session)
        sampler = client.wait(promise)["sampling_session_id"]
        assert client.sample(sampler, 0, PROMPT)


@pytest.mark.parametrize("is_asleep", [False, True], ids=["sampling", "idle"])
def test_samples_survive_the_death_of_their_process(server: RunningServer, client: Client, is_asleep: bool) -> None:
    model = client.create_model()
    samplers = [model.publish(0), client.sampler(1, base_model="tiny")]
    before = [client.sample(sampler, 0, PROMPT, 3, seed=1, max_tokens=40, stop=[]) for sampler in samplers]
    assert server.sampler is not None
    promises = list[Any]()
    if not is_asleep:
        promises = [client.submit_sample(s, 1, PROMPT, 3, seed=1, max_tokens=40, stop=[]) for s in samplers]
    generation = server.role.generation
    kill(server.sampler)
    if is_asleep:
        promises = [client.submit_sample(s, 1, PROMPT, 3, seed=1, max_tokens=40, stop=[]) for s in samplers]
    assert [s.tokens for p in promises for s in read_samples(client.wait(p))] == [s.tokens for r in before for s in r]
    train(model)
    assert server.role.generation == generation  # training has noticed nothing


@pytest.mark.parametrize("is_noticed", [False, True])
def test_samples_survive_the_death_of_the_process_that_trains(
    server: RunningServer, client: Client, is_noticed: bool
) -> None:
    """The weights in its memory are published again by the restored model, those of the base model from its folder."""
    killed, undisturbed = client.create_model(0), client.create_model(1)
    samplers = list[str]()
    for step in range(3):
        samplers.append(killed.publish(step))
        for model in (killed, undisturbed):
            train(model)
    samplers.append(client.sampler(9, base_model="tiny"))
    before = [client.sample(sampler, 0, PROMPT, 3, seed=1) for sampler in samplers]
    kill(server.role)
    if is_noticed:
        assert undisturbed.forward(DATA)
    after = [client.sample(sampler, 1, PROMPT, 3, seed=1) for sampler in samplers]
    assert [s.tokens for r in after for s in r] == [s.tokens for r in before for s in r]
    assert killed.forward(DATA) == undisturbed.forward(DATA)


def kill(role: RoleProcess) -> None:
    pool = role._pool
    assert isinstance(pool, ProcessPool)
    pid = pool.processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


class Kept(ServedWorker):
    """A worker whose versions the test sees."""

    def __init__(self, config: ServeConfig):
        super().__init__(config)
        Kept.weights = self.versions

    weights: PublishedVersions


def test_weights_are_freed_with_their_session(tmp_path: Path) -> None:
    with running_server(tmp_path, worker=Kept, sampling_ranks=1, max_versions=1) as server:
        client = server.client()
        model = client.create_model()
        samplers = [model.publish(0), model.publish(1)]
        for sampler in samplers:
            assert client.sample(sampler, 0, PROMPT)
        names = server.service.versions.identifiers()
        assert len(Kept.weights.snapshots(names[1])) == 1
        assert all(name in Kept.weights for name in names)
        server.finish()
        assert not any(name in Kept.weights for name in names)
        assert not list(Kept.weights.folder.iterdir())


class OtherMachine(ServedWorker):
    """A worker that is not on the machine of the ranks that sample."""

    def snapshots(self, version: str) -> list[Snapshot]:
        return []


def test_weights_for_other_machines_are_in_files(tmp_path: Path) -> None:
    with running_server(tmp_path, worker=OtherMachine, sampling_ranks=1) as server:
        client = server.client()
        model = client.create_model()
        samplers = [client.sampler(0, base_model="tiny"), model.publish(1)]
        train(model)
        samplers.append(model.publish(2))
        rows = [client.sample(sampler, 0, PROMPT, 3, seed=1) for sampler in samplers]
        assert [sample.tokens for sample in rows[0]] == [sample.tokens for sample in rows[1]]
        assert rows[2] != rows[1]
        assert len(list(Path(server.config.folder, "versions").iterdir())) == 3


class Unreadable(ServedWorker):
    """A worker whose published weights no other process can read."""

    num_calls = 0

    def snapshots(self, version: str) -> list[Snapshot]:
        Unreadable.num_calls += 1
        memory = SnapshotMemory()
        snapshot = memory.snapshot(iter([("w", torch.zeros(1))]))
        memory.close()
        return [snapshot]


def test_weights_that_cannot_be_read_are_an_error_and_not_a_loop(tmp_path: Path) -> None:
    with running_server(tmp_path, worker=Unreadable, sampling_ranks=1) as server:
        client = server.client()
        sampler = client.create_model().publish(0)
        with pytest.raises(Failed, match=r"the weights \w+ are neither in memory nor in a file") as caught:
            client.sample(sampler, 0, PROMPT)
        assert caught.value.category == "server"
        assert Unreadable.num_calls == 2


# -- the processes, and their versions -------------------------------------------------------------------


class FailsToRestart(InProcessRole):
    """A role whose processes die while they are started for the second time."""

    num_starts = 0

    def _start(self) -> None:
        super()._start()
        self.num_starts += 1
        if self.num_starts == 2:
            raise WorkerError("rank 0 died: out of memory")


def test_processes_that_die_at_their_start_are_started_again(tmp_path: Path) -> None:
    config = read_serve_config([f"model={tiny_folder()}", f"folder={tmp_path}", "device=cpu"])
    with FailsToRestart(config) as role:
        role._stop()
        with pytest.raises(WorkerError, match="out of memory"):
            role.call("has_version", "v1")
        assert role.call("has_version", "v1") is False
        assert role.num_starts == 3


class Recorded:
    """A role that records its calls."""

    generation = 0

    def __init__(self) -> None:
        self.calls: list[str] = []

    def call(self, method: str, *arguments: Any) -> Any:
        self.calls.append(method)

    call_ranks = call


def test_weights_that_get_a_sampler_meanwhile_are_not_freed() -> None:
    role: Any = Recorded()
    versions = samplers.Versions(samplers.Roles(role, None, []), cast(Any, None), lambda _: None)
    version, threads, found = versions.of_base("tiny"), list[threading.Thread](), list[Any]()

    def find_unused() -> set[samplers.Version]:
        threads.append(threading.Thread(target=lambda: found.append(versions.of_base("tiny"))))
        threads[0].start()
        threads[0].join(0.3)
        assert not found  # it waits until the decision is made
        return {version}

    versions.forget(find_unused)
    threads[0].join()
    assert found[0] is not version
    assert role.calls == ["forget_version"]
    with pytest.raises(CommandError, match="the sampler or its session has ended"):
        version.call_ranks("sample")
    versions.forget(lambda: {version})  # of another session that has ended
    found[0].call_ranks("sample")
    assert role.calls == ["forget_version", "has_version", "publish_base", "sample"]


# -- received weights ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rollout() -> BaseRollout:
    return build_rollout("torch", RolloutEngineConfig(model_path=str(tiny_folder()), device="cpu", dtype="float32"))


def test_received_weights_are_in_memory_then_in_files_then_lost(tmp_path: Path, rollout: BaseRollout) -> None:
    published, received = PublishedVersions(tmp_path, max_in_memory=1), ReceivedVersions(tmp_path)
    weights = rollout.weight_digests
    digests = list[Any]()
    for number in range(2):
        tensors = [(name, torch.full(weight.meta.shape, float(number))) for name, weight in expected(rollout)]
        published.add(f"v{number}", iter(tensors))
        received.add(f"v{number}", published.snapshots(f"v{number}"))
        received.load(f"v{number}", rollout)
        digests.append(weights())
    assert not published.snapshots("v0")  # it is in a file
    for number in (0, 1):
        received.load(f"v{number}", rollout)
        assert weights() == digests[number]
    published.remove("v1")
    with pytest.raises(LostWeightsError, match="the weights v1 are neither in memory nor in a file"):
        received.load("v1", rollout)
    received.remove("v0")
    received.load("v0", rollout)  # known only by its file, such as on another machine
    assert weights() == digests[0] != digests[1]


def expected(rollout: BaseRollout) -> list[Any]:
    return list(ExpectedWeights.from_config(rollout.config).weights.items())


# -- the config ---------------------------------------------------------------------------------------


def test_devices_of_both_kinds_are_counted(tmp_path: Path) -> None:
    config = read_serve_config([f"model={tiny_folder()}", f"folder={tmp_path}", "device=cuda", "sampling_ranks=2"])
    with pytest.raises(ConfigError, match=r"ranks=1 and sampling_ranks=2 with device=cuda: .* this machine has 0"):
        RoleProcess(config).__enter__()
