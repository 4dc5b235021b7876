"""The training-engine interface: what a backend implements, and what is written once for all of them.

    engine = build_engine("reference", config)
    engine.init_model()
    engine.set_loss_fn(loss_fn)            # loss_fn(data, predictions, ctx) -> (loss, ctx)
    with engine.train_mode():
        result = engine.train_batch(batch) # zero_grad, forward + backward, optimizer step

A batch is a `DataProto` with `input_ids` (whole sequences) and `loss_mask` (the tokens whose outputs are
wanted and counted). Predictions are `Ragged` columns aligned with `input_ids`, zero outside `loss_mask`:
the entry of token j speaks of token j given the tokens before it. Rows of `scores` are one per sequence.

The rules that every engine keeps are proved by `contracts/engine/suite.py`:
`camshaft check-engine my_pkg.my_engine:MyEngine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from camshaft.config.engine import EngineConfig
from camshaft.dataproto import DataProto
from camshaft.errors import EngineError
from camshaft.seat import Seat

Output = Literal["log_probs", "entropy", "distribution", "full_kl", "values", "scores"]
OUTPUTS_OF_HEAD: dict[str, tuple[Output, ...]] = {
    "causal_lm": ("log_probs", "entropy", "distribution", "full_kl"),
    "value": ("values",),
    "reward": ("scores",),
}
"""What a model can be asked for, by its head; the first is what it gives unless told otherwise.

`distribution` has a row of the vocabulary's size for each token, its log-probs, and no gradient. `full_kl` is the
divergence sum_v p(v) (log p(v) - log q(v)) from the one that the batch's column `log_q` has, as another model's
`distribution` (a `preprocess_fn` may add it); its gradient is that of p.
"""

Batch = DataProto | Mapping[str, Any]
Predictions = Mapping[str, Any]
"""Names to `Ragged` (one value per token) or tensors (one per row)."""


class StepContext(TypedDict, total=False):
    """What steers one call and what comes back from it. A key that nobody reads is an error."""

    outputs: tuple[Output, ...]
    """Which predictions are wanted; by default what the engine's head is for."""
    temperature: float
    """Divides the logits before log-probs and entropy; 1.0 by default."""
    num_tokens: float
    """Set by the engine: `loss_mask` tokens of the whole mini-batch, over all data-parallel ranks."""
    num_sequences: float
    """Set by the engine: rows with at least one such token, counted the same way."""
    metrics: dict[str, Tensor]
    """Added by the loss: each micro-batch's share, already divided by the counts. The engine adds them up."""
    extras: dict[str, Any]
    """For hooks and losses of the caller; the engine passes it along untouched."""


PreprocessFn = Callable[[DataProto, StepContext], tuple[DataProto, StepContext]]
PostprocessFn = Callable[[Predictions, StepContext], tuple[Any, StepContext]]
LossFn = Callable[[DataProto, Any, StepContext], tuple[Tensor, StepContext]]


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. `grad_norm` is the norm before clipping; a skipped step changed no weight."""

    loss: float
    grad_norm: float
    skipped: bool
    predictions: Any = None
    metrics: dict[str, float] = field(default_factory=dict)


def check_context(ctx: StepContext | None, head: str) -> StepContext:
    """Return a new context for one call: keys and outputs checked, metrics empty."""
    values: dict[str, Any] = dict(ctx or {})
    unknown = values.keys() - StepContext.__annotations__.keys()
    if unknown:
        raise EngineError(
            f"nobody reads ctx key(s) {sorted(unknown)}; put what your own hooks need under ctx['extras'], "
            f"known keys: {', '.join(StepContext.__annotations__)}"
        )
    supported = OUTPUTS_OF_HEAD[head]
    outputs = tuple(values.get("outputs", supported[:1]))
    unsupported = [name for name in outputs if name not in supported]
    if unsupported:
        raise EngineError(f"a {head} engine has outputs {', '.join(supported)}; asked for {', '.join(unsupported)}")
    temperature = float(values.get("temperature", 1.0))
    if temperature <= 0:
        raise EngineError(f"ctx['temperature']={temperature} must be above 0")
    return StepContext(outputs=outputs, temperature=temperature, metrics={}, extras=dict(values.get("extras", {})))


class BaseEngine(ABC):
    """One model, its optimizer and its layout, behind the same methods whatever the backend."""

    def __init__(self, config: EngineConfig):
        self.config = config

    # -- what a backend implements ----------------------------------------------------------------

    @abstractmethod
    def init_model(self) -> None:
        """Build the model; also the optimizer and the schedule unless the config is forward-only."""

    @abstractmethod
    def train_mode(self) -> AbstractContextManager[Any]:
        """Load what is offloaded, `module.train()`; both undone on exit."""

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[Any]:
        """Load the parameters, `module.eval()`; both undone on exit."""

    @abstractmethod
    def forward_backward_step(
        self,
        batch: Batch,
        ctx: StepContext | None = None,
        forward_only: bool = False,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
    ) -> tuple[Any, ...]:
        """Run this rank's rows, of any number, in micro-batches that the engine makes itself.

        The hooks run once per micro-batch: `preprocess_fn` before the model, `postprocess_fn` on its
        outputs. Gradients are accumulated. Returns `(predictions, ctx)` if `forward_only`, else
        `(predictions, loss, ctx)`, with predictions in the order of the rows and the loss of the
        whole mini-batch over all data-parallel ranks.
        """

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Forget accumulated gradients."""

    @abstractmethod
    def optimizer_step(self) -> float:
        """Clip and update; returns the gradient norm BEFORE clipping. Not finite: no update, counted."""

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one step; returns the rate that the next update will use."""

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """The rate that the next update will use."""

    @abstractmethod
    def shard_data(self, data: DataProto) -> DataProto:
        """This rank's part of `data` inside its data-parallel slice (sequence parallelism); else `data`."""

    @abstractmethod
    def unshard_data(self, data: DataProto) -> DataProto:
        """The whole again from what `shard_data` gave to each rank."""

    @abstractmethod
    def set_loss_fn(self, loss_fn: LossFn) -> None:
        """`loss_fn(data, predictions, ctx) -> (loss, ctx)` for the micro-batches to come."""

    @abstractmethod
    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move the parameters, the optimizer state, or both."""

    @abstractmethod
    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Write all state to the folder `local_path`, whole or not at all.

        `max_ckpt_to_keep` removes the oldest folders that differ from `local_path` only in the number of
        its `global_step_<n>` part.
        """

    @abstractmethod
    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True) -> None:
        """Read what `save_checkpoint` wrote, at any world size.

        With `hdfs_path` the folder is first copied from there to `local_path`, and that copy (never a
        checkpoint that was local to begin with) is removed again if `del_local_after_load`.
        """

    @property
    @abstractmethod
    def seat(self) -> Seat:
        """Where this rank sits; known after `init_model`."""

    @abstractmethod
    def named_weights(self, adapter_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names with full tensors, one at a time, the same order on every rank.

        An adapter is merged into the weights that are handed out (not inside `disable_adapter`), and these have
        the names of the plain model. `adapter_only` gives the adapter itself, with a value or reward head trained
        beside it, under the names of PEFT's files; an error if there is none.
        The receiver may keep a tensor: it is the live weight or a fresh copy, never a reused buffer.
        """

    @abstractmethod
    def disable_adapter(self) -> AbstractContextManager[Any]:
        """The base model without its adapter inside the context; an error if there is no adapter.

        A value or reward head is no part of the adapter: it stays as it is.
        """

    @property
    @abstractmethod
    def skipped_steps(self) -> int:
        """How many optimizer steps were skipped because the gradient was not finite."""

    def wait_for_checkpoint(self) -> None:  # noqa: B027 - most engines have nothing to wait for
        """Return when no checkpoint is being written; an engine that writes in the background says so here."""

    # -- written once, in terms of the above ------------------------------------------------------

    def train_batch(
        self,
        batch: Batch,
        ctx: StepContext | None = None,
        loss_fn: LossFn | None = None,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
    ) -> StepResult:
        """One optimizer step on one mini-batch; call inside `train_mode`. The schedule is the caller's."""
        if loss_fn is not None:
            self.set_loss_fn(loss_fn)
        self.optimizer_zero_grad()
        predictions, loss, done = self.forward_backward_step(batch, ctx, False, preprocess_fn, postprocess_fn)
        skipped_before = self.skipped_steps
        grad_norm = self.optimizer_step()
        shares = torch.stack([loss.double(), *(value.double() for value in done["metrics"].values())])
        value, *metrics = shares.tolist()  # one read for all of them
        told = dict(zip(done["metrics"], metrics, strict=True))
        return StepResult(value, grad_norm, self.skipped_steps > skipped_before, predictions, told)

    def infer_batch(
        self,
        batch: Batch,
        ctx: StepContext | None = None,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
    ) -> Predictions:
        """Predictions without gradients; call inside `eval_mode` (or `train_mode`, at no extra move)."""
        predictions, _ = self.forward_backward_step(batch, ctx, True, preprocess_fn, postprocess_fn)
        return predictions
