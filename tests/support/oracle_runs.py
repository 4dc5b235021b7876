"""Train a transformers model beside an engine, and compare the steps of both.

oracle = Oracle(harness, engine)                 # starts from the weights of the engine
compare_with_oracle(harness, engine, oracle, 3)  # losses, gradient norms and weights, within 1e-5
"""

from typing import Any

import pytest
import torch

from camshaft.config.engine import OptimConfig
from camshaft.contracts.engine.harness import EngineHarness
from camshaft.contracts.engine.oracle import oracle_step
from camshaft.engine import BaseEngine

TRAINING: dict[str, Any] = {"optim": OptimConfig(lr=1e-3, eps=1e-5), "grad_clip": 0.1, "micro_batch_size": 3}
"""Config fields of an engine that the oracle follows.

AdamW's eps is larger than the rounding errors of gradients, which the division by small gradients would amplify.
"""


class Oracle:
    """Trains a transformers model from the engine's weights, one row at a time."""

    def __init__(self, harness: EngineHarness, engine: BaseEngine):
        optim = engine.config.optim
        assert optim is not None
        self.batch, self.grad_clip = harness.batch, engine.config.grad_clip
        self.model: Any = harness.oracle_model(engine, "causal_lm")
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
        )

    def step(self) -> tuple[float, float]:
        """Run one step and return (loss, gradient norm)."""
        loss, norm, _ = oracle_step(self.model, self.batch, "causal_lm")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
        self.optimizer.step()
        return loss, norm


def compare_with_oracle(harness: EngineHarness, engine: BaseEngine, oracle: Oracle, steps: int) -> None:
    """Compare losses, gradient norms and weights of training steps, within 1e-5."""
    for number in range(steps):
        step, expected = harness.train(engine, harness.batch), oracle.step()
        actual = step.loss, step.grad_norm
        assert actual == pytest.approx(expected, rel=1e-5), f"step {number}: {actual}, expected {expected}"
    for name, weight in harness.weights(engine).items():
        torch.testing.assert_close(weight, oracle.model.get_parameter(name), rtol=1e-5, atol=1e-6, msg=name)
