"""Diagnose a difference between an engine and a rollout: change one setting at a time until it disappears.

    diagnosis = diagnose(case, prompts, tokenizer, limit=1e-3)
    for finding in diagnosis.findings: ...

The order of the experiments matters, because each one requires that the earlier causes are excluded:

    weights    compare checksums of the weight sync; a difference only after an update means stale weights
    dtype      repeat the comparison in float32 on both sides
    template   compare with the engine's log-probs for prompts with a special token added or removed
    sampling   compare with the engine's log-probs at other temperatures; generate without top_k and top_p, and at
               temperature 1; generate with top_k=1, where log-probs of the sampled distribution are 0
    weights    change one tensor at a time in the weight sync, and look for tensors without effect

A finding is reported if the difference without its cause is below the limit. Otherwise the finding is "unknown", with
the causes that are excluded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from camshaft.dataproto import Ragged
from camshaft.errors import RolloutError
from camshaft.parity.pair import Comparison, Pair, ParityCase, WeightSyncError, temperature_of
from camshaft.parity.tokens import special_ids

FindingKind = Literal["dtype", "sampling", "weights", "template", "unknown"]
LOADED, UPDATED = "as loaded", "after an update"

SEARCH_STEPS = 24
"""Golden-section steps of the temperature search, which narrow the interval to a millionth."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.1, 10.0

MAX_TENSORS = 1000
MAX_SECONDS = 1800.0
"""Tensors are changed one by one only if neither limit is exceeded."""

NUM_PROMPTS = 4
"""Number of prompts in experiments with many passes."""


@dataclass(frozen=True)
class Finding:
    """A likely cause of the difference."""

    kind: FindingKind
    evidence: str
    """Result of the experiment."""
    advice: str
    """Suggested fix, without the final period."""


@dataclass
class Diagnosis:
    """The comparisons of a pair, and the findings that explain a difference."""

    comparisons: dict[str, Comparison] = field(default_factory=dict)
    moved: float | None = None
    """Mean absolute change of the log-probs by the update; None without an update."""
    no_update: str | None = None
    """Reason for skipping the update."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def worst(self) -> float:
        """The largest difference of all comparisons."""
        return max((comparison.worst for comparison in self.comparisons.values()), default=math.inf)


def diagnose(
    case: ParityCase, prompts: Ragged, tokenizer: Any, limit: float, log: Callable[[str], None] = lambda _: None
) -> Diagnosis:
    """Compare the pair, and look for the cause if the largest difference exceeds `limit`.

    `log` receives a line of progress for each experiment.
    """
    pair = Pair(case)
    diagnosis = _compare(pair, prompts, limit, log)
    if not diagnosis.findings and diagnosis.worst > limit:
        search = _Experiment(pair, diagnosis, prompts, tokenizer, limit, log)
        diagnosis.findings = _explain(search, case)
    elif not diagnosis.findings:
        finding = _raw(pair, prompts, limit, log)
        diagnosis.findings = [] if finding is None else [finding]
    return diagnosis


def _compare(pair: Pair, prompts: Ragged, limit: float, log: Callable[[str], None]) -> Diagnosis:
    """Compare the pair with the loaded weights and, if they agree, after an update."""
    diagnosis = Diagnosis()
    try:
        log("generating with the weights of the folder")
        diagnosis.comparisons[LOADED] = loaded = pair.measure(prompts)
        if not pair.case.trains():
            diagnosis.no_update = f"rounding discards small updates of {pair.case.dtype} weights"
        elif loaded.worst > limit:
            diagnosis.no_update = "the two differ without it"
        else:
            log("generating after an update")
            diagnosis.moved = pair.update(loaded)
            diagnosis.comparisons[UPDATED] = pair.measure(prompts)
    except WeightSyncError as error:
        diagnosis.findings.append(
            Finding(
                "weights", str(error), "Check the rollout's load_weights(), for instance with camshaft check-rollout"
            )
        )
    return diagnosis


@dataclass(frozen=True)
class _Experiment:
    """A pair that differs, and the inputs of the experiments."""

    pair: Pair
    diagnosis: Diagnosis
    prompts: Ragged
    tokenizer: Any
    limit: float
    log: Callable[[str], None]

    @property
    def loaded(self) -> Comparison:
        """The comparison with the loaded weights."""
        return self.diagnosis.comparisons[LOADED]


def _explain(search: _Experiment, case: ParityCase) -> list[Finding]:
    """Repeat the comparison in float32, and look for the cause there unless the difference disappears."""
    exact = case.exact()
    if exact == case:
        return _find_cause(search)
    search.log("the same in float32 on both sides")
    search.pair.close()
    pair = Pair(exact)
    again = _compare(pair, search.prompts, search.limit, search.log)
    if again.findings:
        return again.findings
    if again.worst > search.limit:
        return _find_cause(replace(search, pair=pair, diagnosis=again))
    sides = f"the engine in {case.compute_dtype()} and the rollout in {case.rollout_dtype}"
    evidence = (
        f"With {sides} the largest difference is {search.diagnosis.worst:.1e}; in float32 it is {again.worst:.1e}."
    )
    advice = (
        "Use one dtype on both sides (actor_rollout_ref.rollout.dtype, actor.fsdp_config.model_dtype and "
        "mixed_precision.param_dtype), or correct for the difference: algorithm.rollout_correction.rollout_is=token"
    )
    return [Finding("dtype", evidence, advice)]


def _find_cause(search: _Experiment) -> list[Finding]:
    """Return the cause of a difference in float32; the first experiment that succeeds decides."""
    if search.loaded.worst <= search.limit:
        return [_stale(search)]
    for experiment in (_template, _sampling):
        finding = experiment(search)
        if finding is not None:
            return [finding]
    silent = _without_effect(search)
    if silent:
        evidence = f"The rollout ignores some of the weights. Without effect: {', '.join(silent)}."
        return [Finding("weights", evidence, "Check the rollout's load_weights(), and layers that it skips")]
    effect = "the effect of each was not tested" if silent is None else "each has an effect"
    evidence = (
        "Excluded are the dtype, a special token around the prompt, and the sampling settings; the weight sync is "
        f"correct for every weight, and {effect}."
    )
    advice = (
        "The two compute the model differently: check rotary frequencies, windows and normalization in the folder's "
        "config, and quantization, dtypes and replaced modules inside the generator"
    )
    return [Finding("unknown", evidence, advice)]


# -- weights --------------------------------------------------------------------------------------


def _stale(search: _Experiment) -> Finding:
    """Report stale weights: the two agree as loaded but not after an update."""
    updated = search.diagnosis.comparisons[UPDATED]
    evidence = (
        f"With the weights of the folder the largest difference is {search.loaded.worst:.1e}, after one update "
        f"{updated.worst:.1e}: the rollout still uses some of the old weights. "
    )
    silent = _without_effect(search)
    if silent is None:
        evidence += "The effect of each tensor was not tested: there are too many, or each takes too long."
    elif silent:
        evidence += f"Without effect: {', '.join(silent)}."
    else:
        evidence += "Every tensor has some effect."
    advice = "Look for copies of weights that the rollout keeps (fused, repacked, a tied output layer)"
    return Finding("weights", evidence, advice)


def _without_effect(search: _Experiment) -> list[str] | None:
    """Return the tensors whose values do not change the output, or None if untested; each costs a full weight sync."""
    names = search.pair.weight_names()
    if len(names) > MAX_TENSORS:
        search.log(f"{len(names)} tensors are too many to change each of them (at most {MAX_TENSORS})")
        return None
    prompts = search.prompts.select(slice(0, NUM_PROMPTS))
    start = time.perf_counter()
    tokens, log_probs = search.pair.first_tokens(prompts, None)
    seconds = (time.perf_counter() - start) * len(names)
    if seconds > MAX_SECONDS:
        search.log(f"changing each of {len(names)} tensors would take {seconds / 60:.0f} minutes")
        return None
    search.log(f"changing each of {len(names)} tensors: about {seconds:.0f} s")
    silent = []
    for name in names:
        try:
            changed = search.pair.first_tokens(prompts, name)
        except RolloutError:  # an error is an effect
            continue
        if tokens.equal(changed[0]) and log_probs.equal(changed[1]):
            silent.append(name)
    return silent


# -- template -------------------------------------------------------------------------------------


def _template(search: _Experiment) -> Finding | None:
    """Test whether the rollout's log-probs match prompts with a special token added or removed."""
    search.log("special tokens around the prompts")
    rows = slice(0, NUM_PROMPTS)
    comparison = search.loaded
    part = replace(
        comparison,
        prompts=comparison.prompts.select(rows),
        responses=comparison.responses.select(rows),
        rollout=comparison.rollout.select(rows),
    )
    temperature = temperature_of(search.pair.case.sampling)
    for description, prompts in _edits(part.prompts, special_ids(search.tokenizer)):
        other = part.against(search.pair.log_probs(prompts, part.responses, temperature))
        if other.worst <= search.limit:
            evidence = f"The rollout's log-probs match prompts {description}: the difference is then {other.worst:.1e}."
            advice = (
                "The rollout changes token ids or tokenizes prompts itself: disable that (add_special_tokens, the chat "
                "template), or use one tokenizer on both sides"
            )
            return Finding("template", evidence, advice)
    return None


def _edits(prompts: Ragged, special: dict[int, str]) -> Iterator[tuple[str, Ragged]]:
    """Yield the prompts as another template or tokenizer might produce them, with a description."""
    ones = prompts.lengths.clamp(max=1)
    for number, text in special.items():
        extra = Ragged(prompts.values.new_full((len(prompts),), number), prompts.lengths.new_ones(len(prompts)))
        yield f"with {text} in front", Ragged.join(extra, prompts)
        yield f"with {text} after them", Ragged.join(prompts, extra)
    if int(prompts.lengths.min()) > 1:
        yield "without their first token", prompts.suffix(prompts.lengths - ones)
        yield "without their last token", prompts.prefix(prompts.lengths - ones)


# -- sampling -------------------------------------------------------------------------------------


def _sampling(search: _Experiment) -> Finding | None:
    """Test whether both use the same distribution: temperature, top_k and top_p."""
    sampling, comparison = search.pair.case.sampling, search.loaded
    expected = temperature_of(sampling)
    raw = _raw(search.pair, search.prompts, search.limit, search.log)
    if raw is not None:
        return raw
    search.log("other temperatures")
    fitted, temperature = _fit_temperature(search)
    if fitted.worst <= search.limit:
        evidence = (
            f"The rollout's log-probs match temperature {temperature:.4g} instead of {expected:g}: the difference is "
            f"then {fitted.worst:.1e}."
        )
        return Finding("sampling", evidence, "Check the generator's own sampling settings (generation_config.json)")
    if not _truncates(search) and expected == 1.0:
        return _hidden_truncation(comparison, search.limit)
    settings = f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}"
    search.log("the same without top_k and top_p, and at temperature 1")
    for full in (replace(sampling, top_k=0, top_p=1.0), replace(sampling, top_k=0, top_p=1.0, temperature=1.0)):
        again = search.pair.measure(search.prompts, full)
        if full != sampling and again.worst <= search.limit:
            without = "top_k and top_p" if full.temperature == sampling.temperature else "them"
            evidence = (
                f"With {settings} the largest difference is {comparison.worst:.1e}, without {without} it is "
                f"{again.worst:.1e}: the rollout uses the sampled distribution, the engine the full "
                "distribution of the model."
            )
            advice = (
                "Sample from the full distribution (actor_rollout_ref.rollout.top_p=1.0 top_k=0), or use importance "
                "weights: algorithm.rollout_correction.rollout_is=token"
            )
            return Finding("sampling", evidence, advice)
    return None


def _truncates(search: _Experiment) -> bool:
    """Return True if top_k or top_p truncates the distribution."""
    sampling = search.pair.case.sampling
    return not sampling.greedy and (sampling.top_k > 0 or sampling.top_p < 1.0)


def _fit_temperature(search: _Experiment) -> tuple[Comparison, float]:
    """Find the engine's temperature with the smallest difference, by golden-section search over its logarithm."""
    comparison = search.loaded

    def at(log: float) -> Comparison:
        return comparison.against(search.pair.log_probs(comparison.prompts, comparison.responses, math.exp(log)))

    golden = (math.sqrt(5) - 1) / 2
    low, high = math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE)
    for _ in range(SEARCH_STEPS):
        left, right = high - golden * (high - low), low + golden * (high - low)
        if at(left).metrics["log_prob_diff_mean"] < at(right).metrics["log_prob_diff_mean"]:
            high = right
        else:
            low = left
    middle = (low + high) / 2
    return at(middle), math.exp(middle)


def _hidden_truncation(comparison: Comparison, limit: float) -> Finding | None:
    """Detect truncation by the rollout: every kept token is then more likely than under the model."""
    more = comparison.rollout.values - comparison.engine.values
    if not bool((more > -limit).all()) or float(more.mean()) < limit:
        return None
    evidence = (
        "No token is less likely in the rollout than in the engine, and log-probs are higher by "
        f"{float(more.mean()):.1e} on average: the rollout truncates the distribution although the settings do not."
    )
    return Finding("sampling", evidence, "Check the generator's own top_k and top_p (generation_config.json)")


def _raw(pair: Pair, prompts: Ragged, limit: float, log: Callable[[str], None]) -> Finding | None:
    """Test whether the rollout returns log-probs of the model instead of the sampled distribution.

    With top_k=1 a single token remains, whose log-prob in the sampled distribution is 0.
    """
    sampling = pair.case.sampling
    truncated = sampling.top_k > 0 or sampling.top_p < 1.0
    if sampling.greedy or (sampling.temperature == 1.0 and not truncated):
        return None
    log("log-probs of top_k=1")
    single = pair.measure(prompts, replace(sampling, top_k=1, top_p=1.0))
    if float(single.rollout.values.abs().max()) <= limit:
        return None
    for temperature, stage in ((1.0, "before temperature, top_k and top_p"), (sampling.temperature, "before top_k")):
        model = single.against(pair.log_probs(single.prompts, single.responses, temperature))
        if model.worst <= limit:
            evidence = f"The rollout returns raw log-probs, {stage}, but samples from another distribution."
            advice = "Request log-probs after the sampling settings (vLLM: logprobs_mode=processed_logprobs)"
            return Finding("sampling", evidence, advice)
    return None
