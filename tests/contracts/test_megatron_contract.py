"""The Megatron engine keeps every rule of the engine contract, in several layouts.

All rules are checked in the layouts of `COMPLETE`. The other layouts check only the rules about numbers and files.
`make test-megatron` checks all rules on one rank and two rules in the most different layouts; `make test-megatron-slow`
checks the others.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.megatron_ranks import NUMBERS

from camshaft.config.engine import EngineConfig, EngineModel, LoRAConfig, OptimConfig
from camshaft.contracts.engine.ranks import RuleRanks
from camshaft.contracts.engine.suite import RULES
from camshaft.engine import engine_class
from camshaft.errors import EngineError

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]

TENSOR, PIPELINE, CONTEXT = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
DISTRIBUTED = {"use_distributed_optimizer": True}
OFFLOAD = {"param_offload": True, "optimizer_offload": True, "activation_offload": True, "async_save": True}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one_rank": (1, {}),
    "tensor": (2, {TENSOR: 2}),
    "tensor_without_sequence_parallel": (2, {TENSOR: 2, "sequence_parallel": False}),
    "data": (2, {}),
    "data_with_distributed_optimizer": (2, DISTRIBUTED),
    "pipeline": (2, {PIPELINE: 2}),
    "context": (2, {CONTEXT: 2}),
    "tensor_and_pipeline": (4, {TENSOR: 2, PIPELINE: 2}),
    "tensor_and_data": (4, {TENSOR: 2, **DISTRIBUTED}),
    "pipeline_and_data": (4, {PIPELINE: 2, **DISTRIBUTED}),
    "tensor_and_context": (4, {TENSOR: 2, CONTEXT: 2}),
    "pipeline_and_context": (4, {PIPELINE: 2, CONTEXT: 2}),
    "pipeline_with_offload": (2, {PIPELINE: 2, **OFFLOAD}),
    "data_with_offload": (2, OFFLOAD),
}
"""Number of ranks and options of each layout."""

COMPLETE = ("one_rank", "tensor", "pipeline", "data_with_distributed_optimizer")
"""Layouts in which all rules are checked."""

STRONGEST = {"step equals oracle", "resume is bitwise"}
"""Rules that are not slow in the layouts of `APART`."""
APART = ("tensor", "pipeline", "context", "data_with_distributed_optimizer", "tensor_and_pipeline")


def _cases() -> Iterator[Any]:
    for name, (world, options) in sorted(LAYOUTS.items(), key=lambda item: item[1][0]):
        for rule in RULES:
            if name in COMPLETE or rule.name in NUMBERS:
                is_slow = name != "one_rank" and not (name in APART and rule.name in STRONGEST)
                marks = [pytest.mark.slow] if is_slow else []
                yield pytest.param(world, options, rule.name, id=f"{name}-{rule.name.replace(' ', '_')}", marks=marks)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[RuleRanks]:
    with RuleRanks(request.param) as rule_ranks:
        yield rule_ranks


@pytest.mark.parametrize(("ranks", "options", "rule"), list(_cases()), indirect=["ranks"], scope="module")
def test_megatron_engine_keeps_rule(ranks: RuleRanks, options: dict[str, Any], rule: str, tmp_path: Path) -> None:
    problem = ranks.find_problem(rule, engine_class("megatron"), str(tmp_path), {"options": options})
    assert problem is None, problem


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ({"lora": LoRAConfig(rank=2)}, {}, "LoRA is not supported"),
        (
            {"enable_gradient_checkpointing": True, "gradient_checkpointing_mode": "selective"},
            {},
            "recomputes whole layers.*gradient_checkpointing_mode=full",
        ),
        ({}, {"virtual_pipeline_model_parallel_size": 2}, "no effect with pipeline_model_parallel_size=1"),
        ({}, {"num_layers_in_last_pipeline_stage": 2}, "no effect with pipeline_model_parallel_size=1"),
        ({}, {"param_offload": True, **DISTRIBUTED}, "param_offload is not supported with use_distributed_optimizer"),
        ({}, {"grad_offload": True}, "unknown option"),
        (
            {},
            {"mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}},
            "reduce_dtype=bfloat16 with param_dtype=bfloat16 is not.*Set mixed_precision.reduce_dtype=float32",
        ),
        ({}, {"tensor_parallel_size": 2}, "did you mean 'tensor_model_parallel_size'"),
    ],
)
def test_unsupported_settings_are_rejected_at_construction(
    model: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    config = EngineConfig(model=EngineModel(path="models/tiny", **model), options=fields)
    with pytest.raises(EngineError, match=message):
        engine_class("megatron")(config)


@pytest.mark.parametrize(
    ("dtype", "optimizer", "options", "message"),
    [
        ("bfloat16", "AdamW", {}, "set dtype=float32, and mixed_precision.param_dtype=bfloat16"),
        ("float64", "AdamW", {"mixed_precision": {"param_dtype": "bfloat16"}}, "set dtype=float32"),
        ("float32", "Adafactor", {}, "needs an elementwise optimizer"),
        ("float32", "SGD", DISTRIBUTED, "only AdamW with float32 weights"),
        ("float64", "AdamW", DISTRIBUTED, "only AdamW with float32 weights"),
    ],
)
def test_unsupported_optimizers_are_rejected_at_construction(
    dtype: Any, optimizer: str, options: dict[str, Any], message: str
) -> None:
    optim = OptimConfig(optimizer=optimizer)
    config = EngineConfig(model=EngineModel(path="models/tiny"), optim=optim, dtype=dtype, options=options)
    with pytest.raises(EngineError, match=message):
        engine_class("megatron")(config)
