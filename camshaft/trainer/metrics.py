"""Metrics of a step: timers, metrics of the workers, statistics of the batch.

    metrics = StepMetrics()
    with metrics.phase("gen"):                                  # timing_s/gen
        batch = metrics.union(batch, actor.generate_sequences(batch))
    metrics.add(batch_metrics(batch))

The names are those of common dashboards: `critic/score/mean`, `response_length/mean`,
`actor/grad_norm`, `timing_s/gen`, `perf/throughput`, ...
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean

from torch import Tensor

from camshaft import algorithms
from camshaft.controller.worker import RANKS
from camshaft.dataproto import DataProto
from camshaft.rewards.manager import COUNTS


class StepMetrics:
    """Collects the metrics of one step in the order of its phases."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the step; the times of a phase entered more than once are summed."""
        start, key = time.perf_counter(), f"timing_s/{name}"
        yield
        self.values[key] = self.values.get(key, 0.0) + time.perf_counter() - start

    def add(self, values: Mapping[str, float]) -> None:
        self.values.update(values)

    def union(self, batch: DataProto, result: DataProto) -> DataProto:
        """Add the columns of a worker's result to `batch`, and its metrics to this step."""
        self.add(over_ranks(result))
        return batch.union(DataProto(result.columns))

    def finished(self, batch: DataProto) -> dict[str, float]:
        """Return all metrics, with the time and the throughput of the step."""
        seconds = time.perf_counter() - self._start
        tokens = float(batch["prompts"].lengths.sum() + batch["responses"].lengths.sum())
        self.add({"timing_s/step": seconds, "perf/total_num_tokens": tokens, "perf/throughput": tokens / seconds})
        return self.values


OVER_RANKS: dict[str, Callable[[Sequence[float]], float]] = {
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
"""How to merge metrics of several ranks. Losses are already reduced over all ranks; others (`rollout/sync_bytes`,
metrics of a rollout of your own) are those of the first rank."""


def over_ranks(result: DataProto) -> dict[str, float]:
    """Return the metrics of a call, merged over its ranks."""
    merged: dict[str, float] = dict(result.meta_info.get("metrics", {}))
    ranks = result.meta_info.get(RANKS, ())
    for name, merge in OVER_RANKS.items():
        if ranks and name in merged:
            merged[name] = merge([meta["metrics"][name] for meta in ranks])
    return merged


OVER_CALLS: dict[str, Callable[[Sequence[float]], float]] = {
    **{name: sum for name, merge in OVER_RANKS.items() if merge is sum},
    **{f"reward/{name}": sum for name in (*COUNTS.values(), "slow", "model/truncated")},
    "timing_s/reward_call_max": max,
    "rollout/decode_steps": sum,
    "perf/sync_peak_memory_bytes": max,
    "perf/rollout_tokens_per_second": mean,
}
"""How to merge metrics of several calls in one step. Times are summed; other metrics are averaged."""


def over_calls(calls: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the metrics of consecutive calls."""
    names = dict.fromkeys(name for metrics in calls for name in metrics)
    merged: dict[str, float] = {}
    for name in names:
        merge = OVER_CALLS.get(name, sum if name.startswith("timing_s/") else mean)
        merged[name] = merge([metrics[name] for metrics in calls if name in metrics])
    return merged


def batch_metrics(batch: DataProto) -> dict[str, float]:
    """Compute statistics of scores, rewards, advantages, values and lengths."""
    mask = batch["response_mask"].values
    responses, prompts = batch["responses"].lengths.float(), batch["prompts"].lengths.float()
    scored = batch["response_mask"].sum() > 0  # dropped rows have no score
    metrics = {
        **_spread("critic/score", batch["token_level_scores"].sum()[scored]),
        **_spread("critic/rewards", batch["token_level_rewards"].sum()[scored]),
        **_spread("critic/advantages", batch["advantages"].values[mask]),
        **_spread("critic/returns", batch["returns"].values[mask]),
        **_spread("response_length", responses),
        **_spread("prompt_length", prompts),
        "response_length/clip_ratio": 1.0 - float(batch["finished"].float().mean()),
    }
    if "values" in batch:
        metrics |= _spread("critic/values", batch["values"].values[mask])
        metrics["critic/vf_explained_var"] = _compute_explained_variance(
            batch["values"].values[mask], batch["returns"].values[mask]
        )
    if "entropy" in batch:
        metrics["actor/entropy"] = float(batch["entropy"].values[mask].mean())
    return metrics


def mismatch(batch: DataProto) -> dict[str, float]:
    """Compare the log-probs of rollout and trainer; formulas in `algorithms/mismatch.py`."""
    train, mask = batch.ragged("old_log_probs"), batch["response_mask"].values
    metrics = algorithms.mismatch(train.values, batch["rollout_log_probs"].values, mask, train.lengths)
    return {f"rollout/{name}": float(value) for name, value in metrics.items()}


def _spread(name: str, values: Tensor) -> dict[str, float]:
    values = values.float()
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _compute_explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant one."""
    spread = float(returns.var())
    return 1 - float((returns - values).var()) / spread if spread > 0 else math.nan
