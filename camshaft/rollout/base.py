"""The rollout interface: token ids in, token ids and their log-probs out.

    rollout = build_rollout("torch", config)
    rollout.load_weights(engine.named_weights())
    out = rollout.generate_sequences(prompts, SamplingParams(temperature=1.0, max_tokens=64))
    out.responses, out.log_probs           # Ragged, one row per prompt row

A rollout knows nothing of roles, rewards or training. It is given weights, and what it says of a token
is the log-probability in the very distribution that it sampled from.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from camshaft.config.rollout import RolloutCapabilities, RolloutEngineConfig
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
    stop: tuple[str, ...] = ()
    """End a row with the token that completes one of these strings in the text of the response, and keep that token.

    The text is what the tokenizer makes of the response alone, without special tokens.
    """

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
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise RolloutError(f"SamplingParams: stop must be a tuple of strings that are not empty, got {self.stop!r}")

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

    keeps_tensors = True
    """Whether it may keep the tensors of `load_weights` and use this process' allocator. False if it copies."""
    capabilities: ClassVar[RolloutCapabilities] = RolloutCapabilities()
    """What the rollout supports. Readable without an instance."""

    def __init__(self, config: RolloutEngineConfig):
        if config.lora is not None and not self.capabilities.takes_adapter:
            raise RolloutError(
                f"{type(self).__name__} takes whole weights and has no adapters of its own; type "
                "actor_rollout_ref.rollout.lora_weights=merged, or actor_rollout_ref.rollout.name=vllm"
            )
        self.config = config
        self.weights_version = 0
        """The number of the hand-over that the weights belong to; who hands over counts, before `load_weights`.

        An optimizer need not leave a trace on a tensor that it writes to, so nothing else tells old from new.
        """
        self.weights_sent: Mapping[str, int] = {}
        """Digests of what that hand-over sent, by name; likewise."""
        self.base_sent: Mapping[str, int] | None = None
        """With `config.lora`: those of the base weights that are there, and the engine that they are of; likewise."""
        self.base_owner: weakref.ref[object] | None = None
        self._calls = 0

    # -- what a generator implements --------------------------------------------------------------

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take these Hugging Face names and tensors as the weights from now on.

        All of them must come; one that is missing, unknown or misshapen is an error that names it. A tied
        weight may come under one of its names or under all. The rollout may keep a tensor instead of copying
        it, and then sees what is written into it later; the engine's rule for `named_weights` allows it.
        With `config.lora` these are the base weights, which outlast `sleep`, and an adapter must come behind them.
        """

    @abstractmethod
    def weight_digests(self) -> Mapping[str, int]:
        """`digest()` of each weight by the name it came under, recomputed at the receiving side.

        From what the generator holds, where it holds it as it came, else from what arrived in the process that
        uses it. Without weights it is an error.
        """

    @abstractmethod
    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        """One response for each row of `prompts`; a generator may compute equal prompts once.

        `seeds` (B,) int64 make the call reproducible: a row's samples depend on its seed and its prompt alone,
        whatever other rows ride along. Without seeds, rows are numbered from the config's seed and a counter of
        calls.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Give back the memory that generation needs (caches), and forget the weights."""

    @abstractmethod
    def wake_up(self) -> None:
        """Be ready to take weights and generate again; weights must be loaded after it."""

    def load_adapter(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """With `config.lora`: take this adapter from now on, in the place of the one before.

        Names are those of PEFT's files, and the scaling is in B already: a layer computes base + B A. All of it must
        come; `sleep` forgets it. `weight_digests` has its tensors beside the base weights.
        """
        raise RolloutError(f"{type(self).__name__} takes no adapter by itself; hand over merged weights")

    # -- written once, for all of them ------------------------------------------------------------

    def arrival_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        """What the sender casts this weight to; a generator that keeps some weights wider says so here."""
        return getattr(torch, self.config.dtype) if tensor.is_floating_point() else tensor.dtype

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


# -- the same words for all of them ---------------------------------------------------------------


def refuse_load(asleep: bool) -> None:
    """For `load_weights`."""
    if asleep:
        raise RolloutError("the rollout sleeps: call wake_up() before load_weights()")


def refuse_use(asleep: bool, has_weights: bool) -> None:
    """For all that needs weights."""
    if asleep:
        raise RolloutError("the rollout sleeps: call wake_up() and load_weights() before generate_sequences()")
    if not has_weights:
        raise RolloutError(
            "the rollout has no weights: call load_weights(engine.named_weights()) before generate_sequences(), "
            "once at the start and again after each sleep()"
        )
