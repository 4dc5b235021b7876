"""Tensor parallelism: shards the matrices of a model over the ranks of a mesh, by the plan of transformers.

    apply_tensor_parallel(packed, mesh)        # a mesh with one axis; the model may be on the meta device
    shard(packed, ...)                         # optionally apply `fully_shard` over another axis

    q, k, v, gate, up    sharded by rows: each rank computes some of the heads and some of the MLP units
    o, down              sharded by columns: their outputs are summed over the ranks
    embedding, lm_head   sharded by rows: each rank holds a shard of the vocabulary; `linear_logprob` merges the results
    other layers         replicated: norms, and the head of a value or reward model

The outputs of fused matrices (q, k and v, or gate and up) are gathered, so attention is not split. Only the memory and
the product of such a matrix are.

Sharded parameters become DTensors and keep their names. All ranks must process the same batch. If the model has
dropout between layers, they also need the same random state.
"""

import inspect
import re
from collections.abc import Callable
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
    """Converts the input that several row-sharded matrices share to a DTensor once.

    The gradient of the input is then reduced once instead of once per matrix.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = next(iter(inspect.signature(module.forward).parameters))

        def share(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            local_input = args[0] if args else kwargs[name]
            shared = DTensor.from_local(local_input, device_mesh, [Replicate()], run_check=False)
            return ((shared, *args[1:]), kwargs) if args else (args, kwargs | {name: shared})

        module.register_forward_pre_hook(share, with_kwargs=True)
        return module


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""Parallel styles by their names in transformers' plans.

"replicated_with_grad_allreduce" is the style of a norm over single heads. Its input (1, tokens, heads, D) is sharded
over heads, dim 2. Its weight is replicated, and the gradient of the weight is summed over the ranks.
"""

WHOLE_STYLES = ("replicated_with_grad_allreduce", "embedding_rowwise")
"""Styles of any norm, and of embeddings, which may scale their outputs. Others require exactly `nn.Linear`, without an
adapter or quantizer."""


def apply_tensor_parallel(packed: PackedModel, mesh: DeviceMesh) -> None:
    """Shard the layers of `packed` over `mesh`, in place; raise `EngineError` if the model is not supported."""
    if mesh.ndim != 1:
        raise EngineError(
            f"tensor parallelism requires a mesh with one axis, got {mesh}; select one axis, for example mesh['tp']"
        )
    check_tensor_parallel(packed, mesh.size())
    hf, styles = packed.hf, _styles(packed)
    plan = {name: STYLES[style]() for name, style in styles.items()}
    plan |= {parent: _SharedInput() for parent in _parents(styles)}
    embedding, output = hf.get_input_embeddings(), hf.get_output_embeddings()
    is_tied = output is not None and output.weight is embedding.weight
    parallelize_module(hf, mesh, plan)
    if output is not None and is_tied:  # parallelize_module has sharded the tied weight once per layer
        output.weight = embedding.weight


def check_tensor_parallel(packed: PackedModel, size: int) -> None:
    """Raise `EngineError` if the layers of `packed` cannot be sharded over `size` ranks."""
    if packed.pads_rows:
        raise _unsupported_error(packed.hf, "it runs on right-padded rows")
    _check_supported(packed.hf, _styles(packed), size)


def _styles(packed: PackedModel) -> dict[str, str]:
    """Return the style of each module that the plan of transformers shards, by module name."""
    hf = packed.hf
    styles = {}
    for name, module in hf.named_modules():
        if module is hf.get_input_embeddings():
            styles[name] = "embedding_rowwise"
        elif module is hf.get_output_embeddings():
            styles[name] = "colwise_gather_output"
        elif (style := hf.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))) is not None:
            styles[name] = style
    return styles


def _parents(styles: dict[str, str]) -> list[str]:
    """Return the names of the modules that contain row-sharded matrices; these matrices share one input."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"))


def _check_supported(hf: PreTrainedModel, styles: dict[str, str], size: int) -> None:
    """Raise `EngineError` if the model cannot be sharded by `styles` over `size` ranks."""
    output = hf.get_output_embeddings()
    for name, style in styles.items():
        module = hf.get_submodule(name)
        if style not in STYLES:
            raise _unsupported_error(
                hf, f"its layer {name} has the parallel style '{style}', but only dense layers are supported"
            )
        if style not in WHOLE_STYLES and type(module) is not nn.Linear:
            raise _unsupported_error(hf, f"its layer {name} is a {type(module).__name__}, not a Linear")
        if isinstance(module, nn.Linear) and module is not output:
            units = module.in_features if style.startswith("rowwise") else module.out_features
            if units % size:
                raise _unsupported_error(
                    hf, f"the {units} units of its layer {name} are not divisible by tensor_parallel_size={size}"
                )
    if not any(style.startswith("rowwise") for style in styles.values()):
        raise _unsupported_error(hf, "transformers defines no tensor-parallel plan for it")
    values = hf.config.get_text_config().to_dict()
    splits_heads = "colwise" in styles.values()
    for key in ("num_attention_heads", "num_key_value_heads") if splits_heads else ():
        if (values.get(key) or 0) % size:
            raise _unsupported_error(hf, f"{key}={values[key]} is not divisible by tensor_parallel_size={size}")
    embedding = hf.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    rows = embedding.num_embeddings
    if -(-rows // size) * (size - 1) >= rows:
        raise _unsupported_error(
            hf, f"its vocabulary of {rows} tokens leaves at least one of {size} tensor-parallel ranks without a token"
        )
    parents = tuple(f"{parent}." for parent in _parents(styles))
    for name, _ in hf.named_parameters():
        if name.startswith(parents) and name.rpartition(".")[0] not in styles:  # its gradient would be a partial sum
            raise _unsupported_error(
                hf,
                f"the tensor-parallel plan of transformers has no style for {name}, which shares its input with "
                "sharded matrices",
            )


def _unsupported_error(hf: PreTrainedModel, why: str) -> EngineError:
    return EngineError(
        f"{type(hf).__name__} does not support this tensor parallelism: {why}; set tensor_parallel_size=1 or another "
        "size"
    )
