"""Generate parquet files from tasks of the `reasoning-gym` package: procedural questions with rule-based scores.

    paths = write_reasoning_gym("data/gcd", "gcd", num_train=2000, num_heldout=200, settings={"max_value": 20})
    paths.train          # data_source "reasoning_gym/gcd", prompt, reward_model.ground_truth, extra_info

`extra_info` of a row contains the task's settings and the entry as JSON. The reward function `reasoning_gym`, selected
by `data_source`, reads them. Questions are unique over both files. The same arguments produce the same files.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from camshaft.data.parquet import write_parquet
from camshaft.errors import ConfigError

PATIENCE = 20
"""Maximum draws per requested question."""


@dataclass(frozen=True)
class TaskPaths:
    """The files of one task."""

    train: Path
    test: Path


def write_reasoning_gym(
    folder: str | Path,
    task: str,
    *,
    num_train: int,
    num_heldout: int,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    system: str | None = None,
) -> TaskPaths:
    """Write `train.parquet` and `test.parquet`.

    `settings` are the settings of the task; `system` is a system message before each question.
    """
    if min(num_train, num_heldout) < 1:
        raise ConfigError(f"num_train={num_train} and num_heldout={num_heldout} must be at least 1")
    count = num_train + num_heldout
    dataset = _create_dataset(task, {**(settings or {}), "seed": seed, "size": PATIENCE * count})
    entries = []
    for entry in _new(dataset):
        entries.append(entry)
        if len(entries) == count:
            break
    else:
        raise ConfigError(
            f"{task} produced {len(entries)} unique questions in {PATIENCE * count} draws; "
            f"num_train={num_train} + num_heldout={num_heldout} need more. Request fewer, or widen its settings: "
            f"{asdict(dataset.config)}"
        )
    config = json.dumps(asdict(dataset.config))
    splits = {"test": entries[:num_heldout], "train": entries[num_heldout:]}
    paths = {}
    for split, split_entries in splits.items():
        rows = [_row(dataset, task, config, entry, split, index, system) for index, entry in enumerate(split_entries)]
        paths[split] = write_parquet(Path(folder).expanduser() / f"{split}.parquet", rows)
    return TaskPaths(**paths)


def _create_dataset(task: str, settings: dict[str, Any]) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"reasoning-gym tasks require '{error.name}'; run pip install 'camshaft[reasoning-gym]'"
        ) from error
    if task not in DATASETS:
        raise ConfigError(f"reasoning-gym has no task '{task}'; known: {', '.join(sorted(DATASETS))}")
    try:
        return create_dataset(task, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        fields = ", ".join(f"{name}={field.default}" for name, field in DATASETS[task][1].__dataclass_fields__.items())
        raise ConfigError(f"invalid settings for {task}: {error}. Its settings: {fields}") from error


def _new(dataset: Any) -> Iterator[dict[str, Any]]:
    """Yield the entries with a question that did not occur before."""
    questions = set()
    for index in range(len(dataset)):
        entry = dataset[index]
        if entry["question"] not in questions:
            questions.add(entry["question"])
            yield entry


def _row(
    dataset: Any, task: str, config: str, entry: dict[str, Any], split: str, index: int, system: str | None
) -> dict[str, Any]:
    answer, serialized = entry["answer"], _serialize(dataset, task, entry)
    before = [{"role": "system", "content": system}] if system else []
    return {
        "data_source": f"reasoning_gym/{task}",
        "prompt": [*before, {"role": "user", "content": entry["question"]}],
        "ability": "reasoning",
        # Some tasks have a scoring rule but no reference answer.
        "reward_model": {"style": "rule", "ground_truth": "" if answer is None else str(answer)},
        "extra_info": {"split": split, "index": index, "config": config, "entry": serialized},
    }


def _serialize(dataset: Any, task: str, entry: dict[str, Any]) -> str:
    """Serialize an entry to JSON; raise ConfigError if the deserialized entry scores its answer differently."""
    answer = "" if entry["answer"] is None else str(entry["answer"])
    try:
        text = json.dumps(entry)
        same = dataset.score_answer(answer, json.loads(text)) == dataset.score_answer(answer, entry)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"an entry of {task} cannot be serialized: {error}; choose another task") from error
    if not same:
        raise ConfigError(f"an entry of {task} is scored differently after serialization; choose another task")
    return text
