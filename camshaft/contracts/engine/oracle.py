"""Expected results of the engine contract: `transformers` on one row at a time, in the dtype of the model.

This module shares no code with the engines: no packing, no micro-batches, no fused log-probs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from camshaft.dataproto import DataProto, Ragged

HEAD_CLASSES: dict[str, Any] = {
    "causal_lm": AutoModelForCausalLM,
    "value": AutoModelForTokenClassification,
    "reward": AutoModelForSequenceClassification,
}


def oracle_outputs(model: Any, batch: DataProto, head: str, temperature: float = 1.0) -> dict[str, Ragged | Tensor]:
    """Return all outputs of a head that the batch has columns for, aligned like an engine's predictions."""
    rows: dict[str, list[Tensor]] = {}
    log_q = batch["log_q"].rows() if "log_q" in batch else [None] * len(batch)
    for ids, mask, log_q_row in zip(batch["input_ids"].rows(), batch["loss_mask"].rows(), log_q, strict=True):
        for name, value in _outputs_of_row(model, ids, head, temperature, log_q_row).items():
            counted = mask.to(value.device).view(-1, *[1] * (value.ndim - 1))
            rows.setdefault(name, []).append(value if name == "scores" else value * counted)
    return {n: torch.stack(v) if n == "scores" else Ragged.from_rows(v, v[0].dtype) for n, v in rows.items()}


def _outputs_of_row(model: Any, ids: Tensor, head: str, temperature: float, log_q: Tensor | None) -> dict[str, Tensor]:
    ids = ids.to(next(model.parameters()).device)
    if head == "reward":
        hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        return {"scores": model.score(hidden[-1])[0]}
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    first = logits.new_zeros(1)
    if head == "value":
        return {"values": torch.cat([first, logits[:-1, 0]])}
    logp = torch.log_softmax(logits[:-1] / temperature, dim=-1)
    entropy = -(logp.exp() * logp).sum(-1)
    outputs = {
        "log_probs": torch.cat([first, logp.gather(-1, ids[1:, None])[:, 0]]),
        "entropy": torch.cat([first, entropy]),
        "distribution": torch.cat([torch.zeros_like(logp[:1]), logp]),
    }
    if log_q is not None:
        outputs["full_kl"] = torch.cat([first, (logp.exp() * (logp - log_q[1:].to(logp))).sum(-1)])
    return outputs


def loss_sums(outputs: Ragged, advantages: Ragged, mask: Ragged, head: str) -> tuple[Tensor, Tensor]:
    """Return the contract's loss before any division: (sum over tokens, sum over sequences)."""
    counted = mask.values.to(outputs.values.dtype)
    if head == "causal_lm":
        per_token = -advantages.values * outputs.values * counted
    else:
        per_token = 0.5 * (outputs.values - advantages.values) ** 2 * counted
    squares = outputs.like((outputs.values * counted) ** 2)
    return per_token.sum(), 0.1 * squares.sum().sum()


def oracle_step(model: Any, batch: DataProto, head: str) -> tuple[float, float, dict[str, Tensor]]:
    """Return (loss, gradient norm, gradients) of the contract's loss, divided by the counts of the whole batch."""
    name = "log_probs" if head == "causal_lm" else "values"
    mask: Ragged = batch["loss_mask"]
    num_tokens = float(mask.values.sum())
    num_sequences = float(sum(bool(row.any()) for row in mask.rows()))
    model.zero_grad()
    loss = 0.0
    for i in range(len(batch)):
        row = batch.reorder([i]).to(next(model.parameters()).device)
        outputs = oracle_outputs(model, row, head)[name]
        assert isinstance(outputs, Ragged)
        tokens, sequences = loss_sums(outputs, row["advantages"], row["loss_mask"], head)
        share = tokens / num_tokens + sequences / num_sequences
        share.backward()
        loss += float(share.detach())
    return loss, *gradients_of(model)


def gradients_of(model: Any) -> tuple[float, dict[str, Tensor]]:
    """Return (norm, gradients by name) of a model after its backward passes."""
    gradients = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}
    return _norm(gradients), gradients


def adapter_gradients(
    gradients: dict[str, Tensor], adapter: dict[str, Tensor], scale: float
) -> tuple[float, dict[str, Tensor]]:
    """Return (norm, gradients) of an adapter from those of the merged weights W + scale B A, by the chain rule."""
    of_adapter: dict[str, Tensor] = {}
    for name, tensor in adapter.items():
        layer, _, part = name.removeprefix("base_model.model.").rpartition(".lora_")
        if not layer:
            of_adapter[name] = gradients[part]
            continue
        merged = gradients[f"{layer}.weight"]
        factor = adapter[name.replace(".lora_A.", ".lora_B.") if part == "A.weight" else name.replace("_B.", "_A.")]
        of_adapter[name] = scale * (factor.T @ merged if part == "A.weight" else merged @ factor.T)
        assert of_adapter[name].shape == tensor.shape
    return _norm(of_adapter), of_adapter


def _norm(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients.values()))
