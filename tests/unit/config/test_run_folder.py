"""A run without a name has a folder of its own, and a name stays inside the run folder."""

import re
from pathlib import Path

import pytest

from camshaft.config import PPOConfig, compose, from_container, load_ppo, load_rm, load_sft, resume_arguments, run_name
from camshaft.config.run_folder import generated_name
from camshaft.errors import ConfigError

STAMP = r"\d{8}-\d{6}-[0-9a-f]{8}"


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_unnamed_run_is_named_after_model_data_and_time(words: list[str], sft_words: list[str], tmp_path: Path) -> None:
    data = re.sub(r"[^\w.-]+", "_", tmp_path.name)
    for config in (load_ppo(words), load_sft(sft_words), load_rm(sft_words)):
        trainer = config.trainer
        assert re.fullmatch(rf"checkpoints/camshaft_examples/model-{data}-{STAMP}", trainer.default_local_dir)
        assert run_name(trainer) == Path(trainer.default_local_dir).name
        assert resume_arguments(trainer) == f"trainer.default_local_dir={trainer.default_local_dir}"


def test_every_unnamed_run_has_another_folder(words: list[str]) -> None:
    folders = [load_ppo(words).trainer.default_local_dir for _ in range(3)]
    assert len(set(folders)) == 3


def test_unnamed_jobs_of_a_sweep_have_separate_folders(words: list[str]) -> None:
    first, second = compose(["-m", *words, "trainer.seed=1,2"], PPOConfig)
    assert first.trainer.default_local_dir != second.trainer.default_local_dir


def test_runs_that_start_at_the_same_time_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda _: "now")
    names = {generated_name("models/tiny/", "data/sums/train.parquet") for _ in range(3)}
    assert len(names) == 3
    assert all(re.fullmatch(r"tiny-sums-now-[0-9a-f]{8}", name) for name in names)


@pytest.mark.parametrize(
    ("model", "data", "name"),
    [
        ("Qwen/Qwen2.5-0.5B", "gsm8k.parquet", "Qwen2.5-0.5B-gsm8k"),
        ("hdfs://host/models/my model", "s3://bucket/hh/train.parquet", "my_model-hh"),
        ("/", "train.parquet", "run-train"),
    ],
)
def test_name_consists_of_the_last_parts_of_the_paths(model: str, data: str, name: str) -> None:
    assert re.fullmatch(rf"{re.escape(name)}-{STAMP}", generated_name(model, data))


def test_named_run_keeps_its_folder(words: list[str]) -> None:
    for _ in range(2):
        trainer = load_ppo([*words, "trainer.project_name=p", "trainer.experiment_name=x"]).trainer
        assert (trainer.default_local_dir, run_name(trainer)) == ("checkpoints/p/x", "x")
        assert resume_arguments(trainer) == ""


def test_run_resumes_in_its_folder(words: list[str]) -> None:
    first = load_ppo([*words, "trainer.default_hdfs_dir=copies/${trainer.experiment_name}"])
    again = load_ppo(
        [*words, "trainer.default_hdfs_dir=copies/${trainer.experiment_name}", resume_arguments(first.trainer)]
    )
    assert again == first
    assert first.trainer.default_hdfs_dir == f"copies/{run_name(first.trainer)}"
    assert first.trainer.validation_data_dir == f"{first.trainer.default_local_dir}/validation"


def test_recorded_config_has_the_folder_of_its_run(words: list[str]) -> None:
    config = load_ppo(words)
    assert from_container(config.model_dump(mode="json"), PPOConfig).model_dump() == config.model_dump()


@pytest.mark.parametrize("key", ["experiment_name", "project_name"])
@pytest.mark.parametrize("name", ["''", "../../x", "a/../../x", "/tmp/x", "a//b", ".", "a/"])
def test_name_outside_the_run_folder_is_rejected(words: list[str], sft_words: list[str], key: str, name: str) -> None:
    for load, arguments in ((load_ppo, words), (load_sft, sft_words)):
        with pytest.raises(ConfigError, match=rf"trainer\.{key} = (?s:.*)must be a name"):
            load([*arguments, f"trainer.{key}={name}"])


def test_name_may_have_several_parts(words: list[str]) -> None:
    assert load_ppo([*words, "trainer.experiment_name=a/b..c"]).trainer.experiment_name == "a/b..c"
