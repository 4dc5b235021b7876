"""Ends a run whose model has diverged, for all trainers.

    divergence = DivergenceCheck({"actor": actor, "critic": critic}, max_skipped_steps=10)
    is_good = divergence.check_updates(step, metrics)       # after every step
    divergence.check_outputs(step)                          # before a checkpoint is saved

`check_updates` reports optimizer steps that were skipped because the gradient was not finite. After such a step, the
trainer waits for the next good one before it saves a checkpoint. `check_outputs` keeps a model whose outputs or weights
are not finite from replacing a good checkpoint.
"""

import logging
from collections.abc import Mapping

from camshaft.errors import DivergenceError
from camshaft.roles import ActorRolloutRefWorker
from camshaft.roles.base import SkippedSteps, TrainedRole

MAX_UPDATES_WITHOUT_STEP = 3
"""Number of consecutive updates without an applied optimizer step after which a run ends."""
_LEARNING_RATES = {"actor": "actor_rollout_ref.actor.optim.lr", "critic": "critic.optim.lr", "model": "optim.lr"}

logger = logging.getLogger(__name__)


class DivergenceCheck:
    """Ends a run whose model has diverged, and keeps such a model from replacing a good checkpoint.

    `max_skipped_steps` is the number of consecutive skipped optimizer steps that ends the run; None sets no limit.
    `prefix` is the prefix of the metrics of a role; None uses its name.
    """

    def __init__(
        self,
        roles: Mapping[str, ActorRolloutRefWorker | TrainedRole],
        max_skipped_steps: int | None,
        prefix: str | None = None,
    ):
        self.roles, self.max_skipped_steps, self.prefix = roles, max_skipped_steps, prefix

    def check_updates(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Warn of skipped optimizer steps. Return False if the latest optimizer step of a role was skipped.

        Raise DivergenceError if too many consecutive steps were skipped.
        """
        is_good, most_skipped, error = True, 0, ""
        for name, role in self.roles.items():
            count = int(metrics.get(f"{self.prefix or name}/skipped_steps", 0))
            if not count:
                continue
            ranks: list[SkippedSteps] = role.skipped_steps()  # pyright: ignore[reportAssignmentType]
            skipped = ranks[0]
            is_good &= skipped.steps == 0
            causes = [rank.cause for rank in ranks if rank.cause is not None]
            reason = f"{causes[0] if causes else 'the gradient'} is not finite"
            logger.warning("step %d: %s skipped %d optimizer steps, because %s", step, name, count, reason)
            limit = ""
            if self.max_skipped_steps is not None and skipped.steps >= self.max_skipped_steps:
                limit = "trainer.max_skipped_steps sets the limit"
            elif self.max_skipped_steps is not None and skipped.updates >= MAX_UPDATES_WITHOUT_STEP:
                limit = f"{skipped.updates} updates had no step; trainer.max_skipped_steps=null disables the limit"
            # A NaN of the critic reaches the actor one step later, so the role with more skipped steps is reported.
            if limit and skipped.steps > most_skipped:
                most_skipped = skipped.steps
                error = (
                    f"{name} has skipped {skipped.steps} optimizer steps in a row up to step {step}, because {reason}; "
                    f"{self._advice(name)}. {limit}"
                )
        if error:
            raise DivergenceError(error)
        return is_good

    def check_outputs(self, step: int) -> None:
        """Raise DivergenceError if outputs or weights of a model are not finite, or if their squares overflow."""
        for name, role in self.roles.items():
            ranks: list[bool] = role.has_finite_outputs()  # pyright: ignore[reportAssignmentType]
            if not all(ranks):
                raise DivergenceError(
                    f"the outputs or weights of {name} are not finite or too large after step {step}, so this step is "
                    f"not saved; {self._advice(name)}"
                )

    def _advice(self, name: str) -> str:
        fix = f"lower {_LEARNING_RATES[name]} or check the rewards and the data"
        return f"{fix}, then start the run again to resume from its last checkpoint"
