"""Advice on runs that do not learn or do not proceed: the cause that the metrics show, and what to try.

    for advice in advise(run, time.time()):
        print(advice.title, advice.text)

Each symptom is a function of a run that returns a text, or None if the run lacks it. Symptoms compare medians over the
last `WINDOW` steps, so that single steps do not trigger them.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from camshaft.tracking.console import format_number
from camshaft.tracking.no_signal import PATIENCE, SHARE, SeenScores, are_empty, explain_equal_advantages, find_cause
from camshaft.tracking.run_folder import RESTARTS, RunFolder

WINDOW = 10
"""Number of steps whose median a symptom compares."""
MAX_FAILED = 0.01
"""Fraction of responses."""
MAX_EQUAL_GROUPS = 0.9
MAX_CUT = 0.5
MIN_CHANGE = 0.005
"""Relative change of the entropy, below which the policy is considered to be unchanged."""
MIN_EFFECTIVE = 0.5
MAX_PROBE_GAP = 0.1
"""Nats per token between trainer and generator with the same weights. Rounding in bfloat16 causes up to 0.05."""
MAX_GRADIENT = 20.0
"""Multiple of the median gradient norm of the run."""
MAX_KL = 1.0
"""Nats per token between the policy and the policy before the update."""
SLOWEST = "perf/slowest_rank/"
SAME_RANK, MIN_SLOWNESS = 0.8, 1.2
"""Fraction of the steps in which the same rank is the slowest, and its time relative to the mean of the ranks."""
STALLED_SECONDS, STALLED_STEPS = 60.0, 6.0
"""A phase is stalled if it lasts longer than a minute and than six times the longest recent step."""
STALLED_BEFORE_FIRST_STEP = 600.0
"""Limit in seconds while no step is complete. Loading and compiling large models takes minutes."""


class Advice(NamedTuple):
    """A problem of a run, with its cause and what to try."""

    title: str
    text: str


Symptom = Callable[[RunFolder, float], str | None]


def advise(run: RunFolder, now: float) -> list[Advice]:
    """Return the advice on a run whose metrics have been read. An empty list means that the run has no symptom."""
    found = ((title, symptom(run, now)) for title, symptom in SYMPTOMS.items())
    return [Advice(title, text) for title, text in found if text is not None]


def _values(run: RunFolder, name: str) -> NDArray[np.float64]:
    return run.metrics.arrays(name)[1]


def _median(values: NDArray[np.float64]) -> float:
    return float(np.median(values))


def _recent(run: RunFolder, name: str) -> float | None:
    """Return the median of a metric over the last steps, or None before `WINDOW` steps."""
    values = _values(run, name)
    return _median(values[-WINDOW:]) if len(values) >= WINDOW else None


def _change(earlier: NDArray[np.float64], later: NDArray[np.float64]) -> float:
    """Return the difference of two means, in units of its standard error."""
    difference = float(later.mean() - earlier.mean())
    error = math.hypot(*(float(values.std()) / math.sqrt(len(values)) for values in (earlier, later)))
    return difference / error if error else math.copysign(math.inf, difference) if difference else 0.0


def _best(values: NDArray[np.float64], default: float = 0.0) -> float:
    return float(values.max()) if len(values) else default


def _killed(run: RunFolder, now: float) -> str | None:
    if run.state() != "killed":
        return None
    status = run.status()
    where = f" in step {status.step}, phase {status.phase}" if status is not None else ""
    return (
        f"The process ended{where} without a message, as after SIGKILL. Often the system ran out of memory: look for "
        "'Out of memory' in the system log. The same command resumes from the newest checkpoint."
    )


def _failed(run: RunFolder, now: float) -> str | None:
    return run.info().get("error")


def _restarted(run: RunFolder, now: float) -> str | None:
    restarts = run.info().get(RESTARTS)
    if not restarts:
        return None
    times = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(restart["at"])) for restart in restarts)
    lines = (
        f"{at}, last saved step {restart['saved'] or 'none'}, pause {restart['pause']:g} s: {restart['cause']}"
        for at, restart in zip(times, restarts, strict=True)
    )
    return "\n".join(("trainer.max_restarts has let the command run again after these failures:", *lines))


def _stalled(run: RunFolder, now: float) -> str | None:
    status = run.status()
    if status is None or run.state() != "running":
        return None
    age, longest = now - status.since, _best(_values(run, "timing_s/step")[-WINDOW:])
    if age < (max(STALLED_SECONDS, STALLED_STEPS * longest) if longest else STALLED_BEFORE_FIRST_STEP):
        return None
    usual = f"the longest of the last steps took {longest:.0f} s" if longest else "no step is complete yet"
    return (
        f"The phase {status.phase} of step {status.step} has lasted {age:.0f} s; {usual}. See log.txt, and logs/ for "
        "the output of the ranks."
    )


def _failing_rewards(run: RunFolder, now: float) -> str | None:
    tokens, length = _recent(run, "rollout/response_tokens"), _recent(run, "response_length/mean")
    rows = tokens / length if tokens and length else 0.0
    kinds = ("errors", "invalid", "timeouts", "crashes")
    counts = {kind: count for kind in kinds if (count := _recent(run, f"reward/{kind}"))}
    if not counts or (rows and sum(counts.values()) <= MAX_FAILED * rows):
        return None
    text = ", ".join(f"{format_number(count)} {kind}" for kind, count in counts.items())
    return f"Calls of the reward function fail in every step ({text}). rewards/failed.jsonl contains their errors."


def _no_reward(run: RunFolder, now: float) -> str | None:
    scores, highest = _values(run, "critic/score/mean"), _values(run, "critic/score/max")
    if len(scores) < WINDOW or highest.any() or scores.any():
        return None
    return (
        f"No response has had a score other than 0 in {len(scores)} steps, so there is nothing to learn from. Check "
        "the reward function with `camshaft check-data`, and look at the responses; use easier prompts."
    )


def _empty_responses(run: RunFolder, now: float) -> str | None:
    length, longest = _recent(run, "response_length/mean"), _best(_values(run, "response_length/mean"))
    if length is None or not are_empty(length, _recent(run, "response_length/clip_ratio") or 0.0):
        return None
    return (
        f"The responses are empty. Their mean length was up to {format_number(longest)} tokens, and is now "
        f"{format_number(length)}. Often the reward is highest for an empty response. Give an empty response a lower "
        "score than any other, and weaken penalties of length."
    )


def _no_signal(run: RunFolder, now: float) -> str | None:
    cause = _signal_loss(run, now)
    return None if cause is None or cause in (_failed(run, now) or "") else f"{cause}."


def _signal_loss(run: RunFolder, now: float) -> str | None:
    """Return why the last steps gave the policy no signal, also if the error of the run says it too."""
    shares, lows, highs = (_values(run, name) for name in (SHARE, "critic/score/min", "critic/score/max"))
    count = len(shares) - int(np.flatnonzero(shares)[-1] + 1 if shares.any() else 0)
    if count < PATIENCE or not len(lows) or _no_reward(run, now) or _empty_responses(run, now):
        return None
    seen = SeenScores(lowest=float(lows.min()), highest=float(highs.max()), recent=float(lows[-count:].min()))
    last_step = run.metrics.at(run.metrics.last_step)
    cause = find_cause(last_step, str(run.config().get("algorithm.adv_estimator")), seen)
    return cause.text


def _equal_advantages(run: RunFolder, now: float) -> str | None:
    last_step = run.metrics.at(run.metrics.last_step)
    text = explain_equal_advantages(last_step, str(run.config().get("algorithm.adv_estimator")))
    return None if text is None else f"In the last step, {text}."


def _equal_groups(run: RunFolder, now: float) -> str | None:
    share, entropy = _recent(run, "groups/same_share"), _recent(run, "actor/entropy")
    scores, best = _values(run, "critic/score/mean"), _best(_values(run, "critic/score/max"), math.inf)
    if share is None or share <= MAX_EQUAL_GROUPS or _has_cause(run, now) or _rate_too_high(run, now):
        return None
    is_best = len(scores) > 0 and _median(scores[-WINDOW:]) >= 0.9 * best
    if is_best and scores[0] < 0.9 * best:
        return None  # the policy has learned to solve the prompts
    if entropy is not None and entropy < 0.05:
        cause = "the policy is deterministic"
    elif is_best:
        cause = "the prompts are too easy, or the reward does not depend on the response"
    else:
        cause = "the prompts are too hard"
    return (
        f"In {share:.0%} of the groups all scores are equal, and these groups have no gradient: {cause}. Increase "
        "actor_rollout_ref.rollout.n or its temperature, use other prompts, or set algorithm.filter_groups.enable=true."
    )


def _has_cause(run: RunFolder, now: float) -> bool:
    """Return True if another symptom tells why there is nothing to learn from."""
    return any(symptom(run, now) for symptom in (_no_reward, _empty_responses, _signal_loss))


def _entropy_collapse(run: RunFolder, now: float) -> str | None:
    entropy = _values(run, "actor/entropy")
    score, best = _recent(run, "critic/score/mean"), _best(_values(run, "critic/score/mean"))
    if len(entropy) < 2 * WINDOW or score is None or _median(entropy[-WINDOW:]) > 0.1 * entropy[0]:
        return None
    if score >= best - 0.1 * abs(best) or _rate_too_high(run, now) or _empty_responses(run, now):
        return None  # a policy that has learned the task is certain
    first, last = format_number(float(entropy[0])), format_number(_median(entropy[-WINDOW:]))
    return (
        f"The entropy fell from {first} to {last} nats, while the reward ({format_number(score)}) is below "
        f"its best ({format_number(best)}). Lower the learning rate, or set actor_rollout_ref.actor.entropy_coeff or a "
        "KL loss."
    )


def _rate_too_high(run: RunFolder, now: float) -> str | None:
    norms, kl = _values(run, "actor/grad_norm"), _recent(run, "actor/ppo_kl")
    scores = _values(run, "critic/score/mean")
    if len(scores) < 2 * WINDOW:
        return None
    windows = scores[: len(scores) // WINDOW * WINDOW].reshape(-1, WINDOW)
    has_fallen = _median(scores[-WINDOW:]) < 0.5 * _best(np.median(windows, axis=1))
    large_kl = kl is not None and abs(kl) > MAX_KL
    large_norm = len(norms) >= 2 * WINDOW and _median(norms[-WINDOW:]) > MAX_GRADIENT * _median(norms[:WINDOW])
    entropy = _values(run, "actor/entropy")[:WINDOW]
    is_worse = _median(scores[-WINDOW:]) < 0.9 * _best(scores)
    has_collapsed = is_worse and len(entropy) == WINDOW and _median(entropy) < 0.1 * entropy[0]
    if not (large_kl or (has_fallen and large_norm) or has_collapsed):
        return None
    if large_kl:
        reason = f"the KL of an update is {format_number(kl or 0)} nats"
    elif has_collapsed:
        first, later = format_number(float(entropy[0])), format_number(_median(entropy))
        reason = f"the entropy fell from {first} to {later} nats within the first {WINDOW} steps"
    else:
        reason = "the gradient norm has multiplied"
    fall = ", and the reward has fallen below half of its best" if has_fallen else ""
    return f"The updates are too large: {reason}{fall}. Lower actor_rollout_ref.actor.optim.lr, for example to a third."


def _policy_unchanged(run: RunFolder, now: float) -> str | None:
    scores, entropy = _values(run, "critic/score/mean"), _values(run, "actor/entropy")
    rate, share = _recent(run, "actor/lr"), _recent(run, "groups/same_share") or 0.0
    if min(len(scores), len(entropy)) < 3 * WINDOW or share > MAX_EQUAL_GROUPS or not rate or _has_cause(run, now):
        return None
    first, last = _median(entropy[:WINDOW]), _median(entropy[-WINDOW:])
    if abs(_change(*np.array_split(scores, 2))) > 2 or abs(last - first) > MIN_CHANGE * abs(first):
        return None
    adapter = ""
    if run.config().get("actor_rollout_ref.model.lora_rank"):
        adapter = " If the model has random weights, an adapter can hardly change its output: train without LoRA."
    return (
        f"In {len(scores)} steps, neither the reward nor the entropy has changed (medians of the last {WINDOW} steps: "
        f"{format_number(_median(scores[-WINDOW:]))} and {format_number(last)} nats). Increase the learning rate, now "
        f"{format_number(rate)} (actor_rollout_ref.actor.optim.lr).{adapter}"
    )


def _cut(run: RunFolder, now: float) -> str | None:
    share, scores = _recent(run, "response_length/clip_ratio"), _values(run, "critic/score/mean")
    if share is None or share <= MAX_CUT:
        return None
    if len(scores) and _median(scores[-WINDOW:]) >= 0.9 * _best(scores) > 0:
        return None
    if len(scores) >= 2 * WINDOW and _change(scores[-2 * WINDOW : -WINDOW], scores[-WINDOW:]) > 2:
        return None  # the reward rises
    return (
        f"{share:.0%} of the responses are cut at the length limit and may lack their answer. Increase "
        "data.max_response_length, or reward shorter responses (reward_model.overlong_buffer)."
    )


def _mismatch(run: RunFolder, now: float) -> str | None:
    share, gap = _recent(run, "rollout/effective_sample_share"), _recent(run, "rollout/log_prob_diff_mean")
    probe = _recent(run, "async/probe_log_prob_diff_mean")
    if probe is not None and probe > MAX_PROBE_GAP:
        return (
            f"With the same weights, the log-probs of trainer and generator differ by {format_number(probe)} per "
            "token, which is not due to the age of the responses. The generator may have other weights or another "
            "number format: see docs/mismatch.md, and run `camshaft parity`."
        )
    if share is None or share >= MIN_EFFECTIVE:
        return None
    if staleness := _recent(run, "async/staleness_max"):
        of_probe = (
            "" if probe is None else f" With the same weights, the log-probs differ by {format_number(probe)} only."
        )
        return (
            f"The responses are from weights that are up to {format_number(staleness)} versions old, and only "
            f"{share:.0%} of them are effective for the current ones. Lower max_staleness or the learning rate."
            f"{of_probe}"
        )
    return (
        f"The log-probs of trainer and generator differ by {format_number(gap or 0)} per token, and only {share:.0%} "
        "of the samples are effective. The generator may have other weights or another number format: see "
        "docs/mismatch.md, and run `camshaft parity`."
    )


def _slow_rank(run: RunFolder, now: float) -> str | None:
    for name in run.metrics.names:
        if not name.startswith(SLOWEST):
            continue
        pool = name.removeprefix(SLOWEST)
        ranks = _values(run, name)[-WINDOW:]
        means, longest = (_recent(run, f"perf/rank_seconds/{pool}/{of}") for of in ("mean", "max"))
        if not means or not longest or longest < MIN_SLOWNESS * means:
            continue
        rank, count = Counter(ranks.tolist()).most_common(1)[0]
        if count >= SAME_RANK * len(ranks):
            return (
                f"Rank {rank:.0f} of the pool {pool} works for {longest:.3g} s per step, {longest / means:.1f} times "
                f"the mean of its ranks, and was the slowest in {count} of the last {len(ranks)} steps. Its device or "
                f"machine may be slower or shared: see logs/{pool}_rank{rank:.0f}.log, and compare the devices."
            )
    return None


def _skipped(run: RunFolder, now: float) -> str | None:
    for name in ("actor/skipped_steps", "train/skipped_steps"):
        if (_values(run, name)[-WINDOW:] > 0).sum() > 1:
            return (
                "Several of the last optimizer steps were skipped, because their gradient was not finite. Lower the "
                "learning rate, or compute in float32."
            )
    return None


SYMPTOMS: dict[str, Symptom] = {
    "Run failed": _failed,
    "Process killed": _killed,
    "Run restarted": _restarted,
    "Phase stalled": _stalled,
    "Reward function fails": _failing_rewards,
    "Reward is always 0": _no_reward,
    "Responses are empty": _empty_responses,
    "Steps without signal": _no_signal,
    "Advantages are equal": _equal_advantages,
    "Groups without signal": _equal_groups,
    "Entropy collapse": _entropy_collapse,
    "Learning rate too high": _rate_too_high,
    "Policy does not change": _policy_unchanged,
    "Responses cut at the length limit": _cut,
    "Generator differs from trainer": _mismatch,
    "Rank is slow": _slow_rank,
    "Skipped optimizer steps": _skipped,
}
