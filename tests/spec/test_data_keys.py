"""Each key of `data` changes the data of a run: tokenizer, rows, order, columns, or batches."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.ppo_runs import ppo_config

from camshaft.data import tokens
from camshaft.data.tables import write_parquet
from camshaft.errors import BatchError
from camshaft.trainer.build import PPOParts
from camshaft.trainer.session import run_tokenizer

SHORTEST, ROWS = 3, 8
"""Tokens of the first prompt without the template, and rows; each prompt has one token more than the previous one."""
TEMPLATE = 5
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"


def rows(count: int) -> list[dict[str, Any]]:
    def message(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    return [
        {"prompt": message("1" * (SHORTEST + row)), "asked": message("2"), "data_source": "a", "kind": "b",
         "ground_truth": "1", "name": f"row {row}", "functions": [{"name": "f"}]}
        for row in range(count)
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_scoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the scoring processes, which none of these keys changes."""
    rewards = SimpleNamespace(close=lambda: None, columns=(), check_rows=lambda rows: None)
    monkeypatch.setattr("camshaft.trainer.build.build_run_rewards", lambda *_: rewards)


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    ppo_config(home)
    (home / "bare.jinja").write_text(
        "{{ mark }}{% for tool in tools or [] %}#{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    for name, count in {"train": ROWS, "val": 4, "more": ROWS + 1}.items():
        write_parquet(home / f"{name}.parquet", rows(count))
    return home


def lengths(parts: PPOParts) -> list[int]:
    return [length - TEMPLATE for length in parts.loader.data["prompts"].lengths.tolist()]


def order(parts: PPOParts) -> list[str]:
    return [uid for batch in parts.loader for uid in batch["uid"]]


LONGEST = SHORTEST + ROWS - 1
SHORT = {"data.max_prompt_length": LONGEST - 1 + TEMPLATE, "data.train_batch_size": 4}
ALL = list(range(SHORTEST, LONGEST + 1))
BARE = [length - TEMPLATE for length in ALL]
"""Lengths with a chat template that adds no tokens."""
OWN = {"data.chat_template": "{home}/bare.jinja"}
DAPO = {
    "algorithm.adv_estimator": "grpo", "algorithm.filter_groups.enable": True, "actor_rollout_ref.rollout.n": 2,
    "data.train_batch_size": 4,
}  # fmt: skip
Observe = Callable[[PPOParts], Any]

OBSERVED: dict[str, tuple[Any, Mapping[str, Any], Observe, Any, Any]] = {
    # key: value, other keys, observation, observed without the key, observed with it
    "data.tokenizer": (
        "{home}/critic", {}, lambda parts: Path(parts.tokenizer.name_or_path).name, "actor", "critic",
    ),
    "data.train_files": ("{home}/more.parquet", {}, lambda parts: len(parts.loader.data), ROWS, ROWS + 1),
    "data.val_files": ("{home}/more.parquet", {}, lambda parts: len(parts.val_prompts), 4, ROWS + 1),
    "data.prompt_key": ("asked", {}, lengths, ALL, [1] * ROWS),
    "data.chat_template": ("{home}/bare.jinja", {}, lengths, ALL, BARE),
    "data.chat_template_kwargs": ("{{mark: ab}}", OWN, lengths, BARE, [length + 2 for length in BARE]),
    "data.prompt_template": ("'{{prompt}}ab'", {"data.prompt_key": "name"}, lengths, [0] * ROWS, [5 + 2] * ROWS),
    "data.tools_key": ("functions", OWN, lengths, BARE, [length + 1 for length in BARE]),
    "data.prompt_id_key": (
        "name", {}, lambda parts: [extra.get("prompt_id") for extra in parts.loader.data["extra_info"]],
        [None] * ROWS, [f"row {row}" for row in range(ROWS)],
    ),
    "data.max_prompt_id_length": (1, {"data.prompt_id_key": "name"}, lambda parts: "prompt_id" in parts.loader.data,
                                  True, "error"),
    "data.max_prompt_length": (
        LONGEST - 1 + TEMPLATE, {"data.truncation": "left"}, lengths, ALL, [*ALL[:-1], LONGEST - 1],
    ),
    "data.truncation": ("right", SHORT, lengths, "error", [*ALL[:-1], LONGEST - 1]),
    "data.filter_overlong_prompts": (True, SHORT, lengths, "error", ALL[:-1]),
    "data.train_batch_size": (4, {MINI: 2}, lambda parts: len(next(iter(parts.loader))), 8, 4),
    "data.gen_batch_size": (5, DAPO, lambda parts: len(next(iter(parts.loader))), 4, 5),
    "data.return_raw_chat": (True, {}, lambda parts: "raw_prompt" in parts.loader.data, False, True),
    "data.return_raw_input_ids": (True, {}, lambda parts: "raw_input_ids" in parts.loader.data, False, True),
    "data.reward_fn_key": ("kind", {}, lambda parts: set(parts.loader.data["data_source"]), {"a"}, {"b"}),
    "data.train_max_samples": (8, {"data.train_files": "{home}/more.parquet"},
                               lambda parts: len(parts.loader.data), ROWS + 1, 8),
    "data.val_max_samples": (3, {}, lambda parts: len(parts.val_prompts), 4, 3),
    "trainer.total_epochs": (2, {}, lambda parts: parts.total_steps, 30, 2),
    "trainer.total_training_steps": (7, {}, lambda parts: parts.total_steps, 30, 7),
}  # fmt: skip
ORDERS: dict[str, Any] = {"data.shuffle": False, "data.seed": 5}


def observed(home: Path, observe: Observe, overrides: Mapping[str, Any]) -> Any:
    files = {"data.train_files": home / "train.parquet", "data.val_files": home / "val.parquet"}
    values = {**files, **overrides}
    config = ppo_config(home, {key: str(value).format(home=home) for key, value in values.items()})
    try:
        with PPOParts(config) as parts:
            return observe(parts)
    except BatchError as error:
        return "error" if "data.max_prompt_" in str(error) else str(error)


@pytest.mark.parametrize("key", OBSERVED)
def test_key_changes_the_data(home: Path, key: str) -> None:
    value, others, observe, before, after = OBSERVED[key]
    assert observed(home, observe, others) == before
    assert observed(home, observe, {**others, key: value}) == after


@pytest.mark.parametrize("key", ORDERS)
def test_key_changes_the_order_of_rows(home: Path, key: str) -> None:
    once = {"trainer.total_epochs": 1}
    usual, changed = observed(home, order, once), observed(home, order, {**once, key: ORDERS[key]})
    assert usual == observed(home, order, once)
    assert usual != changed
    assert sorted(usual) == sorted(changed)
    assert (changed == sorted(changed)) == (key == "data.shuffle")


def test_tokenizer_code_runs_only_if_trusted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[bool] = []
    real = run_tokenizer
    monkeypatch.setattr(
        "camshaft.trainer.build.run_tokenizer",
        lambda path, trust, *rest: (flags.append(trust), real(path, trust, *rest))[1],
    )
    for overrides in ({}, {"data.trust_remote_code": True}, {"actor_rollout_ref.model.trust_remote_code": True}):
        observed(home, len_of_loader, overrides)
    assert flags == [False, True, True]


def len_of_loader(parts: PPOParts) -> int:
    return len(parts.loader)


def test_key_is_the_number_of_tokenizing_processes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large data sets are tokenized by one process per CPU unless the key is set."""
    pools: list[int] = []
    real = tokens.ProcessPoolExecutor

    def pool(workers: int, *others: Any) -> Any:
        pools.append(workers)
        return real(workers, *others)

    monkeypatch.setattr(tokens, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(tokens, "_usable_cpus", lambda: 2)
    monkeypatch.setattr(tokens, "_cache_path", lambda work: None)
    monkeypatch.setattr(tokens, "_MIN_PARALLEL_ROWS", ROWS)
    monkeypatch.setattr(tokens, "_CHUNK", 1)
    for value in ({}, {"data.filter_overlong_prompts_workers": 3}):
        assert observed(home, lengths, value) == ALL
    assert pools == [2, 3]
