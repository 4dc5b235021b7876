"""What a checkpoint covers is on the disk before the checkpoint counts, and a resumed run names what has been lost."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.command_line import camshaft, sft_args
from support.flushes import Flush, Rename, recorded_flushes
from support.ppo_runs import ppo_args

from camshaft import storage
from camshaft.tracking.jsonl import read_metrics

STEPS = 3
PRINTS = """
def compute_score(solution_str, **_):
    print(solution_str)
    if "0" in solution_str:
        raise ValueError("no zeros")
    return len(set(solution_str)) / 8
"""
"""A reward function whose output and failures are stored."""


def settings(home: Path, **more: Any) -> list[str]:
    """Return the arguments of a run that writes every kind of file, and saves each step."""
    (home / "reward.py").write_text(PRINTS)
    return ppo_args(
        home,
        {
            "custom_reward_function.path": home / "reward.py",
            "custom_reward_function.on_error": "zero",
            "trainer.logger": "[jsonl]",
            "trainer.log_val_generations": 4,
            "trainer.rollout_data_dir": home / "responses",
            "trainer.total_training_steps": STEPS,
            "trainer.total_epochs": 2,
            "trainer.save_freq": 1,
            "trainer.test_freq": 1,
            "trainer.resume_mode": "auto",
            **{key.replace("__", "."): value for key, value in more.items()},
        },
    )


def flushed_before(events: list[Flush | Rename], target: Path) -> dict[str, int]:
    """Return what was on the disk when `target` appeared: the flushed size of each path."""
    moment = events.index(Rename(str(target)))
    return {event.path: event.size for event in events[:moment] if isinstance(event, Flush)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Flush | Rename]]:
    """Return the home folder of a finished run, and its flushes."""
    home = tmp_path_factory.mktemp("home")
    with recorded_flushes() as events:
        run = camshaft("ppo", *settings(home))
    assert run.status == 0, run.err
    return home, events


def test_files_of_a_step_are_flushed_before_its_checkpoint_counts(trained: tuple[Path, list[Flush | Rename]]) -> None:
    home, events = trained
    run = home / "run"
    for step in range(1, STEPS + 1):
        flushed = flushed_before(events, run / f"global_step_{step}" / "trainer")
        rows = (run / "metrics.jsonl").read_bytes()[: flushed[str(run / "metrics.jsonl")]].splitlines()
        assert [json.loads(row)["step"] for row in rows] == list(range(1, step + 1))
        for earlier in range(1, step + 1):
            names = f"samples/step_{earlier}.parquet", f"validation/step_{earlier}.jsonl"
            for path in (*(run / name for name in names), home / "responses" / f"step_{earlier}.jsonl"):
                assert flushed[str(path)] == path.stat().st_size
        for name in (
            "run.json.unfinished/run.json",
            "config.yaml.unfinished/config.yaml",
            "log.txt",
            "rewards/output.log",
        ):
            assert flushed[str(run / name)], name
        assert flushed[str(run / "rewards" / "failed.jsonl")]
        for folder in (run, run / "samples", run / "validation", run / "rewards", home / "responses", home):
            assert str(folder) in flushed


def test_steps_without_a_checkpoint_do_not_wait_for_the_disk(tmp_path: Path) -> None:
    with recorded_flushes() as events:
        run = camshaft("ppo", *settings(tmp_path, trainer__save_freq=STEPS))
    assert run.status == 0, run.err
    flushes = [event.path for event in events if isinstance(event, Flush)]
    for name in ("metrics.jsonl", "log.txt", *(f"samples/step_{step}.parquet" for step in range(1, STEPS + 1))):
        assert flushes.count(str(tmp_path / "run" / name)) == 1, name


@pytest.mark.parametrize("engine", [{"strategy": "reference"}, {"strategy": "fsdp", "checkpoint.async_save": True}])
def test_metrics_of_a_supervised_run_are_flushed_before_its_checkpoint(engine: dict[str, Any], tmp_path: Path) -> None:
    changes = {"trainer.total_training_steps": 2, "trainer.save_freq": 1, **engine}
    with recorded_flushes() as events:
        assert camshaft("sft", *sft_args(tmp_path, changes)).status == 0
    metrics = tmp_path / "sft" / "metrics.jsonl"
    for step in (1, 2):
        size = flushed_before(events, tmp_path / "sft" / f"global_step_{step}" / "trainer")[str(metrics)]
        rows = metrics.read_bytes()[:size].splitlines()
        assert [json.loads(row)["step"] for row in rows] == list(range(1, step + 1))
        trainer, model = (
            storage.read_manifest(tmp_path / "sft" / f"global_step_{step}" / part) for part in ("trainer", "model")
        )
        assert trainer["facts"]["manifests"] == {"model": model["sha256"]}, "also if it is written in the background"


# -- lost files ---------------------------------------------------------------------------------------


@pytest.fixture
def home(trained: tuple[Path, list[Flush | Rename]], tmp_path: Path) -> Path:
    """Return a copy of the home folder, which a test may damage."""
    return Path(shutil.copytree(trained[0], tmp_path / "home"))


def resume(home: Path, caplog: pytest.LogCaptureFixture, **more: Any) -> list[str]:
    """Run one more step, and return the warnings about lost steps."""
    caplog.clear()
    run = camshaft("ppo", *settings(home, **{"trainer__total_training_steps": STEPS + 1} | more))
    assert run.status == 0, run.err
    return [re.sub(r"^.*/run/", "", text) for text in caplog.messages if "lacks the" in text]


def keep_rows(home: Path, *steps: int) -> None:
    """Keep only these rows of `metrics.jsonl`."""
    file = home / "run" / "metrics.jsonl"
    rows = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(row for row in rows if json.loads(row)["step"] in steps))


def test_a_resumed_run_names_the_steps_whose_metrics_are_lost(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep_rows(home, 2)
    message = "metrics.jsonl lacks the metrics of steps 1, 3, which it contained when step 3 was saved"
    assert resume(home, caplog) == [message]
    assert [line["step"] for line in read_metrics(home / "run" / "metrics.jsonl")] == [2, 4]
    assert resume(home, caplog, trainer__total_training_steps=STEPS + 2) == [], "the loss is reported once"


def test_a_resumed_run_names_the_steps_whose_responses_are_lost(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = home / "run" / "samples"
    (samples / "step_1.parquet").unlink()
    (samples / "step_2.parquet").write_bytes(b"")
    message = "samples lacks the responses of steps 1-2, which it contained when step 3 was saved"
    assert resume(home, caplog) == [message]
    assert resume(home, caplog, trainer__total_training_steps=STEPS + 2) == [], "the loss is reported once"


def test_a_file_without_any_row_is_named(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep_rows(home)
    shutil.rmtree(home / "run" / "samples")
    lost = "of steps 1-3, which it contained when step 3 was saved"
    assert sorted(resume(home, caplog)) == [
        f"metrics.jsonl lacks the metrics {lost}",
        f"samples lacks the responses {lost}",
    ]


def test_steps_that_logged_no_metrics_are_not_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step, logger in enumerate(("[]", "[jsonl]", "[]", "[jsonl]"), start=1):
        changes = {"trainer.total_training_steps": step, "trainer.save_freq": 1, "trainer.logger": logger}
        assert camshaft("sft", *sft_args(tmp_path, changes)).status == 0
    assert "lacks the" not in caplog.text
    assert [line["step"] for line in read_metrics(tmp_path / "sft" / "metrics.jsonl")] == [2, 4]


def test_a_run_from_another_folder_or_the_mirror_lacks_nothing(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = {"trainer__default_local_dir": home / "other" / "run"}
    path = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": home / "run" / "global_step_3"}
    assert resume(home, caplog, **elsewhere, **path) == []
    mirror = home / "mirror"
    for part in ("actor", "critic", "trainer"):
        storage.copy_folder(str(home / "run" / "global_step_3" / part), str(mirror / "global_step_3" / part))
    elsewhere = {"trainer__default_local_dir": home / "third" / "run", "trainer__default_hdfs_dir": mirror}
    assert resume(home, caplog, **elsewhere) == []
    assert (home / "third" / "run" / "global_step_4").is_dir()
