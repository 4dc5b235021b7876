"""Sequence parallelism (Ulysses): the ranks of a group split the tokens of a packed row, and the heads in attention.

    packed.sequence = SequenceSplit(group)                     # `PackedModel.forward` returns the same on all ranks
    out = packed(tokens, packing, at, ("log_probs",))          # every rank of the group passes the full row
    loss_of(out).backward()                                    # then SUM the parameter gradients over the group

All layers except attention work on single tokens, so each rank computes its chunk of the row. Around attention, an
all-to-all exchanges a chunk of the tokens with all heads for all tokens with a part of the heads. Outputs per token are
gathered, so every rank computes the same loss from all outputs. In the backward pass a rank continues with the gradient
of its chunk only, and the sum of the parameter gradients over the ranks is the full gradient.

`split_columns` and `join_columns` split the per-token columns of a batch into the same chunks.
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
"""Rotary embeddings that depend on the longest position of the call, which one chunk does not contain."""


class SequenceSplit:
    """This rank's chunk of a packed row, and the exchanges with the other ranks of its group.

    `device` is the device of exchanged tensors: "cpu" for gloo.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device | str = "cpu"):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.device = torch.device(device)

    # -- tokens -----------------------------------------------------------------------------------

    def chunk(self, count: int) -> slice:
        """Return this rank's chunk of `count` tokens; the last ranks may have fewer than the others, or none."""
        width = -(-count // self.size)
        return slice(self.rank * width, (self.rank + 1) * width)

    def padded(self, tokens: Tensor, packing: Packing) -> tuple[Tensor, Packing]:
        """Pad packed rows to a number of tokens that the size of the group divides.

        The padding is one more segment at the end, to which no other token attends.
        """
        if packing.prefix_of is not None:
            raise EngineError("prefix sharing is not implemented for sequence parallelism; pack complete rows")
        extra = -len(tokens) % self.size
        return F.pad(tokens, (0, extra)), Packing([*packing.lengths, extra]) if extra else packing

    def share(self, positions: Tensor, count: int) -> "Share":
        """Assign `positions` (on the CPU, so that no rank waits) among `count` tokens to the ranks of the group."""
        chunk = self.chunk(count)
        owner = positions.div(chunk.stop - chunk.start, rounding_mode="floor")
        order = owner.argsort(stable=True)
        local = (owner == self.rank).nonzero()[:, 0]
        in_order = bool((owner.diff() >= 0).all())
        counts = torch.bincount(owner, minlength=self.size).tolist()
        return Share(local, positions[local] - chunk.start, counts, None if in_order else order.argsort())

    # -- attention --------------------------------------------------------------------------------

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange (1, heads, chunk, D) of this rank's tokens for (1, heads / size, N, D) of all tokens.

        Key and value heads are repeated if `size` does not divide their number: each rank receives those that its
        query heads attend to. All three tensors are exchanged in one call.
        """
        heads, groups = query.shape[1], key.shape[1]
        if heads % self.size:
            raise _indivisible_heads_error(f"{heads} query heads", self.size)
        repeats = self.size // math.gcd(groups, self.size)
        if repeats > 1:
            key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        parts = [tensor[0].unflatten(0, (self.size, -1)) for tensor in (query, key, value)]
        outgoing = torch.cat([part.flatten(1) for part in parts], dim=1)
        received = self._swap(outgoing).split([part[0].numel() for part in parts], dim=1)
        query, key, value = (
            flat.view(self.size, *part.shape[1:]).transpose(0, 1).flatten(1, 2)[None]
            for flat, part in zip(received, parts, strict=True)
        )
        return query, key, value

    def to_tokens(self, output: Tensor) -> Tensor:
        """Exchange (1, N, heads / size, D) of all tokens for (1, chunk, heads, D) of this rank's tokens."""
        by_rank = output[0].unflatten(0, (self.size, -1))
        received = self._swap(by_rank.flatten(1)).view(by_rank.shape)
        return received.transpose(0, 1).flatten(1, 2)[None]

    def _swap(self, parts: Tensor) -> Tensor:
        """Send part r to rank r; return the received parts in the order of their ranks."""
        return _Swap.apply(parts, self.group)  # pyright: ignore[reportReturnType]

    # -- outputs ----------------------------------------------------------------------------------

    def gather(self, share: "Share", *tensors: Tensor) -> list[Tensor]:
        """Gather the entries of all ranks for each of `tensors`, in the order of the positions passed to `share()`.

        The backward pass takes this rank's entries without a sum over ranks, as the module docstring explains.
        """
        gathered = _Gather.apply(self, share.counts, *tensors)
        if share.inverse is None:
            return list(gathered)  # pyright: ignore[reportArgumentType]
        inverse = to_device(share.inverse, tensors[0].device)
        return [tensor.index_select(0, inverse) for tensor in gathered]  # pyright: ignore

    def all_gather(self, local: Tensor, counts: Sequence[int]) -> Tensor:
        """Gather (sum(counts), ...) without gradient. Collectives need equal sizes, so shorter parts are padded."""
        largest = max(counts)
        if not largest:
            return local.clone()
        padded = local.new_zeros((largest, *local.shape[1:]))
        padded[: len(local)] = local
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


@dataclass(frozen=True)
class Share:
    """The output positions in this rank's chunk; all tensors are on the CPU."""

    indices: Tensor
    """Their indices among all positions."""
    offsets: Tensor
    """Their offsets in the chunk."""
    counts: list[int]
    """Number of positions per rank."""
    inverse: Tensor | None
    """Permutation from rank order to the order of positions; None if they are the same."""


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
    """All ranks' entries of several tensors of one dtype, in one exchange; backward keeps this rank's entries."""

    @staticmethod
    def forward(ctx: Any, split: SequenceSplit, counts: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # outputs that the loss does not use need no backward pass
        start = sum(counts[: split.rank])
        ctx.local = slice(start, start + counts[split.rank])
        gathered = split.all_gather(torch.stack(tensors, dim=1), counts)
        return tuple(tensor.clone() for tensor in gathered.unbind(1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return None, None, *(None if gradient is None else gradient[ctx.local] for gradient in gradients)


def check_heads(config: PreTrainedConfig, size: int) -> None:
    """Raise `EngineError` if sequence parallelism over `size` ranks does not support this config."""
    text_config = config.get_text_config()
    if text_config.num_attention_heads % size:
        raise _indivisible_heads_error(
            f"the {text_config.num_attention_heads} query heads of this {text_config.model_type} model", size
        )
    ropes = text_config.to_dict().get("rope_parameters") or {}
    kinds = [part.get("rope_type") for part in (ropes, *ropes.values()) if isinstance(part, dict)]
    longest = [kind for kind in ROPE_BY_LONGEST if kind in kinds]
    if size > 1 and longest:
        raise EngineError(
            f"rope_type={longest[0]} depends on the longest position of the call, which differs between the ranks of a "
            "sequence-parallel group; use sequence-parallel size 1 for this model"
        )


def split_columns(data: DataProto, split: SequenceSplit) -> DataProto:
    """Keep this rank's chunk of the flattened tokens of every `Ragged` column; other columns do not change.

    All rows are kept; some become shorter or empty. Chunks are the same as in `PackedModel.forward`.
    """
    chunks = {name: _chunk(column, split) for name, column in data.columns.items() if isinstance(column, Ragged)}
    return DataProto(data.columns | chunks, data.meta_info)


def join_columns(data: DataProto, split: SequenceSplit) -> DataProto:
    """Invert `split_columns`, without gradient."""
    ragged = {name: column for name, column in data.columns.items() if isinstance(column, Ragged)}
    if not ragged:
        return data
    lengths = torch.stack([column.lengths for column in ragged.values()])
    gathered = split.all_gather(lengths.to(split.device), [len(lengths)] * split.size).cpu()
    by_rank = gathered.unflatten(0, (split.size, -1))
    joined = {
        name: Ragged(_gather_values(column.values, by_rank[:, i].sum(dim=1).tolist(), split), by_rank[:, i].sum(dim=0))
        for i, (name, column) in enumerate(ragged.items())
    }
    return DataProto(data.columns | joined, data.meta_info)


def _chunk(column: Ragged, split: SequenceSplit) -> Ragged:
    chunk = split.chunk(len(column.values))
    return Ragged(column.values[chunk], column.offsets.clamp(chunk.start, chunk.stop).diff())


def _gather_values(values: Tensor, counts: list[int], split: SequenceSplit) -> Tensor:
    """Gather the values of all ranks as bytes, since not every backend supports every dtype."""
    shape = values.shape[1:]
    per_token = math.prod(shape) * values.itemsize
    flat = values.detach().to(split.device).flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)
    gathered = split.all_gather(flat, [count * per_token for count in counts])
    return gathered.view(values.dtype).view(sum(counts), *shape).to(values.device)


def _indivisible_heads_error(heads: str, size: int) -> EngineError:
    return EngineError(
        f"{heads} cannot be divided evenly over {size} sequence-parallel ranks; choose a size that divides the number "
        "of heads"
    )
