"""Options of the Megatron engine are checked without the library."""

import pytest

from camshaft.config.backends import engine_capabilities, ranks_per_row
from camshaft.config.engine import EngineModel
from camshaft.config.schema.megatron import MegatronOptions

OPTIONS = {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "pipeline_model_parallel_size": 2}


def test_ranks_per_row_is_the_product_of_the_model_parallel_sizes():
    assert ranks_per_row("megatron", {}, OPTIONS | {"use_distributed_optimizer": True}) == 8
    assert ranks_per_row("megatron", {}, {"expert_model_parallel_size": 4}) == 1


def test_engine_declares_no_adapter():
    assert not engine_capabilities("megatron").supports_lora


@pytest.mark.parametrize(
    ("options", "world_size", "message"),
    [
        (OPTIONS, 12, "tensor_model_parallel_size=2 x context_parallel_size=2 x pipeline_model_parallel_size=2 = 8"),
        ({"expert_model_parallel_size": 4}, 6, "the 6 ranks of a pipeline stage are not divisible by"),
        (OPTIONS, 16, None),
    ],
)
def test_layout_must_fit_the_number_of_ranks(options, world_size, message):
    conflicts = [str(conflict) for conflict in MegatronOptions.from_dict(options).layout_conflicts(world_size)]
    assert len(conflicts) == (message is not None)
    assert message is None or message in conflicts[0]


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"virtual_pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size=2"),
        ({"param_offload": True, "use_distributed_optimizer": True}, "use_distributed_optimizer=false"),
        (
            {"mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": None}},
            "mixed_precision.reduce_dtype=float32",
        ),
    ],
)
def test_conflicting_options_name_a_fix(options, fix):
    conflicts = list(MegatronOptions.from_dict(options).conflicts(EngineModel(path="models/tiny")))
    assert len(conflicts) == 1
    assert fix in conflicts[0].fixes
