"""The harness of the rollout contract, which provides tiny models, prompts, and the expected log-probs.

    harness = RolloutHarness(TorchRollout, "/tmp/scratch")
    case = harness.case("llama", max_num_seqs=4)       # a rollout and an oracle with the same weights
    out = case.rollout.generate_sequences(harness.prompts(3, 9), SamplingParams(max_tokens=8))
    case.log_probs(prompts, out.responses, sampling)

The oracle shares no code with the generators. It runs the transformers model in float64 on one row at a time, without a
cache or padding, and truncates the distribution token by token. A generator that computes in float32 differs from the
oracle by rounding errors, whose size depends on the machine and on the weights. The harness measures them as the
difference between a float32 and a float64 run of the oracle. A generator may differ by `ROUNDINGS` times as much.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.contracts.rules import Violation, expect, expect_error
from camshaft.errors import RolloutError
from camshaft.models.loader import load_tokenizer, quiet_transformers
from camshaft.models.tiny import make_tiny_model
from camshaft.ragged import Ragged
from camshaft.rollout.base import BaseRollout, Generation, SamplingParams

SHARPNESS = 12.0
"""Factor that scales the oracle's weights. Without it, the distributions of random tiny models are almost uniform."""

EOS = 2
"""End-of-sequence token of the tiny models."""

ROUNDINGS = 8
"""Allowed difference from the oracle as a multiple of the measured rounding error.

Correct generators that sum in a different order differed by 0.5 to 1.7 times the rounding error, with AVX-512, AVX2 and
scalar kernels.
"""


class RolloutHarness:
    """Harness of one rollout class, with a scratch folder for the models."""

    def __init__(
        self,
        rollout_class: type[BaseRollout],
        folder: str | Path,
        device: str = "cpu",
        sizes: dict[str, Any] | None = None,
        unsupported: Mapping[str, str] | None = None,
    ):
        self.rollout_class, self.folder, self.device = rollout_class, Path(folder), device
        self.sizes: dict[str, Any] = {"hidden": 32, "seed": 3} | (sizes or {})
        """Arguments of `make_tiny_model` for all models. Some kernels require models larger than the default."""
        self.unsupported: Mapping[str, str] = unsupported or {}
        """Map from each model type that the rollout must reject to a phrase of the error message."""
        self.tolerance = 1e-4
        """Minimum tolerance for log-probs, because kernels may approximate exp and multiply in TF32."""

    def case(self, family: str = "qwen2", sizes: dict[str, Any] | None = None, **config: Any) -> Case:
        """Return a rollout and an oracle that have the same weights; `family` is the model type."""
        case = self.empty_case(family, sizes, **config)
        case.rollout.load_weights(case.weights())
        return case

    def empty_case(self, family: str = "qwen2", sizes: dict[str, Any] | None = None, **config: Any) -> Case:
        """Return a case whose rollout has no weights."""
        name = "-".join([family, *(f"{key}{value}" for key, value in (sizes or {}).items())])
        folder = self.folder / name
        if not folder.exists():
            make_tiny_model(folder, family, **(self.sizes | (sizes or {})))
        defaults = {"max_model_len": 96, "max_num_seqs": 16, "device": self.device}
        rollout = self.rollout_class(RolloutEngineConfig(model_path=str(folder), **(defaults | config)))
        with quiet_transformers():
            oracle: Any = AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
            )
        for weight in oracle.parameters():
            if weight.ndim > 1:
                weight.data *= SHARPNESS
        return Case(rollout, oracle.to(self.device).eval(), load_tokenizer(str(folder)))

    def prompts(self, *lengths: int, seed: int = 0) -> Ragged:
        """Return random prompts with the given lengths."""
        random = torch.Generator().manual_seed(seed)
        return Ragged.from_rows([torch.randint(3, 100, (n,), generator=random) for n in lengths], torch.int64)


@dataclass(frozen=True)
class Case:
    """A rollout and the transformers model that computes the expected results."""

    rollout: BaseRollout
    oracle: Any
    tokenizer: Any

    def text(self, tokens: list[int]) -> str:
        """Decode the tokens of a response without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def weights(self) -> list[tuple[str, Tensor]]:
        return list(self.oracle.named_parameters())

    def other_weights(self) -> list[tuple[str, Tensor]]:
        """Return scaled copies of the weights. They give different log-probs."""
        return [(name, weight.detach() * (1.5 if weight.ndim > 1 else 1)) for name, weight in self.weights()]

    @torch.no_grad()
    def distribution(
        self, tokens: Tensor, sampling: SamplingParams, model: Any = None, prompt_length: int | None = None
    ) -> Tensor:
        """Return the float64 probabilities (T, V) of the next token after each prefix of `tokens` (T,).

        The penalties need `prompt_length`, the number of tokens that are not part of the response.
        """
        logits = self.logits(model or self.oracle, tokens[None])[0]
        if prompt_length is not None:
            logits = torch.stack(
                [
                    _penalized(row, tokens[: i + 1], tokens[prompt_length : i + 1], sampling)
                    for i, row in enumerate(logits)
                ]
            )
        if sampling.greedy:
            return logits.softmax(-1)
        return torch.stack([_truncated(row / sampling.temperature, sampling) for row in logits])

    def log_probs(self, prompts: Ragged, responses: Ragged, sampling: SamplingParams) -> Ragged:
        """Return the float64 log-prob of each response token in the distribution that `sampling` describes."""
        model, rows = self.double(), []
        for prompt, response in zip(prompts.rows(), responses.rows(), strict=True):
            tokens = torch.cat([prompt, response])
            probs = self.distribution(tokens, sampling, model, len(prompt))[len(prompt) - 1 : -1]
            rows.append(probs.gather(-1, response[:, None])[:, 0].log())
        return Ragged.from_rows(rows, torch.float64)

    def check_log_probs(
        self,
        prompts: Ragged,
        generation: Generation,
        sampling: SamplingParams,
        subject: str = "log-probs",
        tolerance: float = 0.0,
    ) -> None:
        """Raise `Violation` if the log-probs differ from the oracle by more than rounding errors and `tolerance`."""
        expected = self.log_probs(prompts, generation.responses, sampling)
        expect(bool(expected.values.isfinite().all()), f"{subject}: a token that {sampling} excludes was sampled")
        allowed = ROUNDINGS * self.rounding(prompts, generation.responses, sampling)
        expect_close(generation.log_probs, expected, max(tolerance, allowed), subject)

    def rounding(self, prompts: Ragged, responses: Ragged, sampling: SamplingParams) -> float:
        """Return the maximum rounding error of log-probs in float32.

        This is the maximum difference between a float32 and a float64 run of the oracle, and at least the error of
        storing the log-probs in float32.
        """
        temperature = 1.0 if sampling.greedy else sampling.temperature
        models = (self.oracle, self.double())
        single, double = (self._untruncated(model, prompts, responses, temperature) for model in models)
        storage_error = torch.finfo(torch.float32).eps * double.values.abs().max()
        return float(torch.maximum(storage_error, (single.values - double.values).abs().max()))

    def untruncated_log_probs(self, prompts: Ragged, responses: Ragged) -> Ragged:
        """Return the float64 log-prob of each response token at temperature 1. This is fast enough for many rows."""
        return self._untruncated(self.double(), prompts, responses, 1.0)

    @torch.no_grad()
    def _untruncated(self, model: Any, prompts: Ragged, responses: Ragged, temperature: float) -> Ragged:
        """Compute log-probs in batches of rows of similar lengths.

        The batches are padded on the right, where causal attention hides the padding.
        """
        rows = [torch.cat(pair) for pair in zip(prompts.rows(), responses.rows(), strict=True)]
        log_probs: list[Tensor] = [torch.empty(0)] * len(rows)
        for batch in _batches_of_similar_lengths([len(row) for row in rows]):
            grid = torch.nn.utils.rnn.pad_sequence([rows[row] for row in batch], batch_first=True)
            scores = self.logits(model, grid)[:, :-1] / temperature
            token_log_probs = scores.log_softmax(-1).gather(-1, grid[:, 1:, None])[..., 0]
            for row, values in zip(batch, token_log_probs, strict=True):
                first = int(prompts.lengths[row]) - 1
                log_probs[row] = values[first : first + int(responses.lengths[row])]
        return Ragged.from_rows(log_probs, torch.float64)

    def logits(self, model: Any, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, V) of a model in float64, on the CPU."""
        return model(input_ids=tokens.to(self.oracle.device)).logits.double().cpu()

    def double(self) -> Any:
        """Return a float64 copy of the oracle with its current weights, because rules change the weights in place."""
        return copy.deepcopy(self.oracle).double()

    @torch.no_grad()
    def generate(self, prompt: Tensor, max_tokens: int, stop_ids: list[int] | None) -> list[int]:
        """Return the greedy response to one prompt, generated by `transformers.generate`."""
        out = self.oracle.generate(
            prompt[None].to(self.oracle.device),
            attention_mask=torch.ones_like(prompt)[None].to(self.oracle.device),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=stop_ids,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()


def _batches_of_similar_lengths(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield batches of at most 64 rows. The longest row of a batch has at most twice as many tokens as the shortest."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        if batch and (len(batch) == 64 or lengths[row] > 2 * lengths[batch[0]]):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _penalized(logits: Tensor, tokens: Tensor, response: Tensor, sampling: SamplingParams) -> Tensor:
    """Return the logits (V,) after the repetition penalty of transformers, and the other penalties token by token."""
    penalty = RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))
    logits = penalty(tokens[None].cpu(), logits[None].clone())[0]  # pyright: ignore[reportArgumentType]
    for token, count in Counter(response.tolist()).items():
        logits[token] -= sampling.presence_penalty + count * sampling.frequency_penalty
    return logits


def _truncated(scores: Tensor, sampling: SamplingParams) -> Tensor:
    """Return the probabilities (V,) of the next token: min_p of transformers, and top_k and top_p token by token."""
    if sampling.min_p > 0:
        warper = MinPLogitsWarper(float(sampling.min_p))
        scores = warper(torch.empty(0), scores[None])[0]  # pyright: ignore[reportArgumentType]
    order = scores.argsort(descending=True).tolist()
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    probs = scores[order].softmax(0).tolist()
    nucleus, total = [], 0.0
    for token, prob in zip(order, probs, strict=True):
        if total >= sampling.top_p:
            break
        nucleus.append(token)
        total += prob
    return torch.zeros_like(scores).index_copy(0, torch.tensor(nucleus), scores[nucleus].softmax(0))


# -- assertions -----------------------------------------------------------------------------------


def expect_rollout_error(action: Callable[[], Any], phrase: str, problem: str) -> None:
    """Raise `Violation` unless `action` raises a `RolloutError` whose message contains `phrase`."""
    expect_error(action, phrase, problem, RolloutError)


def largest_difference(actual: Ragged, expected: Ragged) -> float:
    """Return the maximum absolute difference of two columns. Raise `Violation` if their row lengths differ."""
    expect(
        torch.equal(actual.lengths, expected.lengths),
        f"row lengths are {actual.lengths.tolist()}, expected {expected.lengths.tolist()}",
    )
    return (actual.values.double() - expected.values.double()).abs().max().item()


def expect_close(actual: Ragged, expected: Ragged, tolerance: float, subject: str) -> None:
    """Raise `Violation` if two columns differ by more than `tolerance`."""
    difference = largest_difference(actual, expected)
    expect(difference <= tolerance, f"{subject} are off by {difference:.2e}, the tolerance is {tolerance:.2e}")


def check_with_seeds(check: Callable[[int], None]) -> None:
    """Call `check` with a seed, and with another one if it raises `Violation`.

    Prefill and decode steps round differently. A token differs if rounding moves the boundary between two tokens past
    its uniform number. The probability is at most the rounding error of the log-probs, about 5e-6. Of 2000 tokens, one
    differs on less than 1 % of machines, and with other seeds as well on less than 0.01 %.
    """
    try:
        check(0)
    except Violation:
        check(1000)
