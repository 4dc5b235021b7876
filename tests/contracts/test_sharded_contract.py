"""The sharded engine follows the contract on real ranks, in every layout and with every feature.

`make test` checks all rules on two ranks. `tests/parity/test_sharded_parity.py` compares three steps in every layout.
`make test-slow` checks the rules about numbers and files in the other layouts. `make test-matrix` checks all rules in
all layouts, and in all pairs of features.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.broken_sharded import CAUGHT_BY
from support.layouts import ALONE, OLDER, PAIRS, REFUSED, Layout, together

from camshaft.cli import main
from camshaft.config.engine import EngineConfig, EngineModel
from camshaft.contracts.engine.ranks import RuleRanks
from camshaft.contracts.engine.suite import RULES
from camshaft.engine import engine_class
from camshaft.engine.fsdp import FSDPEngine
from camshaft.errors import EngineError

EVERY = {**ALONE, **OLDER, **PAIRS}
APART = ("hsdp", "sp2", "tp2", "lora", "offload", "fsdp1_two")
"""The layouts that differ most."""
NUMBERS = {"step equals oracle", "resume is bitwise"}
NUMBERS_APART = NUMBERS | {
    "predictions",
    "norm is before clipping",
    "split invariance",
    "prefix sharing",
    "offload changes nothing",
    "seat and shards",
    "weights have hugging face names",
    "adapter",
    "exact kl",
    "inference within a step",
}


def _marks(layout: str, rule: str) -> Sequence[pytest.MarkDecorator]:
    """Leave all rules of one layout to `make test`; `compiled` takes a minute per rule."""
    if layout == "two":
        return ()
    if layout in PAIRS or layout == "compiled":
        return (pytest.mark.matrix,)
    numbers = NUMBERS_APART if layout in APART else NUMBERS
    return (pytest.mark.slow if rule in numbers else pytest.mark.matrix,)


def _cases() -> Iterator[Any]:
    """Return the cases, grouped by the number of ranks so that consecutive layouts share processes."""
    for name, layout in sorted(EVERY.items(), key=lambda item: item[1].world):
        for rule in RULES:
            id_, marks = f"{name}-{rule.name.replace(' ', '_')}", _marks(name, rule.name)
            yield pytest.param(layout.world, layout, rule.name, id=id_, marks=marks)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[RuleRanks]:
    with RuleRanks(request.param) as rule_ranks:
        yield rule_ranks


@pytest.mark.parametrize(("ranks", "layout", "rule"), list(_cases()), indirect=["ranks"], scope="module")
def test_sharded_engine_keeps_rule(ranks: RuleRanks, layout: Layout, rule: str, tmp_path: Path) -> None:
    problem = ranks.find_problem(rule, engine_class(layout.strategy), str(tmp_path), layout.common_fields)
    assert problem is None, problem


@pytest.mark.parametrize(("pair", "message"), REFUSED.items(), ids=lambda value: "+".join(value) if value else "")
def test_incompatible_options_are_rejected_at_construction(pair: tuple[str, str], message: str) -> None:
    fields = together(*pair)
    model = {name: fields.pop(name) for name in list(fields) if name in EngineModel.model_fields}
    with pytest.raises(EngineError, match=message):
        engine_class("fsdp2")(EngineConfig(model=EngineModel(path="models/tiny", **model), **fields))


def test_an_unknown_option_is_rejected_with_the_nearest_one() -> None:
    config = EngineConfig(model=EngineModel(path="models/tiny"), options={"fsdp_sise": 2})
    with pytest.raises(EngineError, match="did you mean 'fsdp_size'"):
        engine_class("fsdp2")(config)


def test_an_invalid_value_is_rejected_with_its_key() -> None:
    config = EngineConfig(model=EngineModel(path="m"), options={"mixed_precision": {"param_dtype": "float8"}})
    with pytest.raises(EngineError, match=r"mixed_precision\.param_dtype='float8'"):
        engine_class("fsdp2")(config)


@pytest.mark.parametrize("feature", ["tp2", "lora", "offload", "offload_policy", "compiled"])
def test_fsdp1_rejects_unsupported_options(feature: str) -> None:
    fields = together(feature)
    model = {name: fields.pop(name) for name in list(fields) if name in EngineModel.model_fields}
    with pytest.raises(EngineError, match=r"strategy=fsdp1 does not support .*\. Set strategy=fsdp2"):
        engine_class("fsdp1")(EngineConfig(model=EngineModel(path="models/tiny", **model), **fields))


@pytest.mark.parametrize("ranks", [2], indirect=True, scope="module")
@pytest.mark.parametrize("broken", CAUGHT_BY, ids=lambda cls: cls.__name__)
def test_contract_catches_on_two_ranks(broken: type[FSDPEngine], ranks: RuleRanks, tmp_path: Path) -> None:
    assert ranks.find_problem(CAUGHT_BY[broken], broken, str(tmp_path / "caught")) is not None
    problem = ranks.find_problem("schedule", broken, str(tmp_path / "kept"))
    assert problem is None, f"ranks that a broken rule killed were not replaced: {problem}"


def test_the_command_line_checks_on_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["check-engine", "fsdp", "--ranks", "2", "--option", "fsdp_size=1", "--rule", "interface"]
    assert main(args) == 0
    assert "1 of 1 rules hold" in capsys.readouterr().out
    assert main([*args[:-1], "hooks", "--option", "fsdpsize=1"]) == 1
    assert "did you mean 'fsdp_size'" in capsys.readouterr().out
    assert main([*args, "--option", "fsdp_size"]) == 2
    assert "KEY=VALUE" in capsys.readouterr().err
