"""Three optimizer steps of the sharded engine equal three steps of the reference engine in every layout."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.layouts import ALONE, OLDER, Layout, together
from support.ranks import run_warm_ranks

from camshaft.config.engine import OptimConfig
from camshaft.contracts.engine.harness import EngineHarness
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import engine_class
from camshaft.engine.base import BaseEngine
from camshaft.engine.single import SingleDeviceEngine

STEPS = 3


def _batch() -> DataProto:
    """Return rows that are long enough for activation offloading to move tensors."""
    random = torch.Generator().manual_seed(23)
    lengths = torch.tensor([90, 33, 120, 57, 64, 101, 8, 75])
    count = int(lengths.sum())
    ids = Ragged(torch.randint(3, 30, (count,), generator=random), lengths)
    mask = (torch.rand(count, generator=random) < 0.7) & (ids.positions() > 0)
    advantages = torch.randn(count, generator=random, dtype=torch.float64)
    return DataProto.from_dict({"input_ids": ids, "loss_mask": ids.like(mask), "advantages": ids.like(advantages)})


def _train(harness: EngineHarness, engine: BaseEngine) -> dict[str, Any]:
    batch, steps, before = harness.share(engine, _batch()), [], harness.weights(engine)
    for _ in range(STEPS):
        with engine.train_mode():
            steps.append(engine.train_batch(batch))
        engine.lr_scheduler_step()
    return {
        "loss": [step.loss for step in steps],
        "norm": [step.grad_norm for step in steps],
        "before": before,
        "weights": harness.weights(engine),
    }


def _run(strategy: str, folder: str, common_fields: dict[str, Any]) -> dict[str, Any] | None:
    harness = EngineHarness(engine_class(strategy), folder, common_fields=common_fields)
    actual = _train(harness, harness.build())
    return actual if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0 else None


def _fields(dtype: str) -> dict[str, Any]:
    optim = OptimConfig(lr=1e-3, lr_scheduler_type="cosine", lr_warmup_steps=2, total_training_steps=4)
    return {"optim": optim, "grad_clip": 0.5, "dtype": dtype, "micro_batch_size": 3}


def _compared(layout: Layout, dtype: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of (the sharded engine, the reference engine)."""
    of_model = {name: value for name, value in layout.common_fields.items() if name == "lora"}
    reference = EngineHarness(SingleDeviceEngine, folder / "reference", common_fields=_fields(dtype) | of_model)
    expected = _train(reference, reference.build())
    common_fields = _fields(dtype) | layout.common_fields
    if "max_tokens" in layout.common_fields:
        common_fields |= {"max_tokens": 150, "micro_batch_size": None}
    actual = run_warm_ranks(_run, layout.world, layout.strategy, str(folder / "sharded"), common_fields, timeout=120)[0]
    return actual, expected


def _furthest(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of a weight, relative to the largest entry of its tensor.

    Key biases are a few thousandths and have a zero gradient except for rounding, because softmax ignores them. AdamW
    divides that gradient by its magnitude, so the biases are compared with a typical weight instead.
    """
    return max(
        float((tensor - expected[name]).abs().max() / expected[name].abs().max().clamp(min=0.05))
        for name, tensor in actual.items()
    )


def _check(actual: dict[str, Any], expected: dict[str, Any], bound: float) -> None:
    for name in ("loss", "norm"):
        for a, b in zip(actual[name], expected[name], strict=True):
            assert math.isclose(a, b, rel_tol=bound), f"{name}: {a}, not {b}"
    assert actual["weights"].keys() == expected["weights"].keys()
    assert _furthest(actual["weights"], expected["weights"]) <= bound


LAYOUTS = ALONE | {name: OLDER[name] for name in ("fsdp1_two", "fsdp1_hsdp+sp2")}


FAST = {"sp2", "tp2", "lora", "offload"}
"""The layouts that differ most, which `make test` compares."""


def _cases() -> Iterator[Any]:
    for name in LAYOUTS:
        yield pytest.param(name, marks=() if name in FAST else _mark(name))


def _mark(name: str) -> pytest.MarkDecorator:
    return pytest.mark.matrix if name == "compiled" else pytest.mark.slow


@pytest.mark.parametrize("name", list(_cases()))
def test_three_steps_in_float32(name: str, tmp_path: Path) -> None:
    _check(*_compared(LAYOUTS[name], "float32", tmp_path), bound=1e-5)


@pytest.mark.parametrize(
    "feature", ["", *(pytest.param(n, marks=pytest.mark.slow) for n in ("hsdp", "sp2", "tp2", "lora"))]
)
def test_three_steps_in_bfloat16_with_float32_weights(feature: str, tmp_path: Path) -> None:
    """Losses agree within 0.1 %, norms within 1 %, and the change of all weights within 6 % of its length."""
    common_fields = together(feature) if feature else {}
    common_fields = common_fields | {
        "options": common_fields.get("options", {}) | {"mixed_precision": {"param_dtype": "bfloat16"}}
    }
    actual, expected = _compared(Layout(4 if feature == "hsdp" else 2, common_fields), "float32", tmp_path)
    for name, bound in (("loss", 1e-3), ("norm", 1e-2)):
        for a, b in zip(actual[name], expected[name], strict=True):
            assert math.isclose(a, b, rel_tol=bound), f"{name}: {a}, not {b}"
            assert a != b, "nothing was computed in bfloat16"
    assert {weight.dtype for weight in actual["weights"].values()} == {torch.float32}
    way, off = 0.0, 0.0
    for name, weight in actual["weights"].items():
        way += float((expected["weights"][name] - expected["before"][name]).double().norm() ** 2)
        off += float((expected["weights"][name] - weight).double().norm() ** 2)
    assert math.sqrt(off / way) < 0.06
