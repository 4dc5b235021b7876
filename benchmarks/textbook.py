"""The textbook loop (padded batch, all logits, plain log-softmax), and the same with transformers.Trainer.

    loop = TextbookLoop(folder)
    loop.update(rows)           # one optimizer step per 64 rows; returns mean loss and gradient norm
    TextbookCritic(folder).update(rows)

Prompts are padded on the left and responses on the right to their maximum lengths, as in a batch for generation.
Introductions to PPO and the simplest code path of most libraries compute the same.
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
    CLIP_VALUE,
    GRAD_CLIP,
    LEARNING_RATE,
    LONGEST_PROMPT,
    LONGEST_RESPONSE,
    MICRO_BATCH,
    MINI_BATCH,
    Rows,
)


class TextbookLoop:
    """Clipped PPO loss, averaged over the tokens of a mini-batch."""

    kind: Any = transformers.AutoModelForCausalLM

    def __init__(self, folder: Path):
        self.model = self.kind.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)

    def update(self, rows: Rows) -> dict[str, float]:
        losses, norms = [], []
        for first in range(0, len(rows), MINI_BATCH):
            mini = rows.part(list(range(first, min(first + MINI_BATCH, len(rows)))))
            tokens = sum(map(len, mini.responses))
            self.optimizer.zero_grad()
            total = torch.zeros(())
            for start in range(0, len(mini), MICRO_BATCH):
                part = mini.part(list(range(start, min(start + MICRO_BATCH, len(mini)))))
                loss = self.loss(part) / tokens
                loss.backward()
                total += loss.detach()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRAD_CLIP)
            self.optimizer.step()
            losses.append(float(total))
            norms.append(float(norm))
        return {"loss": statistics.mean(losses), "grad_norm": statistics.mean(norms)}

    def logits(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs at every token, the ids, and the mask of the responses."""
        ids = torch.cat([left(rows.prompts, LONGEST_PROMPT), right(rows.responses, LONGEST_RESPONSE)], dim=1)
        ones = [[torch.ones_like(row) for row in column] for column in (rows.prompts, rows.responses)]
        mask = torch.cat([left(ones[0], LONGEST_PROMPT), right(ones[1], LONGEST_RESPONSE)], dim=1)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        return logits, ids, mask[:, -LONGEST_RESPONSE:]

    def loss(self, rows: Rows) -> Tensor:
        """Return the loss summed over tokens."""
        logits, ids, mask = self.logits(rows)
        chosen = logits[:, :-1].log_softmax(dim=-1).gather(2, ids[:, 1:, None])[..., 0][:, -LONGEST_RESPONSE:]
        ratio = (chosen - right(rows.old_log_probs, LONGEST_RESPONSE)).exp()
        advantages = right(rows.advantages, LONGEST_RESPONSE)
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        return -(gain * mask).sum()


class TextbookCritic(TextbookLoop):
    """Clipped value loss on the same padded batch."""

    kind = transformers.AutoModelForTokenClassification

    def loss(self, rows: Rows) -> Tensor:
        logits, _, mask = self.logits(rows)
        values = logits[:, -LONGEST_RESPONSE - 1 : -1, 0]
        old, returns = right(rows.old_values, LONGEST_RESPONSE), right(rows.returns, LONGEST_RESPONSE)
        near = values.clamp(old - CLIP_VALUE, old + CLIP_VALUE)
        return (torch.maximum((values - returns).square(), (near - returns).square()) * mask).sum() / 2


def left(rows: list[Tensor], width: int) -> Tensor:
    """Pad on the left and stack."""
    return torch.stack([F.pad(row, (width - len(row), 0)) for row in rows])


def right(rows: list[Tensor], width: int) -> Tensor:
    """Pad on the right and stack."""
    return torch.stack([F.pad(row, (0, width - len(row))) for row in rows])


class TrainerLoop:
    """`transformers.Trainer` on the same rows, padded to the longest row of a micro-batch; cross entropy of responses.

    Trainer has no PPO loss; everything but the loss is the same computation.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def update(self, rows: Rows) -> dict[str, float]:
        trainer = transformers.Trainer(
            model=self.model,
            args=transformers.TrainingArguments(
                output_dir=str(self.folder / "trainer"), per_device_train_batch_size=MICRO_BATCH, use_cpu=True,
                gradient_accumulation_steps=MINI_BATCH // MICRO_BATCH, num_train_epochs=1, max_grad_norm=GRAD_CLIP,
                learning_rate=LEARNING_RATE, report_to=[], save_strategy="no", disable_tqdm=True,
                log_level="error", logging_strategy="no",
                remove_unused_columns=False,
            ),
            train_dataset=[{"prompt": p, "response": r} for p, r in zip(rows.prompts, rows.responses, strict=True)],
            data_collator=collate,
        )  # fmt: skip
        trainer.train()
        return {}


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad rows on the right to the longest one and mask prompts and padding."""
    width = max(len(row["prompt"]) + len(row["response"]) for row in rows)
    sequences = [torch.cat([row["prompt"], row["response"]]) for row in rows]
    labels = [torch.cat([torch.full_like(row["prompt"], -100), row["response"]]) for row in rows]
    return {
        "input_ids": right(sequences, width),
        "attention_mask": right([torch.ones_like(row) for row in sequences], width),
        "labels": torch.stack([F.pad(row, (0, width - len(row)), value=-100) for row in labels]),
    }
