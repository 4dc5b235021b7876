"""The tables of the soak test, which must not depend on complete samples after two hours of measurement."""

from pathlib import Path
from typing import Any

import pytest

from chaos.soak import COUNTERS, Soak, growth, report


def soak_of(samples: list[dict[str, float]], **counters: float) -> Soak:
    """Return a run with these samples, to which constant counters are added."""
    constant = dict.fromkeys(COUNTERS, 5.0) | counters
    process: Any = None
    path = Path("unused")
    return Soak("local", process, "mark", path, path, path, samples=[{**constant, **sample} for sample in samples])


def rising(rate: float, name: str = "memory", count: int = 40) -> list[dict[str, float]]:
    """Return samples of a run with ten steps per sample, in which a counter grows by `rate` per step."""
    base = {"memory": 1e8}
    return [{**base, "seconds": 10.0 * i, "step": 10 * i, name: 1e8 + rate * 10 * i} for i in range(count)]


@pytest.mark.parametrize(("rate", "problems"), [(900.0, 0), (1100.0, 1)])
def test_growth_of_memory_has_a_limit(rate: float, problems: int) -> None:
    assert len(growth(soak_of(rising(rate)))) == problems


def test_any_growth_of_another_counter_is_reported() -> None:
    assert growth(soak_of(rising(0.1, "descriptors"))) == ["descriptors grows by 19.0"]


def test_growth_before_the_second_half_does_not_count() -> None:
    samples = rising(0.0)
    for sample in samples[:15]:
        sample["memory"] = 5e7
    assert growth(soak_of(samples)) == []


def test_missing_counters_do_not_count_as_zero() -> None:
    samples = rising(100.0)
    for i, sample in enumerate(samples):
        sample["memory of rank"] = 1e8 + 50.0 * sample["step"]
        if i % 7 == 0:
            del sample["memory of rank"]
    row = next(line for line in report([soak_of(samples)]).splitlines() if "memory of rank" in line)
    assert "+0.0500 \u00b1 0.0000 kB" in row


@pytest.mark.parametrize("count", [0, 2])
def test_a_run_with_too_few_samples_has_a_row(count: int) -> None:
    short = soak_of(rising(0.0)[:count])
    short.problems.append("the run ended with status 1")
    assert "| local | - | - | - | - | the run ended with status 1; too few samples |" in report([short])
