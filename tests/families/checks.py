"""Three steps of an engine beside three steps of plain transformers.

    for outcome in check_type("qwen3"):      # of all heads
        outcome.status, outcome.detail       # "equal", the largest ratio of a difference to its limit
    check_head(folder, "value", {"tensor_parallel_size": 2})        # on each of two ranks

The batch has packed rows of 2 to 17 tokens, two with a common prompt, one with a hole in its loss mask, and one without
counted tokens. The measure is the largest difference over the largest value of the same tensor; for weights, over the
largest update of the tensor. Tensors whose gradient is below 1e-12 of the largest gradient are compared in the loss
only.
"""

import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from camshaft.config.engine import EngineConfig, EngineModel, Head, OptimConfig
from camshaft.contracts.engine.oracle import collect_gradients, load_oracle, loss_sums, oracle_outputs
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine.fsdp.engine import FSDPEngine
from camshaft.engine.single import SingleDeviceEngine
from camshaft.engine.torch_engine import TorchEngine
from camshaft.errors import EngineError
from camshaft.models.loader import quiet_transformers, skeleton

from .configs import VOCABULARY, tiny_config

HEADS: tuple[Head, ...] = ("causal_lm", "value", "reward")
OUTPUTS: dict[Head, tuple[str, ...]] = {
    "causal_lm": ("log_probs", "entropy"),
    "value": ("values",),
    "reward": ("scores",),
}
LIMITS = {"loss": 1e-6, "gradient": 5e-6, "weight": 1e-5}
TEMPERATURE = 0.7
STEPS = 3
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": "SGD", "lr": 1e-4, "weight_decay": 0.0},
    "AdamW": {"optimizer": "AdamW", "lr": 1e-4, "weight_decay": 0.1, "eps": 0.1},
}
"""With this eps, Adam does not amplify the rounding of norms, which transformers computes in float32."""
NEGLIGIBLE = 1e-12
NEEDS_DEFAULT_DTYPE = ("xglm",)
"""Types whose code in transformers combines tensors of the default dtype with float64 tensors."""
ROUNDS = ("deepseek_v4",)
"""Types whose matrix products in transformers are in float32, and whose gradients cancel to a few digits of it."""


@dataclass(frozen=True)
class Outcome:
    """Result for one head of a type."""

    status: Literal["equal", "different", "refused", "failed"]
    detail: str
    """The largest difference in units of its limit, the sentence of the refusal, or the traceback."""


@dataclass(frozen=True)
class Trace:
    """Losses of all steps, gradients of the first step, and the weights before and after all steps."""

    losses: list[float]
    gradients: dict[str, Tensor]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def check_type(model_type: str) -> list[Outcome]:
    """Check all heads of a type; only one outcome if it is refused."""
    with float64_code(model_type), tempfile.TemporaryDirectory(prefix="families-") as folder:
        try:
            if message := refusal(model_type, Path(folder)):
                return [Outcome("refused", message)]
            write_model(model_type, Path(folder))
            return [check_head(Path(folder), head) for head in HEADS]
        except Exception:
            return [Outcome("failed", traceback.format_exc())]


@contextmanager
def float64_code(model_type: str) -> Iterator[None]:
    """Let the code of a type in transformers compute in float64, on the engine's and on the oracle's side."""

    def keep_float64(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)

    if model_type in NEEDS_DEFAULT_DTYPE:
        torch.set_default_dtype(torch.float64)
    try:
        with patch.object(Tensor, "float", keep_float64) if model_type in ROUNDS else nullcontext():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def refusal(model_type: str, folder: Path) -> str | None:
    """Write the config of a type, and return the sentence with which it is refused; None if it is accepted."""
    tiny_config(model_type).save_pretrained(folder)
    try:
        skeleton(EngineModel(path=str(folder), random_init=True), "float64")
    except EngineError as error:
        return str(error)
    return None


def check_head(folder: Path, head: Head, options: Mapping[str, Any] | None = None) -> Outcome:
    """Train the model of a folder with an engine and with plain transformers, and compare them.

    The engine is `reference`, or `fsdp` with `options` on the ranks that call this function.
    """
    optimizers = OPTIMIZERS if options is None else ("AdamW",)
    try:
        differences = [_differences(folder, head, optimizer, options) for optimizer in optimizers]
        largest, name = max(item for each in differences for item in each)
    except EngineError as error:
        return Outcome("refused", str(error))
    except Exception:
        return Outcome("failed", traceback.format_exc())
    return Outcome("equal" if largest <= 1 else "different", f"{largest:.0e} {name}")


def write_model(model_type: str, folder: Path) -> None:
    """Write a causal language model with wide random weights, biases and norms."""
    random = torch.Generator().manual_seed(0)
    with quiet_transformers(), torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float64)
        for parameter in model.parameters():
            noise = 0.1 * torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0  # as some families do when they load a file
        model.save_pretrained(folder)


def batch() -> DataProto:
    """Return the rows of the module docstring, with advantages."""
    random = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, VOCABULARY, (length,), generator=random) for length in (9, 13, 2, 17, 6, 11)]
    rows[1][:6] = rows[0][:6]
    mask = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    for row in mask:
        row[0] = False
    mask[0][:6] = mask[1][:6] = False
    mask[3][5:9] = False
    mask[4][:] = False
    advantages = [torch.randn(len(row), generator=random) for row in rows]
    columns = {
        "input_ids": Ragged.from_rows(rows),
        "loss_mask": Ragged.from_rows(mask),
        "advantages": Ragged.from_rows(advantages),
    }
    return DataProto.from_dict(columns)


# -- the engine ------------------------------------------------------------------------------------


def _engine(folder: Path, head: Head, optimizer: str, options: Mapping[str, Any] | None) -> TorchEngine:
    model = EngineModel(path=str(folder), head=head, new_head=head == "reward")
    optim = OptimConfig(**OPTIMIZERS[optimizer])
    config = EngineConfig(
        model=model, optim=optim, dtype="float64", micro_batch_size=2, grad_clip=1e9, options=dict(options or {})
    )
    engine = SingleDeviceEngine(config) if options is None else FSDPEngine(config)
    engine.init_model()
    return engine


def _weights(engine: TorchEngine) -> dict[str, Tensor]:
    return {name: engine.full_tensor(weight.detach()).clone() for name, weight in engine.named_parameters().items()}


def _train_engine(engine: TorchEngine, head: Head) -> Trace:
    def loss_fn(data: DataProto, predictions: Mapping[str, Any], ctx: Any) -> tuple[Tensor, Any]:
        tokens, sequences = loss_sums(predictions, data, head)
        return tokens / ctx["num_tokens"] + sequences / ctx["num_sequences"], ctx

    engine.set_loss_fn(loss_fn)
    before, losses, gradients = _weights(engine), [], {}
    data, seat = batch(), engine.seat
    if seat.dp_size == 2:  # in unequal shares
        data = data.reorder(list((range(4), range(4, len(data)))[seat.dp_rank]))
    request: Any = {"temperature": TEMPERATURE, "outputs": OUTPUTS[head]}
    for step in range(STEPS):
        with engine.train_mode():
            engine.optimizer_zero_grad()
            losses.append(float(engine.forward_backward_step(data, request)[1]))
            if step == 0:
                gradients = {name: _gradient(engine, p) for name, p in engine.named_parameters().items()}
            engine.optimizer_step()
    return Trace(losses, gradients, before, _weights(engine))


def _gradient(engine: TorchEngine, parameter: Tensor) -> Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
    return engine.full_tensor(gradient)


# -- the oracle ------------------------------------------------------------------------------------


def _train_oracle(model: nn.Module, head: Head, optimizer: str) -> Trace:
    settings = {**OPTIMIZERS[optimizer]}
    optim = getattr(torch.optim, settings.pop("optimizer"))(model.parameters(), **settings)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses, gradients = [], {}
    for step in range(STEPS):
        model.zero_grad()
        losses.append(_oracle_loss(model, head))
        if step == 0:
            gradients = {name: g.clone() for name, g in collect_gradients(model)[1].items()}
        optim.step()
    return Trace(losses, gradients, before, {name: p.detach().clone() for name, p in model.named_parameters()})


def _oracle_loss(model: nn.Module, head: Head) -> float:
    """Add up the gradients of the contract's loss, row by row, and return the loss."""
    data, total = batch(), 0.0
    num_tokens = float(data["loss_mask"].values.sum())
    num_sequences = float(sum(bool(row.any()) for row in data["loss_mask"].rows()))
    for index in range(len(data)):
        row = data.reorder([index])
        tokens, sequences = loss_sums(oracle_outputs(model, row, head, TEMPERATURE), row, head)
        share = tokens / num_tokens + sequences / num_sequences
        share.backward()
        total += float(share.detach())
    return total


# -- the measure -----------------------------------------------------------------------------------


def _differences(
    folder: Path, head: Head, optimizer: str, options: Mapping[str, Any] | None
) -> Iterator[tuple[float, str]]:
    """Yield each difference in units of its limit, with its name."""
    engine = _engine(folder, head, optimizer, options)
    oracle = load_oracle(folder, head, _weights(engine))
    expected, actual = _train_oracle(oracle, head, optimizer), _train_engine(engine, head)
    for step, (loss, wanted) in enumerate(zip(actual.losses, expected.losses, strict=True)):
        yield abs(loss - wanted) / abs(wanted) / LIMITS["loss"], f"{optimizer} loss {step}"
    largest = max(float(g.abs().max()) for g in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        scale = float(gradient.abs().max())
        if scale < NEGLIGIBLE * largest:
            continue
        yield float((actual.gradients[name] - gradient).abs().max()) / scale / LIMITS["gradient"], f"gradient {name}"
        update = float((expected.after[name] - expected.before[name]).abs().max())
        difference = float((actual.after[name] - expected.after[name]).abs().max())
        # Some routers have float32 weights, also in a float64 model.
        difference -= torch.finfo(expected.after[name].dtype).eps * float(expected.after[name].abs().max())
        yield difference / update / LIMITS["weight"], f"{optimizer} weight {name}"
