"""One token for each live row as a recorded step: what a call put on the device is put there again, without Python.

    steps = recorded_steps(decoder, pool, config)                     # None where nothing is recorded
    with steps.ready(num_rows=64, num_steps=128) as forward:
        logits = forward(tokens, positions, slots)                    # (B, V), until the next call
    steps.forget()                                                    # frees the recordings

On a GPU a step is some hundred small launches, whose Python takes longer than the device. So each number of rows
(some of them: others are filled up) is recorded once as a CUDA graph and replayed. A recording reads and writes the
memory that the call had. What may become other memory is looked at before a replay, and if it is, all is recorded
anew: weights when a generation begins, slots at each step. What a row's length decides is decided on the device
(`kernels.py`; where there is no Triton, by masks over whole slots).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.device import takes_triton
from camshaft.errors import CamshaftError, RolloutError
from camshaft.models.attention import Slots
from camshaft.rollout.builtin.cpu.traced_decoder import Decoder, Forward, hooked
from camshaft.rollout.builtin.kv_cache import KVCache, TokenStep

STEPS = 16
"""A call of fewer steps runs them as they are: a recording takes the time of some."""

Replay = Callable[[], None]

MakeStep = Callable[[KVCache, Tensor], Slots]
"""The step of rows at these positions, of which it may know on the device only."""


class Recorder(Protocol):
    """Writes down what a function has the device do."""

    def record(self, function: Callable[[], None]) -> Replay:
        """What does to the same memory what `function` did, which is run for that, maybe more than once."""
        ...

    def forget(self) -> None:
        """Free what recordings share; none of them is replayed after this."""
        ...


class CudaGraphRecorder:
    """CUDA graphs, which take the memory for what lies between their inputs and outputs from one pool."""

    def __init__(self, device: torch.device):
        self.device = device
        self._backend: Any = torch.get_device_module(device)
        self._stream: Any = None
        self._pool: Any = None

    def record(self, function: Callable[[], None]) -> Replay:
        backend = self._backend
        with backend.device(self.device):
            if self._pool is None:
                self._stream, self._pool = backend.Stream(), backend.graph_pool_handle()
            graph, here = backend.CUDAGraph(), backend.current_stream()
            self._stream.wait_stream(here)
            with backend.stream(self._stream):
                function()  # compiles, loads and sets aside what would not do in a capture
                # Threads of other libraries, such as NCCL's, may ask the device for something meanwhile.
                with backend.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    function()
            here.wait_stream(self._stream)
        return graph.replay

    def forget(self) -> None:
        if self._pool is not None:
            self._pool = self._stream = None  # a pool that no graph is left of cannot be used again
            self._backend.empty_cache()


class RecordedSteps:
    """See the map above; a `Decoder` whose steps are recorded."""

    def __init__(self, decoder: Decoder, pool: KVCache, recorder: Recorder, make_step: MakeStep):
        self.hf, self.own = decoder.hf, decoder.own
        self.decoder, self.pool, self.recorder, self.make_step = decoder, pool, recorder, make_step
        self.replays: dict[int, Replay] = {}
        """For each number of rows."""
        self._capacity = self._filled = 0
        self._inputs: Tensor | None = None  # (2, capacity) tokens and positions; zeros behind the filled ones
        self._logits: Tensor | None = None  # (capacity, V)
        self._weights: tuple[Any, ...] = ()
        self._frozen: tuple[Any, ...] = ()

    @contextmanager
    def ready(self, num_rows: int, num_steps: int) -> Iterator[Forward]:
        """Inside, a forward for at most `num_rows` rows with the weights as they are now.

        Slots below `num_rows` behind those of live rows are nobody's: rows that only fill up write there.
        """
        if num_steps < STEPS or hooked(self.hf):
            with self.decoder.ready(num_rows, num_steps) as forward:
                yield forward
            return
        self._capacity = max(self._capacity, num_rows)
        found = addresses(self.hf)
        if found != self._weights:  # an equal one stays, since each step compares it
            self._weights = found
        yield functools.partial(self._forward, num_rows)

    def forget(self) -> None:
        """Free all that was recorded, and the memory that it needs."""
        self.replays.clear()
        self._inputs = self._logits = None
        self._frozen = ()
        self.recorder.forget()

    def _forward(self, num_rows: int, tokens: Tensor, positions: Tensor, slots: Slots) -> Tensor:
        """`slots` are those of the pool; a recording has its own view of them."""
        frozen = self._weights, self.pool.changes, self._capacity
        if frozen != self._frozen:
            self.forget()
            self._frozen = frozen
        inputs, rows = self._written(tokens, positions), len(tokens)
        filled_up = min(rounded(rows), num_rows)
        if filled_up not in self.replays:
            self.replays[filled_up] = self._recorded(inputs[:, :filled_up])
        self.replays[filled_up]()
        assert self._logits is not None
        return self._logits[:rows]

    def _written(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The inputs, with these in front."""
        if self._inputs is None:
            self._inputs = torch.zeros(2, self._capacity, dtype=torch.int64, device=tokens.device)
            self._filled = 0
        rows = len(tokens)
        if rows < self._filled:
            self._inputs[:, rows : self._filled].zero_()
        self._filled = rows
        self._inputs[0, :rows].copy_(tokens)
        self._inputs[1, :rows].copy_(positions)
        return self._inputs

    def _recorded(self, inputs: Tensor) -> Replay:
        tokens, positions = inputs
        if self._logits is None:  # a call as it is tells how many there are, and of which format
            logits = self.own(tokens, positions, self.make_step(self.pool, positions))
            self._logits = logits.new_empty(self._capacity, logits.shape[1])
        out = self._logits[: len(tokens)]

        def step() -> None:
            # Copied: recordings share the memory of what lies between, so the next one may write over it.
            out.copy_(self.own(tokens, positions, self.make_step(self.pool, positions)))

        try:
            return self.recorder.record(step)
        except (CamshaftError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise RolloutError(
                f"a step of {type(self.hf).__name__} cannot be recorded: {str(error).partition(chr(10))[0]}; "
                "generate with rollout.enforce_eager=true"
            ) from error


def recorded_steps(decoder: Decoder, pool: KVCache, config: RolloutEngineConfig) -> RecordedSteps | None:
    """None if the config does not ask for it, or the device has no graphs."""
    device = torch.device(config.device)
    if config.enforce_eager or device.type == "cpu" or not hasattr(torch.get_device_module(device), "CUDAGraph"):
        return None
    return RecordedSteps(decoder, pool, CudaGraphRecorder(device), device_step)


def device_step(pool: KVCache, positions: Tensor) -> Slots:
    """The kernels where they can be used, else `whole_step`."""
    if takes_triton(positions):
        from camshaft.rollout.builtin.cuda.kernels import KernelStep, can

        if can(pool):
            return KernelStep(pool, positions)
    return whole_step(pool, positions)


def whole_step(pool: KVCache, positions: Tensor) -> Slots:
    """Attention over all places of a slot, with a mask that is made of the positions on the device."""
    return TokenStep(pool, positions, pool.length)


def rounded(rows: int) -> int:
    """For how many rows a step is recorded that serves so many: 1, 2, 4, 8, 16, 24, ... 64, 80, ... 128, 160, ..."""
    power = (rows - 1).bit_length()
    grain = 1 << power if rows <= 4 else max(8, 1 << (power - 3))
    return -(-rows // grain) * grain


def addresses(hf: nn.Module) -> tuple[Any, ...]:
    """Where the model's tensors lie, and how."""
    held = (*hf.named_parameters(), *hf.named_buffers())
    return tuple((name, t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in held)
