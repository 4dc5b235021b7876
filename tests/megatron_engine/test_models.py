"""Megatron engines with other models and with several engines in one process, on gloo ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.megatron_ranks import BFLOAT16, NUMBERS, ModelRanks, make_harness
from transformers import AutoConfig

from camshaft.config.schema.megatron import MegatronOptions
from camshaft.errors import EngineError

pytest.importorskip("megatron.core")

from camshaft.engine.megatron.architecture import transformer_config

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]

TENSOR, PIPELINE, CONTEXT = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EXPERT, VIRTUAL = "expert_model_parallel_size", "virtual_pipeline_model_parallel_size"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
DISTRIBUTED = {"use_distributed_optimizer": True}

LLAMA = {"family": "llama", "tie_embeddings": False}
QWEN3 = {"family": "qwen3"}
QWEN3_MOE = {
    "family": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
MIXTRAL = {"family": "mixtral", "num_local_experts": 4}
FOUR_LAYERS = {"layers": 4}

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "llama-tensor": (2, LLAMA, {TENSOR: 2}),
    "llama-pipeline": (2, LLAMA, {PIPELINE: 2}),
    "qwen3-tensor": (2, QWEN3, {TENSOR: 2}),
    "qwen3-tensor_without_sequence_parallel": (2, QWEN3, {TENSOR: 2, "sequence_parallel": False}),
    "four_layers-interleaved": (2, FOUR_LAYERS, {PIPELINE: 2, VIRTUAL: 2}),
    "three_layers-uneven_pipeline": (2, {"layers": 3}, {PIPELINE: 2, FIRST: 1}),
    "six_layers-uneven_interleaved": (2, {"layers": 6}, {PIPELINE: 2, VIRTUAL: 2, FIRST: 2, LAST: 4}),
    "five_layers-uneven_four_stages": (4, {"layers": 5}, {PIPELINE: 4, LAST: 2}),
    "qwen3_moe-data": (2, QWEN3_MOE, {}),
    "qwen3_moe-unnormalized": (2, QWEN3_MOE | {"norm_topk_prob": False}, {EXPERT: 2}),
    "qwen3_moe-expert": (2, QWEN3_MOE, {EXPERT: 2}),
    "qwen3_moe-context_and_expert": (2, QWEN3_MOE, {CONTEXT: 2, EXPERT: 2}),
    "qwen3_moe-tensor": (2, QWEN3_MOE, {TENSOR: 2}),
    "qwen3_moe-tensor_and_expert": (2, QWEN3_MOE, {TENSOR: 2, EXPERT: 2}),
    "qwen3_moe-expert_and_distributed_optimizer": (2, QWEN3_MOE, {EXPERT: 2, **DISTRIBUTED}),
    "mixtral-expert": (2, MIXTRAL, {EXPERT: 2}),
    "mixtral-pipeline": (2, MIXTRAL, {PIPELINE: 2}),
    "mixtral-distributed_optimizer": (2, MIXTRAL, DISTRIBUTED),
    "mixtral-pipeline_and_expert": (4, MIXTRAL, {PIPELINE: 2, EXPERT: 2}),
    "mixtral-tensor_expert_and_distributed_optimizer": (4, MIXTRAL, {TENSOR: 2, EXPERT: 2, **DISTRIBUTED}),
    "mixtral-tensor_and_four_experts": (4, MIXTRAL, {TENSOR: 2, EXPERT: 4}),
    "four_layers-interleaved_and_tensor": (4, FOUR_LAYERS, {PIPELINE: 2, VIRTUAL: 2, TENSOR: 2}),
    "four_layers-interleaved_and_data": (4, FOUR_LAYERS, {PIPELINE: 2, VIRTUAL: 2, **DISTRIBUTED}),
}
"""Number of ranks, arguments of `make_tiny_model`, and options of the engine."""


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[ModelRanks]:
    with ModelRanks(request.param) as model_ranks:
        yield model_ranks


COMPLETE = ("three_layers-uneven_pipeline", "four_layers-interleaved", "qwen3_moe-expert")
"""Cases in which all rules about numbers and files are checked; the others check three."""


def _cases() -> Iterator[Any]:
    for name, case in CASES.items():
        for rule in sorted(NUMBERS) if name in COMPLETE else ("step equals oracle", "predictions", "resume is bitwise"):
            marks = [] if name in COMPLETE and rule == "step equals oracle" else [pytest.mark.slow]
            yield pytest.param(*case, rule, id=f"{name}-{rule.replace(' ', '_')}", marks=marks)


@pytest.mark.parametrize(("ranks", "sizes", "options", "rule"), list(_cases()), indirect=["ranks"], scope="module")
def test_model_keeps_rule(
    ranks: ModelRanks, sizes: dict[str, Any], options: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    ranks.check(rule, sizes, options, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    ["order of rows", "hooks", "context", "inference within a step", "prefix sharing"],
)
@pytest.mark.parametrize("ranks", [2], indirect=True, scope="module")
def test_interleaved_pipeline_keeps_rule(ranks: ModelRanks, rule: str, tmp_path: Path) -> None:
    ranks.check(rule, FOUR_LAYERS, {PIPELINE: 2, VIRTUAL: 2}, str(tmp_path))


@pytest.mark.parametrize(
    ("ranks", "sizes", "options"),
    [
        pytest.param(2, {}, {TENSOR: 2}, id="tensor"),
        pytest.param(2, {}, {PIPELINE: 2}, id="pipeline"),
        pytest.param(2, FOUR_LAYERS, {PIPELINE: 2, VIRTUAL: 2}, id="interleaved_pipeline"),
        pytest.param(2, {}, {CONTEXT: 2}, id="context"),
        pytest.param(2, QWEN3_MOE, {EXPERT: 2}, id="expert"),
        pytest.param(2, QWEN3_MOE, {EXPERT: 2, **DISTRIBUTED}, id="expert_and_distributed_optimizer"),
        pytest.param(2, QWEN3_MOE, {TENSOR: 2, EXPERT: 2}, id="tensor_and_expert"),
        pytest.param(2, {}, DISTRIBUTED, id="distributed_optimizer"),
        pytest.param(4, {}, {TENSOR: 2, PIPELINE: 2}, id="tensor_and_pipeline"),
    ],
    indirect=["ranks"],
    scope="module",
)
def test_three_steps_equal_the_oracle(
    ranks: ModelRanks, sizes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    ranks.train(sizes, options, str(tmp_path))


@pytest.mark.parametrize(
    ("ranks", "sizes", "options", "layouts"),
    [
        pytest.param(4, {}, {TENSOR: 2, PIPELINE: 2}, [{PIPELINE: 2}, {TENSOR: 2}], id="tensor_and_pipeline"),
        pytest.param(
            4,
            {},
            {TENSOR: 2, **DISTRIBUTED},
            [DISTRIBUTED, {CONTEXT: 2}],
            id="tensor_and_distributed",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4,
            QWEN3_MOE,
            {TENSOR: 2, EXPERT: 2, **DISTRIBUTED},
            [{EXPERT: 2}, {PIPELINE: 2}],
            id="expert_and_distributed",
            marks=pytest.mark.slow,
        ),
    ],
    indirect=["ranks"],
    scope="module",
)
def test_checkpoint_of_four_ranks_resumes_on_two_ranks_and_on_one(
    ranks: ModelRanks, sizes: dict[str, Any], options: dict[str, Any], layouts: list[dict[str, Any]], tmp_path: Path
) -> None:
    ranks.train(sizes, options, str(tmp_path), save=True)
    with ModelRanks(2) as two:
        for layout in layouts:
            two.resume(sizes, layout, str(tmp_path))
    with ModelRanks(1) as one:
        one.resume(sizes, {}, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sizes", "options"),
    [
        pytest.param(2, {"family": "llama", "tie_embeddings": False}, {TENSOR: 2}, id="tensor"),
        pytest.param(2, QWEN3_MOE, {EXPERT: 2}, id="expert"),
        pytest.param(4, {}, {TENSOR: 2, PIPELINE: 2}, id="tensor_and_pipeline"),
    ],
    indirect=["ranks"],
    scope="module",
)
def test_exports_load_into_other_engines_and_back(
    ranks: ModelRanks, sizes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    ranks.exchange_exports(sizes, options, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sizes", "options"),
    [
        pytest.param(2, {}, {TENSOR: 2}, id="tensor"),
        pytest.param(2, {"vocab_size": 101, "tie_embeddings": False}, {TENSOR: 2}, id="odd_vocabulary"),
        pytest.param(2, {}, DISTRIBUTED, id="distributed_optimizer"),
        pytest.param(2, {}, {PIPELINE: 2}, id="pipeline"),
        pytest.param(2, FOUR_LAYERS, {PIPELINE: 2, VIRTUAL: 2}, id="interleaved_pipeline"),
        pytest.param(2, MIXTRAL, {EXPERT: 2}, id="expert"),
        pytest.param(4, {}, {TENSOR: 2, PIPELINE: 2}, id="tensor_and_pipeline"),
        pytest.param(4, {}, {TENSOR: 2, **DISTRIBUTED}, id="tensor_and_distributed_optimizer"),
    ],
    indirect=["ranks"],
    scope="module",
)
def test_steps_and_checkpoints_equal_the_reference_engine(
    ranks: ModelRanks, sizes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    ranks.compare_with_reference(sizes, options, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [(2, [{TENSOR: 2}, {PIPELINE: 2}, DISTRIBUTED]), (4, [{TENSOR: 2, PIPELINE: 2}, {PIPELINE: 2}, {TENSOR: 2}])],
    indirect=["ranks"],
    scope="module",
)
def test_engines_with_different_layouts_do_not_interfere(
    ranks: ModelRanks, layouts: list[dict[str, Any]], tmp_path: Path
) -> None:
    ranks.interleave_engines(layouts, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "options"), [(2, {}), (2, DISTRIBUTED)], indirect=["ranks"], scope="module")
def test_step_follows_weights_that_moved(ranks: ModelRanks, options: dict[str, Any], tmp_path: Path) -> None:
    ranks.move_weights(options, str(tmp_path))


@pytest.mark.parametrize(
    ("ranks", "sizes", "options"),
    [
        pytest.param(2, {}, {TENSOR: 2}, id="tensor"),
        pytest.param(2, {}, {PIPELINE: 2}, id="pipeline"),
        pytest.param(2, {}, DISTRIBUTED, id="distributed_optimizer"),
        pytest.param(2, QWEN3_MOE, {EXPERT: 2}, id="qwen3_moe-expert"),
        pytest.param(2, QWEN3_MOE, {EXPERT: 2, "moe_router_dtype": "fp32"}, id="qwen3_moe-router_in_float32"),
        pytest.param(2, QWEN3_MOE, {EXPERT: 2, **DISTRIBUTED}, id="qwen3_moe-expert_and_distributed_optimizer"),
        pytest.param(2, MIXTRAL, {PIPELINE: 2}, id="mixtral-pipeline"),
        pytest.param(2, MIXTRAL, {TENSOR: 2}, id="mixtral-tensor"),
    ],
    indirect=["ranks"],
    scope="module",
)
def test_bfloat16_errors_are_those_of_other_engines(
    ranks: ModelRanks, sizes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    ranks.compare_in_bfloat16(sizes, options, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", ["resume is bitwise", "runs are reproducible", "non finite gradient is skipped", "step outside train mode"]
)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [pytest.param(2, {PIPELINE: 2}, id="pipeline"), pytest.param(2, DISTRIBUTED, id="distributed_optimizer")],
    indirect=["ranks"],
    scope="module",
)
def test_bfloat16_keeps_rule(ranks: ModelRanks, options: dict[str, Any], rule: str, tmp_path: Path) -> None:
    ranks.check(rule, {}, options | BFLOAT16, str(tmp_path))


@pytest.mark.parametrize(
    ("ranks", "options"), [(2, {PIPELINE: 2}), (2, DISTRIBUTED)], indirect=["ranks"], scope="module"
)
def test_non_finite_gradient_is_named(ranks: ModelRanks, options: dict[str, Any], tmp_path: Path) -> None:
    ranks.name_gradient(options, str(tmp_path))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"family": "mistral", "sliding_window": None}, "does not support mistral models, only llama, qwen2, qwen3"),
        ({"family": "llama", "attention_bias": True}, "attention_bias=True"),
        ({"family": "llama", "hidden_act": "gelu"}, "hidden_act=gelu"),
        ({**QWEN3_MOE, "mlp_only_layers": [0]}, "dense layers in a mixture-of-experts model"),
        ({"family": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, "sliding-window attention"),
        (
            {"family": "llama", "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type=dynamic",
        ),
    ],
)
def test_unsupported_models_are_rejected(sizes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=message):
        make_harness(sizes, {}, str(tmp_path)).build()


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"layers": 3}, {PIPELINE: 2}, "num_hidden_layers=3 is not divisible by 2 pipeline stages"),
        ({"layers": 6}, {PIPELINE: 2, VIRTUAL: 2}, "num_hidden_layers=6 is not divisible by 4 pipeline stages"),
        ({"layers": 4}, {PIPELINE: 2, LAST: 4}, f"{LAST}=4 leave 0 of 4 layers for 1 other pipeline stages"),
        ({"layers": 4}, {PIPELINE: 2, FIRST: 1, LAST: 2}, "leave 1 of 4 layers for 0 other pipeline stages"),
        ({"layers": 4}, {PIPELINE: 2, VIRTUAL: 2, FIRST: 1}, f"{FIRST}=1 is not divisible by 2 virtual"),
        ({}, {"moe_z_loss_coeff": 0.1}, r"moe_z_loss_coeff=0\.1 requires a mixture of experts"),
        (
            {"kv_heads": 1},
            {TENSOR: 2},
            "num_key_value_heads=1 of this qwen2 model is not divisible by tensor_model_parallel_size=2",
        ),
        ({"heads": 3, "kv_heads": 3, "hidden": 24}, {CONTEXT: 2}, "3 attention heads per rank are not divisible"),
        ({}, {EXPERT: 2}, "0 experts cannot be split"),
        (MIXTRAL, {EXPERT: 3}, "4 experts cannot be split over expert_model_parallel_size=3 ranks"),
        (
            MIXTRAL,
            {TENSOR: 2, "sequence_parallel": False},
            "not supported for a tensor-parallel mixture-of-experts model",
        ),
    ],
)
def test_layouts_that_do_not_fit_the_model_are_rejected(
    sizes: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    harness = make_harness(sizes, options, str(tmp_path))
    config = AutoConfig.from_pretrained(harness.model_folder)
    with pytest.raises(EngineError, match=message):
        transformer_config(config, harness.config(), MegatronOptions(**options))
