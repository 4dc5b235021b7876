"""The bench on which the contract tries an engine: a tiny model, a batch, ways to build and to measure.

lab = Lab(ReferenceEngine, "/tmp/scratch")
engine = lab.build(micro_batch_size=2)         # any field of EngineConfig, or of its model section
lab.step(engine, lab.batch).gradients
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from camshaft.config.engine import EngineConfig, EngineModel, OptimConfig
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine.base import BaseEngine, LossFn, StepContext
from camshaft.engine.plain import HEAD_CLASSES, plain_loss
from camshaft.models.tiny import make_tiny_model, make_tiny_tokenizer
from camshaft.rules import expect

_MODEL_FIELDS = frozenset(EngineModel.model_fields)


@dataclass(frozen=True)
class Measured:
    """One optimizer step, with the gradient that it must have used."""

    loss: float
    grad_norm: float
    metrics: dict[str, float]
    gradients: dict[str, Tensor]


class Lab:
    """One engine class in one scratch folder."""

    def __init__(self, engine_class: type[BaseEngine], folder: str | Path, device: str = "cpu"):
        self.engine_class, self.folder, self.device = engine_class, Path(folder), device
        self.folder.mkdir(parents=True, exist_ok=True)
        self.tolerance = 1e-5

    @cached_property
    def model_folder(self) -> Path:
        folder = self.folder / "model"
        make_tiny_tokenizer(folder)
        make_tiny_model(folder, hidden=32, layers=2, heads=4, kv_heads=2, seed=3)
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
        return DataProto.from_dict(
            {"input_ids": ids, "loss_mask": ids.like(mask), "advantages": ids.like(advantages), "uid": list("abcdefgh")}
        )

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

    def step(self, engine: BaseEngine, batch: DataProto) -> Measured:
        """One step at the first update's terms: w - w' = g / (|g| + 1), solved for g."""
        before = self.weights(engine)
        with engine.train_mode():
            result = engine.train_batch(batch)
        moves = {name: before[name] - weight for name, weight in self.weights(engine).items()}
        gradients = {name: move / (1 - move.abs()) for name, move in moves.items()}
        return Measured(result.loss, result.grad_norm, result.metrics, gradients)


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
