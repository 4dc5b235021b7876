"""Tensor parallelism: shards the matrices of a layer over the ranks of a mesh, by the plan of transformers.

    apply_tensor_parallel(packed, mesh)        # a mesh of one axis; the model may be on the meta device
    shard(packed, ...)                         # optionally, `fully_shard` over another axis

    q, k, v, gate, up    sharded by rows: each rank has some heads, and some units of the MLP
    o, down              sharded by columns: their outputs are summed over the ranks
    embedding, lm_head   sharded by rows: each rank has a part of the vocabulary; `linear_logprob` combines the parts
    other layers         replicated: norms, and the head of a value or reward model

Sharded parameters become DTensors and keep their names. All ranks need the same rows, and the same random state if the
model has dropout between layers.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from camshaft.errors import EngineError
from camshaft.models.packed import PackedModel


class _SharedInput(ParallelStyle):
    """Converts the common input of several row-sharded matrices to a DTensor once.

    Its gradient is then reduced once instead of once per matrix.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = next(iter(inspect.signature(module.forward).parameters))

        def share(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            local = args[0] if args else kwargs[name]
            shared = DTensor.from_local(local, device_mesh, [Replicate()], run_check=False)
            return ((shared, *args[1:]), kwargs) if args else (args, kwargs | {name: shared})

        module.register_forward_pre_hook(share, with_kwargs=True)
        return module


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
}
"""Styles by their names in transformers' plans. A norm of single heads sees (1, tokens, heads, D), sharded in dim 2:
its weight is replicated, and its gradient is the sum over the ranks."""

LAYERS = {"embedding_rowwise": nn.Embedding, "replicated_with_grad_allreduce": nn.Module}
"""Layer class of a style; the others require exactly `nn.Linear`, not replacements by adapters or quantizers."""


def apply_tensor_parallel(packed: PackedModel, mesh: DeviceMesh) -> None:
    """Shard the layers of `packed` over `mesh`, in place; `EngineError` if the model is not supported."""
    if mesh.ndim != 1:
        raise EngineError(f"tensor parallelism requires a mesh of one axis, got {mesh}; select the axis: mesh['tp']")
    hf = packed.hf
    styles = _styles(packed)
    _check_supported(hf, styles, mesh.size())
    plan = {name: STYLES[style]() for name, style in styles.items()}
    plan |= {parent: _SharedInput() for parent in _parents(styles)}
    embedding, output = hf.get_input_embeddings(), hf.get_output_embeddings()
    tied = output if output is not None and output.weight is embedding.weight else None
    parallelize_module(hf, mesh, plan)
    if tied is not None:  # parallelize_module shards each of them separately
        tied.weight = embedding.weight


def _styles(packed: PackedModel) -> dict[str, str]:
    """Return the plan of this model: module names and their styles."""
    hf = packed.hf
    styles = {}
    for name, module in hf.named_modules():
        if module is hf.get_input_embeddings():
            styles[name] = "embedding_rowwise"
        elif module is hf.get_output_embeddings():
            styles[name] = "colwise_gather_output"
        else:
            style = hf.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
            styles |= {name: style} if style is not None else {}
    return styles


def _parents(styles: dict[str, str]) -> list[str]:
    """Return the modules whose row-sharded matrices share their input."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"))


def _check_supported(hf: PreTrainedModel, styles: dict[str, str], size: int) -> None:
    output = hf.get_output_embeddings()
    for name, style in styles.items():
        module = hf.get_submodule(name)
        if style not in STYLES or (style == "colwise_gather_output" and module is not output):
            raise _unsupported_error(
                hf, f"its {name} has style '{style}'; only dense layers with separate matrices are supported"
            )
        expected = LAYERS.get(style, nn.Linear)
        if expected is not nn.Module and type(module) is not expected:
            raise _unsupported_error(hf, f"its {name} is a {type(module).__name__}, not a {expected.__name__}")
        if style in ("colwise", "rowwise"):
            assert isinstance(module, nn.Linear)
            units = module.out_features if style == "colwise" else module.in_features
            if units % size:
                raise _unsupported_error(hf, f"{size} ranks do not divide the {units} units of its {name}")
    if "colwise" not in styles.values():
        raise _unsupported_error(hf, "transformers has no tensor-parallel plan for it")
    values = hf.config.get_text_config().to_dict()
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (values.get(key) or 0) % size:
            raise _unsupported_error(hf, f"{size} ranks do not divide {key}={values[key]}")
    embedding = hf.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    rows = embedding.num_embeddings
    if -(-rows // size) * (size - 1) >= rows:
        raise _unsupported_error(hf, f"its vocabulary of {rows} rows leaves one of {size} ranks without a row")
    stray = next(_unplanned_parameters(hf, styles), None)
    if stray is not None:
        raise _unsupported_error(hf, f"its plan has no style for {stray} next to sharded matrices")


def _unplanned_parameters(hf: PreTrainedModel, styles: dict[str, str]) -> Iterator[str]:
    """Yield parameters without a style next to sharded matrices: each rank would have a partial gradient."""
    parents = tuple(f"{parent}." for parent in _parents(styles))
    for name, _ in hf.named_parameters():
        if name.startswith(parents) and name.rpartition(".")[0] not in styles:
            yield name


def _unsupported_error(hf: PreTrainedModel, why: str) -> EngineError:
    return EngineError(
        f"{type(hf).__name__} does not support tensor parallelism: {why}; use tensor_parallel_size=1 or another size"
    )
