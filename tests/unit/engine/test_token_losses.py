"""Losses that are sums over tokens: value and gradients on engines, compared with transformers in float64."""

import math
from typing import Any

import pytest
import torch
from support.ranks import run_warm_ranks
from support.tiny import tiny_folder
from torch import Tensor
from transformers import AutoModelForCausalLM

from camshaft.algorithms.token_losses import LOSSES
from camshaft.config.engine import EngineConfig, EngineModel, OptimConfig
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import StepContext, build_engine

REQUEST = StepContext(outputs=("target_log_probs",))
CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.2}
OPTIONS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": CLIP,
    "cispo": CLIP,
    "dro": {"beta": 0.05},
    "gspo": CLIP,
}


def model_path() -> str:
    return str(tiny_folder(hidden=32, initializer_range=0.1))


def make_rows(count: int) -> DataProto:
    """Return rows of unequal length with free targets, and old log-probs close to those of a uniform distribution."""
    random = torch.Generator().manual_seed(count)
    lengths = torch.randint(2, 15, (count,), generator=random)
    total = int(lengths.sum())
    ids = Ragged(torch.randint(3, 30, (total,), generator=random), lengths)
    columns = {
        "targets": torch.randint(0, 30, (total,), generator=random),
        "weights": torch.randn(total, generator=random),
        "logprobs": -math.log(32) + torch.randn(total, generator=random) / 2,
        "advantages": torch.randn(total, generator=random),
        "sequence_ratio_mask": (torch.rand(total, generator=random) < 0.7).float(),
    }
    return DataProto.from_dict({"input_ids": ids, **{name: ids.like(values) for name, values in columns.items()}})


def formula(name: str, new: Tensor, row: dict[str, Tensor]) -> Tensor:
    """Return the loss of one row by its definition."""
    old, advantages, mask = row["logprobs"], row["advantages"], row["sequence_ratio_mask"]
    ratio, beta = (new - old).exp(), 0.05
    if name == "gspo":
        mean = ((new - old) * mask).sum().detach() / mask.sum().clamp(min=1)
        ratio = mean.exp() * (new - new.detach()).exp()
    clipped = ratio.clamp(0.9, 1.2)
    terms = {
        "cross_entropy": -row["weights"] * new,
        "importance_sampling": -ratio * advantages,
        "cispo": -clipped.detach() * advantages * new,
        "dro": -(new * advantages - beta / 2 * (new - old) ** 2),
    }
    return terms.get(name, -torch.minimum(ratio * advantages, clipped * advantages)).sum()


def expected(name: str, rows: DataProto) -> tuple[float, dict[str, Tensor]]:
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_path(), dtype=torch.float64, attn_implementation="eager"
    ).eval()
    total = 0.0
    columns = {key: rows.ragged(key).rows() for key in rows.columns}
    for number in range(len(rows)):
        row = {key: values[number][1:] for key, values in columns.items()}
        logits = model(input_ids=columns["input_ids"][number][None]).logits[0, :-1]
        new = logits.log_softmax(-1).gather(-1, row["targets"][:, None])[:, 0]
        doubles = {key: value.double() for key, value in row.items()}
        loss = formula(name, new, doubles)
        loss.backward()
        total += loss.item()
    return total, {key: p.grad for key, p in model.named_parameters()}


def measure(strategy: str, path: str, name: str, count: int, chunks: int) -> dict[str, Any]:
    """Return the loss and the gradients, after `chunks` calls of an engine, whose ranks take rows in turns."""
    model = EngineModel(path=path)
    config = EngineConfig(model=model, optim=OptimConfig(), device="cpu", micro_batch_size=5, max_tokens=40)
    engine: Any = build_engine(strategy, config)
    engine.init_model()
    engine.set_loss_fn(LOSSES[name].bind(OPTIONS[name]))
    rows, total = make_rows(count), 0.0
    with engine.train_mode():
        for part in rows.split(-(-count // chunks)):
            share = part.reorder(list(range(engine.seat.dp_rank, len(part), engine.seat.dp_size)))
            _, loss, _ = engine.forward_backward_step(share, REQUEST)
            total += float(loss)
    gradients = {key: engine.full_tensor(p.grad) for key, p in engine.module.hf.named_parameters()}
    return {"loss": total, **gradients}


def check(actual: dict[str, Any], name: str, count: int) -> None:
    loss, gradients = expected(name, make_rows(count))
    assert actual.pop("loss") == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert actual.keys() == gradients.keys()
    for key, gradient in gradients.items():
        error = (actual[key].double() - gradient).norm() / gradient.norm()
        assert error < 1e-5, f"{key}: relative error {error:.1e}"


@pytest.mark.parametrize(
    ("count", "chunks"), [(1, 1), pytest.param(64, 1, marks=pytest.mark.slow), (64, 3)], ids=["1", "64", "64_in_3"]
)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_equal_the_formula(name: str, count: int, chunks: int) -> None:
    check(measure("reference", model_path(), name, count, chunks), name, count)


def measure_rank(path: str, name: str) -> dict[str, Any]:
    return measure("fsdp", path, name, 64, 3)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("ppo", "gspo"))) for name in LOSSES]
)
def test_two_ranks_give_the_loss_and_gradients_of_the_formula(name: str) -> None:
    for actual in run_warm_ranks(measure_rank, 2, model_path(), name):
        check(actual, name, 64)
