"""Runs in which a program plays the episodes."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_endpoint import CLIENT
from support.ppo_runs import ppo_config, run_ppo
from support.python_runs import SMALL

import camshaft
from camshaft.agents.setup import open_environments
from camshaft.cli import main
from camshaft.dataproto import DataProto
from camshaft.errors import ConfigError
from camshaft.models.tiny import make_tiny_model
from camshaft.roles.episodes import EpisodePlayer, ProgramPlayer
from camshaft.tracking.run_folder import read_samples
from camshaft.tracking.samples import conversations

ROLLOUT, TURNS = "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.multi_turn"
EPISODES: dict[str, Any] = {
    f"{ROLLOUT}.n": 2,
    f"{TURNS}.max_turn_length": 6,
    "algorithm.adv_estimator": "grpo",
    "custom_reward_function.path": "null",
    "data.max_prompt_length": 48,
    "data.max_response_length": 64,
}
GAME = """
class Game:
    def reset(self, ground_truth, seed, row_seed):
        self.turn, self.numbers = 0, [str(seed), str(row_seed)]
        return " " + ground_truth

    def step(self, answer):
        self.turn += 1
        return self.numbers[self.turn - 1], float(len(answer) % 3) * (self.turn == 2), self.turn == 2
"""
PROGRAM = """
def solve(base_url, api_key, prompt, ground_truth, seed, row_seed):
    messages = [*prompt[:-1], {"role": "user", "content": f"{prompt[-1]['content']} {ground_truth}"}]
    ask(messages)
    messages.append({"role": "user", "content": str(seed)})
    answer = ask(messages)
    FAULT
    return float(len(answer) % 3)
"""
SEQUENCES = ("prompts", "responses", "response_mask", "env_scores")
ROUNDING = 8 * 2**-21
"""Log-probs above -8 have a spacing of at most 2**-21. What is generated at the same time changes their rounding."""


def program(folder: Path, fault: str = "", text: str = PROGRAM) -> dict[str, Any]:
    """Return the settings of a run in which a program plays."""
    file = folder / "agent.py"
    file.write_text(CLIENT + text.replace("FAULT", fault))
    return {**EPISODES, f"{TURNS}.agent": f"{file}:solve"}


def game(folder: Path) -> dict[str, Any]:
    file = folder / "game.py"
    file.write_text(GAME)
    return {**EPISODES, f"{TURNS}.environment": f"{file}:Game"}


def assert_equal_episodes(batch: DataProto, other: DataProto) -> None:
    for name in SEQUENCES:
        assert torch.equal(batch.ragged(name).lengths, other.ragged(name).lengths), name
        assert torch.equal(batch.ragged(name).values, other.ragged(name).values), name
    difference = batch.ragged("rollout_log_probs").values - other.ragged("rollout_log_probs").values
    assert difference.abs().max() <= ROUNDING
    assert list(batch["stop_reason"]) == list(other["stop_reason"])
    assert batch["turns"].tolist() == other["turns"].tolist()


def test_a_program_and_a_class_train_equally(home: Path, tmp_path: Path) -> None:
    (by_class,) = run_ppo(home, game(tmp_path), steps=1)
    (by_program,) = run_ppo(home, program(tmp_path), steps=1)
    assert_equal_episodes(by_class.batch, by_program.batch)
    metrics = by_program.metrics
    assert (metrics["agent/stop/done"], metrics["agent/turns"]) == (1, 2)
    assert metrics["agent/other_rows"] == metrics["agent/tool_errors"] == 0
    assert metrics["rollout/log_prob_diff_max"] < 1e-4  # the trainer's log-probs of the row are those of sampling


def test_a_failed_program_is_not_trained_on(home: Path, tmp_path: Path) -> None:
    whole = run_ppo(home, program(tmp_path), steps=1)[0].batch
    fault = "if int(ground_truth) % 2: raise RuntimeError('no server')"
    (step,) = run_ppo(home, {**program(tmp_path, fault), "custom_reward_function.on_error": "zero"}, steps=1)
    failed = torch.tensor([reason == "error" for reason in step.batch["stop_reason"]])
    odd = torch.tensor([int(truth) % 2 == 1 for truth in step.batch["ground_truth"]])
    assert failed.any()
    assert torch.equal(failed, odd)
    rows = torch.arange(len(failed))[~failed]
    assert_equal_episodes(step.batch.reorder(rows), whole.reorder(rows))
    assert step.metrics["agent/tool_errors"] == 2 * int(failed.sum())


def test_sampling_options_of_answers_are_in_the_samples(home: Path, tmp_path: Path) -> None:
    client = CLIENT.replace("def ask(", "def ask_coldly(").replace('"model":', '"temperature": 0.5, "model":')
    text = client + PROGRAM.replace("answer = ask(", "answer = ask_coldly(")
    (step,) = run_ppo(home, {**program(tmp_path, text=text), f"{TURNS}.allow_sampling": True}, steps=1)
    assert list(step.batch["answer_options"]) == [[{}, {"temperature": 0.5}]] * len(step.batch)
    for messages in map(json.loads, conversations(step.batch)):
        assert [message.get("sampling") for message in messages] == [None, None, None, {"temperature": 0.5}]


@pytest.mark.slow
def test_reward_functions_read_the_conversation(home: Path, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        textwrap.dedent(
            """
            def score(response, messages, turns, stop_reason):
                answers = [message["content"] for message in messages if message["role"] == "assistant"]
                assert answers[-1] == response and len(answers) == turns and stop_reason == "done"
                return 10.0
            """
        )
    )
    settings = {"custom_reward_function.path": reward, "custom_reward_function.name": "score"}
    settings |= program(tmp_path, "return None")
    (step,) = run_ppo(home, {**settings, "custom_reward_function.path": reward}, steps=1)
    assert step.metrics["critic/score/mean"] == 10
    assert step.metrics["reward/environment/mean"] == 0


def test_a_function_from_python_trains(tmp_path: Path) -> None:
    def solve(base_url: str, api_key: str, prompt: Any, level: int) -> float:
        import json
        import urllib.request

        data = json.dumps({"model": "policy", "messages": prompt}).encode()
        request = urllib.request.Request(f"{base_url}/chat/completions", data, {"Authorization": f"Bearer {api_key}"})
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)["choices"][0]["message"]["content"]
        return level + len(answer) / 100

    rows = [{"prompt": "Say ", "level": level} for level in range(8)]
    model = make_tiny_model(tmp_path / "tiny", hidden=32)
    run = camshaft.train(model=model, data=rows, agent=solve, algorithm="grpo", steps=1, out=tmp_path / "run", **SMALL)
    assert 7 < run.metrics()["critic/score/max"] < 8
    assert run.config[f"{TURNS}.agent"] == "python:solve"
    with pytest.raises(ConfigError, match=r"resume\(agent="):
        camshaft.load_run(tmp_path / "run").resume(steps=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({f"{TURNS}.agent": "missing.py:solve"}, "file not found"),
        ({f"{TURNS}.environment": "my_package:Game"}, "answers the policy itself"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 2, f"{ROLLOUT}.name": "sglang"}, "plays its own episodes"),
    ],
)
def test_what_does_not_work_is_named(home: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ppo_config(home, {**program(tmp_path), **settings})


def test_keys_reach_the_programs(home: Path, tmp_path: Path) -> None:
    keys = {"timeout": 7.5, "start_timeout": 99.0, "max_concurrency": 3, "allow_sampling": True}
    config = ppo_config(home, {**program(tmp_path), **{f"{TURNS}.{key}": value for key, value in keys.items()}})
    spec, loaded = open_environments(config.actor_rollout_ref.rollout.multi_turn, ())
    assert spec[1:4] == (7.5, 99.0, 3)
    assert loaded.columns == ("prompt", "ground_truth")
    player = EpisodePlayer.of(config, spec, None)
    assert isinstance(player, ProgramPlayer)
    assert player.allow_sampling


@pytest.mark.slow
def test_generate_plays_with_a_program(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", hidden=32)
    data, out = tmp_path / "prompts.jsonl", tmp_path / "out.parquet"
    data.write_text("".join(json.dumps({"prompt": "Play", "ground_truth": str(i)}) + "\n" for i in range(2)))
    agent = program(tmp_path)[f"{TURNS}.agent"]
    settings = [f"data={data}", f"model={model}", f"out={out}", f"agent={agent}", "n=2", "response_length=64"]
    assert main(["generate", *settings, "rollout.multi_turn.max_turn_length=4", "trainer.device=cpu"]) == 0
    rows = read_samples(out).to_pylist()
    assert [row["responses_stop_reason"] for row in rows] == [["done"] * 2] * 2
    for row in rows:
        for text, score in zip(row["responses"], row["responses_score"], strict=True):
            assert score == len(text) % 3
