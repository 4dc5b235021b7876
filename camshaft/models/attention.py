"""The attention implementation "packed" of transformers models: packed segments without padding and without a mask.

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=PACKED)
    out = model(input_ids=tokens[None], **packed_kwargs(Packing([5, 3, 7]), tokens.device))

Importing this module registers the implementation with `transformers`. The arguments of a model call select how its
attention is computed:

- `packed_kwargs`: each segment attends causally to itself, within the sliding window of the layer if it has one. With
  full attention, a segment may also continue a shared prefix. Device and dtype select the kernel: `cpu.py` on a CPU,
  `flash.py` in half precision on a GPU, and otherwise `scaled_dot_product_attention`. `blockwise.py` computes
  soft-capped scores, and attention sinks and shared prefixes where these kernels do not support them.
- `slots=`: a generator uses its own KV cache. `model(input_ids=(B, L), position_ids=...,
  attention_mask=no_mask(device), slots=cache, use_cache=False)` calls `cache.attend(module, query, key, value,
  scores, sinks)` in every layer, which returns (B, L, H, D).
- `exchange=` with `packed_kwargs`: sequence parallelism (`sequence.py`). The call receives one chunk of the tokens, and
  the packing describes the tokens of all chunks.
- Other calls (padded batches, `generate()`) use the implementation "sdpa" of `transformers`.

Unsupported kinds of attention raise `EngineError`. `reject_unsupported` checks a config, and `packed_attention` checks
the arguments of a call.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from camshaft.config.families.support import MAX_HEAD_DIM, Feature, alternative, refusal
from camshaft.device import is_cuda, to_device
from camshaft.errors import EngineError
from camshaft.models.blockwise import Scores, blockwise_attention
from camshaft.models.cpu import packed_cpu_attention, supports_cpu_kernel
from camshaft.models.flash import HALF, Bounds, packed_flash_attention
from camshaft.models.packing import Packing
from camshaft.models.recurrent import RecurrentLayer

PACKED = "packed"

LEAST_SHARED = 0.05
"""Fraction of tokens that prefix sharing must save on a GPU, where its additional kernels take 2 to 3 % of a step."""

UNSUPPORTED_ARGUMENTS = {
    "position_bias": "a position bias on attention scores",
    "indices": "sparse attention over selected tokens",
    "block_indices": "sparse attention over selected blocks",
}
"""Arguments of `transformers` layers that request unsupported attention, with a description for errors."""


class Slots(Protocol):
    """Cache of a generator, with methods that compute layers which read earlier tokens."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores, sinks: Tensor | None
    ) -> Tensor:
        """Add the keys and values of new tokens to the cache, and return the attention outputs (B, L, H, D).

        `query` is (B, H, L, D); `key` and `value` are (B, Hkv, L, D). `module.layer_idx` identifies the layer.
        """
        ...

    def recur(self, layer: RecurrentLayer, hidden_states: Tensor) -> Tensor:
        """Compute a layer with a recurrent state, (B, L, H) -> (B, L, H), and store its new state."""
        ...


class Exchange(Protocol):
    """Exchange of tokens and heads between the ranks of a sequence-parallel group, before and after attention."""

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turn this rank's chunk with all heads, (1, H, chunk, D), into all tokens, (1, H / ranks, N, D)."""
        ...

    def to_tokens(self, output: Tensor) -> Tensor:
        """Turn all tokens with some of the heads, (1, N, H / ranks, D), into this rank's chunk, (1, chunk, H, D)."""
        ...

    def local_heads(self, values: Tensor) -> Tensor:
        """Select from one value per query head, (H,), those of the heads that this rank computes, (H / ranks,)."""
        ...


def no_mask(device: torch.device | str) -> Tensor:
    """Return the `attention_mask` for packed calls and for calls with a KV cache: an empty 4-D tensor.

    `transformers` passes a 4-D mask through unchanged. For None, it would search the position ids for segments, which
    waits for the device, and build an N x N mask. The mask is empty, so no kernel can apply it by mistake.
    """
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)


def packed_kwargs(packing: Packing, device: torch.device | str) -> dict[str, Any]:
    """Build the keyword arguments of a model call on packed segments, with `input_ids` of shape (1, N)."""
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


def config_values(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the values of the language model's config, also by the names that they have in most families."""
    text_config = config.get_text_config()
    return text_config.to_dict() | {name: getattr(text_config, name, None) for name in text_config.attribute_map}


def reject_unsupported(config: PreTrainedConfig, feature: Feature = "packed rows") -> None:
    """Raise `EngineError` with all reasons if models of this config do not support `feature`."""
    values = config_values(config)
    if message := refusal(feature, values):
        raise EngineError(f"{message}; {alternative(values)}")


def layer_window(config: PreTrainedConfig, layer: int) -> int | None:
    """Return the sliding window of a layer, or None if the layer has full attention."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    return window if not types or types[layer] == "sliding_attention" else None


def least_shared(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the fraction of tokens that prefix sharing must save to be faster, or None if it is not supported."""
    if is_cuda(torch.empty(0, device=device)):
        return LEAST_SHARED if dtype in HALF else None
    return 0.0 if device.type == "cpu" else None


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
    """Compute the attention of one layer and return its outputs (B, L, H, D), and None for the attention weights.

    The signature is that of attention functions in `transformers`. `kwargs` may contain a `softcap` and attention sinks
    `s_aux` (H,), and select the computation, as described in the module docstring.
    """
    reasons = [feature for name, feature in UNSUPPORTED_ARGUMENTS.items() if kwargs.get(name) is not None]
    if reasons:
        raise _unsupported_error(type(module).__name__, reasons)
    sinks: Tensor | None = kwargs.get("s_aux")
    if sinks is None and getattr(module, "sinks", None) is not None:
        raise _unsupported_error(type(module).__name__, ["attention sinks that it does not pass to its attention"])
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, kwargs.get("softcap"))
    slots: Slots | None = kwargs.get("slots")
    if slots is not None:
        return slots.attend(module, query, key, value, scores, sinks), None
    if kwargs.get("cu_seq_lens_q") is None:
        if attention_mask is not None and attention_mask.numel() == 0:
            raise EngineError(
                f"{type(module).__name__} received no_mask() but neither cu_seq_lens_q nor slots; call the model with "
                "packed_kwargs(...) or slots=. If you did, this model drops the arguments and does not support packing"
            )
        if scores.softcap is not None or sinks is not None:
            raise EngineError(
                f"{type(module).__name__} has soft-capped scores or attention sinks, which the attention "
                f"implementation '{PACKED}' supports only in packed calls; for padded batches, load the model with "
                "attn_implementation='eager'"
            )
        kwargs["sliding_window"] = sliding_window
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if query.shape[0] != 1:
        raise EngineError(
            f"a packed call requires input_ids of shape (1, N), got a batch of {query.shape[0]} rows; concatenate the "
            "rows and describe them with a Packing"
        )
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise _unsupported_error(type(module).__name__, ["attention that is not causal"])
    _check_window(module, sliding_window, kwargs["cu_seq_lens_q"])
    exchange: Exchange | None = kwargs.get("exchange")
    if exchange is None:
        return _attend_segments(query, key, value, sinks, scores, dropout, kwargs), None
    query, key, value = exchange.to_heads(query, key, value)
    sinks = None if sinks is None else exchange.local_heads(sinks)
    return exchange.to_tokens(_attend_segments(query, key, value, sinks, scores, dropout, kwargs)), None


def _check_window(module: nn.Module, window: int | None, limits: Tensor) -> None:
    """Reject a layer that applies the sliding window of its config only by a mask, which packed calls do not have."""
    config: Any = getattr(module, "config", None)
    layer: Any = getattr(module, "layer_idx", None)
    expected = None if config is None or layer is None else layer_window(config, layer)
    if expected is not None and expected != window and (longest := int(limits.diff().max())) > expected:
        raise EngineError(
            f"{type(module).__name__} does not pass the sliding window of its config ({expected} tokens) to its "
            f"attention, so a row of {longest} tokens would be computed without it; limit prompts and responses to "
            f"{expected} tokens together, or choose another model"
        )


def _attend_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scores: Scores,
    dropout: float,
    kwargs: dict[str, Any],
) -> Tensor:
    """Compute attention within all packed segments: (1, H, N, D) and (1, Hkv, N, D) -> (1, N, H, D)."""
    packing: Packing | None = kwargs.get("packing")
    shares_prefixes = packing is not None and packing.prefix_of is not None
    scale, window = scores.scale, scores.window
    is_plain = scores.softcap is None and not (shares_prefixes and window is not None)
    if is_plain and _supports_flash(query, value, dropout):
        limits, longest = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
        bounds = Bounds(limits, limits, longest, longest)
        return packed_flash_attention(query[0], key[0], value[0], bounds, packing, scale, window, sinks)[None]
    if packing is None:  # the caller passed the arguments of `transformers` for packed rows, not `packed_kwargs`
        packing = Packing([length for length in kwargs["cu_seq_lens_q"].diff().tolist() if length])
    if packing.size != query.shape[2]:
        raise EngineError(
            f"a packing of {packing.size} tokens does not match input_ids with {query.shape[2]} tokens; pass the "
            "packing of these tokens"
        )
    is_full = scores.softcap is None and (window is None or packing.longest_context <= window)
    if is_full and supports_cpu_kernel(query, value, dropout):
        return packed_cpu_attention(query[0], key[0], value[0], packing, scale, sinks)[None]
    if sinks is not None or scores.softcap is not None or shares_prefixes:
        if dropout:
            raise EngineError(
                f"attention dropout ({dropout}) is not supported with prefix sharing, attention sinks or soft-capped "
                "scores; use a Packing without prefix_of, or set the dropout of the model's config to 0"
            )
        return blockwise_attention(query[0], key[0], value[0], packing, scores, sinks)[None]
    # A single split for all runs: for separate slices, autograd would write one gradient of all N tokens per slice.
    sizes = [count * length for count, length in packing.runs]
    parts = [tensor[0].split(sizes, dim=1) for tensor in (query, key, value)]
    outputs = []
    for (count, _), q, k, v in zip(packing.runs, *parts, strict=True):
        out = _attend_equal_lengths(_as_rows(q, count), _as_rows(k, count), _as_rows(v, count), scale, dropout, window)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None]


def _as_rows(packed: Tensor, count: int) -> Tensor:
    """View `count` adjacent segments of equal length L, (H, count * L, D), as (count, H, L, D)."""
    return packed.unflatten(1, (count, -1)).transpose(0, 1)


def _attend_equal_lengths(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, window: int | None
) -> Tensor:
    """Compute causal attention within segments of equal length: (n, H, L, D) and (n, Hkv, L, D) -> (n, H, L, D)."""
    length = query.shape[2]
    if window is None or length <= window:
        if is_cuda(query) and query.dtype not in HALF:
            # On CUDA only the flash kernel, which requires half precision, supports grouped queries. Otherwise torch
            # would compute all scores of all heads at once.
            key, value = _repeat_heads(query, key, value)
        gqa = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=gqa
        )
    key, value = _repeat_heads(query, key, value)  # with a mask, the fast kernels do not support grouped queries
    blocks, size = [], max(window, 256)
    for start in range(0, length, size):
        # A block of queries attends to itself and to the window before it, so memory is linear in the length.
        stop, window_start = min(start + size, length), max(0, start - window + 1)
        rows = torch.arange(start, stop, device=query.device)[:, None]
        distance = rows - torch.arange(window_start, stop, device=query.device)
        blocks.append(
            F.scaled_dot_product_attention(
                query[:, :, start:stop],
                key[:, :, window_start:stop],
                value[:, :, window_start:stop],
                attn_mask=(distance >= 0) & (distance < window),
                scale=scaling,
                dropout_p=dropout,
            )
        )
    return torch.cat(blocks, dim=2)


def _supports_flash(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Return True if the flash kernels support these tensors, which excludes float32 and dropout."""
    return (
        is_cuda(query) and query.dtype in HALF and dropout == 0 and query.shape[-1] == value.shape[-1] <= MAX_HEAD_DIM
    )


def _repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat key and value heads so that their number equals the number of query heads."""
    repeats = query.shape[1] // key.shape[1]
    if repeats == 1:
        return key, value
    return key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)


def _unsupported_error(name: str, features: Sequence[str]) -> EngineError:
    return EngineError(
        f"{name} requires {' and '.join(features)}, which packed attention does not support; choose a model with "
        "causal or sliding-window attention"
    )


# Excluded from compilation, because the loop over segments differs between calls and would cause recompilation.
AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
AttentionMaskInterface.register(PACKED, sdpa_mask)
