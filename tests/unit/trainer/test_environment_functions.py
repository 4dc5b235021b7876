"""Reward functions with a parameter `environments`, which the process of the environment calls for each episode."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_endpoint import CLIENT
from support.ppo_runs import run_ppo

from camshaft.agents.environment import Start
from camshaft.agents.messages import Source, Spec
from camshaft.agents.pool import EnvironmentPool
from camshaft.cli import main
from camshaft.errors import RewardError, RolloutError
from camshaft.models.tiny import make_tiny_model
from camshaft.rewards.arguments import Arguments
from camshaft.rewards.messages import FunctionSpec, Sample
from camshaft.rewards.messages import Spec as RewardSpec
from camshaft.tracking.run_folder import read_samples

ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
CUSTOM = "custom_reward_function"
GAME = """
class Game:
    def reset(self, row_seed):
        self.secret, self.turn = row_seed % 5, 0
        return " Guess."

    def step(self, answer):
        self.turn += 1
        return f"told {self.secret}", 0.5, self.turn == 2
"""
FUNCTIONS = """
import asyncio, os, time


def secret(environments, prompts, completions, ground_truth, **columns):
    '''The form of TRL.'''
    (game,), (prompt,), (completion,), (truth,) = environments, prompts, completions, ground_truth
    assert prompt[-1]["role"] == "user" and completion[-1]["role"] == "assistant" and truth
    return [float(game.secret)]


def turns(response, environments, messages, turns, stop_reason):
    '''The form of a function for one response.'''
    assert messages[-2]["content"] == response and stop_reason == "done"
    return {"score": 10.0 * environments[0].turn, "same": environments[0].turn == turns}


async def later(environments):
    await asyncio.sleep(0)
    return [100.0 * len(environments)]


def plain(response):
    return 1000.0


def raises(environments):
    if environments[0].secret % 2:
        raise ValueError(f"no score for {environments[0].secret}")
    return [1.0]


def crashes(environments):
    if environments[0].secret == 1:
        os._exit(7)
    return [1.0]


def hangs(environments):
    if environments[0].secret == 1:
        time.sleep(600)
    return [1.0]


def two(environments):
    return [1.0, 2.0]
"""


def settings(folder: Path, *functions: str) -> dict[str, Any]:
    (folder / "game.py").write_text(GAME)
    file = folder / "functions.py"
    file.write_text(FUNCTIONS)
    return {
        f"{TURNS}.environment": f"{folder}/game.py:Game",
        f"{TURNS}.max_turn_length": 4,
        f"{TURNS}.num_workers": 1,
        f"{ROLLOUT}.n": 2,
        f"{CUSTOM}.path": "null",
        f"{CUSTOM}.functions": json.dumps([f"{file}:{name}" for name in functions]),
        "algorithm.adv_estimator": "grpo",
        "data.max_prompt_length": 48,
        "data.max_response_length": 64,
    }


def secrets(transcripts: Sequence[list[dict[str, Any]]]) -> list[int]:
    """Return what the environments have told."""
    return [int(messages[-1]["content"].removeprefix("told ")) for messages in transcripts]


def test_functions_add_to_the_reward_of_the_environment(home: Path, tmp_path: Path) -> None:
    (step,) = run_ppo(home, settings(tmp_path, "secret", "turns", "later", "plain"), steps=1)
    told = secrets(step.batch["transcript"])
    assert len(set(told)) > 2
    mean = sum(told) / len(told)
    metrics = step.metrics
    assert metrics["critic/score/mean"] == pytest.approx(1121 + mean)
    assert metrics["reward/secret/mean"] == pytest.approx(mean)
    assert metrics["reward/secret/max"] == max(told)
    assert metrics["reward/turns/mean"] == 20
    assert metrics["reward/turns/same/mean"] == 1
    assert (metrics["reward/later/mean"], metrics["reward/plain/mean"], metrics["reward/environment/mean"]) == (
        100,
        1000,
        1,
    )


@pytest.mark.parametrize("on_error", ["zero", "drop", "raise"])
def test_a_failed_function_follows_on_error(home: Path, tmp_path: Path, on_error: str) -> None:
    keys = {**settings(tmp_path, "raises", "plain"), f"{CUSTOM}.on_error": on_error}
    if on_error == "raise":
        with pytest.raises(RewardError, match="no score for"):
            run_ppo(home, keys, steps=1)
        return
    (step,) = run_ppo(home, keys, steps=1)
    odd = torch.tensor(secrets(step.batch["transcript"])) % 2 == 1
    assert 0 < int(odd.sum()) < len(odd)
    assert step.metrics["reward/errors"] == step.metrics["reward/raises/failed"] == int(odd.sum())
    scores = torch.where(odd, 1001.0, 1002.0)
    expected = scores.mean() if on_error == "zero" else scores[~odd].mean()
    assert step.metrics["critic/score/mean"] == pytest.approx(float(expected))


@pytest.mark.parametrize(("name", "kind"), [("raises", "error"), ("crashes", "crash"), ("hangs", "timeout")])
def test_a_failure_costs_only_its_call(tmp_path: Path, name: str, kind: str) -> None:
    settings(tmp_path)
    file = str(tmp_path / "functions.py")
    rewards = RewardSpec((FunctionSpec(file, name), FunctionSpec(file, "later")), 2.0, [], 1e6, has_environments=True)
    spec = Spec((Source("Game", f"{tmp_path}/game.py:Game"),), {}, 60.0, 120.0, [], rewards=rewards)
    pool = EnvironmentPool(spec, 1, tmp_path / "output.log")
    try:
        pool.reset({number: Start({}, row_seed=number) for number in range(3)})
        pool.step(dict.fromkeys(range(3), "5"))
        outcomes = pool.judge(dict.fromkeys(range(3), Sample("s", "5", None, {})))
        pool.step(dict.fromkeys(range(3), "6"))  # the episodes go on
        pool.end(range(3))
    finally:
        pool.close()
    assert [row[0].kind for row in outcomes.values()] == ["ok", kind, "ok"]
    assert [row[0].score for row in (outcomes[0], outcomes[2])] == [1.0, 1.0]
    assert [row[1].score for row in outcomes.values()] == [100.0] * 3
    assert kind != "error" or "no score for 1" in outcomes[1][0].message


def test_a_function_that_needs_the_group_is_refused(home: Path, tmp_path: Path) -> None:
    single = {f"{CUSTOM}.functions": "[]", f"{CUSTOM}.path": tmp_path / "functions.py", f"{CUSTOM}.name": "secret"}
    with pytest.raises(RewardError, match=r"functions.py:secret.* cannot be called.*once for each episode"):
        run_ppo(home, {**settings(tmp_path), **single, f"{CUSTOM}.batched": True}, steps=1)
    with pytest.raises(RewardError, match="2 results for 1 sample"):
        run_ppo(home, settings(tmp_path, "two"), steps=1)


def test_a_program_has_no_environments(home: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(CLIENT + "def solve(base_url, api_key, prompt): return len(ask(prompt))")
    keys = {
        **settings(tmp_path, "later"),
        f"{TURNS}.environment": "null",
        f"{TURNS}.agent": f"{tmp_path}/agent.py:solve",
    }
    with pytest.raises(RolloutError, match=r"functions.py:later has a parameter 'environments', but the program"):
        run_ppo(home, {name: value for name, value in keys.items() if not name.endswith("num_workers")}, steps=1)


def test_without_environments_the_parameter_is_a_column() -> None:
    def function(completions: Any, environments: Any) -> Any: ...

    arguments = Arguments.of(function, None, {})
    assert (arguments.takes_environments, arguments.required) == (False, ("environments",))
    arguments = Arguments.of(function, None, {}, has_environments=True)
    assert (arguments.takes_environments, arguments.required, arguments.columns) == (True, (), ("prompt",))


def test_a_batched_function_names_columns_as_in_the_file() -> None:
    def function(completions: Any, ground_truth: Any) -> Any: ...

    arguments = Arguments.of(function, None, {})
    assert arguments.required == ()
    sample = Sample("s", "text", "truth", {}, {"prompt": "p"})
    assert arguments.batch([sample]) == {"completions": ["text"], "ground_truth": ["truth"]}


@pytest.mark.slow
def test_generate_calls_functions_with_environments(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", hidden=32)
    data, out = tmp_path / "prompts.jsonl", tmp_path / "out.parquet"
    data.write_text("".join(json.dumps({"prompt": "Play", "ground_truth": str(i)}) + "\n" for i in range(2)))
    settings(tmp_path)
    words = [f"data={data}", f"model={model}", f"out={out}", "n=2", "response_length=64", "trainer.device=cpu"]
    words += [f"environment={tmp_path}/game.py:Game", f"reward={tmp_path}/functions.py:later"]
    assert main(["generate", *words, "rollout.multi_turn.max_turn_length=4"]) == 0
    assert read_samples(out)["responses_score"].to_pylist() == [[101.0] * 2] * 2
