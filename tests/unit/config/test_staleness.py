"""Config of runs on stale batches: what is implied, required, rejected and said."""

import logging

import pytest

from camshaft.config import load_ppo
from camshaft.errors import ConfigError

CORRECTION, BYPASS = "algorithm.rollout_correction", "algorithm.rollout_correction.bypass_mode=true"
HYBRID = "actor_rollout_ref.hybrid_engine"
TRUNCATED = f"{CORRECTION}.rollout_is=token"
REJECTED = f"{CORRECTION}.rollout_rs=token_k1"
THRESHOLD = f"{CORRECTION}.rollout_rs_threshold=2.0"


def message(words: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_ppo(words)
    return " ".join(str(caught.value).split())


def test_staleness_implies_a_rollout_on_devices_of_its_own(words: list[str]) -> None:
    config = load_ppo([*words, "max_staleness=2", BYPASS])
    assert (config.async_training.max_staleness, config.actor_rollout_ref.hybrid_engine) == (2, False)
    assert config.pools()["rollout"] == "rollout"
    assert load_ppo([*words, "max_staleness=0"]).actor_rollout_ref.hybrid_engine
    assert not load_ppo([*words, "max_staleness=0", f"{HYBRID}=false"]).actor_rollout_ref.hybrid_engine
    assert f"Omit {HYBRID}, or set async_training.max_staleness=0" in message(
        [*words, "max_staleness=1", BYPASS, f"{HYBRID}=true"]
    )


def test_a_forgotten_correction_names_three_keys(words: list[str]) -> None:
    text = message([*words, "max_staleness=1"])
    assert "1 error in the config" in text
    for key in ("bypass_mode=true", "rollout_is=token", "rollout_rs=token_k1"):
        assert f"{CORRECTION}.{key}" in text
    for correction in (BYPASS, TRUNCATED, f"{CORRECTION}.rollout_is=sequence", REJECTED):
        load_ppo([*words, "max_staleness=1", correction, *([THRESHOLD] if correction == REJECTED else [])])
    reinforce = [BYPASS, f"{CORRECTION}.loss_type=reinforce"]
    assert "has to correct for" in message([*words, "max_staleness=1", *reinforce])
    load_ppo([*words, "max_staleness=1", *reinforce, TRUNCATED])


def test_a_forgotten_correction_names_the_masks_of_icepop_and_dppo(words: list[str]) -> None:
    text = message([*words, "max_staleness=1"])
    assert "rollout_is_threshold=0.5-5.0 is the mask of IcePop" in text
    assert "loss_mode=dppo_tv or dppo_kl, the mask of DPPO" in text
    icepop = [TRUNCATED, f"{CORRECTION}.rollout_is_threshold=0.5-5.0"]
    load_ppo([*words, "max_staleness=1", *icepop])
    load_ppo([*words, "max_staleness=1", BYPASS, "actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv"])


def test_the_estimated_policy_needs_ages_and_weights(words: list[str]) -> None:
    estimated = [BYPASS, f"{CORRECTION}.loss_type=interpolated"]
    config = load_ppo([*words, "max_staleness=1", *estimated, TRUNCATED])
    assert config.old_log_prob_source() == "rollout"
    assert not config.needs_log_prob_passes()
    assert "Set algorithm.rollout_correction.rollout_is=token" in message([*words, "max_staleness=1", *estimated])
    assert "Set async_training.max_staleness=1" in message([*words, *estimated, TRUNCATED])
    normalized = [*estimated, TRUNCATED, f"{CORRECTION}.rollout_is_batch_normalize=true"]
    assert "forward pass loss_type=interpolated saves" in message([*words, "max_staleness=1", *normalized])


@pytest.mark.parametrize("correction", [BYPASS, TRUNCATED, REJECTED])
def test_old_log_probs_never_come_from_the_update(words: list[str], correction: str) -> None:
    one_step = [*words, "algorithm=grpo", "n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}"]
    assert load_ppo(one_step).old_log_prob_source() == "update"
    threshold = [THRESHOLD] if correction == REJECTED else []
    source = load_ppo([*one_step, "max_staleness=1", correction, *threshold]).old_log_prob_source()
    assert source == ("rollout" if correction == BYPASS else "actor")


def test_a_stale_run_without_its_check_does_not_use_the_update(words: list[str]) -> None:
    config = load_ppo(
        [*words, "algorithm=grpo", "n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}"]
    )
    assert config.old_log_prob_source() == "update"
    stale = config.async_training.model_copy(update={"max_staleness": 1})
    assert config.model_copy(update={"async_training": stale}).old_log_prob_source() == "actor"


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["algorithm=dapo"], "does not work with dynamic sampling"),
        (["algorithm=remax"], "whose greedy baselines are responses of the weights that are trained"),
    ],
)
def test_algorithms_that_need_current_responses_are_rejected(words: list[str], overrides: list[str], text: str) -> None:
    load_ppo([*words, *overrides])
    assert text in message([*words, "max_staleness=1", BYPASS, *overrides])


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([BYPASS, "actor_rollout_ref.actor.ppo_epochs=3"], "optimizer steps of one are one version"),
        (
            [BYPASS, "algorithm.use_kl_in_reward=true"],
            "the KL penalty in the reward is that of the policy that sampled",
        ),
        ([REJECTED, THRESHOLD], "does not re-weight the others"),
    ],
)
def test_a_notice_says_what_is_not_corrected(
    words: list[str], overrides: list[str], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    one_step = "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}"
    with caplog.at_level(logging.WARNING):
        load_ppo([*words, one_step, "max_staleness=1", TRUNCATED])
        assert text not in caplog.text
        load_ppo([*words, one_step, "max_staleness=1", *overrides])
    assert text in caplog.text
