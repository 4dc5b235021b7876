"""Rollouts that load a weight only after the trainer has gathered a later one, and a server with such a worker.

progress = Progress(folder, last=5)
config = RolloutEngineConfig(..., engine_kwargs={"rollout": GATED})       # tests/ has to be on PYTHONPATH
with fake_server(WorkerReplies(state, progress)) as fake: ...
rollout.load_weights(progress.gathered(weights))

Each weight is a little larger than a bucket, so weight n ends in the bucket before that in which weight n + 2 begins.
Trainer and generator report their progress as files in a folder. A wait for the other side has a time limit, so a test
fails instead of hanging if gathering and loading take turns.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from camshaft.digest import digest
from camshaft.errors import RolloutError
from camshaft.rollout.builtin.rollout import TorchRollout
from camshaft.rollout.weights.buckets import Assembler, Piece
from camshaft.rollout.weights.transport import Receiver, open_receiver

FOLDER, LAST = "CAMSHAFT_TEST_PROGRESS", "CAMSHAFT_TEST_LAST"
SECONDS = 60.0


class Progress:
    """Numbers of the weights that were gathered and loaded, as files. Weights after number `last` are not watched."""

    def __init__(self, folder: str | Path, last: int):
        self._folder, self._last = Path(folder), last

    def report(self, event: str, number: int) -> None:
        (self._folder / f"{event}_{number}").touch()

    def has(self, event: str, number: int) -> bool:
        return (self._folder / f"{event}_{number}").exists()

    def gathered(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the trainer. The bucket before the previous one must have been loaded."""
        for number, weight in enumerate(weights):
            if 3 <= number <= self._last:
                assert self.has("loaded", number - 3), f"weight {number} was gathered too early"
            self.report("gathered", number)
            yield weight

    def loaded(self, weights: Iterable[tuple[str, Tensor]], start: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the generator, each after the trainer has gathered a weight of the next bucket."""
        for number, weight in enumerate(weights, start):
            if number + 2 <= self._last:
                self._wait_for("gathered", number + 2)
            yield weight
            self.report("loaded", number)

    def _wait_for(self, event: str, number: int) -> None:
        deadline = time.monotonic() + SECONDS
        while not self.has(event, number):
            if time.monotonic() > deadline:
                raise RolloutError(f"weight {number} was not {event} within {SECONDS:g} s")
            time.sleep(0.01)


class GatedRollout(TorchRollout):
    """The built-in generator, which loads a weight after the trainer has gathered a later one."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        progress = Progress(os.environ[FOLDER], int(os.environ[LAST]))
        super().load_weights(progress.loaded(weights))


GATED = f"{__name__}:{GatedRollout.__name__}"


class WorkerReplies:
    """Replies of a server with a worker that loads weights like `GatedRollout`, but in this process."""

    def __init__(self, state: dict[str, Any], progress: Progress | None = None):
        self._state, self._progress = state, progress
        self.weights: dict[str, Tensor] = {}
        self.handles: list[dict[str, Any]] = []
        self.refuses: str | None = None
        """Transport whose handles the worker rejects."""
        self.device = torch.device("cpu")
        self._receiver: Receiver | None = None

    def __call__(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny"}]}
        if path != "/collective_rpc":
            return 200, {}
        method, payload = body["args"]
        try:
            return 200, {"results": [{"result": getattr(self, method)(**json.loads(payload))}]}
        except RolloutError as error:
            return 200, {"results": [{"error": str(error)}]}

    def hello(self) -> dict[str, Any]:
        return self._state

    state = hello

    def begin(self, handle: dict[str, Any], **_: Any) -> None:
        self.handles.append(handle)
        if handle["means"] == self.refuses:
            raise RolloutError("cannot open the shared device memory of the trainer")
        self.weights, self._receiver = {}, open_receiver(handle, 1, self.device)
        self._assembler = Assembler(self._receiver.device)

    def bucket(self, pieces: list[dict[str, Any]], buffer: int, num_bytes: int) -> None:
        assert self._receiver is not None
        data = self._receiver.pull(buffer, num_bytes)
        stream = self._assembler.unpack([Piece(**piece) for piece in pieces], data)
        self.weights |= stream if self._progress is None else self._progress.loaded(stream, len(self.weights))

    def end(self, version: str) -> None:
        self._assembler.finish()
        self._state["version"] = version

    def abort(self) -> None:
        self._receiver = None

    def digests(self) -> dict[str, Any]:
        return self._state | {"digests": {name: digest(weight) for name, weight in self.weights.items()}}


def numbered_weights(count: int, num_bytes: int) -> list[tuple[str, Tensor]]:
    """Return random weights of `num_bytes` bytes each."""
    random = torch.Generator().manual_seed(1)
    return [(f"w{number}", torch.randn(num_bytes // 4, generator=random)) for number in range(count)]
