"""Conversions between messages of the wire and batches of the engine.

    loss, options = read_loss(request)              # of the table of losses
    rows = read_rows(request, loss, limits)         # columns `input_ids`, `loss_mask`, `targets` and those of the loss
    message = write_output(log_probs, value)

A datum has N input tokens and N targets. Its row has N + 1 tokens, the inputs and the last target, so that entry j of a
column belongs to the prediction of token j. Entry 0 is never predicted. Targets are free: they need not be the inputs
that follow.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from camshaft.algorithms.token_losses import LOSSES, TokenLoss
from camshaft.dataproto import DataProto, Ragged
from camshaft.service.errors import CommandError
from camshaft.service.futures import PROTOBUF, Result
from camshaft.wire import messages

TARGETS = "target_tokens"
DTYPES: dict[int, Any] = {
    messages.NUMBERS["DTYPE_FLOAT32"]: np.dtype("<f4"),
    messages.NUMBERS["DTYPE_INT64"]: np.dtype("<i8"),
    messages.NUMBERS["DTYPE_INT32"]: np.dtype("<i4"),
}
TOKEN_BYTES = 4
"""Size of a token of a prompt."""
REFUSED_LOSSES = {
    "stable_reinforce": "its formula is not public; set loss_fn=importance_sampling or loss_fn=ppo in the script",
    "custom": "losses are not traced on the server; call forward_backward_custom, which computes them in the script",
}
"""Losses that other servers have, with the reason and the remedy."""


@dataclass(frozen=True)
class Limits:
    """Limits of the datums of a model."""

    num_data: int
    context: int
    vocabulary: int


def read_loss(request: Any) -> tuple[TokenLoss, dict[str, float]]:
    """Return the loss of a request and its options. Raise `CommandError` if it is unknown, or an option is."""
    name = request.loss_fn
    if name not in LOSSES:
        reason = REFUSED_LOSSES.get(name, f"the losses are {', '.join(LOSSES)}")
        raise CommandError(f"loss_fn={name} is not supported: {reason}")
    options: dict[str, Any] = dict(request.loss_fn_config)
    for option, value in request.loss_fn_config_v2.items():  # which wins over the older form
        options[option] = getattr(value, value.WhichOneof("value") or "number")
    try:
        return LOSSES[name], LOSSES[name].check_options(options)
    except ValueError as error:
        raise CommandError(f"loss_fn_config: {error}") from error


def read_rows(request: Any, loss: TokenLoss, limits: Limits) -> DataProto:
    """Return the datums of a request as rows. Raise `CommandError` that names datum, field, index, value and remedy."""
    if not request.data:
        raise CommandError("the request has no datum; pass at least one")
    if len(request.data) > limits.num_data:
        raise CommandError(
            f"the request has {len(request.data)} datums, and this server accepts {limits.num_data} (max_data); send "
            "them in several calls before optim_step, which adds their gradients"
        )
    names = ("input_ids", "loss_mask", "targets", *loss.required, *loss.optional)
    columns: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for index, datum in enumerate(request.data):
        where = f"datum {index}"
        inputs = _read_inputs(datum, where, limits)
        given = {name: _read_tensor(tensor, f"{where}: {name}") for name, tensor in datum.loss_fn_inputs.items()}
        targets = _read_targets(given.pop(TARGETS, None), len(inputs), where, limits)
        columns["input_ids"].append(torch.from_numpy(np.append(inputs, targets[-1])))
        columns["targets"].append(torch.from_numpy(np.insert(targets, 0, 0)))
        columns["loss_mask"].append(torch.arange(len(inputs) + 1) > 0)
        for name, values in _read_columns(given, loss, len(inputs), where).items():
            columns[name].append(torch.from_numpy(np.insert(values, 0, 0)))
    return DataProto.from_dict({name: Ragged.from_rows(rows) for name, rows in columns.items()})


def count_trained(rows: DataProto) -> int:
    """Return the number of targets whose weight or advantage is not 0."""
    name = next(name for name in ("weights", "advantages", "loss_mask") if name in rows.columns)
    return int(rows.ragged(name).values.count_nonzero())


def count_tokens(request: Any) -> int:
    """Return the number of tokens in the datums of a request, which may be invalid; at least 1."""
    chunks = (chunk for datum in request.data for chunk in datum.model_input)
    return max(1, sum(len(chunk.encoded_text.tokens) for chunk in chunks) // TOKEN_BYTES)


def _read_inputs(datum: Any, where: str, limits: Limits) -> np.ndarray:
    parts: list[np.ndarray] = []
    for number, chunk in enumerate(datum.model_input):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise CommandError(
                f"{where}: chunk {number} of model_input is {kind or 'empty'}, and this server trains on text only; "
                "use chunks of tokens (ModelInput.from_ints)"
            )
        parts.append(_as_array(chunk.encoded_text.tokens, np.dtype("<i4"), f"{where}: chunk {number} of model_input"))
    inputs = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    if not len(inputs):
        raise CommandError(f"{where}: model_input has no token; give it at least one")
    if len(inputs) + 1 > limits.context:
        raise CommandError(
            f"{where}: model_input has {len(inputs)} tokens, and this server accepts {limits.context - 1} "
            "(max_model_len); shorten it"
        )
    _check_token_ids(inputs, f"{where}: model_input", limits.vocabulary)
    return inputs


def _read_targets(targets: np.ndarray | None, length: int, where: str, limits: Limits) -> np.ndarray:
    if targets is None:
        raise CommandError(f"{where}: {TARGETS} is missing; give one token for each token of model_input")
    if targets.ndim != 1:
        raise CommandError(
            f"{where}: {TARGETS} has shape {list(targets.shape)}; several targets per position are not supported, so "
            f"give {length} tokens, one for each token of model_input"
        )
    if targets.dtype.kind != "i":
        raise CommandError(f"{where}: {TARGETS} has dtype {targets.dtype}; give integers (int64)")
    _check_length(targets, length, f"{where}: {TARGETS}")
    _check_token_ids(targets, f"{where}: {TARGETS}", limits.vocabulary)
    return targets.astype(np.int64)


def _read_columns(given: dict[str, np.ndarray], loss: TokenLoss, length: int, where: str) -> dict[str, np.ndarray]:
    """Return the inputs that the loss reads, in float32. Optional ones are 1 by default."""
    try:
        loss.check_columns(given)
    except ValueError as error:
        raise CommandError(f"{where}: loss_fn_inputs: {error}") from error
    columns: dict[str, np.ndarray] = {}
    for name in (*loss.required, *loss.optional):
        values = given.get(name, np.ones(length, np.float32))
        if values.ndim != 1:
            raise CommandError(f"{where}: {name} has shape {list(values.shape)}; give one number per token, [{length}]")
        _check_length(values, length, f"{where}: {name}")
        values = values.astype(np.float32)
        if len(invalid := np.flatnonzero(~np.isfinite(values))):
            raise CommandError(f"{where}: {name}[{invalid[0]}] is {values[invalid[0]]}; give finite numbers")
        columns[name] = values
    return columns


def _read_tensor(tensor: Any, where: str) -> np.ndarray:
    if tensor.WhichOneof("encoding") == "sparse_csr":
        raise CommandError(f"{where} is a sparse tensor, which is not supported; send it dense")
    if tensor.dtype not in DTYPES:
        raise CommandError(f"{where} has dtype {tensor.dtype} of the wire; send float32 or int64")
    values = _as_array(tensor.dense, DTYPES[tensor.dtype], where)
    shape = tuple(tensor.shape) or values.shape
    if int(np.prod(shape)) != len(values):
        raise CommandError(f"{where} has {len(values)} entries, but its shape is {list(shape)}; send matching bytes")
    return values.reshape(shape)


def _as_array(content: bytes, dtype: Any, where: str) -> np.ndarray:
    if len(content) % dtype.itemsize:
        raise CommandError(f"{where} has {len(content)} bytes, which are no whole number of {dtype.name} values")
    return np.frombuffer(content, dtype)


def _check_length(values: np.ndarray, length: int, where: str) -> None:
    if len(values) != length:
        raise CommandError(f"{where} has {len(values)} entries for {length} tokens of model_input; give one per token")


def _check_token_ids(ids: np.ndarray, where: str, vocabulary: int) -> None:
    if len(invalid := np.flatnonzero((ids < 0) | (ids >= vocabulary))):
        index = int(invalid[0])
        raise CommandError(
            f"{where}[{index}] is {ids[index]}, but the token ids of the model are 0..{vocabulary - 1}; use the "
            "tokenizer of this model"
        )


def write_output(log_probs: Ragged, loss: float) -> Any:
    """Return the answer to a forward_backward: the log-probs of the targets of each datum, and the sum of the loss."""
    rows = [row[1:].numpy().astype("<f4") for row in log_probs.rows()]
    message = messages.ForwardBackwardOutput(loss_fn_output_type="TorchLossReturn")
    message.metrics["loss:sum"] = loss
    record = message.loss_fn_outputs.add(type_tag="TorchLossReturn", num_datums=len(rows))
    field = record.fields["logprobs"]
    field.data = b"".join(row.tobytes() for row in rows)
    field.offsets = np.cumsum([0, *(row.nbytes for row in rows)]).astype("<i8").tobytes()
    field.dtype = messages.NUMBERS["DTYPE_FLOAT32"]
    return message


def difference(first: Result, second: Result) -> float:
    """Return the largest difference between the numbers of two results of a command; inf if they differ otherwise."""
    if first.body == second.body:
        return 0.0
    if first.has_failed or second.has_failed or first.kind != second.kind:
        return math.inf
    one, other = _numbers(first), _numbers(second)
    if one.shape != other.shape or not len(one):
        return math.inf
    return float(np.abs(one - other).max())


def _numbers(result: Result) -> np.ndarray:
    """Return the log-probs and metrics of a forward_backward, or the metrics of another command."""
    if result.kind != PROTOBUF:
        return np.array(list(json.loads(result.body).get("metrics", {}).values()), np.float64)
    message = messages.decode(messages.ForwardBackwardOutput, result.body)
    fields = [record.fields["logprobs"].data for record in message.loss_fn_outputs]
    return np.concatenate([np.frombuffer(b"".join(fields), "<f4"), [message.metrics["loss:sum"]]])


def write_samples(rows: Sequence[tuple[Any, Any, bool]]) -> Any:
    """Return the answer to a request for samples: tokens, log-probs, and True if a stop token ended the sample."""
    message = messages.SampleResponse()
    for tokens, log_probs, has_stopped in rows:
        message.sequences.add(
            stop_reason=messages.NUMBERS["STOP_REASON_STOP" if has_stopped else "STOP_REASON_LENGTH"],
            tokens=tokens.numpy().astype("<i4").tobytes(),
            logprobs=log_probs.numpy().astype("<f4").tobytes(),
        )
    return message
