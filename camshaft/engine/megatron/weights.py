"""Maps the parameters of a Megatron model to the weights of the transformers model.

    blocks = weight_blocks(model, hf)                    # on this rank
    load_weights(blocks, store, full_tensors)            # full_tensors yields (name, tensor) in the order of `hf`
    shard = shards_by_name(blocks, store)["model.norm.weight"]()

Megatron fuses matrices and splits them over ranks: `linear_qkv` holds the query, key and value rows of some groups of
heads, `linear_fc1` the rows of some units of `gate_proj` and `up_proj`. A `Block` holds such a set of parameters, the
weights that they consist of, and the conversion in both directions. The part of a weight on one rank is a contiguous
range of its rows or columns, so it can be described by a DTensor. The conversion applies to optimizer state as well.
A `WeightStore` reads and writes the weights of parameters. `data_parallel.py` contains those with master weights.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from camshaft.engine.megatron.model import MegatronModel
from camshaft.errors import EngineError

Convert = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Weight:
    """A weight of the transformers model, and how the ranks of `mesh` split it."""

    name: str
    shape: torch.Size
    dim: int | None
    """Dimension in which the weight is split; None if every rank holds the whole weight."""
    mesh: DeviceMesh

    def shard(self, full: Tensor) -> Tensor:
        """Return the part of the full tensor on this rank."""
        if self.dim is None:
            return full
        width = -(-full.shape[self.dim] // self.mesh.size())
        start = min(self.mesh.get_local_rank() * width, full.shape[self.dim])
        return full.narrow(self.dim, start, min(width, full.shape[self.dim] - start))

    def as_dtensor(self, shard: Tensor) -> DTensor:
        """Return a DTensor of the full shape whose part on this rank is `shard`."""
        placement = Replicate() if self.dim is None else Shard(self.dim)
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            shard.contiguous(), self.mesh, [placement], run_check=False, shape=self.shape, stride=stride
        )


@dataclass(frozen=True)
class Block:
    """Parameters of this rank, and the weights that they consist of."""

    parameters: tuple[nn.Parameter, ...]
    weights: tuple[Weight, ...]
    split: Convert
    """Converts tensors like `parameters` to the parts of the weights on this rank."""
    join: Convert
    """Inverts `split`."""


def _same(tensors: list[Tensor]) -> list[Tensor]:
    return tensors


def weight_blocks(model: MegatronModel, shapes: Mapping[str, torch.Size]) -> list[Block]:
    """Return the blocks of this rank, which cover all parameters. `shapes` are those of the weights, by name."""
    device = next(model.parameters()).device.type
    meshes = {axis: DeviceMesh.from_group(getattr(model.groups, axis), device) for axis in ("tp", "ep")}
    return list(_Mapping(model, shapes, meshes).blocks())


def _global_names(model: MegatronModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of this rank, with layers numbered over all pipeline stages."""
    for stage in model.stages:
        decoder: Any = stage.decoder
        numbers = [layer.layer_number - 1 for layer in decoder.layers]
        for name, parameter in stage.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(numbers[int(parts[2])])
            yield ".".join(parts), parameter


_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight", 1),
    "mlp.router.weight": ("mlp.gate.weight", None),
}
"""Parameters of a layer that are a single weight: the name of the weight, and the dimension in which it is split."""


_EXPERT = re.compile(r"mlp\.experts\.local_experts\.\d+\.linear_(fc1|fc2)\.weight")
_EXPERT_WEIGHTS = {"fc1": "mlp.experts.gate_up_proj", "fc2": "mlp.experts.down_proj"}
"""Weights that hold a matrix of all experts of a layer."""


class _Mapping:
    """Finds the weights that correspond to the parameters of a model."""

    def __init__(self, model: MegatronModel, shapes: Mapping[str, torch.Size], meshes: Mapping[str, DeviceMesh]):
        self.model, self.shapes, self.meshes = model, shapes, meshes

    def blocks(self) -> Iterator[Block]:
        """Yield one block per parameter, and one for a matrix of all experts of a layer."""
        experts: dict[str, list[nn.Parameter]] = {}
        for name, parameter in _global_names(self.model):
            match = _EXPERT.search(name)
            if match is None:
                weights, split, join = self._weights(name)
                yield Block((parameter,), weights, split, join)
            else:
                layer = ".".join(name.split(".")[2:3])
                experts.setdefault(f"model.layers.{layer}.{_EXPERT_WEIGHTS[match[1]]}", []).append(parameter)
        for name, parameters in experts.items():
            weight = self._weight(name, 0, "ep")
            yield Block(tuple(parameters), (weight,), lambda ts: [torch.stack(ts)], lambda ts: list(ts[0].unbind()))

    def _weights(self, name: str) -> tuple[tuple[Weight, ...], Convert, Convert]:
        """Return the weights that a parameter consists of, and the conversions between both."""
        model = self.model
        if name.startswith("decoder.layers."):
            _, _, number, rest = name.split(".", 3)
            prefix = f"model.layers.{number}."
            if rest in _LAYER:
                weight, dim = _LAYER[rest]
                return (self._weight(prefix + weight, dim),), _same, _same
            if rest.startswith("self_attention.linear_qkv."):
                kind = rest.rpartition(".")[2]
                return self._rows(*(f"{prefix}self_attn.{part}_proj.{kind}" for part in "qkv")), *_qkv(model)
            if rest == "mlp.linear_fc1.weight":
                weights = self._rows(*(f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up")))
                return weights, lambda ts: list(ts[0].chunk(2)), lambda ts: [torch.cat(ts)]
        if name == "decoder.final_layernorm.weight":
            return (self._weight("model.norm.weight", None),), _same, _same
        if name == "embedding.word_embeddings.weight" or (name == "output_layer.weight" and model.head == "causal_lm"):
            is_embedding = name.startswith("embedding") or model.tied
            return self._rows("model.embed_tokens.weight" if is_embedding else "lm_head.weight"), *_padded_rows(model)
        if name.startswith("output_layer."):
            return (self._weight(name.replace("output_layer", "score"), None),), _same, _same
        raise EngineError(f"the Megatron parameter {name} has no counterpart in the transformers model")

    def _rows(self, *names: str) -> tuple[Weight, ...]:
        """Return weights that tensor-parallel ranks split by rows."""
        return tuple(self._weight(name, 0) for name in names)

    def _weight(self, name: str, dim: int | None, axis: str = "tp") -> Weight:
        return Weight(name, self.shapes[name], dim, self.meshes[axis])


def _qkv(model: MegatronModel) -> tuple[Convert, Convert]:
    """Convert between groups of (query heads, key head, value head) and one matrix for each of q, k and v."""
    config = model.config
    head_dim = config.kv_channels
    queries = config.num_attention_heads // config.num_query_groups

    def split(tensors: list[Tensor]) -> list[Tensor]:
        groups = tensors[0].unflatten(0, (-1, queries + 2, head_dim))
        parts = groups[:, :queries], groups[:, queries : queries + 1], groups[:, queries + 1 :]
        return [part.flatten(0, 2) for part in parts]

    def join(tensors: list[Tensor]) -> list[Tensor]:
        parts = [
            tensor.unflatten(0, (-1, heads, head_dim)) for tensor, heads in zip(tensors, (queries, 1, 1), strict=True)
        ]
        return [torch.cat(parts, dim=1).flatten(0, 2)]

    return split, join


def _padded_rows(model: MegatronModel) -> tuple[Convert, Convert]:
    """Remove and add the padding at the end of the vocabulary."""
    first = model.groups.tp.rank() * model.rows_per_rank
    count = min(model.rows_per_rank, max(0, model.vocabulary_size - first))

    def join(tensors: list[Tensor]) -> list[Tensor]:
        return [F.pad(tensor, (0, 0, 0, model.rows_per_rank - count)) for tensor in tensors]

    return lambda tensors: [tensor[:count] for tensor in tensors], join


class WeightStore:
    """Reads and writes the weights of parameters. Subclasses store master weights, in higher precision."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def weight_of(self, parameter: nn.Parameter) -> Tensor:
        """Return the weight of a parameter in the type of the weights. It may be collective over data-parallel ranks.

        The result may share the memory of the parameter.
        """
        return parameter.detach().to(self.dtype)

    @torch.no_grad()
    def set_weight(self, parameter: nn.Parameter, weight: Tensor) -> None:
        """Set the weight of a parameter."""
        parameter.copy_(weight)


def shards_by_name(blocks: Sequence[Block], store: WeightStore) -> dict[str, Callable[[], Tensor]]:
    """Return functions that compute the part of each weight on this rank, by name: a copy or a view of a parameter."""

    def part(block: Block, index: int) -> Tensor:
        return block.split([store.weight_of(parameter) for parameter in block.parameters])[index]

    return {
        weight.name: functools.partial(part, block, index)
        for block in blocks
        for index, weight in enumerate(block.weights)
    }


def join_parameters(blocks: Sequence[Block], store: WeightStore, shards: Mapping[str, Tensor]) -> None:
    """Copy the parts of all weights on this rank into the parameters."""
    for block in blocks:
        tensors = block.join([shards[weight.name] for weight in block.weights])
        for parameter, tensor in zip(block.parameters, tensors, strict=True):
            store.set_weight(parameter, tensor)


def load_weights(blocks: Sequence[Block], store: WeightStore, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy full weights into the parameters of this rank."""
    expected = {weight.name: weight for block in blocks for weight in block.weights}
    shards = {name: expected[name].shard(full).clone() for name, full in weights if name in expected}
    join_parameters(blocks, store, shards)
