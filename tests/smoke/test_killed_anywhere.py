"""kill -9 at any moment, including while saving: the resumed run logs and writes the same as an uninterrupted run.

A run has twenty steps. Its driver is killed twice, after a seeded random time in a seeded random step, on one process,
on two ranks and on Ray. Every test run includes one short case; `make test-cluster` runs all of them.
"""

import random
import time
from pathlib import Path
from typing import Any

import pytest
from support.command_line import camshaft, finished, start
from support.ppo_runs import ppo_args, saved_weights
from support.same_run import ACTOR, RANKS

from camshaft import storage
from camshaft.tracking import deterministic
from camshaft.tracking.jsonl import read_metrics

pytestmark = pytest.mark.timeout(900)

LOCAL: dict[str, Any] = {}
RAY = {**RANKS, "trainer.controller": "ray", "ray_kwargs.ray_init": "{include_dashboard:false,num_cpus:2}"}
LAYOUTS: dict[str, dict[str, Any]] = {"one process": LOCAL, "two ranks": RANKS, "ray": RAY}
BUSY: dict[str, Any] = {
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.kl_ctrl.horizon": 50,
    "algorithm.kl_ctrl.target_kl": 0.02,
    f"{ACTOR}.shuffle": True,
    f"{ACTOR}.ppo_epochs": 2,
    f"{ACTOR}.optim.lr_scheduler_type": "cosine",
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 64,
    "+actor_rollout_ref.model.override_config.attention_dropout": 0.1,
    "data.shuffle": True,
    "data.train_max_samples": 24,
    "trainer.total_epochs": 7,
    "trainer.test_freq": 5,
    "trainer.save_freq": 2,
    "trainer.best_metric": "val/reward/mean",
    "trainer.max_actor_ckpt_to_keep": 2,
    "trainer.logger": "[jsonl]",
    "trainer.resume_mode": "auto",
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "gae": {"critic.optim.lr_warmup_steps": 3, "trainer.max_critic_ckpt_to_keep": 1},
    "grpo": {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4},
    "lora": {
        "actor_rollout_ref.model.lora_rank": 4,
        f"{ACTOR}.fsdp_config.model_dtype": "bfloat16",
        "algorithm.adv_estimator": "rloo",
        "actor_rollout_ref.rollout.n": 2,
    },
}
CASES = [(layout, algorithm, 20) for layout in LAYOUTS for algorithm in ("gae", "grpo")] + [("one process", "lora", 20)]


def kill(run: Path, args: list[str], draw: random.Random, first: int, last: int) -> int:
    """Start the run, kill its driver during one of these steps or its save, and return the newest logged step."""
    step, saves = draw.randint(first, last), draw.random() < 0.5
    step += step % 2 if saves else 0
    process = start("-m", "camshaft", *args)
    deadline = time.monotonic() + 200
    try:
        while not (list(run.glob(f"global_step_{step}/*.unfinished")) if saves else logged(run) >= step):
            assert process.poll() is None, finished(process)
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(draw.uniform(0.0, 0.05 if saves else 1.0))
    finally:
        process.kill()
        finished(process)
    return logged(run)


def logged(run: Path) -> int:
    file = run / "metrics.jsonl"
    return max((int(line["step"]) for line in read_metrics(file)), default=0) if file.exists() else 0


def lines(run: Path) -> list[dict[str, float]]:
    return [deterministic(line) for line in read_metrics(run / "metrics.jsonl")]


def saved(run: Path) -> dict[str, Any]:
    """Return all saved tensors by step, role and name; the rank that writes a replicated tensor may differ."""
    tensors: dict[str, Any] = {}
    for role in sorted(run.glob("global_step_*/[!t]*")):
        name = str(role.relative_to(run))
        for part in ("model", "optimizer"):
            tensors |= {f"{name}/{part}/{key}": tensor.tolist() for key, tensor in saved_weights(role, part).items()}
        files = storage.read_manifest(role)["files"]
        tensors |= {
            f"{name}/{file}": checksum for file, checksum in files.items() if file.startswith(("random", "state"))
        }
    return tensors


@pytest.mark.parametrize(
    ("layout", "algorithm", "steps"),
    [
        pytest.param("one process", "gae", 8, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.cluster) for case in CASES),
    ],
)
def test_a_run_that_is_killed_anywhere_is_the_undisturbed_run(
    layout: str, algorithm: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    settings = {**BUSY, **ALGORITHMS[algorithm], **LAYOUTS[layout], "trainer.total_training_steps": steps}

    def words(run: Path) -> list[str]:
        return ["ppo", *ppo_args(tmp_path, {**settings, "trainer.default_local_dir": run})]

    killed, uninterrupted = tmp_path / "killed", tmp_path / "whole"
    draw = random.Random(f"{layout} {algorithm} {steps}")
    reached = 0
    for _ in range(2 if steps == 20 else 1):
        first, last = max(reached + 1, steps // 2), steps - 2
        if first > last:  # the first kill came late: no step remains for the second
            break
        reached = kill(killed, words(killed), draw, first, (first + last) // 2)
    for run in (killed, uninterrupted):
        result = (
            camshaft(*words(run)) if layout == "one process" else finished(start("-m", "camshaft", *words(run)), 300)
        )
        assert result.status == 0, result.err
    assert [line["step"] for line in lines(killed)] == list(range(1, steps + 1))
    assert lines(killed) == lines(uninterrupted)
    actual, expected = saved(killed), saved(uninterrupted)
    assert len(expected) > 100
    assert [name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name)] == []
    best = [(run / "best_checkpointed_iteration.txt").read_text() for run in (killed, uninterrupted)]
    assert best[0] == best[1]
    assert (uninterrupted / f"global_step_{best[0]}" / "actor").is_dir()
