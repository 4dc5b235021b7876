"""Runs on two ranks of the sharded engine have the numbers of the same run on the reference engine in one process."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import camshaft, sft_args
from support.interrupting import NAME, run_until
from support.moe import MODELS
from support.ppo_runs import ppo_args, run_ppo, saved_weights
from support.same_run import ACTOR, RANKS, SHUFFLED, close, compare
from support.tiny import tiny_folder
from torch import Tensor
from transformers import AutoModelForCausalLM

from camshaft import storage
from camshaft.config import load_sft
from camshaft.tracking import deterministic
from camshaft.tracking.jsonl import read_metrics
from camshaft.trainer.supervised import SFTTrainer

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("fork_server")]

GRPO: dict[str, Any] = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4}
LORA: dict[str, Any] = {
    **GRPO,
    f"{ACTOR}.use_kl_loss": True,
    "actor_rollout_ref.model.lora_rank": 4,
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="rows"),
        # The actor's two ranks share a row; the reference's ranks do not.
        pytest.param(
            {
                f"{ACTOR}.ulysses_sequence_parallel_size": 2,
                "actor_rollout_ref.ref.ulysses_sequence_parallel_size": 1,
                "critic.model.fsdp_config.tensor_parallel_size": 2,
            },
            id="a layout per role",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ppo_does_not_depend_on_the_number_of_ranks(layout: dict[str, Any], tmp_path: Path) -> None:
    one_process = run_ppo(tmp_path, SHUFFLED, steps=2)
    ranks = run_ppo(tmp_path, {**SHUFFLED, **RANKS, **layout}, steps=2)
    compare(ranks, one_process, rel=1e-6)
    assert ranks[1].metrics["actor/reward_kl_penalty"] != 0


@pytest.mark.slow
def test_gspo_with_dynamic_sampling_does_not_depend_on_ranks(tmp_path: Path) -> None:
    # The response has one ratio and its two ranks share the tokens; or each rank has separate rows.
    changes: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.filter_groups.enable": True,
        "data.gen_batch_size": 6,
        "actor_rollout_ref.rollout.n": 3,
        f"{ACTOR}.policy_loss.loss_mode": "gspo",
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
        f"{ACTOR}.clip_ratio": 3e-3,
    }
    one_process = run_ppo(tmp_path, {**SHUFFLED, **changes}, steps=2)
    assert one_process[1].metrics["actor/pg_clipfrac"] > 0
    for layout in ({f"{ACTOR}.ulysses_sequence_parallel_size": 2}, {}):
        ranks = run_ppo(tmp_path, {**SHUFFLED, **changes, **RANKS, **layout}, steps=2)
        compare(ranks, one_process, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [2.0, "0.01-0.3"])
def test_mismatch_correction_does_not_depend_on_ranks(threshold: float | str, tmp_path: Path) -> None:
    # The distribution is truncated, so that the mismatch metrics and weights exceed rounding; rows differ in length.
    cut = {
        "actor_rollout_ref.rollout.top_p": 0.6,
        "algorithm.rollout_correction.rollout_is": "sequence",
        "algorithm.rollout_correction.rollout_is_threshold": threshold,
        "algorithm.rollout_correction.rollout_is_batch_normalize": True,
        "algorithm.rollout_correction.rollout_rs": "token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold": "0.604_2.0",
    }
    one_process = run_ppo(tmp_path, {**SHUFFLED, **cut}, steps=1)[0].metrics
    ranks = run_ppo(tmp_path, {**SHUFFLED, **cut, **RANKS}, steps=1)[0].metrics
    names = [
        name for name in one_process if name.startswith(("rollout_corr/", "rollout/log_prob", "rollout/kl", "actor/"))
    ]
    names.append("rollout/effective_sample_share")
    assert {name: ranks[name] for name in names} == pytest.approx({name: one_process[name] for name in names}, rel=1e-6)
    assert 0 < one_process["rollout_corr/rollout_rs_masked_fraction"] < 1
    assert one_process["rollout/effective_sample_share"] < 1 - 1e-6


@pytest.mark.slow
def test_adapter_and_its_reference_do_not_depend_on_ranks(tmp_path: Path) -> None:
    one_process = run_ppo(tmp_path, LORA, steps=2)
    compare(run_ppo(tmp_path, {**LORA, **RANKS}, steps=2), one_process, rel=1e-5)
    # The divergence is from the model under the adapter: zero at first, then positive.
    assert one_process[1].metrics["actor/kl_loss"] > one_process[0].metrics["actor/kl_loss"] >= 0
    assert all("lora_" in name for name in one_process[1].actor)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {f"{ACTOR}.ulysses_sequence_parallel_size": 2}], ids=["rows", "tokens"])
def test_experts_with_replay_and_router_loss_do_not_depend_on_ranks(layout: dict[str, Any], tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.model.path": tiny_folder(**MODELS["qwen3_moe"]),
        "actor_rollout_ref.model.router_aux_loss_coef": 0.1,
        f"{ACTOR}.router_replay.mode": "R3",
        # transformers has no experts in float64; with this eps, Adam does not amplify rounding.
        f"{ACTOR}.fsdp_config.model_dtype": "float32",
        "actor_rollout_ref.rollout.dtype": "float32",
        f"+{ACTOR}.optim.override_optimizer_config.eps": 1e-3,
    }
    one_process = run_ppo(tmp_path, {**SHUFFLED, **changes}, steps=2)
    compare(run_ppo(tmp_path, {**SHUFFLED, **changes, **RANKS, **layout}, steps=2), one_process, rel=1e-4)
    assert one_process[0].metrics["rollout/routing_mismatch"] == 0
    assert one_process[0].metrics["actor/moe/aux_loss"] > 1


@pytest.mark.slow
def test_validation_rows_need_not_divide_by_ranks(tmp_path: Path) -> None:
    odd = {
        "trainer.val_before_train": True,
        "data.val_max_samples": 5,
        "algorithm.adv_estimator": "reinforce_plus_plus",
    }
    (one_process, _), (ranks, _) = (run_ppo(tmp_path, {**odd, **more}, steps=1) for more in ({}, RANKS))
    assert ranks.metrics == one_process.metrics
    assert ranks.metrics["val-aux/response_length/mean"] > 0


# -- supervised -----------------------------------------------------------------------------------


class Recorder:
    """A tracker that records all metrics."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.steps.append(dict(metrics))


def supervised(folder: Path, **overrides: Any) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return (metrics of the steps, weights of the exported model)."""
    paths = {"trainer.default_local_dir": folder / overrides["strategy"], "trainer.total_training_steps": 3}
    validated = {"data.val_files": folder / "data" / "sft_heldout.parquet", "trainer.test_freq": 3}
    config = load_sft(sft_args(folder, {**paths, **validated, **overrides}))
    recorder = Recorder()
    with SFTTrainer(config) as trainer:
        trainer.prepare()
        trainer.fit(recorder)  # pyright: ignore[reportArgumentType]
    exported: Any = AutoModelForCausalLM.from_pretrained(config.export_path())
    return recorder.steps, dict(exported.named_parameters())


def test_supervised_training_does_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    # 16 held-out rows in batches of 6: all batches, including the last of 4, are padded to equal rows per rank.
    adapter = {"model.lora_rank": 4, "data.train_batch_size": 6}
    one_process, exported = supervised(tmp_path, strategy="reference", **adapter)
    steps, weights = supervised(tmp_path, strategy="fsdp", **{"trainer.n_gpus_per_node": 2, **adapter})
    for actual, expected in zip(steps, one_process, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/lr"):
            assert actual[name] == pytest.approx(expected[name], rel=1e-5), name
    assert steps[-1]["val/loss"] == pytest.approx(one_process[-1]["val/loss"], rel=1e-5)
    assert math.isfinite(steps[-1]["val/loss"])
    close(weights, exported, 1e-4)


# -- checkpoints ----------------------------------------------------------------------------------


SAVED: dict[str, Any] = {
    **RANKS,
    **LORA,
    "trainer.total_training_steps": 3,
    "trainer.total_epochs": 1,
    "trainer.save_freq": 1,
    "trainer.logger": f"[jsonl,{NAME}]",
    "trainer.resume_mode": "auto",
}


def run_args(home: Path, run: Path, async_save: bool) -> list[str]:
    where = {"trainer.default_local_dir": run, f"{ACTOR}.checkpoint.async_save": async_save}
    return ["ppo", *ppo_args(home, {**SAVED, **where})]


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """Return a folder with an uninterrupted run in its folder `whole`."""
    assert camshaft(*run_args(home, home / "whole", async_save=False)).status == 0
    return home


def lines(run: Path) -> list[str]:
    return [json.dumps(deterministic(line)) for line in read_metrics(run / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "async_save",
    [pytest.param(False, id="waiting"), pytest.param(True, id="in the background", marks=pytest.mark.slow)],
)
def test_a_killed_run_on_two_ranks_resumes_bitwise(
    async_save: bool, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted, killed = home / "whole", tmp_path / "killed"
    run_until(3, killed, run_args(home, killed, async_save), monkeypatch)
    complete = [step for step, folder in storage.step_folders(killed) if storage.is_complete(folder / "actor")]
    # A background save of the last step may be incomplete.
    assert complete == [1, 2] or (async_save and complete == [1])
    assert camshaft(*run_args(home, killed, async_save)).status == 0
    assert len(lines(killed)) == 3
    assert lines(killed) == lines(uninterrupted)
    actual, expected = (saved_weights(run / "global_step_3" / "actor") for run in (killed, uninterrupted))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
