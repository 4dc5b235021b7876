"""The careful loop: hand-written torch and transformers code, as a good engineer writes for one model on one machine.

    loop = CarefulLoop(folder)
    loop.update(rows)           # one optimizer step per 64 rows; returns mean loss and gradient norm
    loop.step(prompts)          # GRPO: generate, score, log-probs, advantages, update
    CarefulCritic(folder).update(rows)

Rows are sorted by length, so a micro-batch is padded to the longest of rows with similar lengths. Padding is on the
right, where causal attention needs no mask. Only hidden states that predict a response token enter the output layer.
Log-probs use the fused cross entropy, and the optimizer is fused.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from workload import (
    CLIP,
    CLIP_VALUE,
    GRAD_CLIP,
    LEARNING_RATE,
    LONGEST_ANSWER,
    MICRO_BATCH,
    MINI_BATCH,
    SAMPLES,
    Rows,
    even_share,
)


class CarefulLoop:
    """Clipped PPO loss, averaged over the tokens of a mini-batch."""

    def __init__(self, folder: Path, learning_rate: float = LEARNING_RATE, mini_batch: int = MINI_BATCH):
        self.mini_batch = mini_batch
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = adam(self.model, learning_rate)

    def log_probs(self, rows: Rows) -> Tensor:
        """Return the log-probs of all response tokens, row after row."""
        return log_probs(self.model, rows)

    def update(self, rows: Rows) -> dict[str, float]:
        return fit(rows, self.loss, self.model, self.optimizer, self.mini_batch)

    def loss(self, part: Rows) -> Tensor:
        """Return the loss summed over tokens."""
        ratio = (self.log_probs(part) - torch.cat(part.old_log_probs)).exp()
        advantages = torch.cat(part.advantages)
        return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).sum()

    @torch.inference_mode()
    def generate(self, prompts: list[Tensor]) -> list[Tensor]:
        """Sample `SAMPLES` responses per prompt, including the end token if there is one."""
        width, end = max(map(len, prompts)), self.model.config.eos_token_id
        ids = torch.stack([F.pad(prompt, (width - len(prompt), 0)) for prompt in prompts])
        mask = torch.stack([F.pad(torch.ones_like(prompt), (width - len(prompt), 0)) for prompt in prompts])
        config = transformers.GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=LONGEST_ANSWER, num_return_sequences=SAMPLES, pad_token_id=0,
            eos_token_id=end,
        )  # fmt: skip
        sequences = self.model.generate(ids, attention_mask=mask, generation_config=config)[:, width:]
        ends = (sequences == end).float()
        lengths = torch.where(ends.any(dim=1), ends.argmax(dim=1) + 1, sequences.shape[1]).tolist()
        return [row[:length].clone() for row, length in zip(sequences, lengths, strict=True)]

    def step(self, prompts: list[Tensor]) -> dict[str, list[int]]:
        responses = self.generate(prompts)
        repeated = [prompt for prompt in prompts for _ in range(SAMPLES)]
        scores = torch.tensor([even_share(response.tolist()) for response in responses]).view(-1, SAMPLES)
        advantages = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)).flatten()
        rows = Rows(repeated, responses, [], [a.expand(len(r)) for a, r in zip(advantages, responses, strict=True)])
        self.update(replace(rows, old_log_probs=evaluate(rows, self.log_probs)))
        return {"lengths": [len(response) for response in responses]}


class CarefulCritic:
    """Clipped value loss, with a model that has a head of one output."""

    def __init__(self, folder: Path, learning_rate: float = LEARNING_RATE):
        kind: Any = transformers.AutoModelForTokenClassification
        self.model = kind.from_pretrained(folder, num_labels=1, dtype=torch.float32)
        self.optimizer = adam(self.model, learning_rate)

    def values(self, rows: Rows) -> Tensor:
        """Return the values before each response token, row after row."""
        ids, predicts = right_padded(rows)
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][predicts]
        return self.model.score(hidden)[:, 0]

    def update(self, rows: Rows) -> dict[str, float]:
        return fit(rows, self.loss, self.model, self.optimizer)

    def loss(self, part: Rows) -> Tensor:
        """Return the loss summed over tokens."""
        values, old, returns = self.values(part), torch.cat(part.old_values), torch.cat(part.returns)
        clipped = old + (values - old).clamp(-CLIP_VALUE, CLIP_VALUE)
        return torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).sum() / 2


def adam(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01, fused=True)


def right_padded(rows: Rows) -> tuple[Tensor, Tensor]:
    """Return padded ids, and a mask of the positions that predict a response token."""
    sequences = [torch.cat([p, r]) for p, r in zip(rows.prompts, rows.responses, strict=True)]
    width = max(map(len, sequences))
    ids = torch.stack([F.pad(row, (0, width - len(row))) for row in sequences])
    place = torch.arange(width - 1)
    starts, ends = torch.tensor([len(p) for p in rows.prompts]), torch.tensor([len(row) for row in sequences])
    return ids, (place >= starts[:, None] - 1) & (place < ends[:, None] - 1)


def log_probs(model: Any, rows: Rows) -> Tensor:
    ids, predicts = right_padded(rows)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][predicts]
    return -F.cross_entropy(model.lm_head(hidden), ids[:, 1:][predicts], reduction="none")


def by_length(rows: Rows, numbers: Iterable[int]) -> Iterator[list[int]]:
    """Split these rows into micro-batches, sorted by length."""
    order = sorted(numbers, key=lambda row: len(rows.prompts[row]) + len(rows.responses[row]))
    return (order[start : start + MICRO_BATCH] for start in range(0, len(order), MICRO_BATCH))


@torch.no_grad()
def evaluate(rows: Rows, what: Callable[[Rows], Tensor]) -> list[Tensor]:
    """Evaluate `what` in micro-batches; returns one tensor of response-token values per row."""
    values_of_rows: list[Tensor] = [torch.empty(0)] * len(rows)
    for numbers in by_length(rows, range(len(rows))):
        parts = what(rows.part(numbers)).split([len(rows.responses[row]) for row in numbers])
        for row, values in zip(numbers, parts, strict=True):
            values_of_rows[row] = values
    return values_of_rows


def fit(
    rows: Rows,
    loss: Callable[[Rows], Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mini_batch: int = MINI_BATCH,
) -> dict[str, float]:
    """Take one optimizer step per mini-batch on the mean loss over its tokens."""
    losses, norms = [], []
    for first in range(0, len(rows), mini_batch):
        mini = range(first, min(first + mini_batch, len(rows)))
        tokens = sum(len(rows.responses[row]) for row in mini)
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for numbers in by_length(rows, mini):
            part = loss(rows.part(numbers)) / tokens
            part.backward()
            total += part.detach()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)))
        optimizer.step()
        losses.append(float(total))
    return {"loss": statistics.mean(losses), "grad_norm": statistics.mean(norms)}
