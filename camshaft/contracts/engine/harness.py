"""The bench on which the contract tries an engine: a tiny model, a batch, ways to build and to measure.

harness = EngineHarness(SingleDeviceEngine, "/tmp/scratch")
engine = harness.build(micro_batch_size=2)         # any field of EngineConfig, or of its model section
harness.step(engine, harness.batch).gradients

In a process group every rank has such a bench, in one folder, and makes the same calls. A batch is that of the
whole group: `step` and `infer` give each data-parallel rank rows of its own, not the same number to each, and
put together what comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from camshaft.config.engine import EngineConfig, EngineModel, OptimConfig
from camshaft.contracts.engine.oracle import HEAD_CLASSES, plain_loss, plain_step, through_adapter
from camshaft.contracts.rules import expect
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine.base import BaseEngine, LossFn, PreprocessFn, StepContext, StepResult
from camshaft.models.tiny import VOCABULARY_ROWS, make_tiny_model, make_tiny_tokenizer

_MODEL_FIELDS = frozenset(EngineModel.model_fields)


@dataclass(frozen=True)
class Measured:
    """One optimizer step, with the gradient that it must have used."""

    loss: float
    grad_norm: float
    metrics: dict[str, float]
    gradients: dict[str, Tensor]


class EngineHarness:
    """One engine class in one scratch folder; `always` are fields of the config that every engine here gets."""

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
        self.tolerance = 1e-5

    @cached_property
    def model_folder(self) -> Path:
        folder = self.folder / "model"

        def make() -> None:
            make_tiny_tokenizer(folder)
            make_tiny_model(folder, hidden=32, layers=2, heads=4, kv_heads=2, seed=3)

        self.on_rank_zero(make)
        return folder

    @cached_property
    def batch(self) -> DataProto:
        """Eight rows of 2 to 17 tokens; rows differ much in how many tokens count, one has none."""
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

    @cached_property
    def siblings(self) -> DataProto:
        """Responses to three prompts and a row of its own, not side by side; one prompt is the beginning of another."""
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
        """Ways to cut the batch: by count, by tokens, by both."""
        return [
            {"micro_batch_size": 1},
            {"micro_batch_size": 3},
            {"max_tokens": 20},
            {"max_tokens": 40, "micro_batch_size": 2},
        ]

    # -- building ---------------------------------------------------------------------------------

    def config(self, head: str = "causal_lm", forward_only: bool = False, **changes: Any) -> EngineConfig:
        """A config whose first update gives the gradient away; `changes` go where the field is."""
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
            token_part, sequence_part = plain_loss(predictions[name], data["advantages"], data["loss_mask"], head)
            loss = token_part / ctx["num_tokens"] + sequence_part / ctx["num_sequences"]
            mean = (predictions[name].values * data["loss_mask"].values).sum() / ctx["num_tokens"]
            ctx["metrics"] = {f"mean_{name}": mean.detach()}
            return loss, ctx

        return loss_fn

    def plain_model(self, engine: BaseEngine, head: str) -> torch.nn.Module:
        """`transformers`' own class with the engine's weights, in float32, unpacked attention."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.model_folder, num_labels=1)
        model = HEAD_CLASSES[head].from_config(config, attn_implementation="eager").to(self.device).eval()
        own, weights = dict(model.named_parameters()), self.weights(engine)
        expect(
            own.keys() == weights.keys(),
            f"names of weights differ from transformers': {sorted(own.keys() ^ weights.keys())[:3]}",
        )
        for name, weight in weights.items():
            own[name].data.copy_(weight)
        return model

    # -- measuring --------------------------------------------------------------------------------

    def weights(self, engine: BaseEngine) -> dict[str, Tensor]:
        return {name: weight.clone() for name, weight in engine.named_weights()}

    def trained(self, engine: BaseEngine) -> dict[str, Tensor]:
        """What the optimizer moves: the adapter, if there is one."""
        only = engine.config.model.lora is not None
        return {name: weight.clone() for name, weight in engine.named_weights(adapter_only=only)}

    def plain_gradients(
        self, engine: BaseEngine, head: str, batch: DataProto | None = None
    ) -> tuple[float, float, dict[str, Tensor]]:
        """(loss, gradient norm, gradients) that the first step, on `self.batch` or another, has to have."""
        loss, norm, gradients = plain_step(self.plain_model(engine, head), batch or self.batch, head)
        if engine.config.model.lora is not None:
            norm, gradients = self.of_adapter(engine, gradients)
        return loss, norm, gradients

    def of_adapter(self, engine: BaseEngine, gradients: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """(norm, gradients) of what the engine trains, from those of the plain model's weights."""
        lora = engine.config.model.lora
        assert lora is not None
        return through_adapter(gradients, self.trained(engine), lora.alpha / lora.rank)

    def save(self, engine: BaseEngine, folder: Path, **arguments: Any) -> None:
        """A checkpoint that is there when this returns, also from an engine that writes in the background."""
        engine.save_checkpoint(str(folder), **arguments)
        engine.wait_for_checkpoint()

    def infer(
        self, engine: BaseEngine, ctx: StepContext | None = None, batch: DataProto | None = None
    ) -> dict[str, Ragged | Tensor]:
        """Predictions for the rows of `self.batch` or another, each from the rank that had it."""
        with engine.eval_mode():
            found = engine.infer_batch(self.share(engine, batch or self.batch), ctx)
        return self.together(engine, dict(found))

    def train(
        self,
        engine: BaseEngine,
        batch: DataProto,
        ctx: StepContext | None = None,
        preprocess_fn: PreprocessFn | None = None,
    ) -> StepResult:
        """One step, with no look at the weights: `step` gathers them from all ranks, before and after."""
        with engine.train_mode():
            return engine.train_batch(self.share(engine, batch), ctx, preprocess_fn=preprocess_fn)

    def step(
        self,
        engine: BaseEngine,
        batch: DataProto,
        ctx: StepContext | None = None,
        preprocess_fn: PreprocessFn | None = None,
    ) -> Measured:
        """One step at the first update's terms: w - w' = g / (|g| + 1), solved for g."""
        before = self.trained(engine)
        result = self.train(engine, batch, ctx, preprocess_fn)
        moves = {name: before[name] - weight for name, weight in self.trained(engine).items()}
        gradients = {name: move / (1 - move.abs()) for name, move in moves.items()}
        return Measured(result.loss, result.grad_norm, result.metrics, gradients)

    # -- many ranks -------------------------------------------------------------------------------

    def share(self, engine: BaseEngine, batch: DataProto) -> DataProto:
        """The rows of this engine's data-parallel rank: more for the first ranks than for the last, none without."""
        seat, rows = engine.seat, len(batch)
        weights = [2 * seat.dp_size - rank for rank in range(seat.dp_size)]
        ends = [round(rows * sum(weights[: rank + 1]) / sum(weights)) for rank in range(seat.dp_size)]
        return batch.reorder(list(range(([0, *ends])[seat.dp_rank], ends[seat.dp_rank])))

    def together(self, engine: BaseEngine, found: dict[str, Any]) -> dict[str, Ragged | Tensor]:
        """What the ranks found for their shares, in the order of the rows."""
        mine = {name: value.to("cpu") for name, value in found.items()}
        told = self.of_all_ranks((engine.seat, mine))
        parts = [part for seat, part in sorted(told, key=lambda t: t[0].dp_rank) if seat.collects]
        return {
            name: Ragged.concat([part[name] for part in parts])
            if isinstance(mine[name], Ragged)
            else torch.cat([part[name] for part in parts])
            for name in mine
        }

    def of_all_ranks(self, mine: Any) -> list[Any]:
        """What each rank passed in, in the order of the ranks."""
        if not dist.is_initialized():
            return [mine]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        return found

    def on_rank_zero(self, action: Callable[[], Any]) -> None:
        """Do something to the folder that all share: once, while the others wait."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            action()
        if dist.is_initialized():
            dist.barrier()


# -- saying what is wrong -------------------------------------------------------------------------


def _values(value: Ragged | Tensor) -> Iterator[Tensor]:
    if isinstance(value, Ragged):
        yield value.lengths.double()
        yield value.values.double().cpu()
    else:
        yield value.double().cpu()


def close(found: Ragged | Tensor, wanted: Ragged | Tensor, tolerance: float, what: str) -> None:
    """Equal within `tolerance`, relative above 1 and absolute below; for Ragged also in shape."""
    for a, b in zip(_values(found), _values(wanted), strict=True):
        expect(a.shape == b.shape, f"{what}: shape {tuple(a.shape)}, should be {tuple(b.shape)}")
        off = ((a - b).abs() / b.abs().clamp(min=1)).max().item() if a.numel() else 0.0
        expect(off <= tolerance, f"{what}: off by {off:.2e}, allowed {tolerance:.0e}")


def same_bits(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str) -> None:
    expect(found.keys() == wanted.keys(), f"{what}: other names")
    for name, tensor in found.items():
        expect(torch.equal(tensor, wanted[name]), f"{what}: '{name}' differs")
