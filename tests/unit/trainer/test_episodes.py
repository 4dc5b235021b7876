"""Runs in which the policy plays episodes with an environment."""

import json
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ppo_runs import ppo_args, ppo_config, run_ppo
from support.python_runs import SMALL
from transformers import AutoModelForCausalLM

import camshaft
from camshaft.agents.bridge import Bridge
from camshaft.agents.messages import Source, Spec
from camshaft.agents.play import Limits
from camshaft.agents.pool import EnvironmentPool
from camshaft.agents.setup import open_environments
from camshaft.cli import main
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import ConfigError, RewardError, RolloutError
from camshaft.models.loader import load_tokenizer
from camshaft.models.tiny import make_tiny_model
from camshaft.roles.episodes import EnvironmentPlayer, EpisodePlayer, limits_of
from camshaft.rollout import SamplingParams, build_rollout
from camshaft.tracking.run_folder import RunFolder, read_samples
from camshaft.view.data import responses
from camshaft.view.text import show_step

ROLLOUT, TURNS = "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.multi_turn"
PROGRAM = """
import random


class Game:
    def __init__(self, level=1):
        self.level = level

    def reset(self, ground_truth, seed, row_seed):
        self.turn, self.truth = 0, ground_truth
        self.numbers = [str(seed), str(row_seed), str(random.random())]
        FAULT
        return " " + self.numbers[0]

    def step(self, answer):
        self.turn += 1
        return self.numbers[self.turn - 1], float(len(answer) % 3), self.turn == 2
"""
EPISODES: dict[str, Any] = {
    f"{ROLLOUT}.n": 2,
    f"{TURNS}.max_turn_length": 6,
    f"{TURNS}.num_workers": 2,
    "algorithm.adv_estimator": "grpo",
    "custom_reward_function.path": "null",
    "data.max_prompt_length": 48,
    "data.max_response_length": 64,
}


def game(folder: Path, fault: str = "") -> dict[str, Any]:
    """Return the settings of a run that plays the game, which may fail in `reset`."""
    file = folder / "game.py"
    file.write_text(PROGRAM.replace("FAULT", fault))
    return {**EPISODES, f"{TURNS}.environment": f"{file}:Game"}


def test_an_episode_is_trained_as_one_row(home: Path, tmp_path: Path) -> None:
    steps = run_ppo(home, game(tmp_path), steps=2)
    for step in steps:
        batch, metrics = step.batch, step.metrics
        mask = batch.ragged("response_mask")
        assert (metrics["agent/turns"], metrics["agent/stop/done"]) == (2, 1)
        assert metrics["agent/tokens_not_sampled"] == float((~mask.values).sum()) > 0
        assert metrics["agent/tool_errors"] == 0
        assert metrics["rollout/log_prob_diff_max"] < 1e-4  # the trainer's log-probs of the row are those of sampling
        scores = batch.ragged("env_scores")
        assert not scores.values[~mask.values].any()
        assert metrics["critic/score/mean"] == pytest.approx(float(scores.sum().mean()))
        assert metrics["reward/environment/mean"] == pytest.approx(float(scores.sum().mean()))
    assert any(not torch.equal(steps[0].actor[name], weight) for name, weight in steps[1].actor.items())


def test_seeds_of_environments_belong_to_prompts_and_rows(home: Path, tmp_path: Path) -> None:
    steps = run_ppo(home, game(tmp_path), steps=2)
    seeds: dict[str, set[tuple[int, str]]] = {}
    row_seeds: list[str] = []
    for number, step in enumerate(steps):
        for uid, messages in zip(step.batch["uid"], step.batch["transcript"], strict=True):
            told = [message["content"] for message in messages if message["role"] == "user"]
            seeds.setdefault(told[1], set()).add((number, uid))
            row_seeds.append(told[2])
            assert told[0].endswith(told[1])  # of reset
    assert all(len(places) == 1 for places in seeds.values())
    assert len(seeds) == 2 * 8
    assert len(set(row_seeds)) == len(row_seeds)
    assert all(0 <= int(seed) < 2**31 for seed in (*seeds, *row_seeds))


def test_a_failed_environment_is_not_trained_on(home: Path, tmp_path: Path) -> None:
    fault = "if int(ground_truth) % 2: raise RuntimeError('no server')"
    (step,) = run_ppo(home, {**game(tmp_path, fault), "custom_reward_function.on_error": "zero"}, steps=1)
    failed = torch.tensor([reason == "error" for reason in step.batch["stop_reason"]])
    odd = torch.tensor([int(truth) % 2 == 1 for truth in step.batch["ground_truth"]])
    assert failed.any()
    assert torch.equal(failed, odd)
    assert not step.batch.ragged("response_mask").sum()[failed].any()
    kept = step.batch.ragged("env_scores").sum()[~failed]
    assert step.metrics["critic/score/mean"] == pytest.approx(float(kept.mean()))
    assert step.metrics["agent/stop/error"] == pytest.approx(float(failed.float().mean()))
    assert step.metrics["agent/tool_errors"] == 2 * int(failed.sum())  # each is repeated once


def test_failed_episodes_are_left_out_of_validation(home: Path, tmp_path: Path) -> None:
    fault = "if int(ground_truth) % 2 and int(seed) % 3: raise RuntimeError('no server')"
    reward = tmp_path / "reward.py"
    reward.write_text("def score(response, messages):\n    assert messages[-1]['role'] == 'user'\n    return 10.0\n")
    settings = {
        "custom_reward_function.path": reward,
        "custom_reward_function.name": "score",
        "custom_reward_function.on_error": "zero",
        "actor_rollout_ref.rollout.val_kwargs.n": 2,
        "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
        "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
        "trainer.val_before_train": True,
        "trainer.validation_data_dir": tmp_path / "validation",
    }
    metrics = run_ppo(home, {**game(tmp_path, fault), **settings}, steps=1)[0].metrics
    rows = [json.loads(line) for line in (tmp_path / "validation/step_0.jsonl").read_text().splitlines()]
    scores = [row["score"] for row in rows if row["score"] is not None]
    assert 0 < len(scores) < len(rows)
    assert min(scores) >= 10  # a failed episode is not scored by the reward function either
    assert metrics["val/reward/mean"] == pytest.approx(sum(scores) / len(scores))
    assert metrics["val-aux/agent/unplayed"] == len(rows) - len(scores)
    assert metrics["val-aux/reward/errors"] == 0
    (mean,) = (value for name, value in metrics.items() if name.endswith("reward/mean@2"))
    assert mean >= 10


def test_a_step_without_a_played_episode_is_an_error(home: Path, tmp_path: Path) -> None:
    settings = {**game(tmp_path, "raise RuntimeError('no server')"), "custom_reward_function.on_error": "zero"}
    with pytest.raises(RewardError, match=r"the environment failed for all 16 responses[^$]*no server"):
        run_ppo(home, settings, steps=1)
    with pytest.raises(RewardError, match=r"no episode of the validation has a score[^$]*no server"):
        run_ppo(home, {**settings, "trainer.val_before_train": True}, steps=1)


def test_a_failed_environment_can_stop_the_run(home: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="no server"):
        run_ppo(home, game(tmp_path, "raise RuntimeError('no server')"), steps=1)


def test_reward_functions_read_the_episode(home: Path, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        textwrap.dedent(
            """
            def score(response, messages, turns, stop_reason, ground_truth):
                answers = [message["content"] for message in messages if message["role"] == "assistant"]
                assert answers[-1] == response and len(answers) == turns and stop_reason == "done"
                return {"score": 10.0, "messages": len(messages)}
            """
        )
    )
    settings = {"custom_reward_function.path": reward, "custom_reward_function.name": "score"}
    (step,) = run_ppo(home, {**game(tmp_path), **settings}, steps=1)
    assert step.metrics["critic/score/mean"] == pytest.approx(10 + step.metrics["reward/environment/mean"])
    assert step.metrics["reward/messages/mean"] == 5  # question, answer, text, answer, last text


@pytest.mark.parametrize("estimator", ["turn_return", "gae", "remax", "rloo"])
def test_estimators_learn_from_episodes(home: Path, tmp_path: Path, estimator: str) -> None:
    settings = {**game(tmp_path), "algorithm.adv_estimator": estimator}
    (step,) = run_ppo(home, settings, steps=1)
    assert step.metrics["actor/grad_norm"] > 0


def test_a_run_without_an_environment_enters_no_code_of_agents(home: Path) -> None:
    entered: set[str] = set()

    def profile(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and "/camshaft/agents/" in code.co_filename and code.co_name != "<module>":
            entered.add(f"{code.co_filename}:{code.co_name}")

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        run_ppo(home, steps=1)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert not entered


def test_a_missing_column_is_an_error_at_the_start(home: Path, tmp_path: Path) -> None:
    settings = game(tmp_path)
    file = tmp_path / "game.py"
    file.write_text(file.read_text().replace("seed, row_seed", "seed, row_seed, level"))
    with pytest.raises(RolloutError, match="no column 'level'"):
        run_ppo(home, settings, steps=1)


def test_an_unknown_format_of_calls_is_an_error_without_tools(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="my_format"):
        run_ppo(home, {**game(tmp_path), f"{TURNS}.format": "my_format"}, steps=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({f"{TURNS}.environment": "missing.py:Game"}, "file not found"),
        ({f"{ROLLOUT}.enable_return_routed_experts": True}, "several generations"),
        ({f"{ROLLOUT}.ignore_eos": True}, "length limit"),
        ({f"{TURNS}.history": "template"}, "one episode several rows, are not implemented"),
        ({f"{TURNS}.enable": True}, "a class with the methods reset and step"),
        ({"data.return_raw_input_ids": True}, "chat template"),
    ],
)
def test_what_does_not_work_is_named(home: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ppo_config(home, {**game(tmp_path), **settings})


LIMITS: dict[str, tuple[Any, str]] = {
    "max_assistant_turns": (3, "max_turns"),
    "max_turn_length": (5, "max_turn_length"),
    "max_tool_response_length": (7, "max_text"),
    "tool_response_truncate_side": ("left", "truncate_side"),
    "episode_timeout": (9.5, "timeout"),
}


@pytest.mark.parametrize("key", LIMITS)
def test_key_reaches_the_limits(home: Path, tmp_path: Path, key: str) -> None:
    value, name = LIMITS[key]
    rollout = ppo_config(home, {**game(tmp_path), f"{TURNS}.{key}": value}).actor_rollout_ref.rollout
    limits = vars(limits_of(rollout, rollout.multi_turn))
    assert limits[name] == value
    assert (limits["max_prompt"], limits["max_response"]) == (48, 64)


def test_keys_reach_the_environments(home: Path, tmp_path: Path) -> None:
    keys = {"environment_kwargs.level": 3, "timeout": 7.5, "start_timeout": 99.0, "num_workers": 3}
    config = ppo_config(home, {**game(tmp_path), **{f"+{TURNS}.{key}": value for key, value in keys.items()}})
    spec, _ = open_environments(config.actor_rollout_ref.rollout.multi_turn, ())
    assert isinstance(spec, Spec)
    assert (spec.kwargs, spec.timeout, spec.start_timeout) == ({"level": 3}, 7.5, 99.0)
    pool = EpisodePlayer.of(config, spec, None).pool
    assert isinstance(pool, EnvironmentPool)
    assert pool.num_workers == 3


@pytest.mark.parametrize("schedule", ["waves", "stream"])
def test_schedule_reaches_the_player(home: Path, tmp_path: Path, schedule: str) -> None:
    config = ppo_config(home, {**game(tmp_path), f"+{TURNS}.schedule": schedule})
    spec, _ = open_environments(config.actor_rollout_ref.rollout.multi_turn, ())
    player = EpisodePlayer.of(config, spec, None)
    assert isinstance(player, EnvironmentPlayer)
    assert player.schedule == schedule


def test_padding_rows_are_not_played(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", hidden=32)
    log = tmp_path / "log"
    file = tmp_path / "game.py"
    file.write_text(PROGRAM.replace("FAULT", f"open('{log}', 'a').write('reset ')"))
    tokenizer: Any = load_tokenizer(str(folder))
    pool = EnvironmentPool(Spec((Source("Game", f"{file}:Game"),), {}, 60.0, 120.0, []), 1)
    player = EnvironmentPlayer(pool, Bridge(tokenizer), Limits(max_prompt=32, max_response=64, max_turn_length=4))
    rollout = build_rollout("torch", RolloutEngineConfig(model_path=str(folder), max_model_len=96))
    rollout.load_weights(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    rows = DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([[5, 6]] * 3, torch.int64),
            "sampling_seed": torch.tensor([1, 2, 1]),
            "environment_seed": torch.tensor([1, 1, 1]),
            "raw_prompt": [[{"role": "user", "content": "a"}]] * 3,
            "ground_truth": ["1"] * 3,
            "is_padding": torch.tensor([False, False, True]),
        }
    )
    played = player.play(rollout, rows, SamplingParams(64))
    pool.close()
    assert log.read_text().split() == ["reset"] * 2
    assert played["turns"].tolist() == [2, 2, 0]
    assert played.ragged("response_mask").sum().tolist()[2] == 0


class Echo:
    """Ends after three answers."""

    def reset(self, level: int) -> str:
        self.turn, self.level = 0, level
        return f"{level}."

    def step(self, answer: str) -> tuple[str, float, bool]:
        self.turn += 1
        return answer[:2], float(self.level), self.turn == 3


class Short(Echo):
    def step(self, answer: str) -> tuple[str, float, bool]:
        return "", -1.0, True


def rows_of(environments: list[str]) -> list[dict[str, Any]]:
    return [{"prompt": "Say ", "level": i, "environment": environments[i % len(environments)]} for i in range(8)]


def test_classes_from_python_are_selected_by_the_data(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", hidden=32)
    run = camshaft.train(
        model=model,
        data=rows_of(["Echo", "Short"]),
        environment=[Echo, Short],
        algorithm="grpo",
        steps=1,
        out=tmp_path / "run",
        **{**SMALL, "response_length": 48, f"{TURNS}.max_turn_length": 4},
    )
    assert run.metrics()["agent/turns"] == 2
    assert run.metrics()["critic/score/min"] == -1
    assert run.metrics()["critic/score/max"] == 3 * 6
    assert run.config[f"{TURNS}.environment"] == ["python:Echo", "python:Short"]
    with pytest.raises(ConfigError, match=r"resume\(environment="):
        camshaft.load_run(tmp_path / "run").resume(steps=2)


def test_episodes_are_stored_and_shown_as_conversations(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", hidden=32)
    settings = {**SMALL, "response_length": 48, f"{TURNS}.max_turn_length": 4}
    run = camshaft.train(
        model=model,
        data=rows_of(["Echo"]),
        environment=Echo,
        algorithm="grpo",
        steps=1,
        out=tmp_path / "run",
        **settings,
    )
    rows = run.responses()
    for row in rows:
        messages = json.loads(row["messages"])
        roles = [message["role"] for message in messages]
        assert roles == ["user", "assistant"] * 3 + ["user"]
        rewards = [message["reward"] for message in messages if message["role"] == "assistant"]
        assert sum(rewards) == row["score"]
        assert (row["turns"], row["stop_reason"]) == (3, "done")
        assert row["sampled"] is None or sum(row["sampled"]) < len(row["sampled"]) == row["response_tokens"]
    folder = RunFolder(tmp_path / "run")
    text = show_step(folder, step=1, num_groups=8, width=400)
    told = json.loads(rows[-1]["messages"])[2]["content"]
    assert f"user: {told}" in text
    assert "assistant (7): " in text
    (shown, *_) = responses(folder, 1)["rows"]
    assert shown["messages"][1]["role"] == "assistant"


def test_a_run_that_resumes_plays_the_same_episodes(home: Path, tmp_path: Path) -> None:
    settings = {**game(tmp_path), "trainer.save_freq": 2, "trainer.resume_mode": "auto"}
    whole = run_ppo(home, {**settings, "trainer.default_local_dir": tmp_path / "whole"}, steps=3)
    part = {**settings, "trainer.default_local_dir": tmp_path / "part"}
    run_ppo(home, part, steps=2)
    (last,) = run_ppo(home, part, steps=3)
    assert list(last.batch["transcript"]) == list(whole[-1].batch["transcript"])
    assert all(torch.equal(last.actor[name], weight) for name, weight in whole[-1].actor.items())


KILLING = """
    def step(self, answer):
        import os, signal
        if not os.path.exists("FLAG") and self.turn:
            open("FLAG", "w").close()
            os.kill(int(os.environ["TRAINER"]), signal.SIGKILL)
        self.turn += 1
"""


def test_a_run_killed_in_an_episode_plays_it_again(home: Path, tmp_path: Path) -> None:
    settings = game(tmp_path)
    arguments = ppo_args(home, {**settings, "trainer.save_freq": 1, "trainer.resume_mode": "auto"})
    arguments += ["trainer.total_training_steps=2", "trainer.total_epochs=2"]
    expected = _run(tmp_path, arguments, "whole")
    file, flag = tmp_path / "game.py", tmp_path / "flag"
    killing = KILLING.replace("FLAG", str(flag))
    file.write_text(
        file.read_text().replace("    def step(self, answer):\n        self.turn += 1\n", killing.lstrip("\n"))
    )
    with pytest.raises(AssertionError, match="-9"):
        _run(tmp_path, arguments, "part")
    assert flag.exists()
    assert _run(tmp_path, arguments, "part") == expected


def _run(folder: Path, arguments: list[str], name: str) -> list[dict[str, float]]:
    """Run `camshaft ppo`, and return the metrics that do not depend on the machine."""
    code = "import os, sys; os.environ['TRAINER'] = str(os.getpid()); from camshaft.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "ppo", *arguments, f"trainer.default_local_dir={folder / name}"]
    command.append("trainer.logger=[jsonl]")
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, f"{done.returncode} {done.stderr}"
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    measured = ("timing", "perf/", "agent/tool_seconds")
    return [{key: value for key, value in line.items() if not key.startswith(measured)} for line in lines]


def test_generate_plays_episodes(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", hidden=32)
    data, file = tmp_path / "prompts.jsonl", tmp_path / "game.py"
    data.write_text("".join(json.dumps({"prompt": "Play", "ground_truth": str(i)}) + "\n" for i in range(3)))
    file.write_text(PROGRAM.replace("FAULT", "if ground_truth == '1': raise RuntimeError('no server')"))
    out = tmp_path / "out.parquet"
    settings = [f"data={data}", f"model={model}", f"out={out}", f"environment={file}:Game", "n=2", "batch=2"]
    settings += ["response_length=64", "rollout.multi_turn.max_turn_length=4", "trainer.device=cpu"]
    assert main(["generate", *settings]) == 0
    rows = read_samples(out).to_pylist()
    assert [row["responses_stop_reason"] for row in rows] == [["done"] * 2, ["error"] * 2, ["done"] * 2]
    for row in rows:
        for text, score, messages in zip(
            row["responses"], row["responses_score"], row["responses_messages"], strict=True
        ):
            answers = [message["content"] for message in json.loads(messages) if message["role"] == "assistant"]
            failed = row["ground_truth"] == "1"
            assert score == (None if failed else sum(len(answer) % 3 for answer in answers))
            assert text == ("" if failed else answers[-1])
