"""Tests that need an accelerator: the contract with its collectives, several devices, half-precision kernels.

`make test-gpu` runs these; without an accelerator they are skipped.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.layouts import together

from camshaft.config.engine import EngineConfig, EngineModel, OptimConfig
from camshaft.contracts.engine.harness import EngineHarness
from camshaft.contracts.engine.ranks import RuleRanks
from camshaft.contracts.engine.suite import RULES
from camshaft.engine import engine_class

DEVICES = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
DEVICE = torch.accelerator.current_accelerator().type if DEVICES else "none"  # pyright: ignore
WORLDS = [world for world in (1, 2, 4) if world <= max(DEVICES, 1)]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not DEVICES, reason="requires an accelerator")]

FEATURES = ("", "offload", "offload_policy", "activation_offload", "selective", "lora", "gathered", "async_save")


@pytest.fixture(scope="module")
def problem(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str], str | None]]:
    """Check a rule in a folder and return its problem."""
    strategy, world, feature = request.param
    common_fields = together(feature) if feature else {}
    with RuleRanks(world, DEVICE) as ranks:
        yield lambda rule, folder: ranks.find_problem(rule, engine_class(strategy), folder, common_fields)


def _cases() -> Iterator[Any]:
    for strategy, features in (("fsdp2", FEATURES), ("fsdp1", ("",)), ("reference", ("",))):
        for world in WORLDS if strategy != "reference" else [1]:
            for feature in features:
                for rule in RULES:
                    name = f"{strategy}-{world}-{feature or 'plain'}-{rule.name.replace(' ', '_')}"
                    yield pytest.param((strategy, world, feature), rule.name, id=name)


@pytest.mark.parametrize(("problem", "rule"), list(_cases()), indirect=["problem"], scope="module")
def test_engine_keeps_rule_on_the_accelerator(
    problem: Callable[[str, str], str | None], rule: str, tmp_path: Path
) -> None:
    violation = problem(rule, str(tmp_path))
    assert violation is None, violation


def test_offloaded_parts_leave_the_device_between_phases(tmp_path: Path) -> None:
    harness = EngineHarness(engine_class("fsdp2"), tmp_path, DEVICE, together("offload"))
    engine: Any = harness.build()
    harness.step(engine, harness.batch)
    assert {str(engine.parts.device_of(part)) for part in ("model", "gradients", "optimizer")} == {"cpu"}
    with engine.eval_mode():
        assert engine.parts.device_of("model").type == DEVICE
        assert engine.parts.device_of("optimizer").type == "cpu"


def test_bfloat16_log_probs_are_near_those_of_float32(tmp_path: Path) -> None:
    """Variable-length flash attention with half-precision products agrees with the loop in float32."""
    harness = EngineHarness(engine_class("fsdp2"), tmp_path, DEVICE)
    half = harness.build(options={"mixed_precision": {"param_dtype": "bfloat16"}})
    exact, rounded = harness.infer(harness.build())["log_probs"], harness.infer(half)["log_probs"]
    assert not torch.equal(exact.values, rounded.values)  # pyright: ignore
    torch.testing.assert_close(rounded.values, exact.values, rtol=0.02, atol=0.02)


def test_an_engine_without_roles_trains_on_the_accelerator(tmp_path: Path) -> None:
    harness = EngineHarness(engine_class("fsdp2"), tmp_path, DEVICE)
    model = EngineModel(path=str(harness.model_folder))
    engine = engine_class("fsdp2")(EngineConfig(model=model, optim=OptimConfig(lr=1e-2), device=DEVICE))
    engine.init_model()
    engine.set_loss_fn(lambda data, predictions, ctx: (-predictions["log_probs"].values.sum() / ctx["num_tokens"], ctx))
    with engine.train_mode():
        losses = [engine.train_batch(harness.batch).loss for _ in range(10)]
    assert losses[-1] < losses[0]
