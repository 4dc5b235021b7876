"""Validation: generate and score responses to held-out prompts.

    metrics, samples = validate(parts, config, version)
    save_samples(samples, folder / "step_20.jsonl")

All validations of a run use the same prompts, sampling parameters (`val_kwargs`, greedy by default) and seeds, so their
results differ only by the weights. `at_n_metrics` aggregates several responses to one prompt (`algorithms/at_n.py`).
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from camshaft import storage
from camshaft.algorithms.at_n import at_n
from camshaft.config import PPOConfig
from camshaft.dataproto import DataProto
from camshaft.errors import RewardError
from camshaft.rewards.manager import COUNTS, log_failures
from camshaft.storage import rename_existing
from camshaft.trainer.build import PPOParts
from camshaft.trainer.mini_batches import VALIDATION, sampling_seeds


@dataclass(frozen=True)
class Sample:
    prompt: str
    response: str
    ground_truth: Any
    score: float | None
    """None if the environment has failed."""


@dataclass(frozen=True)
class ScoredResponse:
    data_source: str
    uid: str
    score: float
    answer: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


CORE = ("reward", "acc")
"""Values whose mean@n, best@n and maj@n over all n responses are in `val-core`. Other metrics are in `val-aux`."""

COUNTED = tuple(f"reward/{name}" for name in (*COUNTS.values(), "slow", "model/truncated"))
"""Counters of the reward function and the reward model that are summed over batches, if they exist."""


def validate(parts: PPOParts, config: PPOConfig, version: int) -> tuple[dict[str, float], list[Sample]]:
    """Generate and score responses to the validation prompts, and return the metrics and samples.

    `version` is the number of training steps of the weights.
    """
    rows: list[ScoredResponse] = []
    counts: dict[str, float] = defaultdict(float)
    lengths: list[int] = []
    first_failure = ""
    samples: list[Sample] = []
    n = config.actor_rollout_ref.rollout.val_kwargs.n
    prompts = parts.val_prompts.repeat(n)
    seeds = sampling_seeds(config.trainer.seed, VALIDATION, len(prompts))
    for batch in prompts.with_columns(sampling_seed=seeds).split(config.data.val_batch_size * n):
        if not parts.is_rollout_awake:
            parts.sync_weights(version)
        generated, pending = parts.start_generation(batch, validate=True).result()
        batch = parts.add_model_scores(batch.with_columns(**generated.columns))
        result = parts.rewards.score(batch, parts.decode, pending)
        log_failures(result.failures, parts.folder, "validation")
        lengths += batch["responses"].lengths.tolist()
        columns = (batch["data_source"], batch["uid"], result.scores.tolist(), result.answers, result.parts)
        scored = [ScoredResponse(*row) for row in zip(*columns, strict=True)]
        rows += [row for number, row in enumerate(scored) if number not in result.unplayed]
        if parts.environments is not None:
            counts["val-aux/agent/unplayed"] += len(result.unplayed)
        if result.unplayed:
            first_failure = first_failure or str(result.failures[0])
        for name, value in result.metrics.items():
            if name in COUNTED or name.endswith(("/scored", "/failed")):
                counts[f"val-aux/{name}"] += value
        decoded = decode_samples(parts, batch, result.scores)
        samples += [
            replace(sample, score=None) if number in result.unplayed else sample
            for number, sample in enumerate(decoded)
        ]
    if not rows:
        raise RewardError(f"no episode of the validation has a score. The first failure is {first_failure}")
    scores: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        scores[row.data_source].append(row.score)
    all_scores = [score for values in scores.values() for score in values]
    metrics = {f"val-core/{source}/reward/mean": sum(values) / len(values) for source, values in scores.items()}
    metrics["val/reward/mean"] = sum(all_scores) / len(all_scores)
    metrics["val-aux/response_length/mean"] = sum(lengths) / len(lengths)
    return metrics | at_n_metrics(rows, n) | counts, samples


def at_n_metrics(rows: Sequence[ScoredResponse], n: int | None = None) -> dict[str, float]:
    """Compute metrics `<section>/<data_source>/<value>/mean@n`, `best@k/mean`, ... in `val-core` or `val-aux`.

    A value is `reward`, or a number that the reward function returned for all responses of the data source. The values
    of a response that could not be scored are 0. `maj@k` requires extracted answers. Prompts may have less than `n`
    responses, by default the number of the first one (`at_n`).
    """
    metrics: dict[str, float] = {}
    for source, groups in group_by_prompt(rows).items():
        source_rows = [row for group in groups for row in group]
        has_answers = any(row.answer is not None for row in source_rows)
        answers = [[row.answer for row in group] for group in groups] if has_answers else None
        values = {"reward": [[row.score for row in group] for group in groups]}
        for name in _common_values(source_rows):
            values[name] = [[row.parts.get(name, 0.0) for row in group] for group in groups]
        for name, groups_of_values in values.items():
            for suffix, value in at_n(groups_of_values, answers, n).items():
                metrics[f"{_section(name, suffix, n or len(groups[0]))}/{source}/{name}/{suffix}"] = value
    return metrics


def group_by_prompt(rows: Iterable[ScoredResponse]) -> dict[str, list[list[ScoredResponse]]]:
    prompts: dict[str, dict[str, list[ScoredResponse]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        prompts[row.data_source][row.uid].append(row)
    return {source: list(groups.values()) for source, groups in prompts.items()}


def _common_values(rows: Sequence[ScoredResponse]) -> list[str]:
    """Return the names of the values that all dict results contain."""
    results = [row.parts.keys() for row in rows if row.parts]
    return sorted(frozenset.intersection(*map(frozenset, results)) - {"reward"}) if results else []


def _section(name: str, suffix: str, n: int) -> str:
    kind, _, k = suffix.partition("/")[0].partition("@")
    return "val-core" if name in CORE and kind in ("mean", "best", "maj") and int(k) == n else "val-aux"


def decode_samples(parts: PPOParts, batch: DataProto, scores: Tensor) -> list[Sample]:
    """Decode the prompts and responses of a batch."""
    prompts = parts.decode([row.tolist() for row in batch["prompts"].rows()])
    responses = parts.decode([row.tolist() for row in batch["responses"].rows()])
    return [Sample(*row) for row in zip(prompts, responses, batch["ground_truth"], scores.tolist(), strict=True)]


def best_and_worst(parts: PPOParts, batch: DataProto) -> list[Sample]:
    """Decode the responses with the highest and the lowest score, or one response if all scores are equal."""
    scores = batch.ragged("token_level_scores").sum()
    rows = torch.tensor(list(dict.fromkeys([int(scores.argmax()), int(scores.argmin())])))
    return decode_samples(parts, batch.reorder(rows), scores[rows])


def save_samples(samples: list[Sample], path: Path) -> None:
    """Write samples as JSON lines. An existing file with other content is renamed, for example to `step_20.1.jsonl`."""
    lines = (json.dumps(asdict(sample), ensure_ascii=False, default=str) + "\n" for sample in samples)
    content = "".join(lines).encode(errors="backslashreplace")
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path) and not (path.is_file() and path.read_bytes() == content):
        rename_existing(path)
    with storage.new_file(path, durable=False) as work:
        work.write_bytes(content)
