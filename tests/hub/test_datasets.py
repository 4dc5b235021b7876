"""Data sets by name, read with the `datasets` library from a local server."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from support.command_line import finished, start
from support.hub_server import HubServer
from support.ppo_runs import ppo_args

pytestmark = pytest.mark.hub

READ = """
import sys
from camshaft.data import data_files
from camshaft.data.tables import read_rows
from camshaft.errors import CamshaftError
for path in sys.argv[1:]:
    try:
        table = read_rows(data_files(path), [], None)
        print(len(table), *table.rows[0].items())
    except CamshaftError as error:
        print(type(error).__name__, error)
"""


def write_dataset(folder: Path, configs: dict[str, dict[str, int]]) -> Path:
    """Write a data set with the given numbers of rows for each configuration and split."""
    card = ["---", "configs:"]
    for config, splits in configs.items():
        card += [f"- config_name: {config}", "  data_files:"]
        for split, count in splits.items():
            file = folder / config / f"{split}-00000-of-00001.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            rows = [{"question": f"{config} {split} {i}+1=", "answer": f"#### {i + 1}"} for i in range(count)]
            parquet.write_table(pyarrow.Table.from_pylist(rows), file)
            card += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]), encoding="utf-8")
    return folder


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("CAMSHAFT_CACHE", str(tmp_path / "cache"))
    return monkeypatch


def read(*paths: str) -> list[str]:
    run = subprocess.run([sys.executable, "-c", READ, *paths], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


GSM8K = {"main": {"train": 5, "test": 3}, "socratic": {"train": 4, "test": 2}}


def test_names_select_configuration_and_split(environment: Any, tmp_path: Path) -> None:
    sets = {"openai/gsm8k": write_dataset(tmp_path / "set", GSM8K)}
    names = {
        "openai/gsm8k": "main train",
        "openai/gsm8k:test": "main test",
        "openai/gsm8k/socratic:test": "socratic test",
        "hf://datasets/openai/gsm8k/socratic": "socratic train",
        "hf://openai/gsm8k": "main train",
    }
    with HubServer({}, sets) as server:
        environment.setenv("HF_ENDPOINT", server.url)
        lines = read(*names)
        for line, part in zip(lines, names.values(), strict=True):
            config, split = part.split()
            assert line == (
                f"{GSM8K[config][split]} ('question', '{config} {split} 0+1=') ('answer', '#### 1') "
                "('data_source', 'openai/gsm8k')"
            )
        assert read("openai/gsm8k:validation", "openai/gsm") == [
            "StorageError the data set openai/gsm8k:validation has the splits train, test; set one of them, for "
            "example openai/gsm8k:train",
            "StorageError the hub has no data set 'openai/gsm', or it is private; check the name, or log in with hf "
            "auth login",
        ]
    assert read(*names) == lines  # the server is gone


def test_several_configurations_must_be_named(environment: Any, tmp_path: Path) -> None:
    configs = {"de": {"train": 1}, "fr": {"train": 1}}
    with HubServer({}, {"team/sums": write_dataset(tmp_path / "set", configs)}) as server:
        environment.setenv("HF_ENDPOINT", server.url)
        [error] = read("team/sums:train")
    assert error == (
        "StorageError the data set team/sums:train has the configurations de, fr; set one of them, for example "
        "team/sums/de:train"
    )


def test_a_gated_data_set_is_one_sentence(environment: Any, tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "set", {"default": {"train": 2}})
    with HubServer({}, {"team/sums": folder}, gated=("team/sums",)) as server:
        environment.setenv("HF_ENDPOINT", server.url)
        [error] = read("team/sums")
    assert error == (
        f"StorageError team/sums is gated; accept its terms on {server.url}/datasets/team/sums, and log in with hf "
        "auth login or HF_TOKEN"
    )


def test_a_model_and_a_data_set_train_by_name(environment: Any, tmp_path: Path, home: Path) -> None:
    ppo_args(home)
    models = {"team/actor": home / "actor", "team/critic": home / "critic"}
    sets = {"openai/gsm8k": write_dataset(tmp_path / "set", {"main": {"train": 16, "test": 8}})}
    keys = {
        "actor_rollout_ref.model.path": "team/actor", "critic.model.path": "team/critic",
        "data.train_files": "openai/gsm8k", "data.val_files": "openai/gsm8k:test", "data.max_prompt_length": 64,
        "trainer.total_training_steps": 1, "custom_reward_function.path": "null", "custom_reward_function.name": "auto",
        "trainer.test_freq": 1,
    }  # fmt: skip
    with HubServer(models, sets, cut={"model.safetensors": 1}) as server:
        environment.setenv("HF_ENDPOINT", server.url)
        for name in ("first", "again"):
            out = tmp_path / name
            run = finished(start("-m", "camshaft", "ppo", *ppo_args(home, {**keys, "trainer.default_local_dir": out})))
            assert run.status == 0, run.err
            assert (run.out + run.err).count("downloading the data set openai/gsm8k") == (2 if name == "first" else 0)
            server.shutdown()
