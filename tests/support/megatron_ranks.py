"""Check rules of the engine contract on Megatron engines with models of other families and sizes.

with ModelRanks(2) as ranks:
    ranks.check("step equals oracle", {"family": "mixtral", "num_local_experts": 4}, {}, folder)
    ranks.compare_with_reference({}, {"tensor_model_parallel_size": 2}, folder)
"""

import contextlib
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from camshaft.config.engine import OptimConfig
from camshaft.contracts.engine.harness import TINY, EngineHarness
from camshaft.contracts.engine.suite import RULES
from camshaft.controller import Dispatch, Options, PoolSpec, Worker, register, spawn
from camshaft.controller.local import process_pool
from camshaft.engine import BaseEngine, engine_class
from camshaft.models.tiny import make_tiny_model


class ModelHarness(EngineHarness):
    """A harness whose model has the arguments `sizes` of `make_tiny_model`."""

    sizes: dict[str, Any]

    @cached_property
    def model_folder(self) -> Path:
        folder = self.folder / "model"
        self.on_rank_zero(lambda: make_tiny_model(folder, **{**TINY, **self.sizes}))
        return folder


def make_harness(sizes: dict[str, Any], options: dict[str, Any], folder: str) -> ModelHarness:
    harness = ModelHarness(engine_class("megatron"), folder, common_fields={"options": options})
    harness.sizes = sizes
    return harness


def make_engines(harness, dtype="float32") -> tuple[BaseEngine, BaseEngine]:
    """Return an engine and a reference engine with a usual optimizer and the same weights."""
    config = harness.config(optim=OptimConfig(lr=1e-3), grad_clip=0.1, micro_batch_size=3, dtype=dtype)
    engines = harness.engine_class(config), engine_class("reference")(config.model_copy(update={"options": {}}))
    for engine in engines:
        engine.init_model()
        engine.set_loss_fn(harness.loss_fn("causal_lm"))
    return engines


class _Checker(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check(self, rule: str, sizes: dict[str, Any], options: dict[str, Any], folder: str) -> None:
        next(each for each in RULES if each.name == rule).check(make_harness(sizes, options, folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def compare_with_reference(self, sizes: dict[str, Any], options: dict[str, Any], folder: str) -> None:
        """Compare three steps, and steps after each engine has loaded a checkpoint of the other one."""
        harness = make_harness(sizes, options, folder)
        harness.batch.columns.pop("log_q")  # its size is that of the usual vocabulary
        harness.batch["input_ids"].values[::5] = 0  # the padding token, whose embedding receives no gradient
        engine, reference = make_engines(harness)
        for name, weight in harness.weights(engine).items():  # weights survive the conversion bitwise
            assert torch.equal(weight, dict(reference.named_weights())[name]), name
        compare_steps(harness, engine, reference, 3)
        harness.save(engine, harness.folder / "megatron")
        reference.load_checkpoint(f"{folder}/megatron")
        compare_steps(harness, engine, reference, 1)
        harness.on_rank_zero(lambda: reference.save_checkpoint(f"{folder}/reference"))
        engine.load_checkpoint(f"{folder}/reference")
        for name, weight in harness.weights(engine).items():
            assert torch.equal(weight, dict(reference.named_weights())[name]), name
        compare_steps(harness, engine, reference, 2)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def interleave_engines(self, layouts: list[dict[str, Any]], folder: str) -> None:
        """Compare engines of different layouts, used in turn, with engines used one after the other."""
        harnesses = [make_harness({}, options, folder) for options in layouts]
        alone = []
        for harness in harnesses:
            engine, _ = make_engines(harness)
            alone.append([harness.train(engine, harness.batch) for _ in range(3)])
        engines = [make_engines(harness)[0] for harness in harnesses]
        for number in range(3):
            for engine, harness, expected in zip(engines, harnesses, alone, strict=True):
                step = harness.train(engine, harness.batch)
                assert (step.loss, step.grad_norm) == (expected[number].loss, expected[number].grad_norm)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def move_weights(self, options: dict[str, Any], folder: str) -> None:
        """Compare steps with those of an engine whose parameters get new memory between steps, as a move does."""
        harness = make_harness({}, options, folder)
        (engine, _), (moved, _) = make_engines(harness), make_engines(harness)
        for _ in range(3):
            module: Any = moved.module  # pyright: ignore[reportAttributeAccessIssue]
            module.to(torch.float64).to(torch.float32)
            expected, step = harness.train(engine, harness.batch), harness.train(moved, harness.batch)
            assert (step.loss, step.grad_norm) == (expected.loss, expected.grad_norm)


def compare_steps(harness: ModelHarness, engine: BaseEngine, reference: BaseEngine, steps: int) -> None:
    """Compare losses, gradient norms and weights of training steps, within 1e-5."""
    for _ in range(steps):
        step, expected = harness.train(engine, harness.batch), harness.train(reference, harness.batch)
        assert step.loss == pytest.approx(expected.loss, rel=1e-5)
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    for name, weight in harness.weights(engine).items():
        torch.testing.assert_close(weight, dict(reference.named_weights())[name], rtol=1e-5, atol=1e-5, msg=name)


class ModelRanks(contextlib.AbstractContextManager["ModelRanks"]):
    """Processes that check rules on Megatron engines."""

    def __init__(self, world: int):
        self._pool = process_pool(PoolSpec("megatron", ranks_per_node=world), Options(timeout=300, preload=(__name__,)))
        self._checker = spawn(_Checker, pool=self._pool, name="megatron", timeout=300)

    def __getattr__(self, name: str) -> Any:
        """Return a method of `_Checker`, which raises the first error of a rank."""
        return getattr(self._checker, name)

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
