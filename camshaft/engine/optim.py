"""The optimizer, the schedule and the clipping that engines on plain torch share.

    optimizer = build_optimizer(module.parameters(), config.optim)
    schedule = Schedule(optimizer, config.optim)
    norm, done = clip_and_step(optimizer, config.grad_clip)

Parameters may be plain tensors, DTensors, and DTensors of several meshes side by side.
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

REFUSED = {"LBFGS": "it evaluates the loss several times a step", "SparseAdam": "it wants sparse gradients"}
"""What torch.optim has and an engine cannot drive, with the reason."""

OWN_RATE = "lr"
"""The one argument that the schedule sets anew at every update."""


def build_optimizer(parameters: Iterable[torch.nn.Parameter], optim: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer that `optim` names, over what is trainable.

    It is given the rate, betas, eps and weight decay as far as its class has arguments of these names and kinds, and
    what `override_optimizer_config` says in any case. Adam and AdamW are asked for their fused form, which torch has
    for sharded parameters too, the others for `foreach`; both are the same mathematics.
    """
    trainable = [p for p in parameters if p.requires_grad]
    if not trainable:
        raise EngineError("there is nothing to train: no parameter of the model requires a gradient")
    found = optimizer_class(optim.optimizer)
    taken = inspect.signature(found).parameters
    given = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": optim.weight_decay}
    arguments = {name: value for name, value in given.items() if name in taken and _same_kind(value, taken[name])}
    arguments |= _overrides(optim, found.__name__, taken)
    if not {"fused", "foreach"} & arguments.keys():
        fused = issubclass(found, torch.optim.Adam) and not any(p.is_meta for p in trainable)
        form = "fused" if fused else "foreach"
        arguments |= {form: True} if form in taken else {}
    # A group of its own for each mesh: the operations on lists of tensors take no mixture.
    groups = [{"params": members} for members in _by_mesh(trainable, lambda p: p)]
    try:
        return found(groups, **arguments)
    except (TypeError, ValueError) as error:
        raise EngineError(
            f"optimizer={optim.optimizer} does not take the parameters of this model, or one of {arguments}: {error}"
        ) from error


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """A name in torch.optim, `package.module:Class`, or `package.module.Class`."""
    known = {
        key: value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if ":" in name or "." in name:
        module, _, attribute = name.replace(":", ".").rpartition(".")
        found = import_attribute(f"{module}:{attribute}")
    elif name in known:
        found = known[name]
    else:
        in_small = {key.lower(): key for key in known}
        close = difflib.get_close_matches(name.lower(), in_small, n=1)
        hint = f" Did you mean '{in_small[close[0]]}'?" if close else ""
        raise EngineError(
            f"torch.optim has no optimizer '{name}'.{hint} Known: {', '.join(sorted(known.keys() - REFUSED.keys()))}, "
            "or package.module:Class"
        )
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise EngineError(f"optimizer={name} is not a class of torch.optim.Optimizer")
    reason = REFUSED.get(found.__name__)
    if reason is None and _needs_closure(found):
        reason = "its step wants a function that computes the loss"
    if reason is not None:
        raise EngineError(f"optimizer={name} cannot be used here: {reason}. Type optimizer=AdamW")
    return found


def _needs_closure(found: type[torch.optim.Optimizer]) -> bool:
    _, *arguments = inspect.signature(found.step).parameters.values()
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(argument.default is inspect.Parameter.empty and argument.kind in named for argument in arguments)


def _same_kind(value: float | tuple[float, float], parameter: inspect.Parameter) -> bool:
    """Does the argument mean what we mean by its name? Adafactor's eps are two numbers, some betas are three."""
    default = parameter.default
    if default is inspect.Parameter.empty:
        return True
    if isinstance(value, tuple):
        return isinstance(default, tuple) and len(default) == len(value)
    return isinstance(default, int | float)


def _overrides(optim: OptimConfig, name: str, taken: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in optim.override_optimizer_config.items()}
    if OWN_RATE in given:
        raise EngineError(f"override_optimizer_config: the schedule sets lr={given[OWN_RATE]} anew; set optim.lr")
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        return given
    arguments = [argument for argument in taken if argument not in ("params", OWN_RATE)]
    unknown = [argument for argument in given if argument not in arguments]
    if unknown:
        raise EngineError(
            f"override_optimizer_config: {name} has no argument {', '.join(unknown)}; it has {', '.join(arguments)}"
        )
    return given


def rate(optim: OptimConfig, update: int) -> float:
    """The learning rate of update number `update`, counted from 0.

    Linear warm-up reaches the full rate with update `lr_warmup_steps - 1`, so no update is at rate 0.
    Then constant, or a cosine or a straight line that goes down to `min_lr_ratio` at `total_training_steps`.
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
    """Sets the optimizer's rate; its whole state is one number."""

    def __init__(self, optimizer: torch.optim.Optimizer, optim: OptimConfig):
        shape = optim.lr_scheduler_type
        if shape != "constant" and optim.total_training_steps < 1:
            raise EngineError(f"lr_scheduler_type={shape} needs optim.total_training_steps, the length of the run")
        self.optimizer, self.optim = optimizer, optim
        self.go_to(0)

    @property
    def rate(self) -> float:
        """What the next update will use."""
        return rate(self.optim, self.update)

    def go_to(self, update: int) -> float:
        """Use the rate of update number `update` from now on."""
        self.update = update
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        return self.rate


def clip_and_step(
    optimizer: torch.optim.Optimizer, max_norm: float, total_norm: Callable[[list[Tensor]], Tensor] | None = None
) -> tuple[float, bool]:
    """(gradient norm before clipping, was the update done). A norm that is not finite changes nothing.

    The norm is of all parameters, those of other ranks included, and the same number on every rank; reading it is the
    only wait for the device. `total_norm` is for gradients that do not say themselves what other ranks have of them.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not parameters:
        raise EngineError("optimizer_step: there is no gradient; call forward_backward_step first")
    groups = _by_mesh(parameters, lambda p: p.grad)
    measure = total_norm or (lambda gradients: _whole(torch.nn.utils.get_total_norm(gradients)))
    norms = [measure([p.grad for p in group if p.grad is not None]) for group in groups]
    alone = len(norms) == 1 and not _several_axes(groups[0][0].grad)
    norm = norms[0] if alone else _same_on_every_rank(_together(norms), groups)
    value = float(norm)
    if not math.isfinite(value):
        return value, False
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    optimizer.step()
    return value, True


def _by_mesh(
    parameters: Iterable[torch.nn.Parameter], looked_at: Callable[[torch.nn.Parameter], Tensor | None]
) -> list[list[torch.nn.Parameter]]:
    """Parameters of one mesh, and plain ones, each in a list of their own."""
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        tensor = looked_at(parameter)
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(parameter)
    return list(groups.values())


def _several_axes(gradient: Tensor | None) -> bool:
    """Whether ranks of one mesh may come to a norm in different ways."""
    return isinstance(gradient, DTensor) and gradient.device_mesh.ndim > 1


def _whole(norm: Tensor) -> Tensor:
    """A norm over all ranks of its mesh, as a plain tensor on the device on which these ranks exchange."""
    if not isinstance(norm, DTensor):
        return norm
    there: Any = norm.to(norm.device_mesh.device_type)
    return there.full_tensor()


def _together(norms: list[Tensor]) -> Tensor:
    # The norm of an accelerator's parameters comes first: those that rest in host memory go there.
    device = next((norm.device for norm in norms if norm.device.type != "cpu"), norms[0].device)
    wide = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    return torch.linalg.vector_norm(torch.stack([norm.to(device, wide) for norm in norms]))


def _same_on_every_rank(norm: Tensor, groups: list[list[torch.nn.Parameter]]) -> Tensor:
    """The mean over all meshes: ranks that differ in a bit, or in being finite, would part company for good.

    A mesh that spans some ranks only leaves the others with a norm of their own, if the copies of a replicated
    gradient are not the same bits. A mean carries what is not finite to every rank, as a maximum does not.
    """
    meshes = [group[0].grad.device_mesh for group in groups if isinstance(group[0].grad, DTensor)]
    # In the order of parameters, which all ranks share: each of these is an exchange.
    for process_group in {pg.group_name: pg for mesh in meshes for pg in mesh.get_all_groups()}.values():
        dist.all_reduce(norm, group=process_group)
        norm = norm / process_group.size()
    return norm
