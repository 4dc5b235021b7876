"""The rollout interface: token ids in, token ids and their log-probs out.

    rollout = build_rollout("torch", config)
    rollout.load_weights(engine.named_weights())
    out = rollout.generate_sequences(prompts, SamplingParams(temperature=1.0, max_tokens=64))
    out.responses, out.log_probs           # Ragged, one row per prompt row

A rollout is independent of roles, rewards and training. It receives weights, and it returns the log-prob of each token
under the distribution that the token was sampled from.
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
    """Sampling options. `temperature=0` or `do_sample=False` is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    """Sample from the k most probable tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Sample from the most probable tokens whose probabilities add up to this value; 1.0 keeps all."""
    do_sample: bool = True
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a row, in addition to the model's end-of-sequence tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a row. The token that completes a string in the text of the response is kept.

    The text is the decoded response, without the prompt and without special tokens.
    """

    def __post_init__(self) -> None:
        rules = {
            "max_tokens must be at least 1": self.max_tokens < 1 and self.max_tokens,
            "temperature must be 0 (greedy) or more": not self.temperature >= 0 and self.temperature,
            "top_k must be a number of tokens, or 0 or -1 for all": self.top_k < -1 and self.top_k,
            "top_p must be above 0 and at most 1": not 0 < self.top_p <= 1 and self.top_p,
        }
        for rule, value in rules.items():
            if value is not False:
                raise RolloutError(f"SamplingParams: {rule}, got {value}")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise RolloutError(f"SamplingParams: stop must be a tuple of non-empty strings, got {self.stop!r}")

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0


@dataclass(frozen=True)
class Generation:
    """One response per prompt row, in the order of the prompts, on the device of the prompts."""

    responses: Ragged
    """Token ids. The last token of a finished row is the one that ended it."""
    log_probs: Ragged
    """float32, aligned with `responses`: log-probs after temperature, top_k and top_p.

    Greedy rows have the log-probs of the model at temperature 1.
    """
    finished: Tensor
    """(B,) bool: True if a stop token or stop string ended the row, False if a length limit did."""
    metrics: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def empty(prompts: Ragged) -> Generation:
        """Return the result for a batch without rows."""
        tokens = Ragged(prompts.values.new_empty(0), prompts.lengths[:0])
        return Generation(tokens, tokens.map(Tensor.float), tokens.values.bool())

    def to(self, device: torch.device | str) -> Generation:
        return Generation(self.responses.to(device), self.log_probs.to(device), self.finished.to(device), self.metrics)


class BaseRollout(ABC):
    """A generator that receives its weights from an engine."""

    keeps_tensors = True
    """True if it may keep the tensors passed to `load_weights` and use the allocator of this process; False if it
    copies them."""
    capabilities: ClassVar[RolloutCapabilities] = RolloutCapabilities()
    """What the rollout supports. Readable without an instance."""

    def __init__(self, config: RolloutEngineConfig):
        if config.lora is not None and not self.capabilities.supports_adapter:
            raise RolloutError(
                f"{type(self).__name__} does not support LoRA adapters; set "
                "actor_rollout_ref.rollout.lora_weights=merged, or actor_rollout_ref.rollout.name=vllm"
            )
        self.config = config
        self.weights_version = 0
        """Number of weight syncs. The sender increments it before `load_weights`.

        A counter is necessary because a fused optimizer may update a tensor without incrementing its version.
        """
        self.weights_sent: Mapping[str, int] = {}
        """Digests of the weights in the last weight sync, by name. Set by the sender."""
        self.base_sent: Mapping[str, int] | None = None
        """With `config.lora`: digests of the loaded base weights, by name. Set by the sender."""
        self.base_owner: weakref.ref[object] | None = None
        """With `config.lora`: the engine that sent the base weights. Set by the sender."""
        self._calls = 0

    # -- abstract methods -------------------------------------------------------------------------

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights by these tensors, which have Hugging Face names.

        Raise `RolloutError` with the name of a missing or unknown weight, or of one with the wrong shape. A tied weight
        may be passed under one of its names or under all. The rollout may keep a tensor instead of copying it, as the
        engine's contract for `named_weights` permits; later in-place updates are then visible to the rollout.
        With `config.lora` these are the base weights. They survive `sleep`, and `load_adapter` must follow.
        """

    @abstractmethod
    def weight_digests(self) -> Mapping[str, int]:
        """Return `digest()` of each weight by the name it was passed under, recomputed by the receiver.

        The digest covers the generator's tensor if the generator stores the weight unchanged, else the tensor that was
        received in the generator's process. Raise `RolloutError` if no weights are loaded.
        """

    @abstractmethod
    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        """Generate one response for each row of `prompts`; equal prompts may be computed once.

        `seeds` (B,) int64 make the call reproducible: the samples of a row depend only on its seed and its prompt, not
        on the other rows. Without `seeds`, they are derived from the config's seed and a counter of calls.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Free the KV cache and the weights."""

    @abstractmethod
    def wake_up(self) -> None:
        """Allocate memory for generation again. Weights must be loaded afterwards."""

    def load_adapter(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the adapter; requires `config.lora`.

        The tensors have the names of PEFT's files and must be complete. B already contains the scaling: a layer
        computes base + B A. `sleep` frees the adapter. `weight_digests` includes its tensors.
        """
        raise RolloutError(f"{type(self).__name__} does not support adapters; load merged weights")

    # -- shared by all rollouts -------------------------------------------------------------------

    def sync_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype to which the sender casts this weight. Override it to keep some weights in a wider dtype."""
        return getattr(torch, self.config.dtype) if tensor.is_floating_point() else tensor.dtype

    def limits(self, prompts: Ragged, sampling: SamplingParams, num_embeddings: int) -> Tensor:
        """Return (B,) the token limit of each row: `max_tokens`, or less if `max_model_len` ends the row earlier.

        Raise `RolloutError` for a prompt that is empty, too long, or contains ids outside the vocabulary.
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
            raise RolloutError(
                f"row {row} has token id {token}, but token ids of the model are 0..{num_embeddings - 1}; "
                "encode the prompt with the tokenizer of this model"
            )
        return (self.config.max_model_len - prompts.lengths).clamp(max=sampling.max_tokens)

    def seeds_of_call(self, num_rows: int, seeds: Tensor | None) -> Tensor:
        """Count this call and return its seeds, (B,) int64: `seeds`, or seeds derived from the config."""
        self._calls += 1
        if seeds is None:
            return row_seeds(self.config.seed, self._calls, num_rows)
        if seeds.shape != (num_rows,) or seeds.dtype != torch.int64:
            raise RolloutError(
                f"seeds must be int64 of shape ({num_rows},), one per prompt; got {seeds.dtype} {tuple(seeds.shape)}"
            )
        return seeds


# -- state checks shared by all rollouts ----------------------------------------------------------


def check_can_load(asleep: bool) -> None:
    """Raise `RolloutError` if `load_weights` was called while the rollout sleeps."""
    if asleep:
        raise RolloutError("the rollout is asleep: call wake_up() before load_weights()")


def check_can_generate(asleep: bool, has_weights: bool) -> None:
    """Raise `RolloutError` if a method that needs weights was called without them."""
    if asleep:
        raise RolloutError("the rollout is asleep: call wake_up() and load_weights() before generate_sequences()")
    if not has_weights:
        raise RolloutError(
            "the rollout has no weights: call load_weights(engine.named_weights()) before generate_sequences(), "
            "once at the start and again after each sleep()"
        )
