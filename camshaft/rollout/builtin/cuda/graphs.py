"""CUDA graphs of decode steps: capture the kernels of a step once and replay them without Python.

    decoder = build_graph_decoder(decoder, cache, config)             # None if graphs are off or unsupported
    with decoder.prepare(num_rows=64, num_steps=128) as forward:
        logits = forward(tokens, positions, slots)                    # (B, V), valid until the next call
    decoder.release()                                                 # frees the graphs

A decode step on a GPU consists of a few hundred small kernels whose Python launch overhead exceeds their run time.
Steps are captured for a fixed set of batch sizes; other batch sizes are padded to the next one. A graph reads and
writes fixed memory. Each generation checks the weights' addresses, and each step checks whether the KV cache was
reallocated; a change captures all graphs again. Row lengths are read on the device, by `kernels.py`, or without Triton
by masks over whole slots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.device import supports_triton
from camshaft.errors import CamshaftError, RolloutError
from camshaft.models.attention import Slots
from camshaft.rollout.builtin.cpu.traced_decoder import Decoder, Forward, has_hooks
from camshaft.rollout.builtin.kv_cache import DecodeStep, KVCache

MIN_STEPS = 16
"""Calls with fewer steps run eagerly: a capture takes as long as several steps."""

Replay = Callable[[], None]

MakeStep = Callable[[KVCache, Tensor], Slots]
"""Builds the decode step of rows at these positions, whose values it must not read on the host."""


class GraphCapture(Protocol):
    """Captures the work that a function enqueues on the device."""

    def capture(self, function: Callable[[], None]) -> Replay:
        """Return a replay of `function` on the same memory; `function` runs once or more."""
        ...

    def release(self) -> None:
        """Free the memory that captures share; none may be replayed afterwards."""
        ...


class CUDAGraphCapture:
    """CUDA graphs whose intermediate tensors share one memory pool."""

    def __init__(self, device: torch.device):
        self.device = device
        self._backend: Any = torch.get_device_module(device)
        self._stream: Any = None
        self._pool: Any = None

    def capture(self, function: Callable[[], None]) -> Replay:
        backend = self._backend
        with backend.device(self.device):
            if self._pool is None:
                self._stream, self._pool = backend.Stream(), backend.graph_pool_handle()
            graph, stream = backend.CUDAGraph(), backend.current_stream()
            self._stream.wait_stream(stream)
            with backend.stream(self._stream):
                function()  # warm-up: compilation and allocation are not allowed during a capture
                # Other threads, such as NCCL's watchdog, may call CUDA during the capture.
                with backend.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    function()
            stream.wait_stream(self._stream)
        return graph.replay

    def release(self) -> None:
        if self._pool is not None:
            self._pool = self._stream = None  # a pool without graphs cannot be reused
            self._backend.empty_cache()


class CUDAGraphDecoder:
    """A `Decoder` whose decode steps run as CUDA graphs."""

    def __init__(self, decoder: Decoder, cache: KVCache, capture: GraphCapture, make_step: MakeStep):
        self.hf, self.eager = decoder.hf, decoder.eager
        self.decoder, self.cache, self.graph_capture, self.make_step = decoder, cache, capture, make_step
        self.replays: dict[int, Replay] = {}
        """Replays by number of rows."""
        self._capacity = self._filled = 0
        self._inputs: Tensor | None = None  # (2, capacity) tokens and positions, zero-padded
        self._logits: Tensor | None = None  # (capacity, V)
        self._weights: tuple[Any, ...] = ()
        self._captured_for: tuple[Any, ...] = ()

    @contextmanager
    def prepare(self, num_rows: int, num_steps: int) -> Iterator[Forward]:
        """Yield a forward for at most `num_rows` rows with the present weights.

        Padding rows write to the unused slots between the live rows and `num_rows`.
        """
        if num_steps < MIN_STEPS or has_hooks(self.hf):
            with self.decoder.prepare(num_rows, num_steps) as forward:
                yield forward
            return
        self._capacity = max(self._capacity, num_rows)
        weights = tensor_layouts(self.hf)
        if weights != self._weights:  # keep the same object, because each step compares it
            self._weights = weights
        yield functools.partial(self._forward, num_rows)

    def release(self) -> None:
        """Free all graphs and their memory."""
        self.replays.clear()
        self._inputs = self._logits = None
        self._captured_for = ()
        self.graph_capture.release()

    def _forward(self, num_rows: int, tokens: Tensor, positions: Tensor, slots: Slots) -> Tensor:
        """Replay a step; `slots` is unused, because a graph has its own view of the cache."""
        captured_for = self._weights, self.cache.reallocations, self._capacity
        if captured_for != self._captured_for:
            self.release()
            self._captured_for = captured_for
        inputs, rows = self._filled_inputs(tokens, positions), len(tokens)
        filled_up = min(padded_rows(rows), num_rows)
        if filled_up not in self.replays:
            self.replays[filled_up] = self._capture(inputs[:, :filled_up])
        self.replays[filled_up]()
        assert self._logits is not None
        return self._logits[:rows]

    def _filled_inputs(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Copy tokens and positions into the inputs of the graphs."""
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

    def _capture(self, inputs: Tensor) -> Replay:
        tokens, positions = inputs
        if self._logits is None:  # an eager call gives the shape and dtype of the logits
            logits = self.eager(tokens, positions, self.make_step(self.cache, positions))
            self._logits = logits.new_empty(self._capacity, logits.shape[1])
        out = self._logits[: len(tokens)]

        def step() -> None:
            # Copied, because graphs share intermediate memory and the next one may overwrite it.
            out.copy_(self.eager(tokens, positions, self.make_step(self.cache, positions)))

        try:
            return self.graph_capture.capture(step)
        except (CamshaftError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise RolloutError(
                f"cannot capture a decode step of {type(self.hf).__name__}: {str(error).partition(chr(10))[0]}; "
                "generate with rollout.enforce_eager=true"
            ) from error


def build_graph_decoder(decoder: Decoder, cache: KVCache, config: RolloutEngineConfig) -> CUDAGraphDecoder | None:
    """Return None if `enforce_eager` is true or the device has no graphs."""
    device = torch.device(config.device)
    if config.enforce_eager or device.type == "cpu" or not hasattr(torch.get_device_module(device), "CUDAGraph"):
        return None
    return CUDAGraphDecoder(decoder, cache, CUDAGraphCapture(device), device_step)


def device_step(cache: KVCache, positions: Tensor) -> Slots:
    """Use the Triton kernels if they support the cache, else `full_length_step`."""
    if supports_triton(positions):
        from camshaft.rollout.builtin.cuda.kernels import TritonDecodeStep, supports

        if supports(cache):
            return TritonDecodeStep(cache, positions)
    return full_length_step(cache, positions)


def full_length_step(cache: KVCache, positions: Tensor) -> Slots:
    """Attend to all positions of a slot, with a mask computed on the device."""
    return DecodeStep(cache, positions, cache.length)


def padded_rows(rows: int) -> int:
    """Return the captured number of rows for `rows`: 1, 2, 4, 8, 16, 24, ... 64, 80, ... 128, 160, ..."""
    power = (rows - 1).bit_length()
    grain = 1 << power if rows <= 4 else max(8, 1 << (power - 3))
    return -(-rows // grain) * grain


def tensor_layouts(hf: nn.Module) -> tuple[Any, ...]:
    """Return address, shape, strides and dtype of each weight and buffer."""
    tensors = (*hf.named_parameters(), *hf.named_buffers())
    return tuple((name, t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in tensors)
