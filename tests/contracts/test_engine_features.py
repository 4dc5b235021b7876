"""The page of engine features agrees with real engines, and unsupported combinations are rejected with a fix.

Cases of an engine that needs another library are marked and run in its environment (`make test-megatron`, `make
test-titan`). The checks of capabilities need no library and run for every engine in `make test`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import Field
from support.ppo_runs import ppo_args
from support.same_run import ACTOR
from support.tiny import tiny_folder

from camshaft.cli import main
from camshaft.config import engine_features, load_ppo
from camshaft.config.backends import ENGINES, engine_capabilities, list_backends
from camshaft.config.engine import EngineCapabilities, EngineConfig, EngineModel, EngineOptions, LoRAConfig, OptimConfig
from camshaft.config.engine_features import FEATURES, Feature, Support, explain, features_page, find_support
from camshaft.contracts.engine.ranks import RuleRanks
from camshaft.engine import build_engine, engine_class
from camshaft.errors import ConfigError, EngineError

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
MARKS = {"megatron": pytest.mark.megatron, "torchtitan": pytest.mark.titan}
"""Marks of tests that construct an engine with another library."""
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
"""Arguments of `tiny_folder` for model types that need them."""
OWN_MODELS = ("expert parallelism", "interleaved pipeline stages")
"""Features whose models differ from that of the contract; the tests of the engine cover them."""


def cases(*statuses: str, families: bool = False, ranks: bool = False) -> Iterator[Any]:
    """Yield (engine, feature) for each cell of the page with one of `statuses`."""
    for engine, backend in ENGINES.items():
        for name, feature in FEATURES.items():
            selected = (feature.family is not None) == families and (feature.ranks > 1 or not ranks)
            if selected and find_support(feature, backend.capabilities).status in statuses:
                yield pytest.param(engine, feature, id=f"{engine}-{name}", marks=MARKS.get(engine, ()))


def support_of(engine: str, feature: Feature) -> Support:
    return find_support(feature, engine_capabilities(engine))


# -- the page -------------------------------------------------------------------------------------


def test_the_page_is_generated_from_the_capabilities() -> None:
    assert (ROOT / "docs" / "engine-features.md").read_text(encoding="utf-8") == features_page(), "run: make docs"


def test_every_option_of_parallelism_belongs_to_a_feature() -> None:
    listed = {name for feature in FEATURES.values() for options in feature.options for name in options}
    fields = {name for backend in ENGINES.values() for name in backend.capabilities.options.model_fields}
    missing = {name for name in fields if "parallel" in name} - listed
    assert not missing, "add a feature to camshaft/config/engine_features.py"


def test_features_of_an_engine_of_another_package_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines", "explain", "support.own_backends:OwnEngine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == explain("support.own_backends:OwnEngine").splitlines()
    assert "tensor parallelism: supported: tensor_parallel_size" in lines
    assert (
        "LoRA: rejected (LoRA is not supported by this engine. Set lora=None in EngineModel, or lora_rank=0 in a run)"
        in lines
    )
    assert "pipeline parallelism: not yet" in lines
    assert lines[-1] == "other options: pipeline_stages=1"


def test_other_options_have_their_default(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options(EngineOptions):
        stages: int
        sizes: list[int] = Field(default_factory=lambda: [1, 2])

    monkeypatch.setattr(engine_features, "engine_capabilities", lambda name: EngineCapabilities(Options))
    assert explain("own").splitlines()[-1] == "other options: stages (required), sizes=[1, 2]"


@pytest.mark.parametrize("argv", [["engines"], ["engines", "list"]])
def test_engines_are_listed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out.rstrip("\n") == list_backends(ENGINES, "camshaft.engines")


def test_an_unsupported_head_is_rejected() -> None:
    capabilities = EngineCapabilities(EngineOptions, heads=("causal_lm",))
    assert find_support(FEATURES["value head"], capabilities).status == "rejected"
    with pytest.raises(EngineError, match="does not support head=value; set one of causal_lm"):
        capabilities.validate(EngineConfig(model=EngineModel(path="models/tiny", head="value")))


# -- cells and construction -----------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "feature"), list(cases("supported")))
def test_engines_accept_supported_features(engine: str, feature: Feature) -> None:
    engine_class(engine)(feature.config(support_of(engine, feature).options))


@pytest.mark.parametrize(("engine", "feature"), list(cases("rejected")))
def test_engines_reject_rejected_features(engine: str, feature: Feature, tmp_path: Path) -> None:
    if feature.ranks > 1 and not engine_capabilities(engine).multiple_ranks:
        overrides = {f"{ACTOR}.strategy": engine, "trainer.n_gpus_per_node": feature.ranks}
        with pytest.raises(ConfigError, match="supports only one process"):
            load_ppo(ppo_args(tmp_path, overrides))
        return
    options = support_of(engine, feature).options or feature.options[0]
    with pytest.raises(EngineError):
        engine_class(engine)(feature.config(options))


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "feature"), list(cases("supported", "rejected", families=True)))
def test_models_of_a_family_load_only_in_engines_that_support_it(engine: str, feature: Feature) -> None:
    assert feature.family is not None
    folder = tiny_folder(feature.family, hidden=32, **MODELS.get(feature.family, {}))
    constructed = build_engine(engine, feature.config({}, str(folder)))
    if support_of(engine, feature).status == "supported":
        constructed.init_model()
    else:
        with pytest.raises(EngineError, match=feature.family):
            constructed.init_model()


@pytest.mark.slow
@pytest.mark.parametrize("engine", [pytest.param(name, marks=MARKS.get(name, ())) for name in ENGINES])
def test_capabilities_agree_with_the_prefix_sharing_of_the_model(engine: str) -> None:
    built: Any = build_engine(engine, FEATURES["prefix sharing"].config({}, str(tiny_folder(hidden=32))))
    built.init_model()
    assert built.module.supports_prefix_sharing == engine_capabilities(engine).shares_prefixes


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RuleRanks]:
    with RuleRanks(2) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "feature"), list(cases("supported", ranks=True)))
def test_engines_build_supported_layouts_on_two_ranks(
    engine: str, feature: Feature, two_ranks: RuleRanks, tmp_path: Path
) -> None:
    if feature.name in OWN_MODELS:
        pytest.skip("the model of the contract does not fit; the tests of the engine cover this feature")
    fields = {"options": dict(support_of(engine, feature).options)}
    problem = two_ranks.find_problem("seat and shards", engine_class(engine), str(tmp_path), fields)
    assert problem is None, problem


# -- rejected combinations ------------------------------------------------------------------------


class Rejected(NamedTuple):
    """Settings that an engine rejects, and the three parts of the error."""

    engine: str
    options: dict[str, Any]
    problem: str
    value: str
    fix: str
    model: dict[str, Any] = {}  # noqa: RUF012 - never modified
    fields: dict[str, Any] = {}  # noqa: RUF012 - never modified
    ranks: int | None = None
    """Number of ranks that the options do not fit."""


SELECTIVE = {"enable_gradient_checkpointing": True, "gradient_checkpointing_mode": "selective"}
LORA = {"lora": LoRAConfig(rank=2)}
ULYSSES, TENSOR = "ulysses_sequence_parallel_size", "tensor_parallel_size"

REJECTED = {
    "reference with an option": Rejected(
        "reference", {TENSOR: 2}, "unknown option", "options.tensor_parallel_size=2", "the options are mixed_precision"
    ),
    "reference in bfloat16": Rejected(
        "reference", {}, "lose small updates", "dtype=bfloat16", "set dtype=float32", fields={"dtype": "bfloat16"}
    ),
    "fsdp in bfloat16": Rejected(
        "fsdp", {}, "lose small updates", "dtype=bfloat16", "param_dtype=bfloat16", fields={"dtype": "bfloat16"}
    ),
    "fsdp with a misspelt option": Rejected(
        "fsdp", {"fsdp_sise": 2}, "unknown option", "options.fsdp_sise=2", "did you mean 'fsdp_size'?"
    ),
    "sequence and tensor parallelism": Rejected(
        "fsdp", {ULYSSES: 2, TENSOR: 2}, "both shard the attention heads",
        "ulysses_sequence_parallel_size=2 cannot be combined with tensor_parallel_size=2",
        "Set ulysses_sequence_parallel_size=1, or tensor_parallel_size=1",
    ),
    "compilation and tensor parallelism": Rejected(
        "fsdp2", {"use_torch_compile": True, TENSOR: 2}, "torch does not compile the backward pass",
        "tensor_parallel_size=2", "Set use_torch_compile=false, or tensor_parallel_size=1",
    ),
    "LoRA and tensor parallelism": Rejected(
        "fsdp2", {TENSOR: 2}, "LoRA is not supported", "tensor_parallel_size=2", "Set tensor_parallel_size=1", LORA
    ),
    "selective checkpointing and compilation": Rejected(
        "fsdp", {"use_torch_compile": True}, "a compiled layer fuses its operators",
        "gradient_checkpointing_mode=selective", "or use_torch_compile=false", SELECTIVE,
    ),
    "selective checkpointing and units by size": Rejected(
        "fsdp", {"wrap_policy": {"min_num_params": 1000}}, "while the layer is recomputed",
        "wrap_policy.min_num_params=1000", "or wrap_policy.min_num_params=0", SELECTIVE,
    ),
    "two kinds of offloading": Rejected(
        "fsdp", {"offload_policy": True, "param_offload": True}, "have no effect", "offload_policy keeps parameters",
        "Set either offload_policy or the others",
    ),
    "tensor parallelism that does not divide the ranks": Rejected(
        "fsdp", {TENSOR: 3}, "world_size=8 is not divisible", "8 = 2 x 3 + 2", "Use tensor_parallel_size=2", ranks=8
    ),
    "shard groups that do not divide the ranks": Rejected(
        "fsdp2", {"fsdp_size": 3}, "world_size=8 is not divisible", "fsdp_size=3", "Use fsdp_size=2", ranks=8
    ),
    "fsdp1 with tensor parallelism": Rejected(
        "fsdp1", {TENSOR: 2}, "strategy=fsdp1 does not support", "tensor_parallel_size", "Set strategy=fsdp2"
    ),
    "fsdp1 with LoRA": Rejected("fsdp1", {}, "strategy=fsdp1 does not support", "lora", "Set strategy=fsdp2", LORA),
    "fsdp1 with the offload policy": Rejected(
        "fsdp1", {"offload_policy": True}, "strategy=fsdp1 does not support", "offload_policy", "Set strategy=fsdp2"
    ),
    "fsdp1 with compilation": Rejected(
        "fsdp1", {"use_torch_compile": True}, "strategy=fsdp1 does not support", "use_torch_compile",
        "Set strategy=fsdp2",
    ),
    "megatron with LoRA": Rejected(
        "megatron", {}, "LoRA is not supported", "LoRA", "Set lora=None in EngineModel, or lora_rank=0 in a run", LORA
    ),
    "megatron in bfloat16": Rejected(
        "megatron", {}, "lose small updates", "dtype=bfloat16", "set dtype=float32", fields={"dtype": "bfloat16"}
    ),
    "megatron with virtual stages only": Rejected(
        "megatron", {"virtual_pipeline_model_parallel_size": 2}, "has no effect",
        "virtual_pipeline_model_parallel_size=2", "or pipeline_model_parallel_size=2",
    ),
    "megatron with selective checkpointing": Rejected(
        "megatron", {}, "recomputes whole layers", "gradient_checkpointing_mode=selective",
        "Set model.gradient_checkpointing_mode=full", SELECTIVE,
    ),
    "megatron with a name of torchtitan": Rejected(
        "megatron", {TENSOR: 2}, "unknown option", "options.tensor_parallel_size=2",
        "did you mean 'tensor_model_parallel_size'?",
    ),
    "torchtitan with LoRA": Rejected(
        "torchtitan", {}, "LoRA is not supported", "LoRA", "Set lora=None in EngineModel, or lora_rank=0 in a run", LORA
    ),
    "torchtitan in float64": Rejected(
        "torchtitan", {}, "does not support", "dtype=float64", "set dtype=float32", fields={"dtype": "float64"}
    ),
    "torchtitan with sequence and tensor parallelism": Rejected(
        "torchtitan", {ULYSSES: 2, TENSOR: 2}, "both shard the attention heads",
        "ulysses_sequence_parallel_size=2 cannot be combined with tensor_parallel_size=2",
        "Set ulysses_sequence_parallel_size=1, or tensor_parallel_size=1",
    ),
    "torchtitan with a misspelt option": Rejected(
        "torchtitan", {"tensor_paralel_size": 2}, "unknown option", "options.tensor_paralel_size=2",
        "did you mean 'tensor_parallel_size'?",
    ),
}  # fmt: skip


def config_of(case: Rejected) -> EngineConfig:
    model = EngineModel(path="models/tiny", **case.model)
    return EngineConfig(model=model, optim=OptimConfig(), options=case.options, **case.fields)


def check_message(error: Exception, case: Rejected) -> None:
    assert all(part in str(error) for part in (case.problem, case.value, case.fix)), str(error)


@pytest.mark.parametrize("case", REJECTED.values(), ids=REJECTED.keys())
def test_config_checks_reject_combinations_with_a_fix(case: Rejected) -> None:
    capabilities = engine_capabilities(case.engine)
    with pytest.raises(EngineError) as caught:
        capabilities.validate(config_of(case)).check_layout(case.ranks or 1)
    check_message(caught.value, case)


def test_a_run_with_an_unsupported_dtype_is_rejected_before_it_starts(tmp_path: Path) -> None:
    key = f"{ACTOR}.fsdp_config.model_dtype"
    with pytest.raises(ConfigError) as caught:
        load_ppo(ppo_args(tmp_path, {f"{ACTOR}.strategy": "torchtitan", key: "float64"}))
    assert f"{key} = float64" in str(caught.value)
    assert "strategy=torchtitan does not support this dtype. Set one of float32, bfloat16." in str(caught.value)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=MARKS.get(case.engine, ()))
        for name, case in REJECTED.items()
        if case.ranks is None
    ],
)
def test_constructors_reject_combinations_with_a_fix(case: Rejected) -> None:
    with pytest.raises(EngineError) as caught:
        engine_class(case.engine)(config_of(case))
    check_message(caught.value, case)
