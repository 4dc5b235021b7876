"""Metrics of a step: timers, metrics of workers, and statistics of the batch.

    metrics = StepMetrics(status)
    with metrics.phase("gen"):                                  # timing_s/gen
        batch = metrics.union(batch, actor.generate_sequences(batch))
    metrics.add(batch_metrics(batch))

The common metrics have the names of verl: `critic/score/mean`, `response_length/mean`, `actor/grad_norm`, ...
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from camshaft import algorithms
from camshaft.controller import Worker, pools_of
from camshaft.controller.worker import RANKS
from camshaft.dataproto import DataProto, Ragged
from camshaft.rewards.manager import COUNTS
from camshaft.tracking.record import Phase, RunStatus


class StepMetrics:
    """Collector for the metrics of one step, in the order of its phases."""

    def __init__(self, status: RunStatus) -> None:
        """`status` is that of the run, which shows the phase in progress."""
        self.values: dict[str, float] = {}
        self.status = status
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of a phase. If a phase is entered more than once, its times are summed."""
        start, key = time.perf_counter(), f"timing_s/{name}"
        self.status.phase = Phase(name, time.time())
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


RANK_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "rollout/prompt_tokens_computed": sum,
    "rollout/prompt_tokens_cached": sum,
    "rollout/response_tokens": sum,
    "rollout/rows_decoded": sum,
    "rollout/http_retries": sum,
    "rollout/decode_steps": max,
    "rollout/slot_use": mean,
    "agent/tool_seconds": sum,
    "agent/tool_calls": sum,
    "agent/tool_errors": sum,
    "agent/other_rows": sum,
    "agent/prompt_tokens_recomputed": sum,
    "perf/sync_peak_memory_bytes": max,
    "async/generation": max,
    "timing/generated": max,
    "async/generator_idle": mean,
    "async/generator_idle_share": mean,
    "timing_s/sync": max,
    "timing_s/sync_check": max,
    "perf/rollout_tokens_per_second": sum,
}
"""Reductions of metrics over ranks. Losses are already reduced. For all other metrics, such as `rollout/sync_bytes` and
those of custom rollouts, the value of the first rank is used."""


def reduce_ranks(result: DataProto) -> dict[str, float]:
    """Return the metrics of a worker call, reduced over ranks."""
    metrics: dict[str, float] = result.meta_info.get("metrics", {})
    ranks = [meta["metrics"] for meta in result.meta_info.get(RANKS, ())] if metrics else []
    return merge_ranks(ranks or [metrics])


def merge_ranks(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return metrics that every rank has measured, reduced over ranks."""
    merged = dict(ranks[0])
    for name in merged.keys() & RANK_REDUCTIONS.keys():
        merged[name] = RANK_REDUCTIONS[name]([metrics[name] for metrics in ranks])
    return merged


CALL_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    **{name: sum for name, merge in RANK_REDUCTIONS.items() if merge is sum},
    **{f"reward/{name}": sum for name in (*COUNTS.values(), "slow", "model/truncated")},
    "timing_s/reward_call_max": max,
    "rollout/decode_steps": sum,
    "perf/sync_peak_memory_bytes": max,
    "perf/rollout_tokens_per_second": mean,
}
"""Reductions of metrics over several calls in one step. Times are summed; metrics not listed here are averaged."""

FUNCTION_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "scored": sum, "failed": sum, "min": min, "max": max,
}  # fmt: skip
"""Reductions of the metrics `reward/<function>/...` over several calls in one step."""


def reduce_calls(calls: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Reduce the metrics of consecutive calls in one step."""
    names = dict.fromkeys(name for metrics in calls for name in metrics)
    reduced: dict[str, float] = {}
    for name in names:
        merge = CALL_REDUCTIONS.get(name, sum if name.startswith("timing_s/") else mean)
        if name.startswith("reward/") and name.count("/") > 1:  # of one of several functions
            merge = FUNCTION_REDUCTIONS.get(name.rpartition("/")[2], merge)
        reduced[name] = merge([metrics[name] for metrics in calls if name in metrics])
    return reduced


class RankTimes:
    """The time for which each rank executes calls, in pools of several ranks. Each step reports that since the last."""

    def __init__(self, roles: Iterable[Worker]):
        self._pools = {name: pool for name, pool in pools_of(roles).items() if pool.world_size > 1}
        self._before = {name: list(pool.busy_seconds) for name, pool in self._pools.items()}

    def metrics(self) -> dict[str, float]:
        """Return the mean and the maximum over ranks, and the rank with the maximum, for each pool."""
        metrics: dict[str, float] = {}
        for name, pool in self._pools.items():
            now, before = list(pool.busy_seconds), self._before[name]
            seconds = [end - start for end, start in zip(now, before, strict=True)]
            self._before[name] = now
            slowest = max(range(len(seconds)), key=seconds.__getitem__)
            metrics |= {
                f"perf/rank_seconds/{name}/mean": mean(seconds),
                f"perf/rank_seconds/{name}/max": seconds[slowest],
                f"perf/slowest_rank/{name}": float(slowest),
            }
        return metrics


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
    metrics |= score_metrics(batch["token_level_scores"].sum(), has_score, batch["data_source"], batch["uid"])
    if "values" in batch:
        values, returns = batch["values"].values[mask], batch["returns"].values[mask]
        metrics |= _mean_max_min("critic/values", values)
        metrics["critic/vf_explained_var"] = _compute_explained_variance(values, returns)
    if "entropy" in batch:
        metrics["actor/entropy"] = float(batch["entropy"].values[mask].mean())
    return metrics


QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


def score_metrics(
    scores: Tensor, has_score: Tensor, data_sources: Sequence[str], uids: Sequence[Any]
) -> dict[str, float]:
    """Compute quantiles of the scores, their mean per data source, and the share of groups without a signal.

    Rows without `has_score` are ignored. A group has no signal if its scores are equal; groups of one row do not count.
    """
    kept = scores.float()[has_score]
    metrics = {f"critic/score/{name}": float(torch.quantile(kept, level)) for name, level in QUANTILES.items()}
    sources: dict[str, list[float]] = {}
    groups: dict[Any, list[float]] = {}
    for score, is_kept, source, uid in zip(scores.tolist(), has_score.tolist(), data_sources, uids, strict=True):
        if is_kept:
            sources.setdefault(source, []).append(score)
            groups.setdefault(uid, []).append(score)
    metrics |= {f"critic/score/{source}/mean": math.fsum(sources[source]) / len(sources[source]) for source in sources}
    several = [min(values) == max(values) for values in groups.values() if len(values) > 1]
    return metrics | ({"groups/same_share": mean(several)} if several else {})


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


def policy_ages(batch: DataProto, version: int) -> Ragged:
    """Return by how many versions the weights that sampled each response token are older than `version`."""
    return batch.ragged("policy_versions").map(lambda versions: version - versions)


def staleness(batch: DataProto, ages: Ragged) -> dict[str, float]:
    """Compute statistics of the ages of the rows and tokens of a batch. A row has the age of its oldest token."""
    rows = torch.stack([row.max() for row in ages.rows() if len(row)]).float()
    sampled = ages.values[batch["response_mask"].values]
    metrics = {"async/staleness_mean": float(rows.mean()), "async/staleness_max": float(rows.max())}
    return metrics | {
        f"async/age_{age}_share": float((sampled == age).float().mean()) for age in sampled.unique().tolist()
    }


def mismatch_by_age(batch: DataProto, ages: Ragged) -> dict[str, float]:
    """Compute the mismatch between rollout and trainer for the tokens of each age."""
    train, rollout, mask = (batch[name].values for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
    metrics: dict[str, float] = {}
    for age in ages.values[mask].unique().tolist():
        of_age = algorithms.mismatch(train, rollout, mask & (ages.values == age), ages.lengths)
        metrics |= {f"async/age_{age}_{name}": float(of_age[name]) for name in ("log_prob_diff_mean", "kl_k3")}
    return metrics


def learned_lengths(batch: DataProto) -> dict[str, float]:
    """Compute statistics of the lengths of all responses, and of those with a token in the policy loss.

    A correction that rejects long responses, or short ones, shows in the difference.
    """
    mask = batch.ragged("response_mask")
    if "rollout_rs_mask" in batch:
        mask = mask.like(mask.values & batch["rollout_rs_mask"].values)
    lengths = batch["responses"].lengths.float()
    metrics: dict[str, float] = {}
    for name, rows in (("generated", lengths), ("learned", lengths[mask.sum() > 0])):
        if len(rows):
            statistics = {"mean": rows.mean(), "max": rows.max(), "p50": rows.quantile(0.5), "p90": rows.quantile(0.9)}
            metrics |= {f"async/{name}_length/{key}": float(value) for key, value in statistics.items()}
    return metrics


def off_policy(batch: DataProto) -> dict[str, float]:
    """Compute the diagnostics of training with samples of the rollout, which are logged with rollout correction."""
    train, mask = batch.ragged("old_log_probs"), batch["response_mask"].values
    diagnostics = algorithms.off_policy_diagnostics(
        train.values, batch["rollout_log_probs"].values, mask, train.lengths
    )
    return {f"rollout_corr/{name}": float(value) for name, value in diagnostics.items()}


def _mean_max_min(name: str, values: Tensor) -> dict[str, float]:
    values = values.float()
    statistics = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{key}": float(value) for key, value in statistics.items()}


def _compute_explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns), which is 1 for a perfect critic and 0 for a constant one."""
    variance = float(returns.var()) if len(returns) > 1 else 0.0
    return 1 - float((returns - values).var()) / variance if variance > 0 else math.nan
