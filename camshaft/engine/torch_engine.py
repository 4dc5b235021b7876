"""Base class of engines that train a transformers model with a torch optimizer.

    class MyEngine(TorchEngine):
        def build_model(self) -> PackedModel: ...       # the model on its device, or sharded over ranks

        @property
        def seat(self) -> Seat: ...                     # rank and data-parallel rank, for several ranks

A subclass places the model on devices: `SingleDeviceEngine`, `FSDPEngine`, the `DDPEngine` of `examples/engine`, and
the `PipelineEngine` of `examples/pipeline_engine`. An engine of several ranks calls `join_ranks` in `build_model`, sets
`data_group`, and sums the gradients of the data-parallel ranks, for example in `clip_and_step`. The optimizer is in
`optim.py`, offloading in `offload.py`, checkpoints in `checkpoint.py` and the micro-batches in `micro_batches.py`. A
step consists of

    padded mapping -> ragged batch -> token and sequence counts over all ranks -> micro-batch plan
      -> [ preprocess -> model -> postprocess -> loss -> backward ] for each micro-batch
      -> predictions in the order of the rows; loss and metrics summed over micro-batches and ranks
"""

import contextlib
import logging
import math
import secrets
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from camshaft.config.engine import EngineConfig, OptimConfig
from camshaft.dataproto import DataProto
from camshaft.device import (
    available_device,
    destroy_group,
    host_backend,
    join_group,
    random_states,
    resolve_device,
    set_random_states,
    to_device,
)
from camshaft.engine import checkpoint
from camshaft.engine.base import (
    BaseEngine,
    Batch,
    DtypeOf,
    LossFn,
    PostprocessFn,
    PreprocessFn,
    StepHyperparameters,
    cast_weight,
)
from camshaft.engine.compute_dtype import cast_parameters
from camshaft.engine.context import CallContext, StepContext, call_context
from camshaft.engine.micro_batches import (
    Hooks,
    MicroBatches,
    as_batch,
    attention_pivot,
    call_hook,
    check_gradient,
    has_input_ids,
    padding_share,
    plan_micro_batches,
    plan_padded_rows,
)
from camshaft.engine.offload import Part, Parts
from camshaft.engine.optim import Schedule, build_optimizer, clip_and_step, replaced_hyperparameters
from camshaft.engine.prefix_sharing import PrefixGroup, prefix_groups
from camshaft.engine.routing import RoutingStep, check_coefficient, routing_step, separate_routing
from camshaft.errors import EngineError
from camshaft.models.attention import least_shared
from camshaft.models.loader import DTYPES
from camshaft.models.lora import adapter_weights, disable_adapter, merged_weights, unembed_notice
from camshaft.models.packed import PackedModel, PackedModule
from camshaft.models.sequence import join_columns, split_columns
from camshaft.progress import track
from camshaft.seat import ONLY_RANK, Seat

logger = logging.getLogger(__name__)

SAVE_TIMEOUT = timedelta(hours=12)
"""Timeout of checkpoint collectives. It is long because ranks wait while rank 0 copies to remote storage."""
FORWARD_ONLY = "this engine is forward-only; set EngineConfig.optim to train it"


class TorchEngine(BaseEngine):
    """A `PackedModel`, its optimizer and its schedule. A subclass places the model on devices."""

    # `init_model` sets the first four attributes.
    _has_model = False
    module: PackedModule
    parts: Parts
    device: torch.device
    offloaded_parts: tuple[Part, ...] = ()
    """Parts that stay in host memory outside `train_mode` and `eval_mode`."""
    routing_class: type[RoutingStep] = RoutingStep
    """Routing of a step of a mixture of experts."""
    copies_weights = False
    """True if `named_weights` yields copies of the weights in every layout."""
    casts_parameters = False
    """True if a step casts the parameters to `compute_dtype`. A sharding library casts them itself."""
    checkpoint_group: dist.ProcessGroup | None = None
    """Process group that only checkpoints use; None for a single process."""
    data_group: dist.ProcessGroup | None = None
    """Data-parallel ranks, which process different rows; None if there is only one."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self._optimizer: torch.optim.Optimizer | None = None
        self._schedule: Schedule | None = None
        self._loss_fn: LossFn | None = None
        self._warned_of_unread_counts = self._logged_padding = False
        self._skipped_steps = 0
        self.grad_clip = config.grad_clip
        """Maximum norm of the gradient in the current step."""
        self._series = secrets.token_hex(8)

    # -- placement on devices, implemented by subclasses ------------------------------------------

    @abstractmethod
    def build_model(self) -> PackedModule:
        """Build the model with its weights, in eval mode, on `self.device` or sharded over ranks."""

    def build_optimizer(self, config: OptimConfig) -> torch.optim.Optimizer:
        """Build the optimizer of the trainable parameters of `self.module`."""
        return build_optimizer(self.module.parameters(), config)

    def join_ranks(self) -> dist.ProcessGroup:
        """Join the default process group, and return a gloo group of its ranks for checkpoints and errors."""
        join_group(self.device)
        # Collectives of a background save would interleave with those of training, so checkpoints use another group.
        self.checkpoint_group = group = cast(
            dist.ProcessGroup, dist.new_group(backend=host_backend(), timeout=SAVE_TIMEOUT)
        )
        weakref.finalize(self, destroy_group, group).atexit = False
        return group

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the data-parallel ranks, in place."""
        if self.data_group is not None:
            dist.all_reduce(tensor, group=self.data_group)
        return tensor

    def max_over_ranks(self, count: int) -> int:
        """Return the maximum of `count` over the data-parallel ranks."""
        if self.data_group is None:
            return count
        maximum = torch.tensor(count, device=self.device)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self.data_group)
        return int(maximum)

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Gather a sharded weight; an unsharded one is returned unchanged."""
        return tensor

    @property
    def home_device(self) -> torch.device:
        """Device that holds parameters and optimizer state during a step."""
        return self.device

    def step_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which all micro-batches of a step run, including their backward passes."""
        if not self.casts_parameters or self.weight_dtypes == {self.compute_dtype}:
            return contextlib.nullcontext()
        return cast_parameters(self.module, self.compute_dtype)

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the model's forward pass runs."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of the loss of one micro-batch."""
        loss.backward()

    def after_inference(self) -> None:
        """Free resources that a backward pass would normally free."""

    def clip_and_step(self) -> tuple[float, bool]:
        """Clip the gradient norm to `grad_clip` and update; return (norm before clipping, True if it was applied)."""
        return clip_and_step(self.optimizer, self.grad_clip)

    def shard_data(self, data: DataProto) -> DataProto:
        self.require_model()
        split = self.module.sequence
        return data if split is None else split_columns(data, split)

    def unshard_data(self, data: DataProto) -> DataProto:
        self.require_model()
        split = self.module.sequence
        return data if split is None else join_columns(data, split)

    # -- model, optimizer, schedule ---------------------------------------------------------------

    def init_model(self) -> None:
        self.device = resolve_device(self.config.device)
        self.module = self.build_model()
        check_coefficient(self.config.model, self.module.routers)
        if self.config.optim is not None:
            # Built after `build_model`, which may replace parameters, and before any forward pass.
            self._optimizer = self.build_optimizer(self.config.optim)
            self._schedule = Schedule(self._optimizer, self.config.optim)
        self.parts = Parts(self.module, self._optimizer, self.home_device, self.offloaded_parts)
        self._has_model = True

    def require_model(self) -> None:
        """Raise `EngineError` before `init_model`. Members of the interface call it before they read the state."""
        if not self._has_model:
            raise EngineError("the engine has no model; call init_model() first")

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        self.require_model()
        if self._optimizer is None:
            raise EngineError(FORWARD_ONLY)
        return self._optimizer

    @property
    def schedule(self) -> Schedule:
        self.require_model()
        if self._schedule is None:
            raise EngineError(FORWARD_ONLY)
        return self._schedule

    @property
    def skipped_steps(self) -> int:
        self.require_model()
        return self._skipped_steps

    def reset_optimizer(self) -> None:
        self.optimizer.state.clear()

    # -- modes and devices ------------------------------------------------------------------------

    def train_mode(self) -> contextlib.AbstractContextManager[None]:
        self.check_not_shared()
        return self._enter_mode(True, "model", "gradients", "optimizer")

    def eval_mode(self) -> contextlib.AbstractContextManager[None]:
        return self._enter_mode(False, "model")

    @contextlib.contextmanager
    def _enter_mode(self, training: bool, *parts: Part) -> Iterator[None]:
        self.require_model()
        was_training = self.module.training
        with self.parts.on_device(*parts):
            self.module.train(training)
            try:
                yield
            finally:
                self.module.train(was_training)

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        self.require_model()
        target = available_device(device)
        target = self.home_device if target.type == self.home_device.type else target
        parts: dict[Part, bool] = {"model": model, "optimizer": optimizer}
        self.parts.move([part for part, is_moved in parts.items() if is_moved], target)

    # -- one step ---------------------------------------------------------------------------------

    def set_loss_fn(self, loss_fn: LossFn) -> None:
        self.require_model()
        self._loss_fn = loss_fn

    def forward_backward_step(
        self,
        batch: Batch,
        ctx: StepContext | None = None,
        forward_only: bool = False,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
    ) -> tuple[Any, ...]:
        self.require_model()
        loss_fn = None if forward_only else self._loss_fn
        if not forward_only and loss_fn is None:
            raise EngineError("the engine has no loss function; call set_loss_fn(loss_fn), or pass forward_only=True")
        call: StepContext = call_context(ctx, self.config.model.head, self.capabilities)  # pyright: ignore
        if preprocess_fn is not None and not has_input_ids(batch):
            # Without input_ids, row lengths and counts are unknown until the hook has run.
            batch, call = call_hook("preprocess_fn", preprocess_fn, batch, call)
            preprocess_fn = None
        data = as_batch(batch)
        self._store_counts(data, call)
        extension = routing_step(self, call, forward_only)
        groups = self._prefix_groups(data, call.get("routing") is not None)
        plan = self._plan_micro_batches(data, forward_only, groups)
        hooks = Hooks(preprocess_fn, postprocess_fn, loss_fn)
        shares_prefixes, vocabulary_size = groups is not None, self.module.vocabulary_size
        micro_batches = MicroBatches(data, plan, call, hooks, self.device, shares_prefixes, vocabulary_size)
        micro_batches.extension = extension
        with torch.set_grad_enabled(not forward_only), self.step_context(), separate_routing(self):
            self.run_micro_batches(micro_batches)
        predictions, call = micro_batches.predictions(), micro_batches.ctx
        if loss_fn is None:
            self.after_inference()
            call["metrics"] = {}
            return predictions, {**call}
        self._warn_of_unread_counts(call, len(plan))
        # The loss and all metrics are summed in one collective.
        shares = (micro_batches.loss, *micro_batches.metrics.values())
        loss, *sums = self.sum_over_ranks(torch.stack([s.to(self.device, torch.float64) for s in shares]))
        call["metrics"] = dict(zip(micro_batches.metrics, sums, strict=True))
        if self.module.pads_rows:
            call["metrics"]["padding"] = self._padding(data.ragged("input_ids").lengths, plan)
        if extension is not None:
            added_loss, metrics = extension.results()
            loss, call["metrics"] = loss + added_loss, {**call["metrics"], **metrics}
        return predictions, loss, {**call}

    def run_micro_batches(self, micro_batches: MicroBatches) -> None:
        """Run the forward pass and, with gradients enabled, the backward pass of every micro-batch.

        A pipeline overrides this method with its schedule. If the rows are in host memory, this method never waits for
        an accelerator, so the host can queue several micro-batches.
        """
        extension = micro_batches.extension
        if extension is not None:
            extension.prepare(micro_batches)
        for index in track(range(len(micro_batches)), len(micro_batches), "micro-batches"):
            inputs = micro_batches.prepare(index)
            with self.forward_context():
                outputs = self.module(*inputs.arguments()) if extension is None else extension.forward(index, inputs)
            loss = micro_batches.finish(index, outputs)
            if loss is not None:
                self.backward(check_gradient(loss))

    def _prefix_groups(self, data: DataProto, is_routed: bool) -> list[PrefixGroup] | None:
        """Group the rows by their prefixes, each of which is computed only once; None if prefixes are not shared."""
        module, model = self.module, self.config.model
        least = least_shared(self.device, self.compute_dtype)
        supported = module.supports_prefix_sharing and module.sequence is None and model.head != "reward"
        if least is None or not supported or not model.use_prefix_grouper:
            return None
        ids, routed = data.ragged("input_ids"), data.ragged("routed_experts") if is_routed else None
        groups = prefix_groups(ids, data.ragged("loss_mask"), routed)
        saved = sum(group.shared * (len(group.rows) - 1) for group in groups)
        return groups if saved >= least * len(ids.values) else None

    def _plan_micro_batches(
        self, data: DataProto, forward_only: bool, groups: list[PrefixGroup] | None
    ) -> list[list[int]]:
        """Return the row numbers of each micro-batch. All data-parallel ranks get the same number of micro-batches."""
        config, ids = self.config, data.ragged("input_ids")
        size = config.infer_micro_batch_size if forward_only else config.micro_batch_size
        max_tokens = config.infer_max_tokens if forward_only else config.max_tokens
        if self.module.pads_rows:
            return plan_padded_rows(ids.lengths, size, max_tokens, self.max_over_ranks)
        if max_tokens is None:
            return plan_micro_batches(ids.lengths, size, None, self.max_over_ranks, prefix_groups=groups)
        pivot = attention_pivot(self.module.hidden_size)
        return plan_micro_batches(ids.lengths, size, max_tokens, self.max_over_ranks, pivot, groups)

    def _padding(self, lengths: Tensor, plan: list[list[int]]) -> Tensor:
        """Return the share of padding in the tokens of the micro-batches. The first time, also log it."""
        share = padding_share(lengths, plan)
        if not self._logged_padding and self.seat.rank == 0:
            self._logged_padding = True
            name = type(cast(PackedModel, self.module).hf).__name__
            logger.info("%s runs on right-padded rows; %.0f %% of the tokens are padding", name, 100 * share)
        return torch.tensor(share)

    def _store_counts(self, data: DataProto, ctx: StepContext) -> None:
        """Store `num_tokens` and `num_sequences` of the mini-batch, over all data-parallel ranks, in `ctx`."""
        mask = data.ragged("loss_mask").map(Tensor.double)
        rows = (mask.sum() > 0).double()
        if "sequence_weight" in data:
            rows = rows * data["sequence_weight"]
        local_counts = torch.stack([mask.values.sum(), rows.sum()])
        tokens, sequences = self.sum_over_ranks(to_device(local_counts, self.device)).tolist()
        ctx["num_tokens"], ctx["num_sequences"] = max(tokens, 1.0), max(sequences, 1.0)

    def _warn_of_unread_counts(self, ctx: Mapping[str, Any], micro_batches: int) -> None:
        """Warn once if the mini-batch is split but the loss function does not read its counts."""
        is_split = micro_batches * self.seat.dp_size > 1 and not ctx.get("loss_is_sum", False)
        if is_split and not self._warned_of_unread_counts and isinstance(ctx, CallContext) and not ctx.counts_read:
            self._warned_of_unread_counts = True
            warnings.warn(
                "the loss function reads neither ctx['num_tokens'] nor ctx['num_sequences']. Its results are summed "
                f"over {micro_batches} micro-batches and {self.seat.dp_size} data-parallel ranks, so a mean over the "
                "rows of one micro-batch depends on the split. Return a sum divided by ctx['num_tokens'] or "
                "ctx['num_sequences'], the counts of the whole mini-batch",
                stacklevel=3,
            )

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype in which a step computes. It can have a lower precision than the weights."""
        mixed_precision = getattr(self.options, "mixed_precision", None)
        return DTYPES[(mixed_precision and mixed_precision.param_dtype) or self.config.dtype]

    @property
    def weight_dtypes(self) -> set[torch.dtype]:
        """Dtypes of the weights. An adapter is float32 or wider on frozen weights of any dtype."""
        dtype = DTYPES[self.config.dtype]
        return {dtype} if self.config.model.lora is None else {dtype, torch.promote_types(dtype, torch.float32)}

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.parts.clear_gradients()

    def optimizer_step(self, hyperparameters: StepHyperparameters | None = None) -> float:
        self.require_model()
        replaced = contextlib.nullcontext() if hyperparameters is None else self._with_hyperparameters(hyperparameters)
        with self.parts.on_device("model", "gradients", "optimizer"), replaced:
            norm, updated = self.clip_and_step()
        self._skipped_steps += not updated
        return norm

    @contextlib.contextmanager
    def _with_hyperparameters(self, step: StepHyperparameters) -> Iterator[None]:
        """Use the hyperparameters `step` inside the context."""
        if not self.capabilities.supports_step_hyperparameters:
            raise EngineError(
                f"{type(self).__name__} does not support hyperparameters of a step; call optimizer_step() without "
                "arguments, or declare supports_step_hyperparameters if the engine keeps this rule of the contract"
            )
        with replaced_hyperparameters(self.optimizer, step):
            self.grad_clip = step.clip_grad or math.inf
            try:
                yield
            finally:
                self.grad_clip = self.config.grad_clip

    def non_finite_gradient(self) -> str | None:
        for name, parameter in reversed(self.named_parameters().items()):
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if local is not None and not local.isfinite().all():
                return name
        return None

    def overflowing_weight(self) -> str | None:
        for name, parameter in self.named_parameters().items():
            weight = parameter.detach()
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            if not local.float().square().sum().isfinite():
                return name
        return None

    def notices(self) -> tuple[str, ...]:
        self.require_model()
        lora, head = self.config.model.lora, self.config.model.head
        sentence = None if lora is None else unembed_notice(self._adapted_model, lora, head)
        return () if sentence is None else (sentence,)

    def lr_scheduler_step(self) -> float:
        return self.schedule.set_update(self.schedule.update + 1)

    @property
    def seat(self) -> Seat:
        """Rank and data-parallel rank of this process; engines that run on several ranks override it."""
        self.require_model()
        return ONLY_RANK

    @property
    def learning_rate(self) -> float:
        return self.schedule.learning_rate

    # -- weights and checkpoints ------------------------------------------------------------------

    def named_weights(
        self, adapter_only: bool = False, dtype_of: DtypeOf | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        self.require_model()
        if adapter_only:
            return adapter_weights(self._adapted_model, self.full_tensor)
        if self.config.model.lora is not None:
            return merged_weights(self._adapted_model, self.full_tensor, dtype_of)
        shards = self.module.weights()
        return ((name, self.full_tensor(cast_weight(name, tensor, dtype_of))) for name, tensor in shards)

    @property
    def yields_live_weights(self) -> bool:
        # Gathering, merging an adapter, and moving weights from host memory to the device make copies.
        copies = self.seat.world > 1 or self.config.model.lora is not None or self.home_device != self.device
        return not copies and not self.copies_weights

    def disable_adapter(self) -> contextlib.AbstractContextManager[Any]:
        self.require_model()
        return disable_adapter(self._adapted_model)

    @property
    def _adapted_model(self) -> PreTrainedModel:
        """The transformers model, which holds the adapter if there is one."""
        if not isinstance(self.module, PackedModel):
            raise EngineError(f"the model has no adapter, because {type(self).__name__} does not support LoRA")
        return self.module.hf

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        self.require_model()
        options = {"hdfs_path": hdfs_path, "global_step": global_step, "max_ckpt_to_keep": max_ckpt_to_keep}
        self._write_checkpoint(self._checkpoint_state(), local_path, **options)

    def _write_checkpoint(self, state: checkpoint.State, local_path: str, **options: Any) -> None:
        """Write a checkpoint. The options are those of `checkpoint.save`."""
        checkpoint.save(state, local_path, group=self.checkpoint_group, **options)

    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True) -> None:
        self.require_model()
        self.wait_for_checkpoint()
        folder_context = checkpoint.fetch_folder(local_path, hdfs_path, del_local_after_load, self.checkpoint_group)
        # State is loaded on the compute device; offloaded parts return to host memory when the block ends.
        with folder_context as folder, self.parts.on_device("model", "optimizer"):
            loaded_state = self._load_checkpoint_state(folder)
        if self._optimizer is not None:
            self.schedule.set_update(loaded_state.metadata["update"])
            if loaded_state.random:
                set_random_states(loaded_state.random, self.device)
        self._skipped_steps = loaded_state.metadata["skipped_steps"]
        self._series = loaded_state.metadata.get("series", self._series)

    def _checkpoint_state(self) -> checkpoint.State:
        random = random_states(self.device)
        return checkpoint.State.collect(
            self.checkpoint_weights(), self._optimizer, self.named_parameters(), self._checkpoint_metadata(), random
        )

    def _load_checkpoint_state(self, folder: Path) -> checkpoint.LoadedState:
        weights = self.checkpoint_weights()
        return checkpoint.load_into(
            folder, weights, self._optimizer, self.named_parameters(), group=self.checkpoint_group
        )

    def _checkpoint_metadata(self) -> dict[str, Any]:
        """Return the position of the schedule, the series of checkpoints, and the model description for exports."""
        update, path = self._schedule.update if self._schedule else 0, Path(self.config.model.path).expanduser()
        model = self.config.model.model_dump(mode="json", fallback=str)
        if path.is_dir():
            model["path"] = str(path.absolute())
        record = {"update": update, "skipped_steps": self._skipped_steps, "model": model, "seed": self.config.seed}
        return record | {"series": self._series}

    def named_parameters(self) -> dict[str, Tensor]:
        """Return the parameters by the names under which a checkpoint stores their optimizer state."""
        self.require_model()
        return dict(self.module.weight_parameters())

    def checkpoint_weights(self) -> dict[str, Tensor]:
        """Return the live weights that a checkpoint stores: all weights, or only the trained ones with an adapter."""
        if self.config.model.lora is None:
            return dict(self.module.weights())
        return {name: p.detach() for name, p in self.module.weight_parameters().items() if p.requires_grad}
