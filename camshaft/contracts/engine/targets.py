"""Rule of the engine contract about log-probs of tokens that are not the input."""

from __future__ import annotations

from typing import Any

import torch

from camshaft.contracts.engine.harness import EngineHarness, expect_close
from camshaft.contracts.rules import expect_error
from camshaft.dataproto import DataProto
from camshaft.engine.context import StepContext

REQUEST = StepContext(outputs=("target_log_probs",), temperature=1.5)


def free_targets(harness: EngineHarness) -> None:
    """target_log_probs and their gradients are those of the column targets, which need not be the input, for any split
    into micro-batches. Several targets per position, targets that the model does not have, and a missing column raise
    errors that name the column. An engine may declare that it does not support targets."""
    if not harness.engine_class.capabilities.supports_target_log_probs:
        return
    variants: list[dict[str, Any]] = [{}, {"micro_batch_size": 3}, {"max_tokens": 20}]
    for changes in variants:
        engine = harness.build(**changes)
        loss, norm, gradients = harness.oracle_gradients(engine, "causal_lm", request=REQUEST)
        result = harness.step(engine, harness.batch, REQUEST)
        variant = f"of a loss of target_log_probs with {changes}"
        expect_close(result.loss, loss, harness.tolerance, f"value {variant}")
        expect_close(result.grad_norm, norm, harness.gradient_tolerance, f"gradient norm {variant}")
        for name, gradient in result.gradients.items():
            expect_close(gradient, gradients[name], harness.gradient_tolerance, f"gradient of {name} {variant}")
    engine, targets = harness.build(), harness.batch.ragged("targets")
    invalid = {
        "several targets per position": targets.map(lambda ids: torch.stack([ids, ids], dim=1)),
        "an unknown id": targets.map(lambda ids: ids + 1_000_000),
    }
    batches: dict[str, DataProto] = {what: harness.batch.with_columns(targets=ids) for what, ids in invalid.items()}
    for what, batch in {**batches, "no targets": harness.batch.drop("targets")}.items():
        with engine.eval_mode():
            expect_error(
                lambda batch=batch: engine.infer_batch(batch, REQUEST), "targets", f"infer_batch accepted {what}"
            )
