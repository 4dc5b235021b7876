"""A run without a name has a folder of its own, and a name stays inside the run folder."""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from camshaft.config import PPOConfig, compose, from_container, load_ppo, load_rm, load_sft, resume_arguments, run_name
from camshaft.config.run_folder import generated_name, number_run, numbered_folder
from camshaft.errors import ConfigError

FOLDER = "checkpoints/camshaft_examples"


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_unnamed_run_is_named_after_its_model_and_a_number(words: list[str], sft_words: list[str]) -> None:
    for number, config in enumerate((load_ppo(words), load_sft(sft_words), load_rm(sft_words)), start=1):
        assert config.trainer.default_local_dir == f"{FOLDER}/model-<number>"
        assert not Path(FOLDER, f"model-{number}").exists()
        trainer = number_run(config).trainer
        assert trainer.default_local_dir == f"{FOLDER}/model-{number}"
        assert Path(trainer.default_local_dir).is_dir()
        assert run_name(trainer) == f"model-{number}"
        assert resume_arguments(trainer) == f"trainer.default_local_dir={trainer.default_local_dir}"


def test_a_number_is_given_once(words: list[str]) -> None:
    config = number_run(load_ppo(words))
    assert number_run(config) is config
    assert os.listdir(FOLDER) == ["model-1"]


def test_numbers_continue_after_those_of_other_runs(words: list[str]) -> None:
    for name in ("other-lr=0.003-7", "named", "model-20261128-013754-062b5136", "model-2"):
        Path(FOLDER, name).mkdir(parents=True)
    assert number_run(load_ppo(words)).trainer.default_local_dir == f"{FOLDER}/model-8"
    assert numbered_folder(Path(FOLDER, "x-<number>", "inputs")) == Path(FOLDER, "x-9", "inputs")


def test_runs_that_start_at_the_same_time_have_different_numbers(words: list[str]) -> None:
    config = load_ppo(words)
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: number_run(config).trainer.default_local_dir, range(24)))
    assert {int(folder.rpartition("-")[2]) for folder in folders} == set(range(1, 25))


def test_runs_of_a_sweep_are_named_after_the_swept_keys(words: list[str]) -> None:
    sweep = compose(["-m", *words, "lr=1e-4,0.003", "trainer.seed=1,2"], PPOConfig)
    names = [run_name(number_run(config).trainer) for config in sweep]
    assert names == [
        f"model-lr={lr}-seed={seed}-{number}"
        for number, (lr, seed) in enumerate(product(("0.0001", "0.003"), (1, 2)), start=1)
    ]
    (first, _) = compose(
        ["-m", *words, "data.prompt_key=a b/c,x", "trainer.default_hdfs_dir=h/${trainer.experiment_name}"], PPOConfig
    )
    assert first.trainer.default_hdfs_dir == "h/model-prompt_key=a_b_c-<number>"


@pytest.mark.parametrize(
    ("model", "name"),
    [("Qwen/Qwen2.5-0.5B", "Qwen2.5-0.5B"), ("hdfs://host/models/my model", "my_model"), ("/", "run")],
)
def test_name_consists_of_the_last_part_of_the_path(model: str, name: str) -> None:
    assert generated_name(model) == f"{name}-<number>"


def test_named_run_keeps_its_folder(words: list[str]) -> None:
    for _ in range(2):
        trainer = load_ppo([*words, "trainer.project_name=p", "trainer.experiment_name=x"]).trainer
        assert (trainer.default_local_dir, run_name(trainer)) == ("checkpoints/p/x", "x")
        assert resume_arguments(trainer) == ""


def test_run_resumes_in_its_folder(words: list[str]) -> None:
    first = number_run(load_ppo([*words, "trainer.default_hdfs_dir=copies/${trainer.experiment_name}"]))
    again = load_ppo(
        [*words, "trainer.default_hdfs_dir=copies/${trainer.experiment_name}", resume_arguments(first.trainer)]
    )
    assert again == first
    assert first.trainer.default_hdfs_dir == f"copies/{run_name(first.trainer)}"
    assert first.trainer.validation_data_dir == f"{first.trainer.default_local_dir}/validation"


def test_recorded_config_has_the_folder_of_its_run(words: list[str]) -> None:
    config = number_run(load_ppo(words))
    assert from_container(config.model_dump(mode="json"), PPOConfig).model_dump() == config.model_dump()


@pytest.mark.parametrize("key", ["experiment_name", "project_name"])
@pytest.mark.parametrize("name", ["''", "../../x", "a/../../x", "/tmp/x", "a//b", ".", "a/"])
def test_name_outside_the_run_folder_is_rejected(words: list[str], sft_words: list[str], key: str, name: str) -> None:
    for load, arguments in ((load_ppo, words), (load_sft, sft_words)):
        with pytest.raises(ConfigError, match=rf"trainer\.{key} = (?s:.*)must be a name"):
            load([*arguments, f"trainer.{key}={name}"])


def test_name_may_have_several_parts(words: list[str]) -> None:
    assert load_ppo([*words, "trainer.experiment_name=a/b..c"]).trainer.experiment_name == "a/b..c"
