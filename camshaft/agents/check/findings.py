"""Check an environment before a run: play scripted episodes in processes as in training, and name what is wrong.

    report = check_environment(MultiTurnConfig(environment=("game.py:Game",)))
    report = check_environment(MultiTurnConfig(), Game)                      # a class from Python
    report.findings                                                          # one sentence each, or none

All episodes are played three times with the same seeds and answers: on new objects, on the same objects after another
`reset`, and on new objects in new processes, in another order. Without tools and data, nothing imports torch.
"""

import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from camshaft.agents.callables import pickle_environments
from camshaft.agents.calls import PolicyAnswer
from camshaft.agents.check.scripted import BROKEN, Played, play_episodes, scripted_policy
from camshaft.agents.environment import Fault, Start, Turn
from camshaft.agents.messages import Loaded, Spec, make_spec
from camshaft.agents.pool import EnvironmentPool
from camshaft.config.schema.agents import MultiTurnConfig
from camshaft.errors import CamshaftError

NUM_EPISODES = 10
MAX_ANSWERS = 50
"""Number of answers after which an episode has to end by itself, unless `max_assistant_turns` ends it."""
LARGE_PART = 0.5
"""Part of a time limit from which a call is reported."""

_NUM_PROCESSES = 2
_QUOTED = 80
_FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)')


@dataclass
class Report:
    """Results of a check."""

    findings: list[str] = field(default_factory=list)
    """What to correct, one sentence each."""
    notes: list[str] = field(default_factory=list)
    """Facts."""
    episodes: dict[int, Played] = field(default_factory=dict)
    """The episodes, as they were played first."""
    spec: Spec | None = None
    num_calls: int = 0
    seconds: float = 0.0


def check_environment(
    section: MultiTurnConfig,
    environment: Any = None,
    rows: Sequence[Mapping[str, Any]] | None = None,
    has_other_rewards: bool = False,
) -> Report:
    """Check the environments and tools of a section, or a class or several that are passed from Python.

    `rows` are rows of the data. With `has_other_rewards`, an environment with tools may have no score.
    """
    report, begin = Report(), time.perf_counter()
    pools: list[EnvironmentPool] = []
    try:
        passed = () if environment is None else pickle_environments(environment)
        spec = make_spec(section, passed, has_other_rewards)
        pools = [EnvironmentPool(spec, min(_NUM_PROCESSES, section.num_workers)) for _ in range(2)]
        loaded = pools[0].check()
        report.spec = spec.described(loaded)
        for pool in pools:
            pool.spec = report.spec  # processes that start later need not describe the environments again
        report.findings += find_missing_columns(loaded, report.spec, rows)
        if not report.findings:
            _play_all(pools[0], pools[1], section, make_starts(report.spec, rows), report)
        if rows is None and any(played.fault and not played.answers for played in report.episodes.values()):
            report.notes.append("without data=FILE, reset receives no columns besides 'prompt'")
    except CamshaftError as error:  # the environments cannot be loaded
        report.findings.append(str(error))
    finally:
        for pool in pools:
            pool.close()
    report.seconds = time.perf_counter() - begin
    return report


def find_missing_columns(loaded: Loaded, spec: Spec, rows: Sequence[Mapping[str, Any]] | None) -> Iterator[str]:
    """Yield a sentence for each column that `reset` requires, and that there is not."""
    target = spec.sources[0].target if spec.sources else ""
    for name in loaded.required:
        if rows is None and name != "prompt":
            yield f"reset of {target} requires the column '{name}'; set data=FILE to a file with this column"
        elif rows is not None and rows and name not in rows[0]:
            yield (
                f"reset of {target} requires the column '{name}', but the data has only {', '.join(rows[0])}; add the "
                "column, rename the parameter, or give it a default"
            )
    names = [source.name for source in spec.sources]
    for number, row in enumerate(rows or ()):
        if len(names) > 1 and row.get("environment") not in names:
            value = row.get("environment")
            yield f"row {number}: the column 'environment' is {value!r}; it must be one of {', '.join(names)}"
            return


def make_starts(spec: Spec, rows: Sequence[Mapping[str, Any]] | None) -> dict[int, Start]:
    """Return the arguments of ten episodes. Two of them have the same row and seed, as in a group."""
    names = [source.name for source in spec.sources] or [""]
    given = rows or [{"prompt": [{"role": "user", "content": ""}]}]
    starts: dict[int, Start] = {}
    for number in range(NUM_EPISODES):
        row = dict(given[number // 2 % len(given)])
        name = names[number % len(names)]
        if len(names) > 1:
            name = str(row.pop("environment", name))
        if spec.schemas.get(name):
            row.pop("tools", None)
        starts[number] = Start(row, 1000 + number // 2, number, name)
    return starts


# -- episodes -------------------------------------------------------------------------------------


def _play_all(
    pool: EnvironmentPool, other: EnvironmentPool, section: MultiTurnConfig, starts: dict[int, Start], report: Report
) -> None:
    """Play all episodes three times, and add what is wrong to the report."""
    limit = min(MAX_ANSWERS, section.max_assistant_turns or MAX_ANSWERS)
    policy = scripted_policy(pool.spec, starts)
    first = report.episodes = play_episodes(pool, {0: starts[0]}, policy, limit)
    if not (first[0].fault and first[0].fault.kind == "timeout"):  # the others would take as long
        first |= play_episodes(pool, {number: starts[number] for number in list(starts)[1:]}, policy, limit)
    report.findings += _faults(first, report.spec)
    pool.end(list(first))
    runs = [first, *_play_again(pool, other, first, report)]
    if section.max_assistant_turns is None:
        report.findings += _endless(first)
    report.findings += _slow_calls(runs, section, report)
    num_failures = pool.num_failures + other.num_failures
    if num_failures and not any(played.fault for run in runs for played in run.values()):
        report.findings.append(
            f"{num_failures} calls failed at first and succeeded when their episodes were repeated; they depend on "
            "something besides the seed and the answers, so find out what, in the output of the environment"
        )
    report.num_calls = sum(len(played.turns) for run in runs for played in run.values())
    _describe_episodes(first, report)


def _play_again(
    pool: EnvironmentPool, other: EnvironmentPool, first: dict[int, Played], report: Report
) -> list[dict[int, Played]]:
    """Repeat the episodes without failures on objects that were used before, and on new ones, and compare them."""
    starts = {number: played.start for number, played in first.items() if played.fault is None}
    if not starts:
        return []

    def repeat(number: int, turns: Sequence[Turn | Fault]) -> str | PolicyAnswer | None:
        answers = first[number].answers
        return answers[len(turns) - 1] if len(turns) <= len(answers) else None

    last = max(starts)
    mirrored = {last - number: starts[number] for number in sorted(starts, reverse=True)}  # another order and process
    again = play_episodes(other, mirrored, lambda number, turns: repeat(last - number, turns), MAX_ANSWERS)
    fresh = {last - number: played for number, played in again.items()}
    reused = play_episodes(pool, starts, repeat, MAX_ANSWERS)
    if difference := find_difference(first, fresh):
        report.findings.append(
            f"the environment is not deterministic: with the same seed and answers, {difference}. Draw random numbers "
            "from random, numpy.random or the parameters seed and row_seed of reset, keep no state outside of the "
            "object, and do not read the time"
        )
    elif difference := find_difference(first, reused):
        report.findings.append(
            f"reset does not clear the state of an earlier episode: on an object that was used before, {difference}. "
            "Set all attributes in reset"
        )
    return [fresh, reused]


# -- findings -------------------------------------------------------------------------------------


def find_difference(first: Mapping[int, Played], second: Mapping[int, Played]) -> str | None:
    """Return the first turn in which episodes without failures differ, in words."""
    for number, other in sorted(second.items()):
        played = first[number]
        for index, turn in enumerate(played.turns):
            if index >= len(other.turns) or (difference := _difference(turn, other.turns[index])):
                difference = difference if index < len(other.turns) else "the episode ends before it"
                return f"{played.position(index)} of episode {number} differs: {difference}"
    return None


def _difference(turn: Turn | Fault, other: Turn | Fault) -> str | None:
    if isinstance(other, Fault):
        return f"it fails with {describe_fault(other)}"
    assert isinstance(turn, Turn)  # the episode has no failure
    pairs = {
        "the observation": (turn.said, other.said),
        "the reward": (turn.reward, other.reward),
        "done": (turn.done, other.done),
    }
    return next((f"{name} is {quote(a)} and then {quote(b)}" for name, (a, b) in pairs.items() if a != b), None)


def _faults(episodes: Mapping[int, Played], spec: Spec | None) -> Iterator[str]:
    """Yield a sentence for each kind of failure."""
    groups: dict[str, list[int]] = {}
    for number, played in episodes.items():
        if played.fault is not None:
            groups.setdefault(describe_fault(played.fault), []).append(number)
    for text, numbers in groups.items():
        played = episodes[numbers[0]]
        index = len(played.turns) - 1
        given = f" ({quote(played.answers[index - 1])})" if 0 < index <= len(played.answers) else ""
        others = f", in {len(numbers)} of {len(episodes)} episodes" if len(numbers) > 1 else ""
        yield f"{played.position(index)}{given} of episode {numbers[0]} fails{others}: {text}"


def describe_fault(fault: Fault) -> str:
    """Return the message of a failure with its place in the user's code, and what to do."""
    if fault.kind == "timeout":
        return f"{fault.message}. Make it faster, or increase multi_turn.timeout (start_timeout for reset)"
    if fault.kind == "crash":
        return f"{fault.message}; see the output of the environment above"
    frames = _FRAME.findall(fault.trace)
    if not frames:
        return fault.message
    file, line, function = [frame for frame in frames if frame[0] == frames[0][0]][-1]
    return f"{fault.message} ({file}, line {line}, in {function}). Handle it there; a failed episode has no score"


def _endless(episodes: Mapping[int, Played]) -> Iterator[str]:
    endless = [number for number, played in episodes.items() if len(played.answers) >= MAX_ANSWERS]
    endless = [
        number for number in endless if not any(turn.done for turn in episodes[number].replies[: MAX_ANSWERS + 1])
    ]
    if endless:
        yield (
            f"episode {endless[0]} has not ended after {MAX_ANSWERS} answers ({len(endless)} of {len(episodes)} "
            "episodes); return done=True from step after a number of answers, or set max_turns"
        )


def _slow_calls(runs: Sequence[Mapping[int, Played]], section: MultiTurnConfig, report: Report) -> Iterator[str]:
    """Yield a sentence about calls that nearly reach their time limit, and add the times to the notes."""
    played = [each for run in runs for each in run.values()]
    resets = [turn.seconds for each in played for turn in each.turns[:1] if isinstance(turn, Turn)]
    calls = [turn.seconds / max(1, turn.num_calls) for each in played for turn in each.replies[1:]]
    limits = {"reset": (resets, section.start_timeout, "start_timeout"), "a call": (calls, section.timeout, "timeout")}
    for name, (seconds, limit, key) in limits.items():
        if not seconds:
            continue
        longest = max(seconds)
        report.notes.append(f"{name} takes {_time(statistics.median(seconds))} (median), at most {_time(longest)}")
        if longest > LARGE_PART * limit:
            yield (
                f"{name} took {_time(longest)}, and multi_turn.{key}={limit:g} s ends it; make it faster, or increase "
                "the limit"
            )


def _describe_episodes(episodes: Mapping[int, Played], report: Report) -> None:
    replies = [turn for played in episodes.values() for turn in played.replies]
    totals = [sum(turn.reward for turn in played.replies) for played in episodes.values() if played.fault is None]
    if totals:
        report.notes.append(f"scores of random answers: {min(totals):g} to {max(totals):g}")
    if count := sum(turn.num_calls for turn in replies):
        failed = sum(turn.num_errors for turn in replies)
        broken = sum(
            isinstance(answer, PolicyAnswer) and BROKEN in answer.calls
            for p in episodes.values()
            for answer in p.answers
        )
        report.notes.append(
            f"{count} tool calls: {failed - broken} raised an exception, which the policy is told, and {broken} were "
            "malformed on purpose"
        )


def quote(value: Any) -> str:
    """Return a value for a message, shortened."""
    if isinstance(value, PolicyAnswer):
        value = ", ".join(f"{call.name}({call.arguments})" for call in value.calls if call.name) or value.text
    text = repr(value)
    return text if len(text) <= _QUOTED else text[:_QUOTED] + "..."


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.2g} ms"
