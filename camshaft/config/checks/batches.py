"""Checks of batch sizes, token budgets and lengths. Messages include the arithmetic."""

from collections.abc import Iterator

from camshaft.config.auto.fitting import awaits_prompts
from camshaft.config.checks.backends import layouts_are_valid
from camshaft.config.derive import Pass, PassLimit, pass_limits
from camshaft.config.engine import largest_divisor
from camshaft.config.errors import Problem
from camshaft.config.layout import Topology
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.supervised import SupervisedConfig

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
WORLD = ("trainer.nnodes", "trainer.n_gpus_per_node")
_NO_SIZE = "sets no micro-batch size. Set a number of sequences, for example 8."


def check_ppo_batches(config: PPOConfig) -> Iterator[Problem]:
    """Check the batches of an RL run."""
    if layouts_are_valid(config):
        yield from _check_batches(config)
        yield from _check_global_micro_batches(config)
    yield from _check_generation_batch(config)
    if not awaits_prompts(config):
        yield from check_token_budgets(config)
    yield from _check_lengths(config)


def check_supervised_batches(config: SupervisedConfig) -> Iterator[Problem]:
    """Check the batches of a supervised run."""
    data, world_size = config.data, config.trainer.world_size
    dp_size = Topology(world_size).dp_size(config.ranks_per_row()) if layouts_are_valid(config) else 1
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
    if not data.use_dynamic_bsz and data.micro_batch_size_per_gpu is None:
        yield Problem("data.micro_batch_size_per_gpu", None, _NO_SIZE)
    if data.use_dynamic_bsz and data.max_token_len_per_gpu < max_length:
        kind = "sequence" if max_length == data.max_length else f"pair of sequences ({max_length} tokens)"
        message = f"is smaller than the longest {kind}: data.max_length={data.max_length}. Set {max_length} or more."
        yield Problem("data.max_token_len_per_gpu", data.max_token_len_per_gpu, message, ("data.max_length",))


def _check_batches(config: PPOConfig) -> Iterator[Problem]:
    topology, actor = config.topology(), config.actor_rollout_ref.actor.ppo_mini_batch_size
    actor_dp = config.actor_dp_size(topology)
    yield from _check_mini_batches(config, f"{ACTOR}.ppo_mini_batch_size", actor, actor_dp, topology.world_size)
    if config.needs_critic():
        critic, critic_dp = config.critic.ppo_mini_batch_size, config.critic_dp_size(topology)
        if (critic, critic_dp) != (actor, actor_dp):
            critic_ranks = topology.critic_topology().world_size
            yield from _check_mini_batches(config, "critic.ppo_mini_batch_size", critic, critic_dp, critic_ranks)
    if config.kl_plan().is_used and (ref_dp := config.ref_dp_size(topology)) != actor_dp:
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


def _check_generation_batch(config: PPOConfig) -> Iterator[Problem]:
    data, key = config.data, "algorithm.filter_groups.enable"
    if not config.algorithm.filter_groups.enable and data.gen_batch_size not in (None, data.train_batch_size):
        message = f"has no effect with {key}=false. Set {key}=true, or data.gen_batch_size=null."
        yield Problem("data.gen_batch_size", data.gen_batch_size, message, (key, "data.train_batch_size"))


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
        "ref": config.kl_plan().needs_model,
        "critic": config.needs_critic(),
        "values": config.needs_critic(),
        "reward": config.needs_reward_engine(),
    }
    return {kind: limit for kind, limit in pass_limits(config).items() if uses.get(kind, True)}


def _check_global_micro_batches(config: PPOConfig) -> Iterator[Problem]:
    """Check that the micro-batch sizes in use are set, and divisible by the data-parallel size if they are global."""
    topology = config.topology()
    worlds = {
        "critic": topology.critic_topology().world_size,
        "reward_model": topology.reward_model_topology().world_size,
    }
    for limit in _used_limits(config).values():
        key, size = limit.key, limit.count_global
        if limit.is_dynamic or limit.per_gpu is not None:
            continue
        if size is None:
            yield Problem(f"{key}_per_gpu", None, _NO_SIZE)
        elif size % (dp_size := limit.dp_size(topology)):
            world_size = worlds.get(key.partition(".")[0], topology.world_size)
            message = (
                "counts sequences over all ranks and is not divisible by the data-parallel size: "
                f"{_quotient(size, world_size, dp_size)}.\n"
                f"Set {key}_per_gpu={max(1, size // dp_size)}, which counts the sequences on each rank."
            )
            yield Problem(key, size, message, WORLD)


def check_token_budgets(config: PPOConfig) -> Iterator[Problem]:
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
