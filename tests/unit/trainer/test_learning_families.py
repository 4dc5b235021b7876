"""Tiny models of families with other layers learn the task of the README with PPO and a critic."""

from pathlib import Path
from typing import Any

import pytest
from support.tiny import CHANGED_SCORES, LINEAR, WINDOWED

import camshaft
from camshaft.models.tiny import make_tiny_model

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": LINEAR,
    "gemma3_text": {**WINDOWED, "query_pre_attn_scalar": 16},
    "gpt_oss": CHANGED_SCORES["gpt_oss"],
}


def digits(response: str) -> float:
    return sum(c.isdigit() for c in response) / max(len(response), 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_reward_rises_above_four_fifths_in_sixty_steps(family: str, seed: int, tmp_path: Path) -> None:
    run = camshaft.train(
        model=make_tiny_model(tmp_path / "model", family, seed=seed, **FAMILIES[family]),
        data=[{"prompt": f"Write digits. Seed: {number}"} for number in range(64)],
        reward=digits,
        algorithm="ppo",
        steps=60,
        lr=3e-3,
        batch=16,
        response_length=16,
        out=tmp_path / "run",
        **{"trainer.seed": seed, "critic.optim.lr": 3e-3},
    )
    assert run.metrics()["critic/score/mean"] > 0.8
