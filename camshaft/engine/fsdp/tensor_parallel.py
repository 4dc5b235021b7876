"""Tensor parallelism: every matrix of a layer cut over the ranks of a mesh, by the plan that transformers has.

    apply_tensor_parallel(packed, mesh)        # a mesh of one axis; the model may be on the meta device
    shard(packed, ...)                         # then, if wanted, `fully_shard` over another axis

    q, k, v, gate, up    cut by rows: each rank has some heads, and some units of the MLP
    o, down              cut by columns: their outputs are summed over the ranks
    embedding, lm_head   cut by rows: each rank has a part of the vocabulary; `linear_logprob` adds the parts up
    all else             whole on every rank: norms, and the head of a value or reward model

The cut parameters become DTensors and keep their names. Ranks must be given the same rows, and the same random
state if the model drops out anything between layers.
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
    """The input of several matrices that are cut by rows, made a DTensor once.

    Its gradient is then a sum of partial ones that is exchanged once, and not once for each matrix.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = next(iter(inspect.signature(module.forward).parameters))

        def share(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            whole = args[0] if args else kwargs[name]
            shared = DTensor.from_local(whole, device_mesh, [Replicate()], run_check=False)
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
"""By the words of transformers' plans. A norm of single heads sees (1, tokens, heads, D), cut in dim 2: its weight is
whole on every rank, and its gradient is the sum over the ranks."""

LAYERS = {"embedding_rowwise": nn.Embedding, "replicated_with_grad_allreduce": nn.Module}
"""What a style is for; the others are for `nn.Linear` itself, and not for what adapters or quantisers put there."""


def apply_tensor_parallel(packed: PackedModel, mesh: DeviceMesh) -> None:
    """Cut the layers of `packed` over `mesh`, in place; `EngineError` for a model that this does not fit."""
    if mesh.ndim != 1:
        raise EngineError(f"tensor parallelism takes a mesh of one axis, got {mesh}; name the axis: mesh['tp']")
    hf = packed.hf
    styles = _styles(packed)
    _refuse(hf, styles, mesh.size())
    plan = {name: STYLES[style]() for name, style in styles.items()}
    plan |= {parent: _SharedInput() for parent in _parents(styles)}
    embedding, output = hf.get_input_embeddings(), hf.get_output_embeddings()
    tied = output if output is not None and output.weight is embedding.weight else None
    parallelize_module(hf, mesh, plan)
    if tied is not None:  # each was cut by itself
        tied.weight = embedding.weight


def _styles(packed: PackedModel) -> dict[str, str]:
    """The plan for this model: the names of its modules, and the style of each."""
    hf = packed.hf
    found = {}
    for name, module in hf.named_modules():
        if module is hf.get_input_embeddings():
            found[name] = "embedding_rowwise"
        elif module is hf.get_output_embeddings():
            found[name] = "colwise_gather_output"
        else:
            style = hf.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
            found |= {name: style} if style is not None else {}
    return found


def _parents(styles: dict[str, str]) -> list[str]:
    """The modules that hold matrices which are cut by rows and share their input."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"))


def _refuse(hf: PreTrainedModel, styles: dict[str, str], size: int) -> None:
    output = hf.get_output_embeddings()
    for name, style in styles.items():
        module = hf.get_submodule(name)
        if style not in STYLES or (style == "colwise_gather_output" and module is not output):
            raise _refusal(hf, f"its {name} wants '{style}', and only dense layers with separate matrices are cut")
        wanted = LAYERS.get(style, nn.Linear)
        if wanted is not nn.Module and type(module) is not wanted:
            raise _refusal(hf, f"its {name} is a {type(module).__name__}, and only a plain {wanted.__name__} is cut")
        if style in ("colwise", "rowwise"):
            assert isinstance(module, nn.Linear)
            cut = module.out_features if style == "colwise" else module.in_features
            if cut % size:
                raise _refusal(hf, f"the {cut} units of its {name} do not divide by {size} ranks")
    if "colwise" not in styles.values():
        raise _refusal(hf, "transformers has no plan for it")
    values = hf.config.get_text_config().to_dict()
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (values.get(key) or 0) % size:
            raise _refusal(hf, f"{key}={values[key]} does not divide by {size} ranks")
    embedding = hf.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    rows = embedding.num_embeddings
    if -(-rows // size) * (size - 1) >= rows:
        raise _refusal(hf, f"its vocabulary of {rows} rows leaves one of {size} ranks without any")
    stray = next(_unplanned(hf, styles), None)
    if stray is not None:
        raise _refusal(hf, f"its plan does not say what becomes of {stray} beside matrices that are cut")


def _unplanned(hf: PreTrainedModel, styles: dict[str, str]) -> Iterator[str]:
    """Parameters that sit among cut matrices without a style: each rank would have a part of their gradient."""
    parents = tuple(f"{parent}." for parent in _parents(styles))
    for name, _ in hf.named_parameters():
        if name.startswith(parents) and name.rpartition(".")[0] not in styles:
            yield name


def _refusal(hf: PreTrainedModel, why: str) -> EngineError:
    return EngineError(
        f"{type(hf).__name__} cannot be cut for tensor parallelism: {why}; use tensor_parallel_size=1 or one that fits"
    )
