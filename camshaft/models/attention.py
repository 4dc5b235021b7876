"""The attention implementation "packed": segments side by side in one row, without padding and without a mask.

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=PACKED)
    out = model(input_ids=tokens[None], **packed_kwargs(Packing([5, 3, 7]), tokens.device))

Importing this module registers it with `transformers`. The arguments of a call select its kind:

- `packed_kwargs`: each segment attends causally to itself, within the sliding window of the layer if it has one. On a
  CPU a segment may also continue a shared prefix (`cpu.py`). Device and dtype select the kernel.
- `slots=`: a generator that manages its own KV cache. `model(input_ids=(B, L), position_ids=...,
  attention_mask=no_mask(device), slots=cache, use_cache=False)` calls `cache.attend(module, query, key, value,
  scaling, sliding_window)` in every layer, which returns (B, L, H, D).
- `exchange=` with `packed_kwargs`: sequence parallelism (`sequence.py`). The call holds one chunk of the tokens, and
  the packing describes all chunks.
- other calls (padded batches, `generate()`) use "sdpa" of `transformers`.

Attention that this implementation does not compute raises `EngineError`: `reject_unsupported` checks a config,
`packed_attention` the arguments of a call.
"""

import inspect
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from camshaft.device import to_device
from camshaft.errors import EngineError
from camshaft.models.cpu import packed_cpu_attention, supports_cpu_kernel
from camshaft.models.packing import Packing

PACKED = "packed"

FLASH_MAX_HEAD_DIM = 256

SINK_MODELS = ("gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4")
"""Model types whose layers always have attention sinks; other models pass them as an argument."""

UNSUPPORTED_ARGUMENTS = {
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias on attention scores",
    "indices": "sparse attention over chosen tokens",
    "block_indices": "sparse attention over chosen blocks",
}
"""Arguments of `transformers` layers for attention that this implementation does not support."""


class Slots(Protocol):
    """KV cache of a generator, which also computes attention over it."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Add the new tokens to the cache and return their attention outputs (B, L, H, D).

        `query` is (B, H, L, D), `key` and `value` are (B, Hkv, L, D). `module.layer_idx` identifies the layer.
        """
        ...


class Exchange(Protocol):
    """Exchange around attention between ranks that each hold one chunk of a packed row."""

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange (1, H, chunk, D) of this rank's tokens for (1, H / ranks, N, D) of all tokens."""
        ...

    def to_tokens(self, output: Tensor) -> Tensor:
        """Exchange (1, N, H / ranks, D) of all tokens for (1, chunk, H, D) of this rank's tokens."""
        ...


def no_mask(device: torch.device | str) -> Tensor:
    """Return the `attention_mask` for packed calls and calls with a KV cache: 4-D, so that `transformers` keeps it.

    For None, `transformers` would search the position ids for segments, which waits for the device, and build an N x N
    mask. This mask is empty, so that no kernel can apply it.
    """
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)


def packed_kwargs(packing: Packing, device: torch.device | str) -> dict[str, Any]:
    """Build the keyword arguments of a model call on one (1, N) row of packed segments."""
    cumulative = to_device(F.pad(packing.ends, (1, 0)).to(torch.int32), device)
    return {
        "attention_mask": no_mask(device),
        "position_ids": to_device(packing.position_ids()[None], device),
        "cu_seq_lens_q": cumulative,
        "cu_seq_lens_k": cumulative,
        "max_length_q": max(packing.lengths),
        "max_length_k": max(packing.lengths),
        "packing": packing,
        "use_cache": False,
    }


def reject_unsupported(config: PreTrainedConfig) -> None:
    """Raise `EngineError` with the reasons if models of this config need unsupported attention."""
    text_config = config.get_text_config()
    values = text_config.to_dict()
    reasons = []
    if values.get("attn_logit_softcapping") is not None:
        reasons.append(f"soft-capped attention scores (attn_logit_softcapping={values['attn_logit_softcapping']})")
    if text_config.model_type in SINK_MODELS:
        reasons.append("attention sinks")
    others = sorted(set(values.get("layer_types") or ()) - {"full_attention", "sliding_attention"})
    if others:
        reasons.append(f"layers that are neither full nor sliding attention (layer_types has {', '.join(others)})")
    if values.get("is_causal") is False or values.get("use_bidirectional_attention") in (True, "all"):
        reasons.append("attention that is not causal")
    if reasons:
        raise _unsupported_error(text_config.model_type, reasons)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for one layer; `kwargs` select the kind of call. Returns (B, L, H, D)."""
    reasons = [feature for name, feature in UNSUPPORTED_ARGUMENTS.items() if kwargs.get(name) is not None]
    if reasons:
        raise _unsupported_error(type(module).__name__, reasons)
    slots: Slots | None = kwargs.get("slots")
    if slots is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return slots.attend(module, query, key, value, scale, sliding_window), None
    if kwargs.get("cu_seq_lens_q") is None:
        if attention_mask is not None and attention_mask.numel() == 0:
            raise EngineError(
                f"{type(module).__name__} received no_mask() but neither cu_seq_lens_q nor slots; call the model with "
                "packed_kwargs(...) or slots=. If you did, this model family drops them and does not support packing"
            )
        kwargs["sliding_window"] = sliding_window
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if query.shape[0] != 1:
        raise EngineError(f"packed calls take one row, input_ids of shape (1, N); got a batch of {query.shape[0]}")
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise _unsupported_error(type(module).__name__, ["attention that is not causal"])
    exchange: Exchange | None = kwargs.get("exchange")
    if exchange is None:
        return _attend_segments(query, key, value, kwargs, scaling, dropout, sliding_window), None
    query, key, value = exchange.to_heads(query, key, value)
    return exchange.to_tokens(_attend_segments(query, key, value, kwargs, scaling, dropout, sliding_window)), None


def _attend_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kwargs: dict[str, Any],
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    """Compute attention within all segments of one row: (1, H, N, D) and (1, Hkv, N, D) -> (1, N, H, D)."""
    packing: Packing | None = kwargs.get("packing")
    shared = packing is not None and packing.prefix_of is not None
    if not shared and _supports_flash(query, value, dropout):
        return _attend_flash(query, key, value, kwargs, scaling, window)
    if packing is None:  # called with the arguments of `transformers`, without `packed_kwargs`
        packing = Packing([length for length in kwargs["cu_seq_lens_q"].diff().tolist() if length])
    if packing.size != query.shape[2]:
        raise EngineError(f"packed segments of {packing.size} tokens do not match a row of {query.shape[2]} tokens")
    if supports_cpu_kernel(query, value, dropout) and (window is None or packing.longest_context <= window):
        return packed_cpu_attention(query[0], key[0], value[0], packing, scaling)[None]
    if shared:
        raise EngineError(
            "prefix sharing supports full attention without dropout on a CPU; pack complete rows for this model and "
            "device"
        )
    runs = [(length, len(list(run))) for length, run in itertools.groupby(packing.lengths)]
    # One split for all runs: autograd would write a gradient of the full row for every separate slice.
    parts = [tensor[0].split([length * count for length, count in runs], dim=1) for tensor in (query, key, value)]
    outputs = []
    for (_, count), q, k, v in zip(runs, *parts, strict=True):
        out = _attend_equal_lengths(
            _as_rows(q, count), _as_rows(k, count), _as_rows(v, count), scaling, dropout, window
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None]


def _as_rows(packed: Tensor, count: int) -> Tensor:
    """View (H, count * L, D) of neighbours of equal length as (count, H, L, D)."""
    return packed.unflatten(1, (count, -1)).transpose(0, 1)


def _attend_equal_lengths(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, window: int | None
) -> Tensor:
    """Compute causal attention within segments of equal length: (n, H, L, D) and (n, Hkv, L, D) -> (n, H, L, D)."""
    length = query.shape[2]
    if window is None or length <= window:
        gqa = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=gqa
        )
    key, value = _repeat_heads(query, key, value)  # with a mask, the fast kernels need equal numbers of heads
    blocks, size = [], max(window, 256)
    for start in range(0, length, size):
        # A block of queries attends to itself and to one window before it, so memory is linear in the length.
        stop, first = min(start + size, length), max(0, start - window + 1)
        rows = torch.arange(start, stop, device=query.device)[:, None]
        distance = rows - torch.arange(first, stop, device=query.device)
        blocks.append(
            F.scaled_dot_product_attention(
                query[:, :, start:stop],
                key[:, :, first:stop],
                value[:, :, first:stop],
                attn_mask=(distance >= 0) & (distance < window),
                scale=scaling,
                dropout_p=dropout,
            )
        )
    return torch.cat(blocks, dim=2)


def _supports_flash(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Return True if the variable-length flash kernel supports these tensors; it has neither float32 nor dropout."""
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and dropout == 0
        and query.shape[-1] == value.shape[-1] <= FLASH_MAX_HEAD_DIM
    )


def _attend_flash(
    query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any], scaling: float | None, window: int | None
) -> Tensor:
    """Compute attention within all segments in one kernel. The kernel has no CPU version, so GPU tests cover it."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    else:  # torch 2.11
        key, value = _repeat_heads(query, key, value)
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    bounds, longest = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, **options)
    assert isinstance(out, Tensor)  # the kernel returns a pair only on request for the logsumexp
    return out[None]


def _repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat key and value heads to the number of query heads."""
    groups = query.shape[1] // key.shape[1]
    return (
        (key, value) if groups == 1 else (key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1))
    )


def _unsupported_error(name: str, features: Sequence[str]) -> EngineError:
    return EngineError(
        f"{name} needs {' and '.join(features)}, which packed attention does not support; "
        "choose a model with causal or sliding-window attention"
    )


# Excluded from compiled layers: the loop over segments differs from call to call.
AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
AttentionMaskInterface.register(PACKED, sdpa_mask)
