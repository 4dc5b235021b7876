"""Capture the kernels of a decode step in a CUDA graph once and replay them without Python.

    decoder = build_graph_decoder(decoder, cache, config)             # None if graphs are disabled or unsupported
    with decoder.prepare(num_rows=64, num_steps=128) as forward:
        logits = forward(tokens, positions, slots)                    # (B, V), valid until the next call
    decoder.release()                                                 # frees the graphs

A decode step on a GPU consists of a few hundred small kernels whose Python launch overhead exceeds their run time.
Steps are captured for a fixed set of batch sizes; other batch sizes are padded to the next one. A graph reads and
writes memory at fixed addresses. Each generation compares the addresses of the weights, and each step checks whether
the KV cache was reallocated. After a change, all graphs are captured again. Row lengths are read on the device, by the
kernels of `kernels.py` or, without Triton, through masks over entire slots. If a capture fails, the decoder logs a
warning and runs all further steps eagerly.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.device import supports_triton
from camshaft.models.attention import Slots
from camshaft.rollout.builtin.cpu.traced_decoder import Decoder, has_hooks
from camshaft.rollout.builtin.decode_trace import Forward
from camshaft.rollout.builtin.kv_cache import KVCache
from camshaft.rollout.builtin.steps import DecodeStep
from camshaft.rollout.shared_model import SharedModel

if TYPE_CHECKING:
    from camshaft.rollout.builtin.cuda.fused_forward import FusedForward  # requires Triton

logger = logging.getLogger(__name__)

MIN_STEPS = 16
"""Minimum number of decode steps for which graphs are captured. A capture takes as long as several eager steps."""

Replay = Callable[[], None]

MakeStep = Callable[[KVCache, Tensor], Slots]
"""Function that builds the decode step of rows at the given positions. It must not read their values on the host."""


class CUDAGraphCapture:
    """Capture in CUDA graphs whose intermediate tensors share one memory pool."""

    def __init__(self, device: torch.device):
        self.device = device
        self._backend: Any = torch.get_device_module(device)
        self._stream: Any = None
        self._pool: Any = None

    def capture(self, function: Callable[[], None]) -> Replay:
        """Call `function` once or more and return a function that replays its kernels on the same memory."""
        backend = self._backend
        with backend.device(self.device):
            if self._stream is None:  # the only one, because CUDA libraries keep a workspace per stream
                self._stream = backend.Stream()
            if self._pool is None:
                self._pool = backend.graph_pool_handle()
            graph, stream = backend.CUDAGraph(), backend.current_stream()
            self._stream.wait_stream(stream)
            try:
                with backend.stream(self._stream):
                    function()  # warm up, because compilation and allocation are not allowed during a capture
                    # Other threads, such as NCCL's watchdog, may call CUDA during the capture.
                    with backend.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                        function()
            finally:  # also after an error, since eager steps then read what the warm-up has written
                stream.wait_stream(self._stream)
        return graph.replay

    def release(self) -> None:
        """Free the memory that the captures share. None of them may be replayed afterwards."""
        if self._pool is not None:
            self._pool = None  # a pool cannot be reused once all of its graphs are freed
            self._backend.empty_cache()


class CUDAGraphDecoder:
    """A `Decoder` whose decode steps run as CUDA graphs."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        capture: CUDAGraphCapture,
        make_step: MakeStep,
        model: SharedModel | None = None,
    ):
        """Capture the fused forward of `model`, or the model's own forward."""
        self.hf, self.eager, self.model = decoder.hf, decoder.eager, model
        self.captured = self.eager
        self.decoder, self.cache, self.graph_capture, self.make_step = decoder, cache, capture, make_step
        self.replays: dict[int, Replay] = {}
        """Map from batch size to the replay of its graph."""
        self.capture_failed = False
        """True after a failed capture. All further steps run eagerly."""
        self._capacity = self._num_filled = 0
        self._inputs: Tensor | None = None  # (2, capacity) tokens and positions, zero-padded
        self._logits: Tensor | None = None  # (capacity, V)
        self._weights: tuple[Any, ...] = ()
        self._capture_key: tuple[Any, ...] = ()

    @functools.cached_property
    def fused(self) -> "FusedForward | None":
        """The fused forward, or None without Triton."""
        if self.model is None or not supports_triton(torch.empty(0, device=self.model.device)):
            return None
        from camshaft.rollout.builtin.cuda.fused_forward import FusedForward

        return FusedForward(self.model, self.eager)

    @contextmanager
    def prepare(self, num_rows: int, num_steps: int, keep: bool = False) -> Iterator[Forward]:
        """Yield a forward that uses the current weights, for at most `num_rows` rows.

        Padding rows write to the unused slots between the live rows and slot `num_rows`.
        """
        if self.capture_failed or num_steps < MIN_STEPS or has_hooks(self.hf):
            with self.decoder.prepare(num_rows, num_steps, keep) as forward:
                yield forward
            return
        self._capacity = max(self._capacity, num_rows)
        self.captured = self.eager if self.fused is None else self.fused.bind()
        weights = tensor_layouts(self.hf)
        if weights != self._weights:  # if equal, keep the old object, which makes the comparison in each step fast
            self._weights = weights
        try:
            yield functools.partial(self._forward, num_rows)
        finally:
            self.captured = self.eager  # a bound forward would keep the weights alive after `sleep`

    def release(self) -> None:
        """Free all graphs and their memory."""
        self.replays.clear()
        self._inputs = self._logits = None
        self._capture_key = ()
        self.graph_capture.release()

    def _forward(self, num_rows: int, tokens: Tensor, positions: Tensor, slots: Slots) -> Tensor:
        """Replay the graph of a step, capturing it if necessary. Only an eager step uses `slots`."""
        if self.capture_failed:
            return self.eager(tokens, positions, slots)
        capture_key = self._weights, self.cache.reallocations, self._capacity
        if capture_key != self._capture_key:
            self.release()
            self._capture_key = capture_key
        inputs, rows = self._fill_inputs(tokens, positions), len(tokens)
        batch_size = min(padded_rows(rows), num_rows)
        if batch_size not in self.replays:
            try:
                with self.cache.unchanged_states(batch_size):  # a capture runs the step several times
                    self.replays[batch_size] = self._capture(inputs[:, :batch_size])
            except Exception as error:
                self._disable(error)
                return self.eager(tokens, positions, slots)  # raises the error again if the step itself fails
        self.replays[batch_size]()
        assert self._logits is not None
        return self._logits[:rows]

    def _fill_inputs(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Copy tokens and positions into the input tensor of the graphs and return it."""
        if self._inputs is None:
            self._inputs = torch.zeros(2, self._capacity, dtype=torch.int64, device=tokens.device)
            self._num_filled = 0
        rows = len(tokens)
        if rows < self._num_filled:
            self._inputs[:, rows : self._num_filled].zero_()
        self._num_filled = rows
        self._inputs[0, :rows].copy_(tokens)
        self._inputs[1, :rows].copy_(positions)
        return self._inputs

    def _capture(self, inputs: Tensor) -> Replay:
        tokens, positions = inputs
        if self._logits is None:  # an eager call determines the shape and dtype of the logits
            logits = self.captured(tokens, positions, self.make_step(self.cache, positions))
            self._logits = logits.new_empty(self._capacity, logits.shape[1])
        out = self._logits[: len(tokens)]

        def step() -> None:
            # The logits are copied because graphs share intermediate memory, which the next graph may overwrite.
            out.copy_(self.captured(tokens, positions, self.make_step(self.cache, positions)))

        return self.graph_capture.capture(step)

    def _disable(self, error: Exception) -> None:
        """Free all graphs, and run all further steps eagerly."""
        self.capture_failed = True
        self.release()
        logger.warning(
            "cannot capture a decode step of %s as a CUDA graph (%s: %s). Decode steps run eagerly, which takes "
            "longer. Set rollout.enforce_eager=true to skip the capture",
            type(self.hf).__name__,
            type(error).__name__,
            str(error).partition("\n")[0],
        )


def build_graph_decoder(
    decoder: Decoder, cache: KVCache, config: RolloutEngineConfig, model: SharedModel | None = None
) -> CUDAGraphDecoder | None:
    """Build a decoder that uses CUDA graphs, or return None if `enforce_eager` is set or the device has no graphs."""
    device = torch.device(config.device)
    if config.enforce_eager or device.type == "cpu" or not hasattr(torch.get_device_module(device), "CUDAGraph"):
        return None
    return CUDAGraphDecoder(decoder, cache, CUDAGraphCapture(device), device_step, model)


def device_step(cache: KVCache, positions: Tensor) -> Slots:
    """Return a decode step with the Triton kernels if they support the cache, else `full_length_step`."""
    if supports_triton(positions):
        from camshaft.rollout.builtin.cuda.kernels import TritonDecodeStep, supports_cache

        if supports_cache(cache):
            return TritonDecodeStep(cache, positions)
    return full_length_step(cache, positions)


def full_length_step(cache: KVCache, positions: Tensor) -> Slots:
    """Return a decode step that attends to all positions of each slot with a mask computed on the device."""
    return DecodeStep(cache, positions, [(len(positions), cache.length)])


def padded_rows(rows: int) -> int:
    """Return the smallest captured batch size for `rows`: one of 1, 2, 4, 8, 16, 24, ... 64, 80, ... 128, 160, ..."""
    power = (rows - 1).bit_length()
    grain = 1 << power if rows <= 4 else max(8, 1 << (power - 3))
    return -(-rows // grain) * grain


def tensor_layouts(hf: nn.Module) -> tuple[Any, ...]:
    """Return the name, address, shape, strides and dtype of each weight and buffer."""
    tensors = (*hf.named_parameters(), *hf.named_buffers())
    return tuple((name, t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in tensors)
