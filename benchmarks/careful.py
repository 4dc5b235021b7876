"""A careful loop by hand, in plain torch and transformers: what a good engineer writes for one model on one machine.

    loop = CarefulLoop(folder)
    loop.update(rows)           # one optimizer step for each 64 rows; returns the mean loss and gradient norm

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
from workload import CLIP, GRAD_CLIP, LEARNING_RATE, MICRO_BATCH, MINI_BATCH, Rows


class CarefulLoop:
    """PPO's clipped loss, mean over the tokens of a mini-batch."""

    def __init__(self, folder: Path):
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.config.use_cache = False
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=True)

    def log_probs(self, rows: Rows) -> Tensor:
        """Of all response tokens, row after row."""
        whole = [torch.cat([p, r]) for p, r in zip(rows.prompts, rows.responses, strict=True)]
        width = max(map(len, whole))
        ids = torch.stack([F.pad(row, (0, width - len(row))) for row in whole])
        place = torch.arange(width - 1)
        starts, ends = torch.tensor([len(p) for p in rows.prompts]), torch.tensor([len(row) for row in whole])
        predicts = (place >= starts[:, None] - 1) & (place < ends[:, None] - 1)
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][predicts]
        return -F.cross_entropy(self.model.lm_head(hidden), ids[:, 1:][predicts], reduction="none")

    def update(self, rows: Rows) -> dict[str, float]:
        losses, norms = [], []
        for first in range(0, len(rows), MINI_BATCH):
            mini = list(range(first, min(first + MINI_BATCH, len(rows))))
            mini.sort(key=lambda row: len(rows.prompts[row]) + len(rows.responses[row]))
            tokens = sum(len(rows.responses[row]) for row in mini)
            self.optimizer.zero_grad(set_to_none=True)
            total = torch.zeros(())
            for start in range(0, len(mini), MICRO_BATCH):
                part = rows.part(mini[start : start + MICRO_BATCH])
                ratio = (self.log_probs(part) - torch.cat(part.old_log_probs)).exp()
                advantages = torch.cat(part.advantages)
                gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
                loss = -gain.sum() / tokens
                loss.backward()
                total += loss.detach()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRAD_CLIP)
            self.optimizer.step()
            losses.append(float(total))
            norms.append(float(norm))
        return {"loss": statistics.mean(losses), "grad_norm": statistics.mean(norms)}
