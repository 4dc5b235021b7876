"""Metrics of a step: timers, metrics of workers, and statistics of the batch. Detection of divergence.

    metrics = StepMetrics()
    with metrics.phase("gen"):                                  # timing_s/gen
        batch = metrics.union(batch, actor.generate_sequences(batch))
    metrics.add(batch_metrics(batch))

The most common metrics have the names that verl uses: `critic/score/mean`, `response_length/mean`, `actor/grad_norm`,
`timing_s/gen`, `perf/throughput`, ...

    divergence = DivergenceCheck({"actor": actor, "critic": critic}, max_skipped_steps=10)
    has_updated = divergence.check_updates(step, metrics)       # after every step
    divergence.check_outputs(step)                              # before a checkpoint is saved
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean

from torch import Tensor

from camshaft import algorithms
from camshaft.controller.worker import RANKS
from camshaft.dataproto import DataProto
from camshaft.errors import DivergenceError
from camshaft.rewards.manager import COUNTS
from camshaft.roles import ActorRolloutRefWorker
from camshaft.roles.base import SkippedSteps, TrainedRole

logger = logging.getLogger(__name__)


class StepMetrics:
    """Collector for the metrics of one step, in the order of its phases."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of a phase. If a phase is entered more than once, its times are summed."""
        start, key = time.perf_counter(), f"timing_s/{name}"
        yield
        self.values[key] = self.values.get(key, 0.0) + time.perf_counter() - start

    def add(self, values: Mapping[str, float]) -> None:
        self.values.update(values)

    def union(self, batch: DataProto, result: DataProto) -> DataProto:
        """Return `batch` with the columns of a worker result, and add the metrics of the result to this step."""
        self.add(reduce_ranks(result))
        return batch.union(DataProto(result.columns))

    def finished(self, batch: DataProto) -> dict[str, float]:
        """Add the time and the throughput of the step, and return all metrics."""
        seconds = time.perf_counter() - self._start
        tokens = float(batch["prompts"].lengths.sum() + batch["responses"].lengths.sum())
        self.add({"timing_s/step": seconds, "perf/total_num_tokens": tokens, "perf/throughput": tokens / seconds})
        return self.values


MAX_UPDATES_WITHOUT_STEP = 3
"""Number of consecutive updates without an applied optimizer step after which a run ends."""
_LEARNING_RATES = {
    "actor": "actor_rollout_ref.actor.optim.lr",
    "critic": "critic.optim.lr",
    "model": "optim.lr",
}


class DivergenceCheck:
    """Ends a run whose model has diverged, and keeps such a model from replacing a good checkpoint.

    Args:
        roles: Trained roles by name.
        max_skipped_steps: Number of consecutive skipped optimizer steps that ends the run. None sets no limit.
        prefix: Prefix of the metrics of a role. None uses its name.
    """

    def __init__(
        self,
        roles: Mapping[str, ActorRolloutRefWorker | TrainedRole],
        max_skipped_steps: int | None,
        prefix: str | None = None,
    ):
        self.roles, self.max_skipped_steps, self.prefix = roles, max_skipped_steps, prefix

    def check_updates(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Warn of skipped optimizer steps. Return False if every optimizer step of a role was skipped.

        Raise DivergenceError if too many consecutive steps were skipped.
        """
        has_updated, most_skipped, error = True, 0, ""
        for name, role in self.roles.items():
            count = int(metrics.get(f"{self.prefix or name}/skipped_steps", 0))
            if not count:
                continue
            ranks: list[SkippedSteps] = role.skipped_steps()  # pyright: ignore[reportAssignmentType]
            skipped = ranks[0]
            has_updated &= skipped.updates == 0
            causes = [rank.cause for rank in ranks if rank.cause is not None]
            reason = f"{causes[0] if causes else 'the gradient'} is not finite"
            logger.warning("step %d: %s skipped %d optimizer steps, because %s", step, name, count, reason)
            is_lost = self.max_skipped_steps is not None and (
                skipped.steps >= self.max_skipped_steps or skipped.updates >= MAX_UPDATES_WITHOUT_STEP
            )
            # A NaN of the critic reaches the actor one step later, so the role with more skipped steps is reported.
            if is_lost and skipped.steps > most_skipped:
                most_skipped = skipped.steps
                error = (
                    f"{name} has skipped {skipped.steps} optimizer steps in a row up to step {step}, because {reason}; "
                    f"{self._advice(name)}. trainer.max_skipped_steps sets the limit"
                )
        if error:
            raise DivergenceError(error)
        return has_updated

    def check_outputs(self, step: int) -> None:
        """Raise DivergenceError if the outputs of a model are not finite."""
        for name, role in self.roles.items():
            ranks: list[bool] = role.has_finite_outputs()  # pyright: ignore[reportAssignmentType]
            if not all(ranks):
                raise DivergenceError(
                    f"the outputs of {name} are not finite after step {step}, so this step is not saved; "
                    f"{self._advice(name)}"
                )

    def _advice(self, name: str) -> str:
        return (
            f"lower {_LEARNING_RATES[name]} or check the rewards and the data, then start the run again to resume from "
            "its last checkpoint"
        )


RANK_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "rollout/prompt_tokens_computed": sum,
    "rollout/prompt_tokens_cached": sum,
    "rollout/response_tokens": sum,
    "rollout/rows_decoded": sum,
    "rollout/http_retries": sum,
    "rollout/decode_steps": max,
    "rollout/slot_use": mean,
    "perf/sync_peak_memory_bytes": max,
    "timing_s/sync": max,
    "timing_s/sync_check": max,
    "perf/rollout_tokens_per_second": sum,
}
"""Reductions of metrics over ranks. Losses are already reduced. For all other metrics, such as `rollout/sync_bytes` and
those of custom rollouts, the value of the first rank is used."""


def reduce_ranks(result: DataProto) -> dict[str, float]:
    """Return the metrics of a worker call, reduced over ranks."""
    metrics: dict[str, float] = dict(result.meta_info.get("metrics", {}))
    ranks = result.meta_info.get(RANKS, ())
    for name, merge in RANK_REDUCTIONS.items():
        if ranks and name in metrics:
            metrics[name] = merge([meta["metrics"][name] for meta in ranks])
    return metrics


CALL_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    **{name: sum for name, merge in RANK_REDUCTIONS.items() if merge is sum},
    **{f"reward/{name}": sum for name in (*COUNTS.values(), "slow", "model/truncated")},
    "timing_s/reward_call_max": max,
    "rollout/decode_steps": sum,
    "perf/sync_peak_memory_bytes": max,
    "perf/rollout_tokens_per_second": mean,
}
"""Reductions of metrics over several calls in one step. Times are summed; metrics not listed here are averaged."""


def reduce_calls(calls: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Reduce the metrics of consecutive calls in one step."""
    names = dict.fromkeys(name for metrics in calls for name in metrics)
    reduced: dict[str, float] = {}
    for name in names:
        merge = CALL_REDUCTIONS.get(name, sum if name.startswith("timing_s/") else mean)
        reduced[name] = merge([metrics[name] for metrics in calls if name in metrics])
    return reduced


def batch_metrics(batch: DataProto) -> dict[str, float]:
    """Compute statistics of scores, rewards, advantages, values and lengths."""
    mask = batch["response_mask"].values
    responses, prompts = batch["responses"].lengths.float(), batch["prompts"].lengths.float()
    has_score = batch["response_mask"].sum() > 0  # dropped rows have no masked-in tokens
    metrics = {
        **_mean_max_min("critic/score", batch["token_level_scores"].sum()[has_score]),
        **_mean_max_min("critic/rewards", batch["token_level_rewards"].sum()[has_score]),
        **_mean_max_min("critic/advantages", batch["advantages"].values[mask]),
        **_mean_max_min("critic/returns", batch["returns"].values[mask]),
        **_mean_max_min("response_length", responses),
        **_mean_max_min("prompt_length", prompts),
        "response_length/clip_ratio": 1.0 - float(batch["finished"].float().mean()),
    }
    if "values" in batch:
        metrics |= _mean_max_min("critic/values", batch["values"].values[mask])
        metrics["critic/vf_explained_var"] = _compute_explained_variance(
            batch["values"].values[mask], batch["returns"].values[mask]
        )
    if "entropy" in batch:
        metrics["actor/entropy"] = float(batch["entropy"].values[mask].mean())
    return metrics


def mismatch(batch: DataProto) -> dict[str, float]:
    """Compute metrics of the mismatch between rollout and trainer log-probs (`algorithms/mismatch.py`).

    With the column `routing_mismatch`, they include the expert choices of a mixture of experts.
    """
    train, mask = batch.ragged("old_log_probs"), batch["response_mask"].values
    metrics = algorithms.mismatch(train.values, batch["rollout_log_probs"].values, mask, train.lengths)
    if "routing_mismatch" in batch:
        routing = batch["routing_mismatch"].values[mask]
        metrics |= {"routing_mismatch": routing.mean(), "routing_mismatch_tokens": (routing > 0).float().mean()}
    return {f"rollout/{name}": float(value) for name, value in metrics.items()}


def _mean_max_min(name: str, values: Tensor) -> dict[str, float]:
    values = values.float()
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _compute_explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns), which is 1 for a perfect critic and 0 for a constant one."""
    variance = float(returns.var())
    return 1 - float((returns - values).var()) / variance if variance > 0 else math.nan
