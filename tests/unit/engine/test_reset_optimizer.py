"""An engine whose optimizer is reset makes its next update like the first one."""

import pytest
import torch
from support.tiny import tiny_batch, tiny_folder

from camshaft.engine import BaseEngine, EngineConfig, EngineModel, OptimConfig, StepHyperparameters, build_engine
from camshaft.errors import EngineError

STEP = StepHyperparameters(lr=0.1, betas=(0.9, 0.95), eps=1.0, weight_decay=0.0)


@pytest.mark.parametrize("is_reset", [True, False])
def test_the_update_after_a_reset_is_a_first_update(is_reset: bool) -> None:
    engine = build_engine("reference", EngineConfig(model=EngineModel(path=str(tiny_folder())), optim=OptimConfig()))
    engine.init_model()
    engine.set_loss_fn(lambda data, predictions, ctx: (-predictions["log_probs"].values.sum() / ctx["num_tokens"], ctx))
    with engine.train_mode():
        for seed in (0, 1):
            engine.optimizer_zero_grad()
            engine.forward_backward_step(tiny_batch(seed=seed))
            if seed == 0:
                engine.optimizer_step(STEP)
        if is_reset:
            engine.reset_optimizer()
        name, parameter = next(iter(engine.named_parameters().items()))  # pyright: ignore[reportAttributeAccessIssue]
        gradient, before = parameter.grad.clone(), parameter.detach().clone()
        engine.optimizer_step(STEP)
        # Of AdamW without moments: m / (1 - b1) = g and v / (1 - b2) = g^2.
        expected = before - STEP.lr * gradient / (gradient.abs() + STEP.eps)
    assert torch.allclose(parameter, expected, atol=1e-6) == is_reset, name


def test_an_engine_without_a_reset_names_the_remedy() -> None:
    engine = build_engine("reference", EngineConfig(model=EngineModel(path=str(tiny_folder()))))
    with pytest.raises(EngineError, match="cannot reset its optimizer; load the checkpoint into a new engine"):
        BaseEngine.reset_optimizer(engine)
