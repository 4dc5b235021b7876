"""Rollouts with one plausible bug each; each breaks one rule of the contract.

    CAUGHT_BY[IgnoresTopP]               # the name of the rule that fails

All derive from the built-in generator.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from camshaft.config.backends import TORCH
from camshaft.config.rollout import OPTIONAL_SAMPLING, RolloutCapabilities, RolloutEngineConfig
from camshaft.ragged import Ragged
from camshaft.rollout import base
from camshaft.rollout.base import BaseRollout, Generation, OpenRows, SamplingParams
from camshaft.rollout.builtin import scheduler
from camshaft.rollout.builtin.kept_rows import KeptRows, Resumed
from camshaft.rollout.builtin.rollout import TorchRollout
from camshaft.rollout.sampling import Penalties, uniform_numbers
from camshaft.rollout.scoring import PromptScores

Weights = Iterable[tuple[str, Tensor]]


class KeepsFirstWeights(TorchRollout):
    """Load the first weights and ignore later ones."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        kept = {name: tensor.clone() for name, tensor in weights}
        self.first = self.__dict__.get("first") or kept
        super().load_weights(self.first.items() if kept.keys() == self.first.keys() else kept.items())


class ForgetsTemperature(TorchRollout):
    """Sample with temperature and top_p, but return log-probs without temperature."""

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        out = super().generate_sequences(prompts, sampling, seeds)
        return replace(out, log_probs=out.log_probs.map(lambda values: values * sampling.temperature))


class IgnoresTopP(TorchRollout):
    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        return super().generate_sequences(prompts, replace(sampling, top_p=1.0), seeds)


class IgnoresMinP(TorchRollout):
    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        return super().generate_sequences(prompts, replace(sampling, min_p=0.0), seeds)


class MinPBeforeTemperature(TorchRollout):
    """Apply min_p to the probabilities at temperature 1."""

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        min_p = sampling.min_p ** (1 / sampling.temperature) if sampling.temperature else 0.0
        return super().generate_sequences(prompts, replace(sampling, min_p=min_p), seeds)


class _BrokenPenalties(TorchRollout):
    penalties: type[Penalties]

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        with mock.patch.object(base, "Penalties", self.penalties):
            return super().generate_sequences(prompts, sampling, seeds)


class RepetitionPenaltyOnResponsesOnly(_BrokenPenalties):
    """Do not penalize tokens of the prompt."""

    class penalties(Penalties):
        def __init__(self, prompts: Ragged, *arguments: Any):
            super().__init__(prompts, *arguments)
            self.prompts = torch.full_like(self.prompts, -1)


class PresencePenaltyOnPrompts(_BrokenPenalties):
    """Count the tokens of the prompt as if they were in the response."""

    class penalties(Penalties):
        def apply(self, logits: Tensor, rows: Tensor) -> Tensor:
            penalized = super().apply(logits, rows)
            for row, tokens in enumerate(self.prompts[rows]):
                new = list(set(tokens.tolist()) - {-1} - set(self.responses[rows[row]].tolist()))
                penalized[row, new] -= self.presence
            return penalized


class PresencePenaltyAfterTemperature(TorchRollout):
    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        scaled = replace(sampling, presence_penalty=sampling.presence_penalty * (sampling.temperature or 1))
        return super().generate_sequences(prompts, scaled, seeds)


class DeclaresNothing(TorchRollout):
    """Apply the optional parameters without declaring them."""

    capabilities = RolloutCapabilities()

    def limits(self, prompts: Ragged, sampling: SamplingParams, num_embeddings: int) -> Tensor:
        known = replace(sampling, **OPTIONAL_SAMPLING)
        return super().limits(prompts, known, num_embeddings)


class FrequencyPenaltyOnce(TorchRollout):
    """Subtract the frequency penalty once per token, like the presence penalty."""

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        presence = sampling.presence_penalty + sampling.frequency_penalty
        once = replace(sampling, presence_penalty=presence, frequency_penalty=0.0)
        return super().generate_sequences(prompts, once, seeds)


class IgnoresSeeds(TorchRollout):
    def seeds_of_call(self, num_rows: int, seeds: Tensor | None) -> Tensor:
        return super().seeds_of_call(num_rows, None)


class Uses32BitSeeds(TorchRollout):
    """Use 32 bits of a seed, as torch's CPU generator does."""

    def seeds_of_call(self, num_rows: int, seeds: Tensor | None) -> Tensor:
        return super().seeds_of_call(num_rows, seeds) & (2**32 - 1)


class OneSeedForAll(TorchRollout):
    """Return equal responses for equal prompts."""

    def seeds_of_call(self, num_rows: int, seeds: Tensor | None) -> Tensor:
        return super().seeds_of_call(num_rows, seeds)[:1].expand(num_rows)


class ReversesRows(TorchRollout):
    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        out = super().generate_sequences(prompts, sampling, seeds)
        back = list(range(len(prompts)))[::-1]
        return Generation(out.responses.select(back), out.log_probs.select(back), out.finished[back])


class DropsStopToken(TorchRollout):
    """Remove the stop token."""

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        out = super().generate_sequences(prompts, sampling, seeds)
        lengths = out.responses.lengths - out.finished.long()
        return replace(out, responses=out.responses.prefix(lengths), log_probs=out.log_probs.prefix(lengths))


class IgnoresWindows(TorchRollout):
    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        self.cache.windows[:] = [None] * self.cache.num_layers
        for module in self.model.hf.modules():
            module.__dict__.update({"sliding_window": None} if "sliding_window" in module.__dict__ else {})
        self.model.hf.config.sliding_window = None


class IgnoresEndOfSequence(TorchRollout):
    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        self.model.stop_ids = ()


class KeepsOldWeights(TorchRollout):
    """Generate with old weights after sleep."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(weights)
        self.old = [(name, weight.clone()) for name, weight in self.model.hf.named_parameters()]

    def wake_up(self) -> None:
        super().wake_up()
        super().load_weights(self.old)


class AdvancesGlobalRandomState(TorchRollout):
    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        torch.rand(1)
        return super().generate_sequences(prompts, sampling, seeds)


class SamplesWhenGreedy(TorchRollout):
    """Sample if greedy decoding is requested."""

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        warm = replace(sampling, do_sample=True, temperature=1.0) if sampling.greedy else sampling
        return super().generate_sequences(prompts, warm, seeds)


class SeedsByBatchIndex(TorchRollout):
    """Make a row's samples depend on its index in the batch."""

    def seeds_of_call(self, num_rows: int, seeds: Tensor | None) -> Tensor:
        return super().seeds_of_call(num_rows, seeds) + torch.arange(num_rows)


class TruncatesLongPrompts(TorchRollout):
    """Read only the last 256 tokens of a prompt."""

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        short = Ragged.from_rows([row[-256:] for row in prompts.rows()], torch.int64)
        return super().generate_sequences(short, sampling, seeds)


class IgnoresStopStrings(TorchRollout):
    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        return super().generate_sequences(prompts, replace(sampling, stop=()), seeds)


class ForgetsEarlierPenalties(TorchRollout):
    """Apply penalties to the new tokens of a continued row only."""

    def generate_sequences(self, *arguments: Any, generated: Ragged | None = None) -> Generation:
        with mock.patch.object(Penalties, "add_rows"):
            return super().generate_sequences(*arguments, generated=generated)


class ForgetsEarlierText(TorchRollout):
    """Search the new tokens of a continued row only for stop strings."""

    def open_rows(self, prompts: Ragged, sampling: SamplingParams, *arguments: Any) -> OpenRows:
        rows = super().open_rows(prompts, sampling, *arguments)
        nothing = rows.generated.prefix(torch.zeros_like(rows.generated.lengths))
        return replace(rows, prompts=rows.contexts, generated=nothing) if sampling.stop else rows


class RestartsPositions(TorchRollout):
    """Draw the new tokens of a continued row with the random numbers of its first tokens."""

    def generate_sequences(self, *arguments: Any, generated: Ragged | None = None) -> Generation:
        if generated is None:
            return super().generate_sequences(*arguments)
        prompts, sampling, seeds = [*arguments, None][:3]
        outs: list[Generation] = []
        for row, count in enumerate(generated.lengths.tolist()):
            seed = None if seeds is None else seeds[row : row + 1]
            restarted = lambda seeds, positions: uniform_numbers(seeds, positions - count)  # noqa: B023, E731
            with mock.patch.object(scheduler, "uniform_numbers", restarted):
                outs.append(super().generate_sequences(prompts.select([row]), sampling, seed, generated.select([row])))
        columns = [Ragged.concat([getattr(out, name) for out in outs]) for name in ("responses", "log_probs")]
        return Generation(*columns, finished=torch.cat([out.finished for out in outs]))


class ReturnsEarlierTokens(TorchRollout):
    """Return earlier and new tokens of a continued row."""

    def generate_sequences(self, *arguments: Any, generated: Ragged | None = None) -> Generation:
        out = super().generate_sequences(*arguments, generated=generated)
        return out if generated is None else replace(out, responses=Ragged.join(generated, out.responses))


class LimitsNewTokens(TorchRollout):
    """Apply max_tokens to the new tokens of a continued row."""

    def open_rows(self, *arguments: Any) -> OpenRows:
        rows = super().open_rows(*arguments)
        return replace(rows, limits=rows.limits + rows.generated.lengths)


class ContinuesEndedRows(TorchRollout):
    """Continue rows after a stop token."""

    def open_rows(self, *arguments: Any) -> OpenRows:
        return super().open_rows(*arguments[:-1], has_stop=lambda tokens: False)


class ForgetsPenaltiesSilently(TorchRollout):
    """Accept penalties in continued rows without declaring `continues_rows`."""

    capabilities = replace(TORCH, continues_rows=False)

    def open_rows(self, prompts: Ragged, sampling: SamplingParams, *arguments: Any) -> OpenRows:
        return super().open_rows(prompts, replace(sampling, presence_penalty=0.0, frequency_penalty=0.0), *arguments)


class KeepsRowsOfOldWeights(TorchRollout):
    """Continue rows that were computed with earlier weights."""

    def load_weights(self, weights: Weights, version: int = 0) -> None:
        self.model.load(weights, copy=self.casts_weights)


class ContinuesRowsOfNeighbours(TorchRollout):
    """Keep rows by their place in the batch, and trust that their tokens fit."""

    class Trusting(KeptRows):
        def take(self, row_id: Hashable, context: Tensor) -> Resumed | None:
            return super().take(row_id, torch.cat([self.tokens.get(row_id, context)[: len(context) - 1], context[-1:]]))

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        self.kept = self.Trusting()

    def generate_sequences(self, *arguments: Any, row_ids: Sequence[Hashable] | None = None) -> Generation:
        return super().generate_sequences(*arguments, row_ids=None if row_ids is None else range(len(row_ids)))


class ForgetsClosing(TorchRollout):
    """Keep rows that are closed."""

    def close_rows(self, row_ids: Iterable[Hashable]) -> None:
        pass


class DropsStopStrings(TorchRollout):
    """Remove the token that completes a stop string."""

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        out = super().generate_sequences(prompts, sampling, seeds)
        lengths = out.responses.lengths - (out.finished.long() if sampling.stop else 0)
        return replace(out, responses=out.responses.prefix(lengths), log_probs=out.log_probs.prefix(lengths))


class ExceedsModelLength(TorchRollout):
    def limits(self, prompts: Ragged, sampling: SamplingParams, num_embeddings: int) -> Tensor:
        return torch.full_like(super().limits(prompts, sampling, num_embeddings), sampling.max_tokens)


class AnswersEmptyBatch(TorchRollout):
    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        return super().generate_sequences(prompts if len(prompts) else Ragged.from_rows([[5]]), sampling, seeds)


class TruncatesOverlongPrompts(TorchRollout):
    """Truncate overlong prompts silently."""

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        fitting = prompts.prefix(prompts.lengths.clamp(max=self.config.max_model_len - 1))
        return super().generate_sequences(fitting, sampling, seeds)


class KeepsTheFirstHead(TorchRollout):
    """Keep the first value of a tied output weight, like a library that packs it once."""

    first: Tensor | None = None

    def load_weights(self, weights: Weights) -> None:
        super().load_weights(weights)
        head: Any = self.model.hf.get_output_embeddings()
        first: Tensor = head.weight.clone() if self.first is None else self.first
        self.first = head.weight = nn.Parameter(first, requires_grad=False)


class SkipsMismatchedWeights(TorchRollout):
    """Keep the old values of missing weights and skip weights of the wrong shape."""

    def load_weights(self, weights: Weights) -> None:
        expected = self.model.expected.weights
        fitting = {n: w for n, w in weights if n in expected and w.shape == expected[n].meta.shape}
        self.received = self.__dict__.get("received", {}) | fitting
        super().load_weights(self.received.items())


class ReportsTheFirstVersion(TorchRollout):
    """Report the version of the first weights."""

    def load_weights(self, weights: Weights, version: int = 0) -> None:
        super().load_weights(weights, self.version or version)


class ReportsVersionOfFailedLoad(TorchRollout):
    """Report a version before its weights are loaded."""

    def load_weights(self, weights: Weights, version: int = 0) -> None:
        self.version = version
        super().load_weights(weights, version)


class StartsWithRandomWeights(TorchRollout):
    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        weights = {weight.names[0]: weight.meta for weight in self.model.expected.weights.values()}
        self.load_weights((name, torch.rand(empty.shape)) for name, empty in weights.items())


class KeepsTheFirstDigests(TorchRollout):
    first: Mapping[str, int] | None = None

    def weight_digests(self) -> Mapping[str, int]:
        now = super().weight_digests()
        self.first = now if self.first is None else self.first
        return self.first


class KeepsDigestsWhileAsleep(TorchRollout):
    def load_weights(self, weights: Weights) -> None:
        super().load_weights(weights)
        self.digests = super().weight_digests()

    def weight_digests(self) -> Mapping[str, int]:
        return self.__dict__.get("digests") or super().weight_digests()


class RoundsToFloat8(TorchRollout):
    def load_weights(self, weights: Weights) -> None:
        super().load_weights((name, weight.to(torch.float8_e5m2).to(weight.dtype)) for name, weight in weights)


class ScoresTheNextToken(TorchRollout):
    """Return the log-prob of each token at the token before it, as the model computes them."""

    def score(self, *arguments: Any, **options: Any) -> PromptScores:
        def shift(column: Ragged) -> Ragged:
            return Ragged.from_rows([row.roll(-1, 0) for row in column.rows()])

        return super().score(*arguments, **options).map(shift)


class ScoresOtherRows(TorchRollout):
    """Let the tokens of a model call attend to those of other prompts."""

    def compute_logits(self, hf: PreTrainedModel, rows: Ragged) -> Tensor:
        return super().compute_logits(hf, Ragged(rows.values, rows.lengths.sum()[None]))


class RanksAscending(TorchRollout):
    """Return the least probable tokens."""

    def score(self, prompts: Ragged, top_k: int = 0, *arguments: Any, **options: Any) -> PromptScores:
        scores = super().score(prompts, self.model.num_embeddings if top_k else 0, *arguments, **options)
        if scores.top_tokens is None or scores.top_log_probs is None:
            return scores
        least = scores.top_tokens.map(lambda ids: ids[:, -top_k:].clone())
        return replace(scores, top_tokens=least, top_log_probs=scores.top_log_probs.map(lambda x: x[:, -top_k:]))


class ScoresUnnamedCandidates(TorchRollout):
    """Return the log-prob of token 0 for candidates that are -1."""

    def score(
        self, prompts: Ragged, top_k: int = 0, candidates: Ragged | None = None, *arguments: Any, **options: Any
    ) -> PromptScores:
        candidates = None if candidates is None else candidates.map(lambda ids: ids.clamp(min=0))
        return super().score(prompts, top_k, candidates, *arguments, **options)


class ScoresUndeclared(TorchRollout):
    capabilities = replace(TORCH, scores_prompts=False)


class ScoresUndeclaredCandidates(TorchRollout):
    """Accept candidates without declaring them."""

    capabilities = replace(TORCH, scores_candidates=False)

    def check_scoring(self, prompts: Ragged, top_k: int, candidates: Ragged | None, *arguments: Any) -> None:
        super().check_scoring(prompts, top_k, None, *arguments)


class ScoresWithoutOptions(TorchRollout):
    """Ignore the sampling options of scores."""

    def score(self, *arguments: Any, sampling: SamplingParams | None = None) -> PromptScores:
        return super().score(*arguments)


class RemembersScores(TorchRollout):
    """Return the scores of a prompt that was scored before, with whatever weights."""

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        self.known: dict[Any, PromptScores] = {}

    def score(self, prompts: Ragged, *arguments: Any, **options: Any) -> PromptScores:
        self.model.require_model()
        key = (tuple(prompts.values.tolist()), arguments)
        if key not in self.known:
            self.known[key] = super().score(prompts, *arguments, **options)
        return self.known[key]


class TruncatesScoredPrompts(TorchRollout):
    """Score as many tokens as fit, silently."""

    def score(self, prompts: Ragged, *arguments: Any, **options: Any) -> PromptScores:
        fitting = prompts.prefix(prompts.lengths.clamp(max=self.config.max_model_len))
        return super().score(fitting, *arguments, **options)


CAUGHT_BY: dict[type[BaseRollout], str] = {
    SamplesWhenGreedy: "greedy matches transformers",
    ForgetsTemperature: "log probs match the distribution",
    IgnoresTopP: "log probs match the distribution",
    **dict.fromkeys(
        (
            IgnoresMinP, MinPBeforeTemperature, RepetitionPenaltyOnResponsesOnly, PresencePenaltyOnPrompts,
            PresencePenaltyAfterTemperature, FrequencyPenaltyOnce, DeclaresNothing,
        ),
        "optional sampling is applied or rejected",
    ),
    OneSeedForAll: "frequencies follow the distribution",
    IgnoresWindows: "model types",
    IgnoresSeeds: "seeds determine samples",
    Uses32BitSeeds: "seeds determine samples",
    AdvancesGlobalRandomState: "seeds determine samples",
    SeedsByBatchIndex: "rows do not depend on the batch",
    ReversesRows: "prompts of mixed lengths",
    TruncatesLongPrompts: "thousands of prompts",
    DropsStopToken: "rows end",
    IgnoresStopStrings: "stop strings end a row",
    DropsStopStrings: "stop strings end a row",
    **dict.fromkeys(
        (ForgetsEarlierPenalties, ForgetsEarlierText, RestartsPositions),
        "continued rows have the tokens of uninterrupted ones",
    ),
    **dict.fromkeys(
        (ReturnsEarlierTokens, LimitsNewTokens, ContinuesEndedRows, ForgetsPenaltiesSilently),
        "continued rows get new tokens only",
    ),
    **dict.fromkeys(
        (ContinuesRowsOfNeighbours, ForgetsClosing), "kept rows have the tokens of computed ones"
    ),
    KeepsRowsOfOldWeights: "new weights end kept rows",
    **dict.fromkeys(
        (ScoresTheNextToken, ScoresOtherRows, RanksAscending, ScoresUnnamedCandidates, ScoresUndeclared,
         ScoresUndeclaredCandidates),
        "scores match transformers",
    ),
    ScoresWithoutOptions: "scores and samples agree",
    RemembersScores: "scores follow the weights",
    TruncatesScoredPrompts: "invalid scores are rejected",
    IgnoresEndOfSequence: "end of sequence ends a row",
    ExceedsModelLength: "max model len ends a row",
    AnswersEmptyBatch: "no prompts",
    TruncatesOverlongPrompts: "invalid prompts are rejected",
    KeepsFirstWeights: "new weights replace old ones",
    KeepsTheFirstHead: "tied weights load under either name",
    SkipsMismatchedWeights: "weight errors name the weight",
    **dict.fromkeys((ReportsTheFirstVersion, ReportsVersionOfFailedLoad), "version is that of the weights"),
    StartsWithRandomWeights: "generation needs weights",
    KeepsTheFirstDigests: "digests match the weights",
    KeepsDigestsWhileAsleep: "digests detect a transposed weight",
    KeepsOldWeights: "sleep and wake",
    RoundsToFloat8: "half precision is close",
}  # fmt: skip
"""The rule that detects each bug."""
