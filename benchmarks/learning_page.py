"""What the runs of `learning.py` say: their sums, and the page.

print("\\n".join(result_table(TASKS, runs)))
Path("docs/results.md").write_text(page(TASKS, runs, settings="...", machine="...", ...))
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAMES = {"gae": "PPO", "grpo": "GRPO"}
"""Of the values of `algorithm.adv_estimator`."""


@dataclass(frozen=True)
class Task:
    """What is learned, and what is expected of it."""

    source: str
    """The `data_source` of its rows."""
    about: str
    num_train: int
    settings: dict[str, Any]
    """Of whoever makes the problems up."""
    longest_prompt: int
    hidden: int
    """Width of the model."""
    warm_up: int
    """Steps of 64 answers."""
    steps: int
    start: float
    """The share of right answers that a run may have at most before its first step,"""
    goal: float
    """and has to have at least after its last."""
    mistake: Callable[[str], str] | None = None
    """What is said instead of the right answer; arithmetic has its own."""


@dataclass(frozen=True)
class Run:
    """What is kept of one."""

    task: str
    algorithm: str
    seed: int
    steps: list[int]
    """After which the held-out problems were tried."""
    correct: list[float]
    """The share of them that was right."""
    score: list[float]
    """Their mean score."""
    sampled: list[float]
    """The mean score of the sampled responses of each step."""
    seconds: float
    cpu_seconds: float


def reached(task: Task, run: Run) -> bool:
    """It began no higher than stated, and ended no lower."""
    return run.correct[0] <= task.start and run.correct[-1] >= task.goal


def grouped(tasks: Mapping[str, Task], runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """By task and algorithm, in the order of `tasks` and `NAMES`, and by seed."""
    groups: dict[tuple[str, str], list[Run]] = {(name, algorithm): [] for name in tasks for algorithm in NAMES}
    for run in sorted(runs, key=lambda run: run.seed):
        groups[run.task, run.algorithm].append(run)
    return {key: found for key, found in groups.items() if found}


def verdict(tasks: Mapping[str, Task], runs: Sequence[Run]) -> str:
    """Who missed a goal, and by how much."""
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
    told = f"**{len(runs) - len(missed)} of {len(runs)} runs reached their goal.** These did not:"
    return "\n".join([told, "", *missed])


def spread(values: Sequence[float]) -> str:
    """Mean, least and most; one number where they do not differ."""
    mean, low, high = (f"{value:.2f}" for value in (statistics.fmean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low}-{high})"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows))


def result_table(tasks: Mapping[str, Task], runs: Sequence[Run]) -> str:
    """A row for each task and algorithm."""
    heads = ["task", "algorithm", "right before", "stated start", "right after", "stated goal", "reached by"]
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
    """A row for each run: the share of right answers at every validation."""
    rows = [
        [f"`{run.task}`", NAMES[run.algorithm], str(run.seed), " ".join(f"{value:.2f}" for value in run.correct)]
        for group in grouped(tasks, runs).values()
        for run in group
    ]
    return table(["task", "algorithm", "seed", "right before the first step, and after each further 20"], rows)


PAGE = """# Do PPO and GRPO learn?

Written by `python benchmarks/learning.py --out docs/results.md`. The curves of every run, and the
commands, are in `benchmarks/results/learning.json`.

{verdict}

{results}

Means over {seeds} seeds, with the least and the most where they differ. Right is the share of {heldout} held-out
problems that the greedy response gets right. The score is what the reward function gives for the same responses; a
wrong one may get more than 0. The seconds are the median of a whole run, with its start and its validations.

What is stated was written into the script before the first whole run, after trials in which warm-ups and numbers of
steps were chosen, and has not been changed since. That run had 400 steps of warm-up for `spell_backward`, which began
at 0.43, above its stated start (and ended at 0.78 to 0.88); it has 300 now. With 80 steps from there two of ten runs
ended just below the goal, at 0.59; it has 120 steps now. Its runs were made anew both times.

## What was trained

{tasks}

A qwen2 model of random weights, two layers, float32, with a token for each character. The warm-up is `camshaft sft` on
a text in which {mistaken:.0%} of the answers have the task's mistake, so the model knows both ways then, and greedy it
mostly goes the wrong one. There is one warm-up for each task, and all its runs start there; the seed of a run is that
of its samples, of the order of its problems and of the critic's head. The words, numbers and scores of the tasks of
`reasoning-gym` are that package's own. No held-out problem is trained on, in the warm-up or later, nor one that has
the same numbers in another order.

These are the settings of all runs, and what PPO (`gae`) and GRPO have of their own:

```
{settings}
```

## Every run

{curves}

## The machine

{machine}; two runs at a time with one thread each, {minutes:.0f} minutes of CPU in all. Where seconds are more than
those of CPU, a run waited for other work on the machine.

## What this does not show

- That a model learns what it has never seen: every start knows the right way and goes it now and then. The reward
  decides between the two, and what is learned holds for problems that were never trained.
- Anything of models, tasks and responses of a useful size, or of several devices.
- Which algorithm is better: neither was tuned against the other, and PPO trains a second model in as many steps.
- How far they would get: the steps were chosen so that the whole takes about half an hour on two cores.
"""


def page(tasks: Mapping[str, Task], runs: Sequence[Run], **about: Any) -> str:
    """What is told. `about`: mistaken, heldout, settings, machine."""
    names = [name for name in tasks if any(run.task == name for run in runs)]
    rows = []
    for name in names:
        task = tasks[name]
        rows.append([f"`{name}`", task.about, str(task.hidden), str(task.warm_up), str(task.steps)])
    return PAGE.format(
        verdict=verdict(tasks, runs),
        results=result_table(tasks, runs),
        seeds=len({run.seed for run in runs}),
        tasks=table(["task", "problems", "width", "steps of the warm-up", "steps of each run"], rows),
        curves=curve_table(tasks, runs),
        minutes=sum(run.cpu_seconds for run in runs) / 60,
        **about,
    )
