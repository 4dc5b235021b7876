import json
import math

import pytest

from camshaft.checkpoint import BestStep
from camshaft.errors import ConfigError


@pytest.mark.parametrize(
    ("mode", "expected"), [("max", [True, False, True, False]), ("min", [True, True, False, True])]
)
def test_the_best_step_is_the_first_extreme(mode: str, expected: list[bool]) -> None:
    best = BestStep("val/x", mode)
    assert [best.update({"val/x": value}, step) for step, value in enumerate((0.5, 0.2, 0.7, -1.0), 1)] == expected
    assert best.step == (3 if mode == "max" else 4)
    assert not best.update({"val/x": best.value}, 9)


def test_nan_is_never_the_best() -> None:
    best = BestStep("x", "max")
    assert not best.update({"x": math.nan}, 1)
    assert best.update({"x": -5.0}, 2)
    assert not best.update({"x": math.nan}, 3)
    assert best.step == 2


def test_before_training_only_the_name_is_checked() -> None:
    best = BestStep("val-core/sums/reward/mean", "max")
    assert not best.update({"val-core/sums/reward/mean": 1.0}, step=0)
    assert best.step is None
    with pytest.raises(
        ConfigError, match=r"is not a validation metric of this run; use trainer\.best_metric=val-core/sum/reward/mean"
    ):
        best.update({"val/reward/mean": 0.0, "val-core/sum/reward/mean": 1.0}, step=0)


def test_no_step_is_best_without_a_metric() -> None:
    best = BestStep(None, "max")
    assert not best.update({}, 1)
    assert best.step is None


def test_the_best_value_is_reset_when_the_metric_changes() -> None:
    best = BestStep("x", "max")
    best.update({"x": 0.75}, 4)
    state = json.loads(json.dumps(best.state_dict()))
    again, other, fresh = BestStep("x", "max"), BestStep("x", "min"), BestStep("x", "max")
    again.load_state_dict(state)
    other.load_state_dict(state)
    assert (again.step, again.value) == (4, 0.75)
    assert not again.update({"x": 0.5}, 5)
    assert other.step is None
    fresh.load_state_dict(BestStep("x", "max").state_dict())
    assert fresh.update({"x": -1.0}, 1)
