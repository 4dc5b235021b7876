"""Episodes over vLLM: the game is played with an environment, and tokens and log-probs are those of sampling.

Run by `make test-vllm`, and with a server and a stream by `make test-server`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.episodes import EPISODES, TURNS, game
from support.ppo_runs import ppo_config
from support.vllm_runs import FOR_VLLM, with_wide_heads
from transformers import AutoModelForCausalLM

from camshaft.dataproto import DataProto
from camshaft.tracking import RunInfo, Tracking
from camshaft.trainer.ppo import PPOTrainer
from camshaft.trainer.session import Extensions

pytestmark = pytest.mark.vllm

RUN = RunInfo(project="test", experiment="test", folder=Path(), total_steps=1)
TOLERANCE = 1e-4


def played(folder: Path, name: str, schedule: str) -> DataProto:
    """Return the batch of a step that plays the game over vLLM."""
    with_wide_heads(folder)
    lengths = {"trainer.total_training_steps": 1, "trainer.total_epochs": 1}
    keys: dict[str, Any] = {**FOR_VLLM, **EPISODES, f"{TURNS}.environment": game(folder), **lengths}
    keys |= {"actor_rollout_ref.rollout.name": name, f"{TURNS}.schedule": schedule}
    if name == "server":
        keys["+actor_rollout_ref.rollout.engine_kwargs.vllm_server_timeout"] = 600
    batches: list[DataProto] = []
    config = ppo_config(folder, keys)
    with PPOTrainer.open(config, Extensions(on_step=(lambda _, batch, metrics: batches.append(batch),))) as trainer:
        trainer.prepare()
        with Tracking([], RUN) as tracking:
            trainer.fit(tracking)
    return batches[0]


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("vllm", "waves"),
        pytest.param("vllm", "stream", marks=pytest.mark.slow),
        pytest.param("server", "waves", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param("server", "stream", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_an_environment_is_played_over_vllm(tmp_path: Path, name: str, schedule: str) -> None:
    batch = played(tmp_path, name, schedule)
    assert set(batch["turns"].tolist()) == {3}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "actor", dtype=torch.float32).eval()
    names = ("prompts", "responses", "response_mask", "rollout_log_probs")
    for prompt, response, mask, log_probs in zip(*(batch.ragged(name).rows() for name in names), strict=True):
        assert 3 <= int(mask.sum()) < len(mask)  # three answers, and what the game and the template have told
        assert not log_probs[~mask].any()
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        expected = logits.double().log_softmax(-1).gather(-1, response[:, None])[:, 0]
        assert (expected[mask] - log_probs[mask]).abs().max() < TOLERANCE
    texts = [[m["content"] for m in messages if m["role"] == "user"] for messages in batch["transcript"]]
    assert all(told[1:] == ["told 1", "told 2", "told 3"] for told in texts)
