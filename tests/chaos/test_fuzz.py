"""A sample of the random inputs of `fuzz.py`. `make fuzz` runs thousands."""

import pytest

from chaos.fuzz import run_cases

NUM_CASES = {"configs": 6, "checkpoints": 5, "data": 6, "models": 8}


@pytest.mark.parametrize("kind", NUM_CASES)
def test_random_inputs_are_handled(kind: str) -> None:
    report = run_cases(kind, range(NUM_CASES[kind]), seed=1, seconds=60)
    assert report.failures == []
    assert report.num_cases == NUM_CASES[kind]
