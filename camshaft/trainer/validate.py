"""Validation: scores on held-out prompts, and a few of the responses themselves.

    metrics, samples = validate(parts, config)
    save_samples(samples, folder / "step_20.jsonl")

Every validation of a run asks the same questions with the same sampling (greedy unless `val_kwargs` says
otherwise), so two of them differ by the weights alone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from camshaft.config import PPOConfig
from camshaft.dataproto import DataProto
from camshaft.rewards.manager import RewardResult
from camshaft.trainer.parts import PPOParts
from camshaft.trainer.seeds import VALIDATION, sampling_seeds


@dataclass(frozen=True)
class Sample:
    """One question, what the policy said, and what that was worth."""

    prompt: str
    response: str
    ground_truth: Any
    score: float


def validate(parts: PPOParts, config: PPOConfig) -> tuple[dict[str, float], list[Sample]]:
    """(metrics named `val-core/<data_source>/reward/mean` and so on, the first `log_val_generations` samples)."""
    scores: dict[str, list[float]] = defaultdict(list)
    counts: dict[str, float] = defaultdict(float)
    lengths: list[int] = []
    samples: list[Sample] = []
    prompts = parts.val_prompts.repeat(config.actor_rollout_ref.rollout.val_kwargs.n)
    seeds = sampling_seeds(config.trainer.seed, VALIDATION, len(prompts))
    for batch in prompts.with_columns(sampling_seed=seeds).split(config.data.val_batch_size):
        batch = _generate(parts, batch)
        result = parts.rewards.score(batch, parts.decode)
        lengths += batch["responses"].lengths.tolist()
        for source, score in zip(batch["data_source"], result.scores.tolist(), strict=True):
            scores[source].append(score)
        for name in ("errors", "invalid", "timeouts", "crashes"):
            counts[f"val-aux/reward/{name}"] += result.metrics[f"reward/{name}"]
        samples += _samples(parts, batch, result, config.trainer.log_val_generations - len(samples))
    every = [score for values in scores.values() for score in values]
    metrics = {f"val-core/{source}/reward/mean": sum(values) / len(values) for source, values in scores.items()}
    metrics |= {"val/reward/mean": sum(every) / len(every), "val-aux/response_length/mean": sum(lengths) / len(lengths)}
    return metrics | counts, samples


def _generate(parts: PPOParts, batch: DataProto) -> DataProto:
    """`batch` with responses; rows are added so that every rank gets as many, and taken away again."""
    padded, added = batch.select("prompts", "sampling_seed").pad_to_divisor(parts.actor_dp_size)
    generated = parts.actor.generate_sequences(padded, validate=True, recompute_log_prob=False).unpad(added)
    return batch.union(DataProto(generated.columns))


def _samples(parts: PPOParts, batch: DataProto, result: RewardResult, count: int) -> list[Sample]:
    """The first `count` rows as text."""
    if count < 1:
        return []
    batch, scores = batch.reorder(slice(0, count)), result.scores[:count].tolist()
    prompts = parts.decode([row.tolist() for row in batch["prompts"].rows()])
    responses = parts.decode([row.tolist() for row in batch["responses"].rows()])
    rows = zip(prompts, responses, batch["ground_truth"], scores, strict=True)
    return [Sample(*row) for row in rows]


def save_samples(samples: list[Sample], path: Path) -> None:
    """One JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as out:
        for sample in samples:
            out.write(json.dumps(asdict(sample), ensure_ascii=False, default=str) + "\n")
