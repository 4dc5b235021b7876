"""In a run of a model with dropout, old log-probs and the mismatch report are those of the model without dropout.

The oracle of the log-probs is transformers in eval mode.
"""

import math
from pathlib import Path

import pytest
import torch
from support.ppo_runs import run_ppo
from transformers import AutoModelForCausalLM

from camshaft.config import PPOConfig
from camshaft.errors import ConfigError
from camshaft.models.tiny import make_tiny_model

ONE_STEP = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 2,
    "data.train_batch_size": 4,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    return make_tiny_model(tmp_path_factory.mktemp("gpt2"), "gpt2", hidden=32, initializer_range=0.1, **rates)


def test_old_log_probs_have_no_dropout_noise(gpt2: Path, tmp_path: Path) -> None:
    (step,) = run_ppo(tmp_path, {**ONE_STEP, "actor_rollout_ref.model.path": gpt2}, steps=1)
    assert step.metrics["rollout/log_prob_diff_max"] < 1e-4
    model = AutoModelForCausalLM.from_pretrained(gpt2).eval()
    batch = step.batch
    for prompt, response, reported in zip(
        batch.ragged("prompts").rows(), batch.ragged("responses").rows(), batch.ragged("rollout_log_probs").rows(),
        strict=True,
    ):  # fmt: skip
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        torch.testing.assert_close(reported, expected, atol=1e-4, rtol=0)


def test_old_log_probs_of_the_update_have_dropout_noise(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above would detect old log-probs that come from the training pass."""
    monkeypatch.setattr(PPOConfig, "_may_have_dropout", lambda self: False)
    (step,) = run_ppo(tmp_path, {**ONE_STEP, "actor_rollout_ref.model.path": gpt2}, steps=1)
    assert step.metrics["rollout/log_prob_diff_max"] > 1e-3


def test_run_with_a_single_response_token(tmp_path: Path) -> None:
    sizes = {"data.train_batch_size": 1, "actor_rollout_ref.actor.ppo_mini_batch_size": 1}
    (step,) = run_ppo(tmp_path, {**sizes, "data.max_response_length": 1}, steps=1)
    undefined = [name for name, value in step.metrics.items() if not math.isfinite(value)]
    assert undefined == ["critic/vf_explained_var"]  # the returns have no variance


def test_warmup_as_long_as_the_run_of_epochs_is_an_error(tmp_path: Path) -> None:
    warmup = {"trainer.critic_warmup": 8, "trainer.total_training_steps": "null", "trainer.total_epochs": 1}
    with pytest.raises(ConfigError, match="the run has 8, so the actor would never be trained"):
        run_ppo(tmp_path, warmup)
