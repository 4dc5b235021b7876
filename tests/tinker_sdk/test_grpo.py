"""A GRPO loop that is written with the SDK computes what `camshaft ppo` computes.

make test-tinker
"""

from pathlib import Path

import pytest
from support.tinker_grpo import ADAM, train_with_ppo, train_with_sdk
from torch import Tensor

pytestmark = pytest.mark.tinker
STEPS = 5
EXACT = 1e-6
"""Largest difference of a weight after five steps."""


@pytest.mark.parametrize("eps", [1.0, 1e-12], ids=["eps_1", "defaults_of_the_sdk"])
def test_a_grpo_loop_equals_camshaft_ppo(tmp_path: Path, eps: float) -> None:
    adam = ADAM | {"eps": eps, "learning_rate": 0.1 if eps == 1 else ADAM["learning_rate"]}
    steps = train_with_ppo(tmp_path, adam, STEPS)
    lines, weights = train_with_sdk(tmp_path, steps, adam)
    for step, (groups, loss, norm, _) in zip(steps, lines, strict=True):
        tokens = [row for group in groups for row in group]
        assert tokens == [row.tolist() for row in step.batch.ragged("responses").rows()]
        # Advantages of rows of equal length cancel: a loss is at most a rounding error of its terms.
        assert loss == pytest.approx(step.metrics["actor/pg_loss"], rel=1e-5, abs=3e-8)
        assert norm == pytest.approx(step.metrics["actor/grad_norm"], rel=1e-5)
    assert max(abs(line.loss) for line in lines) > 1e-3
    assert largest_difference(weights, steps[-1].actor) < EXACT
    assert largest_difference(weights, steps[0].actor) > 100 * EXACT


def largest_difference(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    assert weights.keys() == others.keys()
    return max(float((weights[name] - other).abs().max()) for name, other in others.items())
