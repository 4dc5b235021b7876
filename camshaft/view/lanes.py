"""The lanes of an asynchronous run: what trainer and generator did in the last steps, and who waited.

    lanes(run)     # {"seconds": 12.5, "lanes": [{"name": "trainer", "spans": [{"start": 0.0, "end": 1.2, ...}]}, ...]}

The spans are computed from the metrics of the steps. `timing/received` is the time at which a step had its batch.
Before, it published weights and waited; afterwards, it learned. `timing/generated` is the end of the generation of this
batch. The clocks are those of the machines of the driver and of the rollout.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from camshaft.tracking.run_folder import RunFolder

STEPS = 12
"""Number of steps of the picture."""
NAMES = (
    *("timing/received", "timing/generated", "timing_s/step", "timing_s/sync", "timing_s/gen"),
    *("async/generation", "async/staleness_max"),
)


class Span(NamedTuple):
    """An interval of a lane, in seconds since the start of the picture."""

    start: float
    end: float
    kind: str
    """One of `learn`, `generate`, `publish` and `wait`."""
    step: int
    label: str
    text: str


def lanes(run: RunFolder) -> dict[str, Any] | None:
    """Return the lanes of the last `STEPS` steps, or None if the run is not asynchronous."""
    run.metrics.poll()
    steps = _steps(run)
    if not steps:
        return None
    rows = {"trainer": list(_trainer(steps)), "generator": list(_generator(steps))}
    start = min(span.start for row in rows.values() for span in row)
    end = max(span.end for row in rows.values() for span in row)
    shifted = {
        name: [span._replace(start=round(span.start - start, 4), end=round(span.end - start, 4)) for span in row]
        for name, row in rows.items()
    }
    return {
        "seconds": round(end - start, 4),
        "first": min(steps),
        "last": max(steps),
        "lanes": [{"name": name, "spans": [span._asdict() for span in row]} for name, row in shifted.items()],
    }


def _steps(run: RunFolder) -> dict[int, dict[str, float]]:
    """Return the metrics `NAMES` of the last steps that have all of them, by step.

    They are consecutive. A run that has resumed begins with a step whose batch it has generated itself.
    """
    columns: dict[str, Mapping[int, float]] = {}
    for name in NAMES:
        numbers, values = run.metrics.arrays(name)
        columns[name] = dict(zip(numbers.astype(int).tolist()[-STEPS:], values.tolist()[-STEPS:], strict=True))
    common = sorted(set.intersection(*(set(column) for column in columns.values())))
    later = [step for step in common if step + 1 not in common and step != common[-1]]
    shown = [step for step in common if not later or step > later[-1]]
    return {step: {name: column[step] for name, column in columns.items()} for step in shown}


def _trainer(steps: Mapping[int, Mapping[str, float]]) -> Iterator[Span]:
    begins = {step: values["timing/received"] - _ahead(values) for step, values in steps.items()}
    for step, values in steps.items():
        received, waited, synced = values["timing/received"], values["timing_s/gen"], values["timing_s/sync"]
        begin, version = begins[step], step - 1
        yield Span(begin, begin + synced, "publish", step, "", f"publishes version {version} for {synced:.3g} s")
        yield Span(begin + synced, received, "wait", step, "", f"waits {waited:.3g} s for batch {step}")
        # The duration of the step includes the time to send batches, which neither phase covers.
        end = max(received, min(begin + values["timing_s/step"], begins.get(step + 1, math.inf)))
        learned = f"step {step} trains version {version} on batch {step} for {end - received:.3g} s"
        yield Span(received, end, "learn", step, f"{step}", learned)


def _ahead(values: Mapping[str, float]) -> float:
    """Return the seconds from the start of a step until it had its batch."""
    return values["timing_s/gen"] + values["timing_s/sync"]


def _generator(steps: Mapping[int, Mapping[str, float]]) -> Iterator[Span]:
    previous: float | None = None
    for step, values in steps.items():
        end, seconds = values["timing/generated"], values["async/generation"]
        version = step - 1 - int(values["async/staleness_max"])
        if previous is not None and end - seconds > previous:
            idle = end - seconds - previous
            yield Span(previous, end - seconds, "wait", step, "", f"loads version {version} or waits, {idle:.3g} s")
        text = f"generates batch {step} with version {version} for {seconds:.3g} s"
        yield Span(end - seconds, end, "generate", step, f"{step}: v{version}", text)
        previous = end
