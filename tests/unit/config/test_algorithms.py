"""Requirements of estimators, policy losses and dynamic sampling on other keys."""

import pytest

from camshaft.config import load_ppo
from camshaft.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4")
GDPO = ("algorithm.adv_estimator=gdpo", f"{ROLLOUT}.n=4")
KEYS, WEIGHTS = "algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"
BYPASS = "algorithm.rollout_correction.bypass_mode"
FILTER = "algorithm.filter_groups.enable=true"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
GSPO = f"{LOSS}=gspo"
TOP_ENTROPY, BYPASS = f"{ACTOR}.policy_loss.top_entropy_quantile", "algorithm.rollout_correction.bypass_mode"
BUFFER = "reward_model.overlong_buffer"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["algorithm.adv_estimator=gropo"], "Did you mean grpo?"),
        ([f"{ACTOR}.policy_loss.loss_mode=gpso"], "must be one of cispo, clip_cov, dppo_kl, dppo_tv, dro, "),
        ([GSPO, f"{ACTOR}.loss_agg_mode=token-mean"], f"Set {ACTOR}.loss_agg_mode=seq-mean-token-mean, or omit"),
        ([f"{LOSS}=gmpo", f"{ACTOR}.loss_agg_mode=token-sum"], "geo_mean weights all responses equally."),
        ([f"{LOSS}=dro"], f"Set {ACTOR}.policy_loss.dro_beta=0.1."),
        ([f"{LOSS}=clip_cov", f"{ACTOR}.policy_loss.clip_cov_lb=5"], "clip_cov_ub=5."),
        ([f"{LOSS}=gmpo", f"{TOP_ENTROPY}=0.2"], f"Set {TOP_ENTROPY}=1."),
        ([f"{TOP_ENTROPY}=0.2", f"{BYPASS}=true"], f"Set {BYPASS}=false, or {TOP_ENTROPY}=1."),
        ([f"{ACTOR}.entropy_target=0.3", f"{ACTOR}.entropy_coeff=2"], f"{ACTOR}.entropy_coeff_max=1"),
        (["critic.enable=false"], "algorithm.adv_estimator=gae requires a critic. Set critic.enable=null."),
        ([*GRPO, "critic.enable=true"], "algorithm.adv_estimator=grpo does not use a critic. Set critic.enable=null."),
        ([FILTER, f"{ROLLOUT}.n=4"], "algorithm.adv_estimator=gae does not."),
        ([FILTER, "algorithm.adv_estimator=my.module:mine", f"{ROLLOUT}.n=1"], f"Set {ROLLOUT}.n=8."),
        ([*GRPO, "data.gen_batch_size=2048"], f"Set {FILTER}, or data.gen_batch_size=null."),
        ([*GRPO, FILTER, "data.gen_batch_size=64", "data.train_max_samples=32"], "contains (data.gen_batch_size=64)."),
        (
            [*GRPO, FILTER, "algorithm.filter_groups.metric=seq_final_reward", "algorithm.use_kl_in_reward=true"],
            "Set algorithm.filter_groups.metric=seq_reward.",
        ),
        ([*GDPO], "'algorithm.gdpo_reward_keys=[accuracy,format]', or set several functions"),
        ([*GDPO, f"{KEYS}=[a,a]"], "names a reward twice. Name each once."),
        (
            [*GDPO, f"{KEYS}=[a,b]", f"{WEIGHTS}=[1]"],
            f"has 1 numbers for 2 rewards. Set one weight for each of {KEYS}.",
        ),
        ([*GDPO, f"{KEYS}=a", "algorithm.use_kl_in_reward=true"], f"or {ACTOR}.use_kl_loss=true instead."),
        ([*GDPO, f"{KEYS}=a", f"{BUFFER}.enable=true", f"{BUFFER}.len=4"], f"Set {BUFFER}.enable=false."),
        (
            ["algorithm.adv_estimator=optimal_token_baseline", f"{ROLLOUT}.n=4", f"{BYPASS}=true"],
            f"algorithm.adv_estimator=optimal_token_baseline needs. Set {BYPASS}=false.",
        ),
        ([f"{BUFFER}.enable=true"], f"must be between 1 and {ROLLOUT}.response_length=512. Set {BUFFER}.len=128"),
        ([f"{BUFFER}.enable=true", f"{BUFFER}.len=513"], f"Set {BUFFER}.len=128"),
    ],
)
def test_invalid_combination_is_rejected_with_a_fix(words, more, message):
    with pytest.raises(ConfigError) as caught:
        load_ppo([*words, *more])
    text = str(caught.value)
    assert "1 error in the config" in text
    assert message in text


@pytest.mark.parametrize(
    "more",
    [
        ["algorithm.adv_estimator=remax"],
        [GSPO, f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"],
        [f"{LOSS}=dro", f"{ACTOR}.policy_loss.dro_beta=1"],
        [f"{LOSS}=sapo", f"{ACTOR}.loss_agg_mode=token-mean"],
        [f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.clip_ratio_low=10"],
        [f"{ACTOR}.policy_loss.loss_mode=my.module:mine", "algorithm.adv_estimator=my.module:mine"],
        [*GRPO, FILTER, "data.gen_batch_size=3072", "algorithm.filter_groups.metric=acc"],
        [f"{BUFFER}.enable=true", f"{BUFFER}.len=512"],
        [*GDPO, f"{KEYS}=[score,acc]", f"{WEIGHTS}=[1,0.5]"],
        [*GDPO, "custom_reward_function.functions=[exact_match,gsm8k]"],
    ],
)
def test_valid_combination_passes(words, more):
    load_ppo([*words, *more])


def test_custom_estimator_has_a_critic_if_enabled(words):
    overrides = [*words, "algorithm.adv_estimator=my.module:mine"]
    assert not load_ppo(overrides).needs_critic()
    assert load_ppo([*overrides, "critic.enable=true"]).needs_critic()


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([*GDPO, f"{KEYS}=[acc,format]"], {"acc": 1.0, "format": 1.0}),
        ([*GDPO, f"{KEYS}=[acc,format]", f"{WEIGHTS}=[1,0.5]"], {"acc": 1.0, "format": 0.5}),
        ([*GDPO, "reward=[exact_match,gsm8k]", "reward_weights=[1,0.5]"], {"exact_match": 1.0, "gsm8k": 0.5}),
        ([*GRPO, "reward=[exact_match,gsm8k]"], {}),
        (["algorithm.adv_estimator=my.module:mine", f"{KEYS}=acc"], {"acc": 1.0}),
        (["algorithm.adv_estimator=my.module:mine", "reward=[exact_match,gsm8k]"], {}),
    ],
)
def test_rewards_that_an_estimator_reads_separately(words, more, expected):
    assert load_ppo([*words, *more]).reward_parts() == expected


@pytest.mark.parametrize(
    ("name", "loss", "aggregation"),
    [
        ("gspo", "gspo", "seq-mean-token-mean"),
        ("gmpo", "geo_mean", "seq-mean-token-mean"),
        ("dppo-tv", "dppo_tv", "token-mean"),
        ("sapo", "sapo", "seq-mean-token-mean"),
        ("my-module:loss", "my-module:loss", "token-mean"),
    ],
)
def test_aggregation_follows_the_policy_loss(words, name, loss, aggregation):
    config = load_ppo([*words, f"{LOSS}={name}"])
    actor = config.actor_rollout_ref.actor
    assert actor.policy_loss.loss_mode == loss
    assert actor.aggregation() == aggregation
    assert config.critic.aggregation() == "token-mean"


def test_parameters_of_a_loss_are_those_of_its_function(words):
    loss = load_ppo([*words, f"{LOSS}=sapo", f"{ACTOR}.policy_loss.tau_neg=2"]).actor_rollout_ref.actor.policy_loss
    assert loss.parameters() == {"tau": (1.0, 2.0)}


@pytest.mark.parametrize(("name", "source"), [("grpo", "update"), ("optimal_token_baseline", "actor")])
def test_token_baselines_need_log_probs_before_the_update(words, name, source):
    mini = f"{ACTOR}.ppo_mini_batch_size=${{data.train_batch_size}}"
    config = load_ppo([*words, f"algorithm.adv_estimator={name}", f"{ROLLOUT}.n=4", mini])
    assert config.old_log_prob_source() == source
    assert config.needs_sum_pi_squared() == (source == "actor")


@pytest.mark.parametrize("more", [[f"{LOSS}=clip_cov"], [f"{LOSS}=kl_cov"], [f"{TOP_ENTROPY}=0.2"]])
def test_a_selection_of_tokens_needs_old_log_probs_before_the_update(words, more):
    one_step = [*words, *GRPO, f"{ACTOR}.ppo_mini_batch_size=1024"]
    assert load_ppo([*one_step, *more]).old_log_prob_source() == "actor"
