"""Reports steps in which the policy learns nothing, and ends a run in which nothing is trained.

    idle = IdleCheck(config)
    metrics |= idle.check(step, batch, metrics)     # after every step
    if idle.is_over: ...                            # this step is the last one
    idle.finish(step)                               # raises IdleError, unless the prompts are solved

A step has no *signal* if no token has a coefficient other than 0 in the policy loss. It is *idle* if no token has one
in any loss. Other losses, such as an entropy bonus, can train without a signal.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch import Tensor

from camshaft.config import PPOConfig
from camshaft.dataproto import DataProto
from camshaft.errors import IdleError
from camshaft.tracking.no_signal import PATIENCE, SHARE, Cause, Kind, SeenScores, explain_equal_advantages, find_cause

GRADIENTS = ("actor/grad_norm", "critic/grad_norm")

logger = logging.getLogger(__name__)


def has_signal(batch: DataProto) -> Tensor:
    """Return a mask of the tokens whose coefficient in the policy loss is not 0, (N,)."""
    tokens = _policy_mask(batch) & (batch["advantages"].values != 0)
    return tokens & (batch["rollout_is_weights"].values != 0) if "rollout_is_weights" in batch else tokens


def other_losses(batch: DataProto, config: PPOConfig, updates_actor: bool) -> list[str]:
    """Return the losses besides the policy loss that train at least one token of the batch."""
    actor, trains_policy = config.actor_rollout_ref.actor, updates_actor and bool(_policy_mask(batch).any())
    losses = {
        "the value loss": "values" in batch and bool(batch["response_mask"].values.any()),
        "the entropy bonus": trains_policy and (actor.entropy_coeff != 0 or actor.entropy_target is not None),
        "the KL loss": trains_policy and actor.use_kl_loss and actor.kl_loss_coef != 0,
    }
    return [name for name, is_active in losses.items() if is_active]


def _policy_mask(batch: DataProto) -> Tensor:
    mask = batch["response_mask"].values
    return mask & batch["rollout_rs_mask"].values if "rollout_rs_mask" in batch else mask


@dataclass
class Streaks:
    """Consecutive steps without a signal and idle steps, and scores of the run. A checkpoint contains them."""

    without_signal: int = 0
    idle: int = 0
    lowest: float = math.inf
    highest: float = -math.inf
    recent: float = math.inf
    """The lowest score since the last step with a signal."""


class IdleCheck:
    """Counts steps in which nothing is trained, and reports their cause."""

    def __init__(self, config: PPOConfig):
        self.config, self.limit = config, config.trainer.max_idle_steps
        self.is_over = False
        """True if the last step has reached the limit."""
        self._streaks = Streaks()
        self._cause: Cause | None = None
        self._reported: set[Kind] = set()
        self._has_warned = False
        """True after a warning about equal advantages."""

    def check(self, step: int, batch: DataProto, metrics: Mapping[str, float]) -> dict[str, float]:
        """Count and report a step, and return further metrics.

        Losses of custom roles, of models and of custom functions may not depend on advantages. A step with a gradient
        is therefore not idle.
        """
        streaks, signal = self._streaks, has_signal(batch)
        tokens, count = int(batch["response_mask"].values.sum()), int(signal.sum())
        updates_actor = step > self.config.trainer.critic_warmup
        others = other_losses(batch, self.config, updates_actor)
        is_idle = not (count and updates_actor) and not others and not any(map(metrics.get, GRADIENTS))
        streaks.without_signal = 0 if count else streaks.without_signal + 1
        streaks.idle = streaks.idle + 1 if is_idle else 0
        lowest, highest = metrics.get("critic/score/min", math.inf), metrics.get("critic/score/max", -math.inf)
        streaks.lowest, streaks.highest = min(streaks.lowest, lowest), max(streaks.highest, highest)
        streaks.recent = math.inf if count else min(streaks.recent, lowest)
        if not count:
            seen = SeenScores(streaks.lowest, streaks.highest, streaks.recent)
            self._cause = find_cause(metrics, self.config.algorithm.adv_estimator, seen)
            self._report(step, self._cause, others)
        elif metrics.get("critic/advantages/min") == metrics.get("critic/advantages/max"):
            self._report_equal_advantages(step, metrics)
        self.is_over = self.limit is not None and streaks.idle >= self.limit
        return {SHARE: count / max(tokens, 1), "train/idle_steps": float(streaks.idle)}

    def _report(self, step: int, cause: Cause, others: list[str]) -> None:
        """Log a cause once, if several steps had no signal."""
        count = self._streaks.without_signal
        if count < PATIENCE or cause.kind in self._reported:
            return
        self._reported.add(cause.kind)
        effect = f"Only {' and '.join(others) or 'losses of the model itself'} trained in this step"
        if self._streaks.idle:
            limit = "" if self.limit is None else f"; the run ends after trainer.max_idle_steps={self.limit} such steps"
            effect = f"Nothing was trained in this step{limit}"
        level = logging.INFO if cause.kind == "solved" else logging.WARNING
        message = "step %d: the last %d steps gave the policy no signal, because %s. %s"
        logger.log(level, message, step, count, cause.text, effect)

    def _report_equal_advantages(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log once that all advantages of a step are equal, if the scores differ."""
        text = explain_equal_advantages(metrics, self.config.algorithm.adv_estimator)
        if text is not None and not self._has_warned:
            logger.warning("step %d: %s", step, text)
            self._has_warned = True

    def finish(self, step: int) -> None:
        """Raise IdleError if the run ends because nothing is trained and its prompts are not solved."""
        if not self.is_over or self._cause is None:
            return
        if self._cause.kind != "solved":
            raise IdleError(
                f"nothing was trained in {self._streaks.idle} steps in a row up to step {step}, because "
                f"{self._cause.text}. trainer.max_idle_steps={self.limit} sets the limit, null disables it"
            )
        logger.info("the run ends after step %d, because %s", step, self._cause.text)

    def state_dict(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self._streaks).items() if math.isfinite(value)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue the streaks of a checkpoint. Checkpoints of earlier versions contain none.

        A run that has ended because nothing was trained starts to count again: its user may have mended the cause.
        """
        self._streaks = Streaks(**state)  # pyright: ignore[reportArgumentType]
        if self.limit is not None and self._streaks.idle >= self.limit:
            self._streaks.idle = 0
