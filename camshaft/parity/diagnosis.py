"""Why an engine and a rollout differ: experiments that change one thing and look whether the difference goes away.

    diagnosis = diagnose(case, prompts, tokenizer, limit=1e-3)
    for finding in diagnosis.findings: ...

In this order, because each needs the ones before it out of the way:

    weights    the hand-over itself is checked, tensor by tensor; what differs only after an update is stale
    dtype      both sides in float32: does it go away?
    template   the engine's log-probs for prompts with a special token more, or a token less: are these the rollout's?
    sampling   the engine's log-probs at another temperature; generation without top_k and top_p, at temperature 1;
               generation with top_k=1, which tells log-probs of what is sampled from (0) from those of the model
    weights    one tensor after another goes over as another one: which of them changes nothing?

A cause is named when the difference falls below the limit without it. What is left is called unknown, with what has
been ruled out.
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

HALVINGS = 24
"""Of the span of temperatures that is searched: to a millionth of it."""
COLDEST, HOTTEST = 0.1, 10.0

MOST_TENSORS = 1000
MOST_SECONDS = 1800.0
"""So many are tried one after the other, if that does not take longer; else none."""

FEW = 4
"""Prompts for the experiments that need many passes."""


@dataclass(frozen=True)
class Finding:
    """One thing that makes them differ."""

    kind: FindingKind
    evidence: str
    """What the experiment showed."""
    advice: str
    """What to do or type."""


@dataclass
class Diagnosis:
    """What was measured, and what explains it."""

    rounds: dict[str, Comparison] = field(default_factory=dict)
    moved: float | None = None
    """How far the update moved the log-probs, the mean |change|; None without one."""
    no_update: str | None = None
    """Why there was none."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def worst(self) -> float:
        return max((measured.worst for measured in self.rounds.values()), default=math.inf)


def diagnose(
    case: ParityCase, prompts: Ragged, tokenizer: Any, limit: float, say: Callable[[str], None] = lambda _: None
) -> Diagnosis:
    """Measure, and if the largest difference is above `limit`, look for the cause. `say` hears what is tried."""
    pair = Pair(case)
    diagnosis = _measured(pair, prompts, limit, say)
    if not diagnosis.findings and diagnosis.worst > limit:
        search = _Search(pair, diagnosis, prompts, tokenizer, limit, say)
        diagnosis.findings = _explained(search, case)
    elif not diagnosis.findings:
        diagnosis.findings = [cause for cause in [_raw(pair, prompts, limit, say)] if cause is not None]
    return diagnosis


def _measured(pair: Pair, prompts: Ragged, limit: float, say: Callable[[str], None]) -> Diagnosis:
    """As loaded and, where that was close enough to tell something, after an update."""
    diagnosis = Diagnosis()
    try:
        say("generating with the weights of the folder")
        diagnosis.rounds[LOADED] = loaded = pair.measure(prompts)
        if not pair.case.trains():
            diagnosis.no_update = f"small updates of {pair.case.dtype} weights are lost to rounding"
        elif loaded.worst > limit:
            diagnosis.no_update = "the two differ before it"
        else:
            say("generating after an update")
            diagnosis.moved = pair.update(loaded)
            diagnosis.rounds[UPDATED] = pair.measure(prompts)
    except WeightSyncError as error:
        diagnosis.findings.append(
            Finding(
                "weights", str(error), "Look at the rollout's load_weights(): camshaft check-rollout tries it alone"
            )
        )
    return diagnosis


@dataclass(frozen=True)
class _Search:
    """A pair that differs, and what to try it with."""

    pair: Pair
    diagnosis: Diagnosis
    prompts: Ragged
    tokenizer: Any
    limit: float
    say: Callable[[str], None]

    @property
    def loaded(self) -> Comparison:
        return self.diagnosis.rounds[LOADED]


def _explained(search: _Search, case: ParityCase) -> list[Finding]:
    exact = case.exact()
    if exact == case:
        return _causes(search)
    search.say("the same in float32 on both sides")
    search.pair.close()
    pair = Pair(exact)
    again = _measured(pair, search.prompts, search.limit, search.say)
    if again.findings:
        return again.findings
    if again.worst > search.limit:
        return _causes(replace(search, pair=pair, diagnosis=again))
    sides = f"the engine in {case.computes_in()} and the rollout in {case.rollout_dtype}"
    seen = f"With {sides} the largest difference is {search.diagnosis.worst:.1e}; in float32 it is {again.worst:.1e}."
    advice = (
        "Give both the same format (actor_rollout_ref.rollout.dtype, actor.fsdp_config.model_dtype and "
        "mixed_precision.param_dtype), or live with it: algorithm.rollout_correction.rollout_is=token"
    )
    return [Finding("dtype", seen, advice)]


def _causes(search: _Search) -> list[Finding]:
    """Of a pair in float32. One is enough: what it does not explain is above the limit still, and is looked into."""
    if search.loaded.worst <= search.limit:
        return [_stale(search)]
    for attempt in (_template, _sampling):
        found = attempt(search)
        if found is not None:
            return [found]
    silent = _without_effect(search)
    if silent:
        seen = f"The rollout computes without the weights that it is sent. Without effect on it: {', '.join(silent)}."
        return [Finding("weights", seen, "Look at the rollout's load_weights(), and at layers it leaves out")]
    seen = (
        "Not the number format, not a special token around the prompt, not the sampling; every weight arrived as it "
        f"was sent, and {'whether each has an effect was not tried' if silent is None else 'each has an effect'}."
    )
    advice = (
        "The two compute the model differently: look at what the folder's config says of rotary frequencies, windows "
        "and normalisation, at quantisation and number formats inside the generator, at modules it replaces"
    )
    return [Finding("unknown", seen, advice)]


# -- weights --------------------------------------------------------------------------------------


def _stale(search: _Search) -> Finding:
    """They agree as loaded and not after an update."""
    updated = search.diagnosis.rounds[UPDATED]
    seen = (
        f"With the weights of the folder the largest difference is {search.loaded.worst:.1e}, after one update "
        f"{updated.worst:.1e}: the rollout goes on computing with something of the weights before. "
    )
    silent = _without_effect(search)
    if silent is None:
        seen += "Which tensors have no effect on it was not tried: there are too many, or each takes too long."
    elif silent:
        seen += f"Without effect on it: {', '.join(silent)}."
    else:
        seen += "Every tensor by itself has some effect on it."
    advice = "Look for copies that the rollout makes of its weights (fused, repacked, a tied head) and keeps"
    return Finding("weights", seen, advice)


def _without_effect(search: _Search) -> list[str] | None:
    """The tensors that may go over as anything; None if that was not tried. Each costs a hand-over of all of them."""
    names = search.pair.weight_names()
    if len(names) > MOST_TENSORS:
        search.say(f"{len(names)} tensors are too many to send each of them as another one (at most {MOST_TENSORS})")
        return None
    prompts = search.prompts.select(slice(0, FEW))
    start = time.perf_counter()
    tokens, log_probs = search.pair.first_tokens(prompts, None)
    seconds = (time.perf_counter() - start) * len(names)
    if seconds > MOST_SECONDS:
        search.say(f"sending each of {len(names)} tensors as another one would take {seconds / 60:.0f} minutes")
        return None
    search.say(f"sending each of {len(names)} tensors as another one: about {seconds:.0f} s")
    silent = []
    for name in names:
        try:
            others = search.pair.first_tokens(prompts, name)
        except RolloutError:  # refused, or too much for it: it did have an effect
            continue
        if tokens.equal(others[0]) and log_probs.equal(others[1]):
            silent.append(name)
    return silent


# -- template -------------------------------------------------------------------------------------


def _template(search: _Search) -> Finding | None:
    """Are the rollout's log-probs those of other prompts?"""
    search.say("special tokens around the prompts")
    few = slice(0, FEW)
    measured = search.loaded
    part = replace(
        measured,
        prompts=measured.prompts.select(few),
        responses=measured.responses.select(few),
        rollout=measured.rollout.select(few),
    )
    temperature = temperature_of(search.pair.case.sampling)
    for said, prompts in _edits(part.prompts, special_ids(search.tokenizer)):
        other = part.against(search.pair.log_probs(prompts, part.responses, temperature))
        if other.worst <= search.limit:
            seen = f"The rollout's log-probs are those of prompts {said}: then the difference is {other.worst:.1e}."
            advice = (
                "The rollout changes the token ids it is given, or makes prompts of text by itself: switch that off "
                "(add_special_tokens, the chat template), or give both one tokenizer"
            )
            return Finding("template", seen, advice)
    return None


def _edits(prompts: Ragged, special: dict[int, str]) -> Iterator[tuple[str, Ragged]]:
    """Prompts as another template or tokenizer might have made them."""
    ones = prompts.lengths.clamp(max=1)
    for number, text in special.items():
        extra = Ragged(prompts.values.new_full((len(prompts),), number), prompts.lengths.new_ones(len(prompts)))
        yield f"with {text} in front", Ragged.join(extra, prompts)
        yield f"with {text} behind them", Ragged.join(prompts, extra)
    if int(prompts.lengths.min()) > 1:
        yield "without their first token", prompts.suffix(prompts.lengths - ones)
        yield "without their last token", prompts.prefix(prompts.lengths - ones)


# -- sampling -------------------------------------------------------------------------------------


def _sampling(search: _Search) -> Finding | None:
    """Do they speak of one distribution?"""
    sampling, measured = search.pair.case.sampling, search.loaded
    asked = temperature_of(sampling)
    raw = _raw(search.pair, search.prompts, search.limit, search.say)
    if raw is not None:
        return raw
    search.say("other temperatures")
    fitted, temperature = _fitted(search)
    if fitted.worst <= search.limit:
        seen = (
            f"The rollout's log-probs are those of temperature {temperature:.4g}, it was told {asked:g}: "
            f"there the difference is {fitted.worst:.1e}."
        )
        return Finding("sampling", seen, "Look for settings of the generator's own (generation_config.json)")
    if not _is_cut(search) and asked == 1.0:
        return _hidden_cut(measured, search.limit)
    settings = f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}"
    search.say("the same without top_k and top_p, and at temperature 1")
    for plain in (replace(sampling, top_k=0, top_p=1.0), replace(sampling, top_k=0, top_p=1.0, temperature=1.0)):
        again = search.pair.measure(search.prompts, plain)
        if plain != sampling and again.worst <= search.limit:
            without = "top_k and top_p" if plain.temperature == sampling.temperature else "them"
            seen = (
                f"With {settings} the largest difference is {measured.worst:.1e}, without {without} {again.worst:.1e}: "
                "the rollout speaks of the distribution it samples from, the engine of the model's whole one."
            )
            advice = (
                "Train on samples of the whole distribution: actor_rollout_ref.rollout.top_p=1.0 top_k=0. Or weigh "
                "them: algorithm.rollout_correction.rollout_is=token"
            )
            return Finding("sampling", seen, advice)
    return None


def _is_cut(search: _Search) -> bool:
    sampling = search.pair.case.sampling
    return not sampling.greedy and (sampling.top_k > 0 or sampling.top_p < 1.0)


def _fitted(search: _Search) -> tuple[Comparison, float]:
    """The temperature at which the engine comes closest, by golden sections of its logarithm, and how close."""
    measured = search.loaded

    def at(log: float) -> Comparison:
        return measured.against(search.pair.log_probs(measured.prompts, measured.responses, math.exp(log)))

    golden = (math.sqrt(5) - 1) / 2
    low, high = math.log(COLDEST), math.log(HOTTEST)
    for _ in range(HALVINGS):
        left, right = high - golden * (high - low), low + golden * (high - low)
        if at(left).metrics["log_prob_diff_mean"] < at(right).metrics["log_prob_diff_mean"]:
            high = right
        else:
            low = left
    middle = (low + high) / 2
    return at(middle), math.exp(middle)


def _hidden_cut(measured: Comparison, limit: float) -> Finding | None:
    """Tokens that were kept when others were cut away are likelier than the model holds them, all of them."""
    more = measured.rollout.values - measured.engine.values
    if not bool((more > -limit).all()) or float(more.mean()) < limit:
        return None
    seen = (
        f"No token is less likely to the rollout than to the engine, and by {float(more.mean()):.1e} likelier on "
        "average, as where unlikely tokens are cut away: the rollout cuts, though it was told not to."
    )
    return Finding("sampling", seen, "Look for top_k or top_p of the generator's own (generation_config.json)")


def _raw(pair: Pair, prompts: Ragged, limit: float, say: Callable[[str], None]) -> Finding | None:
    """Does the rollout tell log-probs of the model where it samples from another distribution?

    With top_k=1 one token is left, whose log-prob is 0 in what is sampled from.
    """
    sampling = pair.case.sampling
    cut = sampling.top_k > 0 or sampling.top_p < 1.0
    if sampling.greedy or (sampling.temperature == 1.0 and not cut):
        return None
    say("log-probs of top_k=1")
    single = pair.measure(prompts, replace(sampling, top_k=1, top_p=1.0))
    told = single.rollout.values
    if float(told.abs().max()) <= limit:
        return None
    for temperature, what in ((1.0, "before temperature, top_k and top_p"), (sampling.temperature, "before top_k")):
        model = single.against(pair.log_probs(single.prompts, single.responses, temperature))
        if model.worst <= limit:
            seen = f"The rollout tells raw log-probs, {what}, and samples from another distribution."
            advice = "Ask the generator for those after them (vLLM: logprobs_mode=processed_logprobs)"
            return Finding("sampling", seen, advice)
    return None
