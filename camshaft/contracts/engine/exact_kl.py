"""Rules of the engine contract that an exact KL divergence over the vocabulary depends on."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from camshaft.contracts.engine.adapters import LORA
from camshaft.contracts.engine.harness import EngineHarness, close, same_bits
from camshaft.contracts.engine.oracle import gradients_of, oracle_outputs
from camshaft.contracts.rules import expect, expect_error
from camshaft.dataproto import DataProto
from camshaft.engine.base import BaseEngine, PreprocessFn, StepContext
from camshaft.errors import EngineError

REQUEST = StepContext(outputs=("log_probs", "full_kl"), temperature=0.7)


def exact_kl(harness: EngineHarness) -> None:
    """A loss of full_kl and log_probs has the same gradients as autograd over the whole vocabulary, for any split.
    full_kl without the column log_q raises an error that names the column."""
    variants: list[dict[str, Any]] = [{}, {"micro_batch_size": 3}, {"micro_batch_size": 1}]
    for changes in variants:
        engine = harness.build(**changes)
        engine.set_loss_fn(_loss)
        loss, expected = _oracle(harness, engine)
        result = harness.step(engine, harness.batch, REQUEST)
        close(torch.tensor(result.loss), loss, harness.tolerance, f"a loss of full_kl with {changes}")
        expect(
            result.gradients.keys() == expected.keys(),
            f"gradients of {sorted(result.gradients.keys() ^ expected.keys())}",
        )
        for name, gradient in expected.items():
            subject = f"gradient of {name} in a loss of full_kl with {changes}"
            close(result.gradients[name], gradient, harness.gradient_tolerance, subject)
    engine = harness.build()
    with engine.eval_mode():
        expect_error(
            lambda: engine.infer_batch(harness.batch.drop("log_q"), REQUEST),
            "log_q",
            "full_kl of a batch without log_q",
        )


def inference_within_a_step(harness: EngineHarness) -> None:
    """infer_batch inside a preprocess_fn, in eval_mode and with the adapter disabled, does not change the training
    step."""
    dropout: dict[str, Any] = {"override_config": {"attention_dropout": 0.5}, "micro_batch_size": 3}
    variants: list[dict[str, Any]] = [dropout, dropout | {"lora": LORA}]
    for changes in variants:
        try:
            alone, inferring = harness.build(**changes), harness.build(**changes)
        except EngineError:  # the rule about adapters checks this error
            continue
        torch.manual_seed(29)  # the random state of dropout
        expected = harness.step(alone, harness.batch)
        torch.manual_seed(29)
        result = harness.step(inferring, harness.batch, preprocess_fn=_inferring(inferring))
        expect(
            (result.loss, result.grad_norm) == (expected.loss, expected.grad_norm),
            "loss or norm of a step with an infer_batch inside",
        )
        same_bits(result.gradients, expected.gradients, "gradients of a step with an infer_batch inside")


def _inferring(engine: BaseEngine) -> PreprocessFn:
    def infer(data: DataProto, ctx: StepContext) -> tuple[DataProto, StepContext]:
        without = engine.disable_adapter() if engine.config.model.lora is not None else nullcontext()
        with without, engine.eval_mode():
            engine.infer_batch(data, StepContext(outputs=("distribution",)))
        return data, ctx

    return infer


def _loss(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
    counted = data["loss_mask"].values
    return ((predictions["full_kl"].values - predictions["log_probs"].values) * counted).sum() / ctx["num_tokens"], ctx


def _oracle(harness: EngineHarness, engine: BaseEngine) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the same loss by autograd over the whole vocabulary, and the gradients of the trained parameters."""
    model = harness.oracle_model(engine, "causal_lm")
    outputs: Any = oracle_outputs(model, harness.batch, "causal_lm", temperature=0.7)
    tokens = float(harness.batch["loss_mask"].values.sum())
    loss = (outputs["full_kl"].values - outputs["log_probs"].values).sum() / tokens
    loss.backward()
    _, gradients = gradients_of(model)
    if engine.config.model.lora is not None:
        _, gradients = harness.of_adapter(engine, gradients)
    return loss.detach(), gradients
