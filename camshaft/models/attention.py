"""The attention implementation "packed": documents side by side in one row, with no pad token and no mask.

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=PACKED)
    out = model(input_ids=tokens[None], **packed_kwargs(Packing([5, 3, 7]), tokens.device))

Importing this module registers it with `transformers`. One name serves every kind of call:

- `packed_kwargs`: each document attends to itself alone, causally, inside its sliding window if the layer
  has one, or, on a CPU, goes on where another ends (`attention_cpu.py`). The kernel is picked by device and dtype.
- `slots=`: a generator keeps keys and values itself. `model(input_ids=(B, L), position_ids=...,
  attention_mask=no_mask(device), slots=store, use_cache=False)` calls `store.attend(module, query, key, value,
  scaling, sliding_window)` in every layer and takes the (B, L, H, D) that it returns.
- `exchange=` beside `packed_kwargs`: the call has one chunk of the tokens (`sequence.py`); the documents are those
  of all chunks together.
- anything else (padded batches, `generate()`) is what `transformers` calls "sdpa".

What this would get wrong is refused by name: from a config by `refuse_unsupported`, from a call otherwise.
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
from camshaft.models.cpu.attention import packed_cpu_attention, supports_cpu_kernel
from camshaft.models.packing import Packing

PACKED = "packed"

FLASH_MAX_HEAD_DIM = 256

SINK_MODELS = ("gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4")
"""Model types whose layers always have attention sinks; others ask for them in the call."""

REFUSED_ARGUMENTS = {
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias on attention scores",
    "indices": "sparse attention over chosen tokens",
    "block_indices": "sparse attention over chosen blocks",
}
"""Arguments by which a layer of `transformers` asks for attention that this implementation does not compute."""


class Slots(Protocol):
    """Where a generator keeps keys and values of unfinished rows; computes attention over them."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """(B, H, L, D) query and (B, Hkv, L, D) key and value of the new tokens -> (B, L, H, D).

        `module.layer_idx` says which layer asks.
        """
        ...


class Exchange(Protocol):
    """What ranks that hold one chunk of a packed row each do around attention."""

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(1, H, chunk, D) of the own tokens -> (1, H / ranks, N, D) of all tokens."""
        ...

    def to_tokens(self, output: Tensor) -> Tensor:
        """(1, N, H / ranks, D) of all tokens -> (1, chunk, H, D) of the own tokens."""
        ...


def no_mask(device: torch.device | str) -> Tensor:
    """The `attention_mask` of packed and slot calls: `transformers` passes a 4-D mask on as it is.

    Given None instead, it would look for documents in the position ids (waiting for the device) and build a
    mask of all tokens by all tokens. This one has no entry, so that no kernel can take it for a real mask.
    """
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)


def packed_kwargs(packing: Packing, device: torch.device | str) -> dict[str, Any]:
    """The keyword arguments of a model call on one (1, N) row of packed segments."""
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


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Raise `EngineError`, naming the reason, if models of this config need attention that "packed" is not."""
    text = config.get_text_config()
    values = text.to_dict()
    found = []
    if values.get("attn_logit_softcapping") is not None:
        found.append(f"soft-capped attention scores (attn_logit_softcapping={values['attn_logit_softcapping']})")
    if text.model_type in SINK_MODELS:
        found.append("attention sinks")
    others = sorted(set(values.get("layer_types") or ()) - {"full_attention", "sliding_attention"})
    if others:
        found.append(f"layers that are neither full nor sliding attention (layer_types has {', '.join(others)})")
    if values.get("is_causal") is False or values.get("use_bidirectional_attention") in (True, "all"):
        found.append("attention that is not causal")
    if found:
        raise _refusal(text.model_type, found)


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
    """What every attention layer calls; see the map above. Returns (B, L, H, D)."""
    asked = [words for name, words in REFUSED_ARGUMENTS.items() if kwargs.get(name) is not None]
    if asked:
        raise _refusal(type(module).__name__, asked)
    slots: Slots | None = kwargs.get("slots")
    if slots is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return slots.attend(module, query, key, value, scale, sliding_window), None
    if kwargs.get("cu_seq_lens_q") is None:
        if attention_mask is not None and attention_mask.numel() == 0:
            raise EngineError(
                f"{type(module).__name__} was given no_mask() but neither cu_seq_lens_q nor slots: call the model with "
                "packed_kwargs(...) or slots=; if you did, this model family drops them and cannot be packed"
            )
        kwargs["sliding_window"] = sliding_window
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if query.shape[0] != 1:
        raise EngineError(
            f"packed documents come in one row, input_ids of shape (1, N); got a batch of {query.shape[0]}"
        )
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise _refusal(type(module).__name__, ["attention that is not causal"])
    exchange: Exchange | None = kwargs.get("exchange")
    if exchange is None:
        return _packed_documents(query, key, value, kwargs, scaling, dropout, sliding_window), None
    query, key, value = exchange.to_heads(query, key, value)
    return exchange.to_tokens(_packed_documents(query, key, value, kwargs, scaling, dropout, sliding_window)), None


def _packed_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kwargs: dict[str, Any],
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    """Attention within all segments of one row: (1, H, N, D) and (1, Hkv, N, D) -> (1, N, H, D), by device."""
    packing: Packing | None = kwargs.get("packing")
    shared = packing is not None and packing.prefix_of is not None
    if not shared and _flash_can(query, value, dropout):
        return _flash_documents(query, key, value, kwargs, scaling, window)
    if packing is None:  # a caller of transformers gives `cu_seq_lens_q` only
        packing = Packing([length for length in kwargs["cu_seq_lens_q"].diff().tolist() if length])
    if packing.size != query.shape[2]:
        raise EngineError(f"packed segments of {packing.size} tokens do not match a row of {query.shape[2]} tokens")
    if supports_cpu_kernel(query, value, dropout) and (window is None or packing.longest_context <= window):
        return packed_cpu_attention(query[0], key[0], value[0], packing, scaling)[None]
    if shared:
        raise EngineError(
            "prefix sharing supports full attention without dropout on a CPU; pack whole rows for this model or device"
        )
    runs = [(length, len(list(run))) for length, run in itertools.groupby(packing.lengths)]
    # Cut all at once: the gradient of a slice of its own would be as long as the whole row.
    parts = [tensor[0].split([length * count for length, count in runs], dim=1) for tensor in (query, key, value)]
    outputs = []
    for (_, count), q, k, v in zip(runs, *parts, strict=True):
        out = _documents(_as_rows(q, count), _as_rows(k, count), _as_rows(v, count), scaling, dropout, window)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None]


def _as_rows(packed: Tensor, count: int) -> Tensor:
    """(H, count * L, D) of neighbours of one length as (count, H, L, D), without a copy."""
    return packed.unflatten(1, (count, -1)).transpose(0, 1)


def _documents(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, window: int | None
) -> Tensor:
    """Causal attention of documents of one length: (n, H, L, D) and (n, Hkv, L, D) -> (n, H, L, D)."""
    length = query.shape[2]
    if window is None or length <= window:
        gqa = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=gqa
        )
    key, value = _repeat_heads(query, key, value)  # with a mask, the fast kernels want equal numbers of heads
    blocks, size = [], max(window, 256)
    for start in range(0, length, size):
        # A block of queries sees itself and one window before it: memory grows with the length, not its square.
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


def _flash_can(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether the variable-length flash kernel takes these; it has neither float32 nor dropout."""
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and dropout == 0
        and query.shape[-1] == value.shape[-1] <= FLASH_MAX_HEAD_DIM
    )


def _flash_documents(
    query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any], scaling: float | None, window: int | None
) -> Tensor:
    """All documents in one kernel; exercised by the GPU tests, since the kernel has no CPU version."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    else:  # torch 2.11
        key, value = _repeat_heads(query, key, value)
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    bounds, longest = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, **options)
    assert isinstance(out, Tensor)  # a pair only where the log-sum-exp is asked for
    return out[None]


def _repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads as the query has."""
    groups = query.shape[1] // key.shape[1]
    return (
        (key, value) if groups == 1 else (key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1))
    )


def _refusal(who: str, found: Sequence[str]) -> EngineError:
    return EngineError(
        f"{who} needs {' and '.join(found)}, which packed attention would compute wrongly; "
        "choose a model with plain causal or sliding-window attention"
    )


# A compiled layer calls it as it is: the loop over documents differs from call to call.
AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
AttentionMaskInterface.register(PACKED, sdpa_mask)
