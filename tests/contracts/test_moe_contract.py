"""Engines train mixture-of-experts models as `transformers` does, and return the weights of the folder bitwise."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.moe import MODELS, MoEHarness, train_oracle
from support.ranks import run_warm_ranks

from camshaft.checkpoint import Probe, export_hugging_face
from camshaft.config.engine import OptimConfig
from camshaft.contracts.engine.suite import RULES
from camshaft.engine import engine_class

STEPS = 3
OPTIM = OptimConfig(lr=1e-3, eps=1e-6, weight_decay=0.01)
GRAD_CLIP = 0.5
RULE_NAMES = (
    "step equals oracle",
    "predictions",
    "split invariance",
    "prefix sharing",
    "resume is bitwise",
    "no wait per micro batch",
)
"""Rules of the engine contract about numbers."""


def _train(strategy: str, folder: str, sizes: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the losses, norms and weights of three steps on all ranks of the default group."""
    fields = {"optim": OPTIM, "grad_clip": GRAD_CLIP, "micro_batch_size": 3} | fields
    harness = MoEHarness(engine_class(strategy), folder, fields, sizes)
    engine = harness.build()
    initial = harness.weights(engine)
    steps = [harness.train(engine, harness.batch) for _ in range(STEPS)]
    return {
        "losses": [step.loss for step in steps],
        "norms": [step.grad_norm for step in steps],
        "initial": initial,
        "weights": harness.weights(engine),
    }


def _check_rule(strategy: str, folder: str, sizes: dict[str, Any], rule: str) -> None:
    next(each for each in RULES if each.name == rule).check(MoEHarness(engine_class(strategy), folder, None, sizes))


def _export(strategy: str, folder: str, sizes: dict[str, Any]) -> None:
    harness = MoEHarness(engine_class(strategy), folder, None, sizes)
    engine = harness.build()
    with engine.eval_mode():
        is_writer = not dist.is_initialized() or dist.get_rank() == 0
        export_hugging_face(
            engine.named_weights(),
            engine.config.model,
            f"{folder}/exported",
            check=Probe(engine.infer_batch),
            write=is_writer,
        )


def _cases(*fast: tuple[str, str]) -> list[Any]:
    """Return (strategy, number of ranks, model) of all cases; those not in `fast` are slow."""
    return [
        pytest.param(strategy, world, model, marks=[] if (strategy, model) in fast else pytest.mark.slow)
        for strategy, world in (("reference", 1), ("fsdp", 2), ("fsdp1", 2))
        for model in MODELS
    ]


def _run(function: Any, world: int, *args: Any) -> Any:
    return function(*args) if world == 1 else run_warm_ranks(function, world, *args, timeout=240)[0]


@pytest.mark.parametrize(("strategy", "world", "model"), _cases(("reference", "qwen3_moe"), ("fsdp", "qwen3_moe")))
def test_three_steps_equal_those_of_transformers(strategy: str, world: int, model: str, tmp_path: Path) -> None:
    sizes = MODELS[model]
    harness = MoEHarness(engine_class("reference"), tmp_path, None, sizes)
    losses, norms, weights = train_oracle(
        harness.model_folder, harness.batch, STEPS, OPTIM.lr, OPTIM.eps, grad_clip=GRAD_CLIP
    )
    actual = _run(_train, world, strategy, str(tmp_path), sizes, {})
    for name, expected in (("losses", losses), ("norms", norms)):
        for a, b in zip(actual[name], expected, strict=True):
            assert math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-5), name
    assert actual["weights"].keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(actual["weights"][name], weight, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: n + m)
        assert not torch.equal(actual["weights"][name], actual["initial"][name]), name


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULE_NAMES)
@pytest.mark.parametrize(("strategy", "world", "model"), _cases())
def test_engine_keeps_rule(strategy: str, world: int, model: str, rule: str, tmp_path: Path) -> None:
    _run(_check_rule, world, strategy, str(tmp_path), MODELS[model], rule)


@pytest.mark.parametrize(("strategy", "world", "model"), _cases(("reference", "qwen3_moe")))
def test_exported_files_equal_the_files_of_the_model_folder(
    strategy: str, world: int, model: str, tmp_path: Path
) -> None:
    _run(_export, world, strategy, str(tmp_path), MODELS[model])
    expected, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "exported"))
    assert exported.keys() == expected.keys()
    assert any(".experts.0." in name for name in expected), "the files hold one tensor per expert"
    for name, tensor in expected.items():
        assert torch.equal(exported[name], tensor), name
