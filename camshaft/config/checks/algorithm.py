"""Checks of the estimator, the policy loss, rollout correction and dynamic sampling."""

from collections.abc import Iterator

from camshaft.config.errors import Problem, check_name
from camshaft.config.foreign.topics import topic_of_name
from camshaft.config.rollout import OPTIONAL_SAMPLING
from camshaft.config.schema.algorithm import ESTIMATORS, estimator_inputs
from camshaft.config.schema.policy_loss import POLICY_LOSSES
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.short_names import RECIPES

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
ONE_RESPONSE = f"compares several responses to the same prompt, but {ROLLOUT}.n=1 generates only one. Set {ROLLOUT}.n=8"


def check_algorithm(config: PPOConfig) -> Iterator[Problem]:
    """Check the algorithm of an RL run."""
    yield from _check_estimator(config)
    yield from _check_reward_parts(config)
    yield from _check_policy_loss(config)
    yield from _check_correction(config)
    yield from _check_bypass(config)
    yield from _check_selection(config)
    yield from _check_filter_groups(config)


def _check_estimator(config: PPOConfig) -> Iterator[Problem]:
    key, estimator, n = "algorithm.adv_estimator", config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    topic = topic_of_name(estimator)
    if topic is None:
        yield from check_name(key, estimator, (*ESTIMATORS, *RECIPES), "estimators", "module:function")
    else:
        yield Problem(key, estimator, topic.message())
    inputs = estimator_inputs(estimator)
    if estimator in ESTIMATORS and inputs.groups and n == 1:
        yield Problem(key, estimator, f"{ONE_RESPONSE}, or use another estimator.", (f"{ROLLOUT}.n",))
    warmup, enable = config.trainer.critic_warmup, config.critic.enable
    if warmup and not config.needs_critic():
        message = f"the run has no critic, because {key}={estimator} does not use one. Set trainer.critic_warmup=0."
        yield Problem("trainer.critic_warmup", warmup, message, (key, "critic.enable"))
    if enable is not None and estimator in ESTIMATORS and enable != inputs.values:
        reason = "requires a critic" if inputs.values else "does not use a critic"
        message = f"algorithm.adv_estimator={estimator} {reason}. Set critic.enable=null."
        yield Problem("critic.enable", enable, message, (key,))


def _check_reward_parts(config: PPOConfig) -> Iterator[Problem]:
    """Check the rewards that GDPO normalizes separately."""
    algorithm, key = config.algorithm, "algorithm.gdpo_reward_keys"
    if not estimator_inputs(algorithm.adv_estimator).reward_parts:
        return
    if not config.reward_parts():
        message = (
            "names the rewards that algorithm.adv_estimator=gdpo normalizes separately. Set it to numbers that the "
            f"reward function returns in a dict, such as '{key}=[accuracy,format]', or set several functions, such as "
            "'reward=[accuracy.py,format.py]'."
        )
        yield Problem(key, algorithm.gdpo_reward_keys, message, ("algorithm.adv_estimator", "custom_reward_function"))
    if algorithm.use_kl_in_reward:
        message = (
            f"has no effect with algorithm.adv_estimator=gdpo, which reads {key} only. Set "
            f"algorithm.use_kl_in_reward=false, or {ACTOR}.use_kl_loss=true instead."
        )
        yield Problem("algorithm.use_kl_in_reward", True, message, ("algorithm.adv_estimator",))


def _check_policy_loss(config: PPOConfig) -> Iterator[Problem]:
    key, mode = "actor_rollout_ref.actor.policy_loss.loss_mode", config.actor_rollout_ref.actor.policy_loss.loss_mode
    yield from check_name(key, mode, POLICY_LOSSES, "policy_losses", "module:function")


def _check_correction(config: PPOConfig) -> Iterator[Problem]:
    """Check that rollout correction is used with sampling."""
    correction = config.algorithm.rollout_correction
    enabled = {f"{CORRECTION}.rollout_is": correction.rollout_is, f"{CORRECTION}.rollout_rs": correction.rollout_rs}
    for name, value in enabled.items():
        if value and not config.actor_rollout_ref.rollout.do_sample:
            message = f"requires sampling, but {ROLLOUT}.do_sample=false disables it. Set {name}=null."
            yield Problem(name, value, message, (f"{ROLLOUT}.do_sample",))


def _check_bypass(config: PPOConfig) -> Iterator[Problem]:
    """Check that `bypass_mode` is used only if rollout and trainer compute log-probs of the same distribution."""
    correction, rollout = config.algorithm.rollout_correction, config.actor_rollout_ref.rollout
    key, estimator = f"{CORRECTION}.bypass_mode", config.algorithm.adv_estimator
    if not correction.bypass_mode:
        return
    if estimator_inputs(estimator).probabilities:
        message = (
            "skips the forward pass that computes the probabilities which "
            f"algorithm.adv_estimator={estimator} needs. Set {key}=false."
        )
        yield Problem(key, True, message, ("algorithm.adv_estimator",))
    truncated = {"do_sample=true": not rollout.do_sample, "top_p=1.0": rollout.top_p < 1, "top_k=0": rollout.top_k > 0}
    truncated |= {f"{name}={off}": getattr(rollout, name) != off for name, off in OPTIONAL_SAMPLING.items()}
    for fix, is_truncated in truncated.items():
        if is_truncated:
            related_key = f"{ROLLOUT}.{fix.partition('=')[0]}"
            message = f"requires the full distribution, which {related_key} restricts. Set {ROLLOUT}.{fix}."
            yield Problem(key, True, message, (related_key,))


def _check_selection(config: PPOConfig) -> Iterator[Problem]:
    """Check that the entropies are known before the update if the policy loss selects tokens by them."""
    key, bypass = "actor_rollout_ref.actor.policy_loss.top_entropy_quantile", f"{CORRECTION}.bypass_mode"
    quantile = config.actor_rollout_ref.actor.policy_loss.top_entropy_quantile
    if quantile < 1 and config.selects_tokens() and config.algorithm.rollout_correction.bypass_mode:
        message = f"requires the entropies of a forward pass that {bypass}=true skips. Set {bypass}=false, or {key}=1."
        yield Problem(key, quantile, message, (bypass,))


def _check_filter_groups(config: PPOConfig) -> Iterator[Problem]:
    """Check dynamic sampling, which drops groups of responses that give no gradient."""
    filtering, estimator = config.algorithm.filter_groups, config.algorithm.adv_estimator
    key, related = "algorithm.filter_groups.enable", (f"{ROLLOUT}.n", "algorithm.adv_estimator")
    if not filtering.enable:
        return
    if not estimator_inputs(estimator).groups:
        message = (
            "drops prompts whose responses all have the same reward, which is useful only if the estimator compares "
            f"the responses to a prompt. algorithm.adv_estimator={estimator} does not. Set {key}=false, or "
            "algorithm.adv_estimator=grpo."
        )
        yield Problem(key, True, message, related)
    elif config.actor_rollout_ref.rollout.n == 1:
        yield Problem(key, True, f"{ONE_RESPONSE}.", related)
    if filtering.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        message = (
            "includes the KL penalty with algorithm.use_kl_in_reward=true, so the rewards of a group always differ and "
            "no prompt is dropped. Set algorithm.filter_groups.metric=seq_reward."
        )
        yield Problem("algorithm.filter_groups.metric", filtering.metric, message, ("algorithm.use_kl_in_reward",))
