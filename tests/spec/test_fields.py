"""Each key of `fields.py` sets its field, and its default does not."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from camshaft.config import (
    PPOConfig,
    actor_engine,
    critic_engine,
    ref_engine,
    reward_engine,
    rollout_engine,
    sampling,
)
from camshaft.config.load import from_container
from spec.fields import FIELDS, MODEL, Field

STEPS = 100
PARTS: dict[str, Callable[[PPOConfig], Any]] = {
    "actor": lambda config: actor_engine(config, config.topology(), STEPS),
    "ref": lambda config: ref_engine(config, config.topology()),
    "critic": lambda config: critic_engine(config, config.topology(), STEPS),
    "reward": lambda config: reward_engine(config, config.topology()),
    "rollout": rollout_engine,
    "sampling": sampling,
    "validation": lambda config: sampling(config, validate=True),
}


def run_with(folder: Path, changed: Mapping[str, Any]) -> PPOConfig:
    """Build the config of a run with all roles, on four ranks."""
    for name in ("model", "critic", "rm", "other", "adapter"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text("{}")
    for name in ("train", "val"):
        (folder / f"{name}.parquet").touch()
    base = {
        "data.train_files": f"{folder}/train.parquet",
        "data.val_files": f"{folder}/val.parquet",
        f"{MODEL}.path": f"{folder}/model",
        "critic.model.path": f"{folder}/critic",
        "reward_model.model.path": f"{folder}/rm",
        "reward_model.enable": True,
        "algorithm.use_kl_in_reward": True,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.dtype": "bfloat16",
        "trainer.n_gpus_per_node": 4,
        "trainer.device": "cpu",
    }
    return from_container(base | dict(changed), PPOConfig)


def field_of(part: Any, path: str) -> Any:
    """Return the value at a dotted path through configs and dicts; None if a part of the path is None."""
    for name in path.split("."):
        part = part.get(name) if isinstance(part, Mapping) else None if part is None else getattr(part, name)
    return part


def filled(value: Any, folder: Path) -> Any:
    return value.format(folder=folder) if isinstance(value, str) else value


@pytest.fixture(scope="module")
def usual(home: Path) -> Callable[[Mapping[str, Any]], PPOConfig]:
    """Return configs without the key, each built once."""
    configs: dict[str, PPOConfig] = {}

    def build(others: Mapping[str, Any]) -> PPOConfig:
        if repr(others) not in configs:
            configs[repr(others)] = run_with(home, others)
        return configs[repr(others)]

    return build


@pytest.mark.parametrize(("key", "field"), FIELDS.items(), ids=FIELDS)
def test_key_reaches_its_field(
    key: str, field: Field, home: Path, usual: Callable[[Mapping[str, Any]], PPOConfig]
) -> None:
    typed, expected = filled(field.typed, home), filled(field.expected, home)
    as_written = list(typed) if isinstance(typed, tuple) else typed
    with_key = PARTS[field.part](run_with(home, {**field.others, key: as_written}))
    assert field_of(with_key, field.field) == expected
    assert field_of(PARTS[field.part](usual(field.others)), field.field) != expected
