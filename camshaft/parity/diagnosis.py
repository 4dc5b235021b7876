"""Finds the cause of a difference between an engine and a rollout, by changing one setting at a time.

    diagnosis = diagnose(case, prompts, tokenizer, limit=1e-3)
    for cause in diagnosis.causes: ...

The experiments run in this order, because each one requires that the causes before it are excluded:

    weights    compare the checksums of the weight sync; a difference only after an update means stale weights
    dtype      repeat the comparison in float32 in engine and rollout
    template   compare with the engine's log-probs for prompts with a special token added or a token removed
    sampling   generate with top_k=1, where the log-probs of the sampled distribution are 0; compare with the engine's
               log-probs at other temperatures; generate without top_k and top_p, or look for a truncation without them
    weights    change one tensor at a time in the weight sync, and look for tensors without effect on the output

A cause is reported if the difference falls to the limit or below when it is removed. If no experiment succeeds, the
cause is "unknown" and lists the causes that are excluded.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from camshaft.dataproto import Ragged
from camshaft.errors import RolloutError
from camshaft.parity.pair import Comparison, Pair, ParityCase, WeightSyncError, log_prob_temperature
from camshaft.parity.tokens import special_tokens
from camshaft.rollout import SamplingParams

CauseKind = Literal["dtype", "sampling", "weights", "template", "unknown"]
LOADED, UPDATED = "as loaded", "after an update"

SEARCH_STEPS = 24
"""Number of golden-section steps of the temperature search. They shrink the interval to about a hundred-thousandth."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.1, 10.0

MAX_TENSORS = 1000
"""Maximum number of tensors in the experiment that changes one tensor at a time."""
MAX_SECONDS = 1800.0
"""Maximum estimated duration of that experiment in seconds."""

NUM_PROMPTS = 4
"""Number of prompts in experiments with many forward passes."""


@dataclass(frozen=True)
class Cause:
    """A likely cause of a difference."""

    kind: CauseKind
    evidence: str
    """Result of the experiment."""
    advice: str
    """Suggested fix, without a final period."""


@dataclass
class Diagnosis:
    """Comparisons of an engine and a rollout, and causes that explain a difference."""

    comparisons: dict[str, Comparison] = field(default_factory=dict)
    """Comparisons with the loaded weights (`LOADED`) and after an update (`UPDATED`)."""
    update_change: float | None = None
    """Mean absolute change of the log-probs by the update; None without an update."""
    update_skip_reason: str | None = None
    """Reason for skipping the update; None if it was not skipped."""
    causes: list[Cause] = field(default_factory=list)

    @property
    def worst(self) -> float:
        """Maximum absolute difference over all comparisons."""
        return max((comparison.worst for comparison in self.comparisons.values()), default=math.inf)


def diagnose(
    case: ParityCase, prompts: Ragged, tokenizer: Any, limit: float, log: Callable[[str], None] = lambda _: None
) -> Diagnosis:
    """Compare an engine and a rollout, and look for the cause if the maximum difference exceeds `limit`.

    `log` is called with a line of progress for each experiment.
    """
    pair = Pair(case)
    diagnosis = _compare(pair, prompts, limit, log)
    search = _Search(pair, diagnosis, prompts, tokenizer, limit, log)
    if not diagnosis.causes and diagnosis.worst > limit:
        diagnosis.causes = _explain(search, case)
    elif not diagnosis.causes:
        cause = _test_raw_log_probs(search)
        diagnosis.causes = [] if cause is None else [cause]
    return diagnosis


def _compare(pair: Pair, prompts: Ragged, limit: float, log: Callable[[str], None]) -> Diagnosis:
    """Compare engine and rollout with the loaded weights and, if they agree, again after an update."""
    diagnosis = Diagnosis()
    try:
        log("generating with the weights of the folder")
        diagnosis.comparisons[LOADED] = loaded = pair.measure(prompts)
        if not pair.case.can_train():
            diagnosis.update_skip_reason = f"{pair.case.dtype} weights lose small updates to rounding"
        elif loaded.worst > limit:
            diagnosis.update_skip_reason = "engine and rollout already differ before the update"
        else:
            log("generating after an update")
            diagnosis.update_change = pair.update(loaded)
            diagnosis.comparisons[UPDATED] = pair.measure(prompts)
    except WeightSyncError as error:
        advice = "Check the rollout's load_weights(), for example with camshaft check-rollout"
        diagnosis.causes.append(Cause("weights", str(error), advice))
    return diagnosis


@dataclass(frozen=True)
class _Search:
    """State of the search for a cause: an engine and a rollout that differ, and the inputs of the experiments."""

    pair: Pair
    diagnosis: Diagnosis
    prompts: Ragged
    tokenizer: Any
    limit: float
    log: Callable[[str], None]

    @property
    def loaded(self) -> Comparison:
        """Comparison with the loaded weights."""
        return self.diagnosis.comparisons[LOADED]


def _explain(search: _Search, case: ParityCase) -> list[Cause]:
    """Repeat the comparison in float32; if the difference remains, look for its cause in float32."""
    float32_case = case.without_bfloat16()
    if float32_case == case:
        return _find_cause(search)
    search.log("repeating the comparison in float32")
    search.pair.close()
    pair = Pair(float32_case)
    diagnosis = _compare(pair, search.prompts, search.limit, search.log)
    if diagnosis.causes:
        return diagnosis.causes
    if diagnosis.worst > search.limit:
        return _find_cause(replace(search, pair=pair, diagnosis=diagnosis))
    evidence = (
        f"With the engine in {case.compute_dtype()} and the rollout in {case.rollout_dtype}, the maximum difference is "
        f"{search.diagnosis.worst:.1e}. With both in float32, it is {diagnosis.worst:.1e}."
    )
    advice = (
        "Use the same dtype in engine and rollout (actor_rollout_ref.rollout.dtype, actor.fsdp_config.model_dtype and "
        "mixed_precision.param_dtype), or correct for the difference: algorithm.rollout_correction.rollout_is=token"
    )
    return [Cause("dtype", evidence, advice)]


def _find_cause(search: _Search) -> list[Cause]:
    """Return the cause of the first experiment that succeeds, for a difference that remains in float32."""
    if search.loaded.worst <= search.limit:
        return [_report_stale_weights(search)]
    for experiment in (_test_template, _test_sampling):
        cause = experiment(search)
        if cause is not None:
            return [cause]
    unused = _find_unused_weights(search)
    if unused:
        evidence = f"The rollout ignores some of the weights. Without effect: {', '.join(unused)}."
        return [Cause("weights", evidence, "Check the rollout's load_weights() for layers that it skips")]
    effect = "the effect of each was not tested" if unused is None else "each has an effect"
    evidence = (
        "Excluded causes are the dtype, special tokens around the prompt, and the sampling settings; the weight sync "
        f"is correct for every weight, and {effect}."
    )
    advice = (
        "Engine and rollout compute the model differently: check rotary frequencies, sliding windows and normalization "
        "in the config of the model folder, and quantization, dtypes and replaced modules in the generator"
    )
    return [Cause("unknown", evidence, advice)]


# -- weights --------------------------------------------------------------------------------------


def _report_stale_weights(search: _Search) -> Cause:
    """Report stale weights, for a difference that appears only after an update."""
    comparison = search.diagnosis.comparisons[UPDATED]
    evidence = (
        f"With the weights of the folder, the maximum difference is {search.loaded.worst:.1e}. It is "
        f"{comparison.worst:.1e} after one update, so the rollout still uses some of the old weights. "
    )
    unused = _find_unused_weights(search)
    if unused is None:
        evidence += "The effect of each tensor was not tested, because that would take too long."
    elif unused:
        evidence += f"Without effect: {', '.join(unused)}."
    else:
        evidence += "Every tensor has some effect."
    advice = "Look for copies of weights that the rollout keeps (fused or repacked layers, a tied output layer)"
    return Cause("weights", evidence, advice)


def _find_unused_weights(search: _Search) -> list[str] | None:
    """Return the names of the tensors whose values do not affect the output; return None if a limit is exceeded.

    Testing a tensor takes a full weight sync.
    """
    names = search.pair.weight_names()
    if len(names) > MAX_TENSORS:
        search.log(f"not changing each tensor in turn: {len(names)} tensors are too many (maximum {MAX_TENSORS})")
        return None
    prompts = search.prompts.select(slice(0, NUM_PROMPTS))
    start = time.perf_counter()
    tokens, log_probs = search.pair.generate_one_token(prompts, None)
    seconds = (time.perf_counter() - start) * len(names)
    if seconds > MAX_SECONDS:
        search.log(f"not changing each tensor in turn: {len(names)} tensors would take {seconds / 60:.0f} minutes")
        return None
    search.log(f"changing each of {len(names)} tensors in turn, for about {seconds:.0f} s")
    unused = []
    for name in names:
        try:
            new_tokens, new_log_probs = search.pair.generate_one_token(prompts, name)
        except RolloutError:  # an error counts as an effect
            continue
        if tokens.equal(new_tokens) and log_probs.equal(new_log_probs):
            unused.append(name)
    return unused


# -- template -------------------------------------------------------------------------------------


def _test_template(search: _Search) -> Cause | None:
    """Test whether the rollout's log-probs match prompts with a special token added or a token removed."""
    search.log("comparing with prompts that have other special tokens")
    rows = slice(0, NUM_PROMPTS)
    comparison = search.loaded
    subset = replace(
        comparison,
        prompts=comparison.prompts.select(rows),
        responses=comparison.responses.select(rows),
        rollout=comparison.rollout.select(rows),
    )
    temperature = log_prob_temperature(search.pair.case.sampling)
    for description, prompts in _edit_prompts(subset.prompts, special_tokens(search.tokenizer)):
        edited = subset.with_engine(search.pair.log_probs(prompts, subset.responses, temperature))
        if edited.worst <= search.limit:
            evidence = (
                f"The rollout's log-probs match prompts {description}; the maximum difference is then "
                f"{edited.worst:.1e}."
            )
            advice = (
                "The rollout changes token ids or tokenizes prompts itself: disable that (add_special_tokens, the chat "
                "template), or use the same tokenizer for engine and rollout"
            )
            return Cause("template", evidence, advice)
    return None


def _edit_prompts(prompts: Ragged, special: dict[int, str]) -> Iterator[tuple[str, Ragged]]:
    """Yield a description and the prompts as another template or tokenizer might produce them."""
    ones = prompts.lengths.clamp(max=1)
    for number, text in special.items():
        tokens = Ragged(prompts.values.new_full((len(prompts),), number), prompts.lengths.new_ones(len(prompts)))
        yield f"with {text} in front", Ragged.join(tokens, prompts)
        yield f"with {text} at the end", Ragged.join(prompts, tokens)
    if int(prompts.lengths.min()) > 1:
        yield "without their first token", prompts.suffix(prompts.lengths - ones)
        yield "without their last token", prompts.prefix(prompts.lengths - ones)


# -- sampling -------------------------------------------------------------------------------------


def _test_sampling(search: _Search) -> Cause | None:
    """Test whether engine and rollout compute log-probs of the same distribution: temperature, top_k and top_p."""
    sampling, comparison = search.pair.case.sampling, search.loaded
    expected = log_prob_temperature(sampling)
    cause = _test_raw_log_probs(search)
    if cause is not None:
        return cause
    search.log("comparing at other temperatures")
    best, temperature = _fit_temperature(search)
    if best.worst <= search.limit:
        evidence = (
            f"The rollout's log-probs match temperature {temperature:.4g} instead of {expected:g}; the maximum "
            f"difference is then {best.worst:.1e}."
        )
        return Cause("sampling", evidence, "Check the sampling settings of the generator (generation_config.json)")
    if sampling.greedy or not _truncates(sampling):
        return _test_hidden_truncation(comparison, search.limit)
    search.log("generating without top_k and top_p")
    full_comparison = search.pair.measure(search.prompts, replace(sampling, top_k=0, top_p=1.0))
    if full_comparison.worst > search.limit:
        return None
    evidence = (
        f"With top_p {sampling.top_p:g} and top_k {sampling.top_k}, the maximum difference is {comparison.worst:.1e}; "
        f"without top_k and top_p, it is {full_comparison.worst:.1e}. The rollout returns log-probs of the "
        "distribution it samples from, but the engine computes them from the full distribution of the model."
    )
    advice = (
        "Sample from the full distribution (actor_rollout_ref.rollout.top_p=1.0 top_k=0), or use importance weights: "
        "algorithm.rollout_correction.rollout_is=token"
    )
    return Cause("sampling", evidence, advice)


def _truncates(sampling: SamplingParams) -> bool:
    """Return True if top_k or top_p truncates the sampled distribution."""
    return sampling.top_k > 0 or sampling.top_p < 1.0


def _fit_temperature(search: _Search) -> tuple[Comparison, float]:
    """Find the temperature at which the engine's log-probs are closest to those of the rollout.

    This is a golden-section search over the logarithm of the temperature.
    """
    comparison = search.loaded

    def compare_at(log: float) -> Comparison:
        return comparison.with_engine(search.pair.log_probs(comparison.prompts, comparison.responses, math.exp(log)))

    golden = (math.sqrt(5) - 1) / 2
    low, high = math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE)
    for _ in range(SEARCH_STEPS):
        left, right = high - golden * (high - low), low + golden * (high - low)
        if compare_at(left).metrics["log_prob_diff_mean"] < compare_at(right).metrics["log_prob_diff_mean"]:
            high = right
        else:
            low = left
    middle = (low + high) / 2
    return compare_at(middle), math.exp(middle)


def _test_hidden_truncation(comparison: Comparison, limit: float) -> Cause | None:
    """Test whether the rollout truncates the distribution: every sampled token is more likely than in the model."""
    excess = comparison.rollout.values - comparison.engine.values
    if not bool((excess > -limit).all()) or float(excess.mean()) < limit:
        return None
    evidence = (
        "No token is less likely in the rollout than in the engine, and the rollout's log-probs are higher by "
        f"{float(excess.mean()):.1e} on average: the rollout truncates the distribution although top_k and top_p are "
        "not set."
    )
    return Cause("sampling", evidence, "Check top_k and top_p of the generator (generation_config.json)")


def _test_raw_log_probs(search: _Search) -> Cause | None:
    """Test whether the rollout returns log-probs of the model instead of those of the sampled distribution.

    With top_k=1, a single token remains, and its log-prob in the sampled distribution is 0.
    """
    pair, sampling = search.pair, search.pair.case.sampling
    if sampling.greedy or (sampling.temperature == 1.0 and not _truncates(sampling)):
        return None
    search.log("generating with top_k=1")
    comparison = pair.measure(search.prompts, replace(sampling, top_k=1, top_p=1.0))
    if float(comparison.rollout.values.abs().max()) <= search.limit:
        return None
    for temperature, stage in ((1.0, "before temperature, top_k and top_p"), (sampling.temperature, "before top_k")):
        raw = comparison.with_engine(pair.log_probs(comparison.prompts, comparison.responses, temperature))
        if raw.worst <= search.limit:
            evidence = f"The rollout returns raw log-probs ({stage}), but samples from another distribution."
            advice = "Request log-probs of the sampled distribution (vLLM: logprobs_mode=processed_logprobs)"
            return Cause("sampling", evidence, advice)
    return None
