"""Training through a proxy that loses, repeats, delays and reorders: each command runs once, in its order."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.counting_worker import CountingWorker
from support.tinker_clients import BASE, Client, ClientModel, RunningServer, datum, running_server

from camshaft.contracts.tinker.proxy import FaultProxy, random_faults

NUM_CHUNKS = 3


def chunk(step: int, number: int) -> Any:
    return datum([5 + (step + number) % 40, 6, 7 + step % 30, 8], weights=[1.0, -0.5, 1.0 / (1 + step % 7)])


def train(client: Client, number: int, num_commands: int, seed: int | None = None) -> ClientModel:
    """Train a model; the commands of three steps at a time are sent at once in a random order, by several threads."""
    model, chance = client.create_model(number, rank=2), random.Random(seed)
    num_steps = num_commands // (NUM_CHUNKS + 1)
    with ThreadPoolExecutor(6) as threads:
        for first in range(0, num_steps, 3):
            sends = []
            for step in range(first, min(first + 3, num_steps)):
                base = step * (NUM_CHUNKS + 1) + 1
                for k in range(NUM_CHUNKS):
                    sends.append(lambda step=step, base=base, k=k: model.train(base + k, [chunk(step, k)]))
                sends.append(lambda base=base: model.step(base + NUM_CHUNKS, learning_rate=1e-3))
            if seed is not None:
                chance.shuffle(sends)
            promises = list(threads.map(lambda send: send(), sends))
            list(threads.map(model.wait, promises))
    return model


def run_both(server: RunningServer, num_commands: int) -> None:
    plain = train(server.client(), 0, num_commands)
    with FaultProxy(server.url, random_faults(seed=3)) as proxy:
        client = Client(proxy.url, server.key, BASE, is_patient=True).open()
        server.clients.append(client)
        model = train(client, 0, num_commands, seed=5)
        number = num_commands + 1
        data = [chunk(step, 0) for step in range(8)]
        assert model.log_probs(number, data) == plain.log_probs(number, data)
        for path in (plain, model):
            saved = path.wait(path.command("save_weights", number + 1, path="end"))["path"]
            assert saved
    assert proxy.num_faults > 0.2 * num_commands  # of at least two requests for each command
    counts = server.role.call("counts")
    expected = {"forward_backward": num_commands * 3 // 4, "optimizer_step": num_commands // 4}
    for each in (plain, model):
        assert counts[each.identifier] == expected
    assert weights(server, plain) == weights(server, model)


def weights(server: RunningServer, model: ClientModel) -> list[bytes]:
    session, _, number = model.identifier.partition(":train:")
    folder = Path(server.config.folder) / session / number / "weights"
    files = sorted(folder.glob("end.*/[mo]*/*.safetensors"))
    assert len(files) == 2
    return [file.read_bytes() for file in files]


@pytest.mark.parametrize("num_commands", [160, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])])
def test_faults_on_the_way_change_no_weight(tmp_path: Path, num_commands: int) -> None:
    with running_server(tmp_path, worker=CountingWorker, max_models=2) as server:
        run_both(server, num_commands)
    assert threading.active_count() < 50
