"""The sharded engine trains models with soft-caps and attention sinks as transformers does."""

from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_warm_ranks
from support.tiny import CHANGED_SCORES

from camshaft.contracts.engine import suite
from camshaft.contracts.engine.harness import TINY, EngineHarness
from camshaft.engine import engine_class
from camshaft.models.tiny import make_tiny_model


class FamilyHarness(EngineHarness):
    """The harness of the contract on a model of another family."""

    family: str

    @cached_property
    def model_folder(self) -> Path:
        folder = self.folder / "model"
        self.on_rank_zero(lambda: make_tiny_model(folder, **TINY, family=self.family, **CHANGED_SCORES[self.family]))
        return folder


def check_step(folder: str, family: str, options: dict[str, Any]) -> None:
    harness = FamilyHarness(engine_class("fsdp2"), folder, common_fields={"options": options})
    harness.family = family
    suite.predictions(harness)
    suite.step_equals_oracle(harness)


@pytest.mark.parametrize("options", [{}, {"ulysses_sequence_parallel_size": 2}], ids=["sharded", "sequence"])
@pytest.mark.parametrize("family", CHANGED_SCORES)
def test_a_step_on_two_ranks_equals_transformers(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    run_warm_ranks(check_step, 2, str(tmp_path), family, options)
