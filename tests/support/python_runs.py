"""Runs from Python that take a few seconds.

run = camshaft.train(model=..., data=PROMPTS, reward=..., **SMALL)
"""

from typing import Any

SMALL: dict[str, Any] = {"batch": 8, "n": 4, "prompt_length": 32, "response_length": 8, "lr": 3e-3}
"""Sizes of a PPO run of a few seconds."""

SMALL_SUPERVISED: dict[str, Any] = {"batch": 4, "max_length": 32}
"""Sizes of a supervised run of a few seconds."""

PROMPTS = [{"prompt": f"Digits, please. {number}", "answer": number} for number in range(16)]
