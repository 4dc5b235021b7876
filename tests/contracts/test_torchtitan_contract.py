"""The torchtitan engine follows the contract on gloo ranks; run by `make test-titan` in an environment with torchtitan.

All rules are checked on two ranks with FSDP. The other layouts check the rules about numbers and files.
"""

# pyright: reportMissingImports=false
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.oracle_runs import TRAINING, Oracle, compare_with_oracle
from support.ranks import run_warm_ranks
from torch.nn.attention.flex_attention import flex_attention

from camshaft.config.engine import EngineConfig, EngineModel, LoRAConfig
from camshaft.contracts.engine import suite
from camshaft.contracts.engine.harness import TINY, EngineHarness, expect_equal
from camshaft.contracts.engine.ranks import RuleRanks
from camshaft.contracts.engine.suite import RULES
from camshaft.controller import local
from camshaft.engine import build_engine, engine_class
from camshaft.errors import EngineError
from camshaft.models.tiny import make_tiny_model

pytestmark = [pytest.mark.titan, pytest.mark.timeout(600)]

local.PRELOAD.append("camshaft.engine.torchtitan.weights")

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "two": (2, {}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "tp2_without_sp": (2, {"tensor_parallel_size": 2, "enable_sequence_parallel": False}),
    "sp2": (2, {"ulysses_sequence_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_degree": 2}),
    "gathered": (2, {"reshard_after_forward": False, "async_save": True, "activation_offload": True}),
    "offload": (2, {"param_offload": True, "grad_offload": True, "optimizer_offload": True}),
    "hsdp": (4, {"data_parallel_replicate_degree": 2}),
    "tp2_x_fsdp2": (4, {"tensor_parallel_size": 2, "data_parallel_shard_degree": 2}),
    "sp2_x_dp2": (4, {"ulysses_sequence_parallel_size": 2}),
    "pp2_x_fsdp2": (4, {"pipeline_parallel_degree": 2}),
    "pp2_x_tp2": (4, {"pipeline_parallel_degree": 2, "tensor_parallel_size": 2}),
    "pp2_x_sp2": (4, {"pipeline_parallel_degree": 2, "ulysses_sequence_parallel_size": 2}),
}
"""Number of ranks and options."""

NUMBERS = {"step equals oracle", "resume is bitwise"}
TENSOR_PARALLEL = NUMBERS | {
    "predictions",
    "norm is before clipping",
    "split invariance",
    "prefix sharing",
    "non finite gradient is skipped",
    "weights have hugging face names",
    "exact kl",
    "seat and shards",
}
CHECKED = {
    "two": {rule.name for rule in RULES},
    "pp2": {rule.name for rule in RULES},
    "tp2": TENSOR_PARALLEL,
    "sp2": TENSOR_PARALLEL - {"prefix sharing"},
}
"""Rules by layout; other layouts check `NUMBERS`."""


def _cases() -> Iterator[Any]:
    """Return the cases, grouped by the number of ranks so that consecutive layouts share processes."""
    for name, (world, options) in sorted(LAYOUTS.items(), key=lambda item: item[1][0]):
        for rule in RULES:
            if rule.name in CHECKED.get(name, NUMBERS):
                yield pytest.param(world, options, rule.name, id=f"{name}-{rule.name.replace(' ', '_')}")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[RuleRanks]:
    with RuleRanks(request.param) as rule_ranks:
        yield rule_ranks


@pytest.mark.parametrize(("ranks", "options", "rule"), list(_cases()), indirect=["ranks"], scope="module")
def test_torchtitan_keeps_rule(ranks: RuleRanks, options: dict[str, Any], rule: str, tmp_path: Path) -> None:
    problem = ranks.find_problem(rule, engine_class("torchtitan"), str(tmp_path), {"options": options})
    assert problem is None, problem


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "tie_embeddings": False},
    "llama3": {
        "family": "llama",
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        },
    },
    "yarn": {
        "family": "qwen3",
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
        },
    },
    "qwen3": {"family": "qwen3", "tie_embeddings": False},
    "window": {"family": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
}  # fmt: skip
"""Arguments of `make_tiny_model`; the model of the contract is a tied qwen2."""


class FamilyHarness(EngineHarness):
    """The harness of the contract on a model of another family."""

    family: dict[str, Any]

    @cached_property
    def model_folder(self) -> Path:
        return make_tiny_model(self.folder / "model", **TINY, **self.family)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_transformers(family: str, tmp_path: Path) -> None:
    harness = FamilyHarness(engine_class("torchtitan"), tmp_path)
    harness.family = FAMILIES[family]
    suite.predictions(harness)
    suite.step_equals_oracle(harness)


def compare_three_steps(folder: Path, options: dict[str, Any]) -> None:
    harness = EngineHarness(engine_class("torchtitan"), folder, common_fields={"options": options})
    engine = harness.build(**TRAINING)
    compare_with_oracle(harness, engine, Oracle(harness, engine), 3)


@pytest.mark.parametrize("layout", ["one", "two", "tp2", "sp2", "pp2", "pp2_x_tp2"])
def test_three_steps_equal_the_oracle(layout: str, tmp_path: Path) -> None:
    world, options = LAYOUTS[layout]
    run_warm_ranks(compare_three_steps, world, tmp_path, options)


def test_checkpoint_of_the_reference_engine_loads(tmp_path: Path) -> None:
    harness, reference = (EngineHarness(engine_class(name), tmp_path) for name in ("torchtitan", "reference"))
    saved, loaded = reference.build(), harness.build()
    reference.train(saved, harness.batch)
    reference.save(saved, tmp_path / "checkpoint")
    loaded.load_checkpoint(str(tmp_path / "checkpoint"))
    expect_equal(harness.weights(loaded), harness.weights(saved), "loaded weights")
    step, expected = harness.train(loaded, harness.batch), reference.train(saved, harness.batch)
    assert (step.loss, step.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-5)
    for name, weight in harness.weights(saved).items():
        torch.testing.assert_close(harness.weights(loaded)[name], weight, rtol=1e-5, atol=1e-6, msg=name)


REJECTED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "lora": ({"lora": LoRAConfig(rank=2)}, {}, "LoRA is not supported"),
    "float64": ({}, {"dtype": "float64"}, "does not support dtype=float64"),
    "cp": ({}, {"options": {"context_parallel_degree": 2}}, "or ulysses_sequence_parallel_size=2"),
    "ep": ({}, {"options": {"expert_parallel_degree": 2}}, "computes experts in bfloat16"),
    "typo": ({}, {"options": {"tensor_paralel_size": 2}}, "did you mean 'tensor_parallel_size'"),
}
"""Fields of `EngineModel` and of `EngineConfig`, and a part of the error."""


@pytest.mark.parametrize("name", REJECTED)
def test_unsupported_settings_are_rejected_at_construction(name: str) -> None:
    model, fields, message = REJECTED[name]
    with pytest.raises(EngineError, match=message):
        build_engine("torchtitan", EngineConfig(model=EngineModel(path="models/tiny", **model), **fields))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"family": "mistral"}, "does not support mistral models; choose a model of type llama, qwen2, qwen3"),
        ({"family": "qwen3_moe"}, "does not support mixture-of-experts models such as qwen3_moe"),
        ({"family": "llama", "mlp_bias": True}, "only with mlp_bias=False"),
        (
            {"family": "llama", "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "does not support rope_type=dynamic",
        ),
    ],
)
def test_unsupported_models_are_rejected(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = EngineModel(path=str(make_tiny_model(tmp_path / "model", **config)))
    engine = build_engine("torchtitan", EngineConfig(model=model))
    with pytest.raises(EngineError, match=message):
        engine.init_model()


def test_torchtitan_splits_no_packed_rows_on_a_cpu() -> None:
    from torchtitan.distributed.context_parallel import apply_cp_to_forward
    from torchtitan.models.common.attention import VarlenAttention

    with pytest.raises(NotImplementedError, match="Variable-length attention CP is not yet supported"):
        apply_cp_to_forward([VarlenAttention.Config().build()], cp_mesh=None)
    query = torch.ones(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(query, query, query)


def test_torchtitan_computes_experts_in_bfloat16() -> None:
    from torchtitan.models.common.moe import GroupedExperts

    experts = GroupedExperts.Config(dim=8, hidden_dim=8, num_experts=1).build()
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(1))
    gate, down, up = (weight[0] for weight in (experts.w1_EFD, experts.w2_EDF, experts.w3_EFD))
    tokens = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
    exact = (F.silu(tokens @ gate.T) * (tokens @ up.T)) @ down.T
    error = (experts(tokens, torch.tensor([16])) - exact).norm() / exact.norm()
    assert error > 1e-3  # float32 has an error below 1e-6
