"""The training loop of the specification, line by line, on an engine of the package."""

from pathlib import Path
from typing import Any

import torch

from camshaft.config.engine import EngineConfig, EngineModel, OptimConfig
from camshaft.contracts.engine.harness import EngineHarness
from camshaft.dataproto import DataProto
from camshaft.engine.context import StepContext
from camshaft.engine.single import SingleDeviceEngine


def loss_fn(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[torch.Tensor, StepContext]:
    return -predictions["log_probs"].values.sum() / ctx["num_tokens"], ctx


def preprocess_fn(batch: DataProto, ctx: StepContext) -> tuple[DataProto, StepContext]:
    return batch, ctx


def postprocess_fn(outputs: Any, ctx: StepContext) -> tuple[Any, StepContext]:
    return outputs, ctx


def test_the_classic_training_loop_learns(tmp_path: Path) -> None:
    harness = EngineHarness(SingleDeviceEngine, tmp_path)
    train_loader = [harness.batch, harness.batch.reorder([3, 1, 4])]
    data = harness.batch.split(3)
    config = EngineConfig(
        model=EngineModel(path=str(harness.model_folder)), optim=OptimConfig(lr=1e-2), micro_batch_size=2
    )
    num_epochs, ctx, losses = 4, None, []

    # 1. Build and initialize engine
    engine = SingleDeviceEngine(config)
    engine.init_model()
    engine.set_loss_fn(loss_fn)

    # 2. Training loop
    for _epoch in range(num_epochs):
        for batch in train_loader:
            # a) zero gradients
            engine.optimizer_zero_grad()

            # b) forward + backward
            with engine.train_mode():
                preds, loss, ctx = engine.forward_backward_step(
                    batch, ctx, forward_only=False, preprocess_fn=preprocess_fn, postprocess_fn=postprocess_fn
                )  # fmt: skip

            # c) update and schedule
            grad_norm = engine.optimizer_step()
            current_lr = engine.lr_scheduler_step()
            losses.append(float(loss))
            assert preds["log_probs"].lengths.tolist() == batch["input_ids"].lengths.tolist()
            assert grad_norm > 0
            assert current_lr == 1e-2

    # 3. Evaluation
    with engine.eval_mode():
        for micro_batch in data:
            preds, ctx = engine.forward_backward_step(
                micro_batch, ctx, forward_only=True, preprocess_fn=preprocess_fn, postprocess_fn=postprocess_fn
            )
            assert len(preds["log_probs"]) == len(micro_batch)

    assert losses[-2] < 0.8 * losses[0], losses
