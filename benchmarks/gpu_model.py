"""Model sizes, random models, rows and actor settings for `gpu.py`.

    size = SIZES["1.5B"]
    actor = ActorUpdate(folder, **settings(size, "cuda", "bfloat16"))
    actor.update(rows_of(size, seed=1))

Every row has its own prompt, because on a GPU rows are packed whole: counted and computed work are the same. Lengths
are uniformly distributed, so the mean row has half the length of the longest row, which a padded batch computes.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import roofline
import torch
import torch.nn.functional as F
import transformers
import workload
from textbook import right
from torch import Tensor
from workload import Rows, Shape

SAMPLES = 2
"""Rows per prompt in the config."""

transformers.utils.logging.disable_progress_bar()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Size:
    """A model shape and the amount of work in each part."""

    shape: Shape
    rows: int
    """Rows per optimizer step."""
    longest_prompt: int
    longest_response: int
    budget: int
    """Tokens per micro-batch."""
    head_tokens: int
    vocabularies: tuple[int, ...]
    batch: int
    """Rows generated at a time, each with a prompt of `prompt` tokens and `answer` new tokens."""
    prompt: int
    answer: int

    @property
    def longest(self) -> int:
        return max(self.longest_prompt + self.longest_response, self.prompt + self.answer)


SIZES = {
    "1.5B": Size(
        Shape(1536, 28, 12, 2, 8960, 151_936),
        rows=16, longest_prompt=1024, longest_response=7168, budget=16_384,
        head_tokens=8192, vocabularies=(32_000, 75_000, 150_000),
        batch=256, prompt=512, answer=256,
    ),
    "tiny": Size(
        Shape(64, 2, 4, 2, 128, 512),
        rows=8, longest_prompt=8, longest_response=24, budget=64,
        head_tokens=64, vocabularies=(512, 1024),
        batch=8, prompt=16, answer=8,
    ),
}  # fmt: skip
"""The first has the shape of Qwen2.5-1.5B."""


def make_model(folder: Path, size: Size) -> None:
    """Write random float32 weights and the prompt file that a config requires."""
    from camshaft.models.tiny import make_tiny_model

    make_tiny_model(folder, **asdict(size.shape), max_position_embeddings=size.longest)
    (folder / "train.parquet").touch()


def rows_of(size: Size, seed: int) -> Rows:
    """Return the rows of one optimizer step."""
    random = torch.Generator().manual_seed(seed)

    def drawn(longest: int) -> list[Tensor]:
        lengths = torch.randint(1, longest + 1, (size.rows,), generator=random).tolist()
        vocabulary = size.shape.vocab_size
        return [torch.randint(workload.FIRST_WORD, vocabulary, (n,), generator=random) for n in lengths]

    return with_columns(drawn(size.longest_prompt), drawn(size.longest_response), size, random)


def with_columns(prompts: list[Tensor], responses: list[Tensor], size: Size, random: torch.Generator) -> Rows:
    """Return rows with random advantages, and log-probs near those of a model that knows nothing."""
    die = -torch.tensor(float(size.shape.vocab_size)).log()
    old = [die + 0.1 * torch.randn(len(response), generator=random) for response in responses]
    advantages = torch.randn(len(responses), generator=random)
    return Rows(prompts, responses, old, [a.expand(len(r)) for a, r in zip(advantages, responses, strict=True)])


def work_of(size: Size, rows: Rows, dtype: str) -> roofline.Work:
    """Return the minimum work of an update of these rows, without recomputation."""
    groups = [roofline.Group(len(p), [len(r)]) for p, r in zip(rows.prompts, rows.responses, strict=True)]
    return roofline.update(size.shape, groups, steps=1, number=DTYPES[dtype].itemsize)


def settings(size: Size, device: str, dtype: str) -> dict[str, Any]:
    """Return the settings of an actor on one rank of the sharded engine: float32 weights, computation in `dtype`."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return {
        f"{actor}.strategy": "fsdp",
        f"{actor}.fsdp_config.mixed_precision.param_dtype": "null" if dtype == "float32" else dtype,
        f"{actor}.ppo_mini_batch_size": size.rows // SAMPLES,
        f"{actor}.ppo_max_token_len_per_gpu": max(size.budget, size.longest),
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        f"{rollout}.n": SAMPLES,
        "data.train_batch_size": size.rows // SAMPLES,
        "data.max_prompt_length": size.longest_prompt,
        "data.max_response_length": size.longest_response,
        "trainer.device": device,
    }


class Padded:
    """Textbook loop: rows padded to the maximum length, one row per micro-batch, all logits, plain log-softmax.

    Autocast to `dtype`, float32 weights, activation checkpointing.
    """

    def __init__(self, folder: Path, size: Size, device: str, dtype: str):
        self.size, self.device, self.dtype = size, device, DTYPES[dtype]
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(folder, dtype=torch.float32).to(device).train()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=workload.LEARNING_RATE, weight_decay=0.01)

    def update(self, rows: Rows) -> dict[str, float]:
        tokens, losses = sum(map(len, rows.responses)), []
        self.optimizer.zero_grad()
        for number in range(len(rows)):
            loss = self._loss(rows.part([number])) / tokens
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), workload.GRAD_CLIP)
        self.optimizer.step()
        return {"loss": float(torch.stack(losses).sum()), "grad_norm": float(norm)}

    def _loss(self, rows: Rows) -> Tensor:
        sequences = [torch.cat(pair) for pair in zip(rows.prompts, rows.responses, strict=True)]
        width = self.size.longest_prompt + self.size.longest_response
        ids = right(sequences, width).to(self.device)
        real = right([torch.ones_like(row) for row in sequences], width).to(self.device)
        with torch.autocast(self.device.partition(":")[0], self.dtype, enabled=self.dtype != torch.float32):
            logits = self.model(input_ids=ids, attention_mask=real, use_cache=False).logits
        chosen = logits[:, :-1].float().log_softmax(dim=-1).gather(2, ids[:, 1:, None])[..., 0]
        old, advantages, mask = (self._placed(rows, column, width) for column in self._columns(rows))
        ratio = (chosen - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - workload.CLIP, 1 + workload.CLIP) * advantages)
        return -(gain * mask).sum()

    def _placed(self, rows: Rows, column: list[Tensor], width: int) -> Tensor:
        """Place per-response-token numbers at the positions that predict the tokens."""
        moved = [F.pad(row, (len(p) - 1, 0)) for p, row in zip(rows.prompts, column, strict=True)]
        return right(moved, width - 1).to(self.device)

    @staticmethod
    def _columns(rows: Rows) -> list[list[Tensor]]:
        return [rows.old_log_probs, rows.advantages, [torch.ones(len(response)) for response in rows.responses]]


def mean_tokens(rows: list[Rows]) -> float:
    return statistics.mean(sum(map(len, each.prompts)) + sum(map(len, each.responses)) for each in rows)
