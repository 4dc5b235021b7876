"""Rules of the engine contract about losses that contain the KL divergence over the whole vocabulary."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from camshaft.contracts.engine.adapters import LORA
from camshaft.contracts.engine.harness import EngineHarness, expect_close, expect_equal
from camshaft.contracts.engine.oracle import collect_gradients, oracle_outputs
from camshaft.contracts.rules import expect, expect_error
from camshaft.dataproto import DataProto
from camshaft.engine.base import BaseEngine, PreprocessFn
from camshaft.engine.context import StepContext
from camshaft.errors import EngineError

REQUEST = StepContext(outputs=("log_probs", "full_kl"), temperature=0.7)


def exact_kl(harness: EngineHarness) -> None:
    """A loss computed from full_kl and log_probs has the same gradients as autograd over the whole vocabulary, for any
    split into micro-batches.
    full_kl without the column log_q raises an error that names the column."""
    variants: list[dict[str, Any]] = [{}, {"micro_batch_size": 3}, {"micro_batch_size": 1}]
    for changes in variants:
        engine = harness.build(**changes)
        engine.set_loss_fn(_loss)
        loss, expected = _oracle(harness, engine)
        result = harness.step(engine, harness.batch, REQUEST)
        expect_close(torch.tensor(result.loss), loss, harness.tolerance, f"a loss of full_kl with {changes}")
        expect(
            result.gradients.keys() == expected.keys(),
            f"trained weights differ from the expected ones by {sorted(result.gradients.keys() ^ expected.keys())}",
        )
        for name, gradient in expected.items():
            subject = f"gradient of {name} in a loss of full_kl with {changes}"
            expect_close(result.gradients[name], gradient, harness.gradient_tolerance, subject)
    engine = harness.build()
    with engine.eval_mode():
        expect_error(
            lambda: engine.infer_batch(harness.batch.drop("log_q"), REQUEST),
            "log_q",
            "infer_batch accepted a request for full_kl of a batch without log_q",
        )


def inference_within_a_step(harness: EngineHarness) -> None:
    """infer_batch inside a preprocess_fn, in eval_mode and with the adapter disabled, does not change the training
    step."""
    dropout: dict[str, Any] = {"override_config": {"attention_dropout": 0.5}, "micro_batch_size": 3}
    variants: list[dict[str, Any]] = [dropout, dropout | {"lora": LORA}]
    for changes in variants:
        try:
            engine, inferring_engine = harness.build(**changes), harness.build(**changes)
        except EngineError:  # the engine does not support adapters; the rule about adapters checks this error
            continue
        torch.manual_seed(29)  # sets the random state of dropout
        expected = harness.step(engine, harness.batch)
        torch.manual_seed(29)
        preprocess_fn = _make_inferring_hook(inferring_engine)
        result = harness.step(inferring_engine, harness.batch, preprocess_fn=preprocess_fn)
        expect(
            (result.loss, result.grad_norm) == (expected.loss, expected.grad_norm),
            "infer_batch inside a preprocess_fn changed the loss or the gradient norm of the step",
        )
        expect_equal(result.gradients, expected.gradients, "gradients of a step with infer_batch in a preprocess_fn")


def _make_inferring_hook(engine: BaseEngine) -> PreprocessFn:
    """Return a `preprocess_fn` that calls `infer_batch` on each micro-batch, with the adapter disabled."""

    def infer(data: DataProto, ctx: StepContext) -> tuple[DataProto, StepContext]:
        adapter_context = engine.disable_adapter() if engine.config.model.lora is not None else nullcontext()
        with adapter_context, engine.eval_mode():
            engine.infer_batch(data, StepContext(outputs=("distribution",)))
        return data, ctx

    return infer


def _loss(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
    counted = data["loss_mask"].values
    return ((predictions["full_kl"].values - predictions["log_probs"].values) * counted).sum() / ctx["num_tokens"], ctx


def _oracle(harness: EngineHarness, engine: BaseEngine) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute `_loss` by autograd over the whole vocabulary; return the loss and the gradients of trained weights."""
    model = harness.oracle_model(engine, "causal_lm")
    outputs: Any = oracle_outputs(model, harness.batch, "causal_lm", temperature=0.7)
    tokens = float(harness.batch["loss_mask"].values.sum())
    loss = (outputs["full_kl"].values - outputs["log_probs"].values).sum() / tokens
    loss.backward()
    _, gradients = collect_gradients(model)
    if engine.config.model.lora is not None:
        _, gradients = harness.adapter_gradients(engine, gradients)
    return loss.detach(), gradients
