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

from camshaft.checkpoint.export import Probe, export_hugging_face
from camshaft.config.engine import EngineModel, OptimConfig
from camshaft.contracts.engine.harness import TINY, EngineHarness, Tolerances
from camshaft.contracts.engine.oracle import oracle_outputs
from camshaft.contracts.engine.suite import RULES
from camshaft.controller import Dispatch, Options, Pool, PoolSpec, Worker, register, spawn
from camshaft.controller.local import process_pool
from camshaft.engine import BaseEngine, engine_class
from camshaft.errors import WorkerError
from camshaft.models.tiny import make_tiny_model
from support.oracle_runs import TRAINING, Oracle, compare_with_oracle

NUMBERS = {
    "predictions",
    "step equals oracle",
    "norm is before clipping",
    "split invariance",
    "resume is bitwise",
    "weights have hugging face names",
    "exact kl",
}
"""Rules about numbers and files."""
BFLOAT16 = {"mixed_precision": {"param_dtype": "bfloat16"}}
"""Options of an engine that computes in bfloat16 and updates float32 weights."""


class ModelHarness(EngineHarness):
    """A harness whose model has the arguments `sizes` of `make_tiny_model`."""

    sizes: dict[str, Any]

    @property
    def tolerances(self) -> Tolerances:
        """Accepted differences, measured on the model of the contract."""
        return EngineHarness(self.engine_class, self.folder / "contract", self.device).tolerances

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
    config = harness.config(**TRAINING, dtype=dtype)
    engines = harness.engine_class(config), engine_class("reference")(config.model_copy(update={"options": {}}))
    for engine in engines:
        engine.init_model()
        engine.set_loss_fn(harness.loss_fn("causal_lm"))
    return engines


def infer_alone(engine: BaseEngine, harness: ModelHarness) -> Any:
    """Return the predictions of an engine in this process for the whole batch."""
    with engine.eval_mode():
        return engine.infer_batch(harness.batch)


def assert_equal(weights: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare the weights of two engines bitwise."""
    assert weights.keys() == expected.keys()
    assert [name for name, weight in expected.items() if not torch.equal(weights[name], weight)] == []


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
    def train(self, sizes: dict[str, Any], options: dict[str, Any], folder: str, save: bool = False) -> None:
        """Compare three steps with the oracle, and save a checkpoint."""
        harness = make_harness(sizes, options, folder)
        harness.batch.columns.pop("log_q")
        harness.batch["input_ids"].values[::5] = 0  # the padding token, whose embedding receives no gradient
        engine, _ = make_engines(harness)
        compare_with_oracle(harness, engine, Oracle(harness, engine), 3)
        if save:
            harness.save(engine, harness.folder / "checkpoint")
            weights = harness.weights(engine)
            harness.on_rank_zero(lambda: torch.save(weights, harness.folder / "weights.pt"))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def resume(self, sizes: dict[str, Any], options: dict[str, Any], folder: str) -> None:
        """Load the checkpoint of `train`, and compare the next steps with an oracle that continues its own run."""
        harness = make_harness(sizes, options, folder)
        harness.batch.columns.pop("log_q")
        harness.batch["input_ids"].values[::5] = 0
        engine, _ = make_engines(harness)
        oracle = Oracle(harness, engine)
        for _ in range(3):
            oracle.step()
        engine.load_checkpoint(f"{folder}/checkpoint")
        assert_equal(harness.weights(engine), torch.load(f"{folder}/weights.pt"))
        compare_with_oracle(harness, engine, oracle, 2)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def exchange_exports(self, sizes: dict[str, Any], options: dict[str, Any], folder: str) -> None:
        """Export trained weights as Hugging Face folders, and load each folder into engines of other strategies."""
        harness = make_harness(sizes, options, folder)
        harness.batch.columns.pop("log_q")
        engine, reference = make_engines(harness)
        sharded = engine_class("fsdp")(reference.config)
        sharded.init_model()
        sharded.set_loss_fn(harness.loss_fn("causal_lm"))
        engines = {"megatron": engine, "reference": reference, "fsdp": sharded}
        for source, trained in engines.items():
            harness.train(trained, harness.batch)
            target = f"{folder}/{source}_huggingface"
            with trained.eval_mode():
                export_hugging_face(
                    trained.named_weights(), trained.config.model, target, check=Probe(trained.infer_batch),
                    write=torch.distributed.get_rank() == 0,
                )  # fmt: skip
            torch.distributed.barrier()
            for name, other in engines.items():
                if "megatron" in (name, source):
                    config = other.config.model_copy(update={"model": EngineModel(path=target)})
                    loaded = engine_class(name)(config)
                    loaded.init_model()
                    assert_equal(harness.weights(loaded), harness.weights(trained))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def compare_in_bfloat16(self, sizes: dict[str, Any], options: dict[str, Any], folder: str) -> None:
        """Compare the rounding errors of log-probs and gradients with those of the reference and fsdp engines.

        The errors are differences from the oracle in float32.
        """
        harness = make_harness(sizes, options | BFLOAT16, folder)
        harness.batch.columns.pop("log_q")
        engine, sharded = harness.build(), engine_class("fsdp")(harness.config(options=BFLOAT16))
        reference = engine_class("reference")(harness.config(forward_only=True, dtype="bfloat16", options={}))
        for other in (sharded, reference):
            other.init_model()
        sharded.set_loss_fn(harness.loss_fn("causal_lm"))
        expected: Any = oracle_outputs(harness.oracle_model(engine, "causal_lm"), harness.batch, "causal_lm")
        errors = []
        for log_probs in (harness.infer(engine)["log_probs"], infer_alone(reference, harness)["log_probs"]):
            errors.append(float((log_probs.values - expected["log_probs"].values).abs().max()))
        assert 0 < errors[0] < 3 * errors[1], errors
        loss, norm, gradients = harness.oracle_gradients(engine, "causal_lm")
        errors = []
        for trained in (engine, sharded):
            step = harness.step(trained, harness.batch)
            assert (step.loss, step.grad_norm) == pytest.approx((loss, norm), rel=0.02)
            differences = [step.gradients[name] - gradient for name, gradient in gradients.items()]
            errors.append(float(torch.stack([difference.norm() for difference in differences]).norm()) / norm)
        assert 0 < errors[0] < 3 * errors[1], errors
        # The rounding unit of bfloat16 is a hundred times as large as this learning rate.
        config = harness.config(optim=OptimConfig(lr=1e-6, weight_decay=0.0))
        engine = harness.engine_class(config)
        engine.init_model()
        engine.set_loss_fn(harness.loss_fn("causal_lm"))
        before = harness.weights(engine)
        harness.train(engine, harness.batch)
        after = harness.weights(engine)
        for name in before:
            if name.endswith("proj.weight") or ".experts." in name:
                assert before[name].dtype == torch.float32
                assert (after[name] != before[name]).float().mean() > 0.9, name

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def name_gradient(self, options: dict[str, Any], folder: str) -> None:
        """Name the parameter of a gradient that is not finite."""
        harness = make_harness({}, options, folder)
        engine = harness.build()
        harness.train(engine, harness.batch)
        assert engine.non_finite_gradient() is None
        engine.set_loss_fn(lambda data, outputs, ctx: (outputs["log_probs"].values.sum() * float("nan"), ctx))
        assert harness.train(engine, harness.batch).skipped
        assert engine.non_finite_gradient() in harness.weights(engine)

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
    """Processes that call methods of `_Checker`; they are replaced after an error."""

    def __init__(self, world: int):
        self._world = world
        self._pool: Pool | None = None
        self._checker: Any = None

    def __getattr__(self, name: str) -> Any:
        """Return a method of `_Checker`, which raises the first error of a rank."""

        def call(*arguments: Any, **keywords: Any) -> None:
            if self._pool is None:
                spec = PoolSpec("megatron", ranks_per_node=self._world)
                self._pool = process_pool(spec, Options(timeout=300, preload=(__name__,)))
                self._checker = spawn(_Checker, pool=self._pool, name="megatron", timeout=300)
            try:
                getattr(self._checker, name)(*arguments, **keywords)
            except WorkerError:
                self._pool = None
                raise

        return call

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
