"""The interface of training engines.

    engine = build_engine("reference", config)
    engine.init_model()
    engine.set_loss_fn(loss_fn)            # loss_fn(data, predictions, ctx) -> (loss, ctx)
    with engine.train_mode():
        result = engine.train_batch(batch) # zero_grad, forward and backward, optimizer step

A batch is a `DataProto` with two ragged columns: `input_ids` holds complete sequences, and `loss_mask` selects the
tokens that outputs are computed for and that the loss counts. Predictions are `Ragged` columns aligned with
`input_ids` and zero outside `loss_mask`. Entry j describes token j given the tokens before it: `log_probs[j]` is the
log-prob of token j. `scores` hold one value per sequence.

`contracts/engine/suite.py` tests every engine against the rules of this interface:
`camshaft check-engine my_pkg.my_engine:MyEngine`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from camshaft.config.engine import EngineCapabilities, EngineConfig
from camshaft.dataproto import DataProto
from camshaft.engine.context import StepContext
from camshaft.errors import EngineError
from camshaft.seat import Seat

Batch = DataProto | Mapping[str, Any]
Predictions = Mapping[str, Any]
"""Maps names to `Ragged` columns (one value per token), or to tensors or lists (one value per row)."""

PreprocessFn = Callable[[Any, StepContext], tuple[Any, StepContext]]
PostprocessFn = Callable[[Predictions, StepContext], tuple[Any, StepContext]]
LossFn = Callable[[DataProto, Any, StepContext], tuple[Tensor, StepContext]]
DtypeOf = Callable[[str, Tensor], torch.dtype]
"""Maps the name of a weight and the weight, or a shard of it, to a dtype."""


def cast_weight(name: str, tensor: Tensor, dtype_of: DtypeOf | None) -> Tensor:
    """Cast a weight, or a shard of it, to the dtype that `dtype_of` selects; None keeps its dtype."""
    return tensor if dtype_of is None else tensor.to(dtype_of(name, tensor))


@dataclass(frozen=True)
class StepResult:
    """Results of one optimizer step. `grad_norm` is the norm before clipping. A skipped step changes no weight."""

    loss: float
    grad_norm: float
    skipped: bool
    predictions: Any = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class StepHyperparameters:
    """Hyperparameters of AdamW, or of another optimizer that has them, for one optimizer step."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad: float | None = None
    """Maximum norm of the gradient. 0 or None does not clip."""

    def __post_init__(self) -> None:
        numbers = asdict(self)
        del numbers["betas"]
        for name, value in numbers.items():
            if not 0 <= (value or 0) < math.inf:
                raise EngineError(f"StepHyperparameters: {name}={value} is not a finite number of at least 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise EngineError(f"StepHyperparameters: betas={self.betas} are not two numbers from 0 to below 1")


class BaseEngine(ABC):
    """One model, its optimizer, and the placement of both on devices.

    Before `init_model`, every other member raises an `EngineError` that names the missing call, except
    `wait_for_checkpoint`, which the cleanup after a failed start calls.
    """

    _readers = 0
    """Number of open `share_weights` contexts."""

    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities()
    """Supported features and the schema of the options. A class attribute, readable without an instance."""

    def __init__(self, config: EngineConfig):
        given: Any = config
        if not isinstance(given, EngineConfig):
            raise EngineError(
                f"config is a {type(given).__name__}; pass an EngineConfig, for example "
                "EngineConfig.model_validate({'model': {'path': 'models/tiny'}})"
            )
        self.config = config
        self.options: Any = self.capabilities.validate(config)
        """`config.options`, validated and parsed as an instance of `capabilities.options`."""

    # -- implemented by an engine -----------------------------------------------------------------

    @abstractmethod
    def init_model(self) -> None:
        """Build the model. Unless the config is forward-only, also build the optimizer and its schedule."""

    @abstractmethod
    def train_mode(self) -> AbstractContextManager[Any]:
        """Move offloaded parameters, gradients and optimizer state to the device and call `module.train()`.

        Exiting the context undoes both. Call `check_not_shared` before.
        """

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[Any]:
        """Move offloaded parameters to the device and call `module.eval()`; undo both on exit."""

    @contextmanager
    def share_weights(self) -> Generator[None]:
        """Enter `eval_mode` for a reader that shares the storage of the weights, such as a rollout.

        `train_mode` raises an error until the context is left, because an update would change what the reader reads.
        """
        self._readers += 1
        try:
            with self.eval_mode():
                yield
        finally:
            self._readers -= 1

    def check_not_shared(self) -> None:
        """Raise `EngineError` inside `share_weights`. `train_mode` calls this method."""
        if self._readers:
            raise EngineError(
                "train_mode: a rollout that shares the weights of this engine is awake and would generate with changed "
                "weights; leave rollout_mode, or call sleep_rollout() of the role, before training"
            )

    @abstractmethod
    def forward_backward_step(
        self,
        batch: Batch,
        ctx: StepContext | None = None,
        forward_only: bool = False,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
    ) -> tuple[Any, ...]:
        """Run this rank's rows in micro-batches and accumulate gradients. Ranks may hold different numbers of rows.

        Args:
            batch: A `DataProto` with `input_ids`, or a mapping with `input_ids` and `attention_mask` of shape (B, S).
                A batch without `input_ids` needs a `preprocess_fn` that builds them.
            ctx: Control keys (`StepContext`) and keys of the caller. It is not modified.
            forward_only: Compute no gradient.
            preprocess_fn: `(batch, ctx) -> (inputs, ctx)`, called once per micro-batch before the model. For a batch
                without `input_ids` it is called once with the whole batch, before the split into micro-batches.
            postprocess_fn: `(outputs, ctx) -> (predictions, ctx)`, called once per micro-batch after the model.

        Returns:
            `(predictions, ctx)` if `forward_only`, else `(predictions, loss, ctx)`. Predictions are in the order of
            this rank's rows; the loss is that of the whole mini-batch, over all data-parallel ranks.
        """

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Clear accumulated gradients."""

    @abstractmethod
    def optimizer_step(self, hyperparameters: StepHyperparameters | None = None) -> float:
        """Clip the gradient norm and apply one update; return the norm before clipping.

        If the norm is not finite, the update is skipped and `skipped_steps` increases by one. `hyperparameters` replace
        those of the config and of the schedule in this step only. Pass them only to an engine that declares
        `supports_step_hyperparameters`; other engines need not have the parameter.
        """

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the learning-rate schedule by one step; return the learning rate of the next update."""

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """Learning rate of the next update."""

    @abstractmethod
    def shard_data(self, data: DataProto) -> DataProto:
        """Return this rank's chunk of the tokens under sequence parallelism; otherwise return `data` unchanged."""

    @abstractmethod
    def unshard_data(self, data: DataProto) -> DataProto:
        """Invert `shard_data`: gather the chunks of all sequence-parallel ranks into complete rows."""

    @abstractmethod
    def set_loss_fn(self, loss_fn: LossFn) -> None:
        """Set the loss function `(data, predictions, ctx) -> (loss, ctx)`, which is called once per micro-batch."""

    @abstractmethod
    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move the parameters (`model`), the optimizer state (`optimizer`), or both to `device`.

        Raise `EngineError` if the engine cannot move a part, and move nothing.
        """

    @abstractmethod
    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Write the complete state atomically to the folder `local_path`, and copy the folder to `hdfs_path` if given.

        The folder has the format of `engine/checkpoint.py`, with weights under their Hugging Face names, so that
        `camshaft export` can read it.

        `max_ckpt_to_keep` limits the number of checkpoints: the oldest of this engine are removed. They are the folders
        whose paths differ from `local_path` only in the number n of `global_step_<n>`. If the path contains no such
        folder, they are the folders beside it that this engine wrote, or an engine from whose checkpoint it was loaded,
        in the order of `global_step`.
        """

    @abstractmethod
    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True) -> None:
        """Load a checkpoint that `save_checkpoint` wrote, at any world size.

        With `hdfs_path` the folder is first copied from there to `local_path`, and `del_local_after_load` removes that
        copy after the load. A checkpoint that was local before the call is never removed.
        """

    @property
    @abstractmethod
    def seat(self) -> Seat:
        """Rank and world size of this process, and its data-parallel rank and size."""

    @abstractmethod
    def named_weights(
        self, adapter_only: bool = False, dtype_of: DtypeOf | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) pairs one at a time, in the same order on every rank.

        By default an adapter is merged into the weights, under the names of the model without adapter; inside
        `disable_adapter` the base weights are yielded. `adapter_only` yields the adapter, and a value or reward head
        trained with it, under the names that PEFT uses in its files; it raises an error if the model has no adapter.
        The caller may keep a tensor: it is the live weight or a copy, never a reused buffer.

        `dtype_of` selects the dtype of each weight, except with `adapter_only`. A sharded engine casts a shard before
        it gathers the weight, because a smaller dtype needs less communication and memory.
        """

    @property
    def yields_live_weights(self) -> bool:
        """True if `named_weights()` yields the live weights, so that keeping all of them needs no additional memory."""
        return False

    @abstractmethod
    def disable_adapter(self) -> AbstractContextManager[Any]:
        """Disable the adapter inside the context; raise an error if the model has no adapter.

        A value or reward head is not part of the adapter and keeps its trained weights.
        """

    @property
    @abstractmethod
    def skipped_steps(self) -> int:
        """Number of optimizer steps skipped because the gradient was not finite."""

    def non_finite_gradient(self) -> str | None:
        """Return the name of a parameter whose gradient on this rank is not finite, or None. For error messages.

        Of several parameters, it is the one that is first in the backward pass.
        """
        return None

    def reset_optimizer(self) -> None:
        """Discard the state of the optimizer, such as the moments of AdamW, as if no update had been made."""
        raise EngineError(f"{type(self).__name__} cannot reset its optimizer; load the checkpoint into a new engine")

    def overflowing_weight(self) -> str | None:
        """Return the name of a weight on this rank whose sum of squares is not finite in float32, or None.

        Call it inside `train_mode` or `eval_mode`. Such a model has diverged, although its outputs can be finite.
        """
        return None

    def notices(self) -> tuple[str, ...]:
        """Return a sentence for each setting that the engine accepts but cannot follow with this model."""
        return ()

    def wait_for_checkpoint(self) -> None:  # noqa: B027 - only engines that write in the background override it
        """Wait until the checkpoint in progress is written."""

    # -- implemented here for all engines ---------------------------------------------------------

    def train_batch(
        self,
        batch: Batch,
        ctx: StepContext | None = None,
        loss_fn: LossFn | None = None,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
    ) -> StepResult:
        """Run one optimizer step on one mini-batch. Call it inside `train_mode`. The schedule does not advance.

        Without `loss_fn`, the step uses that of an earlier step or of `set_loss_fn`.
        """
        if loss_fn is not None:
            self.set_loss_fn(loss_fn)
        self.optimizer_zero_grad()
        predictions, loss, results = self.forward_backward_step(batch, ctx, False, preprocess_fn, postprocess_fn)
        skipped_before = self.skipped_steps
        grad_norm = self.optimizer_step()
        sums: dict[str, Tensor] = results["metrics"]
        # One device-to-host copy for the loss and all metrics.
        stacked: Any = torch.stack([loss.double(), *(share.double() for share in sums.values())])
        value, *metrics = stacked.tolist()
        skipped = self.skipped_steps > skipped_before
        return StepResult(value, grad_norm, skipped, predictions, dict(zip(sums, metrics, strict=True)))

    def infer_batch(
        self,
        batch: Batch,
        ctx: StepContext | None = None,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
    ) -> Predictions:
        """Compute predictions without gradients. Call it inside `eval_mode` or `train_mode`."""
        predictions, _ = self.forward_backward_step(batch, ctx, True, preprocess_fn, postprocess_fn)
        return predictions
