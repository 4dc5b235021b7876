"""What runs in the process of a `ProcessRollout`: it builds the generator, answers calls, ends.

    python -m camshaft.rollout.process.child FILE_DESCRIPTOR PARENT

Every request has one answer: ("done", value), ("refused", text) for an error of this library, ("failed", stack) for
anything else. `load_weights` is a conversation. Its own answer is "done" as soon as the generator asks for weights;
then the parent sends buckets, may ask for dtypes, and ends with "end" or "abort", and each of these has its answer.
With the first that is not "done" the conversation is over. The process ends when the connection does, or when its
parent is gone, whatever it is doing, and what it has started ends with it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import CamshaftError, RolloutError
from camshaft.ragged import Ragged
from camshaft.rollout import SamplingParams, build_rollout
from camshaft.rollout.weights.buckets import Assembler
from camshaft.rollout.weights.transport import open_receiver
from camshaft.stop import outlive_stop_signals

WATCH_SECONDS = 0.5
"""How often the process looks whether its parent still lives."""

Reply = tuple[str, Any]


class RequestHandler:
    """The generator and what can be asked of it, one method per request."""

    def __init__(self, connection: Connection):
        self._connection = connection

    def start(self, name: str, config: str) -> None:
        own = RolloutEngineConfig.model_validate_json(config)
        place = torch.device(own.device)
        if place.type != "cpu" and place.index is not None and torch.accelerator.is_available():
            torch.accelerator.set_device_index(place)
        self._rollout = build_rollout(name, own)

    def load_weights(self, version: int, handle: dict[str, Any]) -> None:
        """All buckets of one hand-over; the last answer is left to the caller."""
        self._rollout.weights_version = version
        stream = self._arriving(handle)
        self._rollout.load_weights(stream)
        if next(stream, None) is not None:
            raise RolloutError(f"load_weights() of {type(self._rollout).__name__} did not take all that came")

    def _arriving(self, handle: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        device = torch.device(self._rollout.config.device)
        receiver, assembler = open_receiver(handle, device=device), Assembler(device)
        _send(self._connection, ("done", None))
        while True:
            what, *rest = pickle.loads(self._connection.recv_bytes())
            if what == "abort":
                raise RolloutError("the hand-over was broken off by the sender")
            if what == "end":
                assembler.finish()
                return
            answer = None
            if what == "arrival_dtype":  # the sender casts while it fills a bucket
                answer = self.arrival_dtype(*rest)
            else:
                pieces, used = rest
                yield from assembler.take(pieces, receiver.pull(used))
            _send(self._connection, ("done", answer))

    def weight_digests(self) -> tuple[int, dict[str, int]]:
        return self._rollout.weights_version, dict(self._rollout.weight_digests())

    def arrival_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return self._rollout.arrival_dtype(name, torch.empty(0, dtype=dtype))

    def generate_sequences(
        self, values: np.ndarray, lengths: np.ndarray, sampling: SamplingParams, seeds: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, float]]:
        prompts = Ragged(torch.from_numpy(values), torch.from_numpy(lengths))
        drawn = None if seeds is None else torch.from_numpy(seeds)
        out = self._rollout.generate_sequences(prompts, sampling, drawn)
        tensors = out.responses.values, out.responses.lengths, out.log_probs.values, out.finished
        tokens, counts, log_probs, finished = (tensor.numpy() for tensor in tensors)
        return tokens, counts, log_probs, finished, out.metrics

    def sleep(self) -> None:
        self._rollout.sleep()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()  # the trainer has another allocator, and needs the memory now

    def wake_up(self) -> None:
        self._rollout.wake_up()


def serve(connection: Connection) -> None:
    """Reply until the other side is gone."""
    handler = RequestHandler(connection)
    methods = {
        method.__name__: method
        for method in (
            handler.start, handler.load_weights, handler.weight_digests, handler.arrival_dtype,
            handler.generate_sequences, handler.sleep, handler.wake_up,
        )
    }  # fmt: skip
    while True:
        what, *arguments = pickle.loads(connection.recv_bytes())
        try:
            answer = ("done", methods[what](*arguments))
        except CamshaftError as error:
            answer = ("refused", str(error))
        except (EOFError, BrokenPipeError):
            raise
        except Exception:
            answer = ("failed", traceback.format_exc().rstrip())
        _send(connection, answer)


def _send(connection: Connection, answer: Reply) -> None:
    connection.send_bytes(pickle.dumps(answer))


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os.killpg(0, signal.SIGKILL)


def main(file: int, parent: int) -> None:
    """See the map above."""
    outlive_stop_signals()
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    try:
        serve(Connection(file))
    except (EOFError, ConnectionError):
        os.killpg(0, signal.SIGKILL)  # nobody is left to answer, and what the generator started is nobody's


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
