"""A game of three turns, and the settings of a small run that plays it.

run_ppo(home, {**EPISODES, f"{TURNS}.environment": game(home)})
"""

import shutil
from pathlib import Path
from typing import Any

ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
LENGTH = 64
"""Length of an episode behind the prompt."""
GAME = """
class Game:
    def reset(self, seed, row_seed):
        self.turn, self.seed = 0, seed
        return f" {PROMPT}"

    def step(self, answer):
        self.turn += 1
        return f"told {self.turn}", REWARD, self.turn == 3
"""
BY_ANSWER = "float(sum(map(ord, answer)) % 5)"
BY_GAME = "float(self.seed % 7 + self.turn)"
EPISODES: dict[str, Any] = {
    f"{ROLLOUT}.n": 2,
    f"{TURNS}.max_turn_length": 4,
    f"{TURNS}.num_workers": 1,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
    "algorithm.adv_estimator": "grpo",
    "custom_reward_function.path": "null",
    "data.max_prompt_length": 48,
    "data.max_response_length": LENGTH,
}


def game(folder: Path, reward: str = BY_ANSWER, prompt: str = "{seed % 10}") -> str:
    """Write a game with this reward of an answer, whose `reset` says `prompt`, and return its path."""
    file = folder / "game.py"
    # Python takes bytecode for that of a file with another text if it has the same size and was written in that second.
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    file.write_text(GAME.replace("REWARD", reward).replace("PROMPT", prompt))
    return f"{file}:Game"
