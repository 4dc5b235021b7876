"""Models of fixed sizes and rows of seeded lengths for the training benchmarks.

    rows = training_rows(vocabulary=512, seed=3)
    rows.prompts[0], rows.responses[0], rows.old_log_probs[0], rows.advantages[0]

Imports only torch and `operations.py`, so a side in an environment without camshaft uses the same rows.

A batch is 16 prompts with 8 responses each. Prompts have 1 to 64 tokens and responses 1 to 128, uniformly distributed,
so the mean row has half the length of the longest possible row, which is the length that a padded batch computes.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from operations import Shape
from torch import Tensor

PROMPTS, SAMPLES = 16, 8
LONGEST_PROMPT, LONGEST_RESPONSE = 64, 128
MINI_BATCH = 64
"""Rows per optimizer step; a batch has two steps."""
MICRO_BATCH = 16
"""Rows per forward and backward pass, for sides that count rows."""
TOKEN_BUDGET = 2048
"""Tokens per pass, for sides that count tokens."""
LONGEST_ANSWER = 96
"""Maximum response length in benchmarks of whole steps."""
FIRST_WORD = 3
"""Lower ids are special tokens."""
LETTERS = string.ascii_letters + string.digits
CLIP, GRAD_CLIP, LEARNING_RATE = 0.2, 1.0, 1e-4
CLIP_VALUE, LAMBDA, KL = 0.5, 0.95, 0.05
"""PPO with a critic: value clip range, lambda of GAE (gamma is 1), coefficient of the KL in the reward."""


SHAPES = {
    "1M": Shape(128, 4, 4, 2, 384, 512),
    "4M": Shape(256, 5, 4, 2, 768, 512),
    "18M": Shape(512, 5, 8, 4, 1536, 4096),
    "vocabulary 32k": Shape(256, 4, 4, 2, 768, 32_000),
    "vocabulary 150k": Shape(256, 4, 4, 2, 768, 150_000),
}


@dataclass(frozen=True)
class Rows:
    """One tensor per row in every field.

    The actor's update reads the first four; the critic's reads all but `advantages` and `old_log_probs`.
    """

    prompts: list[Tensor]
    responses: list[Tensor]
    old_log_probs: list[Tensor]
    advantages: list[Tensor]
    old_values: list[Tensor] = field(default_factory=list)
    returns: list[Tensor] = field(default_factory=list)

    def part(self, numbers: list[int]) -> Rows:
        """Select rows; empty columns stay empty."""
        return Rows(*([column[number] for number in numbers] if column else [] for column in vars(self).values()))

    def __len__(self) -> int:
        return len(self.prompts)


def training_rows(vocabulary: int, seed: int, count: int = PROMPTS, longest_response: int = LONGEST_RESPONSE) -> Rows:
    """Build a batch as from a rollout of an untrained model, whose log-probs are close to a uniform distribution."""
    random = torch.Generator().manual_seed(seed)

    def lengths(count: int, longest: int) -> list[int]:
        return torch.randint(1, longest + 1, (count,), generator=random).tolist()

    def words(count: int) -> Tensor:
        return torch.randint(FIRST_WORD, vocabulary, (count,), generator=random)

    prompts = [words(n) for n in lengths(count, LONGEST_PROMPT)]
    prompts = [prompt for prompt in prompts for _ in range(SAMPLES)]
    responses = [words(n) for n in lengths(count * SAMPLES, longest_response)]
    die = -torch.tensor(float(vocabulary)).log()
    old = [die + 0.1 * torch.randn(len(response), generator=random) for response in responses]
    advantages = torch.randn(len(responses), generator=random)
    old_values, returns = ([torch.randn(len(r), generator=random) for r in responses] for _ in range(2))
    each = [a.expand(len(r)) for a, r in zip(advantages, responses, strict=True)]
    return Rows(prompts, responses, old, each, old_values, returns)


def prompt_texts(seed: int) -> list[str]:
    """Return `PROMPTS` texts of 1 to 64 letters, one token per letter."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LONGEST_PROMPT + 1, (PROMPTS,), generator=random).tolist()
    return ["".join(LETTERS[i] for i in torch.randint(0, len(LETTERS), (n,), generator=random)) for n in lengths]


def even_share(response: Sequence[int]) -> float:
    """Return the share of even token ids, a reward that costs almost no time."""
    return sum(token % 2 == 0 for token in response) / max(len(response), 1)
