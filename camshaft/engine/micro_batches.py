"""Splits a mini-batch into micro-batches, runs hooks and the loss on each, and restores the order of the rows.

    plan = plan_micro_batches(lengths, size=4, max_tokens=None)
    micro_batches = MicroBatches(batch, plan, ...)
    for index in range(len(micro_batches)):
        loss = micro_batches.finish(index, model(*micro_batches.prepare(index).arguments()))
    predictions = micro_batches.predictions()

With `size`, a micro-batch holds up to `size` consecutive rows. With `max_tokens`, rows are assigned to as few
micro-batches of at most `max_tokens` tokens as possible. These micro-batches are balanced by the compute cost of their
rows, including attention (`BinPacker`), and the most expensive one comes first. A row with more than
`max_tokens` tokens raises an error. Within a micro-batch rows are sorted by length, because packed attention batches
rows of equal length into one call. Models that run on right-padded rows have plans of their own (`plan_padded_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from camshaft.algorithms.partition import BinPacker, attention_pivot, row_cost
from camshaft.dataproto import DataProto, Ragged
from camshaft.device import to_device
from camshaft.engine.base import LossFn, PostprocessFn, Predictions, PreprocessFn
from camshaft.engine.context import StepContext
from camshaft.engine.prefix_sharing import PrefixGroup, pack_rows, prefix_groups
from camshaft.errors import BatchError, EngineError
from camshaft.models.heads import DIMENSIONS
from camshaft.models.packed import OpaqueTensor
from camshaft.models.packing import Packing

PIVOT = attention_pivot(hidden_size=4096)
"""Default pivot: that of a model with about eight billion parameters."""

EXPECTED_BATCH = (
    "a DataProto with a Ragged column 'input_ids', or a mapping with tensors 'input_ids' and 'attention_mask' of shape "
    "(B, S); other data needs a preprocess_fn that builds one of these"
)


def has_input_ids(batch: Any) -> bool:
    return isinstance(batch, DataProto | Mapping) and "input_ids" in batch


def as_batch(batch: Any) -> DataProto:
    """Convert `batch` to a `DataProto` with `input_ids` and `loss_mask`; raise `BatchError` for other types.

    A mapping with `input_ids` and `attention_mask` of shape (B, S) is unpadded, as is every other (B, S) tensor in it.
    A missing `loss_mask` selects all tokens except the first of each row.
    """
    if not has_input_ids(batch):
        raise BatchError(f"the batch is {_describe_batch(batch)}; expected {EXPECTED_BATCH}")
    if not isinstance(batch, DataProto):
        batch = _unpad_mapping(batch)
    ids = batch.ragged("input_ids")
    if "loss_mask" not in batch:
        return batch.with_columns(loss_mask=ids.like(ids.positions() > 0))
    mask = batch.ragged("loss_mask")
    if not torch.equal(mask.lengths, ids.lengths):
        raise BatchError("loss_mask and input_ids have rows of different lengths; give each token one mask value")
    firsts = mask.offsets[:-1][mask.lengths > 0]
    if bool(mask.values[firsts.to(mask.values.device)].any()):
        raise BatchError(
            "loss_mask selects the first token of a row, which the model does not predict; set it to 0 there"
        )
    return batch


def _describe_batch(batch: Any) -> str:
    """Return the type of `batch`, with its shape or column names, for an error message."""
    if isinstance(batch, Tensor):
        return f"a tensor of shape {tuple(batch.shape)}"
    if isinstance(batch, DataProto | Mapping):
        names = batch.columns if isinstance(batch, DataProto) else batch
        return f"a {type(batch).__name__} without 'input_ids' (columns: {', '.join(map(str, names)) or 'none'})"
    return f"a {type(batch).__name__}"


def _unpad_mapping(batch: Mapping[str, Any]) -> DataProto:
    """Convert padded (B, S) tensors to `Ragged` columns and drop the mask and the position ids."""
    if "attention_mask" not in batch:
        raise BatchError(
            f"the batch is a mapping without 'attention_mask' (keys: {', '.join(batch)}); expected {EXPECTED_BATCH}"
        )
    mask = torch.as_tensor(batch["attention_mask"]).bool()
    columns: dict[str, Any] = {}
    for name, value in batch.items():
        if name in ("attention_mask", "position_ids"):
            continue
        per_token = isinstance(value, Tensor) and value.shape[:2] == mask.shape
        columns[name] = Ragged.from_padded(value, mask) if per_token else value
    return DataProto.from_dict(columns)


def plan_micro_batches(
    lengths: Tensor,
    size: int | None,
    max_tokens: int | None,
    equalise: Callable[[int], int] = lambda count: count,
    pivot: float = PIVOT,
    prefix_groups: Sequence[PrefixGroup] | None = None,
) -> list[list[int]]:
    """Return the row numbers of each micro-batch.

    A micro-batch respects both limits, `size` and `max_tokens`, if both are given. `equalise(count)` returns the
    maximum of `count` over all ranks, because every rank must run the same number of micro-batches. A rank with fewer
    rows than that gets empty lists, and the engine runs a dummy row with zero loss weight for each of them.

    With one limit, rows of one prefix group go to the same micro-batch where the limit allows it. A token budget counts
    their prefix once, and balances the micro-batches with `pivot`, the row length at which attention costs as much as
    the rest of the model (`attention_pivot`). With both limits, prefix groups are ignored.
    """
    sizes = lengths.tolist()
    if not sizes:
        raise BatchError("the batch has no rows; pass at least one row")
    if max_tokens is None:
        size = size or len(sizes)
        order = [row for group in prefix_groups or () for row in group.rows] or list(range(len(sizes)))
        plan = [order[i : i + size] for i in range(0, len(sizes), size)]
        plan = _split_largest(plan, equalise(len(plan)) - len(plan))
    else:
        _check_longest_row(sizes, max_tokens)
        rows = [PrefixGroup((row,), 0) for row in range(len(sizes))]
        units = rows if prefix_groups is None or size is not None else _split_groups(prefix_groups, sizes, max_tokens)
        packer = BinPacker(
            sizes=[unit.tokens(sizes) for unit in units],
            costs=[_group_cost(unit, sizes, pivot) for unit in units],
            max_items=size or len(units),
            max_tokens=max_tokens,
        )
        bins = packer.pack()
        count = equalise(len(bins))
        if count > len(bins):
            bins = packer.balance(count) or _split_largest(bins, count - len(bins))
        bins = sorted(bins, key=lambda items: (-packer.cost(items), items))
        plan = [[row for item in items for row in units[item].rows] for items in bins]
    return [sorted(micro_batch, key=lambda row: (sizes[row], row)) for micro_batch in plan]


def plan_padded_rows(
    lengths: Tensor, size: int | None, max_tokens: int | None, equalise: Callable[[int], int] = lambda count: count
) -> list[list[int]]:
    """Return the row numbers of each micro-batch of a model that pads rows on the right (`models/padded_rows.py`).

    The limits are those of `plan_micro_batches`, but `max_tokens` includes the padding. Rows of similar lengths go to
    the same micro-batch, and the longest ones come first.
    """
    sizes = lengths.tolist()
    if not sizes:
        raise BatchError("the batch has no rows; pass at least one row")
    if max_tokens is not None:
        _check_longest_row(sizes, max_tokens)
    plan: list[list[int]] = []
    most = 0
    for row in sorted(range(len(sizes)), key=lambda row: (-sizes[row], row)):
        if not plan or len(plan[-1]) == most:
            plan.append([])
            limits = (size or len(sizes), len(sizes) if max_tokens is None else max_tokens // max(sizes[row], 1))
            most = min(limits)
        plan[-1].append(row)
    plan = _split_largest(plan, equalise(len(plan)) - len(plan))
    return [sorted(micro_batch, key=lambda row: (sizes[row], row)) for micro_batch in plan]


def padding_share(lengths: Tensor, plan: Sequence[Sequence[int]]) -> float:
    """Return the fraction of the tokens of right-padded micro-batches that are padding."""
    computed = sum(len(rows) * int(lengths[rows].max()) for rows in plan if rows)
    return 1 - int(lengths.sum()) / computed


def _check_longest_row(sizes: Sequence[int], max_tokens: int) -> None:
    row = max(range(len(sizes)), key=sizes.__getitem__)
    if sizes[row] > max_tokens:
        raise BatchError(
            f"row {row} has {sizes[row]} tokens, which exceeds the budget of {max_tokens} tokens per micro-batch; "
            "raise the *_max_token_len_per_gpu key, or lower data.max_prompt_length or data.max_response_length"
        )


def _group_cost(group: PrefixGroup, sizes: Sequence[int], pivot: float) -> float:
    """Return the compute cost of the rows of `group`, with their prefix counted once."""
    prefix_cost = row_cost(group.shared, pivot)
    return prefix_cost + sum(row_cost(sizes[row], pivot) - prefix_cost for row in group.rows)


def _split_groups(groups: Sequence[PrefixGroup], sizes: Sequence[int], max_tokens: int) -> list[PrefixGroup]:
    """Split each prefix group with more than `max_tokens` tokens into smaller groups."""
    parts: list[PrefixGroup] = []
    for group in groups:
        members: list[list[int]] = [[]]
        for row in group.rows:
            if members[-1] and PrefixGroup((*members[-1], row), group.shared).tokens(sizes) > max_tokens:
                members.append([])
            members[-1].append(row)
        parts += [PrefixGroup(tuple(rows), group.shared if len(rows) > 1 else 0) for rows in members]
    return parts


def _split_largest(bins: list[list[int]], count: int) -> list[list[int]]:
    """Add `count` bins by halving the largest bin `count` times. If it holds one item, the new bin is empty."""
    bins = [list(items) for items in bins]
    for _ in range(count):
        largest = max(range(len(bins)), key=lambda b: len(bins[b]))
        items = bins[largest]
        middle = (len(items) + 1) // 2
        bins[largest] = items[:middle]
        bins.append(items[middle:])
    return bins


def restore_order(plan: Sequence[Sequence[int]], parts: Sequence[Any]) -> Any:
    """Concatenate the results of the micro-batches of `plan` in the original order of the rows.

    `parts` are `Ragged` columns, tensors or lists with one entry per row.
    """
    rows = [row for micro_batch in plan for row in micro_batch]
    order = torch.empty(len(rows), dtype=torch.int64)
    order[torch.tensor(rows, dtype=torch.int64)] = torch.arange(len(rows))
    sample = parts[0]
    if isinstance(sample, Ragged):
        return Ragged.concat(list(parts)).select(order)
    if isinstance(sample, Tensor):
        return torch.cat(list(parts))[order.to(sample.device)]
    values = [value for part in parts for value in part]
    return [values[index] for index in order.tolist()]


# -- running the micro-batches ---------------------------------------------------------------------


class Hooks(NamedTuple):
    """Functions that a caller passes to `forward_backward_step`."""

    preprocess: PreprocessFn | None
    postprocess: PostprocessFn | None
    loss: LossFn | None


class ModelInputs(NamedTuple):
    """Arguments of `PackedModel.forward` for one micro-batch."""

    tokens: Tensor
    packing: Packing
    at: OpaqueTensor
    outputs: Sequence[str]
    temperature: float
    log_q: OpaqueTensor | None
    targets: Tensor | None = None

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments, without `targets` if there are none: not every model has this parameter."""
        return self[:-1] if self.targets is None else tuple(self)


class PreparedRows(NamedTuple):
    """Rows of a micro-batch between `prepare` and `finish`."""

    inputs: ModelInputs
    data: DataProto
    """The rows before `preprocess_fn`, which the loss receives."""
    ids: Ragged
    positions: Tensor
    """(M,) offsets of the counted tokens in the flattened rows."""
    ctx_changes: dict[str, Any]
    """Entries of the context that `preprocess_fn` set."""
    routed_experts: Tensor | None
    """(N, layers, top-k) experts of the packed tokens, if the context has the key `routing`."""


class StepExtension(Protocol):
    """Additional work in the steps of some models."""

    def prepare(self, micro_batches: MicroBatches) -> None:
        """Run before the first micro-batch. It may prepare all of them."""
        ...

    def forward(self, index: int, inputs: ModelInputs) -> Mapping[str, Tensor]:
        """Run the model on a prepared micro-batch, in place of a call of the module."""
        ...

    def add_loss(self, loss: Tensor) -> Tensor:
        """Add to the loss of the micro-batch of the latest `forward`, before its backward pass."""
        ...

    def results(self) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the added loss and the metrics of the mini-batch, over all ranks."""
        ...


class MicroBatches:
    """The micro-batches of one `forward_backward_step`: calls the hooks and the loss, and collects the results.

        inputs = micro_batches.prepare(0)       # preprocess_fn; packs the rows
        outputs = module(*inputs.arguments())
        loss = micro_batches.finish(0, outputs) # postprocess_fn and loss_fn; None for a forward pass

    Call `prepare` and `finish` once per micro-batch and in order. A pipeline or an extension may prepare later
    micro-batches before it finishes earlier ones; to prepare one again returns the same inputs. Every rank runs the
    same number of micro-batches, since they contain collectives. A rank with fewer rows runs its shortest row as a
    dummy: its loss is multiplied by zero and its results are dropped.
    """

    extension: StepExtension | None = None
    """Additional work of this step; None for most models."""

    def __init__(
        self,
        data: DataProto,
        plan: list[list[int]],
        ctx: StepContext,
        hooks: Hooks,
        device: torch.device,
        shares_prefixes: bool,
        vocabulary_size: int,
    ):
        self.ctx = ctx
        """Context that the hooks pass on from call to call."""
        self.loss = torch.zeros((), device=device)
        """Sum of the losses, detached."""
        self.metrics: dict[str, Tensor] = {}
        """Sums of the metrics that the loss stores in the context."""
        self._data, self._plan, self._hooks, self._device = data, plan, hooks, device
        self._shares_prefixes, self._vocabulary_size = shares_prefixes, vocabulary_size
        self._shortest_row = int(data.ragged("input_ids").lengths.argmin())
        self._prepared: dict[int, PreparedRows] = {}
        self._predictions: list[Predictions] = []

    def __len__(self) -> int:
        return len(self._plan)

    def prepare(self, index: int) -> ModelInputs:
        """Call `preprocess_fn` on the rows of a micro-batch, pack them, and move them to the device."""
        if index in self._prepared:
            return self._prepared[index].inputs
        rows = self._plan[index] or [self._shortest_row]
        data = inputs = self._data.reorder(rows)
        ctx = self.ctx
        ctx["metrics"] = {}
        ctx_before = dict(ctx)
        if self._hooks.preprocess is not None:
            inputs, ctx = call_hook("preprocess_fn", self._hooks.preprocess, data, ctx)
            inputs = as_batch(inputs)
        self.ctx = ctx
        ctx_changes = {k: value for k, value in dict(ctx).items() if k not in ctx_before or ctx_before[k] is not value}
        ids, mask = inputs.ragged("input_ids"), inputs.ragged("loss_mask")
        _check_token_ids("input_ids", ids, rows, self._vocabulary_size)
        positions = mask.values.nonzero().squeeze(-1).cpu()
        routed = inputs.ragged("routed_experts") if ctx.get("routing") is not None else None
        packed = pack_rows(ids, positions, prefix_groups(ids, mask, routed) if self._shares_prefixes else ())
        experts = None if routed is None else to_device(packed.reorder(routed.values), self._device)
        log_q = None
        if "full_kl" in ctx["outputs"]:
            log_q = OpaqueTensor(to_device(packed.reorder(inputs.ragged("log_q").values), self._device))
        has_targets = "target_log_probs" in ctx["outputs"]
        targets = _counted_targets(inputs, rows, self._vocabulary_size) if has_targets else None
        model_inputs = ModelInputs(
            to_device(packed.tokens, self._device),
            packed.packing,
            OpaqueTensor(packed.at),  # on the CPU, so that the model checks it without waiting for a device
            ctx["outputs"],
            ctx["temperature"],
            log_q,
            targets if targets is None else to_device(packed.reorder(targets), self._device),
        )
        ctx_changes = {"metrics": ctx.get("metrics", {})} | ctx_changes
        self._prepared[index] = PreparedRows(model_inputs, data, ids, positions, ctx_changes, experts)
        return model_inputs

    def routed_experts(self, index: int) -> Tensor | None:
        """Return the experts (N, layers, top-k) of the packed tokens of a prepared micro-batch."""
        return self._prepared[index].routed_experts

    def is_dummy(self, index: int) -> bool:
        """Return True for a micro-batch without rows, which runs the shortest row with zero loss weight."""
        return not self._plan[index]

    def finish(self, index: int, outputs: Mapping[str, Tensor]) -> Tensor | None:
        """Call `postprocess_fn` and the loss on the outputs of a micro-batch; return the loss to differentiate."""
        rows, is_dummy = self._prepared.pop(index), self.is_dummy(index)
        self.ctx.update(rows.ctx_changes)  # pyright: ignore[reportArgumentType, reportCallIssue]
        predictions: Any = self._align_outputs(outputs, rows.ids, rows.positions)
        if self._hooks.postprocess is not None:
            predictions, self.ctx = call_hook("postprocess_fn", self._hooks.postprocess, predictions, self.ctx)
        detached, loss = _detach_predictions(predictions, len(rows.data)), None
        if self._predictions and detached.keys() != self._predictions[0].keys():
            raise EngineError(
                f"postprocess_fn returned {sorted(detached)} for a micro-batch and {sorted(self._predictions[0])} for "
                "the first; return the same names for all"
            )
        if self._hooks.loss is not None:
            data = rows.data.to(self._device)
            loss, self.ctx = call_hook("the loss function", self._hooks.loss, data, predictions, self.ctx)
            _check_loss(loss, self.ctx.get("metrics", {}))
            loss = loss.reshape(())
        if is_dummy:
            return None if loss is None else loss * 0
        self._predictions.append(detached)
        if loss is None:
            return None
        self.loss = self.loss + loss.detach()
        for name, share in self.ctx.get("metrics", {}).items():
            self.metrics[name] = self.metrics.get(name, 0) + share.detach().reshape(())
        return loss if self.extension is None else self.extension.add_loss(loss)

    def predictions(self) -> Predictions:
        """Return the predictions of all finished micro-batches in the order of the rows."""
        names = self._predictions[0]
        return {name: restore_order(self._plan, [part[name] for part in self._predictions]) for name in names}

    def _align_outputs(self, outputs: Mapping[str, Tensor], ids: Ragged, positions: Tensor) -> dict[str, Any]:
        """Convert outputs of the counted tokens, at flattened offsets `positions`, to `Ragged` columns like `ids`.

        Entries of other tokens are zero. Outputs per row are unchanged.
        """
        positions = to_device(positions, self._device)
        aligned: dict[str, Any] = {}
        for name, value in outputs.items():
            if "row" not in DIMENSIONS.get(name, ()):
                value = ids.like(value.new_zeros((len(ids.values), *value.shape[1:])).index_copy_(0, positions, value))
            aligned[name] = value
        return aligned


def _detach_predictions(predictions: Any, rows: int) -> dict[str, Any]:
    """Detach the predictions of one micro-batch; raise `EngineError` for predictions without one entry per row."""
    if not isinstance(predictions, Mapping):
        raise EngineError(
            f"postprocess_fn returned a {type(predictions).__name__} as predictions; return a mapping from names to "
            "Ragged columns (a value per token), or to tensors or lists (a value per row)"
        )
    detached: dict[str, Any] = {}
    for name, value in predictions.items():
        if isinstance(value, Ragged):
            detached[name] = value.map(Tensor.detach)
        elif isinstance(value, Tensor):
            detached[name] = value.detach() if value.ndim else None
        else:
            detached[name] = list(value) if isinstance(value, np.ndarray | Sequence) else None
        if isinstance(value, str) or detached[name] is None or len(detached[name]) != rows:
            raise EngineError(
                f"postprocess_fn returned '{name}' as a {type(value).__name__} that does not have one entry for each "
                f"of {rows} rows; return a Ragged column (a value per token), a tensor or a list (a value per row)"
            )
    return detached


def call_hook(name: str, hook: Callable[..., Any], *arguments: Any) -> tuple[Any, StepContext]:
    """Call a hook or the loss function, whose last argument is the context, and return its result and the context."""
    returned = hook(*arguments)
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2
    if is_pair and isinstance(returned[1], MutableMapping):
        return returned[0], returned[1]
    parts = [type(part).__name__ for part in returned] if is_pair else [type(returned).__name__]
    raise EngineError(f"{name} returned {' and '.join(parts)}; return two values, its result and ctx, the context")


def _check_loss(loss: Any, metrics: Any) -> None:
    """Raise EngineError unless the loss and the metrics are tensors with one element."""
    if not isinstance(metrics, Mapping):
        raise EngineError(
            f"the loss function set ctx['metrics'] to a {type(metrics).__name__}; set a dict that maps names to scalar "
            "tensors"
        )
    for name, value in {"loss": loss, **metrics}.items():
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            raise EngineError(
                f"the loss function returned '{name}' as a {type(value).__name__}{shape}; return a scalar tensor"
            )


def check_gradient(loss: Tensor) -> Tensor:
    """Return the loss to differentiate. Raise EngineError if it has no gradient."""
    if not loss.requires_grad:
        raise EngineError(
            "the loss function returned a loss without a gradient; compute it from the predictions, without detach()"
        )
    return loss


def _counted_targets(data: DataProto, rows: Sequence[int], vocabulary_size: int) -> Tensor:
    """Return the column `targets`, with 0 at tokens that are not counted; raise BatchError if it is not valid."""
    data.require("targets")
    targets, mask = data.ragged("targets"), data.ragged("loss_mask")
    if targets.values.ndim != 1:
        raise BatchError(
            f"targets has the shape {tuple(targets.values.shape)}: several targets per position are not supported; "
            "pass one id per token"
        )
    if not torch.equal(targets.lengths, mask.lengths):
        raise BatchError("targets and input_ids have rows of different lengths; give each token one target")
    counted = targets.map(lambda values: torch.where(mask.values, values, 0))
    _check_token_ids("targets", counted, rows, vocabulary_size)
    return counted.values.long()


def _check_token_ids(column: str, ids: Ragged, rows: Sequence[int], vocabulary_size: int) -> None:
    """Raise BatchError for token ids that the model does not have, if they are in host memory.

    A check on an accelerator would wait for it.
    """
    values = ids.values
    if values.dtype not in (torch.int64, torch.int32):
        raise BatchError(f"{column} has the dtype {values.dtype}; token ids must be int64 or int32")
    if values.device.type != "cpu" or not len(values):
        return
    smallest, largest = values.aminmax()
    if smallest < 0 or largest >= vocabulary_size:
        at = int(((values < 0) | (values >= vocabulary_size)).nonzero()[0])
        raise BatchError(
            f"row {rows[int(ids.row_ids()[at])]} of {column} contains the token id {int(values[at])}, but the "
            f"embedding layer of the model has {vocabulary_size} rows; use the tokenizer of the model"
        )
