"""Expected results of the Tinker contract: `transformers` and torch in float64, on one row at a time.

    oracle = Oracle.load("models/tiny")
    oracle.log_probs(row)                             # of the targets, (N,)
    loss = oracle.train(rows, "ppo", clip_low_threshold=0.9)
    oracle.update(learning_rate=0.1, beta1=0.9, ...)  # torch.optim.AdamW

This module shares no code with the server: the losses are written from their formulas, and nothing is packed or split.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from camshaft.contracts.engine.oracle import load_oracle
from camshaft.contracts.tinker.client import datum

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


@dataclass(frozen=True)
class Row:
    """A datum: N tokens, N targets, and N values of each input of the loss."""

    tokens: list[int]
    targets: list[int]
    columns: Mapping[str, list[float]] = field(default_factory=dict[str, list[float]])

    def message(self, num_chunks: int = 1) -> Any:
        return datum(self.tokens, self.targets, num_chunks, **self.columns)

    def having(self, **columns: list[float]) -> Row:
        """Return the row with these inputs of the loss instead."""
        return Row(self.tokens, self.targets, columns)


class Oracle:
    """A model, its gradients and its optimizer."""

    def __init__(self, model: Any):
        self.model = model
        self.adamw = torch.optim.AdamW(model.parameters())

    @staticmethod
    @functools.cache
    def load(folder: str) -> Oracle:
        """Return the model of a folder, which must not be changed."""
        return Oracle(load_oracle(Path(folder), "causal_lm", {}))

    def copy(self) -> Oracle:
        """Return an oracle with these weights, without gradients and moments."""
        other = copy.deepcopy(self.model)
        other.zero_grad()
        return Oracle(other)

    def log_probs(self, row: Row) -> Tensor:
        """Compute the log-probs of the targets of a row, (N,)."""
        logits = self.model(input_ids=torch.tensor([row.tokens]), use_cache=False).logits[0]
        return logits.log_softmax(-1)[torch.arange(len(row.tokens)), row.targets]

    @torch.no_grad()
    def values(self, rows: Sequence[Row]) -> list[list[float]]:
        """Compute the log-probs of the targets of each row."""
        return [self.log_probs(row).tolist() for row in rows]

    def train(self, rows: Sequence[Row], loss: str = "cross_entropy", **options: float) -> float:
        """Add the gradients of a loss, and return its value."""
        total = 0.0
        for row in rows:
            value = row_loss(loss, self.log_probs(row), row, options)
            value.backward()
            total += value.item()
        return total

    def weights_of(self, rows: Sequence[Row], loss: str, **options: float) -> list[Row]:
        """Return the rows with the `weights` for which cross_entropy has the gradient of a loss."""
        weighted = list[Row]()
        for row in rows:
            log_probs = self.log_probs(row).detach().requires_grad_()
            (gradient,) = torch.autograd.grad(row_loss(loss, log_probs, row, options), log_probs)
            weighted.append(row.having(weights=(-gradient).tolist()))
        return weighted

    def norm(self) -> float:
        """Return the norm of the gradients."""
        return float(torch.stack([p.grad.norm() for p in self.model.parameters() if p.grad is not None]).norm())

    def update(
        self,
        learning_rate: float,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        grad_clip_norm: float = 0.0,
    ) -> None:
        """Apply the gradients with AdamW, and clear them."""
        scale = min(1.0, grad_clip_norm / self.norm()) if grad_clip_norm else 1.0
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad * scale
        self.adamw.param_groups[0].update(lr=learning_rate, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
        self.adamw.step()
        self.model.zero_grad()

    @torch.no_grad()
    def sampled_log_probs(
        self, prompt: Sequence[int], tokens: Sequence[int], temperature: float, top_k: int, top_p: float
    ) -> list[float]:
        """Compute the log-probs of sampled tokens under the distribution that was sampled from."""
        logits = self.model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
        values = list[float]()
        for position, token in enumerate(tokens, len(prompt) - 1):
            scores = logits[position] / temperature
            if top_k > 0:
                scores = scores.where(scores >= scores.topk(top_k).values[-1], -torch.inf)
            ordered, order = scores.softmax(-1).sort(descending=True)
            is_outside = ordered.cumsum(0) - ordered >= top_p
            scores[order[is_outside]] = -torch.inf
            values.append(float(scores.log_softmax(-1)[token]))
        return values

    @torch.no_grad()
    def best_log_prob(self, prompt: Sequence[int]) -> float:
        """Compute the log-prob of the most likely token after a prompt."""
        return float(
            self.model(input_ids=torch.tensor([[*prompt]]), use_cache=False).logits[0, -1].log_softmax(-1).max()
        )


def row_loss(name: str, log_probs: Tensor, row: Row, options: Mapping[str, float]) -> Tensor:
    """Compute the loss of a row, the sum over its tokens, from the log-probs (N,) of its targets."""
    columns = {key: torch.tensor(values).double() for key, values in row.columns.items()}  # float32, as on the wire
    if name == "cross_entropy":
        return -(columns.get("weights", torch.ones(len(log_probs))) * log_probs).sum()
    old, advantages = columns["logprobs"], columns["advantages"]
    low, high = ({**CLIP, **options}[key] for key in CLIP)
    ratio = (log_probs - old).exp()
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    if name == "cispo":
        return -(ratio.detach().clamp(low, high) * advantages * log_probs).sum()
    if name == "dro":
        return -(log_probs * advantages - options["beta"] / 2 * (log_probs - old) ** 2).sum()
    if name == "gspo":
        mask = columns["sequence_ratio_mask"]
        mean = ((log_probs - old) * mask).sum().detach() / mask.sum()
        ratio = (mean + log_probs - log_probs.detach()).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()
