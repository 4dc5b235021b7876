"""The oracle of the contract: `transformers` on each row alone, float32, nothing packed, nothing fused.

It shares no line with the engines: no packing, no micro-batches, no fused log-probs.
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


def plain_outputs(model: Any, batch: DataProto, head: str, temperature: float = 1.0) -> dict[str, Ragged | Tensor]:
    """All outputs of a head that the batch has the columns for, aligned as the engine's: entry j speaks of token j."""
    rows: dict[str, list[Tensor]] = {}
    log_q = batch["log_q"].rows() if "log_q" in batch else [None] * len(batch)
    for ids, mask, others in zip(batch["input_ids"].rows(), batch["loss_mask"].rows(), log_q, strict=True):
        for name, value in _one_row(model, ids, head, temperature, others).items():
            kept = mask.to(value.device).view(-1, *[1] * (value.ndim - 1))
            rows.setdefault(name, []).append(value if name == "scores" else value * kept)
    return {n: torch.stack(v) if n == "scores" else Ragged.from_rows(v, v[0].dtype) for n, v in rows.items()}


def _one_row(model: Any, ids: Tensor, head: str, temperature: float, log_q: Tensor | None) -> dict[str, Tensor]:
    ids = ids.to(next(model.parameters()).device)
    if head == "reward":
        hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        return {"scores": model.score(hidden[-1])[0]}
    raw = model(input_ids=ids[None], use_cache=False).logits[0].float()
    first = raw.new_zeros(1)
    if head == "value":
        return {"values": torch.cat([first, raw[:-1, 0]])}
    logp = torch.log_softmax(raw[:-1] / temperature, dim=-1)
    entropy = -(logp.exp() * logp).sum(-1)
    found = {
        "log_probs": torch.cat([first, logp.gather(-1, ids[1:, None])[:, 0]]),
        "entropy": torch.cat([first, entropy]),
        "distribution": torch.cat([torch.zeros_like(logp[:1]), logp]),
    }
    if log_q is not None:
        found["full_kl"] = torch.cat([first, (logp.exp() * (logp - log_q[1:].to(logp))).sum(-1)])
    return found


def plain_loss(found: Ragged, advantages: Ragged, mask: Ragged, head: str) -> tuple[Tensor, Tensor]:
    """(sum over tokens, sum over sequences) of the contract's loss, before any division."""
    keep = mask.values.to(found.values.dtype)
    if head == "causal_lm":
        per_token = -advantages.values * found.values * keep
    else:
        per_token = 0.5 * (found.values - advantages.values) ** 2 * keep
    squares = found.like((found.values * keep) ** 2)
    return per_token.sum(), 0.1 * squares.sum().sum()


def plain_step(model: Any, batch: DataProto, head: str) -> tuple[float, float, dict[str, Tensor]]:
    """(loss, gradient norm, gradients) of the contract's loss, with counts taken from the whole batch."""
    name = "log_probs" if head == "causal_lm" else "values"
    mask: Ragged = batch["loss_mask"]
    num_tokens = float(mask.values.sum())
    num_sequences = float(sum(bool(row.any()) for row in mask.rows()))
    model.zero_grad()
    loss = 0.0
    for i in range(len(batch)):
        row = batch.reorder([i]).to(next(model.parameters()).device)
        found = plain_outputs(model, row, head)[name]
        assert isinstance(found, Ragged)
        tokens, sequences = plain_loss(found, row["advantages"], row["loss_mask"], head)
        share = tokens / num_tokens + sequences / num_sequences
        share.backward()
        loss += float(share.detach())
    gradients = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients.values()))
    return loss, norm, gradients


def through_adapter(
    gradients: dict[str, Tensor], adapter: dict[str, Tensor], scale: float
) -> tuple[float, dict[str, Tensor]]:
    """(norm, gradients) of an adapter, from those of the merged weights W + scale B A, by the chain rule."""
    found: dict[str, Tensor] = {}
    for name, tensor in adapter.items():
        layer, _, part = name.removeprefix("base_model.model.").rpartition(".lora_")
        if not layer:
            found[name] = gradients[part]
            continue
        whole = gradients[f"{layer}.weight"]
        other = adapter[name.replace(".lora_A.", ".lora_B.") if part == "A.weight" else name.replace("_B.", "_A.")]
        found[name] = scale * (other.T @ whole if part == "A.weight" else whole @ other.T)
        assert found[name].shape == tensor.shape
    return math.sqrt(sum(float((g.double() ** 2).sum()) for g in found.values())), found
