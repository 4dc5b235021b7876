"""Runs in which the policy calls tools: methods of an environment, and plain functions."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.ppo_runs import ppo_config, run_ppo
from support.python_runs import SMALL

import camshaft
from camshaft.agents.messages import Spec
from camshaft.agents.setup import open_environments
from camshaft.errors import ConfigError, RolloutError
from camshaft.models.tiny import make_tiny_model

TURNS = "actor_rollout_ref.rollout.multi_turn"
PROGRAM = """
class Counter:
    def reset(self, ground_truth):
        self.reward = 0.0

    def count(self, text: str) -> str:
        '''Count.

        Args:
            text: what is counted
        '''
        if len(text) > 3:
            raise ValueError("too long")
        self.reward += 1
        return str(len(text))


def double(number: int) -> int:
    '''Double.

    Args:
        number: what is doubled
    '''
    return 2 * number
"""
FORMAT = """
from camshaft.agents.calls import Call, Parsed


def parse(text):
    calls = (Call("count", {"text": text[:1]}), Call("count", {"text": "long text"}), Call("double", {"number": 2}))
    return Parsed("", calls if len(text) > 1 else ())
"""


def game(folder: Path) -> dict[str, Any]:
    (folder / "counter.py").write_text(PROGRAM)
    (folder / "form.py").write_text(FORMAT)
    return {
        f"{TURNS}.environment": folder / "counter.py",
        f"{TURNS}.tools": f"[{folder}/counter.py:double]",
        f"{TURNS}.format": f"{folder}/form.py:parse",
        f"{TURNS}.max_turn_length": 6,
        f"{TURNS}.max_assistant_turns": 3,
        f"{TURNS}.num_workers": 1,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 2,
        "custom_reward_function.path": "null",
        "data.max_prompt_length": 48,
        "data.max_response_length": 160,
    }


def test_calls_are_made_told_scored_and_counted(home: Path, tmp_path: Path) -> None:
    (step,) = run_ppo(home, game(tmp_path), steps=1)
    calls = told = 0
    for messages, score in zip(step.batch["transcript"], step.batch.ragged("env_scores").sum().tolist(), strict=True):
        results = [message for message in messages if message["role"] == "tool"]
        made = [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]
        assert [message["name"] for message in results] == made
        assert score == sum(message["content"] == "1" for message in results)
        assert {message["content"] for message in results} <= {"1", "error: ValueError: too long", "4"}
        calls, told = calls + len(made), told + sum(message["content"].startswith("error") for message in results)
    assert calls
    assert (step.metrics["agent/tool_calls"], step.metrics["agent/tool_errors"]) == (calls, told)
    assert step.metrics["rollout/log_prob_diff_max"] < 1e-4


def test_functions_need_a_reward(home: Path, tmp_path: Path) -> None:
    settings = {**game(tmp_path), f"{TURNS}.environment": "null"}
    assert ppo_config(home, settings).needs_function()


def test_arguments_of_environments_are_not_passed_to_functions(home: Path, tmp_path: Path) -> None:
    words = {f"{TURNS}.environment": "null", f"+{TURNS}.environment_kwargs.level": 2}
    section = ppo_config(home, {**game(tmp_path), **words}).actor_rollout_ref.rollout.multi_turn
    spec, loaded = open_environments(section, (), has_other_rewards=True)
    assert isinstance(spec, Spec)
    assert (spec.kwargs, list(loaded.schemas)) == ({}, [""])


def test_errors_name_the_tools_that_are_set(home: Path, tmp_path: Path) -> None:
    settings = {**game(tmp_path), f"{TURNS}.environment": "null", "actor_rollout_ref.rollout.ignore_eos": True}
    with pytest.raises(ConfigError, match=f"each answer of {TURNS}.tools end"):
        ppo_config(home, settings)


def test_several_functions_of_a_file_are_one_value(home: Path, tmp_path: Path) -> None:
    file = f"{tmp_path}/counter.py"
    config = ppo_config(home, {**game(tmp_path), f"{TURNS}.tools": f"{file}:double,triple"})
    selected = config.actor_rollout_ref.rollout.multi_turn.selected_tools()
    assert selected == (("double", f"{file}:double"), ("triple", f"{file}:triple"))


@pytest.mark.parametrize(
    ("tools", "message"),
    [("missing.py:f", "file not found"), ("counter.py", "names no function")],
)
def test_wrong_tools_are_named(home: Path, tmp_path: Path, tools: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ppo_config(home, {**game(tmp_path), f"{TURNS}.tools": tools})


def answers(response: str, messages: list[dict[str, Any]]) -> float:
    return float(sum(int(message["content"]) for message in messages if message["role"] == "tool"))


def test_functions_from_python_are_tools(tmp_path: Path) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one
            b: the other
        """
        return a + b

    form = tmp_path / "form.py"
    form.write_text(
        "from camshaft.agents.calls import Call, Parsed\n\n"
        'def parse(text):\n    return Parsed("", (Call("add", {"a": len(text), "b": 1}),))\n'
    )
    settings = {**SMALL, "response_length": 48, f"{TURNS}.max_turn_length": 4, f"{TURNS}.format": f"{form}:parse"}
    run = camshaft.train(
        model=make_tiny_model(tmp_path / "tiny", hidden=32),
        data=[{"prompt": "Say ", "tools": ["add"]}] * 8,
        tools=[add],
        reward=answers,
        algorithm="grpo",
        max_turns=2,
        steps=1,
        out=tmp_path / "run",
        **settings,
    )
    rows = [json.loads(row["messages"]) for row in run.responses()]
    for row, messages in zip(run.responses(), rows, strict=True):
        results = [int(message["content"]) for message in messages if message["role"] == "tool"]
        assert len(results) == 2
        assert row["score"] == sum(results) > 0
    with pytest.raises(RolloutError, match="contains 'subtract'; the tools are add"):
        camshaft.train(
            model=tmp_path / "tiny",
            data=[{"prompt": "Say ", "tools": ["subtract"]}] * 8,
            tools=[add],
            reward=answers,
            algorithm="grpo",
            steps=1,
            out=tmp_path / "other",
            **settings,
        )
