"""The memory plan of a run: peaks of all phases, a verdict, and a change that makes the run fit.

plan = make_plan(config, memory=None)           # None: the memory of this machine
plan.fits, plan.tightest
change = find_change(overrides, memory)         # ("critic.model.enable_gradient_checkpointing=true",)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from camshaft.config import GLOBAL_POOL, PPOConfig, RMConfig, SFTConfig, SupervisedConfig, compose, rollout_engine
from camshaft.config.backends import ENGINES, engine_capabilities
from camshaft.config.schema.model import AnyModelConfig
from camshaft.config.tree import get
from camshaft.engine.sharded import OFFLOADS
from camshaft.errors import ConfigError
from camshaft.machine import memory_limit
from camshaft.planning.devices import GIB, device_memory
from camshaft.planning.engines import SIMULATED
from camshaft.planning.generator import Generator, forecast_alone, forecast_generator, snapshots_size
from camshaft.planning.layers import Phase
from camshaft.planning.prompts import ASSUMED, fit_to_data
from camshaft.planning.trace import (
    CRITIC,
    MODEL,
    POLICY,
    REWARD,
    ROLLOUT,
    TRACED_ROLLOUT,
    UPDATES,
    Config,
    engine_model,
    forecast,
    group_topology,
    strategies,
)

Schema = type[PPOConfig] | type[SFTConfig] | type[RMConfig]

DEVICES = ("cpu", "cuda")
"""Values of `trainer.device` that can be forecast."""
ORDER = (
    "build", "sync", "gen", "reward", "old_log_prob", "ref", "values", "update_critic", "update_actor", "train",
    "validate", "save",
)  # fmt: skip
"""Phases in the order of a training step."""
MICRO_BATCHES = {
    "update_actor": ("actor_rollout_ref.actor.", "use_dynamic_bsz", "ppo"),
    "update_critic": ("critic.", "use_dynamic_bsz", "ppo"),
    "values": ("critic.", "use_dynamic_bsz", "forward"),
    "old_log_prob": ("actor_rollout_ref.rollout.", "log_prob_use_dynamic_bsz", "log_prob"),
    "ref": ("actor_rollout_ref.ref.", "log_prob_use_dynamic_bsz", "log_prob"),
    **dict.fromkeys(("train", "validate"), ("data.", "use_dynamic_bsz", "")),
}
"""Keys of the micro-batches of a phase: their section, the key of dynamic batching, and the prefix of their size."""


class Row(NamedTuple):
    """A phase of a pool, in bytes on each rank."""

    pool: str
    role: str
    phase: str
    peak: int
    """Peak of the phase plus the memory of all other roles in the pool."""
    disk: int
    """Size of a checkpoint of the role."""
    host: int = 0
    """Peak in host memory, if the run uses devices, plus the peaks of all other roles there."""


@dataclass(frozen=True)
class Plan:
    """Forecast of a run."""

    rows: list[Row]
    memory: int
    """Memory of a device, or of the machine divided by its ranks."""
    notes: list[str]
    """Parts of the run that the forecast does not cover."""

    @property
    def tightest(self) -> Row:
        """The phase with the highest peak."""
        return max(self.rows, key=lambda row: row.peak)

    @property
    def fits(self) -> bool:
        """True if no phase needs more than the memory of a rank."""
        return self.tightest.peak <= self.memory


def make_plan(config: Config, memory: int | None) -> Plan:
    """Forecast a run. `memory` is that of each device, or of the whole machine if the run uses none."""
    config = fit_to_data(config)
    check_supported(config)
    limit = memory_per_rank(config, memory)
    traces = {group: _forecast(config, group) for group in strategies(config)}
    pools = _pools(config)
    rows: list[Row] = []
    for pool in dict.fromkeys(pools[group] for group in traces):
        in_pool = {group: phases for group, phases in traces.items() if pools[group] == pool}
        generator = _generator(config, in_pool, limit) if isinstance(config, PPOConfig) else Generator(0, 0, 0)
        rows += _pool_rows(pool, in_pool, generator)
    if isinstance(config, PPOConfig) and not config.actor_rollout_ref.hybrid_engine:
        peak = forecast_alone(config, limit, group_topology(config, ROLLOUT).world_size)
        if peak is not None:
            rows.append(Row(pools[ROLLOUT], ROLLOUT, "gen", peak, 0))
    return Plan(rows, limit, list(_notes(config)))


def _pools(config: Config) -> dict[str, str]:
    """Return the resource pool of each group of roles."""
    return config.pools() if isinstance(config, PPOConfig) else {MODEL: GLOBAL_POOL}


def _pool_rows(pool: str, traces: dict[str, list[Phase]], generator: Generator) -> list[Row]:
    """Combine the phases of all roles that share the ranks of a pool, and the generator."""
    rests = {group: phases[-1].rest for group, phases in traces.items()}
    hosts = {group: max(phase.host for phase in phases) for group, phases in traces.items()}
    generation = {"sync": generator.sync, "gen": generator.gen}
    rows: list[Row] = []
    for group, phases in traces.items():
        other = sum(rest for name, rest in rests.items() if name != group)
        other_host = sum(host for name, host in hosts.items() if name != group)
        for phase in phases:
            # Roles are built one after the other, so the largest sum is an upper bound for `build`.
            peak = phase.peak + other + generation.get(phase.name, generator.rest)
            rows.append(Row(pool, phase.role, phase.name, peak, phase.disk, phase.host + other_host))
    return sorted(rows, key=lambda row: ORDER.index(row.phase))


def _generator(config: PPOConfig, traces: dict[str, list[Phase]], memory: int) -> Generator:
    """Return the memory of the generator that the traces of a pool leave out."""
    if config.trainer.device == "cpu" or POLICY not in traces or not config.actor_rollout_ref.hybrid_engine:
        return Generator(0, 0, 0)
    syncs = [phase for phase in traces[POLICY] if phase.name == "sync"]
    others = sum(phases[-1].rest for group, phases in traces.items() if group != POLICY)
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n // config.actor_dp_size(config.topology())
    return forecast_generator(config, memory, syncs[0].rest + others, max(1, rows)) or Generator(0, 0, 0)


_cache: dict[str, list[Phase]] = {}

PROCESS_GROWTH = {POLICY: 80 << 20, CRITIC: 45 << 20, REWARD: 45 << 20, MODEL: 45 << 20}
"""Growth of the process of a rank on a CPU besides its tensors, in bytes."""
PEFT_GROWTH = 10 << 20
"""Additional growth of a process that trains an adapter and therefore imports PEFT."""


def process_growth(config: Config, group: str) -> int:
    """Return the growth of the process of a rank besides its tensors, for libraries and buffers (docs/plan.md)."""
    return PROCESS_GROWTH[group] + (PEFT_GROWTH if engine_model(config, group).lora else 0)


def _forecast(config: Config, group: str) -> list[Phase]:
    """Return the phases of a group, from an earlier forecast if no setting that the group reads has changed."""
    others = {POLICY: {CRITIC, "reward_model"}}.get(group, set())
    key = f"{group} {type(config).__name__} {config.model_dump_json(exclude=others)}"
    if key not in _cache:
        _cache[key] = forecast(config, group)
    return _cache[key]


def check_supported(config: Config) -> None:
    """Raise ConfigError for a device, an engine or a setting that is not forecast."""
    device = config.trainer.device
    if device not in DEVICES:
        devices = " and ".join(DEVICES)
        raise ConfigError(f"camshaft plan does not forecast trainer.device={device}; it forecasts {devices}")
    supported = ", ".join(name for name, engine in ENGINES.items() if engine.capabilities.supports_forecast)
    for group, strategy in strategies(config).items():
        has_device = device == "cpu" or bool(SIMULATED.get(strategy))
        if not (engine_capabilities(strategy).supports_forecast and has_device):
            raise ConfigError(
                f"camshaft plan does not forecast the engine '{strategy}' of {group}; it forecasts {supported}"
            )
    if isinstance(config, PPOConfig) and config.routing_mode() is not None:
        raise ConfigError(
            "camshaft plan does not forecast router replay; set actor_rollout_ref.actor.router_replay.mode=disabled "
            "and actor_rollout_ref.rollout.enable_return_routed_experts=false"
        )


def memory_per_rank(config: Config, memory: int | None) -> int:
    """Return the memory of a device, or an equal share of the memory of the machine for each rank of all pools."""
    if config.trainer.device != "cpu":
        return device_memory(config.trainer.device) if memory is None else memory
    groups = {pool: group for group, pool in reversed(_pools(config).items())}  # one group of each pool
    ranks = sum(group_topology(config, group).world_size for group in groups.values())
    return (memory_limit() if memory is None else memory) // ranks


def _notes(config: Config) -> Iterator[str]:
    """Yield what the figures leave out."""
    if config.trainer.device == "cpu":
        yield "the figures are live tensors; processes, libraries and communication buffers need more (docs/plan.md)"
    else:
        yield (
            "the figures are live tensors on each device; the CUDA context, communication buffers and fragmentation "
            "need more (docs/plan.md)"
        )
    if isinstance(config, PPOConfig) and not config.actor_rollout_ref.hybrid_engine:
        count = f"{config.async_training.max_staleness + 1} x"
        published = f"{count} weights" if rollout_engine(config).lora is None else f"weights and {count} adapter"
        size = format_size(snapshots_size(config))
        yield f"sync: the weights for the rollout need {size} more in host memory of the actor ({published})"
    if isinstance(config, PPOConfig) and not _forecasts_generator(config):
        yield f"gen: the memory of rollout.name={config.actor_rollout_ref.rollout.name} is not forecast"
    if (length := next((choice for choice in config.choices() if choice.reason == ASSUMED), None)) is not None:
        yield f"prompts of {length.value} tokens are assumed, because prompt_length is not set and no data was read"
    yield "save: the size on disk is forecast, its memory is not"
    if config.trainer.device == "cpu":
        growth = sum(process_growth(config, group) for group in strategies(config)) >> 20
        yield f"libraries and buffers of a process need about {growth} MiB more (docs/plan.md)"


def _forecasts_generator(config: PPOConfig) -> bool:
    policy = config.actor_rollout_ref
    if not policy.hybrid_engine:
        return forecast_alone(config, GIB, 1) is not None
    if config.trainer.device == "cpu":
        return policy.rollout.name == TRACED_ROLLOUT
    return forecast_generator(config, GIB, 0, 1) is not None


# -- changes --------------------------------------------------------------------------------------

FAR_TOO_MUCH = 1.5
"""Peak, relative to the memory of a rank, above which a run is planned with all changes first."""


def compose_run(overrides: Sequence[str], schema: Schema) -> Config:
    """Return the config of the run that overrides describe, with the prompt length of its data."""
    (config,) = compose(overrides, schema)  # pyright: ignore[reportArgumentType]
    return fit_to_data(config)


def find_change(
    overrides: Sequence[str], memory: int | None, schema: Schema = PPOConfig
) -> tuple[tuple[str, ...], Plan] | None:
    """Return the cheapest changes that make the run fit, and its plan; None if none of them suffices.

    Changes are tried one at a time in the order of their cost. If no single change suffices, they are added up. A run
    that needs far too much memory is planned with all changes first, because the search takes several plans.
    """
    config = compose_run(overrides, schema)
    plan = make_plan(config, memory)
    if plan.tightest.peak > FAR_TOO_MUCH * plan.memory:
        strongest = _try_plan([*overrides, *_all_changes(config, plan, overrides)], memory, schema)
        if strongest is not None and not strongest.fits:
            return None
    for change in _changes(config, plan.tightest):
        plan = _try_plan([*overrides, *change], memory, schema)
        if plan is not None and plan.fits:
            return change, plan
    total: tuple[str, ...] = ()
    for _ in range(8):
        config = compose_run([*overrides, *total], schema)
        for change in _changes(config, make_plan(config, memory).tightest):
            plan = _try_plan([*overrides, *total, *change], memory, schema)
            if plan is not None and plan.tightest.peak < make_plan(config, memory).tightest.peak:
                total = (*total, *change)
                break
        else:
            return None
        if plan.fits:
            return total, plan
    return None


def _try_plan(overrides: Sequence[str], memory: int | None, schema: Schema) -> Plan | None:
    """Return the plan of a changed run; None if its config is invalid."""
    try:
        config = compose_run(overrides, schema)
        return make_plan(config, memory)
    except ConfigError:
        return None


def _changes(config: Config, row: Row) -> Iterator[tuple[str, ...]]:
    """Yield changes that may lower the peak of a phase, the cheapest first. None of them changes the results."""
    yield from _smaller_micro_batches(config, row)
    role, model, section, settings = _trained_keys(config, row)
    if row.phase in UPDATES and not settings.enable_gradient_checkpointing:
        yield (f"{model}enable_gradient_checkpointing=true",)
    if config.trainer.device != "cpu":
        yield from _offloads(config)
        if isinstance(config, PPOConfig):
            yield from _smaller_generator(config, row)
    if engine_capabilities(section.strategy).multiple_ranks:
        yield (f"{role}ulysses_sequence_parallel_size={2 * section.ulysses_sequence_parallel_size}",)


def _trained_keys(config: Config, row: Row) -> tuple[str, str, Any, AnyModelConfig]:
    """Return the prefixes of the keys of a role and of its model, their section, and that of the model."""
    if isinstance(config, SupervisedConfig):
        return "", "model.", config, config.model
    if row.role == CRITIC:
        return "critic.", "critic.model.", config.critic, config.critic.model
    policy = config.actor_rollout_ref
    return "actor_rollout_ref.actor.", "actor_rollout_ref.model.", policy.actor, policy.model


def _all_changes(config: Config, plan: Plan, overrides: Sequence[str]) -> list[str]:
    """Return all changes of all phases, each as far as it goes."""
    changes: dict[str, str] = {}
    for row in plan.rows:
        for change in _changes(config, row):
            changes |= dict(item.split("=", 1) for item in change)
    for key in [key for key in changes if key.endswith("ulysses_sequence_parallel_size")]:
        size = int(changes.pop(key))
        while _is_valid([*overrides, *_assignments(changes | {key: str(size)})], type(config)):
            changes[key] = str(size)
            size *= 2
    return _assignments(changes)


def _assignments(values: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def _is_valid(overrides: Sequence[str], schema: Schema) -> bool:
    try:
        compose_run(overrides, schema)
    except ConfigError:
        return False
    return True


def _offloads(config: Config) -> Iterator[tuple[str, ...]]:
    """Yield keys that keep the state of a role in host memory while other roles compute."""
    if isinstance(config, SupervisedConfig):
        roles: dict[str, tuple[str, Any]] = {"": (config.strategy, config)}
    else:
        policy, critic = config.actor_rollout_ref, config.critic
        roles = {
            "actor_rollout_ref.ref.": (policy.actor.strategy, policy.ref),
            "critic.model.": (critic.strategy, critic.model),
            "actor_rollout_ref.actor.": (policy.actor.strategy, policy.actor),
        }
    for section, (strategy, role) in roles.items():
        values = role.fsdp_config.model_dump()
        options = engine_capabilities(strategy).options.model_fields
        keys = [key for key in OFFLOADS.values() if values.get(key) is False and key in options]
        if keys:
            yield tuple(f"{section}fsdp_config.{key}=true" for key in keys)


def _smaller_generator(config: PPOConfig, row: Row) -> Iterator[tuple[str, ...]]:
    """Yield smaller shares of the device that the rollout reserves."""
    tenths = int(10 * config.actor_rollout_ref.rollout.gpu_memory_utilization)
    for smaller in range(tenths - 1, 1, -1) if row.phase in ("sync", "gen") else ():
        yield (f"actor_rollout_ref.rollout.gpu_memory_utilization={smaller / 10}",)


def _smaller_micro_batches(config: Config, row: Row) -> Iterator[tuple[str, ...]]:
    """Yield half and a quarter of the micro-batch size, and so on, of the phase."""
    if row.phase not in MICRO_BATCHES:
        return
    section, flag, prefix = MICRO_BATCHES[row.phase]
    values = get(config.model_dump(), section.removesuffix("."))
    is_dynamic = values[flag]
    key = (f"{prefix}_max_token_len_per_gpu" if is_dynamic else f"{prefix}_micro_batch_size_per_gpu").lstrip("_")
    least = _longest_row(config) if is_dynamic else 1
    value = values[key]
    while value is not None and value // 2 >= least:
        value //= 2
        yield (f"{section}{key}={value}",)


def _longest_row(config: Config) -> int:
    if isinstance(config, SupervisedConfig):
        return config.max_row_length()
    return config.data.max_prompt_length + config.data.max_response_length


def solve(overrides: Sequence[str], key: str, memory: int | None, schema: Schema = PPOConfig) -> int | None:
    """Return the largest integer of a key with which the run fits, to within 2 %; None if no value does.

    It doubles the value until the run no longer fits, and then halves the interval. Invalid values do not fit. If all
    values are invalid, the error of the first one is raised.
    """
    errors: list[ConfigError] = []

    def fits(value: int) -> bool:
        try:
            config = compose_run([*overrides, f"{key}={value}"], schema)
            return make_plan(config, memory).fits
        except ConfigError as error:
            errors.append(error)
            return False

    values = [2**power for power in range(21)]
    low = next((value for value in values if fits(value)), None)
    if len(errors) == len(values):
        raise errors[0]
    if low is None:
        return None
    while low < 2**20 and fits(2 * low):
        low *= 2
    high = 2 * low
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# -- report ---------------------------------------------------------------------------------------


def report(plan: Plan) -> str:
    """Format a plan as a table, a verdict and notes."""
    offloads = any(row.host for row in plan.rows)
    titles = ("peak", "in host", "on disk") if offloads else ("peak", "on disk")
    lines = [f"{'pool':<14} {'role':<13} {'phase':<14} " + " ".join(f"{title:>10}" for title in titles)]
    for row in plan.rows:
        mark = "  <- tightest" if row is plan.tightest else ""
        columns = (row.peak, row.host, row.disk) if offloads else (row.peak, row.disk)
        sizes = " ".join(f"{format_size(size):>10}" for size in columns)
        lines.append(f"{row.pool:<14} {row.role:<13} {row.phase:<14} {sizes}{mark}")
    row = plan.tightest
    verdict = "fits" if plan.fits else "does not fit"
    peak, memory = format_size(row.peak), format_size(plan.memory)
    lines.append(f"\n{verdict}: {row.phase} of {row.role} needs {peak} of {memory} on each rank")
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


def as_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values, with sizes in bytes."""
    rows, tightest = [row._asdict() for row in plan.rows], plan.tightest._asdict()
    return {"fits": plan.fits, "memory": plan.memory, "tightest": tightest, "rows": rows, "notes": plan.notes}


def format_size(count: float) -> str:
    """Format a number of bytes."""
    if not count:
        return "-"
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"
