"""Checks and notices of runs that train on batches of older weights (`async_training.max_staleness`)."""

from collections.abc import Iterator

from camshaft.config.checks.algorithm import CORRECTION
from camshaft.config.checks.placement import HYBRID
from camshaft.config.errors import Problem
from camshaft.config.schema.ppo import PPOConfig

STALENESS = "async_training.max_staleness"
LOSS_TYPE = f"{CORRECTION}.loss_type"


def check_staleness(config: PPOConfig) -> Iterator[Problem]:
    """Check that a run on stale batches corrects for them, has devices for its rollout, and can generate ahead."""
    value, algorithm = config.async_training.max_staleness, config.algorithm
    correction = algorithm.rollout_correction
    if correction.interpolates() and not value:
        message = (
            f"estimates the policy before the update by the age of stale responses, but {STALENESS}=0 has none. Set "
            f"{STALENESS}=1, or {LOSS_TYPE}=ppo_clip."
        )
        yield Problem(LOSS_TYPE, correction.loss_type, message, (STALENESS,))
    if not value:
        return
    has_ratio = correction.bypass_mode and correction.loss_type == "ppo_clip"
    if not (has_ratio or correction.rollout_is or correction.rollout_rs):
        message = (
            "trains on responses of older weights, which the policy loss has to correct for. Set one of\n"
            f"{CORRECTION}.bypass_mode=true: the PPO ratio refers to the policy that sampled. It saves a forward pass, "
            "and the clip range bounds the distance to that older policy. With "
            "actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv or dppo_kl, the mask of DPPO bounds it.\n"
            f"{CORRECTION}.rollout_is=token (or sequence): importance weights beside the PPO ratio. It costs a forward "
            "pass for the old log-probs, and truncated weights add bias. A range such as rollout_is_threshold=0.5-5.0 "
            "is the mask of IcePop. With bypass_mode=true and loss_type=interpolated, the policy before the update is "
            "estimated (loglinear of AReaL), which saves the pass.\n"
            f"{CORRECTION}.rollout_rs=token_k1 with rollout_rs_threshold=2.0 (or another rule): masks what the policy "
            "has moved away from. It costs a forward pass and the masked tokens, and does not re-weight the others.\n"
            f"Or set {STALENESS}=0."
        )
        yield Problem(STALENESS, value, message, (CORRECTION,))
    if config.actor_rollout_ref.hybrid_engine:
        message = (
            f"requires a rollout on devices of its own, which generates while the actor learns. Omit {HYBRID}, or set "
            f"{STALENESS}=0."
        )
        yield Problem(STALENESS, value, message, (HYBRID,))
    if algorithm.filter_groups.enable:
        message = (
            "does not work with dynamic sampling, which draws further prompts when it knows the scores. Set "
            f"algorithm.filter_groups.enable=false, or {STALENESS}=0."
        )
        yield Problem(STALENESS, value, message, ("algorithm.filter_groups.enable",))
    if config.needs_greedy():
        message = (
            f"does not work with algorithm.adv_estimator={algorithm.adv_estimator}, whose greedy baselines are "
            f"responses of the weights that are trained. Set algorithm.adv_estimator=rloo, or {STALENESS}=0."
        )
        yield Problem(STALENESS, value, message, ("algorithm.adv_estimator",))


def find_staleness_notices(config: PPOConfig) -> Iterator[str]:
    """Yield what a version is, and what a correction leaves uncorrected, in a run on stale batches."""
    value, correction = config.async_training.max_staleness, config.algorithm.rollout_correction
    actor = config.actor_rollout_ref.actor
    if not value:
        return
    num_updates = actor.ppo_epochs * config.data.train_batch_size // actor.ppo_mini_batch_size
    if num_updates > 1:
        yield f"{STALENESS}={value} counts iterations: the {num_updates} optimizer steps of one are one version"
    if correction.bypass_mode and config.algorithm.use_kl_in_reward:
        yield (
            f"{CORRECTION}.bypass_mode=true: the KL penalty in the reward is that of the policy that sampled, which is "
            f"up to {value} versions older than the one that is trained"
        )
    if correction.rollout_rs and not (correction.rollout_is or correction.bypass_mode):
        yield (
            f"{CORRECTION}.rollout_rs masks tokens that are far from the policy and does not re-weight the others, "
            f"which are from older weights; {CORRECTION}.rollout_is=token re-weights them"
        )
