"""One packed row over several ranks (Ulysses): each computes a piece of the tokens, and of the heads in attention.

    packed.sequence = SequenceSplit(group)                     # then `PackedModel.forward` gives the same on all ranks
    out = packed(tokens, lengths, at, ("log_probs",))          # every rank of the group: the whole row
    loss_of(out).backward()                                    # then SUM the parameters' gradients over the group

Everything but attention looks at one token at a time, so a rank computes its chunk of the row alone. Around
attention the ranks swap: a chunk of tokens with all heads for all tokens with a part of the heads. What comes
out per token is gathered, so that every rank computes the same loss from all outputs; in the backward pass a rank
goes on with the gradient of its own outputs, and parameter gradients of the ranks add up to the whole.

`split_columns` and `join_columns` cut the per-token columns of a batch at the same places.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from camshaft.dataproto import DataProto, Ragged
from camshaft.device import to_device
from camshaft.errors import EngineError
from camshaft.models.packing import Packing

ROPE_BY_LONGEST = ("dynamic", "longrope")
"""Rotary embeddings that change with the longest position of the call, which one chunk does not know."""


class SequenceSplit:
    """This rank's part of a packed row, and what the ranks of its group exchange.

    `device` is where the group exchanges tensors: "cpu" for gloo.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device | str = "cpu"):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.device = torch.device(device)

    # -- tokens -----------------------------------------------------------------------------------

    def own(self, count: int) -> slice:
        """This rank's chunk of `count` tokens; the last ranks may find fewer than the others, or none."""
        width = -(-count // self.size)
        return slice(self.rank * width, (self.rank + 1) * width)

    def padded(self, tokens: Tensor, packing: Packing) -> tuple[Tensor, Packing]:
        """Pad packed rows to a number of tokens that the size of the group divides.

        The padding is one more segment at the end, to which no other token attends.
        """
        if packing.prefix_of is not None:
            raise EngineError("prefix sharing is not implemented for sequence parallelism; pack whole rows")
        extra = -len(tokens) % self.size
        return F.pad(tokens, (0, extra)), Packing([*packing.lengths, extra]) if extra else packing

    def share(self, positions: Tensor, count: int) -> "Share":
        """Who holds which of these `positions` (on the CPU, so that no rank waits) among `count` tokens."""
        chunk = self.own(count)
        owner = positions.div(chunk.stop - chunk.start, rounding_mode="floor")
        order = owner.argsort(stable=True)
        mine = (owner == self.rank).nonzero()[:, 0]
        in_order = bool((owner.diff() >= 0).all())
        counts = torch.bincount(owner, minlength=self.size).tolist()
        return Share(mine, positions[mine] - chunk.start, counts, None if in_order else order.argsort())

    # -- attention --------------------------------------------------------------------------------

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(1, heads, chunk, D) of this rank's tokens -> (1, heads / size, N, D) of all tokens, in one exchange.

        Key and value heads are repeated where they do not divide: each rank gets those that its queries look at.
        """
        heads, groups = query.shape[1], key.shape[1]
        if heads % self.size:
            raise _uneven(f"{heads} query heads", self.size)
        repeats = self.size // math.gcd(groups, self.size)
        if repeats > 1:
            key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        parts = [tensor[0].unflatten(0, (self.size, -1)) for tensor in (query, key, value)]
        sent = torch.cat([part.flatten(1) for part in parts], dim=1)
        received = self._swap(sent).split([part[0].numel() for part in parts], dim=1)
        query, key, value = (
            flat.view(self.size, *part.shape[1:]).transpose(0, 1).flatten(1, 2)[None]
            for flat, part in zip(received, parts, strict=True)
        )
        return query, key, value

    def to_tokens(self, output: Tensor) -> Tensor:
        """(1, N, heads / size, D) of all tokens -> (1, chunk, heads, D) of this rank's tokens."""
        by_rank = output[0].unflatten(0, (self.size, -1))
        received = self._swap(by_rank.flatten(1)).view(by_rank.shape)
        return received.transpose(0, 1).flatten(1, 2)[None]

    def _swap(self, parts: Tensor) -> Tensor:
        """Part r goes to rank r; what comes back is in the order of the ranks that sent it."""
        return _Swap.apply(parts, self.group)  # pyright: ignore[reportReturnType]

    # -- outputs ----------------------------------------------------------------------------------

    def gather(self, share: "Share", *own: Tensor) -> list[Tensor]:
        """Of each of `own`, the entries of all ranks, in the order of the positions that `share` was made from.

        The backward pass takes this rank's entries and adds nothing up: see the map above.
        """
        every = _Gather.apply(self, share.counts, *own)
        if share.back is None:
            return list(every)  # pyright: ignore[reportArgumentType]
        back = to_device(share.back, own[0].device)
        return [tensor.index_select(0, back) for tensor in every]  # pyright: ignore

    def all_gathered(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """(sum(counts), ...) without gradient. A group exchanges equal sizes, so shorter parts are filled up."""
        most = max(counts)
        if not most:
            return own.clone()
        filled = own.new_zeros((most, *own.shape[1:]))
        filled[: len(own)] = own
        every = [torch.empty_like(filled) for _ in counts]
        dist.all_gather(every, filled, group=self.group)
        return torch.cat([part[:count] for part, count in zip(every, counts, strict=True)])


@dataclass(frozen=True)
class Share:
    """Which of the positions that outputs are read at lie in this rank's chunk; all on the CPU."""

    mine: Tensor
    """Their numbers among all positions."""
    local: Tensor
    """Where they lie in the chunk."""
    counts: list[int]
    """How many each rank has."""
    back: Tensor | None
    """From the order of ranks to the order of positions; None where these are the same."""


class _Swap(torch.autograd.Function):
    """An all-to-all of equal parts; its own inverse."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return _Swap.apply(gradient, ctx.group), None  # pyright: ignore[reportReturnType]


class _Gather(torch.autograd.Function):
    """All ranks' entries of several tensors of one dtype, in one exchange; backward keeps the own entries."""

    @staticmethod
    def forward(ctx: Any, split: SequenceSplit, counts: list[int], *own: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # an output that the loss leaves out costs nothing further down
        start = sum(counts[: split.rank])
        ctx.own = slice(start, start + counts[split.rank])
        every = split.all_gathered(torch.stack(own, dim=1), counts)
        return tuple(tensor.clone() for tensor in every.unbind(1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return None, None, *(None if gradient is None else gradient[ctx.own] for gradient in gradients)


def check_heads(config: PreTrainedConfig, size: int) -> None:
    """Raise `EngineError` if a model of this config cannot be split over `size` ranks."""
    text = config.get_text_config()
    if text.num_attention_heads % size:
        raise _uneven(f"the {text.num_attention_heads} query heads of this {text.model_type} model", size)
    ropes = text.to_dict().get("rope_parameters") or {}
    kinds = [part.get("rope_type") for part in (ropes, *ropes.values()) if isinstance(part, dict)]
    longest = [kind for kind in ROPE_BY_LONGEST if kind in kinds]
    if size > 1 and longest:
        raise EngineError(
            f"rope_type={longest[0]} looks at the longest position of the call, on which the ranks of a "
            "sequence-parallel group do not agree; use sequence-parallel size 1 for this model"
        )


def split_columns(data: DataProto, split: SequenceSplit) -> DataProto:
    """This rank's chunk of the flattened tokens of every `Ragged` column; the other columns stay as they are.

    All rows stay, and some become shorter or empty. The cuts are those of `PackedModel.forward`.
    """
    cut = {name: _cut(column, split) for name, column in data.columns.items() if isinstance(column, Ragged)}
    return DataProto(data.columns | cut, data.meta_info)


def join_columns(data: DataProto, split: SequenceSplit) -> DataProto:
    """The whole again from what `split_columns` gave to each rank; gradients end here."""
    ragged = {name: column for name, column in data.columns.items() if isinstance(column, Ragged)}
    if not ragged:
        return data
    lengths = torch.stack([column.lengths for column in ragged.values()])
    every = split.all_gathered(lengths.to(split.device), [len(lengths)] * split.size).cpu()
    by_rank = every.unflatten(0, (split.size, -1))
    joined = {
        name: Ragged(_joined(column.values, by_rank[:, i].sum(dim=1).tolist(), split), by_rank[:, i].sum(dim=0))
        for i, (name, column) in enumerate(ragged.items())
    }
    return DataProto(data.columns | joined, data.meta_info)


def _cut(column: Ragged, split: SequenceSplit) -> Ragged:
    chunk = split.own(len(column.values))
    return Ragged(column.values[chunk], column.offsets.clamp(chunk.start, chunk.stop).diff())


def _joined(values: Tensor, counts: list[int], split: SequenceSplit) -> Tensor:
    """All ranks' values, sent as bytes: not every backend knows every dtype."""
    shape = values.shape[1:]
    per_token = math.prod(shape) * values.itemsize
    flat = values.detach().to(split.device).flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)
    together = split.all_gathered(flat, [count * per_token for count in counts])
    return together.view(values.dtype).view(sum(counts), *shape).to(values.device)


def _uneven(heads: str, size: int) -> EngineError:
    return EngineError(
        f"{heads} do not divide by sequence-parallel size {size}: each rank attends with an equal part of the heads; "
        "choose a size that divides their number"
    )
