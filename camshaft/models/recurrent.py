"""Layers with a recurrent state, on packed rows and in the slots of a generator.

    pack_recurrent_layers(hf)         # before calls with packed rows or with slots

A gated linear attention layer of `transformers` reads earlier tokens through a recurrent state and a short convolution.
Both would leak from one packed row into the next. `pack_recurrent_layers` replaces each such layer by one with the same
parameters that computes each packed row from an empty state:

- on CUDA with the packages flash-linear-attention and causal-conv1d, by their kernels for packed rows;
- otherwise in batches of rows of similar lengths, padded on the left, which is the padding that `transformers` expects.

With `slots=`, the layer calls `slots.recur(layer, hidden_states)`; a generator then calls `RecurrentLayer.advance` with
the states of its slots. Other calls (padded batches, `generate()`) are those of `transformers`.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from camshaft.device import is_cuda, to_device
from camshaft.errors import EngineError
from camshaft.models.packing import Packing

BOUNDARIES = {
    "Qwen3NextGatedDeltaNet": "cu_seq_lens_q",
    "Qwen3_5GatedDeltaNet": "cu_seq_lens_q",
    "Qwen3_5MoeGatedDeltaNet": "cu_seq_lens_q",
    "OlmoHybridGatedDeltaNet": "cu_seq_lens_q",
    "KimiLinearDeltaAttention": "cu_seqlens",
    "MiniMaxLightningAttention": None,
}
"""Supported layer classes, with the argument that passes the boundaries of rows to a kernel, or None without one."""

KERNEL_PACKAGES = ("fla", "causal_conv1d")

PADDING = 1 / 8
"""Maximum number of padding tokens in a batch of rows, as a fraction of its other tokens."""

States = dict[str, Tensor]
"""States of a layer, "conv" and "recurrent", each of shape (rows, ...). A layer may have only one of them."""


class RowBatch(NamedTuple):
    """Packed rows as a batch that is padded on the left."""

    rows: list[int]
    tokens: Tensor
    """(B, L) offset of each token in the packed tokens."""
    mask: Tensor | None
    """(B, L) False for padding; None without padding."""


class RecurrentLayer(nn.Module):
    """Forward pass of a layer class of `BOUNDARIES`, which is the next base class."""

    layer_idx: int
    cache_argument: str
    """Name of the cache in the forward pass of the next base class."""
    other_arguments: dict[str, None]
    """Required arguments that these layers do not read."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        call: Any = super().forward
        slots, packing = kwargs.get("slots"), kwargs.get("packing")
        if slots is not None:
            out = slots.recur(self, hidden_states)
        elif packing is not None:
            out = uncompiled(self, hidden_states, packing, kwargs["cu_seq_lens_q"])
        else:
            return call(hidden_states, *args, **kwargs)
        return (out, None) if self._returns_tuple else out

    @property
    def _returns_tuple(self) -> bool:
        return BOUNDARIES[type(self).__name__] is None

    def advance(self, hidden_states: Tensor, mask: Tensor | None, states: States | None) -> tuple[Tensor, States]:
        """Compute tokens (B, L, H) that follow `states`, or that start a row; return outputs and final states.

        Given states are updated in place, and L must then be 1.
        """
        cache = _LayerCache(self.layer_idx, states)
        return self.compute(hidden_states, mask, cache), cache.states()

    def compute(self, hidden_states: Tensor, mask: Tensor | None, cache: Cache | None, **kwargs: Any) -> Tensor:
        """Call the layer of `transformers` on tokens (B, L, H)."""
        call: Any = super().forward
        kwargs = {**self.other_arguments, self.cache_argument: cache, **kwargs}
        out = call(hidden_states=hidden_states, attention_mask=mask, **kwargs)
        return out[0] if self._returns_tuple else out


class _LayerCache(Cache):
    """Cache of `transformers` that holds the states of one layer."""

    def __init__(self, layer_idx: int, states: States | None):
        self.layer: Any = LinearAttentionLayer()
        super().__init__(layers=[self.layer] * (layer_idx + 1))
        if states is None:
            return
        self.layer.has_previous_state[0] = True
        if "conv" in states:
            self.layer.conv_states[0], self.layer.is_conv_states_initialized[0] = states["conv"], True
        if "recurrent" in states:
            self.layer.recurrent_states[0], self.layer.is_recurrent_states_initialized[0] = states["recurrent"], True

    def states(self) -> States:
        states = {"conv": self.layer.conv_states[0], "recurrent": self.layer.recurrent_states[0]}
        return {name: state for name, state in states.items() if state is not None}

    # Methods of MiniMax's own cache
    def get_linear_cache(self, _: int) -> Tensor | None:
        return self.layer.recurrent_states[0]

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        self.update_recurrent_state(state, layer_idx)


def pack_recurrent_layers(model: nn.Module) -> None:
    """Replace the layers of `BOUNDARIES` inside `model`. Names and parameters do not change."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in BOUNDARIES and not isinstance(child, RecurrentLayer):
                cls = _packed_class(type(child))
                layer = cls.__new__(cls)
                vars(layer).update(vars(child))
                parent.register_module(name, layer)


@functools.cache
def _packed_class(cls: type[nn.Module]) -> type[RecurrentLayer]:
    names = inspect.signature(cls.forward).parameters
    attributes = {
        "cache_argument": "cache_params" if "cache_params" in names else "past_key_values",
        "other_arguments": dict.fromkeys({"position_embeddings"} & names.keys()),
    }
    return type(cls.__name__, (RecurrentLayer, cls), attributes)


def compute_packed(layer: RecurrentLayer, hidden_states: Tensor, packing: Packing, limits: Tensor) -> Tensor:
    """Compute packed rows, (1, N, H) -> (1, N, H). `limits` are the start of each row and the end of the last one."""
    name = type(layer).__name__
    if packing.prefix_of is not None:
        raise EngineError(f"{name} does not support prefix sharing; use a Packing without prefix_of")
    argument = BOUNDARIES[name]
    if argument is not None and is_cuda(hidden_states) and has_kernels():
        segments = torch.arange(len(packing.lengths), dtype=torch.int32, device=limits.device)
        segments = segments.repeat_interleave(limits.diff(), output_size=packing.size)
        return layer.compute(hidden_states, None, None, seq_idx=segments[None], **{argument: limits.long()})
    return map_rows(hidden_states, packing, lambda hidden, batch: layer.compute(hidden, batch.mask, None))


uncompiled: Any = torch.compiler.disable(compute_packed)
"""`compute_packed`, excluded from compilation, because its loop over batches differs between calls."""


@functools.cache
def has_kernels() -> bool:
    """Return True if the packages with kernels for packed rows are installed."""
    return all(importlib.util.find_spec(name) is not None for name in KERNEL_PACKAGES)


def map_rows(hidden_states: Tensor, packing: Packing, function: Callable[[Tensor, RowBatch], Tensor]) -> Tensor:
    """Apply `function` to the hidden states (B, L, H) of batches of rows; return its results as packed rows."""
    batches, places = row_batches(packing.lengths, hidden_states.device)
    parts = []
    for batch in batches:
        hidden = hidden_states[0].index_select(0, batch.tokens.flatten()).unflatten(0, batch.tokens.shape)
        parts.append(function(hidden, batch).flatten(0, 1))
    return torch.cat(parts).index_select(0, places)[None]


@functools.lru_cache(maxsize=4)  # the layers of a model share the batches of a call
@torch.inference_mode(False)  # a generator and a training step may share them
def row_batches(lengths: Sequence[int], device: torch.device) -> tuple[list[RowBatch], Tensor]:
    """Divide packed rows into batches; return them and the place (N,) of each token among all tokens of the batches."""
    starts, sizes = torch.tensor([0, *lengths[:-1]]).cumsum(0), torch.tensor(lengths)
    batches, places, offset = [], torch.empty(sum(lengths), dtype=torch.int64), 0
    for rows in _similar_rows(lengths):
        length = lengths[rows[0]]
        index = torch.arange(length) - (length - sizes[rows])[:, None]
        is_token, tokens = index >= 0, index.clamp(min=0) + starts[rows][:, None]
        places[tokens[is_token]] = offset + is_token.flatten().nonzero()[:, 0]
        offset += tokens.numel()
        mask = None if is_token.all() else to_device(is_token, device)
        batches.append(RowBatch(rows, to_device(tokens, device), mask))
    return batches, to_device(places, device)


def _similar_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Group the rows so that the padding of each group, whose first row is its longest, is at most `PADDING`."""
    groups: list[list[int]] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        tokens += lengths[row]
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= (1 + PADDING) * tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
            tokens = lengths[row]
    return groups
