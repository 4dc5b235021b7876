"""Run any rollout in a child process on this machine.

    config = RolloutEngineConfig(model_path="models/tiny", engine_kwargs={"rollout": "torch"})
    rollout = ProcessRollout(config)                   # rollout.name=process
    rollout.load_weights(engine.named_weights())       # in buckets, see `rollout/weights/transport.py`

The inner rollout's threads, environment variables, memory and crashes are confined to the child process. The child ends
when this process ends. If the child ends first, the pending call raises an error within a second. `engine_kwargs`
accepts the options of the inner rollout, `rollout` (its name), and `timeout` (time limit of one call, in seconds). In a
run, calls are also limited by `trainer.worker_timeout`. `child.py` runs in the child process.
"""

import contextlib
import functools
import os
import socket
import struct
import subprocess
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from camshaft.config.backends import PROCESS, used_capabilities
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.device import with_device_index
from camshaft.errors import GeneratorError, NoAnswerError, RolloutError
from camshaft.ragged import Ragged
from camshaft.rollout.base import BaseRollout, Generation, SamplingParams
from camshaft.rollout.scoring import PromptScores
from camshaft.rollout.weights.buckets import pack_buckets
from camshaft.rollout.weights.transport import Sender, open_sender
from camshaft.stacks import innermost_frames, read_stacks
from camshaft.subprocesses import (
    POLL_SECONDS,
    Limit,
    Wait,
    block_stop_signals,
    describe_exit,
    describe_process,
    import_path,
    kill_group,
    pack,
    receive,
    send,
    start_python,
    unpack,
    without_watcher,
)

START_SECONDS = 300.0
"""Minimum time limit for building the inner rollout if `engine_kwargs.timeout` is set."""


class ProcessRollout(BaseRollout):
    """Forward every call to a rollout in a child process."""

    capabilities = PROCESS
    keeps_tensors = False

    def __init__(self, config: RolloutEngineConfig):
        self.capabilities = used_capabilities("process", config.engine_kwargs)
        super().__init__(config)
        engine_kwargs = dict(config.engine_kwargs)
        name, timeout = engine_kwargs.pop("rollout", "torch"), engine_kwargs.pop("timeout", None)
        limit = None if timeout is None else Limit(float(timeout), f"engine_kwargs.timeout={timeout:g}")
        self._device = with_device_index(config.device)
        self._dtypes: dict[str, torch.dtype] = {}
        self._has_unread_bucket = False
        child_config = config.model_copy(update={"engine_kwargs": engine_kwargs, "device": str(self._device)})
        self._child = _Child(limit)
        weakref.finalize(self, self._child.end)
        try:
            start_limit = limit and limit._replace(seconds=max(START_SECONDS, limit.seconds))
            self._call("start", name, child_config.model_dump_json(), import_path(), limit=start_limit)
        except BaseException:
            self._child.end("the rollout could not be built")
            raise

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        sender = open_sender(self._device, self.config.update_weights_bucket_megabytes * 2**20)
        try:
            self._child.send("load_weights", version, sender.handle())
            sender.connect()
            self._receive("load_weights")  # the reply means that the rollout has started to read weights
            self._send(weights, sender)
            self.version = version
        finally:
            sender.close()

    def _send(self, weights: Iterable[tuple[str, Tensor]], sender: Sender) -> None:
        """Send all buckets. The child reads a bucket while the next one is gathered."""
        stream = pack_buckets(weights, sender.buffers)
        while True:
            try:
                bucket = next(stream, None)
            except BaseException:
                with contextlib.suppress(RolloutError):  # the original error takes precedence
                    self._wait_until_read()
                    self._call("abort")  # the rollout then has no weights
                raise
            self._wait_until_read()
            if bucket is None:
                break
            self._child.send("bucket", bucket.pieces, bucket.buffer, bucket.num_bytes)
            self._has_unread_bucket = True
            sender.push(bucket.buffer, bucket.num_bytes)
        self._call("end")

    def _wait_until_read(self) -> None:
        """Wait until the child has read the last bucket. It answers further requests only after that."""
        if self._has_unread_bucket:
            self._has_unread_bucket = False
            self._receive("load_weights")

    def weight_digests(self) -> Mapping[str, int]:
        version, digests = self._call("weight_digests")
        if version != self.version:
            raise RolloutError(
                f"{self._child} holds the weights of weight sync {version}, not those of {self.version}; call "
                "load_weights() again"
            )
        return digests

    def sync_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        if name not in self._dtypes:
            self._wait_until_read()
            self._dtypes[name] = self._call("sync_dtype", name, tensor.dtype)
        return self._dtypes[name]

    def generate_sequences(
        self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None, generated: Ragged | None = None
    ) -> Generation:
        row_seeds = None if seeds is None else seeds.cpu().numpy()
        earlier = None if generated is None else _to_arrays(generated)
        *arrays, metrics = self._call("generate_sequences", _to_arrays(prompts), sampling, row_seeds, earlier)
        tokens, lengths, log_probs, finished = map(torch.from_numpy, arrays)
        responses = Ragged(tokens, lengths)
        return Generation(responses, responses.like(log_probs), finished, metrics).to(prompts.values.device)

    @functools.cached_property
    def max_scored_tokens(self) -> int:
        return self._call("max_scored_tokens")

    def score(
        self,
        prompts: Ragged,
        top_k: int = 0,
        candidates: Ragged | None = None,
        sampling: SamplingParams | None = None,
    ) -> PromptScores:
        named = None if candidates is None else _to_arrays(candidates)
        log_probs, *others = self._call("score", _to_arrays(prompts), top_k, named, sampling)
        columns = [None if arrays is None else _to_ragged(arrays) for arrays in others]
        return PromptScores(_to_ragged(log_probs), *columns).to(prompts.values.device)

    def sleep(self) -> None:
        self._call("sleep")

    def wake_up(self) -> None:
        self._call("wake_up")

    def _call(self, request: str, *arguments: Any, limit: Limit | None = None) -> Any:
        self._child.send(request, *arguments)
        return self._receive(request, limit)

    def _receive(self, request: str, limit: Limit | None = None) -> Any:
        kind, value = self._child.receive(request, limit)
        if kind == "error":
            raise RolloutError(value)
        if kind == "traceback":
            raise RolloutError(f"{request} failed in {self._child}:\n{value}")
        return value


def _to_arrays(rows: Ragged) -> tuple[np.ndarray, np.ndarray]:
    return rows.values.cpu().numpy(), rows.lengths.numpy()


def _to_ragged(arrays: tuple[np.ndarray, np.ndarray]) -> Ragged:
    return Ragged(*map(torch.from_numpy, arrays))


class _Child:
    """Handle of the child process, with the connection to it."""

    def __init__(self, limit: Limit | None) -> None:
        self._limit = limit
        self._socket, child_end = socket.socketpair()
        # Sends and receives return after this time (a `struct timeval`, where zero would mean no limit), so that the
        # process can be checked.
        poll_time = struct.pack("@ll", *divmod(int(POLL_SECONDS * 1e6), 10**6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, poll_time)
        self._stack_file = tempfile.TemporaryFile()  # noqa: SIM115 - open while the process runs
        with child_end:
            descriptors = [child_end.fileno(), self._stack_file.fileno()]
            arguments = ["-m", "camshaft.rollout.process.child", *map(str, [*descriptors, os.getpid()])]
            with block_stop_signals():
                self._process = start_python(arguments, pass_fds=descriptors)
        self._end_reason = ""
        self._owner = os.getpid()

    def __str__(self) -> str:
        return f"the generator's process ({self._process.pid})"

    def send(self, request: str, *arguments: Any) -> None:
        """Send a request; kill the process if it does not read the request in time."""
        if self._end_reason:
            raise GeneratorError(f"{self} has ended ({self._end_reason}); build the rollout again")
        poll = partial(self._check, request, Wait(request, NoAnswerError, self._limit))
        try:
            send(self._socket.fileno(), pack((request, *arguments)), poll)
        except OSError as error:
            raise self._death_error(request) from error
        except BaseException:
            self.end(f"it did not read {request}")  # part of the request may have been sent
            raise

    def receive(self, request: str, limit: Limit | None = None) -> Any:
        """Return the reply to a request; kill the process if no reply arrives in time."""
        wait = Wait(request, NoAnswerError, limit or self._limit)
        try:
            reply = receive(self._socket.fileno(), partial(self._check, request, wait))
        except OSError as error:
            raise self._death_error(request) from error
        except BaseException:
            self.end(f"it did not answer {request}")  # a late reply would be read as the reply to the next request
            raise
        wait.finish()
        return unpack(reply)

    def _check(self, request: str, wait: Wait) -> None:
        """Raise an error if the process has ended, or if a wait for it exceeds its limit."""
        if self._process.poll() is not None:
            raise self._death_error(request)
        wait.check(lambda: f"the generator's {describe_process(self._process.pid)}", self._stacks)

    def _stacks(self, short: bool) -> str:
        stacks = without_watcher(read_stacks(self._process.pid, self._stack_file.fileno()))
        return innermost_frames(stacks) if short else stacks

    def _death_error(self, request: str) -> GeneratorError:
        self.end(f"it died in {request}")
        outcome = describe_exit(self._process.returncode)
        return GeneratorError(f"{self} died in {request} ({outcome})")

    def end(self, why: str = "it was closed") -> None:
        """Kill the process and its children. Do nothing in a forked child or if the process has already ended."""
        if self._end_reason or os.getpid() != self._owner:
            return
        self._end_reason = why
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(POLL_SECONDS)  # a process that is exiting has a status that the error can report
        kill_group(self._process.pid)
        self._process.wait()
        self._stack_file.close()
