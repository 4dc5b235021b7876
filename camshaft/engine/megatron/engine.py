"""The `megatron` engine: trains a GPT model of megatron-core over several ranks.

    engine = MegatronEngine(EngineConfig(model=..., optim=..., options={"tensor_model_parallel_size": 2}))

`options` are described by `MegatronOptions` in `config/schema/megatron.py`. Megatron provides the layers, the pipeline
schedules and the reduction of gradients. Micro-batches, hooks, losses, learning rates and checkpoints are those of the
other engines (`ShardedEngine`).
"""

# pyright: reportMissingImports=false

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from camshaft.config.backends import MEGATRON
from camshaft.config.engine import EngineConfig, OptimConfig
from camshaft.config.schema.megatron import MegatronOptions
from camshaft.device import random_states, seed_ranks
from camshaft.engine import checkpoint
from camshaft.engine.base import DtypeOf, cast_weight
from camshaft.engine.fsdp.weights import broadcast_each, load_full_model
from camshaft.engine.megatron.architecture import transformer_config
from camshaft.engine.megatron.cpu import on_device
from camshaft.engine.megatron.data_parallel import DataParallel, ShardedDataParallel
from camshaft.engine.megatron.groups import Layout, create_groups
from camshaft.engine.megatron.model import MegatronModel
from camshaft.engine.megatron.pipeline import run_layers, run_pipeline
from camshaft.engine.megatron.routing import MegatronRoutingStep, RowRouting
from camshaft.engine.megatron.state import Mirror
from camshaft.engine.megatron.weights import WeightStore, load_weights, shards_by_name, weight_blocks
from camshaft.engine.micro_batches import MicroBatches, ModelInputs
from camshaft.engine.optim import build_optimizer
from camshaft.engine.pipeline import locate_weights, weights_of_all_stages
from camshaft.engine.sharded import ShardedEngine
from camshaft.engine.torch_engine import FORWARD_ONLY
from camshaft.errors import EngineError
from camshaft.models.loader import DTYPES, skeleton
from camshaft.seat import Seat

ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
"""Supported optimizers of torch.optim. They update each element independently, so matrices may be fused and split."""
RNG = "model-parallel-rng"
"""Name of the random state that Megatron uses inside layers."""


class MegatronEngine(ShardedEngine):
    """One GPT model of megatron-core, parallel over the ranks of the default process group."""

    capabilities = MEGATRON
    copies_weights = True
    routing_class = MegatronRoutingStep
    options: MegatronOptions
    module: MegatronModel  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        if config.optim is None:
            return
        param_dtype = self.options.mixed_precision.param_dtype
        if param_dtype not in (None, config.dtype) and config.dtype != "float32":
            raise EngineError(
                f"mixed_precision.param_dtype={param_dtype} is not supported with dtype={config.dtype} for training "
                "with strategy=megatron; set dtype=float32, or param_dtype=null"
            )
        if self.options.use_distributed_optimizer and (config.optim.optimizer, config.dtype) != ("AdamW", "float32"):
            raise EngineError(
                "use_distributed_optimizer supports only AdamW with float32 weights, got "
                f"optimizer={config.optim.optimizer} and dtype={config.dtype}; set use_distributed_optimizer=false"
            )
        if config.optim.optimizer not in ELEMENTWISE:
            raise EngineError(
                f"optimizer={config.optim.optimizer} is not supported by strategy=megatron, which fuses and splits "
                f"matrices and therefore needs an elementwise optimizer; use one of {', '.join(ELEMENTWISE)}"
            )

    def build_model(self) -> MegatronModel:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.join_ranks()
        self.layout = Layout.from_options(self.options, dist.get_world_size())
        self.groups = create_groups(dist.group.WORLD, self.layout)  # pyright: ignore[reportArgumentType]
        self.data_group = self.groups.dp if self.layout.data > 1 else None
        hf = skeleton(self.config.model, self.config.dtype).hf
        self._templates = dict(hf.named_parameters())
        config = transformer_config(hf.config, self.config, self.options)
        with on_device(self.device):
            module = MegatronModel(hf, self.config.model.head, config, self.groups, self.device).to(self.device)
        self._blocks = weight_blocks(module, {name: template.shape for name, template in self._templates.items()})
        local_names = [weight.name for block in self._blocks for weight in block.weights]
        self._stage_of = locate_weights(self._templates, local_names, self.groups.pp)
        dtype = DTYPES[self.config.dtype]
        store_class = ShardedDataParallel if self.options.use_distributed_optimizer else DataParallel
        self._store = WeightStore(dtype) if self.config.optim is None else store_class(module, self.device, dtype)
        return module.eval()

    def build_optimizer(self, config: OptimConfig) -> torch.optim.Optimizer:
        optimizer = build_optimizer(self.data_parallel.optimizer_parameters.values(), config)
        self.data_parallel.attach(optimizer)
        return optimizer

    def init_model(self) -> None:
        super().init_model()
        full_model = load_full_model(self.config, self.checkpoint_group)  # pyright: ignore[reportArgumentType]
        with self.parts.on_device("model"):
            load_weights(self._blocks, self._store, broadcast_each(self._templates, full_model, self.device))
        seed_ranks(self.device, self.config.seed, dist.get_rank())

    @property
    def data_parallel(self) -> DataParallel:
        if not isinstance(self._store, DataParallel):
            raise EngineError(FORWARD_ONLY)
        return self._store

    @property
    def seat(self) -> Seat:
        self.require_model()
        return self.layout.seat(dist.get_rank())

    # -- one step ---------------------------------------------------------------------------------

    def run_micro_batches(self, micro_batches: MicroBatches) -> None:
        with on_device(self.device), self._random_state():
            if self.options.pipeline_model_parallel_size > 1:
                run_pipeline(self.module, micro_batches, self.forward_context)
            else:
                super().run_micro_batches(micro_batches)

    def run_layers(self, inputs: Sequence[ModelInputs], rows_of: Callable[[int], RowRouting]) -> None:
        """Run micro-batches forward within `run_micro_batches`, without output head and change of random states."""
        tracker = get_cuda_rng_tracker()
        states = tracker.get_states()
        run_layers(self.module, inputs, rows_of, self.forward_context)
        tracker.set_states(states)

    @contextlib.contextmanager
    def _random_state(self) -> Iterator[None]:
        """Set the random state that Megatron uses inside layers, which differs between ranks.

        It is derived from the state of torch, which checkpoints contain.
        """
        tracker = get_cuda_rng_tracker()
        previous = tracker.get_states()
        tracker.reset()
        tracker.add(RNG, int(torch.randint(1 << 31, ())) if self.module.training else 0)
        try:
            yield
        finally:
            tracker.set_states(previous)

    def max_over_ranks(self, count: int) -> int:
        if self.options.virtual_pipeline_model_parallel_size is not None:
            # The interleaved schedule requires a multiple of the number of stages; additional ones are dummies.
            count += -count % self.options.pipeline_model_parallel_size
        return super().max_over_ranks(count)

    def optimizer_zero_grad(self) -> None:
        self.require_model()
        self.data_parallel.zero_grad()

    def clip_and_step(self) -> tuple[float, bool]:
        return self.data_parallel.clip_and_step(self.grad_clip)

    def non_finite_gradient(self) -> str | None:
        self.require_model()
        for block in reversed(self._blocks):
            gradients: list[Tensor] = [cast(Any, parameter).main_grad for parameter in block.parameters]
            if not all(gradient.isfinite().all() for gradient in gradients):
                return block.weights[0].name
        return None

    def overflowing_weight(self) -> str | None:
        self.require_model()
        for block in self._blocks:
            if not all(parameter.detach().float().square().sum().isfinite() for parameter in block.parameters):
                return block.weights[0].name
        return None

    # -- weights and checkpoints ------------------------------------------------------------------

    def named_weights(
        self, adapter_only: bool = False, dtype_of: DtypeOf | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        self.require_model()
        if adapter_only:
            return super().named_weights(adapter_only)  # raises an error
        weights = {weight.name: weight for block in self._blocks for weight in block.weights}
        shards = shards_by_name(self._blocks, self._store)

        def full_weight(name: str) -> Tensor:
            shard = cast_weight(name, shards[name](), dtype_of)
            return weights[name].as_dtensor(shard.to(self.device)).full_tensor()

        return weights_of_all_stages(
            self._stage_of, full_weight, self._templates, dtype_of, self.groups.pp, self.device
        )

    def _checkpoint_state(self) -> checkpoint.State:
        mirror = Mirror(self._blocks, self._store, self.config.optim)
        mirror.read()
        return checkpoint.State.collect(
            mirror.weights, mirror.optimizer, mirror.parameters, self._checkpoint_metadata(), random_states(self.device)
        )

    def _load_checkpoint_state(self, folder: Path) -> checkpoint.LoadedState:
        mirror = Mirror(self._blocks, self._store, self.config.optim)
        loaded_state = checkpoint.load_into(
            folder, mirror.weights, mirror.optimizer, mirror.parameters, group=self.checkpoint_group
        )
        mirror.write()
        return loaded_state
