"""Metrics that the views of a run show, in five rows: learning, stability, mismatch, time and failures.

for title, panels in ROWS.items():
    for panel in panels:
        curves = panel.select(run.metrics.names)
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

BAND = ("critic/score/p10", "critic/score/p90")
"""Quantiles between which charts show a band instead of two lines."""
MEDIAN = "critic/score/p50"
"""Quantile that charts of several runs leave out."""


class Panel(NamedTuple):
    """A chart of one or more metrics."""

    title: str
    patterns: tuple[str, ...]
    """Regular expressions of the names of its metrics."""
    fewest: int = 1
    """Minimum number of metrics for a chart. With one data source, it would repeat the overall reward."""

    def select(self, names: Iterable[str]) -> list[str]:
        """Return the metrics that a run has logged, in the order of the patterns."""
        logged = list(names)
        return list(dict.fromkeys(name for pattern in self.patterns for name in logged if re.fullmatch(pattern, name)))


ROWS = {
    "Learning": (
        Panel("Training reward", (r"critic/score/mean", r"critic/score/p(10|50|90)")),
        Panel("Training reward by data source", (r"critic/score/.+/mean",), fewest=2),
        Panel("Validation reward", (r"val/reward/mean", r"val-core/.+/reward/mean")),
        Panel("Loss", (r"train/loss", r"val/loss")),
        Panel("Accuracy", (r"train/accuracy", r"val/accuracy")),
        Panel("Groups without signal", (r"groups/same_share", r"filter_groups/same_share")),
        Panel("Response length", (r"response_length/(mean|max)",)),
        Panel("Cut responses", (r"response_length/clip_ratio",)),
    ),
    "Stability": (
        Panel("Entropy", (r"actor/entropy",)),
        Panel("KL", (r"actor/ppo_kl", r"actor/kl_loss", r"actor/reward_kl_penalty")),
        Panel("Clipped ratios", (r"actor/pg_clipfrac(_lower)?",)),
        Panel("Gradient norm", (r"(actor|critic|train)/grad_norm",)),
        Panel("Learning rate", (r"(actor|critic|train)/lr",)),
        Panel("Value loss", (r"critic/vf_loss",)),
        Panel("Explained variance of the critic", (r"critic/vf_explained_var",)),
    ),
    "Trainer against generator": (
        Panel("Log-prob gap, mean", (r"rollout/log_prob_diff_mean",)),
        Panel("Log-prob gap, maximum", (r"rollout/log_prob_diff_max",)),
        Panel("Effective samples", (r"rollout/effective_sample_share",)),
        Panel("Age of the responses", (r"async/staleness_(mean|max)",)),
        Panel("Log-prob gap by age", (r"async/age_\d+_log_prob_diff_mean",)),
        Panel("Log-prob gap at equal weights", (r"async/probe_log_prob_diff_mean",)),
        Panel("Length of generated and learned responses", (r"async/(generated|learned)_length/(mean|p90)",)),
    ),
    "Time": (
        Panel("Time per step", (r"timing_s/step",)),
        Panel("Throughput", (r"perf/throughput", r"perf/rollout_tokens_per_second")),
        Panel("Slowest reward call", (r"timing_s/reward_call_max",)),
        Panel("Waits of trainer and generator", (r"async/(trainer_wait|generator_idle)_share",)),
    ),
    "Failures": (
        Panel("Failed reward calls", (r"reward/(errors|invalid|timeouts|crashes)",)),
        Panel("Skipped steps", (r"(actor|critic|train)/skipped_steps",)),
    ),
}
"""Charts by the title of their row."""
PHASES = (
    "sync", "gen", "gen_max", "reward", "reward_max", "old_log_prob", "ref", "values", "adv", "update_critic",
    "update_actor", "train", "sample", "queue", "client",
)  # fmt: skip
"""Phases of a step, whose times `timing_s/<phase>` add up to the time of the step."""
VALIDATE = "validate"
"""Phase after some steps of a supervised run, which is not a part of the time of the step."""

REWARD = ("critic/score/mean", "train/accuracy", "train/loss")
"""Metrics that stand for the progress of a run. The first of them that a run has logged is shown in tables."""
LABELS: dict[str, str] = dict(zip(REWARD, ("reward", "accuracy", "loss"), strict=True))
VALIDATION = ("val/reward/mean", "val/accuracy", "val/loss")
HEADLINES = (
    *(*REWARD, *VALIDATION, "groups/same_share", "response_length/mean", "response_length/clip_ratio"),
    *("actor/entropy", "actor/ppo_kl", "actor/grad_norm", "train/grad_norm", "rollout/log_prob_diff_mean"),
    *("timing_s/step", "perf/throughput"),
)
"""Metrics of the comparison of two runs."""


def first_logged(candidates: Iterable[str], names: Iterable[str]) -> str | None:
    """Return the first of `candidates` that a run has logged, or None."""
    logged = set(names)
    return next((name for name in candidates if name in logged), None)
