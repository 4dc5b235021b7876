"""Validation: scores and responses on held-out prompts.

    metrics, samples = validate(parts, config)
    save_samples(samples, folder / "step_20.jsonl")

All validations of a run use the same prompts, sampling (greedy by default, `val_kwargs`) and seeds, so that two of them
differ only by the weights. `at_n_metrics` aggregates several responses to one prompt; the formulas are in
`algorithms/at_n.py`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from camshaft.algorithms.at_n import at_n
from camshaft.config import PPOConfig
from camshaft.dataproto import DataProto
from camshaft.trainer.build import PPOParts
from camshaft.trainer.mini_batches import VALIDATION, sampling_seeds


@dataclass(frozen=True)
class Sample:
    """One prompt with its response and score."""

    prompt: str
    response: str
    ground_truth: Any
    score: float


@dataclass(frozen=True)
class Scored:
    """The score of one response, and its prompt."""

    data_source: str
    uid: str
    score: float
    answer: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


CORE = ("reward", "acc")
"""Values whose mean@n, best@n and maj@n over all n responses are in `val-core`; other metrics are in `val-aux`."""


COUNTED = (
    *("reward/errors", "reward/invalid", "reward/timeouts", "reward/crashes", "reward/slow"),
    "reward/model/truncated",
)
"""Counters of the scoring, if the run has them."""


def validate(parts: PPOParts, config: PPOConfig) -> tuple[dict[str, float], list[Sample]]:
    """Generate and score the validation prompts; returns the metrics (`val-core/...`, `val-aux/...`) and samples."""
    rows: list[Scored] = []
    counts: dict[str, float] = defaultdict(float)
    lengths: list[int] = []
    samples: list[Sample] = []
    prompts = parts.val_prompts.repeat(config.actor_rollout_ref.rollout.val_kwargs.n)
    seeds = sampling_seeds(config.trainer.seed, VALIDATION, len(prompts))
    for batch in prompts.with_columns(sampling_seed=seeds).split(config.data.val_batch_size):
        generated, begun = parts.generate(batch, validate=True)
        batch = parts.model_scored(batch.union(DataProto(generated.columns)))
        result = parts.rewards.score(batch, parts.decode, begun)
        parts.failed.add(result.failures, "validation")
        lengths += batch["responses"].lengths.tolist()
        columns = (batch["data_source"], batch["uid"], result.scores.tolist(), result.answers, result.parts)
        rows += [Scored(*row) for row in zip(*columns, strict=True)]
        for name in COUNTED:
            if name in result.metrics:
                counts[f"val-aux/{name}"] += result.metrics[name]
        samples += samples_of(parts, batch, result.scores)
    scores: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        scores[row.data_source].append(row.score)
    every = [score for values in scores.values() for score in values]
    metrics = {f"val-core/{source}/reward/mean": sum(values) / len(values) for source, values in scores.items()}
    metrics |= {"val/reward/mean": sum(every) / len(every), "val-aux/response_length/mean": sum(lengths) / len(lengths)}
    return metrics | at_n_metrics(rows) | counts, samples


def at_n_metrics(rows: Sequence[Scored]) -> dict[str, float]:
    """`val-core/<data_source>/<value>/mean@n`, `best@n/mean`, `maj@n/mean`; `std@n`, `worst@k/mean`, ... in `val-aux`.

    The values are `reward` and the numbers that the reward function returned for all responses of a data set. They are
    0 for a response whose scoring failed. `maj` needs answers.
    """
    metrics: dict[str, float] = {}
    for source, groups in by_prompt(rows).items():
        every = [row for group in groups for row in group]
        has_answers = any(row.answer is not None for row in every)
        answers = [[row.answer for row in group] for group in groups] if has_answers else None
        values = {"reward": [[row.score for row in group] for group in groups]}
        for name in _common_values(every):
            values[name] = [[row.parts.get(name, 0.0) for row in group] for group in groups]
        for name, of_groups in values.items():
            for suffix, value in at_n(of_groups, answers).items():
                metrics[f"{_section(name, suffix, len(groups[0]))}/{source}/{name}/{suffix}"] = value
    return metrics


def by_prompt(rows: Iterable[Scored]) -> dict[str, list[list[Scored]]]:
    """Group the responses by data set and prompt."""
    prompts: dict[str, dict[str, list[Scored]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        prompts[row.data_source][row.uid].append(row)
    return {source: list(groups.values()) for source, groups in prompts.items()}


def _common_values(rows: Sequence[Scored]) -> list[str]:
    """Return the names of the values that every dict result has."""
    results = [row.parts.keys() for row in rows if row.parts]
    return sorted(frozenset.intersection(*map(frozenset, results)) - {"reward"}) if results else []


def _section(name: str, suffix: str, n: int) -> str:
    kind, _, k = suffix.partition("/")[0].partition("@")
    return "val-core" if name in CORE and kind in ("mean", "best", "maj") and int(k) == n else "val-aux"


def samples_of(parts: PPOParts, batch: DataProto, scores: Tensor) -> list[Sample]:
    """Decode the rows."""
    prompts = parts.decode([row.tolist() for row in batch["prompts"].rows()])
    responses = parts.decode([row.tolist() for row in batch["responses"].rows()])
    rows = zip(prompts, responses, batch["ground_truth"], scores.tolist(), strict=True)
    return [Sample(*row) for row in rows]


def save_samples(samples: list[Sample], path: Path) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as out:
        for sample in samples:
            out.write(json.dumps(asdict(sample), ensure_ascii=False, default=str) + "\n")
