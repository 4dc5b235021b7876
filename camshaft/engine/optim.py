"""The optimizer, the schedule and the clipping that engines on plain torch share.

optimizer = build_optimizer(module.parameters(), config.optim)
schedule = Schedule(optimizer, config.optim)
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from camshaft.config.engine import OptimConfig
from camshaft.errors import EngineError


def build_optimizer(parameters: Iterable[torch.nn.Parameter], optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW over what is trainable; `foreach` keeps it the same mathematics on every device."""
    trainable = [p for p in parameters if p.requires_grad]
    return torch.optim.AdamW(
        trainable, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, foreach=True
    )


def rate(optim: OptimConfig, update: int) -> float:
    """The learning rate of update number `update`, counted from 0.

    Linear warm-up reaches the full rate with update `lr_warmup_steps - 1`, so no update is at rate 0.
    Then constant, or a cosine that goes down to `min_lr_ratio` at `total_training_steps`.
    """
    if update < optim.lr_warmup_steps:
        return optim.lr * (update + 1) / optim.lr_warmup_steps
    if optim.lr_scheduler_type == "constant":
        return optim.lr
    span = max(1, optim.total_training_steps - optim.lr_warmup_steps)
    progress = min(1.0, (update - optim.lr_warmup_steps) / span)
    wave = 0.5 * (1 + math.cos(2 * math.pi * optim.num_cycles * progress))
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * wave)


class Schedule:
    """Sets the optimizer's rate; its whole state is one number."""

    def __init__(self, optimizer: torch.optim.Optimizer, optim: OptimConfig):
        if optim.lr_scheduler_type == "cosine" and optim.total_training_steps < 1:
            raise EngineError("lr_scheduler_type=cosine needs optim.total_training_steps, the length of the run")
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


def clip_and_step(optimizer: torch.optim.Optimizer, max_norm: float) -> tuple[float, bool]:
    """(gradient norm before clipping, was the update done). A norm that is not finite changes nothing."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not parameters:
        raise EngineError("optimizer_step: there is no gradient; call forward_backward_step first")
    norm: Tensor = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    value = float(norm)
    if not math.isfinite(value):
        return value, False
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    optimizer.step()
    return value, True
