"""Two clients that train a model each get what each gets alone, and take turns."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
from support.tinker_clients import Client, RunningServer, datum, running_server

from camshaft.config.serve import ServeConfig
from camshaft.roles.served import ServedWorker

STEPS, SAMPLES = 4, 6


class Results(NamedTuple):
    training: list[Any]
    """Answers to all commands that train."""
    tokens: list[list[int]]
    log_probs: list[float]
    """Of all sampled tokens."""


def train(client: Client, number: int) -> Results:
    """Sample from each version and train on the tokens, in three chunks that are sent at once."""
    model, results = client.create_model(rank=4, seed=number), Results([], [], [])
    for step in range(STEPS):
        sampler = model.publish(step)
        prompt = [5 + number, 6, 7 + step]
        samples = client.sample(sampler, 1, prompt, SAMPLES, max_tokens=10, seed=100 * step + number, stop=[])
        for sample in samples:
            results.tokens.append(sample.tokens)
            results.log_probs.extend(sample.log_probs)
        data = [
            datum(prompt + s.tokens, weights=[0.0, 0.0] + [sum(s.tokens) % 3 - 1.0] * len(s.tokens)) for s in samples
        ]
        promises = [model.train(model.next(), data[row :: SAMPLES // 2]) for row in range(SAMPLES // 2)]
        promises.append(model.step(model.next(), learning_rate=3e-3))
        results.training.extend(map(model.wait, promises))
    results.training.append(model.forward([datum(tokens) for tokens in results.tokens]))
    return results


def test_two_clients_get_what_each_gets_alone(tmp_path: Path) -> None:
    with running_server(tmp_path, max_models=2) as server:
        clients = [server.client(), server.client()]
        with ThreadPoolExecutor(2) as threads:
            together = list(threads.map(train, clients, (0, 1)))
        server.finish()
        alone = list[Results]()
        for number in (0, 1):
            alone.append(train(server.client(), number))
            server.finish()
    for one, other in zip(together, alone, strict=True):
        assert one.training == other.training
        assert one.tokens == other.tokens
        assert len(one.log_probs) == STEPS * SAMPLES * 10
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-6)
    assert together[0].tokens != together[1].tokens


class HeldWorker(ServedWorker):
    """A worker that records the order of its commands, and begins when `begin` is set."""

    begin = threading.Event()
    order: ClassVar[list[str]] = []

    def __init__(self, config: ServeConfig):
        super().__init__(config)
        self.begin.clear()
        self.order.clear()

    def forward_backward(self, model_id: str, rows: Any, loss: str, options: Any, forward_only: bool) -> Any:
        assert self.begin.wait(60)
        self.order.append(model_id)
        return super().forward_backward(model_id, rows, loss, options, forward_only)


def submit_all(server: RunningServer, count: int) -> tuple[list[Any], list[Any]]:
    """Return the models of two clients, and their commands: all those of the first one have arrived before."""
    models = [server.client().create_model(rank=4) for _ in range(2)]
    data = [datum(list(range(5, 40)))]
    return models, [(model, model.train(model.next(), data)) for model in models for _ in range(count)]


def test_clients_wait_for_one_command_of_each_other(tmp_path: Path) -> None:
    with running_server(tmp_path, worker=HeldWorker, max_models=2) as server:
        (first, second), promises = submit_all(server, 6)
        HeldWorker.begin.set()
        for model, promise in promises:
            model.wait(promise)
        assert HeldWorker.order == [first.identifier, second.identifier] * 6
