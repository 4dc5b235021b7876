"""The rollout interface: token ids in, token ids and their log-probs out.

    rollout = build_rollout("torch", config)
    rollout.load_weights(engine.named_weights())
    out = rollout.generate_sequences(prompts, SamplingParams(temperature=1.0, max_tokens=64))
    out.responses, out.log_probs           # Ragged, one row per prompt row

A rollout does not depend on roles, rewards or training. It receives weights and generates tokens. Each log-prob refers
to the distribution from which the token was sampled.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from camshaft.config.rollout import OPTIONAL_SAMPLING, RolloutCapabilities, RolloutEngineConfig
from camshaft.dataproto import Ragged
from camshaft.errors import RolloutError
from camshaft.rollout.sampling import Penalties, restart_seeds, restrict, row_seeds
from camshaft.rollout.scoring import PromptScores


class UnsupportedSampling(RolloutError):
    """A rollout does not support a sampling option."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options. `temperature=0` or `do_sample=False` selects greedy decoding.

    In a continued row, the response consists of the earlier tokens and the new ones.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    """Number of most probable tokens to sample from; 0 or -1 keeps all tokens."""
    top_p: float = 1.0
    """Total probability of the most probable tokens to sample from; 1.0 keeps all tokens."""
    min_p: float = 0.0
    """Minimum probability of a token, relative to the most probable token; 0.0 keeps all tokens. Like the penalties, it
    requires a rollout that declares it in `RolloutCapabilities.sampling`."""
    repetition_penalty: float = 1.0
    """Penalty on tokens of prompt and response: positive logits are divided by it, others are multiplied by it."""
    presence_penalty: float = 0.0
    """Number that is subtracted from the logits of tokens in the response."""
    frequency_penalty: float = 0.0
    """Number that is subtracted from the logit of a token for each of its occurrences in the response."""
    do_sample: bool = True
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a row, in addition to the model's end-of-sequence tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a row once the decoded response contains one. The token that completes the string is kept.

    The decoded text excludes the prompt and special tokens.
    """

    def __post_init__(self) -> None:
        rules = {
            "max_tokens must be at least 1": (self.max_tokens, self.max_tokens >= 1),
            "temperature must be 0 (greedy) or more": (self.temperature, self.temperature >= 0),
            "top_k must be a number of tokens, or 0 or -1 for all tokens": (self.top_k, self.top_k >= -1),
            "top_p must be above 0 and at most 1": (self.top_p, 0 < self.top_p <= 1),
            "min_p must be at least 0 and at most 1": (self.min_p, 0 <= self.min_p <= 1),
            "repetition_penalty must be above 0": (self.repetition_penalty, self.repetition_penalty > 0),
            "presence_penalty must be between -2 and 2": (self.presence_penalty, -2 <= self.presence_penalty <= 2),
            "frequency_penalty must be between -2 and 2": (self.frequency_penalty, -2 <= self.frequency_penalty <= 2),
        }
        for rule, (value, is_valid) in rules.items():
            if not is_valid:
                raise RolloutError(f"SamplingParams: {rule}, got {value}")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise RolloutError(f"SamplingParams: stop must be a tuple of non-empty strings, got {self.stop!r}")

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0

    def at_temperature(self, temperature: float) -> SamplingParams:
        """Return the same options at another temperature. 0 selects greedy decoding, and others sample."""
        return replace(self, temperature=temperature, do_sample=temperature > 0)

    def optional(self) -> dict[str, float]:
        """Return the parameters that have an effect and that a rollout must declare as supported."""
        return {name: getattr(self, name) for name, off in OPTIONAL_SAMPLING.items() if getattr(self, name) != off}

    @property
    def is_plain(self) -> bool:
        """True if log-probs are those of the model at temperature 1, as with greedy decoding, without penalties."""
        keeps_all = self.temperature == 1 and self.top_k < 1 and self.top_p == 1
        return not self.optional() and (self.greedy or keeps_all)

    def restrict(self, logits: Tensor) -> Tensor:
        """Return the scores (B, V) whose softmax is the distribution of log-probs, without penalties."""
        if self.greedy:
            return restrict(logits, temperature=1.0)
        return restrict(logits, self.temperature, self.top_k, self.top_p, self.min_p)

    def penalties(self, rows: OpenRows, device: torch.device) -> Penalties | None:
        """Return the penalties on tokens for these rows; None if no penalty is set."""
        strengths = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        if strengths == (1.0, 0.0, 0.0):
            return None
        max_tokens = int(rows.generated.lengths.max() + rows.limits.max())
        penalties = Penalties(rows.prompts.to(device), max_tokens, *strengths)
        penalties.add_rows(rows.generated.to(device))
        return penalties


@dataclass(frozen=True)
class Generation:
    """One response per prompt row, in the order of the prompts, on the device of the prompts.

    Of a continued row, it contains the new tokens only.
    """

    responses: Ragged
    """Token ids. The last token of a finished row is the stop token, or the token that completes the stop string."""
    log_probs: Ragged
    """Log-probs after penalties, temperature, min_p, top_k and top_p, in float32 and aligned with `responses`.

    For greedy decoding, these are the log-probs at temperature 1 after the penalties.
    """
    finished: Tensor
    """Bool of shape (B,): True if a stop token or stop string ended the row, False if a length limit did."""
    metrics: dict[str, float] = field(default_factory=dict)
    routed_experts: Ragged | None = None
    """Experts (layers, top-k) that a mixture of experts chose for each token of prompt and response, as integers of one
    or two bytes, with `enable_return_routed_experts`. The largest integer marks a token that was not computed, such as
    the last one of a row. The tokens of a prompt that was given with earlier tokens are left out."""
    num_cached: Tensor | None = None
    """With `row_ids`, int64 of shape (B,): tokens of each context that an earlier call had computed and kept."""

    @staticmethod
    def empty(prompts: Ragged) -> Generation:
        """Return the result for a batch without rows."""
        tokens = Ragged(prompts.values.new_empty(0), prompts.lengths[:0])
        return Generation(tokens, tokens.map(Tensor.float), tokens.values.bool())

    def to(self, device: torch.device | str) -> Generation:
        experts = None if self.routed_experts is None else self.routed_experts.to(device)
        responses, log_probs = self.responses.to(device), self.log_probs.to(device)
        return Generation(responses, log_probs, self.finished.to(device), self.metrics, experts, self.num_cached)


@dataclass(frozen=True)
class OpenRows:
    """The rows of a call that have not ended. `BaseRollout.open_rows` returns them."""

    prompts: Ragged
    generated: Ragged
    """Earlier tokens of each response; empty for a row that has not begun."""
    limits: Tensor
    """Maximum number of new tokens, at least 1."""
    seeds: Tensor
    is_open: Tensor
    """Bool of shape (B,) for all rows of the call: False if the earlier tokens of a row end it."""
    finished: Tensor
    """Bool of shape (B,) for all rows of the call: True if a stop token or stop string has ended a row."""

    @cached_property
    def contexts(self) -> Ragged:
        """Prompt and earlier tokens of each row. The first new token follows them."""
        return Ragged.join(self.prompts, self.generated) if len(self.generated.values) else self.prompts

    def select(self, index: slice | Tensor) -> OpenRows:
        """Select rows. `is_open` and `finished` remain those of the call."""
        prompts, generated = self.prompts.select(index), self.generated.select(index)
        return replace(self, prompts=prompts, generated=generated, limits=self.limits[index], seeds=self.seeds[index])

    def complete(self, generation: Generation) -> Generation:
        """Return the result of the call, given that of the open rows. A row that had ended gets no tokens."""
        experts = generation.routed_experts
        if experts is not None and len(self.generated.values):
            earlier = self.contexts.lengths.where(self.generated.lengths > 0, 0)
            experts = experts.suffix(experts.lengths - earlier)
        if bool(self.is_open.all()):
            return replace(generation, routed_experts=experts)

        def of_all_rows(numbers: Tensor) -> Tensor:
            return torch.zeros(len(self.is_open), dtype=torch.int64).masked_scatter(self.is_open, numbers)

        def expanded(column: Ragged) -> Ragged:
            return Ragged(column.values, of_all_rows(column.lengths))

        finished = self.finished.to(generation.finished.device)
        finished = finished.masked_scatter(self.is_open.to(finished.device), generation.finished)
        responses, log_probs = expanded(generation.responses), expanded(generation.log_probs)
        experts = None if experts is None else expanded(experts)
        num_cached = None if generation.num_cached is None else of_all_rows(generation.num_cached)
        return Generation(responses, log_probs, finished, generation.metrics, experts, num_cached)


Loader = Callable[..., None]
"""`load_weights` or `load_adapter` of a rollout."""


class BaseRollout(ABC):
    """A generator that receives its weights from an engine."""

    keeps_tensors = True
    """True if the rollout may keep the tensors passed to `load_weights` and uses the allocator of this process; False
    if it copies them."""
    capabilities: RolloutCapabilities = RolloutCapabilities()
    """Features that the rollout supports. Those of the class can be read without an instance. An instance that wraps
    another rollout has those that the other one has too."""
    version: int = 0
    """Version of the weights that the rollout holds. `load_weights` and `load_adapter` set it when they succeed."""

    def __init__(self, config: RolloutEngineConfig):
        if config.lora is not None and not self.capabilities.supports_adapter:
            raise RolloutError(
                f"{type(self).__name__} does not support LoRA adapters; set "
                "actor_rollout_ref.rollout.lora_weights=merged, or actor_rollout_ref.rollout.name=vllm"
            )
        if config.enable_return_routed_experts and not self.capabilities.supports_routed_experts:
            raise RolloutError(
                f"{type(self).__name__} does not return expert choices; set "
                "actor_rollout_ref.rollout.enable_return_routed_experts=false and "
                "actor_rollout_ref.actor.router_replay.mode=disabled, or actor_rollout_ref.rollout.name=torch"
            )
        self.config = config
        self._calls = 0

    # -- abstract methods -------------------------------------------------------------------------

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Replace all weights. `weights` yields pairs of Hugging Face name and tensor.

        `version` numbers the weights, such as the number of the weight sync. The rollout reports it as its `version`.
        A rollout may omit this argument; the sender then sets the attribute.

        Raise a `RolloutError` that contains the name of the weight if a weight is missing, unknown, or has the wrong
        shape. A tied weight may be passed under one of its names or under all of them. The rollout may keep a tensor
        instead of copying it, which the engine's contract for `named_weights` permits. In-place updates of the tensor
        are then visible to the rollout.

        If `config.lora` is set, these are the base weights. They survive `sleep`, and `load_adapter` must be called
        before generation.
        """

    @abstractmethod
    def weight_digests(self) -> Mapping[str, int]:
        """Return the digest of each weight under the name with which it was passed, recomputed by the receiver.

        If the generator stores the weight unchanged, the digest is computed from the stored tensor. Otherwise it is
        computed from the tensor that the generator's process received. Raise `RolloutError` if no weights are loaded.
        """

    @abstractmethod
    def generate_sequences(
        self,
        prompts: Ragged,
        sampling: SamplingParams,
        seeds: Tensor | None = None,
        generated: Ragged | None = None,
        row_ids: Sequence[Hashable] | None = None,
    ) -> Generation:
        """Generate one response for each row of `prompts`. The rollout may compute equal prompts only once.

        `seeds`, int64 of shape (B,), makes the call reproducible: the samples of a row depend only on its seed and its
        prompt, not on the other rows. Without `seeds`, the seeds are derived from the config's seed and a call counter.

        `generated` continues responses: row i contains the tokens that earlier calls with the same prompt, sampling and
        seed have returned for row i, or none. Penalties, stop strings and length limits apply to earlier and new tokens
        together, and only new tokens are returned. A row that its earlier tokens end gets no tokens. If
        `capabilities.continues_rows` is set, a continued row has the tokens of an uninterrupted one, except where
        rounding decides between two tokens. This argument is passed only to continue rows, so a rollout that cannot
        continue them may omit it. `open_rows` implements all of this but the generation itself.

        `row_ids` names conversations, one different id per row. The rollout keeps what it has computed of them. Of a
        row whose context begins with the tokens of an earlier call with its id, it then computes only the others, and
        the results are those without `row_ids` up to rounding. This argument is passed only if
        `capabilities.keeps_rows` is set. A rollout forgets rows when its weights change, and may forget others.
        """

    def close_rows(self, row_ids: Iterable[Hashable]) -> None:  # noqa: B027
        """Free what is kept of these rows, as far as anything is. A later call computes them again."""

    def score(
        self,
        prompts: Ragged,
        top_k: int = 0,
        candidates: Ragged | None = None,
        sampling: SamplingParams | None = None,
    ) -> PromptScores:
        """Return the log-prob of each token of `prompts`, given the tokens before it.

        `top_k` also returns the most probable tokens at each position. `candidates`, with ids (K,) or -1 for each token
        of the prompts, also returns the log-probs of these ids in place of the token. Log-probs refer to the
        distribution of the model at temperature 1; with `sampling`, they refer to that of samples with these options,
        whose log-probs they equal up to rounding. `max_tokens` and stops have no effect, and penalties are rejected.
        A rollout may reject other options than temperature 1 with `UnsupportedSampling`.

        This is called only if `capabilities.scores_prompts` is set. `candidates` require `scores_candidates`.
        """
        raise RolloutError(
            f"{type(self).__name__} does not return the log-probs of given tokens; use a rollout whose capabilities "
            "declare scores_prompts, such as torch"
        )

    @abstractmethod
    def sleep(self) -> None:
        """Free the KV cache and the weights."""

    @abstractmethod
    def wake_up(self) -> None:
        """Allocate memory for generation again. The weights must then be loaded before the next generation.

        This has no effect if the rollout is awake.
        """

    def load_adapter(self, weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Replace the LoRA adapter. This requires `config.lora`.

        `weights` yields all tensors of the adapter under the names that PEFT uses in adapter files. B already contains
        the scaling, so a layer computes base + B A. `sleep` frees the adapter. `weight_digests` includes its tensors.
        `version` is that of the base weights with this adapter.
        """
        raise RolloutError(f"{type(self).__name__} does not support adapters; load merged weights")

    # -- shared by all rollouts -------------------------------------------------------------------

    @property
    def casts_weights(self) -> bool:
        """True if `load_weights` copies each weight and casts it to `sync_dtype` in the same step.

        A sender in the same process then need not cast the weights. Digests are those of the results.
        """
        return False

    def sync_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype to which the sender casts this weight. Override this to keep a weight in a wider dtype."""
        return getattr(torch, self.config.dtype) if tensor.is_floating_point() else tensor.dtype

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raise `UnsupportedSampling` if the rollout does not support a sampling option."""
        for name, value in sampling.optional().items():
            if name not in self.capabilities.sampling:
                raise UnsupportedSampling(
                    f"{type(self).__name__} does not support {name}={value}; set {name}={OPTIONAL_SAMPLING[name]:g}, "
                    "or use another rollout"
                )

    def limits(self, prompts: Ragged, sampling: SamplingParams, num_embeddings: int) -> Tensor:
        """Return the maximum number of response tokens per row, shape (B,).

        The limit is `max_tokens`, or less if the row reaches `max_model_len` earlier. Raise `RolloutError` if a prompt
        is empty, too long, or contains token ids outside the vocabulary, or if the rollout does not support `sampling`.
        """
        self.check_sampling(sampling)
        self._check_prompts(prompts, self.config.max_model_len - 1, num_embeddings)
        return (self.config.max_model_len - prompts.lengths).clamp(max=sampling.max_tokens)

    def _check_prompts(self, prompts: Ragged, max_length: int, num_embeddings: int) -> None:
        for row, length in enumerate(prompts.lengths.tolist()):
            if not length:
                raise RolloutError(f"row {row} has an empty prompt; give each prompt at least one token")
            if length > max_length:
                raise RolloutError(
                    f"row {row} has a prompt of {length} tokens, but max_model_len={self.config.max_model_len} allows "
                    f"prompts of at most {max_length} tokens; increase max_model_len, or drop or shorten long prompts"
                )
        _check_token_ids(prompts, num_embeddings, "encode the prompt with the tokenizer of this model")

    @property
    def max_scored_tokens(self) -> int:
        """Maximum number of tokens of a prompt that `score` accepts."""
        return self.config.max_model_len

    def check_scoring(
        self,
        prompts: Ragged,
        top_k: int,
        candidates: Ragged | None,
        sampling: SamplingParams | None,
        num_embeddings: int,
    ) -> None:
        """Raise `RolloutError` if the arguments of `score` are invalid or unsupported."""
        self._check_prompts(prompts, self.max_scored_tokens, num_embeddings)
        if not 0 <= top_k <= num_embeddings:
            raise RolloutError(f"top_k={top_k} is not from 0 to {num_embeddings}, the number of token ids of the model")
        if candidates is not None:
            if not self.capabilities.scores_candidates:
                raise RolloutError(
                    f"{type(self).__name__} does not return the log-probs of candidates; leave them out, or use a "
                    "rollout whose capabilities declare scores_candidates, such as torch"
                )
            if not torch.equal(candidates.lengths, prompts.lengths) or candidates.values.ndim != 2:
                raise RolloutError(
                    f"candidates has rows of {candidates.lengths.tolist()} tokens and values of shape "
                    f"{tuple(candidates.values.shape)}; give (K,) ids for each token of the prompts"
                )
            named = candidates.map(lambda ids: ids.clamp(min=0).amax(-1))
            _check_token_ids(named, num_embeddings, "give token ids of this model, or -1")
        if sampling is not None and replace(sampling, min_p=0.0).optional():
            raise UnsupportedSampling(
                f"score does not support penalties, which depend on earlier tokens of a response, got {sampling}; "
                "leave them out"
            )

    def open_rows(
        self,
        prompts: Ragged,
        sampling: SamplingParams,
        seeds: Tensor | None,
        generated: Ragged | None,
        num_embeddings: int,
        has_stop: Callable[[list[int]], bool],
    ) -> OpenRows:
        """Validate the arguments of `generate_sequences` and return the rows that have not ended.

        `has_stop` returns True if the earlier tokens of a row contain a stop token or stop string.
        """
        limits = self.limits(prompts, sampling, num_embeddings)
        seeds = self.seeds_of_call(len(prompts), seeds)
        is_open = torch.ones(len(prompts), dtype=torch.bool)
        if generated is None or not len(generated.values):
            earlier = Ragged(prompts.values.new_empty(0), torch.zeros_like(prompts.lengths))
            return OpenRows(prompts, earlier, limits, seeds, is_open, ~is_open)
        generated = generated.like(generated.values.to(prompts.values))
        self._check_generated(generated, len(prompts), sampling, num_embeddings)
        if not self.capabilities.continues_rows:
            seeds = restart_seeds(seeds, generated.lengths.to(seeds.device))
        limits = limits - generated.lengths
        finished = torch.tensor([len(row) > 0 and has_stop(row.tolist()) for row in generated.rows()])
        is_open = (limits > 0) & ~finished
        return OpenRows(prompts, generated, limits, seeds, is_open, finished).select(is_open.nonzero()[:, 0])

    def _check_generated(self, generated: Ragged, num_rows: int, sampling: SamplingParams, num_embeddings: int) -> None:
        """Raise `RolloutError` if the rollout cannot continue rows with these earlier tokens and sampling options."""
        if len(generated) != num_rows:
            raise RolloutError(
                f"generated has {len(generated)} rows for {num_rows} prompts; pass one row per prompt, without tokens "
                "for a response that has not begun"
            )
        _check_token_ids(generated, num_embeddings, "pass the tokens that this rollout has generated")
        for name in () if self.capabilities.continues_rows else RESPONSE_OPTIONS:
            if vars(sampling)[name]:
                raise RolloutError(
                    f"{type(self).__name__} cannot continue rows with {name}={vars(sampling)[name]}, because it "
                    f"applies {name} to the tokens of one call; remove {name}, or use a rollout whose capabilities "
                    "declare continues_rows, such as torch"
                )

    def seeds_of_call(self, num_rows: int, seeds: Tensor | None) -> Tensor:
        """Increment the call counter and return int64 seeds of shape (B,) for this call.

        The result is `seeds` if they are given. Otherwise seeds are derived from the config's seed and the counter.
        """
        self._calls += 1
        if seeds is None:
            return row_seeds(self.config.seed, self._calls, num_rows)
        if seeds.shape != (num_rows,) or seeds.dtype != torch.int64:
            raise RolloutError(
                f"seeds must be an int64 tensor of shape ({num_rows},) with one seed per prompt, got {seeds.dtype} of "
                f"shape {tuple(seeds.shape)}"
            )
        return seeds


def load_with_version(rollout: BaseRollout, load: Loader, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Call `load`, a method of `rollout`, and make the rollout report `version` if the method cannot receive it."""
    if "version" in inspect.signature(load).parameters:
        load(weights, version=version)
    else:
        load(weights)
        rollout.version = version


# -- checks shared by all rollouts ----------------------------------------------------------------

RESPONSE_OPTIONS = ("presence_penalty", "frequency_penalty", "stop")
"""Sampling options that depend on the tokens of the response but not on those of the prompt."""


def _check_token_ids(rows: Ragged, num_embeddings: int, fix: str) -> None:
    """Raise `RolloutError` if a row contains token ids outside the vocabulary."""
    is_invalid = (rows.values < 0) | (rows.values >= num_embeddings)
    if bool(is_invalid.any()):
        row, token = int(rows.row_ids()[is_invalid][0]), int(rows.values[is_invalid][0])
        raise RolloutError(
            f"row {row} has token id {token}, but the model's token ids are 0..{num_embeddings - 1}; {fix}"
        )


def check_can_load(asleep: bool) -> None:
    """Raise `RolloutError` if the rollout is asleep and therefore cannot load weights."""
    if asleep:
        raise RolloutError("the rollout is asleep: call wake_up() before load_weights()")


def check_can_generate(asleep: bool, has_weights: bool) -> None:
    """Raise `RolloutError` if the rollout is asleep or has no weights."""
    if asleep:
        raise RolloutError("the rollout is asleep: call wake_up() and load_weights() before generate_sequences()")
    if not has_weights:
        raise RolloutError(
            "the rollout has no weights: call load_weights(engine.named_weights()) before generate_sequences(), "
            "once at the start and again after each sleep()"
        )


def check_finite(log_probs: Ragged) -> None:
    """Raise `RolloutError` if a log-prob is NaN or infinite."""
    invalid_rows = log_probs.row_ids()[~log_probs.values.isfinite()]
    if len(invalid_rows):
        row = int(invalid_rows[0])
        raise RolloutError(
            f"the model's logits are not finite for row {row}; check the weights for NaN or infinite values, or lower "
            "actor_rollout_ref.actor.optim.lr if this happens during training"
        )
