"""The child process of a `ProcessRollout`, which builds the inner rollout and answers requests.

    python -m camshaft.rollout.process.child CONNECTION STACK_FILE PARENT      # two file descriptors, a process id

Each request gets one reply: ("result", value), ("error", message) for an error of this library, or ("traceback", text)
for any other exception.

`load_weights` is a sequence of messages. The first reply is sent when the rollout starts to read weights. The parent
then sends buckets, may request dtypes, and finishes with "end" or "abort". Each of these messages gets a reply, and a
reply other than "result" ends the sequence.

The process exits when the connection closes or the parent dies, and kills every process that it started.
"""

import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import CamshaftError, RolloutError
from camshaft.ragged import Ragged
from camshaft.rollout import SamplingParams, build_rollout
from camshaft.rollout.base import load_with_version
from camshaft.rollout.weights.buckets import Assembler
from camshaft.rollout.weights.transport import open_receiver
from camshaft.stacks import dump_stacks_on_signal
from camshaft.stop import ignore_stop_signals
from camshaft.subprocesses import end_with, extend_import_path, kill_own_group, pack, receive, send, unpack

Rows = tuple[np.ndarray, np.ndarray]
"""Values and lengths of a `Ragged`."""


class RequestHandler:
    """Handler with one method per kind of request. It owns the rollout of this process."""

    def __init__(self, connection: int):
        self._connection = connection

    def start(self, name: str, config: str, path: Sequence[str]) -> None:
        extend_import_path(path)
        rollout_config = RolloutEngineConfig.model_validate_json(config)
        device = torch.device(rollout_config.device)
        if device.type != "cpu" and device.index is not None and torch.accelerator.is_available():
            torch.accelerator.set_device_index(device)
        self._rollout = build_rollout(name, rollout_config)

    def load_weights(self, version: int, handle: dict[str, Any]) -> None:
        """Receive all buckets of one weight sync. `main` sends the reply to the last message."""
        stream = self._received_weights(handle)
        load_with_version(self._rollout, self._rollout.load_weights, stream, version)
        if next(stream, None) is not None:
            name = type(self._rollout).__name__
            raise RolloutError(
                f"load_weights() of {name} returned before it had read all weights; read the entire iterator"
            )

    def _received_weights(self, handle: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        device = torch.device(self._rollout.config.device)
        receiver, assembler = open_receiver(handle, device=device), Assembler(device)
        _send(self._connection, ("result", None))
        while True:
            message, *arguments = _receive(self._connection)
            if message == "abort":
                raise RolloutError("the sender aborted the weight sync")
            if message == "end":
                assembler.finish()
                return
            reply = None
            if message == "sync_dtype":  # the sender casts weights while it fills a bucket
                reply = self.sync_dtype(*arguments)
            else:
                pieces, buffer, num_bytes = arguments
                yield from assembler.unpack(pieces, receiver.pull(buffer, num_bytes))
            _send(self._connection, ("result", reply))

    def weight_digests(self) -> tuple[int, dict[str, int]]:
        return self._rollout.version, dict(self._rollout.weight_digests())

    def sync_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return self._rollout.sync_dtype(name, torch.empty(0, dtype=dtype))

    def generate_sequences(
        self, prompts: Rows, sampling: SamplingParams, seeds: np.ndarray | None, generated: Rows | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, float]]:
        row_seeds = None if seeds is None else torch.from_numpy(seeds)
        # A rollout that cannot continue rows need not have the argument `generated`.
        continued: dict[str, Any] = {} if generated is None else {"generated": _ragged(generated)}
        out = self._rollout.generate_sequences(_ragged(prompts), sampling, row_seeds, **continued)
        tensors = out.responses.values, out.responses.lengths, out.log_probs.values, out.finished
        tokens, counts, log_probs, finished = (tensor.numpy() for tensor in tensors)
        return tokens, counts, log_probs, finished, out.metrics

    def max_scored_tokens(self) -> int:
        return self._rollout.max_scored_tokens

    def score(
        self, prompts: Rows, top_k: int, candidates: Rows | None, sampling: SamplingParams | None
    ) -> list[Rows | None]:
        named = None if candidates is None else _ragged(candidates)
        scores = self._rollout.score(_ragged(prompts), top_k, named, sampling).to("cpu")
        columns = (scores.log_probs, scores.top_tokens, scores.top_log_probs, scores.candidate_log_probs)
        return [None if column is None else (column.values.numpy(), column.lengths.numpy()) for column in columns]

    def sleep(self) -> None:
        self._rollout.sleep()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()  # return the memory to the device, because the trainer needs it

    def wake_up(self) -> None:
        self._rollout.wake_up()


def _ragged(rows: Rows) -> Ragged:
    return Ragged(*map(torch.from_numpy, rows))


def _receive(connection: int) -> Any:
    try:
        frames = receive(connection)
    except ConnectionError:
        kill_own_group()  # the parent has ended; also kill the processes that the rollout started
    return unpack(frames)


def _send(connection: int, message: Any) -> None:
    try:
        send(connection, pack(message))
    except ConnectionError:
        kill_own_group()


def main(connection: int, stack_file: int, parent: int) -> NoReturn:
    """Answer requests on the descriptor `connection`. Kill this process when the connection closes or `parent` ends."""
    ignore_stop_signals()
    dump_stacks_on_signal(stack_file)
    end_with(parent)
    handler = RequestHandler(connection)
    methods = {
        method.__name__: method
        for method in (
            handler.start, handler.load_weights, handler.weight_digests, handler.sync_dtype,
            handler.generate_sequences, handler.max_scored_tokens, handler.score, handler.sleep, handler.wake_up,
        )
    }  # fmt: skip
    while True:
        request, *arguments = _receive(connection)
        try:
            reply = ("result", methods[request](*arguments))
        except CamshaftError as error:
            reply = ("error", str(error))
        except Exception:
            reply = ("traceback", traceback.format_exc().rstrip())
        _send(connection, reply)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
