"""The rollout interface: token ids in, token ids and their log-probs out.

    rollout = build_rollout("torch", config)
    rollout.load_weights(engine.named_weights())
    out = rollout.generate_sequences(prompts, SamplingParams(temperature=1.0, max_tokens=64))
    out.responses, out.log_probs           # Ragged, one row per prompt row

A rollout knows nothing of roles, rewards or training. It is given weights, and what it says of a token
is the log-probability in the very distribution that it sampled from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.dataproto import Ragged
from camshaft.errors import RolloutError
from camshaft.rollout.sampling import row_seeds


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the next token. `temperature=0` or `do_sample=False` is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens until they hold this much probability; 1.0 keeps all."""
    do_sample: bool = True
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """End a row, beside the model's end-of-sequence tokens."""

    def __post_init__(self) -> None:
        wrong = {
            "max_tokens must be at least 1": self.max_tokens < 1 and self.max_tokens,
            "temperature must be 0 (greedy) or more": not self.temperature >= 0 and self.temperature,
            "top_k must be a number of tokens, or 0 or -1 for all": self.top_k < -1 and self.top_k,
            "top_p must lie above 0 and not above 1": not 0 < self.top_p <= 1 and self.top_p,
        }
        for rule, value in wrong.items():
            if value is not False:
                raise RolloutError(f"SamplingParams: {rule}, got {value}")

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0


@dataclass(frozen=True)
class Generation:
    """One response per prompt row, in the order of the prompts, on the device of the prompts."""

    responses: Ragged
    """Token ids; the end-of-sequence token is the last one if the row ended by itself."""
    log_probs: Ragged
    """float32, aligned with `responses`: log-prob in the distribution sampled from.

    That is after temperature, top_k and top_p. Greedy rows are sampled from nothing: theirs is the log-prob
    under the model, at temperature 1.
    """
    finished: Tensor
    """(B,) bool: ended by itself, not by `max_tokens`."""
    metrics: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def empty(prompts: Ragged) -> Generation:
        """What comes of no prompts."""
        tokens = Ragged(prompts.values.new_empty(0), prompts.lengths[:0])
        return Generation(tokens, tokens.map(Tensor.float), tokens.values.bool())

    def to(self, device: torch.device | str) -> Generation:
        return Generation(self.responses.to(device), self.log_probs.to(device), self.finished.to(device), self.metrics)


class BaseRollout(ABC):
    """A generator that receives its weights from an engine."""

    def __init__(self, config: RolloutEngineConfig):
        self.config = config
        self._calls = 0

    # -- what a generator implements --------------------------------------------------------------

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take these Hugging Face names and tensors as the weights from now on.

        All of them must come; one that is missing, unknown or misshapen is an error that names it. A tied
        weight may come under one of its names or under all. The rollout may keep a tensor instead of copying
        it, and then sees what is written into it later; the engine's rule for `named_weights` allows it.
        """

    @abstractmethod
    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        """One response for each row of `prompts`; a generator may compute equal prompts once.

        `seeds` (B,) int64 make the call reproducible. Where a generator can (the built-in one can), a row's
        samples depend on its seed and its prompt alone, whatever other rows ride along. Without seeds, rows
        are numbered from the config's seed and a counter of calls.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Give back the memory that generation needs (caches), and forget the weights."""

    @abstractmethod
    def wake_up(self) -> None:
        """Be ready to take weights and generate again; weights must be loaded after it."""

    # -- written once, for all of them ------------------------------------------------------------

    def limits(self, prompts: Ragged, sampling: SamplingParams, num_embeddings: int) -> Tensor:
        """(B,) how many tokens each row may get: `max_tokens`, or less where `max_model_len` ends the row.

        A prompt that nothing can follow, or that is not made of token ids, is an error.
        """
        longest = self.config.max_model_len - 1
        empty = (prompts.lengths == 0).nonzero()[:, 0].tolist()
        if empty:
            raise RolloutError(f"row {empty[0]} has an empty prompt; give each prompt at least one token")
        over = (prompts.lengths > longest).nonzero()[:, 0].tolist()
        if over:
            raise RolloutError(
                f"row {over[0]} has a prompt of {int(prompts.lengths[over[0]])} tokens, but max_model_len="
                f"{self.config.max_model_len} leaves room for {longest}; raise it, or drop or shorten long prompts"
            )
        outside = (prompts.values < 0) | (prompts.values >= num_embeddings)
        if bool(outside.any()):
            row, token = int(prompts.row_ids()[outside][0]), int(prompts.values[outside][0])
            raise RolloutError(f"row {row} has token id {token}, but the model knows 0..{num_embeddings - 1}")
        return (self.config.max_model_len - prompts.lengths).clamp(max=sampling.max_tokens)

    def seeds_of_call(self, num_rows: int, seeds: Tensor | None) -> Tensor:
        """(B,) int64: the given seeds, or those of this call, which is counted."""
        self._calls += 1
        if seeds is None:
            return row_seeds(self.config.seed, self._calls, num_rows)
        if seeds.shape != (num_rows,) or seeds.dtype != torch.int64:
            raise RolloutError(
                f"seeds must be int64 of shape ({num_rows},), one per prompt; got {seeds.dtype} {tuple(seeds.shape)}"
            )
        return seeds
