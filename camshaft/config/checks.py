"""What several keys must fulfil together. Each check yields every problem it finds, and stops at none.

    problems = list(check(config))        # the config of any command

A problem names the keys that it rests on, so that `loader.py` can leave it out where one of them is wrong
by itself. Batch arithmetic is spelled out in the message.
"""

from collections.abc import Iterable, Iterator

from camshaft.config.algorithm_checks import algorithm
from camshaft.config.backend_checks import (
    adapter_of_rollout,
    layouts_are_valid,
    ppo_engines,
    rollout_problems,
    supervised_engines,
)
from camshaft.config.engine import divisor
from camshaft.config.files import eval_files, generate_files, ppo_files, supervised_files
from camshaft.config.place import place_problems
from camshaft.config.problems import Problem, check_name
from camshaft.config.reward_checks import scores, scoring_function
from camshaft.config.schema.evaluation import EvalConfig
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.model import CheckpointConfig, OptimSection
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.roles import GeneratorConfig
from camshaft.config.schema.supervised import SupervisedConfig
from camshaft.config.topology import Topology
from camshaft.config.tree import shown
from camshaft.plugins import TRACKERS

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
WORLD = ("trainer.nnodes", "trainer.n_gpus_per_node")
RESUMED_FROM = ("model", "optimizer", "extra")


def check(config: PPOConfig | SupervisedConfig | GenerateConfig | EvalConfig) -> Iterator[Problem]:
    """Everything that is wrong between the keys of a config whose single values are right."""
    if isinstance(config, GenerateConfig):
        yield from place_problems(config.trainer, {}, {})
        yield from _generator("rollout", config.rollout, config.trainer.world_size)
        yield from scoring_function(config.custom_reward_function)
        yield from generate_files(config)
        return
    if isinstance(config, EvalConfig):
        yield from scoring_function(config.custom_reward_function)
        yield from eval_files(config)
        return
    if isinstance(config, SupervisedConfig):
        yield from place_problems(config.trainer, {}, {})
        yield from supervised_engines(config)
        yield from _supervised(config)
        yield from supervised_files(config)
        return
    used = {f"{role}.resource_pool": name for role, name in config.pools().items()}
    yield from place_problems(config.trainer, config.trainer.resource_pools, used)
    yield from _names(config)
    yield from scores(config)
    yield from ppo_engines(config)
    yield from adapter_of_rollout(config)
    if layouts_are_valid(config):
        yield from _batches(config)
        yield from _older_micro_batches(config)
    yield from _token_budgets(config)
    yield from _lengths(config)
    yield from algorithm(config)
    yield from _sampling(config)
    yield from _run(config)
    yield from ppo_files(config)


# -- names of parts -------------------------------------------------------------------------------


def _names(config: PPOConfig) -> Iterator[Problem]:
    roles = {"actor_rollout_ref": config.actor_rollout_ref.worker_cls, "critic": config.critic.worker_cls}
    for role, name in roles.items():
        if name is not None:
            yield from check_name(f"{role}.worker_cls", name, (), "roles")
    yield from _generator(ROLLOUT, config.actor_rollout_ref.rollout, config.topology().world_size)
    yield from _trackers(config.trainer.logger)


def _trackers(trackers: Iterable[str]) -> Iterator[Problem]:
    for tracker in trackers:
        yield from check_name("trainer.logger", tracker, TRACKERS, "trackers")


def _generator(section: str, rollout: GeneratorConfig, world_size: int) -> Iterator[Problem]:
    """Name, options and sampling of a rollout; `section` holds its keys."""
    yield from rollout_problems(section, rollout, world_size)
    if rollout.n > 1 and not rollout.do_sample:
        sentence = f"makes {rollout.n} equal responses with {section}.do_sample=false. Type {section}.do_sample=true."
        yield Problem(f"{section}.n", rollout.n, sentence, (f"{section}.do_sample",))


# -- batch arithmetic -----------------------------------------------------------------------------


def _batches(config: PPOConfig) -> Iterator[Problem]:
    topology, actor = config.topology(), config.actor_rollout_ref.actor.ppo_mini_batch_size
    actors, critics = config.actor_dp_size(topology), config.critic_dp_size(topology)
    world, of_critic = topology.world_size, topology.of_critic().world_size
    yield from _mini_batches(config, f"{ACTOR}.ppo_mini_batch_size", actor, actors, world)
    if config.needs_critic() and (config.critic.ppo_mini_batch_size, critics) != (actor, actors):
        mini = config.critic.ppo_mini_batch_size
        yield from _mini_batches(config, "critic.ppo_mini_batch_size", mini, critics, of_critic)
    refs = config.ref_dp_size(topology)
    if config.needs_reference() and refs != actors:
        yield from _iteration_of_reference(config, refs)
    prompts, most = config.generated_together(), config.data.train_max_samples
    if most != -1 and most < prompts:
        key = "data.gen_batch_size" if config.algorithm.filter_groups.enable else "data.train_batch_size"
        sentence = f"reads fewer prompts than are generated together: {key}={prompts}."
        yield Problem("data.train_max_samples", most, sentence, (key,))


def _ranks(world: int, dp_size: int) -> str:
    """'4 ranks', or how they come to be fewer than all."""
    return f"{dp_size} ranks" if dp_size == world else f"{dp_size} groups of {world // dp_size} ranks"


def _iteration_of_reference(config: PPOConfig, dp_size: int) -> Iterator[Problem]:
    """The others have whole mini-batches; the reference, which has none, takes an iteration at once."""
    train, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    if train * n % dp_size:
        sentence = (
            f"does not split evenly over the reference's ranks: {train} prompts x rollout.n={n} = {train * n}"
            f" sequences = {_ranks(config.topology().world_size, dp_size)} x {train * n // dp_size}"
            f" + {train * n % dp_size}."
        )
        yield Problem("data.train_batch_size", train, sentence, (*WORLD, f"{ROLLOUT}.n"))


def _mini_batches(config: PPOConfig, key: str, mini: int, dp_size: int, world: int) -> Iterator[Problem]:
    """An iteration is whole mini-batches, and a mini-batch is whole shares of the ranks."""
    train, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    rests_on = ("data.train_batch_size", f"{ROLLOUT}.n")
    if mini > train:
        sentence = f"is more than an iteration has: data.train_batch_size={train} prompts. Type {key}={train}."
        yield Problem(key, mini, sentence, rests_on)
    elif train % mini:
        whole, rest = divmod(train, mini)
        sentence = (
            f"does not divide an iteration into whole mini-batches:\n"
            f"data.train_batch_size={train} prompts x rollout.n={n} = {train * n} sequences;"
            f" {mini} x {n} = {mini * n} per mini-batch;\n"
            f"{train * n} = {whole} x {mini * n} + {rest * n}.\n"
            f"Type data.train_batch_size={whole * mini} or {(whole + 1) * mini}, or {key}={divisor(train, mini)}."
        )
        yield Problem(key, mini, sentence, rests_on)
    if mini * n % dp_size:
        sentence = (
            f"does not split evenly over the ranks: {mini} prompts x rollout.n={n} = {mini * n} sequences"
            f" = {_ranks(world, dp_size)} x {mini * n // dp_size} + {mini * n % dp_size}."
        )
        yield Problem(key, mini, sentence, (*WORLD, *rests_on))


def _older_micro_batches(config: PPOConfig) -> Iterator[Problem]:
    """The older keys count sequences over all ranks; where one is used, it must split evenly."""
    section, critic, topology = config.actor_rollout_ref, config.critic, config.topology()
    actor, rollout, ref, reward = section.actor, section.rollout, section.ref, config.reward_model
    actors, refs, critics = (
        config.actor_dp_size(topology),
        config.ref_dp_size(topology),
        config.critic_dp_size(topology),
    )
    used: dict[str, tuple[int, int]] = {}
    if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is None:
        used[f"{ACTOR}.ppo_micro_batch_size"] = actor.ppo_micro_batch_size, actors
    if not rollout.log_prob_use_dynamic_bsz and rollout.log_prob_micro_batch_size_per_gpu is None:
        used[f"{ROLLOUT}.log_prob_micro_batch_size"] = rollout.log_prob_micro_batch_size, actors
    by_count = not ref.log_prob_use_dynamic_bsz and ref.log_prob_micro_batch_size_per_gpu is None
    if config.needs_reference_model() and by_count:
        used[f"{REF}.log_prob_micro_batch_size"] = ref.log_prob_micro_batch_size, refs
    if config.needs_critic() and not critic.use_dynamic_bsz:
        if critic.ppo_micro_batch_size_per_gpu is None:
            used["critic.ppo_micro_batch_size"] = critic.ppo_micro_batch_size, critics
        if critic.forward_micro_batch_size_per_gpu is None:
            used["critic.forward_micro_batch_size"] = critic.forward_micro_batch_size, critics
    if config.needs_reward_engine() and not reward.use_dynamic_bsz and reward.micro_batch_size_per_gpu is None:
        used["reward_model.micro_batch_size"] = reward.micro_batch_size, config.reward_dp_size(topology)
    worlds = {"critic": topology.of_critic().world_size, "reward_model": topology.of_reward_model().world_size}
    for key, (size, dp_size) in used.items():
        if size % dp_size:
            world = worlds.get(key.partition(".")[0], topology.world_size)
            sentence = (
                f"counts sequences over all ranks and does not split evenly: {size} = {_ranks(world, dp_size)} x"
                f" {size // dp_size} + {size % dp_size}.\n"
                f"Type {key}_per_gpu={max(1, size // dp_size)}, which counts on one rank."
            )
            yield Problem(key, size, sentence, WORLD)


def _token_budgets(config: PPOConfig) -> Iterator[Problem]:
    """A budget is a hard limit, so the longest sequence must fit into it."""
    section, critic = config.actor_rollout_ref, config.critic
    prompt, response = config.data.max_prompt_length, section.rollout.response_length
    used = {}
    if section.actor.use_dynamic_bsz:
        used[f"{ACTOR}.ppo_max_token_len_per_gpu"] = section.actor.ppo_max_token_len_per_gpu
    if section.rollout.log_prob_use_dynamic_bsz:
        used[f"{ROLLOUT}.log_prob_max_token_len_per_gpu"] = section.rollout.log_prob_max_token_len_per_gpu
    if config.needs_reference_model() and section.ref.log_prob_use_dynamic_bsz:
        used[f"{REF}.log_prob_max_token_len_per_gpu"] = section.ref.log_prob_max_token_len_per_gpu
    if config.needs_critic() and critic.use_dynamic_bsz:
        used["critic.ppo_max_token_len_per_gpu"] = critic.ppo_max_token_len_per_gpu
        used["critic.forward_max_token_len_per_gpu"] = critic.forward_max_token_len_per_gpu
    for key, budget in used.items():
        if budget < prompt + response:
            sentence = (
                f"is less than the longest sequence: data.max_prompt_length={prompt} + rollout.response_length="
                f"{response} = {prompt + response}. Type {key}={prompt + response} or more."
            )
            yield Problem(key, budget, sentence, ("data.max_prompt_length", f"{ROLLOUT}.response_length"))


def _lengths(config: PPOConfig) -> Iterator[Problem]:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    if rollout.prompt_length < data.max_prompt_length:
        sentence = f"is shorter than the prompts that are read: data.max_prompt_length={data.max_prompt_length}."
        yield Problem(f"{ROLLOUT}.prompt_length", rollout.prompt_length, sentence, ("data.max_prompt_length",))
    if rollout.response_length > data.max_response_length:
        sentence = f"is longer than data.max_response_length={data.max_response_length}. Set that instead."
        yield Problem(f"{ROLLOUT}.response_length", rollout.response_length, sentence, ("data.max_response_length",))
    if data.max_prompt_id_length is not None and data.prompt_id_key is None:
        sentence = "is not read without data.prompt_id_key. Name the column of ids, or leave the key out."
        yield Problem("data.max_prompt_id_length", data.max_prompt_id_length, sentence, ("data.prompt_id_key",))


# -- sampling -------------------------------------------------------------------------------------


def _sampling(config: PPOConfig) -> Iterator[Problem]:
    val, val_key = config.actor_rollout_ref.rollout.val_kwargs, f"{ROLLOUT}.val_kwargs"
    if val.do_sample and val.temperature == 0:
        sentence = f"does not sample with {val_key}.temperature=0. Type {val_key}.temperature=1.0."
        yield Problem(f"{val_key}.do_sample", val.do_sample, sentence, (f"{val_key}.temperature",))
    if val.n > 1 and not val.do_sample:
        sentence = f"makes {val.n} equal responses. Type {val_key}.do_sample=true {val_key}.temperature=1.0."
        yield Problem(f"{val_key}.n", val.n, sentence, (f"{val_key}.do_sample",))


# -- the run as a whole ---------------------------------------------------------------------------


def _run(config: PPOConfig) -> Iterator[Problem]:
    trainer = config.trainer
    yield from _training_files(config.data.train_files)
    if not config.data.val_files and (trainer.val_before_train or trainer.val_only or trainer.test_freq != -1):
        sentence = "validation needs files. Name some, or type trainer.val_before_train=false trainer.test_freq=-1."
        yield Problem("data.val_files", None, sentence, ("trainer.val_before_train", "trainer.test_freq"))
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        sentence = "needs the checkpoint to start from. Type trainer.resume_from_path=<folder>, or resume_mode=auto."
        yield Problem("trainer.resume_mode", "resume_path", sentence, ("trainer.resume_from_path",))
    if trainer.resume_mode != "resume_path" and trainer.resume_from_path is not None:
        sentence = f"is not read with trainer.resume_mode={trainer.resume_mode}. Type trainer.resume_mode=resume_path."
        yield Problem("trainer.resume_from_path", trainer.resume_from_path, sentence, ("trainer.resume_mode",))
    yield from _best(trainer.best_metric, trainer.test_freq)
    if trainer.use_legacy_worker_impl in ("enable", True):
        sentence = "there is one implementation here and no older one to go back to. Leave the key out."
        yield Problem("trainer.use_legacy_worker_impl", trainer.use_legacy_worker_impl, sentence)
    roles = [(f"{ACTOR}.optim", config.actor_rollout_ref.actor.optim)]
    roles += [("critic.optim", config.critic.optim)] if config.needs_critic() else []
    for key, optim in roles:
        yield from _warmup(key, optim, trainer.total_training_steps)
    yield from _contents(f"{ACTOR}.checkpoint", config.actor_rollout_ref.actor.checkpoint)
    if config.needs_critic():
        yield from _contents("critic.checkpoint", config.critic.checkpoint)


def _training_files(paths: Iterable[str]) -> Iterator[Problem]:
    if not paths:
        yield Problem("data.train_files", None, "there is nothing to train on. Name at least one file.")


def _best(metric: str | None, test_freq: int) -> Iterator[Problem]:
    if metric is not None and test_freq == -1:
        sentence = "is measured by validation, and there is none between steps. Type trainer.test_freq=<steps>."
        yield Problem("trainer.best_metric", metric, sentence, ("trainer.test_freq",))


def _warmup(key: str, optim: OptimSection, total_steps: int | None) -> Iterator[Problem]:
    if total_steps is not None and optim.lr_warmup_steps >= total_steps:
        sentence = f"the warm-up lasts longer than the run: trainer.total_training_steps={shown(total_steps)}."
        yield Problem(f"{key}.lr_warmup_steps", optim.lr_warmup_steps, sentence, ("trainer.total_training_steps",))


def _contents(key: str, checkpoint: CheckpointConfig) -> Iterator[Problem]:
    held = checkpoint.save_contents
    missing = [name for name in RESUMED_FROM if name not in held]
    if missing:
        whole = ",".join([*RESUMED_FROM, *(["hf_model"] if "hf_model" in held else [])])
        sentence = (
            f"a run goes on from {', '.join(RESUMED_FROM)}: none can be left out, and {', '.join(missing)} would be."
            f" Type '{key}.save_contents=[{whole}]'."
        )
        yield Problem(f"{key}.save_contents", held, sentence)


def _supervised(config: SupervisedConfig) -> Iterator[Problem]:
    data, trainer, world = config.data, config.trainer, config.trainer.world_size
    dp_size = Topology(world).dp_size(config.ranks_per_row()) if layouts_are_valid(config) else 1
    yield from _trackers(trainer.logger)
    batch = data.train_batch_size
    if batch % dp_size:
        sentence = (
            f"does not split evenly: {batch} = {_ranks(world, dp_size)} x {batch // dp_size} + {batch % dp_size}."
        )
        yield Problem("data.train_batch_size", batch, sentence, WORLD)
    if data.train_max_samples != -1 and data.train_max_samples < batch:
        sentence = f"reads fewer rows than one step takes: data.train_batch_size={batch}."
        yield Problem("data.train_max_samples", data.train_max_samples, sentence, ("data.train_batch_size",))
    longest = config.longest_row()
    if data.use_dynamic_bsz and data.max_token_len_per_gpu < longest:
        what = "sequence" if longest == data.max_length else f"pair of sequences, {longest} tokens"
        sentence = f"is less than the longest {what}: data.max_length={data.max_length}. Type {longest} or more."
        yield Problem("data.max_token_len_per_gpu", data.max_token_len_per_gpu, sentence, ("data.max_length",))
    yield from _training_files(data.train_files)
    if not data.val_files and trainer.test_freq != -1:
        sentence = "validation needs files. Name some, or type trainer.test_freq=-1."
        yield Problem("data.val_files", None, sentence, ("trainer.test_freq",))
    yield from _best(trainer.best_metric, trainer.test_freq)
    yield from _warmup("optim", config.optim, trainer.total_training_steps)
    yield from _contents("checkpoint", config.checkpoint)
