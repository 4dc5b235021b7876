"""Generate parquet files from `reasoning-gym` tasks: procedural questions with rule-based scores.

    paths = write_reasoning_gym("data/gcd", "gcd", num_train=2000, num_heldout=200, settings={"max_value": 20})
    paths.train          # columns data_source ("reasoning_gym/gcd"), prompt, reward_model, extra_info

`extra_info` of a row contains the settings of the task and the reasoning-gym entry as JSON. The reward function
`reasoning_gym`, which is selected by `data_source`, reads both. Each question occurs only once in the two files. The
same arguments produce the same files.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from camshaft.data.tables import write_parquet
from camshaft.errors import ConfigError
from camshaft.plugins import install_command

MAX_DRAWS = 20
"""Maximum number of draws per requested question. Draws that repeat a question are discarded."""


@dataclass(frozen=True)
class TaskPaths:
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

    `settings` overrides default settings of the task. `system` is a system message that precedes each question.
    """
    if min(num_train, num_heldout) < 1:
        raise ConfigError(f"num_train={num_train} and num_heldout={num_heldout} must be at least 1")
    count = num_train + num_heldout
    dataset = _create_dataset(task, {**(settings or {}), "seed": seed, "size": MAX_DRAWS * count})
    entries = list(islice(_unique_entries(dataset), count))
    if len(entries) < count:
        raise ConfigError(
            f"{task} produced {len(entries)} unique questions in {MAX_DRAWS * count} draws; "
            f"num_train={num_train} + num_heldout={num_heldout} need {count}. Request fewer, or widen its settings: "
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
            f"reasoning-gym tasks require '{error.name}'; run {install_command('reasoning_gym')}"
        ) from error
    if task not in DATASETS:
        raise ConfigError(f"reasoning-gym has no task '{task}'; use one of {', '.join(sorted(DATASETS))}")
    try:
        return create_dataset(task, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        fields = ", ".join(f"{name}={field.default}" for name, field in DATASETS[task][1].__dataclass_fields__.items())
        raise ConfigError(f"invalid settings for {task}: {error}. Its settings and defaults are {fields}") from error


def _unique_entries(dataset: Any) -> Iterator[dict[str, Any]]:
    """Yield the entries without those whose question occurred before."""
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
    system_messages = [{"role": "system", "content": system}] if system else []
    return {
        "data_source": f"reasoning_gym/{task}",
        "prompt": [*system_messages, {"role": "user", "content": entry["question"]}],
        "ability": "reasoning",
        # Some tasks have a scoring rule but no reference answer.
        "reward_model": {"style": "rule", "ground_truth": "" if answer is None else str(answer)},
        "extra_info": {"split": split, "index": index, "config": config, "entry": serialized},
    }


def _serialize(dataset: Any, task: str, entry: dict[str, Any]) -> str:
    """Serialize an entry to JSON. Raise ConfigError if the score of its answer is different after deserialization."""
    answer = "" if entry["answer"] is None else str(entry["answer"])
    try:
        text = json.dumps(entry)
        is_equal = dataset.score_answer(answer, json.loads(text)) == dataset.score_answer(answer, entry)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"an entry of {task} cannot be serialized as JSON: {error}; choose another task") from error
    if not is_equal:
        raise ConfigError(
            f"the score of an answer of {task} changes when its entry is serialized as JSON; choose another task"
        )
    return text
