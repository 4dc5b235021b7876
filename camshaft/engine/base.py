"""The interface of training engines.

    engine = build_engine("reference", config)
    engine.init_model()
    engine.set_loss_fn(loss_fn)            # loss_fn(data, predictions, ctx) -> (loss, ctx)
    with engine.train_mode():
        result = engine.train_batch(batch) # zero_grad, forward and backward, optimizer step

A batch is a `DataProto` with `input_ids` (complete sequences) and `loss_mask` (the tokens that outputs are computed
for and losses count). Predictions are `Ragged` columns aligned with `input_ids`, zero outside `loss_mask`: the entry of
token j is about token j given the tokens before it. `scores` hold one value per sequence.

`contracts/engine/suite.py` tests every engine against the rules of this interface:
`camshaft check-engine my_pkg.my_engine:MyEngine`.
"""

from __future__ import annotations

import difflib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict

import torch
from torch import Tensor

from camshaft.config.engine import EngineCapabilities, EngineConfig
from camshaft.dataproto import DataProto
from camshaft.errors import EngineError
from camshaft.seat import Seat

Output = Literal["log_probs", "entropy", "distribution", "full_kl", "values", "scores"]
OUTPUTS_OF_HEAD: dict[str, tuple[Output, ...]] = {
    "causal_lm": ("log_probs", "entropy", "distribution", "full_kl"),
    "value": ("values",),
    "reward": ("scores",),
}
"""Outputs of a model by its head; the first is the default.

`distribution` holds the log-probs over the vocabulary for each token, without gradient. `full_kl` is the divergence
sum_v p(v) (log p(v) - log q(v)) from the distribution q in the batch's column `log_q`, which is another model's
`distribution` (a `preprocess_fn` may add it); its gradient is that of p.
"""

Batch = DataProto | Mapping[str, Any]
Predictions = Mapping[str, Any]
"""Names to `Ragged` (one value per token), or to a tensor or list (one value per row)."""


class StepContext(TypedDict, total=False):
    """Control keys of one `forward_backward_step`, and its results.

    Keys of hooks and callers are allowed beside these. The engine returns them, and accepts them in the next call.
    """

    outputs: tuple[Output, ...]
    """Predictions to compute; by default the first output of the head."""
    temperature: float
    """Divisor of the logits before log-probs and entropy; 1.0 by default."""
    num_tokens: float
    """Set by the engine: number of `loss_mask` tokens of the mini-batch, over all data-parallel ranks."""
    num_sequences: float
    """Set by the engine: number of rows with at least one such token, over all data-parallel ranks."""
    metrics: dict[str, Tensor]
    """Set by the loss: each micro-batch's share, already divided by the counts. The engine sums the shares."""


PreprocessFn = Callable[[Any, StepContext], tuple[Any, StepContext]]
PostprocessFn = Callable[[Predictions, StepContext], tuple[Any, StepContext]]
LossFn = Callable[[DataProto, Any, StepContext], tuple[Tensor, StepContext]]


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. `grad_norm` is the norm before clipping; a skipped step changes no weight."""

    loss: float
    grad_norm: float
    skipped: bool
    predictions: Any = None
    metrics: dict[str, float] = field(default_factory=dict)


COUNTS = frozenset({"num_tokens", "num_sequences"})


class CallContext(dict[str, Any]):
    """The context during one call; records reads of the counts."""

    counts_read = False

    def __getitem__(self, key: str) -> Any:
        self.counts_read |= key in COUNTS
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.counts_read |= key in COUNTS
        return super().get(key, default)


def call_context(ctx: Mapping[str, Any] | None, head: str) -> CallContext:
    """Return a new context for one call: control keys checked, other keys kept, metrics empty."""
    values = CallContext(ctx or {})
    control = StepContext.__annotations__
    for key in values.keys() - control.keys():
        nearest = difflib.get_close_matches(key, control, n=1, cutoff=0.8) if isinstance(key, str) else []
        if nearest:
            raise EngineError(
                f"ctx['{key}'] is not a control key; did you mean '{nearest[0]}'? Choose a less similar name for a key "
                f"of your own. Control keys: {', '.join(control)}"
            )
    supported = OUTPUTS_OF_HEAD[head]
    outputs = tuple(values.get("outputs", supported[:1]))
    unsupported = [name for name in outputs if name not in supported]
    if unsupported:
        raise EngineError(
            f"ctx['outputs'] contains {', '.join(unsupported)}, but a {head} engine supports {', '.join(supported)}"
        )
    temperature = float(values.get("temperature", 1.0))
    if temperature <= 0:
        raise EngineError(f"ctx['temperature']={temperature} must be above 0")
    values.update(outputs=outputs, temperature=temperature, metrics={})
    return values


class BaseEngine(ABC):
    """One model, its optimizer and its layout over devices."""

    _initialized = False

    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities()
    """What the engine supports, and the schema of its options. Readable without an instance."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.options: Any = self.capabilities.validate(config)
        """`config.options` as an instance of `capabilities.options`."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "init_model" in vars(cls):
            cls.init_model = _marking_initialized(cls.init_model)  # pyright: ignore[reportAttributeAccessIssue]

    if not TYPE_CHECKING:  # a type checker would accept every attribute name

        def __getattribute__(self, name: str) -> Any:
            """Reject the interface's methods and properties before `init_model`."""
            if name in _NEEDS_MODEL and not object.__getattribute__(self, "_initialized"):
                raise EngineError(f"{name} needs the model: call init_model() first")
            return object.__getattribute__(self, name)

    # -- implemented by an engine -----------------------------------------------------------------

    @abstractmethod
    def init_model(self) -> None:
        """Build the model, and the optimizer and its schedule unless the config is forward-only."""

    @abstractmethod
    def train_mode(self) -> AbstractContextManager[Any]:
        """Enter training mode: load offloaded parts, call `module.train()`; undo both on exit."""

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[Any]:
        """Enter evaluation mode: load the parameters, call `module.eval()`; undo both on exit."""

    @abstractmethod
    def forward_backward_step(
        self,
        batch: Batch,
        ctx: StepContext | None = None,
        forward_only: bool = False,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
    ) -> tuple[Any, ...]:
        """Run this rank's rows, of any number, in micro-batches, and accumulate gradients.

        Args:
            batch: A `DataProto` with `input_ids`, or a mapping with `input_ids` and `attention_mask` of shape (B, S).
                A batch without `input_ids` needs a `preprocess_fn` that builds them.
            ctx: Control keys (`StepContext`) and keys of the caller. It is not modified.
            forward_only: Compute no gradient.
            preprocess_fn: `(batch, ctx) -> (inputs, ctx)`, called once per micro-batch before the model. For a batch
                without `input_ids` it is called once, with the whole batch, before the split.
            postprocess_fn: `(outputs, ctx) -> (predictions, ctx)`, called once per micro-batch after the model.

        Returns:
            `(predictions, ctx)` if `forward_only`, else `(predictions, loss, ctx)`: predictions in the order of the
            rows, and the loss of the whole mini-batch over all data-parallel ranks.
        """

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Clear accumulated gradients."""

    @abstractmethod
    def optimizer_step(self) -> float:
        """Clip the gradient norm and apply one update; return the norm before clipping.

        A norm that is not finite applies no update and is counted in `skipped_steps`.
        """

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one step; return the learning rate of the next update."""

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """Learning rate of the next update."""

    @abstractmethod
    def shard_data(self, data: DataProto) -> DataProto:
        """Return this rank's tokens of `data` under sequence parallelism; else `data`."""

    @abstractmethod
    def unshard_data(self, data: DataProto) -> DataProto:
        """Gather the complete rows from what `shard_data` returned on each rank."""

    @abstractmethod
    def set_loss_fn(self, loss_fn: LossFn) -> None:
        """Set the loss of the next steps: `loss_fn(data, predictions, ctx) -> (loss, ctx)`, once per micro-batch."""

    @abstractmethod
    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move the parameters, the optimizer state, or both."""

    @abstractmethod
    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Write all state to the folder `local_path`, atomically, and a copy to `hdfs_path`.

        `max_ckpt_to_keep` removes the oldest folders whose path differs from `local_path` only in the number of its
        `global_step_<n>` part.
        """

    @abstractmethod
    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True) -> None:
        """Load a checkpoint of `save_checkpoint`, written at any world size.

        With `hdfs_path` the folder is first copied from there to `local_path`; `del_local_after_load` removes that
        copy afterwards, never a checkpoint that was local before the call.
        """

    @property
    @abstractmethod
    def seat(self) -> Seat:
        """Rank and size of this process, overall and in data parallelism."""

    @abstractmethod
    def named_weights(self, adapter_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names with full tensors, one at a time, in the same order on every rank.

        An adapter is merged into the weights (not inside `disable_adapter`), which have the names of the model without
        adapter. `adapter_only` yields the adapter, and a value or reward head trained with it, under the names of
        PEFT's files; it raises an error without an adapter. The receiver may keep a tensor: it is the live weight or a
        copy, never a reused buffer.
        """

    @abstractmethod
    def disable_adapter(self) -> AbstractContextManager[Any]:
        """Run the base model without its adapter inside the context; raise an error without an adapter.

        A value or reward head is not part of the adapter and is unchanged.
        """

    @property
    @abstractmethod
    def skipped_steps(self) -> int:
        """Number of optimizer steps skipped because the gradient was not finite."""

    def wait_for_checkpoint(self) -> None:  # noqa: B027 - only engines that write in the background override it
        """Return when no checkpoint is being written."""

    # -- the same for all engines -----------------------------------------------------------------

    def train_batch(
        self,
        batch: Batch,
        ctx: StepContext | None = None,
        loss_fn: LossFn | None = None,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
    ) -> StepResult:
        """Run one optimizer step on one mini-batch, inside `train_mode`; does not advance the schedule."""
        if loss_fn is not None:
            self.set_loss_fn(loss_fn)
        self.optimizer_zero_grad()
        predictions, loss, results = self.forward_backward_step(batch, ctx, False, preprocess_fn, postprocess_fn)
        skipped_before = self.skipped_steps
        grad_norm = self.optimizer_step()
        sums: dict[str, Tensor] = results["metrics"]
        # One device-to-host copy for the loss and all metrics.
        value, *metrics = torch.stack([loss.double(), *(share.double() for share in sums.values())]).tolist()
        skipped = self.skipped_steps > skipped_before
        return StepResult(value, grad_norm, skipped, predictions, dict(zip(sums, metrics, strict=True)))

    def infer_batch(
        self,
        batch: Batch,
        ctx: StepContext | None = None,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
    ) -> Predictions:
        """Compute predictions without gradients, inside `eval_mode` or `train_mode`."""
        predictions, _ = self.forward_backward_step(batch, ctx, True, preprocess_fn, postprocess_fn)
        return predictions


_NEEDS_MODEL = frozenset(
    name
    for name, member in vars(BaseEngine).items()
    if not name.startswith("_") and (isinstance(member, property) or callable(member))
) - {
    "init_model",
    "capabilities",
    "wait_for_checkpoint",  # part of the cleanup after a failed start
}
"""Methods and properties of the interface that are an error before `init_model`."""


def _marking_initialized(init_model: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(init_model)
    def marking(self: BaseEngine) -> None:
        self._initialized = True  # before the call, which may use the interface
        try:
            init_model(self)
        except BaseException:
            self._initialized = False
            raise

    return marking
