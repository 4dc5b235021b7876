"""What happens between a mini-batch and its gradient, the same for every engine.

    run = MicroBatchRun(forward=..., backward=..., device="cpu", head="causal_lm", ...)
    predictions, loss, ctx = run(batch, ctx, loss_fn)

        batch -> border (padded mappings become ragged) -> counts over the mini-batch and all ranks
          -> plan of micro-batches -> [ preprocess -> model -> postprocess -> loss -> backward ] each
          -> predictions in the order of the rows, loss and metrics added up

Written once, because this is where the same error returns in every backend: a loss divided by local
counts, metrics averaged with other weights than the loss, rows that come back in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from camshaft.dataproto import DataProto, Ragged
from camshaft.device import to_device
from camshaft.engine.base import OUTPUTS_OF_HEAD, Batch, LossFn, PostprocessFn, Predictions, PreprocessFn, StepContext
from camshaft.engine.micro_batches import PIVOT, plan_micro_batches, restore_order
from camshaft.engine.prefix_sharing import families, pack
from camshaft.errors import BatchError, EngineError
from camshaft.models.packed import Untouched

_PER_TOKEN = frozenset({"log_probs", "entropy", "distribution", "full_kl", "values"})


def as_batch(batch: Batch) -> DataProto:
    """A `DataProto` with `input_ids` and `loss_mask`, whatever came in.

    A mapping with padded `input_ids` (B, S) and `attention_mask` is unpadded here, and so is every other
    (B, S) tensor in it. Without a `loss_mask` all tokens but the first of each row count.
    """
    if not isinstance(batch, DataProto):
        batch = _unpad(batch)
    ids = batch.ragged("input_ids")
    if "loss_mask" not in batch:
        return batch.with_columns(loss_mask=ids.like(ids.positions() > 0))
    mask = batch.ragged("loss_mask")
    if not torch.equal(mask.lengths, ids.lengths):
        raise BatchError("loss_mask and input_ids have rows of different lengths")
    firsts = mask.offsets[:-1][mask.lengths > 0]
    if bool(mask.values[firsts.to(mask.values.device)].any()):
        raise BatchError("loss_mask is set on the first token of a row, which nothing predicts")
    return batch


def _unpad(batch: Mapping[str, Any]) -> DataProto:
    if "input_ids" not in batch or "attention_mask" not in batch:
        raise BatchError(f"a padded batch needs 'input_ids' and 'attention_mask'; it has: {', '.join(batch)}")
    mask = torch.as_tensor(batch["attention_mask"]).bool()
    columns: dict[str, Any] = {}
    for name, value in batch.items():
        if name in ("attention_mask", "position_ids"):
            continue
        grid = isinstance(value, Tensor) and value.shape[:2] == mask.shape
        columns[name] = Ragged.from_padded(value, mask) if grid else value
    return DataProto.from_dict(columns)


def checked_context(ctx: StepContext | None, head: str, device: torch.device | str) -> StepContext:
    """A fresh context for one call: keys known, outputs possible, metrics empty."""
    given: dict[str, Any] = dict(ctx or {})
    unknown = given.keys() - StepContext.__annotations__.keys()
    if unknown:
        raise EngineError(
            f"nobody reads ctx key(s) {sorted(unknown)}; put what your own hooks need under ctx['extras'], "
            f"known keys: {', '.join(StepContext.__annotations__)}"
        )
    possible = OUTPUTS_OF_HEAD[head]
    outputs = tuple(given.get("outputs", possible[:1]))
    wrong = [name for name in outputs if name not in possible]
    if wrong:
        raise EngineError(f"a {head} engine has outputs {', '.join(possible)}; asked for {', '.join(wrong)}")
    temperature = float(given.get("temperature", 1.0))
    if temperature <= 0:
        raise EngineError(f"ctx['temperature']={temperature} must be above 0")
    return StepContext(outputs=outputs, temperature=temperature, metrics={}, extras=dict(given.get("extras", {})))


def packed_forward(
    module: torch.nn.Module, inputs: DataProto, ctx: StepContext, device: str, share: bool = False
) -> dict[str, Any]:
    """The model's outputs for one micro-batch, aligned with the rows of `inputs`; `share`: equal prompts once."""
    ids, mask = inputs.ragged("input_ids"), inputs.ragged("loss_mask")
    at = mask.values.nonzero().squeeze(-1).cpu()
    packed = pack(ids, at, families(ids, mask) if share else ())
    tokens = to_device(packed.tokens, device)
    where = Untouched(packed.at)  # the model looks at it without waiting for a device
    log_q = None
    if "full_kl" in ctx["outputs"]:
        log_q = Untouched(to_device(packed.of_tokens(inputs.ragged("log_q").values), device))
    flat = module(tokens, packed.lengths, where, ctx["outputs"], ctx["temperature"], log_q, packed.parents)
    at = to_device(at, device)
    outputs: dict[str, Any] = {}
    for name, value in flat.items():
        if name in _PER_TOKEN:
            value = ids.like(value.new_zeros((len(ids.values), *value.shape[1:])).index_copy_(0, at, value))
        outputs[name] = value
    return outputs


class _Hooks(NamedTuple):
    """What a caller puts into a pass."""

    loss: LossFn | None
    before: PreprocessFn | None
    after: PostprocessFn | None


@dataclass(frozen=True)
class MicroBatchRun:
    """One engine's way to run a mini-batch. Everything that depends on the backend is a function here."""

    forward: Callable[[DataProto, StepContext], Predictions]
    """Model outputs of one micro-batch, named as in `ctx["outputs"]`."""
    backward: Callable[[Tensor], None]
    """Add the gradient of one micro-batch's share of the loss."""
    device: str
    head: str
    size: int | None
    max_tokens: int | None
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """Sum over the data-parallel ranks, of counts, losses and metrics."""
    most_over_ranks: Callable[[int], int] = lambda count: count
    """The largest number of micro-batches of any rank."""
    pivot: float = PIVOT
    """The row length at which attention costs as much as the rest: `attention_pivot(hidden_size)` of the model."""
    share: bool = False
    """`forward` computes what rows have in common once, so they are better off in one micro-batch."""

    def __call__(
        self,
        batch: Batch,
        ctx: StepContext | None,
        loss_fn: LossFn | None,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
    ) -> tuple[Any, Tensor, StepContext]:
        """(predictions, loss, ctx); without `loss_fn` nothing is differentiated and the loss is 0."""
        whole = as_batch(batch)
        ctx = self._counted(whole, checked_context(ctx, self.head, self.device))
        lengths = whole.ragged("input_ids").lengths
        apart = not self.share or self.max_tokens is None
        found = None if apart else families(whole.ragged("input_ids"), whole.ragged("loss_mask"))
        plan = plan_micro_batches(lengths, self.size, self.max_tokens, self.most_over_ranks, self.pivot, found)
        total = torch.zeros((), device=self.device)
        metrics: dict[str, Tensor] = {}
        parts: list[Predictions] = []
        shortest, hooks = int(lengths.argmin()), _Hooks(loss_fn, preprocess_fn, postprocess_fn)
        with torch.set_grad_enabled(loss_fn is not None):
            for rows in plan:
                predictions, loss, ctx = self.micro_batch(whole.reorder(rows or [shortest]), ctx, hooks, bool(rows))
                if not rows:
                    continue
                parts.append(predictions)
                if loss is not None:
                    total = total + loss
                    for name, share in ctx.get("metrics", {}).items():
                        metrics[name] = metrics.get(name, 0) + share.detach()
        together = {name: restore_order(plan, [part[name] for part in parts]) for name in parts[0]}
        if loss_fn is not None:
            total, metrics = self._over_ranks(total, metrics)
        ctx["metrics"] = metrics
        return together, total, ctx

    def micro_batch(
        self, data: DataProto, ctx: StepContext, hooks: _Hooks, counts: bool
    ) -> tuple[Predictions, Tensor | None, StepContext]:
        """One pass over these rows: (predictions, its share of the loss, ctx), both without gradient.

        With rows in host memory nothing here waits for an accelerator: the next pass is queued behind this one. A pass
        that does not `count` takes part in what ranks exchange, and adds nothing.
        """
        ctx["metrics"] = {}
        inputs = data
        if hooks.before is not None:
            inputs, ctx = hooks.before(data, ctx)
            inputs = as_batch(inputs)
        predictions: Any = self.forward(inputs, ctx)
        if hooks.after is not None:
            predictions, ctx = hooks.after(predictions, ctx)
        found, loss = _detached(predictions), None
        if hooks.loss is not None:
            loss, ctx = hooks.loss(data.to(self.device), predictions, ctx)
            self.backward(loss if counts else loss * 0)
            loss = loss.detach()
        return found, loss, ctx

    def _counted(self, batch: DataProto, ctx: StepContext) -> StepContext:
        mask = batch.ragged("loss_mask").map(Tensor.double)
        local = torch.stack([mask.values.sum(), (mask.sum() > 0).sum().double()])
        tokens, sequences = self.sum_over_ranks(to_device(local, self.device)).tolist()
        ctx["num_tokens"], ctx["num_sequences"] = max(tokens, 1.0), max(sequences, 1.0)
        return ctx

    def _over_ranks(self, loss: Tensor, metrics: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of all data-parallel ranks, in one exchange."""
        shares = [loss, *metrics.values()]
        summed = self.sum_over_ranks(torch.stack([torch.as_tensor(s, device=self.device).double() for s in shares]))
        return summed[0], dict(zip(metrics, summed[1:], strict=True))


def _detached(predictions: Any) -> Predictions:
    if not isinstance(predictions, Mapping):
        raise EngineError(
            f"postprocess_fn must return a mapping of Ragged or per-row tensors, got {type(predictions).__name__}"
        )
    return {n: v.map(Tensor.detach) if isinstance(v, Ragged) else v.detach() for n, v in predictions.items()}
