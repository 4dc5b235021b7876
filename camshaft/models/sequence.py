"""Sequence parallelism (Ulysses): a group of ranks splits the packed tokens, and the heads during attention.

    packed.sequence = SequenceSplit(group)                     # `PackedModel.forward` then returns equal results
    out = packed(tokens, packing, at, ("log_probs",))          # every rank of the group passes all tokens
    compute_loss(out).backward()                               # then sum the parameter gradients over the group

Each rank holds one chunk of the packed tokens. All layers except attention process tokens independently, so each rank
computes them for its chunk only. Before attention, an all-to-all turns one chunk of the tokens with all heads into all
tokens with some of the heads; after attention, a second one reverses this. Outputs per token are gathered, so that
every rank computes the same loss from all outputs. In the backward pass, each rank uses only the gradient of its own
chunk. The sum of the parameter gradients over the ranks is therefore the full gradient.

`split_columns` splits the per-token columns of a batch into the same chunks, and `join_columns` inverts it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from camshaft.config.families.support import refusal
from camshaft.dataproto import DataProto, Ragged
from camshaft.device import to_device
from camshaft.errors import EngineError
from camshaft.models.attention import config_values
from camshaft.models.packing import Packing, pad_tokens


class SequenceSplit:
    """Splits packed tokens into one chunk per rank, and exchanges tensors between the ranks of `group`.

    `device` is the device on which tensors are exchanged, "cpu" for gloo.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device | str = "cpu"):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.device = torch.device(device)

    # -- tokens -----------------------------------------------------------------------------------

    def chunk(self, count: int) -> slice:
        """Return this rank's chunk of `count` tokens; the chunks of the last ranks may be shorter or empty."""
        width = -(-count // self.size)
        return slice(self.rank * width, (self.rank + 1) * width)

    def pad(self, tokens: Tensor, packing: Packing) -> tuple[Tensor, Packing]:
        """Pad the packed tokens to a multiple of the group size.

        The padding is an additional segment at the end, to which no other token attends.
        """
        if packing.prefix_of is not None:
            raise EngineError("prefix sharing is not implemented for sequence parallelism; pack rows without prefix_of")
        extra = -len(tokens) % self.size
        return pad_tokens(tokens, extra), Packing([*packing.lengths, extra]) if extra else packing

    def share(self, positions: Tensor, count: int) -> "Share":
        """Assign the output positions, offsets among `count` tokens, to the ranks whose chunks contain them.

        `positions` must be on the CPU, so that no rank waits for its device.
        """
        chunk = self.chunk(count)
        owner = positions.div(chunk.stop - chunk.start, rounding_mode="floor")
        order = owner.argsort(stable=True)
        local = (owner == self.rank).nonzero()[:, 0]
        in_order = bool((owner.diff() >= 0).all())
        counts = torch.bincount(owner, minlength=self.size).tolist()
        return Share(local, positions[local] - chunk.start, counts, None if in_order else order.argsort())

    # -- attention --------------------------------------------------------------------------------

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turn this rank's chunk with all heads, (1, heads, chunk, D), into all tokens with some of the heads.

        Returns tensors of shape (1, heads / size, N, D), exchanged in one collective. Key and value heads are repeated
        if their number is not divisible by `size`, so that each rank receives those that its query heads attend to.
        """
        heads, kv_heads = query.shape[1], key.shape[1]
        if heads % self.size:
            raise _indivisible_heads_error(f"{heads} query heads", self.size)
        repeats = self.size // math.gcd(kv_heads, self.size)
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
        """Invert `to_heads`: exchange (1, N, heads / size, D) for this rank's chunk, (1, chunk, heads, D)."""
        by_rank = output[0].unflatten(0, (self.size, -1))
        received = self._swap(by_rank.flatten(1)).view(by_rank.shape)
        return received.transpose(0, 1).flatten(1, 2)[None]

    def local_heads(self, values: Tensor) -> Tensor:
        """Select from one value per query head, (heads,), those of the heads that `to_heads` gives to this rank."""
        return values.unflatten(0, (self.size, -1))[self.rank]

    def _swap(self, parts: Tensor) -> Tensor:
        """Send part r to rank r, and return the received parts in rank order."""
        return _Swap.apply(parts, self.group)

    # -- outputs ----------------------------------------------------------------------------------

    def gather(self, share: "Share", *tensors: Tensor) -> list[Tensor]:
        """Gather each of `tensors` from all ranks, in the order of the positions passed to `share`.

        The backward pass returns the gradient of this rank's entries without a sum over ranks, since every rank
        computes the same loss.
        """
        gathered = _Gather.apply(self, share.counts, *tensors)
        if share.inverse is None:
            return list(gathered)
        inverse = to_device(share.inverse, tensors[0].device)
        return [tensor.index_select(0, inverse) for tensor in gathered]

    def gather_outputs(self, share: "Share", outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gather the outputs of a head. `distribution`, with a value per vocabulary entry, is gathered separately."""
        wide = {name: self.gather(share, output)[0] for name, output in outputs.items() if name == "distribution"}
        narrow = {name: output for name, output in outputs.items() if name not in wide}
        gathered = self.gather(share, *narrow.values()) if narrow else []
        return dict(zip(narrow, gathered, strict=True)) | wide

    def all_gather(self, local: Tensor, counts: Sequence[int]) -> Tensor:
        """Gather `counts[r]` entries from each rank r, without gradient; returns shape (sum(counts), ...).

        Shorter tensors are padded, because the collective requires equal sizes.
        """
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
    """Output positions in this rank's chunk. All tensors are on the CPU."""

    indices: Tensor
    """Indices of these positions among all output positions."""
    offsets: Tensor
    """Offsets of these positions in the chunk."""
    counts: list[int]
    """Number of output positions in the chunk of each rank."""
    inverse: Tensor | None
    """Permutation from rank order to the order of all output positions; None if both orders are equal."""


class _Swap(torch.autograd.Function):
    """All-to-all exchange of parts of equal size. It is its own inverse, also in the backward pass."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Swap.apply(gradient, ctx.group), None


class _Gather(torch.autograd.Function):
    """Gathers several tensors of one dtype in one collective; the backward pass selects this rank's entries."""

    @staticmethod
    def forward(ctx: Any, split: SequenceSplit, counts: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # skips the gradients of outputs that the loss does not use
        start = sum(counts[: split.rank])
        ctx.local = slice(start, start + counts[split.rank])
        gathered = split.all_gather(torch.stack(tensors, dim=1), counts)
        return tuple(tensor.clone() for tensor in gathered.unbind(1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *(None if gradient is None else gradient[ctx.local] for gradient in gradients)


def check_heads(config: PreTrainedConfig, size: int) -> None:
    """Raise `EngineError` if sequence parallelism over `size` ranks does not support this config."""
    text_config = config.get_text_config()
    if size > 1 and (message := refusal("sequence parallelism", config_values(config))):
        raise EngineError(f"{message}; set ulysses_sequence_parallel_size=1")
    if text_config.num_attention_heads % size:
        raise _indivisible_heads_error(
            f"the {text_config.num_attention_heads} query heads of this {text_config.model_type} model", size
        )


def split_columns(data: DataProto, split: SequenceSplit) -> DataProto:
    """Select this rank's chunk of the flattened tokens of every `Ragged` column. Other columns do not change.

    The number of rows does not change, but rows become shorter or empty. The chunks are those of `PackedModel.forward`.
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
    joined_columns = {
        name: Ragged(_gather_values(column.values, by_rank[:, i].sum(dim=1).tolist(), split), by_rank[:, i].sum(dim=0))
        for i, (name, column) in enumerate(ragged.items())
    }
    return DataProto(data.columns | joined_columns, data.meta_info)


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
        f"{heads} cannot be split evenly over {size} sequence-parallel ranks; set ulysses_sequence_parallel_size to a "
        "divisor of the number of heads"
    )
