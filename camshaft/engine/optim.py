"""Optimizer, learning-rate schedule and gradient clipping for torch engines.

    optimizer = build_optimizer(module.parameters(), config.optim)
    schedule = Schedule(optimizer, config.optim)
    norm, updated = clip_and_step(optimizer, config.grad_clip)

Parameters may be a mix of regular tensors and DTensors on different meshes.
"""

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from camshaft.config.engine import UNSUPPORTED_OPTIMIZERS, OptimConfig, optimizer_problem
from camshaft.engine.base import StepHyperparameters
from camshaft.errors import EngineError
from camshaft.plugins import import_attribute

logger = logging.getLogger(__name__)

P = TypeVar("P", bound=Tensor)

UNSHARDED = (torch.optim.Adafactor, torch.optim.Rprop)
"""Optimizers whose steps fail with DTensor parameters."""


def build_optimizer(parameters: Iterable[torch.nn.Parameter], optim: OptimConfig) -> torch.optim.Optimizer:
    """Build the optimizer that `optim` describes, for the parameters that require a gradient.

    The optimizer class receives lr, betas, eps and weight_decay if it has arguments of these names and types, and all
    of `override_optimizer_config`. Adam and AdamW use their fused kernels, which also support sharded parameters; other
    optimizers use `foreach`. Both give the same results.
    """
    trainable = [p for p in parameters if p.requires_grad]
    if not trainable:
        raise EngineError(
            "no parameter of the model requires a gradient, so there is nothing to train; unfreeze a parameter"
        )
    cls = optimizer_class(optim.optimizer)
    if issubclass(cls, UNSHARDED) and any(isinstance(p, DTensor) for p in trainable):
        raise EngineError(
            f"optimizer={optim.optimizer} does not support sharded parameters in torch {torch.__version__}; use "
            "strategy=reference or another optimizer"
        )
    signature = _parameters(cls)
    values = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": optim.weight_decay}
    arguments = {
        name: value for name, value in values.items() if name in signature and _same_type(value, signature[name])
    }
    is_external = "." in optim.optimizer or ":" in optim.optimizer  # the config checks cover those of torch
    for name in ("betas", "eps", "weight_decay") if is_external else ():
        if name not in arguments and values[name] != OptimConfig.model_fields[name].default:
            logger.warning(
                "optimizer=%s does not accept %s=%s, which has no effect", optim.optimizer, name, values[name]
            )
    arguments |= _overrides(optim, cls.__name__, signature)
    if not {"fused", "foreach"} & arguments.keys():
        fused = issubclass(cls, torch.optim.Adam) and not any(p.is_meta for p in trainable)
        form = "fused" if fused else "foreach"
        arguments |= {form: True} if form in signature else {}
    # One parameter group per mesh, because `foreach` operators reject tensors of different meshes.
    groups = [{"params": members} for members in _group_by_mesh(trainable, lambda p: p)]
    try:
        return cls(groups, **arguments)
    except (TypeError, ValueError) as error:
        raise EngineError(
            f"optimizer={optim.optimizer} rejects the parameters of this model or its arguments {arguments}: {error}; "
            "set another optimizer or correct override_optimizer_config"
        ) from error


def _parameters(cls: type[torch.optim.Optimizer]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a class, including those of the base classes to which it passes `**kwargs`."""
    parameters: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" in vars(base):
            _, *own = inspect.signature(vars(base)["__init__"]).parameters.values()
            parameters = {p.name: p for p in own} | parameters
            if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in own):
                break
    return parameters


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Resolve an optimizer class from its name in `torch.optim` or from an import path.

    Both `package.module:Class` and `package.module.Class` are accepted.
    """
    if problem := optimizer_problem(name):
        raise EngineError(problem)
    module, _, attribute = name.rpartition(".")
    cls = import_attribute(name if ":" in name else f"{module or 'torch.optim'}:{attribute}")
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise EngineError(
            f"optimizer={name} is not a subclass of torch.optim.Optimizer; set optimizer=AdamW or another subclass"
        )
    reason = UNSUPPORTED_OPTIMIZERS.get(cls.__name__)
    if reason is None and _needs_closure(cls):
        reason = "its step requires a closure that computes the loss"
    if reason is not None:
        raise EngineError(f"optimizer={name} is not supported: {reason}. Set optimizer=AdamW")
    return cls


def _needs_closure(cls: type[torch.optim.Optimizer]) -> bool:
    """Return True if `step` has an argument without a default."""
    _, *arguments = inspect.signature(cls.step).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(argument.default is inspect.Parameter.empty and argument.kind in kinds for argument in arguments)


def _same_type(value: float | tuple[float, float], parameter: inspect.Parameter) -> bool:
    """Return True if a config value has the same type as the default of `parameter`.

    Names alone do not suffice: `eps` is a pair of numbers in Adafactor.
    """
    default = parameter.default
    if default is inspect.Parameter.empty:
        return True
    if isinstance(value, tuple):
        return isinstance(default, tuple) and len(default) == len(value)
    return isinstance(default, int | float)


def _overrides(optim: OptimConfig, name: str, signature: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return `override_optimizer_config`; raise `EngineError` if the class `name` has no such argument."""
    overrides = {k: tuple(v) if isinstance(v, list) else v for k, v in optim.override_optimizer_config.items()}
    if "lr" in overrides:
        raise EngineError(
            f"override_optimizer_config contains lr={overrides['lr']}, which the schedule would overwrite; set optim.lr"
        )
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.values()):
        return overrides
    arguments = [argument for argument in signature if argument not in ("params", "lr")]
    unknown_arguments = [argument for argument in overrides if argument not in arguments]
    if unknown_arguments:
        raise EngineError(
            f"override_optimizer_config contains {', '.join(unknown_arguments)}, which {name} does not accept; its "
            f"arguments are {', '.join(arguments)}"
        )
    return overrides


def learning_rate_at(optim: OptimConfig, update: int) -> float:
    """Return the learning rate of update number `update`, counted from 0.

    Linear warm-up reaches the full learning rate `lr` at update `lr_warmup_steps - 1`; the first update already has a
    learning rate above 0. After warm-up the learning rate is constant, or decays linearly or by a cosine until update
    `total_training_steps`, where it is `min_lr_ratio` times `lr`.
    """
    if update < optim.lr_warmup_steps:
        return optim.lr * (update + 1) / optim.lr_warmup_steps
    if optim.lr_scheduler_type == "constant":
        return optim.lr
    span = max(1, optim.total_training_steps - optim.lr_warmup_steps)
    progress = min(1.0, (update - optim.lr_warmup_steps) / span)
    linear = optim.lr_scheduler_type == "linear"
    decay = 1 - progress if linear else 0.5 * (1 + math.cos(2 * math.pi * optim.num_cycles * progress))
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * decay)


class Schedule:
    """Learning-rate schedule of an optimizer. Its state is `update`, the number of the next update."""

    def __init__(self, optimizer: torch.optim.Optimizer, optim: OptimConfig):
        shape = optim.lr_scheduler_type
        if shape != "constant" and optim.total_training_steps < 1:
            raise EngineError(
                f"lr_scheduler_type={shape} requires optim.total_training_steps; set it to the number of updates in "
                "the run"
            )
        self.optimizer, self.optim = optimizer, optim
        self.set_update(0)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return learning_rate_at(self.optim, self.update)

    def set_update(self, update: int) -> float:
        """Set the number of the next update and apply its learning rate to the optimizer; return the learning rate."""
        self.update = update
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        return self.learning_rate


@contextmanager
def replaced_hyperparameters(optimizer: torch.optim.Optimizer, step: StepHyperparameters) -> Iterator[None]:
    """Give `optimizer` the hyperparameters `step`, except the clipping, inside the context."""
    values = {"lr": step.lr, "betas": step.betas, "eps": step.eps, "weight_decay": step.weight_decay}
    missing = [name for name in values if name not in optimizer.defaults]
    if missing:
        raise EngineError(
            f"{type(optimizer).__name__} has no {', '.join(missing)}, which StepHyperparameters sets; use "
            "optimizer=AdamW, or call optimizer_step() without arguments"
        )
    previous = [{name: group[name] for name in values} for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group.update(values)
        yield
    finally:
        for group, old in zip(optimizer.param_groups, previous, strict=True):
            group.update(old)


def clip_and_step(
    optimizer: torch.optim.Optimizer, max_norm: float, total_norm: Callable[[list[Tensor]], Tensor] | None = None
) -> tuple[float, bool]:
    """Clip the gradient norm and apply one update; return (norm before clipping, True if the update was applied).

    The update is skipped if the norm is not finite. The norm covers all parameters on all ranks and is bitwise equal on
    every rank. Reading it is the only point at which the host waits for the device. `total_norm` computes the norm of
    gradients for which `gradient_norm` would not.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not parameters:
        raise EngineError("optimizer_step found no gradient; call forward_backward_step first")
    norm = (total_norm or gradient_norm)([p.grad for p in parameters if p.grad is not None])
    value = float(norm)
    if not math.isfinite(value):
        return value, False
    for group in _group_by_mesh(parameters, lambda p: p.grad):
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    optimizer.step()
    return value, True


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """Return the norm of gradients that are DTensors, or that every rank holds completely."""
    groups = _group_by_mesh(gradients, lambda gradient: gradient)
    norms = [_full_norm(torch.nn.utils.get_total_norm(group)) for group in groups]
    first = groups[0][0]
    # The ranks of a mesh with several axes may sum the norm in different orders.
    has_several_axes = isinstance(first, DTensor) and first.device_mesh.ndim > 1
    if len(norms) == 1 and not has_several_axes:
        return norms[0]
    return _mean_over_ranks(_combine_norms(norms), groups)


def _group_by_mesh(tensors: Iterable[P], tensor_of: Callable[[P], Tensor | None]) -> list[list[P]]:
    """Group tensors by the mesh of `tensor_of(tensor)`; tensors without a mesh form one group."""
    groups: dict[Any, list[P]] = {}
    for tensor in tensors:
        key = tensor_of(tensor)
        groups.setdefault(key.device_mesh if isinstance(key, DTensor) else None, []).append(tensor)
    return list(groups.values())


def _full_norm(norm: Tensor) -> Tensor:
    """Reduce a DTensor norm over its mesh to a regular tensor, on the device that the mesh communicates on."""
    if not isinstance(norm, DTensor):
        return norm
    on_mesh: Any = norm.to(norm.device_mesh.device_type)
    return on_mesh.full_tensor()


def _combine_norms(norms: list[Tensor]) -> Tensor:
    """Return the norm of the concatenated gradients from the norms of their groups."""
    # Norms of offloaded parameters are on the CPU and move to the accelerator.
    device = next((norm.device for norm in norms if norm.device.type != "cpu"), norms[0].device)
    dtype = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    return torch.linalg.vector_norm(torch.stack([norm.to(device, dtype) for norm in norms]))


def _mean_over_ranks(norm: Tensor, groups: list[list[Tensor]]) -> Tensor:
    """Average the norm over the ranks of all meshes, so that it is bitwise equal on every rank.

    Rounding may differ between the ranks' copies of a replicated gradient. If ranks clipped by different norms or
    skipped different updates, their weights would diverge. Unlike a maximum, a mean propagates non-finite values.
    """
    meshes = [group[0].device_mesh for group in groups if isinstance(group[0], DTensor)]
    # Each iteration is a collective, so all ranks must use the same order: that of the parameters.
    for process_group in {pg.group_name: pg for mesh in meshes for pg in mesh.get_all_groups()}.values():
        dist.all_reduce(norm, group=process_group)
        norm = norm / process_group.size()
    return norm
