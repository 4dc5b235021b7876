"""Reward models from the command line: training, use in other commands, interruption, and invalid input."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import camshaft, rm_args
from support.interrupting import NAME, run_until
from support.ppo_runs import run_ppo
from support.reward_models import hf_scores
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from camshaft import storage
from camshaft.data import write_arithmetic
from camshaft.data.tables import read_rows
from camshaft.models.tiny import make_tiny_model
from camshaft.tracking import deterministic
from camshaft.tracking.jsonl import read_metrics

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    rm_args(home)
    return home


# -- training -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on right and wrong sums; the data is in `pairs` next to it."""
    home = tmp_path_factory.mktemp("trained")
    sums = write_arithmetic(home / "pairs", left=(10, 99), right=(0, 9), num_train=640, num_heldout=128)
    make_tiny_model(home / "model", initializer_range=0.1)
    overrides: dict[str, Any] = {
        "data.train_files": sums.preference_train,
        "data.val_files": sums.preference_heldout,
        "data.train_batch_size": 64,
        "data.micro_batch_size_per_gpu": 64,
        "model.path": home / "model",
        "trainer.total_epochs": 8,
        "trainer.total_training_steps": 80,
        "trainer.test_freq": 80,
        "trainer.default_local_dir": home / "run",
    }
    run = camshaft("rm", *rm_args(home, overrides))
    assert run.status == 0, run.err
    assert f"wrote {home}/run/huggingface" in run.out
    return home / "run"


def test_right_answers_to_held_out_sums_are_preferred(finished: Path) -> None:
    last = read_metrics(finished / "metrics.jsonl")[-1]
    assert last["val/accuracy"] > 0.7
    assert last["val/margin"] > 0
    assert last["val/chosen_reward"] - last["val/rejected_reward"] == pytest.approx(last["val/margin"], rel=1e-5)
    names = {"loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "grad_norm", "lr", "skipped_steps"}
    assert names == {name.removeprefix("train/") for name in last if name.startswith("train/")}
    assert last["perf/throughput"] > 0


def test_transformers_gives_the_same_scores_in_padded_batches(finished: Path) -> None:
    folder = finished / "huggingface"
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    pairs = read_rows(finished.parent / "pairs" / "preference_heldout.parquet", ["prompt", "chosen", "rejected"]).rows
    scores = {}
    for key in ("chosen", "rejected"):
        turns = [[*row["prompt"], {"role": "assistant", "content": row[key]}] for row in pairs]
        batch = tokenizer.apply_chat_template(turns, return_dict=True, return_tensors="pt", padding=True)
        with torch.no_grad():
            scores[key] = model(**batch).logits[:, 0]
    metrics = read_metrics(finished / "metrics.jsonl")[-1]
    assert float((scores["chosen"] > scores["rejected"]).float().mean()) == metrics["val/accuracy"]
    for key, values in scores.items():
        assert float(values.mean()) == pytest.approx(metrics[f"val/{key}_reward"], rel=1e-4)


@pytest.mark.parametrize("same_tokens", [False, True], ids=["as text", "as tokens"])
def test_ppo_takes_it_as_its_reward_model(same_tokens: bool, finished: Path, home: Path) -> None:
    folder = finished / "huggingface"
    scored = {"reward_model.enable": True, "reward_model.model.path": folder, "custom_reward_function.path": "null"}
    scored |= {"custom_reward_function.name": "null", "reward_model.micro_batch_size_per_gpu": 4}
    scored |= {"reward_model.model.input_tokenizer": "null"} if same_tokens else {"reward_model.max_length": 60}
    (step,) = run_ppo(home, scored, steps=1)
    prompts, responses = step.batch["prompts"].rows(), step.batch["responses"].rows()
    rows = [[*prompt.tolist(), *response.tolist()] for prompt, response in zip(prompts, responses, strict=True)]
    if not same_tokens:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        heads = tokenizer.batch_decode(prompts, skip_special_tokens=False)
        rows = tokenizer([f"{head}{text}<|im_end|>" for head, text in zip(heads, texts, strict=True)])["input_ids"]
    expected = float(hf_scores(folder, rows).mean())
    assert step.metrics["reward/model/mean"] == pytest.approx(expected, rel=1e-4, abs=1e-5)


# -- interruption ---------------------------------------------------------------------------------

SAVED: dict[str, Any] = {
    "trainer.total_training_steps": 6,
    "trainer.total_epochs": 2,
    "trainer.save_freq": 2,
    "data.train_max_samples": 24,
    "trainer.logger": f"[jsonl,{NAME}]",
    "+model.override_config.attention_dropout": 0.1,
    "checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
}


def run_args(home: Path, run: Path) -> list[str]:
    return ["rm", *rm_args(home, {**SAVED, "trainer.default_local_dir": run})]


@pytest.fixture(scope="module")
def uninterrupted(home: Path) -> Path:
    assert camshaft(*run_args(home, home / "uninterrupted")).status == 0
    return home / "uninterrupted"


def same(run: Path, uninterrupted: Path) -> None:
    lines = [
        [json.dumps(deterministic(line)) for line in read_metrics(r / "metrics.jsonl")] for r in (run, uninterrupted)
    ]
    assert len(lines[0]) == 6
    assert lines[0] == lines[1]
    for part in ("model", "model_huggingface"):
        actual, expected = (storage.read_manifest(r / "global_step_6" / part)["files"] for r in (run, uninterrupted))
        assert actual == expected


@pytest.mark.slow
def test_a_killed_run_resumes_bitwise(
    uninterrupted: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert run_until(3, run, run_args(home, run), monkeypatch).status == -signal.SIGKILL
    assert [step for step, _ in storage.step_folders(run)] == [2]
    assert camshaft(*run_args(home, run)).status == 0
    same(run, uninterrupted)


@pytest.mark.slow
def test_a_failed_run_resumes_bitwise(uninterrupted: Path, home: Path, tmp_path: Path) -> None:
    (tmp_path / "stop").write_text("5")
    with pytest.raises(SystemExit, match="the test ends this run"):
        camshaft(*run_args(home, tmp_path))
    (tmp_path / "stop").unlink()
    assert camshaft(*run_args(home, tmp_path)).status == 0
    same(tmp_path, uninterrupted)


# -- features shared with other trainers ----------------------------------------------------------


def test_the_step_with_the_best_accuracy_is_kept(home: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs").mkdir()
    shutil.copy(home / "data" / "preference_train.parquet", tmp_path / "pairs")
    overrides = {
        "data.train_files": tmp_path / "pairs",
        "data.val_files": home / "data" / "preference_heldout.parquet",
        "optim.lr": 1e-2,
        "trainer.total_training_steps": 5,
        "trainer.test_freq": 1,
        "trainer.save_freq": 5,
        "trainer.max_ckpt_to_keep": 1,
        "trainer.best_metric": "val/accuracy",
        "trainer.best_metric_mode": "max",
        "trainer.default_local_dir": tmp_path / "run",
    }
    run = camshaft("rm", *rm_args(home, overrides))
    assert run.status == 0, run.err
    accuracies = [line["val/accuracy"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    best = accuracies.index(max(accuracies)) + 1
    assert (tmp_path / "run" / "best_checkpointed_iteration.txt").read_text() == str(best)
    assert [step for step, _ in storage.step_folders(tmp_path / "run")] == sorted({best, 5})


def test_a_checkpoint_is_exported_with_the_scores_of_the_run(uninterrupted: Path, tmp_path: Path) -> None:
    run = camshaft("export", str(uninterrupted), str(tmp_path / "exported"))
    assert run.status == 0, run.err
    rows = [[5, 6, 7], [8, 9, 10, 11]]
    assert torch.equal(hf_scores(tmp_path / "exported", rows), hf_scores(uninterrupted / "huggingface", rows))


# -- invalid input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "status", "phrases"),
    [
        (
            {"trainer.sede": 1, "data.chosen_key": "null"},
            2,
            ["2 errors", "Did you mean trainer.seed?", "data.chosen_key"],
        ),
        ({"center_rewards_coefficient": -1}, 2, ["a number >= 0"]),
        (
            {"data.use_dynamic_bsz": True, "data.max_token_len_per_gpu": 63},
            2,
            ["the longest pair of sequences (64 tokens): data.max_length=32. Set 64 or more."],
        ),
        ({"strategy": "fsdp", "trainer.n_gpus_per_node": 3}, 2, ["data.train_batch_size = 8", "8 = 3 ranks x 2 + 2"]),
        ({"data.rejected_key": "worse"}, 1, ["has no column 'worse'", "prompt, chosen, rejected"]),
        ({"data.max_length": 8}, 1, ["row 0: the sequence with 'chosen' has", "data.truncation=left"]),
        ({"data.train_batch_size": 100}, 1, ["the data has 64 rows, but one batch needs 100"]),
    ],
    ids=["keys", "bounds", "token budget", "ranks", "column", "length", "batch"],
)
def test_all_problems_are_one_error(overrides: dict[str, Any], status: int, phrases: list[str], home: Path) -> None:
    run = camshaft("rm", *rm_args(home, overrides))
    assert run.status == status, run.err
    assert [text for text in phrases if text not in run.err] == [], run.err
    assert "Traceback" not in run.err


def test_a_classifier_of_several_labels_is_rejected(home: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, hidden=32)
    AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3).save_pretrained(tmp_path)
    run = camshaft("rm", *rm_args(home, {"model.path": tmp_path}))
    assert run.status == 1
    assert "score.weight has shape (3, 32), not (1, 32)" in run.err


def test_help_lists_the_required_keys(home: Path) -> None:
    run = camshaft("rm", "--help")
    assert run.status == 0
    assert "A run requires model and data." in run.out
