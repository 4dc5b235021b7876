"""The bench on which the contract tries a generator: tiny models, prompts, and what transformers says of them.

    harness = RolloutHarness(TorchRollout, "/tmp/scratch")
    case = harness.case("llama", max_num_seqs=4)       # a rollout with the weights of a plain model
    out = case.rollout.generate_sequences(harness.prompts(3, 9), SamplingParams(max_tokens=8))
    case.log_probs(prompts, out.responses, sampling)

The oracle shares no code with generators: transformers' own model computes each row separately, without a cache or
padding, in float64, and the distribution is truncated token by token. A generator that computes in float32 differs from
it by rounding, and how much depends on the machine and on the weights. The harness measures that rounding as the
difference between the float32 and the float64 run of the oracle; a generator may differ by `ROUNDINGS` times as much.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.contracts.rules import expect, expect_error
from camshaft.errors import RolloutError
from camshaft.models.loader import load_tokenizer, quiet_transformers
from camshaft.models.tiny import make_tiny_model
from camshaft.ragged import Ragged
from camshaft.rollout.base import BaseRollout, Generation, SamplingParams

SHARPNESS = 12.0
"""Freshly drawn tiny models say nearly nothing; with weights so much larger they prefer some tokens to others."""

EOS = 2
"""The end-of-sequence token of tiny models."""

ROUNDINGS = 8
"""Allowed difference from the oracle, in units of the measured rounding.

Generators that sum in another order were 0.5 to 1.7 units off, with AVX-512, AVX2 and scalar kernels.
"""


class RolloutHarness:
    """One class of generators in one scratch folder."""

    def __init__(
        self,
        rollout_class: type[BaseRollout],
        folder: str | Path,
        device: str = "cpu",
        sizes: dict[str, Any] | None = None,
        refused: Mapping[str, str] | None = None,
    ):
        self.rollout_class, self.folder, self.device = rollout_class, Path(folder), device
        self.sizes: dict[str, Any] = {"hidden": 32, "seed": 3} | (sizes or {})
        """Of all models; larger ones for a generator that cannot compute the smallest (`make_tiny_model`)."""
        self.refused: Mapping[str, str] = refused or {}
        """Families that the generator must refuse, because it would compute something else, and words of the error."""
        self.tolerance = 1e-4
        """The smallest tolerance of the rules: kernels may approximate exp, and multiply in TF32."""

    def case(self, family: str = "qwen2", sizes: dict[str, Any] | None = None, **config: Any) -> Case:
        """A plain model of this family and a rollout that has its weights."""
        case = self.empty_case(family, sizes, **config)
        case.rollout.load_weights(case.weights())
        return case

    def empty_case(self, family: str = "qwen2", sizes: dict[str, Any] | None = None, **config: Any) -> Case:
        """The same without the hand-over of weights."""
        name = "-".join([family, *(f"{key}{value}" for key, value in (sizes or {}).items())])
        folder = self.folder / name
        if not folder.exists():
            make_tiny_model(folder, family, **(self.sizes | (sizes or {})))
        defaults = {"max_model_len": 96, "max_num_seqs": 16, "device": self.device}
        rollout = self.rollout_class(RolloutEngineConfig(model_path=str(folder), **(defaults | config)))
        with quiet_transformers():
            plain: Any = AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
            )
        for weight in plain.parameters():
            if weight.ndim > 1:
                weight.data *= SHARPNESS
        return Case(rollout, plain.to(self.device).eval(), load_tokenizer(str(folder)))

    def prompts(self, *lengths: int, seed: int = 0) -> Ragged:
        """Random prompts of these lengths."""
        random = torch.Generator().manual_seed(seed)
        return Ragged.from_rows([torch.randint(3, 100, (n,), generator=random) for n in lengths], torch.int64)


@dataclass(frozen=True)
class Case:
    """A rollout, and the model that it should be like."""

    rollout: BaseRollout
    plain: Any
    tokenizer: Any

    def text(self, tokens: list[int]) -> str:
        """What a response of these tokens reads like."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def weights(self) -> list[tuple[str, Tensor]]:
        return list(self.plain.named_parameters())

    def other_weights(self) -> list[tuple[str, Tensor]]:
        """A copy of the weights that gives other log-probs."""
        return [(name, weight.detach() * (1.5 if weight.ndim > 1 else 1)) for name, weight in self.weights()]

    @torch.no_grad()
    def distribution(self, tokens: Tensor, sampling: SamplingParams, model: Any = None) -> Tensor:
        """Return (T, V) float64 probabilities under `sampling` after each of `tokens` (T,)."""
        logits = self._logits(model or self.plain, tokens[None])[0]
        if sampling.greedy:
            return logits.softmax(-1)
        return torch.stack([_cut(row / sampling.temperature, sampling) for row in logits])

    def log_probs(self, prompts: Ragged, responses: Ragged, sampling: SamplingParams) -> Ragged:
        """Return the float64 log-prob of each response token in the distribution to sample from."""
        model, rows = self._double(), []
        for prompt, response in zip(prompts.rows(), responses.rows(), strict=True):
            probs = self.distribution(torch.cat([prompt, response]), sampling, model)[len(prompt) - 1 : -1]
            rows.append(probs.gather(-1, response[:, None])[:, 0].log())
        return Ragged.from_rows(rows, torch.float64)

    def check_log_probs(
        self,
        prompts: Ragged,
        generation: Generation,
        sampling: SamplingParams,
        what: str = "log-probs",
        tolerance: float = 0.0,
    ) -> None:
        """Raise `Violation` if log-probs differ from the oracle by more than rounding, and by more than `tolerance`."""
        expected = self.log_probs(prompts, generation.responses, sampling)
        expect(bool(expected.values.isfinite().all()), f"{what}: {sampling} sampled a token that it excludes")
        allowed = ROUNDINGS * self.rounding(prompts, generation.responses, sampling)
        close(generation.log_probs, expected, max(tolerance, allowed), what)

    def rounding(self, prompts: Ragged, responses: Ragged, sampling: SamplingParams) -> float:
        """Return the largest error of the oracle's log-probs in float32, at least the error of storing them."""
        temperature = 1.0 if sampling.greedy else sampling.temperature
        single, double = (self._untruncated(model, prompts, responses, temperature) for model in self._both())
        stored = torch.finfo(torch.float32).eps * double.values.abs().max()
        return float(torch.maximum(stored, (single.values - double.values).abs().max()))

    def untruncated_log_probs(self, prompts: Ragged, responses: Ragged) -> Ragged:
        """Return the float64 log-prob of each response token at temperature 1, for large numbers of rows."""
        return self._untruncated(self._double(), prompts, responses, 1.0)

    @torch.no_grad()
    def _untruncated(self, model: Any, prompts: Ragged, responses: Ragged, temperature: float) -> Ragged:
        """Compute rows of similar lengths in one batch, padded on the right, where causal attention hides the pads."""
        rows = [torch.cat(pair) for pair in zip(prompts.rows(), responses.rows(), strict=True)]
        log_probs: list[Tensor] = [torch.empty(0)] * len(rows)
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        for start in range(0, len(order), 64):
            part = order[start : start + 64]
            grid = torch.nn.utils.rnn.pad_sequence([rows[row] for row in part], batch_first=True)
            scores = self._logits(model, grid)[:, :-1] / temperature
            chosen = scores.log_softmax(-1).gather(-1, grid[:, 1:, None])[..., 0]
            for row, values in zip(part, chosen, strict=True):
                first = int(prompts.lengths[row]) - 1
                log_probs[row] = values[first : first + int(responses.lengths[row])]
        return Ragged.from_rows(log_probs, torch.float64)

    def _logits(self, model: Any, tokens: Tensor) -> Tensor:
        return model(input_ids=tokens.to(self.plain.device)).logits.double().cpu()

    def _double(self) -> Any:
        """Copy the oracle to float64 with its present weights, which tests change in place."""
        return copy.deepcopy(self.plain).double()

    def _both(self) -> tuple[Any, Any]:
        return self.plain, self._double()

    @torch.no_grad()
    def generate(self, prompt: Tensor, max_tokens: int, stop_ids: list[int] | None) -> list[int]:
        """What `transformers.generate` says greedily to one prompt alone."""
        out = self.plain.generate(
            prompt[None].to(self.plain.device),
            attention_mask=torch.ones_like(prompt)[None].to(self.plain.device),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=stop_ids,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()


def _cut(scores: Tensor, sampling: SamplingParams) -> Tensor:
    """(V,) probabilities of one token after top_k and top_p, as one would write them down."""
    order = scores.argsort(descending=True).tolist()
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    shares = scores[order].softmax(0).tolist()
    kept, mass = [], 0.0
    for token, share in zip(order, shares, strict=True):
        if mass >= sampling.top_p:
            break
        kept.append(token)
        mass += share
    return torch.zeros_like(scores).index_copy(0, torch.tensor(kept), scores[kept].softmax(0))


# -- saying what is wrong -------------------------------------------------------------------------


def expect_refusal(action: Callable[[], Any], told: str, problem: str) -> None:
    """`action` must raise a `RolloutError` whose message contains `told`."""
    expect_error(action, told, problem, RolloutError)


def off_by(found: Ragged, wanted: Ragged) -> float:
    """The largest difference of two columns; the rows must have equal lengths."""
    expect(
        torch.equal(found.lengths, wanted.lengths), f"lengths {found.lengths.tolist()}, not {wanted.lengths.tolist()}"
    )
    return (found.values.double() - wanted.values.double()).abs().max().item()


def close(found: Ragged, wanted: Ragged, tolerance: float, what: str) -> None:
    """Equal within `tolerance`."""
    off = off_by(found, wanted)
    expect(off <= tolerance, f"{what}: off by {off:.2e}, allowed {tolerance:.2e}")
