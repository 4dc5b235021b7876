"""Validation: scores on held-out prompts, and the responses themselves.

    metrics, samples = validate(parts, config)
    save_samples(samples, folder / "step_20.jsonl")

Every validation of a run asks the same questions with the same sampling (greedy unless `val_kwargs` says
otherwise), so two of them differ by the weights alone. `at_n_metrics` says what several responses to one question are
worth together; the formulas are in `algorithms/at_n.py`.
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
from camshaft.trainer.seeds import VALIDATION, sampling_seeds


@dataclass(frozen=True)
class Sample:
    """One question, what the policy said, and what that was worth."""

    prompt: str
    response: str
    ground_truth: Any
    score: float


@dataclass(frozen=True)
class Scored:
    """What one response is worth, and the question that it answers."""

    data_source: str
    uid: str
    score: float
    answer: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


CORE = ("reward", "acc")
"""The values whose mean@n, best@n and maj@n, over all n responses, stand in `val-core`; all else is in `val-aux`."""


COUNTED = (
    *("reward/errors", "reward/invalid", "reward/timeouts", "reward/crashes", "reward/slow"),
    "reward/model/truncated",
)
"""What scoring counts, where it scores with what has it."""


def validate(parts: PPOParts, config: PPOConfig) -> tuple[dict[str, float], list[Sample]]:
    """(metrics named `val-core/<data_source>/reward/mean` and so on, all responses)."""
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

    The values are `reward` and the numbers of dict results that the reward function gave for all responses of a data
    set; of a response that it failed on they are 0, as its score is. Where no response has an answer there is no `maj`.
    """
    found: dict[str, float] = {}
    for source, groups in by_question(rows).items():
        every = [row for group in groups for row in group]
        told = any(row.answer is not None for row in every)
        answers = [[row.answer for row in group] for group in groups] if told else None
        values = {"reward": [[row.score for row in group] for group in groups]}
        for name in _given_by_all(every):
            values[name] = [[row.parts.get(name, 0.0) for row in group] for group in groups]
        for name, of_groups in values.items():
            for suffix, value in at_n(of_groups, answers).items():
                found[f"{_section(name, suffix, len(groups[0]))}/{source}/{name}/{suffix}"] = value
    return found


def by_question(rows: Iterable[Scored]) -> dict[str, list[list[Scored]]]:
    """Of each data set, the responses to each question."""
    found: dict[str, dict[str, list[Scored]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row.data_source][row.uid].append(row)
    return {source: list(groups.values()) for source, groups in found.items()}


def _given_by_all(rows: Sequence[Scored]) -> list[str]:
    """The numbers that every dict result has."""
    results = [row.parts.keys() for row in rows if row.parts]
    return sorted(frozenset.intersection(*map(frozenset, results)) - {"reward"}) if results else []


def _section(name: str, suffix: str, n: int) -> str:
    kind, _, k = suffix.partition("/")[0].partition("@")
    return "val-core" if name in CORE and kind in ("mean", "best", "maj") and int(k) == n else "val-aux"


def samples_of(parts: PPOParts, batch: DataProto, scores: Tensor) -> list[Sample]:
    """The rows as text."""
    prompts = parts.decode([row.tolist() for row in batch["prompts"].rows()])
    responses = parts.decode([row.tolist() for row in batch["responses"].rows()])
    rows = zip(prompts, responses, batch["ground_truth"], scores.tolist(), strict=True)
    return [Sample(*row) for row in rows]


def save_samples(samples: list[Sample], path: Path) -> None:
    """One JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as out:
        for sample in samples:
            out.write(json.dumps(asdict(sample), ensure_ascii=False, default=str) + "\n")
