"""Harness of the engine contract: builds engines on a tiny model, runs steps, and compares results.

    harness = EngineHarness(SingleDeviceEngine, "/tmp/scratch")
    engine = harness.build(micro_batch_size=2)         # any field of EngineConfig, or of its model section
    harness.step(engine, harness.batch).gradients

In a process group, every rank creates a harness in the same folder and makes the same calls. Batches are those of the
whole group: `step` and `infer` pass each data-parallel rank different rows, in unequal numbers, and `infer` gathers the
predictions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from camshaft.config.engine import EngineConfig, EngineModel, Head, OptimConfig
from camshaft.contracts.engine.oracle import (
    HEAD_CLASSES,
    adapter_gradients,
    loss_output,
    loss_sums,
    oracle_outputs,
    oracle_step,
)
from camshaft.contracts.rules import Violation, expect
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine.base import BaseEngine, LossFn, PreprocessFn, StepResult
from camshaft.engine.context import StepContext
from camshaft.models.heads import Output, supported_outputs
from camshaft.models.loader import DTYPES, quiet_transformers
from camshaft.models.tiny import PAD_ID, VOCABULARY_ROWS, make_tiny_model, make_tiny_tokenizer

_MODEL_FIELDS = frozenset(EngineModel.model_fields)

TOLERANCE_FACTOR = 32
"""Accepted difference from the oracle, as a multiple of its rounding error. Kernels differ in the order of sums."""


@dataclass(frozen=True)
class StepMeasurement:
    """Results of one optimizer step, with the gradients that were computed back from its update."""

    loss: float
    grad_norm: float
    metrics: dict[str, float]
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Tolerances:
    """Accepted float32 differences, in units of `difference`."""

    outputs: float
    gradients: float


class EngineHarness:
    """Tests one engine class in the scratch folder `folder`, with `common_fields` in the config of every engine."""

    def __init__(
        self,
        engine_class: type[BaseEngine],
        folder: str | Path,
        device: str = "cpu",
        common_fields: Mapping[str, Any] | None = None,
    ):
        self.engine_class, self.folder, self.device = engine_class, Path(folder), device
        self.common_fields = dict(common_fields or {})
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def tolerance(self) -> float:
        """Accepted difference of outputs, losses and metrics."""
        return self.tolerances.outputs

    @property
    def gradient_tolerance(self) -> float:
        """Accepted difference of gradients and their norm."""
        return self.tolerances.gradients

    @property
    def tolerances(self) -> Tolerances:
        """Accepted differences on this device. They are measured once per process."""
        if self.device not in _TOLERANCES:
            _TOLERANCES[self.device] = measure_tolerances(self.device, self.model_folder)
        return _TOLERANCES[self.device]

    @cached_property
    def model_folder(self) -> Path:
        """Folder of the tiny model; rank 0 writes it on first access."""
        folder = self.folder / "model"

        def make_model() -> None:
            make_tiny_tokenizer(folder)
            make_tiny_model(folder, **TINY)

        self.on_rank_zero(make_model)
        return folder

    @cached_property
    def batch(self) -> DataProto:
        """Eight rows of 2 to 17 tokens (`make_batch`)."""
        return make_batch()

    @cached_property
    def shared_prompt_batch(self) -> DataProto:
        """Eight rows, seven of which are responses to three prompts.

        Rows with the same prompt are not adjacent. One prompt is a prefix of another. One row shares no prompt.
        """
        random = torch.Generator().manual_seed(13)
        long_prompt = torch.randint(3, 30, (9,), generator=random)
        prompts = [long_prompt, long_prompt[:4], long_prompt.flip(0)]
        rows, prompt_numbers = [], [0, 1, 0, 2, 1, 0, None, 2]
        for number in prompt_numbers:
            response = torch.randint(3, 30, (int(torch.randint(1, 7, (), generator=random)),), generator=random)
            rows.append((long_prompt[:1] if number is None else prompts[number], response))
        ids = Ragged.from_rows([torch.cat(row) for row in rows])
        mask = Ragged.from_rows([torch.cat([torch.zeros(len(p)), torch.ones(len(r))]).bool() for p, r in rows])
        advantages = ids.like(torch.randn(len(ids.values), generator=random))
        log_q = ids.like(torch.randn(len(ids.values), VOCABULARY_ROWS, generator=random).log_softmax(dim=1))
        targets = ids.like(torch.randint(0, 30, (len(ids.values),), generator=random))
        columns = {"loss_mask": mask, "advantages": advantages, "log_q": log_q, "targets": targets}
        return DataProto.from_dict({"input_ids": ids, **columns})

    def micro_batch_limits(self) -> list[dict[str, Any]]:
        """Return config fields that split the batch by rows, by tokens, and by both."""
        return [
            {"micro_batch_size": 1},
            {"micro_batch_size": 3},
            {"max_tokens": 20},
            {"max_tokens": 40, "micro_batch_size": 2},
        ]

    # -- building ---------------------------------------------------------------------------------

    def config(self, head: str = "causal_lm", forward_only: bool = False, **changes: Any) -> EngineConfig:
        """Return a config with an optimizer from whose first update the gradient can be computed.

        `changes` are fields of `EngineConfig` or of its model section.
        """
        changes = {"random_init": head == "reward"} | self.common_fields | changes  # the folder has no reward head
        model = {name: changes.pop(name) for name in list(changes) if name in _MODEL_FIELDS}
        optim = OptimConfig(lr=1.0, eps=1.0, weight_decay=0.0)
        defaults = {"grad_clip": 1e9, "device": self.device, "seed": 5, "optim": None if forward_only else optim}
        path = str(self.model_folder)
        return EngineConfig(model=EngineModel(path=path, head=head, **model), **(defaults | changes))  # pyright: ignore

    def heads(self, *heads: Head) -> tuple[Head, ...]:
        """Return those of `heads` that the engine class supports."""
        return tuple(head for head in heads if head in self.engine_class.capabilities.heads)

    def outputs(self, head: Head) -> tuple[Output, ...]:
        """Return the outputs of a head that the engine class supports."""
        return supported_outputs(head, self.engine_class.capabilities)

    def build(self, head: str = "causal_lm", set_loss: bool = True, **changes: Any) -> BaseEngine:
        """Build an engine with its model and, unless it cannot train, the loss of the contract."""
        engine = self.engine_class(self.config(head, **changes))
        engine.init_model()
        if set_loss and not changes.get("forward_only"):
            engine.set_loss_fn(self.loss_fn(head))
        return engine

    def loss_fn(self, head: str) -> LossFn:
        """Return the loss of the contract for a head, a term per token and a term per sequence.

        For causal_lm, the term per token is a policy gradient, minus the weighted entropy if the entropy is requested.
        For a value head, it is a squared error. The loss of a reward head is a squared error per sequence. Each term is
        divided by its count over the whole mini-batch.
        """

        def loss_fn(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
            token_sum, sequence_sum = loss_sums(predictions, data, head)
            loss = token_sum / ctx["num_tokens"] + sequence_sum / ctx["num_sequences"]
            name = loss_output(predictions, head)
            if head == "reward":
                mean = predictions[name].sum() / ctx["num_sequences"]
            else:
                mean = (predictions[name].values * data["loss_mask"].values).sum() / ctx["num_tokens"]
            ctx["metrics"] = {f"mean_{name}": mean.detach()}
            return loss, ctx

        return loss_fn

    # -- the oracle -------------------------------------------------------------------------------

    def oracle_model(self, engine: BaseEngine, head: str) -> torch.nn.Module:
        """Return a `transformers` model with the weights of `engine`, in float32 and with eager attention.

        Raise `Violation` if the names, shapes or dtypes of `named_weights` differ from those of `transformers`.
        """
        from transformers import AutoConfig

        config, dtype = AutoConfig.from_pretrained(self.model_folder, num_labels=1), engine.config.dtype
        model = HEAD_CLASSES[head].from_config(config, dtype=DTYPES[dtype], attn_implementation="eager")
        parameters, weights = dict(model.named_parameters()), self.weights(engine)
        expect(
            parameters.keys() == weights.keys(),
            "weight names of named_weights differ from those of transformers by "
            f"{sorted(parameters.keys() ^ weights.keys())[:3]}",
        )
        for name, weight in weights.items():
            actual, expected = ((w.dtype, list(w.shape)) for w in (weight, parameters[name]))
            expect(
                actual == expected,
                f"named_weights of a {head} engine with dtype={dtype} yields {name} as {actual[0]} of shape "
                f"{actual[1]}, but transformers stores {expected[0]} of shape {expected[1]}",
            )
        model = model.to(self.device, torch.float32).eval()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(weights[name])
        return model

    def oracle_gradients(
        self, engine: BaseEngine, head: str, batch: DataProto | None = None, request: StepContext | None = None
    ) -> tuple[float, float, dict[str, Tensor]]:
        """Return the expected (loss, gradient norm, gradients) of the first step.

        `batch` defaults to `self.batch`. `request` is that of `oracle_step`.
        """
        loss, norm, gradients = oracle_step(self.oracle_model(engine, head), batch or self.batch, head, request)
        if engine.config.model.lora is not None:
            norm, gradients = self.adapter_gradients(engine, gradients)
        return loss, norm, gradients

    def adapter_gradients(self, engine: BaseEngine, gradients: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """Return (gradient norm, gradients) of the trained weights, from the gradients of the merged weights."""
        lora = engine.config.model.lora
        assert lora is not None
        return adapter_gradients(gradients, self.trained_weights(engine), lora.alpha / lora.rank)

    # -- steps ------------------------------------------------------------------------------------

    def weights(self, engine: BaseEngine) -> dict[str, Tensor]:
        """Return copies of the full weights, with an adapter merged."""
        return {name: weight.clone() for name, weight in engine.named_weights()}

    def trained_weights(self, engine: BaseEngine) -> dict[str, Tensor]:
        """Return copies of the weights that the optimizer updates: only the adapter, if the engine has one."""
        adapter_only = engine.config.model.lora is not None
        return {name: weight.clone() for name, weight in engine.named_weights(adapter_only=adapter_only)}

    def save(self, engine: BaseEngine, folder: Path, **arguments: Any) -> None:
        """Save a checkpoint and wait until it is written, for engines that write in the background."""
        engine.save_checkpoint(str(folder), **arguments)
        engine.wait_for_checkpoint()

    def infer(
        self, engine: BaseEngine, ctx: StepContext | None = None, batch: DataProto | None = None
    ) -> dict[str, Ragged | Tensor]:
        """Return the predictions for all rows of `batch`, by default `self.batch`, gathered from all ranks."""
        with engine.eval_mode():
            predictions = engine.infer_batch(self.share(engine, batch or self.batch), ctx)
        return self.gather(engine, dict(predictions))

    def train(
        self,
        engine: BaseEngine,
        batch: DataProto,
        ctx: StepContext | None = None,
        preprocess_fn: PreprocessFn | None = None,
    ) -> StepResult:
        """Run one optimizer step. Unlike `step`, it does not gather the weights."""
        with engine.train_mode():
            return engine.train_batch(self.share(engine, batch), ctx, preprocess_fn=preprocess_fn)

    def step(
        self,
        engine: BaseEngine,
        batch: DataProto,
        ctx: StepContext | None = None,
        preprocess_fn: PreprocessFn | None = None,
    ) -> StepMeasurement:
        """Run the first optimizer step of `engine`, and compute its gradients g from the update.

        The update of a weight is w - w' = g / (|g| + 1), which is solved for g.
        """
        old_weights = self.trained_weights(engine)
        result = self.train(engine, batch, ctx, preprocess_fn)
        updates = {name: old_weights[name] - weight for name, weight in self.trained_weights(engine).items()}
        gradients = {name: update / (1 - update.abs()) for name, update in updates.items()}
        return StepMeasurement(result.loss, result.grad_norm, result.metrics, gradients)

    # -- several ranks ----------------------------------------------------------------------------

    def share(self, engine: BaseEngine, batch: DataProto) -> DataProto:
        """Return the rows of this data-parallel rank. Every rank gets at least one; lower ranks get more rows."""
        seat, rows = engine.seat, len(batch)
        weights = [2 * seat.dp_size - rank for rank in range(seat.dp_size)]
        ends = [round(rows * sum(weights[: rank + 1]) / sum(weights)) for rank in range(seat.dp_size)]
        return batch.reorder(list(range(([0, *ends])[seat.dp_rank], ends[seat.dp_rank])))

    def gather(self, engine: BaseEngine, predictions: dict[str, Any]) -> dict[str, Ragged | Tensor]:
        """Gather the predictions of all data-parallel ranks and concatenate them in the order of the rows."""
        local_predictions = {name: value.to("cpu") for name, value in predictions.items()}
        gathered = self.all_gather((engine.seat, local_predictions))
        parts = [part for seat, part in sorted(gathered, key=lambda pair: pair[0].dp_rank) if seat.collects]
        return {
            name: Ragged.concat([part[name] for part in parts])
            if isinstance(local_predictions[name], Ragged)
            else torch.cat([part[name] for part in parts])
            for name in local_predictions
        }

    def all_gather(self, value: Any) -> list[Any]:
        """Gather a Python object from every rank, in rank order."""
        if not dist.is_initialized():
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def on_rank_zero(self, action: Callable[[], Any]) -> None:
        """Run `action` on rank 0, then wait for all ranks. Used to change the shared folder."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            action()
        if dist.is_initialized():
            dist.barrier()


TINY: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "seed": 3}
"""Arguments of `make_tiny_model` for the model of the contract."""


def make_batch() -> DataProto:
    """Return eight random rows of 2 to 17 tokens.

    The fraction of tokens in `loss_mask` varies between rows, and is zero for one row. One row contains the padding
    token, whose embedding receives no gradient in `transformers`. `log_q` holds the log-probs of a random distribution
    q over the vocabulary. `targets` are random tokens.
    """
    random = torch.Generator().manual_seed(11)
    lengths = torch.tensor([5, 17, 2, 9, 12, 3, 7, 4])
    count = int(lengths.sum())
    ids = Ragged(torch.randint(3, 30, (count,), generator=random), lengths)
    ids.values[8] = PAD_ID
    mask = torch.rand(count, generator=random) < 0.6
    mask[ids.positions() == 0] = False
    mask[ids.row_ids() == 5] = False
    mask[ids.row_ids() == 1] = ids.positions()[ids.row_ids() == 1] > 0
    advantages = torch.randn(count, generator=random)
    log_q = torch.randn(count, VOCABULARY_ROWS, generator=random).log_softmax(dim=1)
    targets = torch.randint(0, 30, (count,), generator=random)
    columns = {"loss_mask": mask, "advantages": advantages, "log_q": log_q, "targets": targets}
    aligned = {name: ids.like(values) for name, values in columns.items()}
    return DataProto.from_dict({"input_ids": ids, **aligned, "uid": list("abcdefgh")})


# -- tolerances -----------------------------------------------------------------------------------


_TOLERANCES: dict[str, Tolerances] = {}
"""Tolerances by device."""


def measure_tolerances(device: str, model_folder: Path) -> Tolerances:
    """Measure the rounding error of the oracle on this processor and device, and derive tolerances from it.

    The rounding error is the difference between float32 and float64. For gradients, another error is added: g is
    computed from the float32 weight w' = w - g / (|g| + 1), and rounding w' changes g by up to eps |w'| (1 + |g|)^2.
    """
    batch, output_error, gradient_error = make_batch().to(device), 0.0, 0.0
    for head, model in _oracle_models(model_folder).items():
        float_model = model.to(device, torch.float32).eval()
        double_model = copy.deepcopy(float_model).double()
        expected_outputs = oracle_outputs(double_model, batch, head, temperature=0.7)
        for name, value in oracle_outputs(float_model, batch, head, temperature=0.7).items():
            output_error = max(output_error, difference(value, expected_outputs[name]))
        expected = oracle_step(double_model, batch, head)[2]
        for name, gradient in oracle_step(float_model, batch, head)[2].items():
            weight, size = double_model.get_parameter(name).detach().abs(), expected[name].abs()
            recovery_error = torch.finfo(torch.float32).eps * (1 + weight) * (1 + size) ** 2 / size.clamp(min=1)
            gradient_error = max(gradient_error, difference(gradient, expected[name]) + float(recovery_error.max()))
    return Tolerances(TOLERANCE_FACTOR * output_error, TOLERANCE_FACTOR * gradient_error)


def _oracle_models(folder: Path) -> dict[str, Any]:
    """Load the tiny model with a causal_lm and with a value head. The global random state does not change."""
    from transformers import AutoConfig

    with torch.random.fork_rng(devices=[]), quiet_transformers():
        causal = HEAD_CLASSES["causal_lm"].from_pretrained(folder, attn_implementation="eager")
        config = AutoConfig.from_pretrained(folder, num_labels=1)
        value = HEAD_CLASSES["value"].from_config(config, attn_implementation="eager")
        value.base_model.load_state_dict(causal.base_model.state_dict())
    return {"causal_lm": causal, "value": value}


# -- comparisons ----------------------------------------------------------------------------------


def difference(result: Ragged | Tensor, expected: Ragged | Tensor) -> float:
    """Return the maximum of |result - expected| / max(|expected|, 1) over all elements."""
    a, b = _values(result), _values(expected)
    return ((a - b).abs() / b.abs().clamp(min=1)).max().item() if a.numel() else 0.0


def expect_close(
    result: Ragged | Tensor | float, expected: Ragged | Tensor | float, tolerance: float, subject: str
) -> None:
    """Raise `Violation` unless the shapes are equal and `difference` is at most `tolerance`."""
    a, b = (v if isinstance(v, Ragged | Tensor) else torch.tensor(v) for v in (result, expected))
    shapes = [v.lengths.tolist() if isinstance(v, Ragged) else list(v.shape) for v in (a, b)]
    expect(shapes[0] == shapes[1], f"{subject}: the shape is {shapes[0]}, expected {shapes[1]}")
    deviation = difference(a, b)
    if deviation <= tolerance:
        return
    values, correct = _values(a).flatten(), _values(b).flatten()
    worst = int(((values - correct).abs() / correct.abs().clamp(min=1)).argmax())
    raise Violation(
        f"{subject}: differs from the expected value by {deviation:.2e} > {tolerance:.2e}, "
        f"{float(values[worst]):.6g} instead of {float(correct[worst]):.6g}"
    )


def expect_equal(result: Mapping[str, Tensor], expected: Mapping[str, Tensor], subject: str) -> None:
    """Raise `Violation` unless both mappings have the same names and bitwise equal tensors, on any devices."""
    expect(result.keys() == expected.keys(), f"{subject}: the names differ")
    for name, tensor in result.items():
        expect(torch.equal(tensor.cpu(), expected[name].cpu()), f"{subject}: '{name}' differs")


def _values(value: Ragged | Tensor) -> Tensor:
    return (value.values if isinstance(value, Ragged) else value).detach().double().cpu()
