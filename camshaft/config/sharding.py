"""How engines share a model out, and what the plain one cannot do. Used by `checks.py`.

    problems = [*ppo_sharding(config)]        # or supervised_sharding

The sums are those of the sharded engine: ranks / tensor_parallel_size hold shards, ranks / (sequence x tensor)
have rows of their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from camshaft.config.derive import PLAIN, forward_options, training_options
from camshaft.config.fsdp_options import FSDPOptions
from camshaft.config.place import PlaceConfig
from camshaft.config.problems import ABSENT, Problem, grouped
from camshaft.config.readers import BUILT_IN
from camshaft.config.schema.model import AnyModelConfig, ForwardFSDPConfig, FSDPConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.reward import RewardModelConfig
from camshaft.config.schema.roles import ActorConfig, CriticConfig, RefConfig
from camshaft.config.schema.supervised import SupervisedConfig
from camshaft.errors import EngineError

ACTOR, REF, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
WHOLE_WEIGHTS = tuple(name for name in BUILT_IN if name != "vllm")
"""Generators that take no adapter by itself; those of other packages say so themselves."""
OURS = ("fsdp", "fsdp2", "fsdp1")
"""Engines whose options are known here; what those of other packages can do is theirs to say."""
WORLD = ("trainer.nnodes", "trainer.n_gpus_per_node")


@dataclass(frozen=True)
class Part:
    """One engine of a run: its sections, and the keys that these are under."""

    strategy: str
    strategy_key: str
    section: ActorConfig | RefConfig | CriticConfig | RewardModelConfig | SupervisedConfig
    key: str
    """With its dot; empty for a section that is the whole config."""
    fsdp: FSDPConfig | ForwardFSDPConfig
    fsdp_key: str
    model: AnyModelConfig | None = None
    """None: one that is never trained, and knows neither adapters nor activations to keep."""
    model_key: str = ""

    def trained(self) -> tuple[FSDPConfig, ActorConfig | CriticConfig | SupervisedConfig, AnyModelConfig] | None:
        """The sections of one that is trained."""
        fsdp, section, model = self.fsdp, self.section, self.model
        if model is None or not isinstance(fsdp, FSDPConfig) or isinstance(section, RefConfig | RewardModelConfig):
            return None
        return fsdp, section, model


def ppo_sharding(config: PPOConfig) -> Iterator[Problem]:
    """Everything that is wrong with the layouts of an RL run."""
    roles, critic, topology = config.actor_rollout_ref, config.critic, config.topology()
    strategy, strategy_key = roles.actor.strategy, f"{ACTOR}.strategy"

    def part(section: ActorConfig | RefConfig, key: str) -> Part:
        fsdp, fsdp_key = section.fsdp_config, f"{key}.fsdp_config"
        return Part(strategy, strategy_key, section, f"{key}.", fsdp, fsdp_key, roles.model, MODEL)

    policy = [part(roles.actor, ACTOR)]
    if config.needs_reference_model():
        policy.append(part(roles.ref, REF))
    groups = [(policy, topology.world_size)]
    if config.needs_critic():
        fsdp, key = critic.model.fsdp_config, "critic.model.fsdp_config"
        groups.append(
            (
                [Part(critic.strategy, "critic.strategy", critic, "critic.", fsdp, key, critic.model, "critic.model")],
                topology.of_critic().world_size,
            )
        )
    if config.needs_reward_engine():
        reward, key = config.reward_model, "reward_model"
        fsdp, fsdp_key = reward.model.fsdp_config, f"{key}.model.fsdp_config"
        ranks = topology.of_reward_model().world_size
        groups.append(([Part(reward.strategy, f"{key}.strategy", reward, f"{key}.", fsdp, fsdp_key)], ranks))
    yield from _one_process([group[0] for group, ranks in groups if ranks > 1], config.trainer)
    for group, ranks in groups:
        yield from _group(group, ranks)
    if config.needs_reference():
        yield from _no_layout_of_its_own(config)
    yield from _by_itself(config)


def supervised_sharding(config: SupervisedConfig) -> Iterator[Problem]:
    """The same of a run with one model."""
    part = Part(config.strategy, "strategy", config, "", config.fsdp_config, "fsdp_config", config.model, "model")
    yield from _one_process([part] if config.trainer.world_size > 1 else [], config.trainer)
    yield from _group([part], config.trainer.world_size)


def _group(group: list[Part], world: int) -> Iterator[Problem]:
    """Engines of one strategy; what a later one takes over from the first is told once."""
    yield from _adapter(group[0])
    if group[0].strategy == PLAIN:
        yield from _refused_by_plain(group)
        return
    told: set[str] = set()
    for part in group:
        for problem in _layout(part, world):
            if problem.sentence not in told:
                yield problem
            told.add(problem.sentence)


# -- the plain engine -----------------------------------------------------------------------------


def _one_process(parts: list[Part], trainer: PlaceConfig) -> Iterator[Problem]:
    keys = [part.strategy_key for part in parts if part.strategy == PLAIN]
    if keys:
        typed = " ".join(f"{key}=fsdp" for key in keys)
        key = "trainer.nnodes" if trainer.nnodes > 1 else "trainer.n_gpus_per_node"
        value = trainer.nnodes if trainer.nnodes > 1 else trainer.n_gpus_per_node
        sentence = f"strategy={PLAIN} is plain torch in one process. Type {typed}, or {key}=1."
        yield Problem(key, value, sentence, tuple(keys))


def _refused_by_plain(group: list[Part]) -> Iterator[Problem]:
    """Keys that ask for what it cannot do; the same key of several engines comes as one problem."""
    found: dict[tuple[str, str], list[tuple[str, object]]] = {}
    for part in group:
        for key, value, what in _asked(part):
            found.setdefault((key.rpartition(".")[2], what), []).append((key, value))
    for (_, what), asked in found.items():
        sentence = f"strategy={PLAIN} has no {what}. Type {group[0].strategy_key}=fsdp, or leave the key out."
        yield grouped([key for key, _ in asked], asked[0][1], sentence)


def _asked(part: Part) -> Iterator[tuple[str, object, str]]:
    """(key, value, what it asks for) of every key that asks for more than plain torch in one process."""
    fsdp, section, key = part.fsdp, part.section, part.fsdp_key
    units, computed = fsdp.wrap_policy, fsdp.mixed_precision.param_dtype
    sequence = section.ulysses_sequence_parallel_size
    asked: list[tuple[bool, str, object, str]] = [
        (units.transformer_layer_cls_to_wrap is not None, f"{key}.wrap_policy.transformer_layer_cls_to_wrap",
         units.transformer_layer_cls_to_wrap, "sharding"),
        (units.min_num_params > 0, f"{key}.wrap_policy.min_num_params", units.min_num_params, "sharding"),
        (fsdp.fsdp_size > 1, f"{key}.fsdp_size", fsdp.fsdp_size, "sharding"),
        (not fsdp.reshard_after_forward, f"{key}.reshard_after_forward", False, "sharding"),
        (fsdp.forward_prefetch, f"{key}.forward_prefetch", True, "sharding"),
        (fsdp.tensor_parallel_size > 1, f"{key}.tensor_parallel_size", fsdp.tensor_parallel_size, "tensor parallelism"),
        (fsdp.param_offload, f"{key}.param_offload", True, "offloading"),
        (fsdp.offload_policy, f"{key}.offload_policy", True, "offloading"),
        (computed not in (None, fsdp.model_dtype), f"{key}.mixed_precision.param_dtype", computed, "mixed precision"),
        (sequence > 1, f"{part.key}ulysses_sequence_parallel_size", sequence, "sequence parallelism"),
        (section.use_torch_compile, f"{part.key}use_torch_compile", True, "compilation"),
    ]  # fmt: skip
    trained = part.trained()
    if trained is not None:
        fsdp, section, model = trained
        summed = fsdp.mixed_precision.reduce_dtype
        asked += [
            (summed == "bfloat16", f"{key}.mixed_precision.reduce_dtype", summed, "mixed precision"),
            (fsdp.grad_offload, f"{key}.grad_offload", True, "offloading"),
            (fsdp.optimizer_offload, f"{key}.optimizer_offload", True, "offloading"),
            (model.enable_activation_offload, f"{part.model_key}.enable_activation_offload", True, "offloading"),
            (section.checkpoint.async_save, f"{part.key}checkpoint.async_save", True, "saving in the background"),
        ]
    yield from ((name, value, what) for asks, name, value, what in asked if asks)


# -- the sums -------------------------------------------------------------------------------------


def _layout(part: Part, world: int) -> Iterator[Problem]:
    """What the sharded engine would refuse once the ranks are there."""
    fsdp, sequence, tensor = part.fsdp, part.section.ulysses_sequence_parallel_size, part.fsdp.tensor_parallel_size
    sequence_key, tensor_key = f"{part.key}ulysses_sequence_parallel_size", f"{part.fsdp_key}.tensor_parallel_size"
    ranks = "1 rank does" if world == 1 else f"{world} ranks do"
    if world % (sequence * tensor):
        sentence = (
            f"{ranks} not split into groups of ulysses_sequence_parallel_size={sequence} x tensor_parallel_size="
            f"{tensor} = {sequence * tensor}: {_sum(world, sequence * tensor)}."
        )
        key, value = (tensor_key, tensor) if sequence == 1 else (sequence_key, sequence)
        yield Problem(key, value, sentence, WORLD)
    elif fsdp.fsdp_size > 0:
        room = world // tensor
        shards = min(fsdp.fsdp_size, room)
        if room % shards:
            held = f" / tensor_parallel_size={tensor} = {room} ranks" if tensor > 1 else ""
            sentence = f"{world} ranks{held} do not split into groups of {shards}: {_sum(room, shards)}."
            yield Problem(f"{part.fsdp_key}.fsdp_size", fsdp.fsdp_size, sentence, WORLD)
    if part.strategy in OURS:
        yield from _pairs(part)


def _pairs(part: Part) -> Iterator[Problem]:
    """Options that exclude each other, in the engine's own words."""
    trained = part.trained()
    if trained is not None:
        fsdp, section, model = trained
        options = training_options(part.strategy, fsdp, section, model.enable_activation_offload)
    else:
        options = forward_options(part.strategy, part.fsdp, part.section)
    try:
        found = FSDPOptions.of(options)
    except EngineError as error:
        yield Problem(part.fsdp_key, ABSENT, f"{error}.")
    else:
        lora = part.model is not None and part.model.lora_rank > 0
        refused = found.beyond_fsdp1(lora) if part.strategy == "fsdp1" else None
        if refused:
            yield Problem(part.strategy_key, part.strategy, f"{refused}.")
    if trained is not None:
        yield from _selective(part, trained[2])


def _selective(part: Part, model: AnyModelConfig) -> Iterator[Problem]:
    """What does not go with keeping the results of single operators."""
    key = f"{part.model_key}.gradient_checkpointing_mode"
    if not model.enable_gradient_checkpointing or model.gradient_checkpointing_mode != "selective":
        return
    if part.section.use_torch_compile:
        other = f"{part.key}use_torch_compile"
        sentence = f"{other}=true: a compiled layer has no single operators whose results could be kept"
        yield Problem(key, "selective", f"does not go with {sentence}. Type {key}=full.", (other,))
    if size := part.fsdp.wrap_policy.min_num_params:
        other = f"{part.fsdp_key}.wrap_policy.min_num_params"
        sentence = f"{other}={size}: units inside a layer gather while it is computed anew"
        yield Problem(key, "selective", f"does not go with {sentence}. Type {key}=full.", (other,))


def _sum(whole: int, part: int) -> str:
    return f"{whole} = {whole // part} x {part} + {whole % part}"


# -- adapters -------------------------------------------------------------------------------------


def _adapter(part: Part) -> Iterator[Problem]:
    model, key = part.model, part.model_key
    if model is None:
        return
    if model.lora_adapter_path is not None and not model.lora_rank:
        sentence = f"is not read with {key}.lora_rank=0. Type {key}.lora_rank=<the rank of that adapter>."
        yield Problem(f"{key}.lora_adapter_path", model.lora_adapter_path, sentence, (f"{key}.lora_rank",))
    if model.lora_rank and part.fsdp.tensor_parallel_size > 1 and part.strategy in OURS:
        sentence = (
            f"does not go with {key}.lora_rank={model.lora_rank}: adapters beside matrices that are cut over ranks are"
            f" not supported. Type {part.fsdp_key}.tensor_parallel_size=1; weights are sharded over all ranks anyway."
        )
        key_of_tensor, size = f"{part.fsdp_key}.tensor_parallel_size", part.fsdp.tensor_parallel_size
        yield Problem(key_of_tensor, size, sentence, (f"{key}.lora_rank",))
    if model.lora_rank and not model.target_modules:
        sentence = f"names no layer for the adapters. Type {key}.target_modules=all-linear."
        yield Problem(f"{key}.target_modules", None, sentence, (f"{key}.lora_rank",))


def _by_itself(config: PPOConfig) -> Iterator[Problem]:
    """Adapters that are handed over without the weights that they belong to."""
    model, rollout, key = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, f"{ROLLOUT}.lora_weights"
    if rollout.lora_weights == "merged":
        return
    if not model.lora_rank:
        sentence = f"is not read with {MODEL}.lora_rank=0: there is no adapter. Type {key}=merged."
        yield Problem(key, rollout.lora_weights, sentence, (f"{MODEL}.lora_rank",))
    if rollout.name in WHOLE_WEIGHTS:
        sentence = (
            f"{ROLLOUT}.name={rollout.name} takes whole weights and has no adapters of its own. Type {key}=merged, or"
            f" {ROLLOUT}.name=vllm."
        )
        yield Problem(key, rollout.lora_weights, sentence, (f"{ROLLOUT}.name",))


def _no_layout_of_its_own(config: PPOConfig) -> Iterator[Problem]:
    """What reference and actor are told must agree where one engine is both, or where they take turns."""
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    if not config.needs_reference_model():
        cause = f"{MODEL}.lora_rank"
        why = (
            f"is not read with {cause}={config.actor_rollout_ref.model.lora_rank}: the reference is the actor's engine "
            "without its adapter."
        )
    elif config.needs_full_kl_in_reward() or config.needs_full_kl_loss():
        cause = "algorithm.kl_penalty" if config.needs_full_kl_in_reward() else f"{ACTOR}.kl_loss_type"
        why = f"differs from the actor's, and {cause}=full compares the two on the same ranks."
    else:
        return
    asked = {
        "ulysses_sequence_parallel_size": (ref.ulysses_sequence_parallel_size, actor.ulysses_sequence_parallel_size),
        "fsdp_config.tensor_parallel_size": (
            ref.fsdp_config.tensor_parallel_size,
            actor.fsdp_config.tensor_parallel_size,
        ),
    }
    for name, (own, actors) in asked.items():
        if own != actors:
            sentence = f"{why} Leave the key out, or type {ACTOR}.{name}={own}."
            yield Problem(f"{REF}.{name}", own, sentence, (cause, f"{ACTOR}.{name}"))
