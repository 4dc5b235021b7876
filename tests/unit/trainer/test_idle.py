"""A run in which nothing is trained ends with the cause, and a step in which one token trains is not idle."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import camshaft
from support.ppo_runs import ppo_args, ppo_config, run_ppo

from camshaft.checkpoint import CheckpointManager
from camshaft.config import PPOConfig
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import IdleError
from camshaft.tracking.no_signal import explain_equal_advantages
from camshaft.tracking.run_folder import RunFolder
from camshaft.trainer.idle import IdleCheck, has_signal, other_losses

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
OFF: dict[str, Any] = {"algorithm.adv_estimator": "grpo", f"{ACTOR}.entropy_coeff": 0, "actor_rollout_ref.rollout.n": 4}
"""Only the policy loss trains, and it compares the responses to a prompt."""
SETTINGS = {**OFF, "trainer.max_idle_steps": 4, "trainer.resume_mode": "auto", "trainer.save_freq": 100}
OWN = """
import torch

def centered(x, options):
    totals = torch.where(x.mask, x.rewards, 0).sum(1)
    means = torch.stack([totals[x.groups == group].mean() for group in x.groups])
    return torch.where(x.mask, (totals - means)[:, None], 0), torch.where(x.mask, totals[:, None], 0)

def nothing(x, options):
    return torch.zeros_like(x.rewards), torch.zeros_like(x.rewards)

def with_a_bonus(log_probs, old_log_probs, advantages, counts, *, clip, mode, weights=None):
    return -(log_probs * counts.mask).sum() / counts.num_tokens, {}
"""
CONSTANT = """
import torch

def constant(x, options):
    return torch.where(x.mask, -1.0, 0.0), torch.zeros_like(x.rewards)
"""
REWARDS = {
    "zero": "def score(response): return 0.0",
    "by_prompt": "def score(response, ground_truth): return float(ground_truth) / 100",
    "by_response": "def score(response): return sum(map(ord, response)) % 97 / 97",
    "solved": (
        "import os\n"
        "calls = os.path.join(os.path.dirname(__file__), 'calls')\n"
        "def score(response):\n"
        "    with open(calls, 'a+') as file:\n"
        "        file.write('x')\n"
        "        return 1.0 if file.tell() > 32 else sum(map(ord, response)) % 97 / 100\n"
    ),
}
"""Sources of reward functions. `solved` returns the highest score from the second step of 32 responses on."""


def ragged(*rows: list[Any]) -> Ragged:
    return Ragged.from_rows([torch.tensor(row) for row in rows])


def batch_of(advantages: list[float], **columns: list[Any]) -> DataProto:
    """Return a batch of one response per pair of tokens, all of which the policy sampled."""
    columns = {"response_mask": [True] * len(advantages), "advantages": advantages, **columns}
    pairs = {name: [values[at : at + 2] for at in range(0, len(values), 2)] for name, values in columns.items()}
    return DataProto.from_dict({name: ragged(*rows) for name, rows in pairs.items()})


def config_of(folder: Path, settings: dict[str, Any] | None = None) -> PPOConfig:
    return ppo_config(folder, {**OFF, **(settings or {})})


# -- hand-worked steps ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({}, [False, True, False, True]),
        ({"response_mask": [True, False, True, True]}, [False, False, False, True]),
        ({"rollout_rs_mask": [True, True, True, False]}, [False, True, False, False]),
        ({"rollout_is_weights": [1.0, 0.0, 1.0, 0.5]}, [False, False, False, True]),
        ({"rollout_is_weights": [1.0, 0.0, 1.0, 0.5], "rollout_rs_mask": [True, True, True, False]}, [False] * 4),
    ],
)
def test_signal_needs_an_advantage_a_mask_and_a_weight(columns: dict[str, list[Any]], expected: list[bool]) -> None:
    assert has_signal(batch_of([0.0, 1e-6, 0.0, -2.0], **columns)).tolist() == expected


@pytest.mark.parametrize(
    ("settings", "columns", "updates_actor", "expected"),
    [
        ({}, {}, True, []),
        ({f"{ACTOR}.entropy_coeff": -0.01}, {}, True, ["the entropy bonus"]),
        ({f"{ACTOR}.entropy_coeff": 0.01}, {"rollout_rs_mask": [False] * 4}, True, []),
        ({f"{ACTOR}.use_kl_loss": True}, {}, True, ["the KL loss"]),
        ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.0}, {}, True, []),
        ({}, {"values": [0.0] * 4}, True, ["the value loss"]),
        ({}, {"values": [0.0] * 4, "rollout_rs_mask": [False] * 4}, True, ["the value loss"]),
        ({f"{ACTOR}.entropy_coeff": 0.01}, {"values": [0.0] * 4}, False, ["the value loss"]),
        ({f"{ACTOR}.entropy_coeff": 0.01}, {"values": [0.0] * 4, "response_mask": [False] * 4}, True, []),
    ],
)
def test_other_losses_train_tokens_with_their_coefficient(
    settings: dict[str, Any], columns: dict[str, list[Any]], updates_actor: bool, expected: list[str], tmp_path: Path
) -> None:
    batch = batch_of([0.0] * 4, **columns)
    assert other_losses(batch, config_of(tmp_path, settings), updates_actor) == expected


EQUAL = {"critic/score/min": 0.0, "critic/score/max": 0.0}


def test_one_token_with_a_signal_ends_the_streak(tmp_path: Path) -> None:
    check = IdleCheck(config_of(tmp_path, {"trainer.max_idle_steps": 2}))
    idle, busy = batch_of([0.0] * 4), batch_of([0.0, 0.0, 1e-6, 0.0])
    assert check.check(1, idle, EQUAL) == {"actor/signal_share": 0.0, "train/idle_steps": 1.0}
    assert check.check(2, busy, EQUAL) == {"actor/signal_share": 0.25, "train/idle_steps": 0.0}
    assert check.check(3, idle, EQUAL)["train/idle_steps"] == 1
    assert not check.is_over
    check.finish(3)
    check.check(4, idle, EQUAL)
    assert check.is_over
    with pytest.raises(IdleError, match=r"nothing was trained in 2 steps in a row up to step 4, because all scores"):
        check.finish(4)


def test_a_resumed_check_continues_its_streak(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    first, resumed, earlier_version = (IdleCheck(config) for _ in range(3))
    first.check(1, batch_of([1.0, 0.0]), {"critic/score/min": 0.0, "critic/score/max": 1.0})
    for step in (2, 3):
        first.check(step, batch_of([0.0] * 2), {"critic/score/min": 1.0, "critic/score/max": 1.0})
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    earlier_version.load_state_dict({})
    assert resumed.check(4, batch_of([0.0] * 2), EQUAL)["train/idle_steps"] == 3
    assert earlier_version.check(4, batch_of([0.0] * 2), EQUAL)["train/idle_steps"] == 1


def test_warm_up_of_a_critic_is_not_idle(tmp_path: Path) -> None:
    settings = {"algorithm.adv_estimator": "gae", "trainer.critic_warmup": 1, "trainer.max_idle_steps": 1}
    check = IdleCheck(config_of(tmp_path, settings))
    masked = batch_of([0.0] * 2, values=[0.0] * 2, response_mask=[False] * 2)
    assert check.check(1, batch_of([0.0] * 2, values=[0.0] * 2), EQUAL)["train/idle_steps"] == 0
    assert check.check(2, masked, {})["train/idle_steps"] == 1


def test_a_step_with_a_gradient_is_not_idle(tmp_path: Path) -> None:
    """As with the load-balancing loss of a mixture of experts, of which the trainer knows no coefficient."""
    check = IdleCheck(config_of(tmp_path))
    assert check.check(1, batch_of([0.0] * 2), EQUAL | {"actor/grad_norm": 1e-9})["train/idle_steps"] == 0
    assert check.check(2, batch_of([0.0] * 2), EQUAL | {"actor/grad_norm": 0.0})["train/idle_steps"] == 1


def test_a_cause_is_reported_once_after_three_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check = IdleCheck(config_of(tmp_path, {f"{ACTOR}.entropy_coeff": 0.01}))
    caplog.clear()
    for step in range(1, 3):
        check.check(step, batch_of([0.0] * 2), EQUAL)
    assert not caplog.records
    for step in range(3, 9):
        check.check(step, batch_of([0.0] * 2), {"critic/score/min": step / 10, "critic/score/max": step / 10})
    (record,) = caplog.records
    assert "step 3: the last 3 steps gave the policy no signal, because all scores are equal (0.3)" in record.message
    assert record.message.endswith("Only the entropy bonus trained in this step")
    assert record.levelno == logging.WARNING


@pytest.mark.parametrize(
    ("steps", "is_solved"),
    [
        ([(0.2, 1.0), (1.0, 1.0), (1.0, 1.0)], True),
        ([(1.0, 1.0), (1.0, 1.0)], False),  # no lower score shows that the reward can differ
        ([(0.2, 1.0), (0.9, 0.9), (1.0, 1.0)], False),  # the score depends on the prompt
        ([(0.2, 1.0), (0.9, 0.9), (0.9, 0.9)], False),
        ([(-0.5, -0.1), (0.0, 0.0), (0.0, 0.0)], False),  # only penalties were avoided
    ],
)
def test_only_the_highest_score_of_a_run_solves_it(
    steps: list[tuple[float, float]], is_solved: bool, tmp_path: Path
) -> None:
    check = IdleCheck(config_of(tmp_path, {"trainer.max_idle_steps": 2}))
    for step, (lowest, highest) in enumerate(steps, start=1):
        advantages = [lowest - highest, 0.0]
        check.check(step, batch_of(advantages), {"critic/score/min": lowest, "critic/score/max": highest})
    assert check.is_over
    if is_solved:
        check.finish(len(steps))
    else:
        with pytest.raises(IdleError):
            check.finish(len(steps))


# -- runs -----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_idle.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_idle", raising=False)


def reward(folder: Path, name: str) -> dict[str, Any]:
    (folder / "reward.py").write_text(REWARDS[name])
    return {"custom_reward_function.path": folder / "reward.py", "custom_reward_function.name": "score"}


VOCABULARY = "[" + ",".join(map(str, range(200))) + "]"
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "equal scores": ("zero", {}, r"all scores are equal \(0 in all steps\)"),
    "equal groups": ("by_prompt", {}, "the responses to each prompt have equal scores"),
    "single responses": (
        "by_response",
        {"algorithm.adv_estimator": "own_idle:centered", "actor_rollout_ref.rollout.n": 1},
        r"each prompt has a single response, which algorithm.adv_estimator=own_idle:centered.*Increase .*rollout.n",
    ),
    "estimator": (
        "by_response",
        {"algorithm.adv_estimator": "own_idle:nothing"},
        "adv_estimator=own_idle:nothing returns advantages of 0, although the scores differ",
    ),
    "masked": (
        "by_response",
        {f"{CORRECTION}.rollout_rs": "token_k1", f"{CORRECTION}.rollout_rs_threshold": "'2.0-3.0'"},
        "rollout correction rejects 100% of the tokens.*rollout_rs_threshold",
    ),
    "empty": (
        "zero",
        {"actor_rollout_ref.rollout.stop_token_ids": VOCABULARY},
        r"the responses are empty \(1 tokens on average\), with scores up to 0",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_cannot_learn_ends_with_the_cause(case: str, tmp_path: Path) -> None:
    name, settings, message = CASES[case]
    with pytest.raises(IdleError, match=rf"nothing was trained in 4 steps in a row up to step 4, because .*{message}"):
        run_ppo(tmp_path, {**SETTINGS, **reward(tmp_path, name), **settings}, steps=9)
    saved = CheckpointManager(tmp_path / "run").latest()
    assert saved is not None
    assert saved.step == 4


def test_an_idle_run_ends_with_status_1_and_resumes(tmp_path: Path) -> None:
    settings = {**SETTINGS, **reward(tmp_path, "zero"), "trainer.logger": "[jsonl]", "trainer.total_training_steps": 6}
    run = camshaft("ppo", *ppo_args(tmp_path, settings))
    assert run.status == 1
    assert "IdleError: nothing was trained in 4 steps in a row up to step 4, because all scores are equal" in run.err
    assert "step 3: the last 3 steps gave the policy no signal" in run.out
    run = camshaft("ppo", *ppo_args(tmp_path, settings))
    assert run.status == 0, "a resumed run counts again, and has two more steps"
    folder = RunFolder(tmp_path / "run")
    folder.metrics.poll()
    assert folder.metrics.series("train/idle_steps") == ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 1, 2])
    assert folder.metrics.series("actor/grad_norm")[1] == [0.0] * 6


def test_a_solved_run_ends_with_status_0(tmp_path: Path) -> None:
    settings = {**SETTINGS, **reward(tmp_path, "solved"), "trainer.total_training_steps": 9}
    run = camshaft("ppo", *ppo_args(tmp_path, settings))
    assert run.status == 0, run.err
    assert "the run ends after step 5, because every response has the highest score of the run, 1" in run.out
    saved = CheckpointManager(tmp_path / "run").latest()
    assert saved is not None
    assert saved.step == 5


@pytest.mark.parametrize(
    "settings",
    [
        {"trainer.max_idle_steps": "null"},
        {f"{ACTOR}.entropy_coeff": 1e-3},
        pytest.param({f"{ACTOR}.use_kl_loss": True}, marks=pytest.mark.slow),
        pytest.param({f"{ACTOR}.policy_loss.loss_mode": "own_idle:with_a_bonus"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_trains_or_has_no_limit_goes_on(settings: dict[str, Any], tmp_path: Path) -> None:
    steps = run_ppo(tmp_path, {**SETTINGS, **reward(tmp_path, "zero"), **settings}, steps=6)
    assert len(steps) == 6
    assert [step.metrics["actor/signal_share"] for step in steps] == [0.0] * 6


# -- equal advantages -----------------------------------------------------------------------------

CONSTANT_METRICS = {
    "critic/advantages/min": -1.0,
    "critic/advantages/max": -1.0,
    "critic/score/min": 0.0,
    "critic/score/max": 1.0,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"critic/advantages/max": 1.0},
        {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0},
        {"critic/score/max": 0.0},
    ],
)
def test_advantages_that_differ_or_equal_scores_need_no_explanation(changes: dict[str, float]) -> None:
    assert explain_equal_advantages(CONSTANT_METRICS | changes, "my:one") is None
    text = explain_equal_advantages(CONSTANT_METRICS, "my:one")
    assert text is not None
    assert "all advantages are -1, although the scores differ" in text
    assert "adv_estimator=my:one, or increase actor_rollout_ref.rollout.n" in text


def test_a_run_with_equal_advantages_warns_once(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "constant_estimator.py").write_text(CONSTANT)
    monkeypatch.syspath_prepend(tmp_path)
    run_ppo(home, {"algorithm.adv_estimator": "constant_estimator:constant", "actor_rollout_ref.rollout.n": 2}, steps=2)
    warned = [record.message for record in caplog.records if "all advantages are -1" in record.message]
    assert len(warned) == 1
    assert warned[0].startswith("step 1: ")
