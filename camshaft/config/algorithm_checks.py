"""What the keys of the algorithm must fulfil: estimator, policy loss, correction, dynamic sampling; for `checks.py`.

problems = [*algorithm(config)]
"""

from collections.abc import Iterator

from camshaft.config.problems import Problem, check_name
from camshaft.config.schema.algorithm import ESTIMATORS, GROUP_ESTIMATORS, POLICY_LOSSES, threshold
from camshaft.config.schema.ppo import PPOConfig

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def algorithm(config: PPOConfig) -> Iterator[Problem]:
    """Everything that is wrong with how an RL run learns from its scores."""
    yield from _estimator(config)
    yield from _critic(config)
    yield from _policy_loss(config)
    yield from _correction(config)
    yield from _bypass(config)
    yield from _filter_groups(config)


def _estimator(config: PPOConfig) -> Iterator[Problem]:
    key, estimator, n = "algorithm.adv_estimator", config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    yield from check_name(key, estimator, ESTIMATORS, "estimators", "module:function")
    if estimator in GROUP_ESTIMATORS and n == 1:
        sentence = (
            f"compares the responses to one prompt with each other, and {ROLLOUT}.n=1 makes one."
            f" Type {ROLLOUT}.n=8, or another estimator."
        )
        yield Problem(key, estimator, sentence, (f"{ROLLOUT}.n",))
    warmup = config.trainer.critic_warmup
    if warmup and not config.needs_critic():
        sentence = f"algorithm.adv_estimator={estimator} has no critic to warm up. Type trainer.critic_warmup=0."
        yield Problem("trainer.critic_warmup", warmup, sentence, (key, "critic.enable"))


def _critic(config: PPOConfig) -> Iterator[Problem]:
    """An estimator of ours has a critic or has none; who brings another one says whether it reads values."""
    estimator, enable = config.algorithm.adv_estimator, config.critic.enable
    if enable is None or estimator not in ESTIMATORS or enable == (estimator == "gae"):
        return
    needs = "needs a critic" if estimator == "gae" else "reads no values"
    sentence = f"algorithm.adv_estimator={estimator} {needs}. Type critic.enable=null."
    yield Problem("critic.enable", enable, sentence, ("algorithm.adv_estimator",))


def _policy_loss(config: PPOConfig) -> Iterator[Problem]:
    actor = config.actor_rollout_ref.actor
    key, mode = f"{ACTOR}.policy_loss.loss_mode", actor.policy_loss.loss_mode
    yield from check_name(key, mode, POLICY_LOSSES, "policy_losses", "module:function")
    if mode == "gspo" and actor.loss_agg_mode != "seq-mean-token-mean":
        where = f"{ACTOR}.loss_agg_mode"
        sentence = f"{key}=gspo is a mean over responses, each weighing the same. Type {where}=seq-mean-token-mean."
        yield Problem(where, actor.loss_agg_mode, sentence, (key,))


def _correction(config: PPOConfig) -> Iterator[Problem]:
    """Weights and rejections need samples to judge, and each rule a threshold that fits it."""
    correction, key = config.algorithm.rollout_correction, "algorithm.rollout_correction"
    used = {f"{key}.rollout_is": correction.rollout_is, f"{key}.rollout_rs": correction.rollout_rs}
    for name, value in used.items():
        if value and not config.actor_rollout_ref.rollout.do_sample:
            sentence = f"judges samples, and {ROLLOUT}.do_sample=false draws none. Type {name}=null."
            yield Problem(name, value, sentence, (f"{ROLLOUT}.do_sample",))
    rules, texts = correction.rollout_rs, correction.rollout_rs_threshold
    where, rests_on = f"{key}.rollout_rs_threshold", (f"{key}.rollout_rs",)
    if rules and not texts:
        example = "2.0" if rules[0].endswith("k1") else "0.01"
        yield Problem(where, None, f"must say what {', '.join(rules)} allows. Type {where}={example}.", rests_on)
    elif texts and not rules:
        yield Problem(where, texts, f"is not read without {key}.rollout_rs. Type {where}=null.", rests_on)
    elif len(texts) not in (1, len(rules)):
        sentence = f"has {len(texts)} values for {len(rules)} rules. Give one for all, or one for each."
        yield Problem(where, texts, sentence, rests_on)
    elif len(texts) < len(rules) and len({rule.endswith("k1") for rule in rules}) == 2:
        each = ",".join("2.0" if rule.endswith("k1") else "0.01" for rule in rules)
        sentence = f"is one value for ratios (k1) and divergences (k2, k3). Give one for each: Type '{where}=[{each}]'."
        yield Problem(where, texts, sentence, rests_on)
        return
    for rule, text in zip(rules, texts * len(rules) if len(texts) == 1 else texts, strict=False):
        try:
            threshold(rule, text)
        except ValueError as error:
            yield Problem(where, text, f"{error}: that is what {rule} takes.", rests_on)


def _bypass(config: PPOConfig) -> Iterator[Problem]:
    """The generator's log-probs can stand for the trainer's where both are of the same distribution."""
    correction, rollout = config.algorithm.rollout_correction, config.actor_rollout_ref.rollout
    key = "algorithm.rollout_correction.bypass_mode"
    if not correction.bypass_mode:
        return
    for leaf, value in {"rollout_is": correction.rollout_is, "rollout_rs": correction.rollout_rs}.items():
        if value:
            other = f"algorithm.rollout_correction.{leaf}"
            sentence = f"leaves {leaf} nothing to compare the generator's log-probs with. Type {other}=null."
            yield Problem(key, True, sentence, (other,))
    partial = {"do_sample=true": not rollout.do_sample, "top_p=1.0": rollout.top_p < 1, "top_k=0": rollout.top_k > 0}
    for instead, so in partial.items():
        if so:
            other = f"{ROLLOUT}.{instead.partition('=')[0]}"
            sentence = (
                f"needs samples of the whole distribution, and {other} leaves out a part. Type {ROLLOUT}.{instead}."
            )
            yield Problem(key, True, sentence, (other,))


def _filter_groups(config: PPOConfig) -> Iterator[Problem]:
    """Dynamic sampling: groups there must be, and what is dropped must be what has no gradient."""
    filtering, data, estimator = config.algorithm.filter_groups, config.data, config.algorithm.adv_estimator
    key, others = "algorithm.filter_groups.enable", (f"{ROLLOUT}.n", "algorithm.adv_estimator")
    if not filtering.enable:
        if data.gen_batch_size not in (None, data.train_batch_size):
            sentence = f"is not read with {key}=false. Type {key}=true, or data.gen_batch_size=null."
            yield Problem("data.gen_batch_size", data.gen_batch_size, sentence, (key, "data.train_batch_size"))
        return
    if estimator in ESTIMATORS and estimator not in GROUP_ESTIMATORS:
        sentence = (
            f"drops what has no gradient where responses are compared with each other, and algorithm.adv_estimator="
            f"{estimator} does not do that. Type {key}=false, or algorithm.adv_estimator=grpo."
        )
        yield Problem(key, True, sentence, others)
    elif config.actor_rollout_ref.rollout.n == 1:
        sentence = f"compares the responses to one prompt, and {ROLLOUT}.n=1 makes one. Type {ROLLOUT}.n=8."
        yield Problem(key, True, sentence, others)
    if filtering.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        sentence = (
            "with algorithm.use_kl_in_reward=true has the KL penalty in it, which differs from response to response. "
            "Type algorithm.filter_groups.metric=seq_reward."
        )
        yield Problem("algorithm.filter_groups.metric", filtering.metric, sentence, ("algorithm.use_kl_in_reward",))
