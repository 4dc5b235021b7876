"""Statistics and the page of the runs of `learning.py`.

print("\\n".join(result_table(TASKS, runs)))
Path("docs/results.md").write_text(page(TASKS, runs, settings="...", machine="...", ...))
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAMES = {"gae": "PPO", "grpo": "GRPO"}
"""Display names of the values of `algorithm.adv_estimator`."""


@dataclass(frozen=True)
class Task:
    """A task, its settings and its goal."""

    source: str
    """`data_source` of the rows."""
    about: str
    num_train: int
    settings: dict[str, Any]
    """Arguments of the problem generator."""
    longest_prompt: int
    hidden: int
    """Hidden size of the model."""
    warm_up: int
    """Warm-up steps with 64 answers each."""
    steps: int
    start: float
    """Maximum share of correct answers before the first step."""
    goal: float
    """Minimum share of correct answers after the last step."""
    mistake: Callable[[str], str] | None = None
    """Maps a correct answer to the mistaken one; None if the data set generates mistakes (arithmetic)."""


@dataclass(frozen=True)
class Run:
    """Result of one run."""

    task: str
    algorithm: str
    seed: int
    steps: list[int]
    """Steps with a validation."""
    correct: list[float]
    """Share of correct answers at each validation."""
    score: list[float]
    """Mean score at each validation."""
    sampled: list[float]
    """Mean score of the sampled responses at each step."""
    seconds: float
    cpu_seconds: float
    max_staleness: int = 0


def reached(task: Task, run: Run) -> bool:
    """Return True if the run started at `start` or below and ended at `goal` or above."""
    return run.correct[0] <= task.start and run.correct[-1] >= task.goal


def grouped(tasks: Mapping[str, Task], runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """Group runs by task and algorithm in the order of `tasks` and `NAMES`, sorted by seed."""
    groups: dict[tuple[str, str], list[Run]] = {(name, algorithm): [] for name in tasks for algorithm in NAMES}
    for run in sorted(runs, key=lambda run: run.seed):
        groups[run.task, run.algorithm].append(run)
    return {key: group for key, group in groups.items() if group}


def verdict(tasks: Mapping[str, Task], runs: Sequence[Run]) -> str:
    """List the runs that missed their goal."""
    missed = []
    for (name, algorithm), group in grouped(tasks, runs).items():
        task = tasks[name]
        missed += [
            f"- {NAMES[algorithm]} on `{name}`, seed {run.seed}: from {run.correct[0]:.3f} to {run.correct[-1]:.3f}; "
            f"stated were at most {task.start:g} and at least {task.goal:g}"
            for run in group
            if not reached(task, run)
        ]
    if not missed:
        return f"**All {len(runs)} runs reached their goal.**"
    summary = f"**{len(runs) - len(missed)} of {len(runs)} runs reached their goal.** These did not:"
    return "\n".join([summary, "", *missed])


def spread(values: Sequence[float]) -> str:
    """Format mean, minimum and maximum; one number if they are equal."""
    mean, low, high = (f"{value:.2f}" for value in (statistics.fmean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low}-{high})"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows))


def result_table(tasks: Mapping[str, Task], runs: Sequence[Run]) -> str:
    """Table with one row per task and algorithm."""
    heads = ["task", "algorithm", "solved before", "stated start", "solved after", "stated goal", "goal reached"]
    heads += ["score before", "score after", "seconds", "CPU seconds"]
    rows = []
    for (name, algorithm), group in grouped(tasks, runs).items():
        task = tasks[name]
        row = [f"`{name}`", NAMES[algorithm], spread([run.correct[0] for run in group]), f"at most {task.start:g}"]
        row += [f"**{spread([run.correct[-1] for run in group])}**", f"at least {task.goal:g}"]
        row += [f"{sum(reached(task, run) for run in group)} of {len(group)}"]
        row += [spread([run.score[end] for run in group]) for end in (0, -1)]
        row += [f"{statistics.median(run.seconds for run in group):.0f}"]
        rows.append([*row, f"{statistics.median(run.cpu_seconds for run in group):.0f}"])
    return table(heads, rows)


def curve_table(tasks: Mapping[str, Task], runs: Sequence[Run]) -> str:
    """Table with one row per run: the share of correct answers at every validation."""
    rows = [
        [f"`{run.task}`", NAMES[run.algorithm], str(run.seed), " ".join(f"{value:.2f}" for value in run.correct)]
        for group in grouped(tasks, runs).values()
        for run in group
    ]
    return table(["task", "algorithm", "seed", "solved before training and after every 20 steps"], rows)


LEAST_MARGIN = 0.02
"""Least difference from the synchronous mean that counts as a miss."""


def required(synchronous: Sequence[Run]) -> float:
    """Return the least mean for stale runs: that of the synchronous runs minus two standard deviations or 0.02."""
    values = [run.correct[-1] for run in synchronous]
    return statistics.fmean(values) - max(LEAST_MARGIN, 2 * statistics.stdev(values))


def staleness_table(tasks: Mapping[str, Task], runs: Sequence[Run]) -> str:
    """Table with one row per task and algorithm, and one column per bound of staleness."""
    bounds = sorted({run.max_staleness for run in runs} - {0})
    heads = ["task", "algorithm", "solved before", "synchronous", "required mean"]
    heads += [f"`max_staleness={bound}`" for bound in bounds]
    rows = []
    for (name, algorithm), group in grouped(tasks, runs).items():
        solved = {bound: [run.correct[-1] for run in group if run.max_staleness == bound] for bound in (0, *bounds)}
        least = required([run for run in group if not run.max_staleness])
        row = [f"`{name}`", NAMES[algorithm], f"{group[0].correct[0]:.3f}", exact(solved[0]), f"{least:.3f}"]
        for bound in bounds:
            missing = least - statistics.fmean(solved[bound])
            row.append(exact(solved[bound]) + (f", **{missing:.3f} below**" if missing > 0 else ""))
        rows.append(row)
    return table(heads, rows)


def exact(values: Sequence[float]) -> str:
    """Format mean, minimum and maximum with three digits."""
    return f"{statistics.fmean(values):.3f} ({min(values):.3f}-{max(values):.3f})"


STALENESS = """## Staleness

[Asynchronous](async.md) runs train on responses of an earlier policy. The same tasks were repeated with responses that
are up to 1 and 4 versions old, and synchronously, with {seeds} seeds each and the same warm-up, number of steps and
responses per step. The runs with `max_staleness` above 0 have the correction
`{correction}`.

For each task and bound, the mean should not be below the synchronous mean by more than {margin:g} or two standard
deviations of the synchronous runs, whichever is larger. {reached} of {means} means meet this.{others}

{table}

The values are the solved share of the held-out problems after the last step, as mean, minimum and maximum over the
seeds. An iteration has two optimizer steps, which count as one version. The responses of the first iterations are those
of the initial model. The runs are in `benchmarks/results/learning_staleness.json`. They were made on another machine,
where the warm-up ends with slightly different weights than above, so the synchronous results differ:

{machine}

`python benchmarks/learning.py --task {names} --staleness {bounds} --seeds {seeds} --jobs 1 --out docs/results.md`.

"""


def staleness_section(tasks: Mapping[str, Task], runs: Sequence[Run], correction: Sequence[str], machine: str) -> str:
    """Return the section about staleness."""
    rows, names = staleness_table(tasks, runs), list(dict.fromkeys(run.task for run in runs))
    means = len({(run.task, run.algorithm, run.max_staleness) for run in runs if run.max_staleness})
    others = ", ".join(f"`{name}`" for name in tasks if name not in names)
    return STALENESS.format(
        names=",".join(names),
        means=means,
        reached=means - rows.count(" below**"),
        others=others and f" The runs of {others} were not repeated.",
        seeds=len({run.seed for run in runs}),
        correction=" ".join(correction),
        margin=LEAST_MARGIN,
        table=rows,
        machine=machine,
        bounds=",".join(map(str, sorted({run.max_staleness for run in runs}))),
    )


PAGE = """# Learning results

This page shows whether PPO and GRPO runs of camshaft learn: it compares their results on three small tasks with goals
that were stated before the runs. It is for users who want evidence that training works, and for contributors who change
the trainer.

The page is generated by `python benchmarks/learning.py --out docs/results.md`. The commands and the curves of these
runs are in `benchmarks/results/learning.json`.

{verdict} Asynchronous runs are [below](#staleness).

{results}

Values are means over {seeds} seeds, with minimum and maximum if they differ. "Solved" is the fraction of {heldout}
held-out problems with a correct greedy response. The score is the reward of the same responses; wrong responses can
have a score above 0. The column "seconds" contains the median wall time of a whole run, including startup and
validation.

The stated values were written into the script after trials that selected the numbers of warm-up steps and training
steps, and before the first complete series of runs. They have not changed since. Two settings of `spell_backward` have
changed, and all of its runs were repeated after each change:

- In the first series it had 400 warm-up steps. Its runs started at 0.43, above the stated start, and ended at 0.78 to
  0.88. It now has 300 warm-up steps.
- With 300 warm-up steps and 80 training steps, two of ten runs ended just below the goal, at 0.59. It now has 120
  training steps.

## Setup

{tasks}

The model is a randomly initialized qwen2 with two layers in float32 and one token per character. The warm-up is
`camshaft sft` on data in which {mistaken:.0%} of the answers contain the task's mistake. Afterwards the model produces
both kinds of answers, and greedy decoding mostly produces the mistake. All runs of a task start from the same warm-up.
The seed of a run determines its samples, the order of its problems and the initial head of the critic. For
`spell_backward` and `gcd`, `reasoning-gym` generates the problems and scores the answers. Held-out problems, and
problems with the same numbers in another order, are excluded from the warm-up and from training.

These are the settings of all runs, followed by the settings that only PPO (`gae`) or GRPO has:

```text
{settings}
```

## All runs

{curves}

## Machine

{machine}.

The runs were executed two at a time with one thread each, and took {minutes:.0f} CPU minutes in total. Wall
times exceed CPU times because the machine had other load.

{staleness}## Episodes

The game of [`examples/agents/hint.py`](../examples/agents/README.md) has four boxes and one prize. A policy with one
answer finds the prize in at most 0.25 of the games, and one that asks for the hint first in all of them; both numbers
come from an enumeration of all policies. A tiny model with random weights learns to ask, with `turn_return` and 16
episodes for each of 16 prompts, in less than one CPU minute per run:

| mean score in steps | 1 to 10 | 11 to 20 | 21 to 30 | 31 to 40 |
| --- | --- | --- | --- | --- |
| seed 1 | 0.375 | 0.903 | 0.990 | 0.997 |
| seed 2 | 0.259 | 0.452 | 0.885 | 0.994 |
| seed 3 | 0.378 | 0.904 | 0.994 | 0.997 |

[`hint_tools.py`](../examples/agents/README.md) is the same game with the tools `hint` and `open`:

| mean score in steps | 1 to 10 | 11 to 20 | 21 to 30 | 31 to 40 |
| --- | --- | --- | --- | --- |
| seed 1 | 0.376 | 0.846 | 0.989 | 0.996 |
| seed 2 | 0.236 | 0.255 | 0.293 | 0.661 |
| seed 3 | 0.274 | 0.779 | 0.977 | 0.996 |

`tests/unit/trainer/test_agent_examples.py` repeats 20 steps of the first game with seed 1 and, among the slow tests,
40 steps with seed 2, 20 with seed 3, and the three runs with tools. In the last five steps of each run, the mean score
must exceed 0.8, and the mean number of answers 1.8.

## Limitations

- The runs do not show that a model learns a new skill. Every initial model sometimes produces correct answers, so the
  reward only has to select between two behaviors. The result generalizes to held-out problems.
- The runs cover neither models, tasks and responses of practical size nor training on several devices.
- The runs do not compare PPO with GRPO. Neither algorithm was tuned against the other, and PPO trains a second model
  (the critic) in the same number of steps.
- The runs do not show the performance after convergence. The numbers of steps were chosen so that all runs together
  take half an hour on two cores.
"""


def page(tasks: Mapping[str, Task], runs: Sequence[Run], **about: Any) -> str:
    """Return the page. `about`: mistaken, heldout, settings, machine, staleness (a section, or nothing)."""
    names = [name for name in tasks if any(run.task == name for run in runs)]
    rows = []
    for name in names:
        task = tasks[name]
        rows.append([f"`{name}`", task.about, str(task.hidden), str(task.warm_up), str(task.steps)])
    return PAGE.format(
        verdict=verdict(tasks, runs),
        results=result_table(tasks, runs),
        seeds=len({run.seed for run in runs}),
        tasks=table(["task", "problems", "width", "warm-up steps", "steps per run"], rows),
        curves=curve_table(tasks, runs),
        minutes=sum(run.cpu_seconds for run in runs) / 60,
        **about,
    )
