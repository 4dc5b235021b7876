"""Runs scored by a reward model, with and without a reward function, on one rank and on two."""

from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from support.command_line import camshaft
from support.ppo_runs import ppo_args, run_ppo
from support.processes import start_fork_server
from support.reward_models import NEWLINE, hf_scores, make_tiny_reward_model
from support.same_run import names
from transformers import AutoTokenizer

from camshaft.controller.local import PRELOAD
from camshaft.tracking.jsonl import read_metrics

pytestmark = pytest.mark.timeout(200)

MODEL = "reward_model.model"
RANKS: dict[str, Any] = {"actor_rollout_ref.actor.strategy": "fsdp", "trainer.n_gpus_per_node": 2}
PLAIN: dict[str, Any] = {"actor_rollout_ref.rollout.n": 2, "algorithm.use_kl_in_reward": True}


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    roles = ("transformers.models.qwen2.modeling_qwen2", "transformers.models.llama.modeling_llama")
    start_fork_server(*PRELOAD, "camshaft.roles", *roles)


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """Return a folder with data, a policy, and a reward model in `rm` with another tokenizer and chat template."""
    ppo_args(home)  # writes data and policy
    make_tiny_reward_model(home / "rm", template=NEWLINE, turned=True)
    return home


def scored_by(home: Path, **more: Any) -> dict[str, Any]:
    return {
        "reward_model.enable": True,
        f"{MODEL}.path": home / "rm",
        "reward_model.micro_batch_size_per_gpu": 3,
        "reward_model.max_length": 60,
        **{f"reward_model.{key}": value for key, value in more.items()},
    }


def test_combined_scores_do_not_depend_on_ranks(home: Path) -> None:
    overrides = {**PLAIN, **scored_by(home, weight=0.5)}
    (step,) = run_ppo(home, overrides, steps=1)
    tokenizer: Any = AutoTokenizer.from_pretrained(home / "actor")
    reward_tokenizer: Any = AutoTokenizer.from_pretrained(home / "rm")
    batch, chats = step.batch, []
    responses = tokenizer.batch_decode([row.tolist() for row in batch["responses"].rows()], skip_special_tokens=True)
    for prompt, response in zip(batch["raw_prompt"], responses, strict=True):
        assert prompt[0]["role"] == "user"
        chats.append(
            reward_tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": response}])["input_ids"]
        )
    expected, metrics = hf_scores(home / "rm", chats), step.metrics
    assert batch["rm_scores"].sum().tolist() == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-5)
    assert metrics["reward/model/mean"] == pytest.approx(float(expected.mean()), rel=1e-4, abs=1e-6)
    together = metrics["reward/function/mean"] + 0.5 * metrics["reward/model/mean"]
    assert metrics["critic/score/mean"] == pytest.approx(together, rel=1e-5)
    assert metrics["reward/model/truncated"] == 0
    (ranks,) = run_ppo(home, {**overrides, **RANKS}, steps=1)
    assert names(ranks.metrics) == names(metrics)
    for name, value in metrics.items():
        if not name.startswith(("timing_s/", "perf/", "rollout/")):
            assert ranks.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def without_function(home: Path) -> dict[str, Any]:
    """Return overrides of a run with validation that only the reward model scores.

    Without a reward function, rows need no ground truth and any data_source is valid.
    """
    alone = {"custom_reward_function.path": "null", "custom_reward_function.name": "null", **scored_by(home)}
    validated = {"trainer.val_before_train": True, "data.val_max_samples": 5, "reward_model.max_length": 20}
    return {**PLAIN, **alone, **validated}


def test_a_model_scores_without_a_function_in_validation(home: Path) -> None:
    before, step = run_ppo(home, without_function(home), steps=1)
    assert step.metrics["critic/score/mean"] == pytest.approx(step.metrics["reward/model/mean"], rel=1e-5)
    assert step.metrics["reward/model/truncated"] == 16  # of 8 prompts x 2
    assert "reward/function/mean" not in step.metrics
    source = "camshaft/arithmetic"
    score = before.metrics[f"val-core/{source}/reward/mean"]
    assert score == pytest.approx(before.metrics[f"val-aux/{source}/model/mean@1"])
    assert before.metrics["val-aux/reward/model/truncated"] == 5


@pytest.mark.slow
def test_scores_without_a_function_do_not_depend_on_ranks(home: Path) -> None:
    (_, step), (_, ranks) = (run_ppo(home, {**without_function(home), **more}, steps=1) for more in ({}, RANKS))
    assert ranks.metrics["reward/model/mean"] == pytest.approx(step.metrics["reward/model/mean"], rel=1e-4)


@pytest.mark.parametrize(
    "more", [pytest.param({}, id="one rank"), pytest.param(RANKS, id="two ranks", marks=pytest.mark.slow)]
)
def test_a_custom_class_scores(more: dict[str, Any], home: Path) -> None:
    overrides = {"reward_model.enable": True, "reward_model.worker_cls": "support.reward_models:LengthReward"}
    (step,) = run_ppo(home, {**PLAIN, **overrides, **more}, steps=1)
    assert step.metrics["reward/model/mean"] == pytest.approx(float(step.batch["responses"].lengths.float().mean()))
    assert "reward/model/truncated" not in step.metrics


def test_the_command_line_reports_the_model_scores(home: Path, tmp_path: Path) -> None:
    overrides = {"trainer.logger": "[jsonl]", "trainer.default_local_dir": tmp_path, "trainer.total_training_steps": 1}
    run = camshaft("ppo", *ppo_args(home, {**scored_by(home), **overrides}))
    assert run.status == 0, run.err
    assert ["actor", "ref", "critic", "reward"] in [line.split()[:4] for line in run.out.splitlines()]
    assert "reward/model/mean" in read_metrics(tmp_path / "metrics.jsonl")[0]


@pytest.mark.parametrize(
    ("overrides", "status", "message"),
    [
        ({f"{MODEL}.path": "/nowhere/rm"}, 2, f"{MODEL}.path = /nowhere/rm"),
        ({f"{MODEL}.input_tokenizer": "null"}, 2, "the tokenizers differ"),
        ({f"{MODEL}.path": "{home}/actor"}, 1, "score.weight is missing"),
        (
            {"reward_model.worker_cls": "support.reward_models:IncompleteReward"},
            2,
            "does not register compute_rm_score",
        ),
    ],
)
def test_all_problems_are_one_error(overrides: dict[str, str], status: int, message: str, home: Path) -> None:
    arguments = {key: value.format(home=home) for key, value in overrides.items()}
    run = camshaft("ppo", *ppo_args(home, {**scored_by(home), **arguments}))
    assert run.status == status, run.err
    assert message in run.err
    assert "Traceback" not in run.err


def test_rows_without_a_function_use_only_the_reward_model(home: Path) -> None:
    table = parquet.read_table(home / "data" / "train.parquet")
    place = table.column_names.index("data_source")
    unknown = home / "unknown.parquet"
    parquet.write_table(table.set_column(place, "data_source", pyarrow.array(["mine"] * len(table))), unknown)
    auto = {"custom_reward_function.path": "null", "data.train_files": unknown, "data.val_files": "null"}
    run = camshaft("ppo", *ppo_args(home, {**scored_by(home), **auto}))
    assert run.status == 1
    assert "custom_reward_function.name=null to score with the reward model only" in run.err
