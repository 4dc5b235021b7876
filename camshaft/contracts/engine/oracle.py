"""Expected results of the engine contract, computed by `transformers` on one row at a time, in the dtype of the model.

This module shares no code with the engines: it uses no packing, no micro-batches and no fused output layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import CausalLMOutput

from camshaft.dataproto import DataProto, Ragged
from camshaft.engine.context import StepContext
from camshaft.models.loader import quiet_transformers

HEAD_CLASSES: dict[str, Any] = {
    "causal_lm": AutoModelForCausalLM,
    "value": AutoModelForTokenClassification,
    "reward": AutoModelForSequenceClassification,
}
LOSS_OUTPUT = {"causal_lm": "log_probs", "value": "values", "reward": "scores"}
"""Output of each head that the contract's loss reads."""
ENTROPY_COEFFICIENT = 10.0
"""Weight of the entropy in the loss. The tiny model is nearly uniform, so the gradients of its entropy are small."""


class DecoderWithHead(nn.Module):
    """The decoder of a causal language model and a linear layer, for families without a class for the head."""

    def __init__(self, causal: Any, bias: bool):
        super().__init__()
        self.base_model_prefix: str = "model" if causal.base_model is causal else causal.base_model_prefix
        self.add_module(self.base_model_prefix, causal.get_submodule(self.base_model_prefix))
        self.score = nn.Linear(causal.config.hidden_size, 1, bias=bias, dtype=torch.float64)

    @property
    def base_model(self) -> Any:
        return self.get_submodule(self.base_model_prefix)

    def forward(self, input_ids: Tensor, use_cache: bool) -> CausalLMOutput:
        hidden = self.base_model(input_ids=input_ids, use_cache=use_cache).last_hidden_state
        return CausalLMOutput(logits=self.score(hidden))


def load_oracle(folder: Path, head: str, weights: Mapping[str, Tensor], **options: Any) -> nn.Module:
    """Load a folder with plain transformers in float64, and give it the new head of an engine with these weights."""
    if head == "causal_lm":
        return _pretrained(HEAD_CLASSES[head], folder, **options).eval()
    try:
        model = _pretrained(HEAD_CLASSES[head], folder, num_labels=1, **options)
    except ValueError:  # transformers has no class for this head
        model = DecoderWithHead(_pretrained(AutoModelForCausalLM, folder, **options), bias=head == "value")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("score.", "classifier.", "head.")):
                parameter.copy_(weights[name])
    return model.eval()


def _pretrained(auto_class: Any, folder: Path, **arguments: Any) -> Any:
    with quiet_transformers():
        return explicit_model(
            auto_class.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager", **arguments)
        )


def explicit_model(model: Any, attention: str = "explicit") -> Any:
    """Let a model of transformers use `explicit_attention`, if its attention can be chosen and is not sparse."""
    layer_types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if model.is_backend_compatible() and layer_types <= DENSE:
        model.set_attn_implementation(attention)
    return model


def explicit_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer by its definition, in the dtype of its inputs.

    The signature is that of attention functions in transformers. Its "eager" computes the softmax in float32, and its
    "sdpa" ignores soft-caps, sinks and selected tokens.
    """
    softcap, sinks = arguments.get("softcap"), arguments.get("s_aux")
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is None:
        attention_mask = causal_mask(query.shape[2], sliding_window, query.device)
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    else:
        scores = scores + attention_mask
    selected: Tensor | None = arguments.get("indices")
    if selected is not None:
        is_selected = torch.zeros(scores[:, 0].shape, dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(~is_selected.scatter(-1, selected.long(), True)[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores)[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2).contiguous(), None


def causal_mask(length: int, window: int | None, device: torch.device, later: int = 0) -> Tensor:
    """Return which tokens (columns) each token (row) attends to: those before it, itself and `later` ones after it.

    With `later` -1, a token does not attend to itself, except for the first one.
    """
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions
    is_visible = (distance >= -later) & (distance < (length + 1 if window is None else window))
    is_visible[0, 0] = True
    return is_visible


DENSE = {"full_attention", "sliding_attention", "linear_attention"}
"""Types of layers that compute all scores of their attention, or none."""
AttentionInterface.register("explicit", explicit_attention)
AttentionMaskInterface.register("explicit", sdpa_mask)


def oracle_outputs(model: Any, batch: DataProto, head: str, temperature: float = 1.0) -> dict[str, Ragged | Tensor]:
    """Return all outputs of a head, aligned like an engine's predictions.

    `full_kl` and `target_log_probs` are computed only if the batch has the column `log_q` or `targets`.
    """
    rows: dict[str, list[Tensor]] = {}
    ids_and_masks = zip(batch["input_ids"].rows(), batch["loss_mask"].rows(), strict=True)
    others = {name: batch.ragged(name).rows() for name in ("log_q", "targets") if name in batch}
    for number, (ids, mask) in enumerate(ids_and_masks):
        row = {name: values[number] for name, values in others.items()}
        for name, value in _row_outputs(model, ids, head, temperature, **row).items():
            row_mask = mask.to(value.device).view(-1, *[1] * (value.ndim - 1))
            rows.setdefault(name, []).append(value if name == "scores" else value * row_mask)
    return {n: torch.stack(v) if n == "scores" else Ragged.from_rows(v, v[0].dtype) for n, v in rows.items()}


def _row_outputs(
    model: Any,
    ids: Tensor,
    head: str,
    temperature: float,
    log_q: Tensor | None = None,
    targets: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the outputs for all tokens of one row; the entry of the first token is 0."""
    ids = ids.to(next(model.parameters()).device)
    if head == "reward":
        hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        layer = model.score if hasattr(model, "score") else model.classifier
        inputs = model.head(hidden[-1]) if hasattr(model, "head") else hidden[-1]
        return {"scores": layer(inputs)[0]}
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    zero = logits.new_zeros(1)
    if head == "value":
        return {"values": torch.cat([zero, logits[:-1, 0]])}
    logp = torch.log_softmax(logits[:-1] / temperature, dim=-1)
    entropy = -(logp.exp() * logp).sum(-1)
    outputs = {
        "log_probs": torch.cat([zero, logp.gather(-1, ids[1:, None])[:, 0]]),
        "entropy": torch.cat([zero, entropy]),
        "sum_pi_squared": torch.cat([zero, logp.exp().square().sum(-1)]),
        "distribution": torch.cat([torch.zeros_like(logp[:1]), logp]),
    }
    if log_q is not None:
        outputs["full_kl"] = torch.cat([zero, (logp.exp() * (logp - log_q[1:].to(logp))).sum(-1)])
    if targets is not None:
        outputs["target_log_probs"] = torch.cat([zero, logp.gather(-1, targets[1:, None].to(logp.device))[:, 0]])
    return outputs


def loss_output(predictions: Mapping[str, Any], head: str) -> str:
    """Return the name of the prediction that the contract's loss reads."""
    return "target_log_probs" if "target_log_probs" in predictions else LOSS_OUTPUT[head]


def loss_sums(predictions: Mapping[str, Any], batch: DataProto, head: str) -> tuple[Tensor, Tensor]:
    """Return the two terms of the contract's loss before division by the counts: sums over tokens and sequences.

    `batch` has the columns `advantages` and `loss_mask`. The entropy is part of the loss if it is in `predictions`, and
    log-probs of targets replace those of the input.
    """
    outputs, advantages = predictions[loss_output(predictions, head)], batch.ragged("advantages")
    if head == "reward":
        targets = advantages.values[(advantages.offsets[1:] - 1).to(outputs.device)]  # those of the last tokens
        return outputs.new_zeros(()), 0.5 * ((outputs - targets) ** 2).sum()
    counted = batch["loss_mask"].values.to(outputs.values.dtype)
    if head == "causal_lm":
        per_token = -advantages.values * outputs.values * counted
    else:
        per_token = 0.5 * (outputs.values - advantages.values) ** 2 * counted
    if "entropy" in predictions:
        per_token = per_token - ENTROPY_COEFFICIENT * predictions["entropy"].values * counted
    squares = outputs.like((outputs.values * counted) ** 2)
    return per_token.sum(), 0.1 * squares.sum().sum()


def oracle_step(
    model: Any, batch: DataProto, head: str, request: StepContext | None = None
) -> tuple[float, float, dict[str, Tensor]]:
    """Return (loss, gradient norm, gradients by name) of the contract's loss, divided by the counts of the batch.

    The loss reads the outputs of `request`, by default the first one of the head, at its temperature.
    """
    request = request or StepContext()
    names, temperature = request.get("outputs", (LOSS_OUTPUT[head],)), request.get("temperature", 1.0)
    mask: Ragged = batch["loss_mask"]
    num_tokens = float(mask.values.sum())
    num_sequences = float(sum(bool(row.any()) for row in mask.rows()))
    model.zero_grad()
    loss = 0.0
    for i in range(len(batch)):
        row = batch.reorder([i]).to(next(model.parameters()).device)
        outputs = oracle_outputs(model, row, head, temperature)
        tokens, sequences = loss_sums({name: outputs[name] for name in names}, row, head)
        share = tokens / num_tokens + sequences / num_sequences
        share.backward()
        loss += float(share.detach())
    return loss, *collect_gradients(model)


def collect_gradients(model: Any) -> tuple[float, dict[str, Tensor]]:
    """Return (gradient norm, gradients by name) of a model after its backward passes."""
    gradients = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}
    return _total_norm(gradients), gradients


def adapter_gradients(
    gradients: dict[str, Tensor], adapter: dict[str, Tensor], scale: float
) -> tuple[float, dict[str, Tensor]]:
    """Return (gradient norm, gradients by name) of an adapter.

    They follow by the chain rule from the gradients of the merged weights W + scale B A.
    """
    adapter_grads: dict[str, Tensor] = {}
    for name, tensor in adapter.items():
        layer, _, part = name.removeprefix("base_model.model.").rpartition(".lora_")
        if not layer:
            adapter_grads[name] = gradients[part]
            continue
        weight_grad = gradients[f"{layer}.weight"]
        factor = adapter[name.replace(".lora_A.", ".lora_B.") if part == "A.weight" else name.replace("_B.", "_A.")]
        adapter_grads[name] = scale * (factor.T @ weight_grad if part == "A.weight" else weight_grad @ factor.T)
        assert adapter_grads[name].shape == tensor.shape
    return _total_norm(adapter_grads), adapter_grads


def _total_norm(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients.values()))
