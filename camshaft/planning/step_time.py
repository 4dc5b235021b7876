"""Forecast the time of a training step from the measured times of an earlier run.

    times = forecast_times(config, "checkpoints/demo/tiny")
    times.step, times.phases["update_actor"]        # seconds
    report_times(times)                             # a table

Each phase has a cost in both runs, and its measured time is multiplied by the ratio of the costs. A cost is a number of
operations (`operations.py`) plus the equivalents, in operations, of elementwise work, the softmax, decode steps, calls
of layers and optimizer steps. They explain why larger models reach a larger share of the matmul rate. They were fitted
to updates and steps of models with 1 to 18 million weights on CPUs (benchmarks/results/train_step.md, ppo_step.md and
plan_step_time.md).

The planned run has the prompts of the earlier run and responses of the same lengths. If nearly all responses reached
the length limit of the earlier run, those of the planned run reach its limit too. The module does not import torch.
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from camshaft.config import PPOConfig, derive
from camshaft.config.derive import MicroBatch
from camshaft.config.load import resolve
from camshaft.config.model_settings import read_settings
from camshaft.config.schema.model import AnyModelConfig, ResponsesModelConfig
from camshaft.config.tree import expand_keys, get, leaf_fields
from camshaft.errors import ConfigError
from camshaft.planning.operations import Group, Shape, evaluation, generation
from camshaft.tracking.run_folder import RunFolder

WARM_UP = 2
"""Number of steps at the start of a run that are not representative."""
ELEMENTWISE = 7_000.0
"""Operations per hidden unit, token and layer of a forward pass: the equivalent of norms, activations and copies."""
SOFTMAX = 450.0
"""Operations per logit of a forward pass: the equivalent of the softmax."""
CALL = 4e6
"""Operations per layer and micro-batch: the equivalent of calls of operators."""
DECODE = 6.5e7
"""Operations per layer and decode step: the equivalent of calls of operators on few tokens."""
OPTIMIZER = 1_500.0
"""Operations per weight and optimizer step: the equivalent of clipping and AdamW."""
BYTE = 28.0
"""Operations per byte of a generation: the equivalent of reading weights, keys and values."""
SIMILAR = {
    "gen_max": ("gen",),
    "old_log_prob": ("ref", "values", "update_actor"),
    "ref": ("old_log_prob", "values", "update_actor"),
    "values": ("old_log_prob", "ref", "update_critic", "update_actor"),
    "update_actor": ("update_critic",),
    "update_critic": ("update_actor",),
    "reward_max": ("reward",),
}
"""Phases of the earlier run that predict a phase which it lacks, the best first."""


class Load(NamedTuple):
    """Rows of a training step."""

    prompts: int
    samples: int
    """Responses per prompt."""
    prompt: float
    response: float
    """Mean number of tokens."""
    longest: float
    """Length of the longest response."""

    def groups(self, size: int) -> list[Group]:
        """Return rows of mean length, in groups of `size` that share the computation of their prompt."""
        prompt, response = max(1, round(self.prompt)), max(1, round(self.response))
        return [Group(prompt, [response] * size)] * math.ceil(self.rows / size)

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens(self) -> float:
        return self.rows * (self.prompt + self.response)


@dataclass(frozen=True)
class StepTimes:
    """Forecast times in seconds."""

    phases: dict[str, float]
    """Time of each phase. `other` is the time of a step outside of its phases."""
    notes: list[str]

    @property
    def step(self) -> float:
        """Duration of a step without validation and saving."""
        return sum(self.phases.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the times as JSON values."""
        return {"step": self.step, "phases": self.phases, "notes": self.notes}


def report_times(times: StepTimes) -> str:
    """Format the times as a table and notes."""
    lines = [f"{'phase':<14} {'time':>10}", *(f"{name:<14} {value:>8.3g} s" for name, value in times.phases.items())]
    lines.append(f"{'step':<14} {times.step:>8.3g} s, without validation and saving")
    return "\n".join([*lines, *(f"note: {note}" for note in times.notes)])


def forecast_times(config: PPOConfig, like: str | Path) -> StepTimes:
    """Forecast the times of a run from those in the folder of an earlier one."""
    run = RunFolder(like)
    earlier = read_config(run)
    measured = measured_times(run)
    load = measured_load(run, earlier)
    costs = phase_costs(earlier, load)
    rates = {phase: seconds / costs[phase] for phase, seconds in measured.items() if phase in costs}
    phases: dict[str, float] = {}
    notes: list[str] = []
    for phase, cost in phase_costs(config, planned_load(config, load, earlier)).items():
        source = next((name for name in (phase, *SIMILAR.get(phase, ())) if name in rates), None)
        if source is None:
            notes.append(
                f"the time of {phase} is not forecast, because {run.path} has no such phase and no similar one"
            )
            continue
        phases[phase] = cost * rates[source]
        if source != phase:
            notes.append(f"the time of {phase} is forecast from that of {source}")
    return StepTimes(phases, [*notes, *_differences(config, earlier)])


def _differences(config: PPOConfig, earlier: PPOConfig) -> Iterator[str]:
    """Yield the differences of the runs that affect times and that the forecast does not count."""
    for key in ("trainer.device", "actor_rollout_ref.actor.strategy", "actor_rollout_ref.rollout.name"):
        value, earlier_value = (get(each.model_dump(), key) for each in (config, earlier))
        if value != earlier_value:
            yield f"the earlier run has {key}={earlier_value} and this one {value}, whose speeds differ"
    if config.algorithm.filter_groups.enable:
        yield "dynamic sampling may generate several batches per step; the forecast has one"


# -- the earlier run ------------------------------------------------------------------------------


def read_config(run: RunFolder) -> PPOConfig:
    """Return the config of an earlier run."""
    values = run.config()
    if run.info().get("command") != "ppo" or not values:
        raise ConfigError(f"--like {run.path}: the folder has no run.json of a PPO run; pass the folder of such a run")
    try:
        return PPOConfig.model_validate(resolve(expand_keys(values, leaf_fields(PPOConfig)), PPOConfig)[0])
    except ValueError as error:
        raise ConfigError(f"--like {run.path}: its config is not valid in this version of camshaft: {error}") from error


def measured_times(run: RunFolder) -> dict[str, float]:
    """Return the median time of each phase after the first steps. `other` is the rest of the step."""
    run.metrics.poll()
    steps = _series(run, "timing_s/step")
    phases = {
        name.removeprefix("timing_s/"): _series(run, name)
        for name in run.metrics.names
        if name.startswith("timing_s/") and name not in ("timing_s/step", *INSIDE)
    }
    phases["other"] = [max(0.0, step - sum(times[i] for times in phases.values())) for i, step in enumerate(steps)]
    return {name: statistics.median(values) for name, values in phases.items()}


INSIDE = ("timing_s/sync", "timing_s/sync_check", "timing_s/reward_call_max")
"""Times that are parts of a phase."""


def measured_load(run: RunFolder, config: PPOConfig) -> Load:
    """Return the rows of a step of an earlier run."""
    names = ("prompt_length/mean", "response_length/mean", "response_length/max")
    lengths = (statistics.median(_series(run, name)) for name in names)
    return Load(config.data.train_batch_size, config.actor_rollout_ref.rollout.n, *lengths)


def _series(run: RunFolder, name: str) -> list[float]:
    """Return the values of a metric without those of the first steps; 0 where it was not logged."""
    training = [i for i, value in enumerate(run.metrics.column("timing_s/step")) if not math.isnan(value)]
    if len(training) <= WARM_UP:
        raise ConfigError(
            f"--like {run.path}: the run has {len(training)} steps, of which the first {WARM_UP} are not "
            f"representative; pass a run of at least {WARM_UP + 1} steps"
        )
    column = run.metrics.column(name)
    return [0.0 if math.isnan(column[i]) else column[i] for i in training[WARM_UP:]]


# -- costs ----------------------------------------------------------------------------------------


def planned_load(config: PPOConfig, load: Load, earlier: PPOConfig) -> Load:
    """Return the rows of a step of the planned run, with the lengths of an earlier run."""
    limit, earlier_limit = config.data.max_response_length, earlier.data.max_response_length
    reaches_limit = load.response >= 0.99 * earlier_limit
    return Load(
        config.data.train_batch_size,
        config.actor_rollout_ref.rollout.n,
        min(load.prompt, config.data.max_prompt_length),
        limit if reaches_limit else min(load.response, limit),
        limit if load.longest >= earlier_limit else min(load.longest, limit),
    )


def phase_costs(config: PPOConfig, load: Load) -> dict[str, float]:
    """Return the cost of each phase, in operations if a model computes it, and otherwise in rows or tokens.

    The ranks on a CPU share its cores, so a cost is divided by the number of machines, or of devices.
    """
    topology, policy = config.topology(), config.actor_rollout_ref
    is_cpu = config.trainer.device == "cpu"
    shares = policy.model.use_prefix_grouper and derive.shares_prompts(config, policy.actor)
    actor = _Model(policy.model, load, shares, config.trainer.nnodes if is_cpu else topology.world_size)
    slots = policy.rollout.max_num_seqs
    costs = {"gen": actor.generation(load, slots)}
    if config.needs_greedy():
        one = load._replace(samples=1)
        costs |= {"gen_max": actor.generation(one, slots), "reward_max": float(one.rows)}
    costs["reward"] = float(load.rows)
    if config.old_log_prob_source() == "actor":
        costs["old_log_prob"] = actor.forward(derive.micro_batch(config, topology, "old_log_prob"))
    if config.needs_ref_log_prob():
        costs["ref"] = actor.forward(derive.micro_batch(config, topology, "ref"))
    costs["adv"] = load.tokens
    if config.needs_critic():
        critic, size = config.critic, derive.micro_batch(config, topology, "critic")
        ranks = config.trainer.nnodes if is_cpu else topology.critic_topology().world_size
        shares = critic.model.use_prefix_grouper and derive.shares_prompts(config, critic)
        model = _Model(critic.model, load, shares, ranks, "critic")
        costs["values"] = model.forward(derive.micro_batch(config, topology, "values"))
        costs["update_critic"] = model.update(size, critic.ppo_epochs, critic.ppo_mini_batch_size)
    size = derive.micro_batch(config, topology, "actor")
    costs["update_actor"] = actor.update(size, policy.actor.ppo_epochs, policy.actor.ppo_mini_batch_size)
    return costs | {"other": load.tokens}


class _Model:
    """Costs of the calls of a model on each rank."""

    def __init__(self, model: ResponsesModelConfig, load: Load, shares_prompts: bool, ranks: int, role: str = "actor"):
        self._model, self._load, self._ranks, self._role = model, load, ranks, role
        self._shares_prompts = shares_prompts
        self._shape = read_shape(model)
        self._weights = self._shape.weights_of_layers() + self._shape.vocab_size * self._shape.hidden

    def forward(self, micro_batch: MicroBatch) -> float:
        """Return the cost of a forward pass over all rows."""
        size = min(self._load.samples, micro_batch.sequences or self._load.samples) if self._shares_prompts else 1
        groups = self._load.groups(size)
        tokens, predicting = (sum(count(group) for group in groups) for count in (Group.tokens, Group.predicting))
        if micro_batch.sequences is not None:
            calls = math.ceil(self._load.rows / micro_batch.sequences)
        else:
            calls = math.ceil(tokens / (micro_batch.tokens or tokens))
        logits = predicting * (self._shape.vocab_size if self._role == "actor" else 1)
        operations = evaluation(self._shape, groups, self._role).operations
        return (operations + self._elementwise(tokens, logits) + CALL * self._shape.layers * calls) / self._ranks

    def _elementwise(self, tokens: float, logits: float) -> float:
        return ELEMENTWISE * self._shape.hidden * self._shape.layers * tokens + SOFTMAX * logits

    def update(self, micro_batch: MicroBatch, epochs: int, mini_batch: int) -> float:
        """Return the cost of the optimizer steps with `mini_batch` prompts each."""
        passes = 3 + self._model.enable_gradient_checkpointing - (self._model.lora_rank > 0)
        steps = max(1, self._load.prompts // mini_batch)
        trained = 0 if self._model.lora_rank else self._weights
        return epochs * (passes * self.forward(micro_batch) + steps * OPTIMIZER * trained / self._ranks)

    def generation(self, load: Load, slots: int) -> float:
        """Return the cost of generating all responses with a KV cache of `slots` rows on each rank."""
        groups = load.groups(load.samples)
        tokens = sum(group.tokens() for group in groups)
        steps = max(load.longest, load.rows * load.response / (slots * self._ranks))
        elementwise = self._elementwise(tokens, load.rows * load.response * self._shape.vocab_size)
        work = generation(self._shape, groups)
        total = work.operations + BYTE * work.bytes + elementwise
        return total / self._ranks + DECODE * self._shape.layers * steps


def read_shape(model: AnyModelConfig) -> Shape:
    """Return the sizes of a model from its config.json."""
    settings = read_settings(model.path, model.override_config)
    if settings is None:
        raise ConfigError(f"{model.path}: the time of a step is forecast from config.json, which cannot be read")
    values = settings.values
    try:
        heads, experts = values["num_attention_heads"], values.get("num_experts_per_tok", 1)
        intermediate = values.get("moe_intermediate_size") or values.get("intermediate_size")
        return Shape(
            values["hidden_size"],
            values["num_hidden_layers"],
            heads,
            values.get("num_key_value_heads") or heads,
            experts * (intermediate or 4 * values["hidden_size"]),
            values["vocab_size"],
        )
    except KeyError as error:
        raise ConfigError(
            f"{model.path}: config.json lacks {error}, which the forecast of the step time needs"
        ) from error
