"""Runs the phases of one rank of a training step, and records the memory of each phase.

    phases = measure(config, "critic")          # on every real rank
    phases = forecast(config, "critic")         # rank 0 of a fake process group; computes nothing

Both run the classes of a run: the roles with their engines, losses and optimizers. Batches are synthetic, and every row
has the maximum length. A forecast initializes weights instead of loading them. The first training step is shortened to
the generation and one optimizer step, which creates the optimizer state. The updates of the second step are shortened
to two optimizer steps of two micro-batches each, because later ones only repeat the second. The forecast traces a few
layers of a model with many layers (`layers.py`), and simulates the devices of a run that uses some (`engines.py`).
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from camshaft.config import PPOConfig, RMConfig, SFTConfig, SupervisedConfig, Topology, derive
from camshaft.config.backends import engine_capabilities
from camshaft.config.engine import EngineModel
from camshaft.dataproto import DataProto, Ragged
from camshaft.device import simulate_cuda
from camshaft.digest import block_factors
from camshaft.engine.torch_engine import TorchEngine
from camshaft.models.loader import DTYPES, skeleton
from camshaft.models.packed import PackedModel
from camshaft.planning.engines import simulated
from camshaft.planning.generator import keeps_tensors
from camshaft.planning.layers import Phase, Trace, choose_layers, extrapolate, layer_kinds, mark_layers
from camshaft.planning.tensor_memory import Part, TensorMemory
from camshaft.roles import RMWorker, RolloutWorker, SFTWorker
from camshaft.rollout.builtin.cpu.linears import Layout, PackableLinear, choose_layout, is_layout_valid, packed_linears
from camshaft.rollout.builtin.decode_trace import Forward
from camshaft.trainer.build import role_classes

POLICY, CRITIC, REWARD, MODEL = "actor_rollout_ref", "critic", "reward_model", "model"
"""Groups of roles. A supervised run has only the model that it trains."""
ROLLOUT = "rollout"
"""A rollout on devices of its own, which has no engine."""
TRACED_ROLLOUT = "torch"
"""Rollout that generates with the weights of the engine. Others reserve their memory themselves."""
LAYER_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types")
"""Config keys with an entry for each layer."""
STEPS = 2
"""Number of training steps. The second one has all optimizer state."""
UPDATES = ("update_critic", "update_actor", "train")
"""Phases with optimizer steps."""

Config = PPOConfig | SFTConfig | RMConfig
Action = tuple[str, str, Callable[[], Any]]
"""Role, name of the phase, and the call."""


def strategies(config: Config) -> dict[str, str]:
    """Return the engine of each group of roles."""
    if isinstance(config, SupervisedConfig):
        return {MODEL: config.strategy}
    engines = {POLICY: config.actor_rollout_ref.actor.strategy}
    if config.needs_critic():
        engines[CRITIC] = config.critic.strategy
    if config.needs_reward_engine():
        engines[REWARD] = config.reward_model.strategy
    return engines


def measure(config: Config, group: str, memory: Any = None) -> list[Phase]:
    """Run all phases of a group of roles on this rank, and return the memory of each phase.

    On a GPU, `memory` reads the memory of the device, with the methods of `TensorMemory` that the phases use.
    """
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # a thread of transformers would create uncounted tensors
    with TensorMemory() if memory is None else nullcontext(memory) as active:
        return [trace.phase for trace in _tracer(config, group, active, on_device=memory is not None).run()]


def forecast(config: Config, group: str) -> list[Phase]:
    """Return the memory of each phase of a group of roles on rank 0, without computing anything."""
    hf = skeleton(engine_model(config, group), "float32").hf
    layers = choose_layers(layer_kinds(hf))
    return extrapolate(layers, trace_layers(config, group, layers.traced, partial(first_layers, hf.config)))


def first_layers(model_config: PreTrainedConfig, count: int) -> dict[str, Any]:
    """Return the values of a model's config for the first `count` of its layers."""
    text_config = model_config.get_text_config()
    values = text_config.to_dict()
    lists = {key: values[key][:count] for key in LAYER_LISTS if isinstance(values.get(key), list)}
    is_counted = "num_hidden_layers" in values.keys() | text_config.attribute_map.keys()
    return {"num_hidden_layers": count, **lists} if is_counted else lists


def trace_layers(
    config: Config,
    group: str,
    counts: Sequence[int],
    values: Callable[[int], dict[str, Any]] = lambda count: {"num_hidden_layers": count},
) -> list[list[Trace]]:
    """Trace a group of roles on rank 0 of a fake process group, once for each number of layers.

    `values` returns the values of the model's config for a number of layers.
    """
    on_device = config.trainer.device != "cpu"
    config = simulated(config) if on_device else config
    traces: list[list[Trace]] = []
    with _fake_group(config, group), simulate_cuda() if on_device else nullcontext():
        for count in counts:
            block_factors.cache_clear()  # so that each trace contains them, not only the first
            is_layout_valid.cache_clear()
            with TensorMemory(computes=False) as memory:
                traces.append(_tracer(with_values(config, group, values(count)), group, memory, on_device).run())
    return traces


def engine_model(config: Config, group: str) -> EngineModel:
    if isinstance(config, SFTConfig):
        return derive.sft_engine(config, STEPS).model
    if isinstance(config, RMConfig):
        return derive.rm_engine(config, STEPS).model
    if group == REWARD:
        return derive.reward_engine_model(config)
    if group == CRITIC:
        return derive.engine_model(config.critic.model, head="value")
    return derive.engine_model(config.actor_rollout_ref.model)


def with_values(config: Config, group: str, values: Mapping[str, Any]) -> Config:
    """Return the config with other values in the config of the model of a group."""
    sections: dict[str, Any] = {MODEL: config}
    if isinstance(config, PPOConfig):
        sections = {POLICY: config.actor_rollout_ref, CRITIC: config.critic, REWARD: config.reward_model}
    section = sections[group]
    model = section.model.model_copy(update={"override_config": {**section.model.override_config, **values}})
    changed = section.model_copy(update={"model": model})
    return changed if group == MODEL else config.model_copy(update={group: changed})


def group_topology(config: Config, group: str) -> Topology:
    if isinstance(config, SupervisedConfig):
        return Topology(config.trainer.world_size)
    topology = config.topology()
    others = {
        CRITIC: topology.critic_topology(), REWARD: topology.reward_model_topology(),
        ROLLOUT: topology.rollout_topology(),
    }  # fmt: skip
    return others.get(group, topology)


@contextmanager
def _fake_group(config: Config, group: str) -> Iterator[None]:
    """Be rank 0 of a process group whose collectives do nothing, for an engine of several ranks."""
    if not engine_capabilities(strategies(config)[group]).multiple_ranks:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = group_topology(config, group).world_size
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _tracer(config: Config, group: str, memory: TensorMemory, on_device: bool) -> "Tracer":
    if isinstance(config, PPOConfig):
        return _PPOTracer(config, group, memory, on_device)
    return _SupervisedTracer(config, memory, on_device)


class Tracer(ABC):
    """Runs the roles of a group on this rank, and records the memory of their phases."""

    def __init__(self, engines: dict[str, TorchEngine], memory: TensorMemory, on_device: bool):
        self.engines, self.memory, self.on_device = engines, memory, on_device
        self.is_forecast = not memory.computes
        self.phases: dict[tuple[str, str], Phase] = {}
        self.parts: dict[tuple[str, str], list[Part]] = {}
        self.repeats = 2
        """Number of optimizer steps of a forecast, and of their micro-batches."""
        if self.is_forecast:
            for engine in engines.values():  # weights are initialized instead of loaded
                model = engine.config.model.model_copy(update={"random_init": True})
                engine.config = engine.config.model_copy(update={"model": model})

    @abstractmethod
    def actions(self) -> Iterator[Action]:
        """Yield the phases of a training step that the group takes part in, in the order of the trainer."""

    def init_models(self) -> None:
        """Build all models."""
        for role, engine in self.engines.items():
            self.record(role, "build", partial(self.init_model, role))
            if self.is_forecast and isinstance(engine.module, PackedModel):
                mark_layers(engine.module.hf, self.memory)

    def init_model(self, role: str) -> None:
        self.engines[role].init_model()

    def run(self) -> list[Trace]:
        """Build the roles and run the phases of `STEPS` training steps."""
        self.init_models()
        for step in range(STEPS):
            self.repeats = 1 if step == 0 else 2
            for role, name, action in self.actions():
                tries_layouts = name == "gen" and not self.on_device  # of packed weights, in the first step only
                if not self.is_forecast or step > 0 or tries_layouts:
                    self.record(role, name, action)
                elif name in UPDATES:
                    action()
        for role, engine in self.engines.items():
            if engine.config.optim is not None:
                states = [value for state in engine.optimizer.state.values() for value in state.values()]
                tensors = [*engine.checkpoint_weights().values(), *(s for s in states if isinstance(s, Tensor))]
                size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)  # of all shards
                self.record(role, "save", lambda: None)
                self.phases[role, "save"] = self.phases[role, "save"]._replace(disk=size)
        return [Trace(phase, self.parts[key]) for key, phase in self.phases.items()]

    def record(self, role: str, name: str, action: Callable[[], Any]) -> None:
        """Run a phase, and keep the maximum of its peaks over all steps."""
        self.memory.reset_peak()
        action()
        self.memory.mark(None)
        parts = self.parts.setdefault((role, name), [])
        parts += self.memory.parts
        peak, host = max(part.peak for part in parts), max(part.host_peak for part in parts)
        self.phases[role, name] = Phase(role, name, peak, self.memory.live, host=host)

    def in_host_memory(self) -> AbstractContextManager[None]:
        """Return the context in which batches are created."""
        return self.memory.on_host() if self.on_device else nullcontext()

    def _fewest(self, rows: int, sequences: int | None, tokens: int | None, longest: int) -> int:
        """Return the number of rows with which a phase has its peak. A forecast needs only a few micro-batches.

        `sequences` or `tokens` limit a micro-batch, and a row adds at most `longest` tokens to it.
        """
        return min(rows, self.repeats * (sequences or max(1, (tokens or 1) // longest))) if self.is_forecast else rows


class _PPOTracer(Tracer):
    """Traces the roles of a group of an RL run."""

    def __init__(self, config: PPOConfig, group: str, memory: TensorMemory, on_device: bool):
        self.config, self.group, self.generation = config, group, ExitStack()
        policy, critic, reward = role_classes(config)
        topology = config.topology()
        if group == POLICY:
            self.worker: Any = policy(config, topology, STEPS)
            engines = {"actor": self.worker.actor.engine}
            if config.kl_plan().needs_model:
                engines["ref"] = self.worker.ref.engine
        else:
            self.worker = critic(config, topology, STEPS) if group == CRITIC else reward(config, topology)
            engines = {group: self.worker.engine}
        super().__init__(engines, memory, on_device)

    def init_model(self, role: str) -> None:
        if self.group == REWARD:
            self.worker.init_model()
        else:
            super().init_model(role)

    def init_models(self) -> None:
        super().init_models()
        if self._generates():
            self.record("rollout", "build", self.worker.rollout.init_model)
            if self.is_forecast:
                self._shorten_generation()

    # -- phases -----------------------------------------------------------------------------------

    def actions(self) -> Iterator[Action]:
        config, worker, topology = self.config, self.worker, self.config.topology()
        if self.group == REWARD:
            rows = self._inference_batch(config.reward_dp_size(topology))
            yield REWARD, "reward", lambda: worker.compute_rm_score(rows)
        elif self.group == CRITIC:
            rows = self._inference_batch(config.critic_dp_size(topology))
            yield CRITIC, "values", lambda: worker.compute_values(rows)
            mini_batch = config.critic_mini_batch_per_rank(topology)
            update = self._update_batch(worker, mini_batch, config.critic_dp_size(topology))
            yield CRITIC, "update_critic", lambda: worker.update_critic(update)
        else:
            yield from self._policy_actions(config.actor_dp_size(topology))

    def _policy_actions(self, dp_size: int) -> Iterator[Action]:
        config, worker = self.config, self.worker
        if not config.actor_rollout_ref.hybrid_engine:  # it generates on other devices
            yield "actor", "sync", self._sync
        elif self.on_device:
            yield "actor", "sync", self._sync
            yield "actor", "gen", self.generation.close
        elif self._generates():
            yield "actor", "gen", lambda: self._generate(self._batch(self._rows(dp_size)))
        if config.needs_log_prob_passes():
            rows = self._inference_batch(dp_size)
            yield "actor", "old_log_prob", lambda: worker.compute_log_prob(rows)
        if config.kl_plan().needs_log_probs:
            role = "ref" if config.kl_plan().needs_model else "actor"
            ref_rows = self._inference_batch(config.ref_dp_size(config.topology()), role)
            yield role, "ref", lambda: worker.compute_ref_log_prob(ref_rows)
        mini_batch = config.actor_mini_batch_per_rank(config.topology())
        update = self._update_batch(worker.actor, mini_batch, dp_size)
        source = config.old_log_prob_source()
        yield "actor", "update_actor", lambda: worker.update_actor(update, old_log_probs=source)

    def _generates(self) -> bool:
        policy = self.config.actor_rollout_ref
        is_traced = policy.hybrid_engine and policy.rollout.name == TRACED_ROLLOUT
        return self.group == POLICY and is_traced and not self.on_device

    def _sync(self) -> None:
        """Gather the weights for the rollout, and keep what is on the device while it generates (`generator.py`)."""
        policy, engine = self.config.actor_rollout_ref, self.engines["actor"]
        dtype, shares_storage = DTYPES[policy.rollout.dtype], False
        keeps = policy.hybrid_engine and keeps_tensors(policy.rollout.name)

        def dtype_of(_name: str, tensor: Tensor) -> torch.dtype:
            nonlocal shares_storage
            shares_storage |= tensor.dtype == dtype
            return dtype

        with ExitStack() as parameters:
            parameters.enter_context(engine.eval_mode())
            weights = engine.named_weights(dtype_of=dtype_of)
            if keeps:
                received = [tensor for _, tensor in weights]
                self.generation.callback(received.clear)
            else:
                for _ in weights:  # a weight has been copied before the next one is gathered
                    pass
            if keeps and shares_storage:
                self.generation.enter_context(parameters.pop_all())

    def _generate(self, batch: DataProto) -> None:
        """Generate responses. A forecast fills the KV cache first.

        With environments, it generates two answers to each prompt, and keeps rows of the maximum length between them.
        """
        worker: RolloutWorker = self.worker.rollout
        rollout, config = self.worker.rollout.rollout, self.worker.rollout.rollout.config
        plays = self.config.plays_episodes()
        if plays:
            worker.sync_weights()
        if self.is_forecast:
            rollout.cache.reserve(min(config.max_num_seqs, len(batch)) + 1, config.max_model_len)
        RolloutWorker.generate_sequences(worker, batch.select("prompts"))
        if plays:
            _kept = [rollout.cache.read(0, config.max_model_len) for _ in range(len(batch) * self.is_forecast)]
            RolloutWorker.generate_sequences(worker, batch.select("prompts"))
            worker.sleep_rollout()

    def _shorten_generation(self) -> None:
        """Generate two tokens per row, with weights packed as for responses of the maximum length."""
        rollout = self.worker.rollout
        rollout.params = {key: replace(params, max_tokens=2) for key, params in rollout.params.items()}
        decoder, num_steps = rollout.rollout.decoder, self.config.data.max_response_length
        prepare = decoder.prepare

        def choose(layer: PackableLinear) -> Layout | None:
            with self.memory.computing():  # the choice compares products
                return choose_layout(layer)

        @contextmanager
        def prepare_packed(num_rows: int, *_: int) -> Iterator[Forward]:
            with packed_linears(decoder.hf, num_rows, num_steps, choose), prepare(num_rows, 1) as forward:
                yield forward

        decoder.prepare = prepare_packed

    # -- batches ----------------------------------------------------------------------------------

    def _rows(self, dp_size: int) -> int:
        """Return the number of rows of a training step on each rank."""
        return max(1, self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n // dp_size)

    def _inference_batch(self, dp_size: int, role: str | None = None) -> DataProto:
        engine, longest = self.engines[role or next(iter(self.engines))].config, self.config.data.max_response_length
        return self._batch(
            self._fewest(self._rows(dp_size), engine.infer_micro_batch_size, engine.infer_max_tokens, longest)
        )

    def _update_batch(self, role: Any, mini_batch: int, dp_size: int) -> DataProto:
        steps, engine = max(1, self._rows(dp_size) // mini_batch), role.engine.config
        shares_prompts = True
        if self.is_forecast:
            # If rows are distributed over several optimizer steps at random, each row of a micro-batch may have
            # another prompt, which needs the most memory.
            size, prompts = engine.micro_batch_size, mini_batch // self.config.actor_rollout_ref.rollout.n
            shares_prompts = steps == 1 or size is None or size > prompts
            steps, longest = min(steps, self.repeats), self.config.data.max_response_length
            mini_batch = self._fewest(mini_batch, engine.micro_batch_size, engine.max_tokens, longest)
            role.mini_batch_size = mini_batch
        return self._batch(steps * mini_batch, shares_prompts)

    def _batch(self, rows: int, shares_prompts: bool = True) -> DataProto:
        """Return rows of the maximum length, with all columns that a phase reads. They are in host memory.

        `shares_prompts` gives several responses to each prompt.
        """
        data, random = self.config.data, torch.Generator().manual_seed(0)
        prompt, response = data.max_prompt_length, data.max_response_length
        group = self.config.actor_rollout_ref.rollout.n if shares_prompts else 1
        with self.in_host_memory():
            prompts = [torch.randint(TOKENS, (prompt,), generator=random) for _ in range(-(-rows // group))]
            tokens = torch.randint(TOKENS, (rows * response,), generator=random)
            responses = Ragged(tokens, torch.full((rows,), response))
            columns: dict[str, Any] = {
                "prompts": Ragged.from_rows([prompts[row // group] for row in range(rows)]),
                "responses": responses,
                "response_mask": responses.map(lambda tokens: torch.ones_like(tokens, dtype=torch.bool)),
            }
            numbers = responses.like(torch.zeros(len(responses.values)))
            return DataProto.from_dict(columns | dict.fromkeys(NUMBERS, numbers))


class _SupervisedTracer(Tracer):
    """Traces the model of a supervised run."""

    def __init__(self, config: SFTConfig | RMConfig, memory: TensorMemory, on_device: bool):
        self.config = config
        worker = SFTWorker(config, STEPS) if isinstance(config, SFTConfig) else RMWorker(config, STEPS)
        self.worker = worker
        super().__init__({MODEL: worker.engine}, memory, on_device)  # pyright: ignore[reportArgumentType]

    def actions(self) -> Iterator[Action]:
        dp_size = Topology(self.config.trainer.world_size).dp_size(self.config.ranks_per_row())
        rows, engine = max(1, self.config.data.train_batch_size // dp_size), self.engines[MODEL].config
        longest = self.config.max_row_length()
        batch = self._batch(self._fewest(rows, engine.micro_batch_size, engine.max_tokens, longest))
        yield MODEL, "train", lambda: self.worker.train_batch(batch)
        if self.config.data.val_files:
            held_out = self._batch(self._fewest(rows, engine.infer_micro_batch_size, engine.infer_max_tokens, longest))
            worker = self.worker
            infer = worker.compute_log_prob if isinstance(worker, SFTWorker) else worker.compute_scores
            yield MODEL, "validate", lambda: infer(held_out)

    def _batch(self, rows: int) -> DataProto:
        """Return rows of the maximum length, all of whose tokens are trained. They are in host memory."""
        length, random = self.config.data.max_length, torch.Generator().manual_seed(0)
        with self.in_host_memory():

            def sequences() -> Ragged:
                return Ragged(torch.randint(TOKENS, (rows * length,), generator=random), torch.full((rows,), length))

            if isinstance(self.config, RMConfig):
                columns = {"chosen": sequences(), "rejected": sequences(), "margin": torch.zeros(rows)}
                return DataProto.from_dict(columns)
            ids = sequences()
            return DataProto.from_dict({"input_ids": ids, "loss_mask": ids.like(ids.positions() > 0)})


NUMBERS = (
    "advantages", "old_log_probs", "policy_ages", "ref_log_prob", "returns", "rollout_is_weights", "rollout_log_probs",
    "values",
)  # fmt: skip
"""Columns with a number per response token."""
TOKENS = 64
"""Token ids of the synthetic rows are below this number."""
