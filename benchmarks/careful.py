"""A careful loop by hand, in plain torch and transformers: what a good engineer writes for one model on one machine.

    loop = CarefulLoop(folder)
    loop.update(rows)           # one optimizer step for each 64 rows; returns the mean loss and gradient norm
    loop.step(prompts)          # GRPO: generate, score, log-probs, advantages, update
    CarefulCritic(folder).update(rows)

Rows are sorted by length, so that a micro-batch is padded to the longest of rows that are nearly as long. Padding is
on the right, where causal attention does not see it and needs no mask. Only what predicts a response token goes
through the projection on the vocabulary; log-probs are those of the fused cross entropy; the optimizer is fused.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from workload import (
    CLIP,
    GRAD_CLIP,
    LEARNING_RATE,
    LONGEST_ANSWER,
    MICRO_BATCH,
    MINI_BATCH,
    SAMPLES,
    VALUE_CLIP,
    Rows,
    even_share,
)


class CarefulLoop:
    """PPO's clipped loss, mean over the tokens of a mini-batch."""

    kind: Any = transformers.AutoModelForCausalLM

    def __init__(self, folder: Path, learning_rate: float = LEARNING_RATE, mini_batch: int = MINI_BATCH):
        self.mini_batch = mini_batch
        self.model = self.kind.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.01, fused=True)

    def before_responses(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """(hidden state before, id) of all response tokens, row after row."""
        whole = [torch.cat([p, r]) for p, r in zip(rows.prompts, rows.responses, strict=True)]
        width = max(map(len, whole))
        ids = torch.stack([F.pad(row, (0, width - len(row))) for row in whole])
        place = torch.arange(width - 1)
        starts, ends = torch.tensor([len(p) for p in rows.prompts]), torch.tensor([len(row) for row in whole])
        predicts = (place >= starts[:, None] - 1) & (place < ends[:, None] - 1)
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][predicts]
        return hidden, ids[:, 1:][predicts]

    def log_probs(self, rows: Rows) -> Tensor:
        """Of all response tokens, row after row."""
        hidden, targets = self.before_responses(rows)
        return -F.cross_entropy(self.model.lm_head(hidden), targets, reduction="none")

    def loss(self, rows: Rows) -> Tensor:
        """Summed over tokens."""
        ratio = (self.log_probs(rows) - torch.cat(rows.old_log_probs)).exp()
        advantages = torch.cat(rows.advantages)
        return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).sum()

    def update(self, rows: Rows) -> dict[str, float]:
        losses, norms = [], []
        for first in range(0, len(rows), self.mini_batch):
            mini = list(range(first, min(first + self.mini_batch, len(rows))))
            mini.sort(key=lambda row: len(rows.prompts[row]) + len(rows.responses[row]))
            tokens = sum(len(rows.responses[row]) for row in mini)
            self.optimizer.zero_grad(set_to_none=True)
            total = torch.zeros(())
            for start in range(0, len(mini), MICRO_BATCH):
                loss = self.loss(rows.part(mini[start : start + MICRO_BATCH])) / tokens
                loss.backward()
                total += loss.detach()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRAD_CLIP)
            self.optimizer.step()
            losses.append(float(total))
            norms.append(float(norm))
        return {"loss": statistics.mean(losses), "grad_norm": statistics.mean(norms)}

    @torch.inference_mode()
    def generate(self, prompts: list[Tensor]) -> list[Tensor]:
        """`SAMPLES` responses to each prompt, with their end mark if they have one."""
        width, end = max(map(len, prompts)), self.model.config.eos_token_id
        ids = torch.stack([F.pad(prompt, (width - len(prompt), 0)) for prompt in prompts])
        mask = torch.stack([F.pad(torch.ones_like(prompt), (width - len(prompt), 0)) for prompt in prompts])
        config = transformers.GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=LONGEST_ANSWER, num_return_sequences=SAMPLES, pad_token_id=0,
            eos_token_id=end,
        )  # fmt: skip
        found = self.model.generate(ids, attention_mask=mask, generation_config=config)[:, width:]
        ends = (found == end).float()
        lengths = torch.where(ends.any(dim=1), ends.argmax(dim=1) + 1, found.shape[1]).tolist()
        return [row[:length].clone() for row, length in zip(found, lengths, strict=True)]

    def step(self, prompts: list[Tensor]) -> dict[str, float]:
        responses = self.generate(prompts)
        repeated = [prompt for prompt in prompts for _ in range(SAMPLES)]
        scores = torch.tensor([even_share(response.tolist()) for response in responses]).view(-1, SAMPLES)
        advantages = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)).flatten()
        rows = Rows(repeated, responses, [], [a.expand(len(r)) for a, r in zip(advantages, responses, strict=True)])
        order = sorted(range(len(rows)), key=lambda row: len(repeated[row]) + len(responses[row]))
        old: list[Tensor] = [torch.empty(0)] * len(rows)
        with torch.no_grad():
            for start in range(0, len(order), MICRO_BATCH):
                numbers = order[start : start + MICRO_BATCH]
                found = self.log_probs(rows.part(numbers))
                for row, part in zip(numbers, found.split([len(responses[n]) for n in numbers]), strict=True):
                    old[row] = part
        self.update(Rows(repeated, responses, old, rows.advantages))
        return {"tokens": float(sum(map(len, responses)))}


class CarefulCritic(CarefulLoop):
    """The clipped regression of values on returns, of the same rows."""

    kind = transformers.AutoModelForTokenClassification

    def loss(self, rows: Rows) -> Tensor:
        values = self.model.score(self.before_responses(rows)[0])[:, 0]
        old, returns = torch.cat(rows.old_values), torch.cat(rows.returns)
        near = values.clamp(old - VALUE_CLIP, old + VALUE_CLIP)
        return torch.maximum((values - returns).square(), (near - returns).square()).sum() / 2
