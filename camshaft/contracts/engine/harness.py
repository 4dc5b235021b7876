"""Harness of the engine contract: a tiny model, a batch, and methods that build engines and run steps.

    harness = EngineHarness(SingleDeviceEngine, "/tmp/scratch")
    engine = harness.build(micro_batch_size=2)         # any field of EngineConfig, or of its model section
    harness.step(engine, harness.batch).gradients

In a process group every rank has such a harness, in one shared folder, and makes the same calls. A batch is that of
the whole group: `step` and `infer` give each data-parallel rank different rows, in unequal numbers, and gather the
results.
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

from camshaft.config.engine import EngineConfig, EngineModel, OptimConfig
from camshaft.contracts.engine.oracle import (
    HEAD_CLASSES,
    adapter_gradients,
    loss_sums,
    oracle_outputs,
    oracle_step,
)
from camshaft.contracts.rules import expect
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine.base import BaseEngine, LossFn, PreprocessFn, StepContext, StepResult
from camshaft.models.tiny import VOCABULARY_ROWS, make_tiny_model, make_tiny_tokenizer

_MODEL_FIELDS = frozenset(EngineModel.model_fields)

SAFETY = 32
"""Accepted difference from the oracle, in rounding errors of the oracle: other kernels sum in other orders."""


@dataclass(frozen=True)
class Measured:
    """One optimizer step, with the gradient that it must have used."""

    loss: float
    grad_norm: float
    metrics: dict[str, float]
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Tolerances:
    """Accepted float32 differences, relative to the expected value above 1 and absolute below."""

    outputs: float
    gradients: float


class EngineHarness:
    """One engine class in one scratch folder; `always` are config fields of every engine built here."""

    def __init__(
        self,
        engine_class: type[BaseEngine],
        folder: str | Path,
        device: str = "cpu",
        always: Mapping[str, Any] | None = None,
    ):
        self.engine_class, self.folder, self.device = engine_class, Path(folder), device
        self.always = dict(always or {})
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
        """Accepted differences on this device, measured once per process."""
        if self.device not in _TOLERANCES:
            _TOLERANCES[self.device] = measure_tolerances(self.device, self.model_folder)
        return _TOLERANCES[self.device]

    @cached_property
    def model_folder(self) -> Path:
        folder = self.folder / "model"

        def make() -> None:
            make_tiny_tokenizer(folder)
            make_tiny_model(folder, **TINY)

        self.on_rank_zero(make)
        return folder

    @cached_property
    def batch(self) -> DataProto:
        """Eight rows of 2 to 17 tokens, see `make_batch`."""
        return make_batch()

    @cached_property
    def siblings(self) -> DataProto:
        """Responses to three prompts, not adjacent, and a row without; one prompt is a prefix of another."""
        random = torch.Generator().manual_seed(13)
        stem = torch.randint(3, 30, (9,), generator=random)
        prompts = [stem, stem[:4], stem.flip(0)]
        rows, prompt_of = [], [0, 1, 0, 2, 1, 0, None, 2]
        for number in prompt_of:
            response = torch.randint(3, 30, (int(torch.randint(1, 7, (), generator=random)),), generator=random)
            rows.append((stem[:1] if number is None else prompts[number], response))
        ids = Ragged.from_rows([torch.cat(row) for row in rows])
        mask = Ragged.from_rows([torch.cat([torch.zeros(len(p)), torch.ones(len(r))]).bool() for p, r in rows])
        advantages = ids.like(torch.randn(len(ids.values), generator=random))
        log_q = ids.like(torch.randn(len(ids.values), VOCABULARY_ROWS, generator=random).log_softmax(dim=1))
        return DataProto.from_dict({"input_ids": ids, "loss_mask": mask, "advantages": advantages, "log_q": log_q})

    def splits(self) -> list[dict[str, Any]]:
        """Limits of micro-batches: by count, by tokens, by both."""
        return [
            {"micro_batch_size": 1},
            {"micro_batch_size": 3},
            {"max_tokens": 20},
            {"max_tokens": 40, "micro_batch_size": 2},
        ]

    # -- building ---------------------------------------------------------------------------------

    def config(self, head: str = "causal_lm", forward_only: bool = False, **changes: Any) -> EngineConfig:
        """Return a config whose first update reveals the gradient; `changes` are fields of it or its model section."""
        changes = self.always | changes
        model = {name: changes.pop(name) for name in list(changes) if name in _MODEL_FIELDS}
        optim = OptimConfig(lr=1.0, eps=1.0, weight_decay=0.0)
        plain = {"grad_clip": 1e9, "device": self.device, "seed": 5, "optim": None if forward_only else optim}
        path = str(self.model_folder)
        return EngineConfig(model=EngineModel(path=path, head=head, **model), **(plain | changes))  # pyright: ignore

    def build(self, head: str = "causal_lm", set_loss: bool = True, **changes: Any) -> BaseEngine:
        engine = self.engine_class(self.config(head, **changes))
        engine.init_model()
        if set_loss and head != "reward" and not changes.get("forward_only"):
            engine.set_loss_fn(self.loss_fn(head))
        return engine

    def loss_fn(self, head: str) -> LossFn:
        """Policy gradient plus a per-sequence part, or squared error: both divide by the global counts."""

        def loss_fn(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
            name = "log_probs" if head == "causal_lm" else "values"
            token_part, sequence_part = loss_sums(predictions[name], data["advantages"], data["loss_mask"], head)
            loss = token_part / ctx["num_tokens"] + sequence_part / ctx["num_sequences"]
            mean = (predictions[name].values * data["loss_mask"].values).sum() / ctx["num_tokens"]
            ctx["metrics"] = {f"mean_{name}": mean.detach()}
            return loss, ctx

        return loss_fn

    # -- the oracle -------------------------------------------------------------------------------

    def oracle_model(self, engine: BaseEngine, head: str) -> torch.nn.Module:
        """Return the `transformers` model with the engine's weights, in float32, with eager attention."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.model_folder, num_labels=1)
        model = HEAD_CLASSES[head].from_config(config, attn_implementation="eager").to(self.device).eval()
        parameters, weights = dict(model.named_parameters()), self.weights(engine)
        expect(
            parameters.keys() == weights.keys(),
            f"names of weights differ from transformers': {sorted(parameters.keys() ^ weights.keys())[:3]}",
        )
        for name, weight in weights.items():
            parameters[name].data.copy_(weight)
        return model

    def oracle_gradients(
        self, engine: BaseEngine, head: str, batch: DataProto | None = None
    ) -> tuple[float, float, dict[str, Tensor]]:
        """Return the expected (loss, gradient norm, gradients) of the first step on `self.batch` or another."""
        loss, norm, gradients = oracle_step(self.oracle_model(engine, head), batch or self.batch, head)
        if engine.config.model.lora is not None:
            norm, gradients = self.of_adapter(engine, gradients)
        return loss, norm, gradients

    def of_adapter(self, engine: BaseEngine, gradients: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """Return (norm, gradients) of the trained parameters, from gradients of the merged weights."""
        lora = engine.config.model.lora
        assert lora is not None
        return adapter_gradients(gradients, self.trained(engine), lora.alpha / lora.rank)

    # -- measuring --------------------------------------------------------------------------------

    def weights(self, engine: BaseEngine) -> dict[str, Tensor]:
        return {name: weight.clone() for name, weight in engine.named_weights()}

    def trained(self, engine: BaseEngine) -> dict[str, Tensor]:
        """Return the weights that the optimizer updates: the adapter, if the engine has one."""
        only = engine.config.model.lora is not None
        return {name: weight.clone() for name, weight in engine.named_weights(adapter_only=only)}

    def save(self, engine: BaseEngine, folder: Path, **arguments: Any) -> None:
        """Save a checkpoint and wait for it, also from an engine that writes in the background."""
        engine.save_checkpoint(str(folder), **arguments)
        engine.wait_for_checkpoint()

    def infer(
        self, engine: BaseEngine, ctx: StepContext | None = None, batch: DataProto | None = None
    ) -> dict[str, Ragged | Tensor]:
        """Return predictions for all rows of `self.batch` or another, gathered from the ranks."""
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
        """Run one step; unlike `step` it does not gather the weights."""
        with engine.train_mode():
            return engine.train_batch(self.share(engine, batch), ctx, preprocess_fn=preprocess_fn)

    def step(
        self,
        engine: BaseEngine,
        batch: DataProto,
        ctx: StepContext | None = None,
        preprocess_fn: PreprocessFn | None = None,
    ) -> Measured:
        """Run the first step, and solve its update w - w' = g / (|g| + 1) for the gradient g."""
        before = self.trained(engine)
        result = self.train(engine, batch, ctx, preprocess_fn)
        moves = {name: before[name] - weight for name, weight in self.trained(engine).items()}
        gradients = {name: move / (1 - move.abs()) for name, move in moves.items()}
        return Measured(result.loss, result.grad_norm, result.metrics, gradients)

    # -- many ranks -------------------------------------------------------------------------------

    def share(self, engine: BaseEngine, batch: DataProto) -> DataProto:
        """Return the rows of this engine's data-parallel rank: at least one, more for low ranks than for high ones."""
        seat, rows = engine.seat, len(batch)
        weights = [2 * seat.dp_size - rank for rank in range(seat.dp_size)]
        ends = [round(rows * sum(weights[: rank + 1]) / sum(weights)) for rank in range(seat.dp_size)]
        return batch.reorder(list(range(([0, *ends])[seat.dp_rank], ends[seat.dp_rank])))

    def gather(self, engine: BaseEngine, predictions: dict[str, Any]) -> dict[str, Ragged | Tensor]:
        """Concatenate the predictions of all ranks for their shares, in the order of the rows."""
        local = {name: value.to("cpu") for name, value in predictions.items()}
        of_ranks = self.of_all_ranks((engine.seat, local))
        parts = [part for seat, part in sorted(of_ranks, key=lambda pair: pair[0].dp_rank) if seat.collects]
        return {
            name: Ragged.concat([part[name] for part in parts])
            if isinstance(local[name], Ragged)
            else torch.cat([part[name] for part in parts])
            for name in local
        }

    def of_all_ranks(self, value: Any) -> list[Any]:
        """Gather a Python object from each rank, in the order of the ranks."""
        if not dist.is_initialized():
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def on_rank_zero(self, action: Callable[[], Any]) -> None:
        """Run `action` on rank 0, followed by a barrier; for changes of the shared folder."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            action()
        if dist.is_initialized():
            dist.barrier()


TINY: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "seed": 3}
"""Arguments of the model that engines of the contract train."""


def make_batch() -> DataProto:
    """Make eight rows of 2 to 17 tokens; the share of counted tokens differs much between rows, one row has none.

    `log_q` contains log-probs of the reference distribution q.
    """
    random = torch.Generator().manual_seed(11)
    lengths = torch.tensor([5, 17, 2, 9, 12, 3, 7, 4])
    count = int(lengths.sum())
    ids = Ragged(torch.randint(3, 30, (count,), generator=random), lengths)
    mask = torch.rand(count, generator=random) < 0.6
    mask[ids.positions() == 0] = False
    mask[ids.row_ids() == 5] = False
    mask[ids.row_ids() == 1] = ids.positions()[ids.row_ids() == 1] > 0
    advantages = torch.randn(count, generator=random)
    log_q = torch.randn(count, VOCABULARY_ROWS, generator=random).log_softmax(dim=1)
    columns = {"loss_mask": mask, "advantages": advantages, "log_q": log_q}
    aligned = {name: ids.like(values) for name, values in columns.items()}
    return DataProto.from_dict({"input_ids": ids, **aligned, "uid": list("abcdefgh")})


# -- tolerances -----------------------------------------------------------------------------------


_TOLERANCES: dict[str, Tolerances] = {}
"""Tolerances by device."""


def measure_tolerances(device: str, model_folder: Path) -> Tolerances:
    """Derive tolerances from the rounding error of the oracle: float32 against float64, on this processor and device.

    A gradient is read off a float32 weight w after the update w - g / (|g| + 1); rounding w' changes the result by up
    to eps |w'| (1 + |g|)^2, which is added.
    """
    batch, outputs, gradients = make_batch().to(device), 0.0, 0.0
    for head, single in _oracle_models(model_folder).items():
        single = single.to(device, torch.float32).eval()
        double = copy.deepcopy(single).double()
        exact = oracle_outputs(double, batch, head, temperature=0.7)
        for name, value in oracle_outputs(single, batch, head, temperature=0.7).items():
            outputs = max(outputs, difference(value, exact[name]))
        expected = oracle_step(double, batch, head)[2]
        for name, gradient in oracle_step(single, batch, head)[2].items():
            weight, size = double.get_parameter(name).detach().abs(), expected[name].abs()
            recovery = torch.finfo(torch.float32).eps * (1 + weight) * (1 + size) ** 2 / size.clamp(min=1)
            gradients = max(gradients, difference(gradient, expected[name]) + float(recovery.max()))
    return Tolerances(SAFETY * outputs, SAFETY * gradients)


def _oracle_models(folder: Path) -> dict[str, Any]:
    """Load the tiny model with a causal_lm and with a value head, without moving the global random state."""
    from transformers import AutoConfig

    with torch.random.fork_rng(devices=[]):
        causal = HEAD_CLASSES["causal_lm"].from_pretrained(folder, attn_implementation="eager")
        config = AutoConfig.from_pretrained(folder, num_labels=1)
        value = HEAD_CLASSES["value"].from_config(config, attn_implementation="eager")
        value.base_model.load_state_dict(causal.base_model.state_dict())
    return {"causal_lm": causal, "value": value}


# -- comparing ------------------------------------------------------------------------------------


def difference(result: Ragged | Tensor, expected: Ragged | Tensor) -> float:
    """Return the largest difference, relative to the expected value above 1 and absolute below."""
    a, b = _values(result), _values(expected)
    return ((a - b).abs() / b.abs().clamp(min=1)).max().item() if a.numel() else 0.0


def close(result: Ragged | Tensor | float, expected: Ragged | Tensor | float, tolerance: float, subject: str) -> None:
    """Raise `Violation` unless shapes are equal and `difference` is at most `tolerance`."""
    a, b = (v if isinstance(v, Ragged | Tensor) else torch.tensor(v) for v in (result, expected))
    shapes = [v.lengths.tolist() if isinstance(v, Ragged) else list(v.shape) for v in (a, b)]
    expect(shapes[0] == shapes[1], f"{subject}: shape {shapes[0]}, expected {shapes[1]}")
    off = difference(a, b)
    expect(off <= tolerance, f"{subject}: off by {off:.2e}, allowed {tolerance:.2e}")


def same_bits(result: Mapping[str, Tensor], expected: Mapping[str, Tensor], subject: str) -> None:
    """Raise `Violation` unless both have the same names and bitwise equal tensors."""
    expect(result.keys() == expected.keys(), f"{subject}: names differ")
    for name, tensor in result.items():
        expect(torch.equal(tensor, expected[name]), f"{subject}: '{name}' differs")


def _values(value: Ragged | Tensor) -> Tensor:
    return (value.values if isinstance(value, Ragged) else value).double().cpu()
