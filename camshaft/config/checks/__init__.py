"""Checks that involve several config keys. Every check yields all problems that it finds.

    problems = list(check(config))        # the config of any command

A problem lists the keys that it depends on, so that `load.py` can omit it if one of them has an invalid value. Messages
about batch sizes include the arithmetic.

Modules
-------
    backends.py     engines and rollouts against their capabilities
    model.py        lengths and tokenizers against models, and notices about models
    rewards.py      scoring functions, the reward model and the overlong penalty
    ineffective.py  notices about keys that nothing reads in a run
"""

from collections.abc import Iterable, Iterator, Mapping

from camshaft.config.checks.backends import (
    check_load_format,
    check_ppo_engines,
    check_rollout,
    check_rollout_adapter,
    check_routed_experts,
    check_supervised_engines,
    layouts_are_valid,
)
from camshaft.config.checks.model import check_generate_models, check_ppo_models, check_supervised_models
from camshaft.config.checks.rewards import check_scores, check_scoring_function
from camshaft.config.derive import Pass, PassLimit, pass_limits
from camshaft.config.engine import largest_divisor
from camshaft.config.errors import Problem, check_name
from camshaft.config.files import (
    check_contents,
    check_eval_files,
    check_generate_files,
    check_ppo_files,
    check_supervised_files,
)
from camshaft.config.layout import GLOBAL_POOL, PlacementConfig, PoolConfig, Topology, pool_sizes
from camshaft.config.rollout import OPTIONAL_SAMPLING
from camshaft.config.schema.algorithm import ESTIMATORS, POLICY_LOSSES, estimator_inputs, parse_threshold
from camshaft.config.schema.evaluation import EvalConfig
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.model import OptimSection
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.roles import GeneratorConfig
from camshaft.config.schema.supervised import SupervisedConfig
from camshaft.config.short_names import RECIPES
from camshaft.config.tree import format_value
from camshaft.plugins import TRACKERS

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REWARD, CORRECTION = "reward_model", "algorithm.rollout_correction"
WORLD = ("trainer.nnodes", "trainer.n_gpus_per_node")
ONE_RESPONSE = f"compares several responses to the same prompt, but {ROLLOUT}.n=1 generates only one. Set {ROLLOUT}.n=8"


def check(config: PPOConfig | SupervisedConfig | GenerateConfig | EvalConfig) -> Iterator[Problem]:
    """Yield every problem of a config. Its single values must be valid already."""
    if isinstance(config, GenerateConfig):
        yield from _check_placement(config.trainer)
        yield from _check_generator("rollout", config.rollout, config.trainer.world_size)
        yield from check_load_format("rollout", config.rollout, None)
        if not config.data.path:
            yield Problem("data.path", None, "prompts are required. Set data=<file>.")
        yield from check_scoring_function(config.custom_reward_function)
        yield from check_generate_files(config)
        yield from check_generate_models(config)
    elif isinstance(config, EvalConfig):
        yield from check_scoring_function(config.custom_reward_function)
        yield from check_eval_files(config)
    elif isinstance(config, SupervisedConfig):
        yield from _check_placement(config.trainer)
        yield from check_supervised_engines(config)
        yield from _check_supervised(config)
        yield from check_supervised_files(config)
        yield from check_supervised_models(config)
    else:
        yield from _check_ppo(config)


def _check_ppo(config: PPOConfig) -> Iterator[Problem]:
    pools = {f"{role}.resource_pool": name for role, name in config.pools().items()}
    yield from _check_placement(config.trainer, config.trainer.resource_pools, pools)
    yield from _check_names(config)
    yield from check_scores(config)
    yield from check_ppo_engines(config)
    yield from check_rollout_adapter(config)
    yield from check_routed_experts(config)
    yield from check_load_format(ROLLOUT, config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.strategy)
    if layouts_are_valid(config):
        yield from _check_batches(config)
        yield from _check_global_micro_batches(config)
    yield from _check_token_budgets(config)
    yield from _check_lengths(config)
    yield from _check_estimator(config)
    yield from _check_policy_loss(config)
    yield from _check_correction(config)
    yield from _check_bypass(config)
    yield from _check_filter_groups(config)
    yield from _check_validation_sampling(config)
    yield from _check_run(config)
    yield from check_ppo_files(config)
    yield from check_ppo_models(config)


# -- placement and names --------------------------------------------------------------------------


def _check_placement(
    trainer: PlacementConfig, pools: Mapping[str, PoolConfig] | None = None, used: Mapping[str, str] | None = None
) -> Iterator[Problem]:
    """Check the resource pools and the controller. `used` maps config keys to the names of the pools they select."""
    pools, used = pools or {}, used or {}
    if GLOBAL_POOL in pools:
        message = (
            "this name is reserved for the pool that trainer.nnodes and trainer.n_gpus_per_node define. "
            "Rename the pool."
        )
        yield Problem(f"trainer.resource_pools.{GLOBAL_POOL}", pools[GLOBAL_POOL].model_dump(), message)
    for key, name in used.items():
        if name != GLOBAL_POOL and name not in pools:
            message = (
                f"unknown resource pool; the pools are {', '.join((GLOBAL_POOL, *pools))}. Set {key}={GLOBAL_POOL}, or "
                f"add the pool with trainer.resource_pools.{name}.n_gpus_per_node=1."
            )
            yield Problem(key, name, message)
    for name in pools:
        if name != GLOBAL_POOL and name not in used.values():
            message = (
                "no role uses this pool. Select it with actor_rollout_ref.resource_pool, critic.resource_pool or "
                "reward_model.resource_pool, or remove it."
            )
            yield Problem(f"trainer.resource_pools.{name}", pools[name].model_dump(), message)
    machines = max((pool_sizes(trainer, pools)[name].nnodes for name in used.values() if name in pools), default=1)
    if trainer.backend() == "local" and max(machines, trainer.nnodes) > 1:
        message = "the local controller starts processes on this machine only. Set trainer.controller=ray."
        yield Problem("trainer.controller", trainer.controller, message, ("trainer.nnodes",))


def _check_names(config: PPOConfig) -> Iterator[Problem]:
    roles = {"actor_rollout_ref": config.actor_rollout_ref.worker_cls, "critic": config.critic.worker_cls}
    for role, name in roles.items():
        if name is not None:
            yield from check_name(f"{role}.worker_cls", name, (), "roles")
    yield from _check_generator(ROLLOUT, config.actor_rollout_ref.rollout, config.topology().world_size)
    yield from _check_trackers(config.trainer.logger)


def _check_trackers(trackers: Iterable[str]) -> Iterator[Problem]:
    for tracker in trackers:
        yield from check_name("trainer.logger", tracker, TRACKERS, "trackers")


def _check_generator(section: str, rollout: GeneratorConfig, world_size: int) -> Iterator[Problem]:
    """Check the backend and the sampling parameters of a rollout whose keys are in `section`."""
    yield from check_rollout(section, rollout, world_size)
    if rollout.n > 1 and not rollout.do_sample:
        message = (
            f"greedy decoding generates {rollout.n} identical responses per prompt. Set {section}.do_sample=true, or "
            f"{section}.n=1."
        )
        yield Problem(f"{section}.n", rollout.n, message, (f"{section}.do_sample",))


# -- batch arithmetic -----------------------------------------------------------------------------


def _check_batches(config: PPOConfig) -> Iterator[Problem]:
    topology, actor = config.topology(), config.actor_rollout_ref.actor.ppo_mini_batch_size
    actor_dp = config.actor_dp_size(topology)
    yield from _check_mini_batches(config, f"{ACTOR}.ppo_mini_batch_size", actor, actor_dp, topology.world_size)
    if config.needs_critic():
        critic, critic_dp = config.critic.ppo_mini_batch_size, config.critic_dp_size(topology)
        if (critic, critic_dp) != (actor, actor_dp):
            critic_ranks = topology.critic_topology().world_size
            yield from _check_mini_batches(config, "critic.ppo_mini_batch_size", critic, critic_dp, critic_ranks)
    if config.needs_reference() and (ref_dp := config.ref_dp_size(topology)) != actor_dp:
        train, ranks = config.data.train_batch_size, topology.world_size
        yield from _check_share(config, "data.train_batch_size", train, ref_dp, ranks, " of the reference model")
    prompts, limit = config.prompts_per_generation_batch(), config.data.train_max_samples
    is_automatic = config.is_automatic("data.train_batch_size")  # the run then chooses a size that fits the data
    if limit != -1 and limit < prompts and not (is_automatic and prompts == config.data.train_batch_size):
        key = "data.gen_batch_size" if config.algorithm.filter_groups.enable else "data.train_batch_size"
        message = (
            f"loads fewer prompts than one generation batch contains ({key}={prompts}). Set "
            f"data.train_max_samples=-1, or at least {prompts}."
        )
        yield Problem("data.train_max_samples", limit, message, (key,))


def _ranks(world_size: int, dp_size: int) -> str:
    """Describe the data-parallel ranks: '4 ranks', or '2 groups of 2 ranks' with model parallelism."""
    return f"{dp_size} ranks" if dp_size == world_size else f"{dp_size} groups of {world_size // dp_size} ranks"


def _quotient(total: int, world_size: int, dp_size: int) -> str:
    """Format the division of a batch by the data-parallel ranks, for example '512 = 3 ranks x 170 + 2'."""
    return f"{total} = {_ranks(world_size, dp_size)} x {total // dp_size} + {total % dp_size}"


def _check_share(
    config: PPOConfig, key: str, prompts: int, dp_size: int, ranks: int, model: str = ""
) -> Iterator[Problem]:
    """Check that the responses to a number of prompts are divisible by a data-parallel size."""
    n = config.actor_rollout_ref.rollout.n
    if prompts * n % dp_size:
        quotient = _quotient(prompts * n, ranks, dp_size).partition(" = ")[2]
        message = (
            f"is not divisible by the data-parallel size{model}: {prompts} prompts x rollout.n={n} = {prompts * n} "
            f"sequences = {quotient}."
        )
        yield Problem(key, prompts, message, (*WORLD, "data.train_batch_size", f"{ROLLOUT}.n"))


def _check_mini_batches(config: PPOConfig, key: str, mini: int, dp_size: int, world_size: int) -> Iterator[Problem]:
    """Check that an iteration is divisible into mini-batches, and a mini-batch into equal parts per rank."""
    train, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    related = ("data.train_batch_size", f"{ROLLOUT}.n")
    if mini > train:
        message = f"exceeds data.train_batch_size={train}, the prompts of an iteration. Set {key}={train}."
        yield Problem(key, mini, message, related)
    elif train % mini:
        count, rest = divmod(train, mini)
        message = (
            f"data.train_batch_size={train} is not divisible by this mini-batch size:\n"
            f"{train} prompts x rollout.n={n} = {train * n} sequences per iteration;"
            f" {mini} x {n} = {mini * n} per mini-batch;\n"
            f"{train * n} = {count} x {mini * n} + {rest * n}.\n"
            f"Set data.train_batch_size={count * mini} or {(count + 1) * mini}, or "
            f"{key}={largest_divisor(train, mini)}."
        )
        yield Problem(key, mini, message, related)
    yield from _check_share(config, key, mini, dp_size, world_size)


def _used_limits(config: PPOConfig) -> dict[Pass, PassLimit]:
    """Return the limits of the micro-batches that the run has."""
    uses: dict[Pass, bool] = {
        "old_log_prob": config.needs_log_prob_passes(),
        "ref": config.needs_reference_model(),
        "critic": config.needs_critic(),
        "values": config.needs_critic(),
        "reward": config.needs_reward_engine(),
    }
    return {kind: limit for kind, limit in pass_limits(config).items() if uses.get(kind, True)}


def _check_global_micro_batches(config: PPOConfig) -> Iterator[Problem]:
    """Check that the micro-batch sizes in use are set, and divisible by the data-parallel size if they are global."""
    topology = config.topology()
    worlds = {"critic": topology.critic_topology().world_size, REWARD: topology.reward_model_topology().world_size}
    for limit in _used_limits(config).values():
        key, size = limit.key, limit.count_global
        if limit.is_dynamic or limit.per_gpu is not None:
            continue
        if size is None:
            yield Problem(f"{key}_per_gpu", None, "sets no micro-batch size. Set a number of sequences, for example 8.")
        elif size % (dp_size := limit.dp_size(topology)):
            world_size = worlds.get(key.partition(".")[0], topology.world_size)
            message = (
                "counts sequences over all ranks and is not divisible by the data-parallel size: "
                f"{_quotient(size, world_size, dp_size)}.\n"
                f"Set {key}_per_gpu={max(1, size // dp_size)}, which counts the sequences on each rank."
            )
            yield Problem(key, size, message, WORLD)


def _check_token_budgets(config: PPOConfig) -> Iterator[Problem]:
    """Check that no token budget of a micro-batch is smaller than the longest sequence. `rewards.py` checks scores."""
    prompt, response = config.data.max_prompt_length, config.actor_rollout_ref.rollout.response_length
    for kind, limit in _used_limits(config).items():
        if kind != "reward" and limit.is_dynamic and limit.tokens < prompt + response:
            message = (
                f"is smaller than the longest sequence: data.max_prompt_length={prompt} + rollout.response_length="
                f"{response} = {prompt + response}. Set {limit.tokens_key}={prompt + response} or more."
            )
            related = ("data.max_prompt_length", f"{ROLLOUT}.response_length")
            yield Problem(limit.tokens_key, limit.tokens, message, related)


def _check_lengths(config: PPOConfig) -> Iterator[Problem]:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    if rollout.prompt_length < data.max_prompt_length:
        message = (
            f"is smaller than data.max_prompt_length={data.max_prompt_length}. Omit {ROLLOUT}.prompt_length, which "
            "then has the same value."
        )
        yield Problem(f"{ROLLOUT}.prompt_length", rollout.prompt_length, message, ("data.max_prompt_length",))
    if rollout.response_length > data.max_response_length:
        message = (
            f"exceeds data.max_response_length={data.max_response_length}. Increase data.max_response_length instead."
        )
        yield Problem(f"{ROLLOUT}.response_length", rollout.response_length, message, ("data.max_response_length",))
    if data.max_prompt_id_length is not None and data.prompt_id_key is None:
        message = (
            "has no effect without data.prompt_id_key. Set data.prompt_id_key to the column of prompt IDs, or omit "
            "data.max_prompt_id_length."
        )
        yield Problem("data.max_prompt_id_length", data.max_prompt_id_length, message, ("data.prompt_id_key",))


# -- algorithm ------------------------------------------------------------------------------------


def _check_estimator(config: PPOConfig) -> Iterator[Problem]:
    key, estimator, n = "algorithm.adv_estimator", config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    yield from check_name(key, estimator, (*ESTIMATORS, *RECIPES), "estimators", "module:function")
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


def _check_policy_loss(config: PPOConfig) -> Iterator[Problem]:
    actor = config.actor_rollout_ref.actor
    key, mode = f"{ACTOR}.policy_loss.loss_mode", actor.policy_loss.loss_mode
    yield from check_name(key, mode, POLICY_LOSSES, "policy_losses", "module:function")
    if mode == "gspo" and actor.loss_agg_mode != "seq-mean-token-mean":
        aggregation = f"{ACTOR}.loss_agg_mode"
        message = f"{key}=gspo weights all responses equally. Set {aggregation}=seq-mean-token-mean."
        yield Problem(aggregation, actor.loss_agg_mode, message, (key,))


def _check_correction(config: PPOConfig) -> Iterator[Problem]:
    """Check that rollout correction is used with sampling, and that every rejection rule has a valid threshold."""
    correction = config.algorithm.rollout_correction
    enabled = {f"{CORRECTION}.rollout_is": correction.rollout_is, f"{CORRECTION}.rollout_rs": correction.rollout_rs}
    for name, value in enabled.items():
        if value and not config.actor_rollout_ref.rollout.do_sample:
            message = f"requires sampling, but {ROLLOUT}.do_sample=false disables it. Set {name}=null."
            yield Problem(name, value, message, (f"{ROLLOUT}.do_sample",))
    rules, texts = correction.rollout_rs, correction.rollout_rs_threshold
    key, related = f"{CORRECTION}.rollout_rs_threshold", (f"{CORRECTION}.rollout_rs",)
    if rules and not texts:
        example = "2.0" if rules[0].endswith("k1") else "0.01"
        message = f"a threshold is required for {', '.join(rules)}. Set {key}={example}."
        yield Problem(key, None, message, related)
    elif texts and not rules:
        message = f"has no effect without {CORRECTION}.rollout_rs. Set {key}=null."
        yield Problem(key, texts, message, related)
    elif len(texts) not in (1, len(rules)):
        message = f"{len(texts)} values are set for {len(rules)} rules. Set one value for all rules, or one per rule."
        yield Problem(key, texts, message, related)
    elif len(texts) < len(rules) and len({rule.endswith("k1") for rule in rules}) == 2:
        values = ",".join("2.0" if rule.endswith("k1") else "0.01" for rule in rules)
        message = (
            "a single value cannot apply to both ratios (k1) and divergences (k2, k3). Set one "
            f"value per rule: '{key}=[{values}]'."
        )
        yield Problem(key, texts, message, related)
        return
    for rule, text in zip(rules, texts * len(rules) if len(texts) == 1 else texts, strict=False):
        try:
            parse_threshold(rule, text)
        except ValueError as error:
            yield Problem(key, text, f"the threshold of {rule} {error}.", related)


def _check_bypass(config: PPOConfig) -> Iterator[Problem]:
    """Check that `bypass_mode` is used only if rollout and trainer compute log-probs of the same distribution."""
    correction, rollout = config.algorithm.rollout_correction, config.actor_rollout_ref.rollout
    key = f"{CORRECTION}.bypass_mode"
    if not correction.bypass_mode:
        return
    for leaf, value in {"rollout_is": correction.rollout_is, "rollout_rs": correction.rollout_rs}.items():
        if value:
            related_key = f"{CORRECTION}.{leaf}"
            message = (
                f"{leaf} compares the log-probs of rollout and trainer, but bypass_mode skips those of the trainer. "
                f"Set {related_key}=null."
            )
            yield Problem(key, True, message, (related_key,))
    truncated = {"do_sample=true": not rollout.do_sample, "top_p=1.0": rollout.top_p < 1, "top_k=0": rollout.top_k > 0}
    truncated |= {f"{name}={off}": getattr(rollout, name) != off for name, off in OPTIONAL_SAMPLING.items()}
    for fix, is_truncated in truncated.items():
        if is_truncated:
            related_key = f"{ROLLOUT}.{fix.partition('=')[0]}"
            message = f"requires the full distribution, which {related_key} restricts. Set {ROLLOUT}.{fix}."
            yield Problem(key, True, message, (related_key,))


def _check_filter_groups(config: PPOConfig) -> Iterator[Problem]:
    """Check dynamic sampling, which drops groups of responses that give no gradient."""
    filtering, data, estimator = config.algorithm.filter_groups, config.data, config.algorithm.adv_estimator
    key, related = "algorithm.filter_groups.enable", (f"{ROLLOUT}.n", "algorithm.adv_estimator")
    if not filtering.enable:
        if data.gen_batch_size not in (None, data.train_batch_size):
            message = f"has no effect with {key}=false. Set {key}=true, or data.gen_batch_size=null."
            yield Problem("data.gen_batch_size", data.gen_batch_size, message, (key, "data.train_batch_size"))
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


def _check_validation_sampling(config: PPOConfig) -> Iterator[Problem]:
    val, section = config.actor_rollout_ref.rollout.val_kwargs, f"{ROLLOUT}.val_kwargs"
    if val.do_sample and val.temperature == 0:
        message = f"has no effect with {section}.temperature=0. Set {section}.temperature=1.0."
        yield Problem(f"{section}.do_sample", val.do_sample, message, (f"{section}.temperature",))
    if val.n > 1 and not val.do_sample:
        message = (
            f"greedy decoding generates {val.n} identical responses per prompt. Set {section}.do_sample=true "
            f"{section}.temperature=1.0."
        )
        yield Problem(f"{section}.n", val.n, message, (f"{section}.do_sample",))


# -- training files, validation, resuming and checkpoints -----------------------------------------


def _check_run(config: PPOConfig) -> Iterator[Problem]:
    trainer = config.trainer
    yield from _check_training(config)
    if not config.data.val_files and (trainer.val_before_train or trainer.val_only or trainer.test_freq != -1):
        related = ("trainer.val_before_train", "trainer.test_freq", "trainer.val_only")
        off = ["trainer.val_only=false"] * trainer.val_only + ["trainer.val_before_train=false", "trainer.test_freq=-1"]
        message = f"validation requires prompts. Set data.val_files, or disable validation with {' '.join(off)}."
        yield Problem("data.val_files", None, message, related)
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        message = (
            "requires a checkpoint to resume from. Set trainer.resume_from_path=<folder>, or trainer.resume_mode=auto."
        )
        yield Problem("trainer.resume_mode", "resume_path", message, ("trainer.resume_from_path",))
    if trainer.resume_mode != "resume_path" and trainer.resume_from_path is not None:
        message = f"has no effect with trainer.resume_mode={trainer.resume_mode}. Set trainer.resume_mode=resume_path."
        yield Problem("trainer.resume_from_path", trainer.resume_from_path, message, ("trainer.resume_mode",))
    yield from _check_best_metric(trainer.best_metric, trainer.test_freq)
    if trainer.use_legacy_worker_impl in ("enable", True):
        message = "camshaft has no legacy implementation. Omit the key."
        yield Problem("trainer.use_legacy_worker_impl", trainer.use_legacy_worker_impl, message)
    if trainer.total_training_steps is not None and not trainer.val_only:
        yield from check_critic_warmup(trainer.critic_warmup, trainer.total_training_steps)
    actor, critic, steps = config.actor_rollout_ref.actor, config.critic, trainer.total_training_steps
    yield from _check_warmup(f"{ACTOR}.optim", actor.optim, steps, trainer.critic_warmup)
    if config.needs_critic():
        yield from _check_warmup("critic.optim", critic.optim, steps)
    yield from check_contents(f"{ACTOR}.checkpoint", actor.checkpoint)
    if config.needs_critic():
        yield from check_contents("critic.checkpoint", critic.checkpoint)


def check_critic_warmup(warmup: int, total_steps: int) -> Iterator[Problem]:
    """Check that the actor is trained after the critic warm-up. The trainer repeats the check for a run of epochs."""
    if warmup >= total_steps:
        message = (
            f"the first {warmup} iterations train only the critic, and the run has {total_steps}, so the actor would "
            f"never be trained. Set trainer.critic_warmup to less than {total_steps}, or train longer."
        )
        yield Problem("trainer.critic_warmup", warmup, message, ("trainer.total_training_steps",))


def _check_training(config: PPOConfig | SupervisedConfig) -> Iterator[Problem]:
    """Check that a run has training data and an end."""
    if not config.data.train_files:
        yield Problem("data.train_files", None, "training requires at least one file. Set data=<file>.")
    if config.trainer.total_epochs is None and config.trainer.total_training_steps is None:
        message = "the run has no end. Set trainer.total_training_steps or trainer.total_epochs."
        yield Problem("trainer.total_epochs", None, message, ("trainer.total_training_steps",))


def _check_best_metric(metric: str | None, test_freq: int | str) -> Iterator[Problem]:
    if metric is not None and test_freq == -1:
        message = "requires validation during training. Set trainer.test_freq=<steps>."
        yield Problem("trainer.best_metric", metric, message, ("trainer.test_freq",))


def _check_warmup(key: str, optim: OptimSection, run_steps: int | None, skipped: int = 0) -> Iterator[Problem]:
    """Check that the schedule is longer than its warm-up. The schedule of the actor starts after `skipped` steps."""
    related, length = f"{key}.total_training_steps", optim.total_training_steps
    source = f"the length of the schedule ({related})"
    if length == -1 or optim.lr_scheduler_type == "constant":
        related, length = "trainer.total_training_steps", None if run_steps is None else run_steps - skipped
        source = f"the length of the run ({related}{f' - trainer.critic_warmup={skipped}' if skipped else ''})"
    if length is not None and 0 < length <= optim.lr_warmup_steps:
        message = f"must be less than {format_value(length)}, {source}."
        yield Problem(f"{key}.lr_warmup_steps", optim.lr_warmup_steps, message, (related,))


# -- supervised runs ------------------------------------------------------------------------------


def _check_supervised(config: SupervisedConfig) -> Iterator[Problem]:
    data, trainer, world_size = config.data, config.trainer, config.trainer.world_size
    dp_size = Topology(world_size).dp_size(config.ranks_per_row()) if layouts_are_valid(config) else 1
    yield from _check_trackers(trainer.logger)
    batch = data.train_batch_size
    if batch % dp_size:
        message = f"is not divisible by the data-parallel size: {_quotient(batch, world_size, dp_size)}."
        yield Problem("data.train_batch_size", batch, message, WORLD)
    is_automatic = config.is_automatic("data.train_batch_size")
    if data.train_max_samples != -1 and data.train_max_samples < batch and not is_automatic:
        message = (
            f"loads fewer rows than one step requires (data.train_batch_size={batch}). Set data.train_max_samples=-1, "
            f"or at least {batch}."
        )
        yield Problem("data.train_max_samples", data.train_max_samples, message, ("data.train_batch_size",))
    max_length = config.max_row_length()
    if data.use_dynamic_bsz and data.max_token_len_per_gpu < max_length:
        kind = "sequence" if max_length == data.max_length else f"pair of sequences ({max_length} tokens)"
        message = f"is smaller than the longest {kind}: data.max_length={data.max_length}. Set {max_length} or more."
        yield Problem("data.max_token_len_per_gpu", data.max_token_len_per_gpu, message, ("data.max_length",))
    yield from _check_training(config)
    if not data.val_files and trainer.test_freq != -1:
        message = "validation requires data. Set data.val_files, or trainer.test_freq=-1."
        yield Problem("data.val_files", None, message, ("trainer.test_freq",))
    yield from _check_best_metric(trainer.best_metric, trainer.test_freq)
    yield from _check_warmup("optim", config.optim, trainer.total_training_steps)
    yield from check_contents("checkpoint", config.checkpoint)
