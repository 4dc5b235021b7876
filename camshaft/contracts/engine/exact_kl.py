"""The rules of the engine contract on which a KL divergence over the whole vocabulary rests."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from camshaft.contracts.engine.adapters import LORA
from camshaft.contracts.engine.harness import EngineHarness, close, same_bits
from camshaft.contracts.engine.oracle import plain_outputs
from camshaft.contracts.rules import expect, expect_error
from camshaft.dataproto import DataProto
from camshaft.engine.base import BaseEngine, PreprocessFn, StepContext
from camshaft.errors import EngineError

ASKED = StepContext(outputs=("log_probs", "full_kl"), temperature=0.7)


def divergence(harness: EngineHarness) -> None:
    """A loss of full_kl and log_probs has the gradients of the plain one over whole vocabularies, however the batch is
    cut; without the column log_q it is refused by name."""
    variants: list[dict[str, Any]] = [{}, {"micro_batch_size": 3}, {"micro_batch_size": 1}]
    for changes in variants:
        engine = harness.build(**changes)
        engine.set_loss_fn(_loss)
        loss, wanted = _plain(harness, engine)
        found = harness.step(engine, harness.batch, ASKED)
        close(torch.tensor(found.loss), loss, harness.tolerance, f"a loss of full_kl with {changes}")
        expect(
            found.gradients.keys() == wanted.keys(), f"gradients of {sorted(found.gradients.keys() ^ wanted.keys())}"
        )
        for name, gradient in wanted.items():
            what = f"gradient of {name} in a loss of full_kl with {changes}"
            close(found.gradients[name], gradient, harness.tolerance * 10, what)
    engine = harness.build()
    with engine.eval_mode():
        expect_error(
            lambda: engine.infer_batch(harness.batch.drop("log_q"), ASKED), "log_q", "full_kl of a batch without log_q"
        )


def asked_within_a_step(harness: EngineHarness) -> None:
    """A step whose preprocess_fn asks the engine itself, in eval_mode and with an adapter switched off, is the step
    without the question."""
    dropout: dict[str, Any] = {"override_config": {"attention_dropout": 0.5}, "micro_batch_size": 3}
    variants: list[dict[str, Any]] = [dropout, dropout | {"lora": LORA}]
    for changes in variants:
        try:
            quiet, asked = harness.build(**changes), harness.build(**changes)
        except EngineError:  # that the words name lora is for the rule of adapters to see
            continue
        torch.manual_seed(29)  # what dropout draws from
        wanted = harness.step(quiet, harness.batch)
        torch.manual_seed(29)
        found = harness.step(asked, harness.batch, preprocess_fn=_asking(asked))
        expect((found.loss, found.grad_norm) == (wanted.loss, wanted.grad_norm), "loss or norm of a step that asks")
        same_bits(found.gradients, wanted.gradients, "gradients of a step that asks")


def _asking(engine: BaseEngine) -> PreprocessFn:
    def ask(data: DataProto, ctx: StepContext) -> tuple[DataProto, StepContext]:
        without = engine.disable_adapter() if engine.config.model.lora is not None else nullcontext()
        with without, engine.eval_mode():
            engine.infer_batch(data, StepContext(outputs=("distribution",)))
        return data, ctx

    return ask


def _loss(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
    kept = data["loss_mask"].values
    return ((predictions["full_kl"].values - predictions["log_probs"].values) * kept).sum() / ctx["num_tokens"], ctx


def _plain(harness: EngineHarness, engine: BaseEngine) -> tuple[Tensor, dict[str, Tensor]]:
    """The same loss, by autograd over the whole vocabulary of each row, and the gradients of what is trained."""
    model = harness.plain_model(engine, "causal_lm")
    whole: Any = plain_outputs(model, harness.batch, "causal_lm", temperature=0.7)
    tokens = float(harness.batch["loss_mask"].values.sum())
    loss = (whole["full_kl"].values - whole["log_probs"].values).sum() / tokens
    loss.backward()
    gradients = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}
    if engine.config.model.lora is not None:
        _, gradients = harness.of_adapter(engine, gradients)
    return loss.detach(), gradients
