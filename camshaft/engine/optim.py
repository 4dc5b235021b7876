"""Optimizer, learning-rate schedule and gradient clipping of torch engines.

    optimizer = build_optimizer(module.parameters(), config.optim)
    schedule = Schedule(optimizer, config.optim)
    norm, updated = clip_and_step(optimizer, config.grad_clip)

Parameters may be tensors, DTensors, and DTensors of several meshes.
"""

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from camshaft.config.engine import OptimConfig
from camshaft.errors import EngineError
from camshaft.plugins import import_attribute

UNSUPPORTED = {
    "LBFGS": "it evaluates the loss several times per step",
    "SparseAdam": "it requires sparse gradients",
}
"""Optimizers of torch.optim that engines do not support, with the reason."""


def build_optimizer(parameters: Iterable[torch.nn.Parameter], optim: OptimConfig) -> torch.optim.Optimizer:
    """Build the optimizer of `optim` for the trainable parameters.

    It receives lr, betas, eps and weight decay if its class has arguments of these names and types, and all of
    `override_optimizer_config`. Adam and AdamW use their fused kernels, which also support sharded
    parameters, the others `foreach`; the results are the same.
    """
    trainable = [p for p in parameters if p.requires_grad]
    if not trainable:
        raise EngineError("nothing to train: no parameter of the model requires a gradient")
    cls = optimizer_class(optim.optimizer)
    accepted = inspect.signature(cls).parameters
    values = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": optim.weight_decay}
    arguments = {
        name: value for name, value in values.items() if name in accepted and _same_type(value, accepted[name])
    }
    arguments |= _overrides(optim, cls.__name__, accepted)
    if not {"fused", "foreach"} & arguments.keys():
        fused = issubclass(cls, torch.optim.Adam) and not any(p.is_meta for p in trainable)
        form = "fused" if fused else "foreach"
        arguments |= {form: True} if form in accepted else {}
    # One parameter group per mesh: operations on lists of tensors do not accept several meshes.
    groups = [{"params": members} for members in _by_mesh(trainable, lambda p: p)]
    try:
        return cls(groups, **arguments)
    except (TypeError, ValueError) as error:
        raise EngineError(
            f"optimizer={optim.optimizer} does not take the parameters of this model, or one of {arguments}: {error}"
        ) from error


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class of a name in torch.optim, of `package.module:Class`, or of `package.module.Class`."""
    available = {
        key: value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if ":" in name or "." in name:
        module, _, attribute = name.replace(":", ".").rpartition(".")
        cls = import_attribute(f"{module}:{attribute}")
    elif name in available:
        cls = available[name]
    else:
        lowercase = {key.lower(): key for key in available}
        close = difflib.get_close_matches(name.lower(), lowercase, n=1)
        hint = f" Did you mean '{lowercase[close[0]]}'?" if close else ""
        raise EngineError(
            f"torch.optim has no optimizer '{name}'.{hint} "
            f"Known: {', '.join(sorted(available.keys() - UNSUPPORTED.keys()))}, "
            "or package.module:Class"
        )
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise EngineError(f"optimizer={name} is not a subclass of torch.optim.Optimizer")
    reason = UNSUPPORTED.get(cls.__name__)
    if reason is None and _needs_closure(cls):
        reason = "its step requires a closure that computes the loss"
    if reason is not None:
        raise EngineError(f"optimizer={name} is not supported: {reason}. Set optimizer=AdamW")
    return cls


def _needs_closure(cls: type[torch.optim.Optimizer]) -> bool:
    _, *arguments = inspect.signature(cls.step).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(argument.default is inspect.Parameter.empty and argument.kind in kinds for argument in arguments)


def _same_type(value: float | tuple[float, float], parameter: inspect.Parameter) -> bool:
    """Compare the type of a config value with the default of an argument: Adafactor's eps are two numbers."""
    default = parameter.default
    if default is inspect.Parameter.empty:
        return True
    if isinstance(value, tuple):
        return isinstance(default, tuple) and len(default) == len(value)
    return isinstance(default, int | float)


def _overrides(optim: OptimConfig, name: str, accepted: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    overrides = {k: tuple(v) if isinstance(v, list) else v for k, v in optim.override_optimizer_config.items()}
    if "lr" in overrides:
        raise EngineError(f"override_optimizer_config: the schedule overwrites lr={overrides['lr']}; set optim.lr")
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
        return overrides
    arguments = [argument for argument in accepted if argument not in ("params", "lr")]
    unknown = [argument for argument in overrides if argument not in arguments]
    if unknown:
        raise EngineError(
            f"override_optimizer_config: {name} has no argument {', '.join(unknown)}; it has {', '.join(arguments)}"
        )
    return overrides


def rate(optim: OptimConfig, update: int) -> float:
    """Return the learning rate of update number `update`, counted from 0.

    Linear warm-up reaches the full rate at update `lr_warmup_steps - 1`; no update has rate 0. After it the rate is
    constant, or decays by a cosine or linearly to `min_lr_ratio` at `total_training_steps`.
    """
    if update < optim.lr_warmup_steps:
        return optim.lr * (update + 1) / optim.lr_warmup_steps
    if optim.lr_scheduler_type == "constant":
        return optim.lr
    span = max(1, optim.total_training_steps - optim.lr_warmup_steps)
    progress = min(1.0, (update - optim.lr_warmup_steps) / span)
    linear = optim.lr_scheduler_type == "linear"
    left = 1 - progress if linear else 0.5 * (1 + math.cos(2 * math.pi * optim.num_cycles * progress))
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * left)


class Schedule:
    """Sets the optimizer's learning rate; its state is the number of updates."""

    def __init__(self, optimizer: torch.optim.Optimizer, optim: OptimConfig):
        shape = optim.lr_scheduler_type
        if shape != "constant" and optim.total_training_steps < 1:
            raise EngineError(f"lr_scheduler_type={shape} needs optim.total_training_steps, the length of the run")
        self.optimizer, self.optim = optimizer, optim
        self.go_to(0)

    @property
    def rate(self) -> float:
        """Learning rate of the next update."""
        return rate(self.optim, self.update)

    def go_to(self, update: int) -> float:
        """Set the learning rate of update number `update`, and return it."""
        self.update = update
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        return self.rate


def clip_and_step(
    optimizer: torch.optim.Optimizer, max_norm: float, total_norm: Callable[[list[Tensor]], Tensor] | None = None
) -> tuple[float, bool]:
    """Clip the gradient norm and apply one update; return (norm before clipping, True if the update was applied).

    A norm that is not finite applies no update. The norm is that of all parameters on all ranks, bitwise the same on
    every rank; reading it is the only wait for the device. `total_norm` computes the norm of gradients that are not
    DTensors although they are sharded.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not parameters:
        raise EngineError("optimizer_step: no gradient; call forward_backward_step first")
    groups = _by_mesh(parameters, lambda p: p.grad)
    norm_of = total_norm or (lambda gradients: _full_norm(torch.nn.utils.get_total_norm(gradients)))
    norms = [norm_of([p.grad for p in group if p.grad is not None]) for group in groups]
    single_axis = len(norms) == 1 and not _several_axes(groups[0][0].grad)
    norm = norms[0] if single_axis else _mean_over_ranks(_combine_norms(norms), groups)
    value = float(norm)
    if not math.isfinite(value):
        return value, False
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    optimizer.step()
    return value, True


def _by_mesh(
    parameters: Iterable[torch.nn.Parameter], tensor_of: Callable[[torch.nn.Parameter], Tensor | None]
) -> list[list[torch.nn.Parameter]]:
    """Group parameters by the mesh of their tensor; tensors without a mesh form one group."""
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        tensor = tensor_of(parameter)
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(parameter)
    return list(groups.values())


def _several_axes(gradient: Tensor | None) -> bool:
    """Return True if ranks of the mesh may compute the norm in different orders."""
    return isinstance(gradient, DTensor) and gradient.device_mesh.ndim > 1


def _full_norm(norm: Tensor) -> Tensor:
    """Reduce a norm over its mesh to a plain tensor, on the device of the mesh's collectives."""
    if not isinstance(norm, DTensor):
        return norm
    on_mesh: Any = norm.to(norm.device_mesh.device_type)
    return on_mesh.full_tensor()


def _combine_norms(norms: list[Tensor]) -> Tensor:
    # Norms of offloaded parameters move to the accelerator.
    device = next((norm.device for norm in norms if norm.device.type != "cpu"), norms[0].device)
    wide = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    return torch.linalg.vector_norm(torch.stack([norm.to(device, wide) for norm in norms]))


def _mean_over_ranks(norm: Tensor, groups: list[list[torch.nn.Parameter]]) -> Tensor:
    """Average the norm over all meshes, so that it is bitwise the same on every rank.

    Copies of a replicated gradient may differ in rounding between ranks; ranks that clip by different norms, or skip
    different updates, would diverge. Unlike a maximum, a mean propagates values that are not finite.
    """
    meshes = [group[0].grad.device_mesh for group in groups if isinstance(group[0].grad, DTensor)]
    # In the order of parameters, which is the same on all ranks: each iteration is a collective.
    for process_group in {pg.group_name: pg for mesh in meshes for pg in mesh.get_all_groups()}.values():
        dist.all_reduce(norm, group=process_group)
        norm = norm / process_group.size()
    return norm
