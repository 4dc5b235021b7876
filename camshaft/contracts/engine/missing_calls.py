"""The rule about errors of calls that come too early, or that need another setting."""

import inspect
from typing import Any

from camshaft.contracts.engine.harness import EngineHarness
from camshaft.contracts.rules import expect_error
from camshaft.engine.base import BaseEngine

STATELESS = (
    *("check_not_shared", "yields_live_weights", "non_finite_gradient", "overflowing_weight", "notices"),
    "reset_optimizer",
)
"""Members of `BaseEngine` that answer without a model, unless an engine overrides them."""


def errors_name_the_missing_call(harness: EngineHarness) -> None:
    """A call before init_model, a training step before set_loss_fn, and an update of a forward-only engine raise an
    error that names the missing call or setting."""
    folder = str(harness.folder / "unused")
    arguments: dict[str, tuple[Any, ...]] = {
        "forward_backward_step": (harness.batch,),
        "train_batch": (harness.batch,),
        "infer_batch": (harness.batch,),
        "shard_data": (harness.batch,),
        "unshard_data": (harness.batch,),
        "set_loss_fn": (harness.loss_fn("causal_lm"),),
        "to": ("cpu",),
        "save_checkpoint": (folder,),
        "load_checkpoint": (folder,),
    }
    uninitialized = harness.engine_class(harness.config())
    for name, member in vars(BaseEngine).items():
        if name.startswith("_") or name in ("init_model", "wait_for_checkpoint"):
            continue
        if not isinstance(member, property) and not callable(member):
            continue
        if name in STATELESS and getattr(harness.engine_class, name) is member:
            continue
        expect_error(
            lambda name=name: use_member(uninitialized, name, arguments.get(name, ())),
            "init_model",
            f"{name} raised no error before init_model",
        )
    engine = harness.build(set_loss=False)
    with engine.train_mode():
        expect_error(
            lambda: engine.forward_backward_step(harness.batch),
            "set_loss_fn",
            "forward_backward_step raised no error before set_loss_fn",
        )
    forward_only = harness.build(forward_only=True)
    expect_error(forward_only.optimizer_step, "forward-only", "optimizer_step of a forward-only engine raised no error")
    base_model = harness.build(lora=None)
    expect_error(
        lambda: base_model.disable_adapter().__enter__(),
        "adapter",
        "disable_adapter without an adapter raised no error",
    )


def use_member(engine: BaseEngine, name: str, arguments: tuple[Any, ...]) -> None:
    """Read a property, or call a method; start a generator or enter a context that it returns."""
    member = getattr(engine, name)
    if callable(member):
        result: Any = member(*arguments)
        if inspect.isgenerator(result):
            next(result)
        elif hasattr(result, "__enter__"):
            with result:
                pass
