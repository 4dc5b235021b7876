"""Rule of the engine contract about hyperparameters of single optimizer steps."""

from __future__ import annotations

from typing import Any

import torch

from camshaft.config.engine import OptimConfig
from camshaft.contracts.engine.harness import EngineHarness, expect_close, expect_equal
from camshaft.contracts.engine.oracle import oracle_step
from camshaft.contracts.rules import expect
from camshaft.engine.base import BaseEngine, StepHyperparameters

CLIPPED = StepHyperparameters(lr=0.02, betas=(0.5, 0.6), eps=0.2, weight_decay=0.3, clip_grad=1e-2)
FREE = StepHyperparameters(lr=0.3, betas=(0.8, 0.9), eps=0.05, weight_decay=0.0)
STEPS = (None, CLIPPED, FREE, CLIPPED, None)
"""Hyperparameters of each step; None for those of the config and the schedule."""


def hyperparameters_of_a_step(harness: EngineHarness) -> None:
    """Hyperparameters of a step hold for this step only, and are not saved with the schedule. Updates with changing
    hyperparameters equal those of torch.optim.AdamW. An engine may declare that it does not support them."""
    if not harness.engine_class.capabilities.supports_step_hyperparameters:
        return
    optim = OptimConfig(lr=0.1, betas=(0.7, 0.8), eps=0.1, weight_decay=0.1, lr_warmup_steps=2)
    engine = harness.build(optim=optim, lora=None)
    model: Any = harness.oracle_model(engine, "causal_lm")
    adamw = torch.optim.AdamW(model.parameters())
    of_config = StepHyperparameters(optim.lr / 2, optim.betas, optim.eps, optim.weight_decay)
    for number, step in enumerate(STEPS):
        norm, gradients = oracle_step(model, harness.batch, "causal_lm")[1:]
        current = step or of_config
        scale = min(1.0, current.clip_grad / norm) if current.clip_grad else 1.0
        for name, parameter in model.named_parameters():
            parameter.grad = scale * gradients[name]
        adamw.param_groups[0].update(
            lr=current.lr, betas=current.betas, eps=current.eps, weight_decay=current.weight_decay
        )
        adamw.step()
        actual = _step(harness, engine, step)
        expect_close(actual, norm, harness.gradient_tolerance, f"the gradient norm of step {number} with {step}")
        expect(
            engine.learning_rate == optim.lr / 2,
            f"after a step with {step}, the learning rate of the schedule is {engine.learning_rate}, not "
            f"{optim.lr / 2}",
        )
        expected = dict(model.named_parameters())
        for name, weight in harness.weights(engine).items():
            subject = f"{name} after step {number} with {step}"
            expect_close(weight, expected[name].detach(), harness.gradient_tolerance, subject)
    harness.save(engine, harness.folder / "saved")
    loaded_engine = harness.build(optim=optim, lora=None)
    loaded_engine.load_checkpoint(str(harness.folder / "saved"))
    for each in (engine, loaded_engine):
        each.lr_scheduler_step()
        harness.train(each, harness.batch)
    expect_equal(harness.weights(loaded_engine), harness.weights(engine), "weights of the step after a save and a load")


def _step(harness: EngineHarness, engine: BaseEngine, step: StepHyperparameters | None) -> float:
    """Run one update and return its gradient norm. The argument is passed only if it is given."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_step(harness.share(engine, harness.batch))
        return engine.optimizer_step() if step is None else engine.optimizer_step(step)
