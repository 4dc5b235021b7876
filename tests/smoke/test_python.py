"""Runs that a Python program starts: `camshaft.train`, `sft`, `reward_model` and `load_run`."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.python_runs import PROMPTS, SMALL, SMALL_SUPERVISED
from transformers import AutoModelForCausalLM, AutoTokenizer

import camshaft
from camshaft.dataproto import DataProto
from camshaft.errors import CheckpointError, ConfigError, RewardError
from camshaft.models.tiny import make_tiny_model


def make_rewards(wanted: str) -> list[Any]:
    """Return functions that only this process has, and that capture a value."""

    def digits(response: str) -> float:
        return sum(map(wanted.__contains__, response)) / max(len(response), 1)

    async def short(response: str, answer: int) -> dict[str, float]:
        return {"score": float(len(response) < 4), "answer": answer}

    return [(digits, 2.0), (short, 0.5)]


def count_distinct(step: int, batch: DataProto, metrics: dict[str, float]) -> dict[str, float]:
    return {"distinct": len({tuple(row.tolist()) for row in batch.ragged("responses").rows()}), "seen": step}


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    make_tiny_model(home / "tiny", hidden=32)
    return home


@pytest.fixture(scope="module")
def start(home: Path) -> Callable[..., camshaft.Run]:
    """Start a run of two steps, with models, tokenizers, rows and rewards that are objects."""
    model = AutoModelForCausalLM.from_pretrained(home / "tiny")

    def run(out: Path, **arguments: Any) -> camshaft.Run:
        given = {
            "model": model,
            "tokenizer": AutoTokenizer.from_pretrained(home / "tiny"),
            "data": PROMPTS,
            "reward": make_rewards("0123456789"),
            "algorithm": "grpo",
            "steps": 2,
            "out": out,
            "trainer.save_freq": 2,
        }
        return camshaft.train(**{**given, **SMALL, **arguments})

    return run


@pytest.fixture(scope="module")
def trained(home: Path, start: Callable[..., camshaft.Run]) -> camshaft.Run:
    validation = {"val_data": tuple(PROMPTS[:4]), "trainer.val_before_train": False, "trainer.test_freq": 2}
    return start(home / "run", on_step=count_distinct, config={"trainer": {"seed": 5}}, **validation)


def test_history_has_a_column_per_metric_and_hook(trained: camshaft.Run) -> None:
    history = trained.history
    assert history["step"] == [1, 2]
    assert history["seen"] == [1, 2]
    assert all(2 <= count <= 32 for count in history["distinct"])
    assert trained.status == "finished"
    assert trained.config["trainer.seed"] == 5
    assert trained.metrics() == trained.metrics(2)
    assert trained.metrics(1)["distinct"] == history["distinct"][0]
    with pytest.raises(ConfigError, match="step 3 is not available; the nearest steps are 1, 2"):
        trained.metrics(3)


def test_weighted_rewards_are_added_and_logged_separately(trained: camshaft.Run) -> None:
    for step in (1, 2):
        metrics, rows = trained.metrics(step), trained.responses(step)
        assert len(rows) == 32
        digits = [sum(map(str.isdigit, row["response"])) / max(len(row["response"]), 1) for row in rows]
        short = [float(len(row["response"]) < 4) for row in rows]
        assert [row["score"] for row in rows] == pytest.approx(
            [2 * first + second / 2 for first, second in zip(digits, short, strict=True)]
        )
        assert metrics["reward/digits/mean"] == pytest.approx(sum(digits) / 32)
        assert metrics["reward/short/mean"] == pytest.approx(sum(short) / 32)
        assert metrics["reward/short/answer/mean"] == pytest.approx(sum(int(row["ground_truth"]) for row in rows) / 32)


def test_responses_are_those_of_the_step(trained: camshaft.Run) -> None:
    rows = trained.responses()
    scores = [row["score"] for row in rows]
    assert trained.metrics(2)["critic/score/mean"] == pytest.approx(sum(scores) / len(scores))
    for group in range(8):  # the advantages of a group are centered
        assert sum(row["advantage"] for row in rows[4 * group : 4 * group + 4]) == pytest.approx(0, abs=1e-4)
    assert len({row["prompt"] for row in rows}) == 8
    validation = trained.responses(2, validation=True)
    assert [row["prompt"] for row in validation] == [row["prompt"] for row in PROMPTS[:4]]


def test_an_export_is_the_trained_model(trained: camshaft.Run, tmp_path: Path) -> None:
    folder = trained.export(tmp_path / "export")
    before = AutoModelForCausalLM.from_pretrained(trained.config["actor_rollout_ref.model.path"]).state_dict()
    after = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(ConfigError, match="step 9 is not available"):
        trained.export(tmp_path / "other", step=9)


def test_a_plot_is_a_picture(trained: camshaft.Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = trained.plot(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    points = {axis.get_title(): [np.asarray(line.get_xydata()).tolist() for line in axis.lines] for axis in figure.axes}
    assert points["Training reward"][0] == [[step, trained.metrics(step)["critic/score/mean"]] for step in (1, 2)]
    assert {len(line) for line in points["Validation reward"]} == {1}
    assert figure._repr_png_()[:4] == b"\x89PNG"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConfigError, match="no run has logged nothing"):
        trained.plot(metrics=["nothing"])


def test_the_same_objects_resume_and_others_do_not(
    trained: camshaft.Run, start: Callable[..., camshaft.Run], home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = sorted(path.name for path in (home / "run" / "inputs").iterdir())
    fresh = start(home / "run", config={"trainer": {"seed": 5}}, val_data=PROMPTS[:4], **{"trainer.test_freq": -1})
    assert fresh.history["step"] == [1, 2]  # finished already
    assert sorted(path.name for path in (home / "run" / "inputs").iterdir()) == inputs
    with pytest.raises(CheckpointError, match="the reward functions differ from those"):
        start(home / "run", config={"trainer": {"seed": 5}}, reward=make_rewards("01"))
    with pytest.raises(ConfigError, match=r"'digits_short', which is not stored; pass it as resume\(reward="):
        camshaft.load_run(home / "run").resume(steps=3)
    caplog.clear()
    longer = camshaft.load_run(home / "run").resume(steps=3, reward=make_rewards("0123456789"))
    assert "no effect" not in caplog.text  # only keys that a user has set are reported
    assert longer.history["step"] == [1, 2, 3]
    assert longer.status == "finished"
    assert "The configs are equal." in longer.compare(trained)  # both are the same folder


def test_a_validation_leaves_the_metrics_of_the_training(home: Path, start: Callable[..., camshaft.Run]) -> None:
    run = start(home / "validated", val_data=PROMPTS[:4], **{"trainer.val_only": True})
    assert run.status == "finished"
    assert run.history["step"] == [0]
    assert 0 <= run.metrics()["val/reward/mean"] <= 2.5
    assert not (home / "validated" / "metrics.jsonl").exists()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Handle SIGINT as an interactive program does. A shell starts background jobs with this signal ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_saves_the_step_and_the_run_resumes(home: Path, start: Callable[..., camshaft.Run]) -> None:
    def interrupt(step: int, *_: Any) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    run = start(home / "interrupted", steps=3, on_step=interrupt)
    assert run.status == "stopped"
    assert run.history["step"] == [1]
    assert "stopped, step 1" in repr(run)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = run.resume()
    assert resumed.history["step"] == [1, 2, 3]
    assert resumed.status == "finished"


def test_a_failing_hook_ends_a_run_in_a_thread(home: Path, start: Callable[..., camshaft.Run]) -> None:
    threads = []

    def fail(step: int, *_: Any) -> None:
        threads.append(threading.current_thread())
        raise ZeroDivisionError(f"in step {step}")

    with ThreadPoolExecutor(1) as pool, pytest.raises(ZeroDivisionError, match="in step 1") as raised:
        pool.submit(start, home / "failed", on_step=[fail]).result()
    assert raised.traceback[-1].name == "fail"
    assert threads[0] is not threading.main_thread()
    assert camshaft.load_run(home / "failed").status == "failed"


def test_objects_that_cannot_be_pickled_are_named(home: Path, start: Callable[..., camshaft.Run]) -> None:
    lock = threading.Lock()

    def locked(response: str) -> float:
        with lock:
            return float(len(response))

    with pytest.raises(RewardError, match=r"'locked' cannot be sent .*lock.* Create such objects inside the function"):
        start(home / "locked", reward=locked)


@pytest.fixture
def unused_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert [*tmp_path.iterdir()] == [], "an invalid config left files"


@pytest.mark.usefixtures("unused_names")
def test_errors_are_those_of_the_command_line(start: Callable[..., camshaft.Run]) -> None:
    with pytest.raises(ConfigError, match=r"num_generations[\s\S]*n \(short for actor_rollout_ref.rollout.n\)"):
        start(None, num_generations=4)
    with pytest.raises(ConfigError, match=r"lr = 0\.003\n      is short for actor_rollout_ref\.actor\.optim\.lr"):
        start(None, config={"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-6}}}})


def test_supervised_runs_return_a_run(home: Path) -> None:
    seen: list[int] = []
    rows = [{"prompt": f"{number}+1=", "response": str(number + 1)} for number in range(16)]
    fine_tuned = camshaft.sft(
        model=home / "tiny", data=rows, steps=2, out=home / "sft", on_step=lambda step, *_: seen.append(step),
        **SMALL_SUPERVISED,
    )  # fmt: skip
    assert seen == [1, 2]
    assert len(fine_tuned.history["train/loss"]) == 2
    assert fine_tuned.status == "finished"
    pairs = [{"prompt": "a", "chosen": str(number), "rejected": "b"} for number in range(16)]
    trained = camshaft.reward_model(
        model=home / "sft" / "huggingface", data=pairs, steps=2, out=home / "rm", **SMALL_SUPERVISED
    )
    assert trained.history["step"] == [1, 2]
    assert (trained.folder / "huggingface" / "config.json").is_file()
    assert "train/loss" in trained.compare(fine_tuned)
