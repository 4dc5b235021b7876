"""Any generator in a process of its own, on this machine.

    config = RolloutEngineConfig(model_path="models/tiny", engine_kwargs={"rollout": "torch"})
    rollout = ProcessRollout(config)                   # `process` in the config
    rollout.load_weights(engine.named_weights())       # in buckets, through `transport.py`

What the generator does to its process (threads, environment, memory, a crash) stays there. It dies with this
process, and if it dies first, the call in flight is an error within a second. `process_child.py` is the other end.
`engine_kwargs` are those of the generator, beside `rollout` (its name) and `timeout` (seconds for one answer).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import camshaft
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.device import here
from camshaft.errors import RolloutError, how_it_ended
from camshaft.ragged import Ragged
from camshaft.rollout.base import BaseRollout, Generation, SamplingParams
from camshaft.rollout.weights.buckets import pack_buckets
from camshaft.rollout.weights.transport import Sender, open_sender

POLL_SECONDS = 0.2
"""How often a wait looks whether the process still lives; an answer, or its end, is noticed at once."""
START_SECONDS = 300.0
"""How long it may take until the generator stands."""
ANSWER_SECONDS = 3600.0
"""How long one answer may take, unless `timeout` says otherwise."""


class ProcessRollout(BaseRollout):
    """See the map above."""

    keeps_tensors = False

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        own = dict(config.engine_kwargs)
        name, timeout = own.pop("rollout", "torch"), own.pop("timeout", None)
        self._timeout = float(ANSWER_SECONDS if timeout is None else timeout)
        self._device = here(config.device)
        self._dtypes: dict[str, torch.dtype] = {}
        inside = config.model_copy(update={"engine_kwargs": own, "device": str(self._device)})
        self._child = _Child(self._timeout)
        weakref.finalize(self, self._child.end)
        try:
            seconds = START_SECONDS if timeout is None else max(START_SECONDS, self._timeout)
            self._ask("start", name, inside.model_dump_json(), timeout=seconds)
        except BaseException:
            self._child.end("its generator could not be built")
            raise

    # -- weights ----------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        sender = open_sender(self._device, self.config.update_weights_bucket_megabytes * 2**20)
        try:
            self._child.tell("load_weights", self.weights_version, sender.handle())
            sender.meet()
            self._answer("load_weights")  # the generator takes weights; else nothing is sent to it
            self._send(weights, sender)
        finally:
            sender.close()

    def _send(self, weights: Iterable[tuple[str, Tensor]], sender: Sender) -> None:
        stream = pack_buckets(weights, sender.buffer)
        while True:
            try:
                bucket = next(stream, None)
            except BaseException:
                with contextlib.suppress(RolloutError):  # what broke the stream is the error to tell
                    self._ask("abort")  # the generator has no weights then, and says so when it is asked
                raise
            if bucket is None:
                break
            pieces, used = bucket
            self._child.tell("bucket", pieces, used)
            sender.push(used)
            self._answer("load_weights")
        self._ask("end")

    def weight_digests(self) -> Mapping[str, int]:
        version, digests = self._ask("weight_digests")
        if version != self.weights_version:
            raise RolloutError(
                f"{self._child} holds the weights of hand-over {version}, not those of {self.weights_version}"
            )
        return digests

    def arrival_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        if name not in self._dtypes:
            self._dtypes[name] = self._ask("arrival_dtype", name, tensor.dtype)
        return self._dtypes[name]

    # -- tokens -----------------------------------------------------------------------------------

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        drawn = None if seeds is None else seeds.cpu().numpy()
        rows = prompts.values.cpu().numpy(), prompts.lengths.cpu().numpy()
        *arrays, metrics = self._ask("generate_sequences", *rows, sampling, drawn)
        tokens, lengths, log_probs, finished = map(torch.from_numpy, arrays)
        responses = Ragged(tokens, lengths)
        return Generation(responses, responses.like(log_probs), finished, metrics).to(prompts.values.device)

    # -- memory -----------------------------------------------------------------------------------

    def sleep(self) -> None:
        self._ask("sleep")

    def wake_up(self) -> None:
        self._ask("wake_up")

    # -- the other process ------------------------------------------------------------------------

    def _ask(self, what: str, *arguments: Any, timeout: float | None = None) -> Any:
        self._child.tell(what, *arguments)
        return self._answer(what, timeout)

    def _answer(self, what: str, timeout: float | None = None) -> Any:
        kind, value = self._child.answer(what, timeout or self._timeout)
        if kind == "refused":
            raise RolloutError(value)
        if kind == "failed":
            raise RolloutError(f"{what} failed in {self._child}:\n{value}")
        return value


class _Child:
    """The process and the connection to it."""

    def __init__(self, timeout: float) -> None:
        ours, theirs = socket.socketpair()
        # A process that is stopped reads nothing, and what is sent to it would wait for ever.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout))
        self._timeout = timeout
        home = str(Path(camshaft.__file__).resolve().parent.parent)
        paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), home]))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "camshaft.rollout.process.child", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": paths},
                start_new_session=True,  # so that it can be killed with whatever it has started
            )
        self._connection = Connection(ours.detach())
        self._ended = ""
        self._owner = os.getpid()

    def __str__(self) -> str:
        return f"the generator's process ({self._process.pid})"

    def tell(self, what: str, *arguments: Any) -> None:
        """Send a request."""
        if self._ended:
            raise RolloutError(f"{self} has ended ({self._ended}); build the rollout again, or resume the run")
        try:
            # Plain pickles: the connection's own would put tensors into shared memory of their own.
            self._connection.send_bytes(pickle.dumps((what, *arguments)))
        except BlockingIOError as error:
            self.end(f"it did not read {what}")
            raise RolloutError(
                f"{self} has not read {what} for {self._timeout:g} s and was killed; if it is only slow, "
                "give engine_kwargs.timeout more seconds"
            ) from error
        except OSError as error:
            raise self._died(what) from error
        except BaseException:
            self.end(f"{what} was interrupted")  # half a request may be on the way
            raise

    def answer(self, what: str, timeout: float) -> Any:
        """The answer to the request; if it does not come, the process is killed."""
        deadline = time.monotonic() + timeout
        try:
            while not self._connection.poll(POLL_SECONDS):
                if self._process.poll() is not None and not self._connection.poll(0):
                    raise self._died(what)
                if time.monotonic() > deadline:
                    self.end(f"no answer to {what}")
                    raise RolloutError(
                        f"{self} has not answered {what} for {timeout:g} s and was killed; if it is only slow, "
                        "give engine_kwargs.timeout more seconds"
                    )
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._died(what) from error
        except BaseException:
            self.end(f"{what} was interrupted")  # an answer that comes later would be taken for another
            raise

    def _died(self, what: str) -> RolloutError:
        self.end(f"it died in {what}")
        how = how_it_ended(self._process.returncode)
        return RolloutError(f"{self} died in {what} ({how}); resume the run from its last checkpoint")

    def end(self, why: str = "it was let go") -> None:
        """Kill it and its children; a second time does nothing. A forked copy of this process owns nothing."""
        if self._ended or os.getpid() != self._owner:
            return
        self._ended = why
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(POLL_SECONDS)  # it may be dying of something that is worth telling
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _timeval(seconds: float) -> bytes:
    """As the kernel takes it: never zero, which is for ever."""
    return struct.pack("@ll", int(seconds), max(1, int(seconds % 1 * 1e6)))
