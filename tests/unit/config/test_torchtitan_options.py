"""Options of the torchtitan engine: ranks per row, shards, and layouts that are rejected. No torchtitan is needed."""

import re
import sys
from typing import Any

import pytest

from camshaft.config.backends import engine_capabilities
from camshaft.config.engine import EngineModel
from camshaft.config.schema.torchtitan import TorchtitanOptions
from camshaft.engine import engine_class
from camshaft.errors import ConfigError, EngineError


def test_model_parallel_ranks_share_rows() -> None:
    assert TorchtitanOptions(tensor_parallel_size=4).ranks_per_row() == 4
    assert TorchtitanOptions(ulysses_sequence_parallel_size=2).ranks_per_row() == 2
    assert TorchtitanOptions(pipeline_parallel_degree=2, tensor_parallel_size=2).ranks_per_row() == 4


def test_remaining_ranks_shard_the_weights() -> None:
    assert TorchtitanOptions().shards(8) == 8
    assert TorchtitanOptions(tensor_parallel_size=2, data_parallel_replicate_degree=2).shards(8) == 2
    assert TorchtitanOptions(data_parallel_shard_degree=4).shards(4) == 4
    assert TorchtitanOptions(pipeline_parallel_degree=2).shards(8) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_degree": 3}, "world_size=8 is not divisible by pipeline_parallel_degree=3: 8 = 2 x 3 + 2"),
        ({"tensor_parallel_size": 3}, "world_size=8 is not divisible by tensor_parallel_size=3: 8 = 2 x 3 + 2"),
        ({"data_parallel_shard_degree": 4}, "world_size=8 differs from data_parallel_shard_degree=4"),
        (
            {"tensor_parallel_size": 2, "data_parallel_shard_degree": 8},
            "world_size=8 differs from tensor_parallel_size=2 x data_parallel_shard_degree=8 = 16",
        ),
        (
            {"data_parallel_replicate_degree": 4, "ulysses_sequence_parallel_size": 4},
            "ulysses_sequence_parallel_size=4 does not divide the 2 ranks",
        ),
    ],
)
def test_layouts_that_do_not_fit_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=re.escape(message)):
        TorchtitanOptions.from_dict(options).check_layout(8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_parallel_degree": 2}, "no backward pass on a CPU. Set context_parallel_degree=1"),
        ({"expert_parallel_degree": 2}, "computes experts in bfloat16"),
        ({"ulysses_sequence_parallel_size": 2, "tensor_parallel_size": 2}, "both shard the attention heads"),
    ],
)
def test_unsupported_combinations_are_rejected(options: dict[str, Any], message: str) -> None:
    conflicts = TorchtitanOptions.from_dict(options).conflicts(EngineModel(path="models/tiny"))
    assert [conflict for conflict in conflicts if message in str(conflict)]


def test_capabilities_need_no_torchtitan() -> None:
    assert not engine_capabilities("torchtitan").supports_lora


def test_missing_library_error_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("camshaft.engine.torchtitan")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchtitan", None)  # as if it were not installed
    message = "requires 'torchtitan', which is not installed: pip install --no-deps torchtitan==0.3.0"
    with pytest.raises(ConfigError, match=re.escape(message)):
        engine_class("torchtitan")


@pytest.mark.parametrize(
    ("options", "values", "message"),
    [
        ({"pipeline_parallel_degree": 3}, {"num_hidden_layers": 2}, "Set pipeline_parallel_degree=2"),
        (
            {"tensor_parallel_size": 4},
            {"num_key_value_heads": 2},
            "num_key_value_heads=2 of this qwen2 model is not div",
        ),
        (
            {"ulysses_sequence_parallel_size": 4},
            {"num_attention_heads": 6},
            "num_attention_heads=6 of this qwen2 model",
        ),
        ({}, {"hidden_act": "gelu"}, "supports qwen2 models only with hidden_act=silu, got gelu. Set strategy=fsdp"),
        ({}, {"rope_scaling": {"type": "dynamic"}, "max_position_embeddings": 8}, "does not support rope_type=dynamic"),
        ({}, {"model_type": "qwen3_moe"}, "does not support qwen3_moe models, only llama, qwen2, qwen3"),
    ],
)
def test_models_that_do_not_fit_are_rejected(options: dict[str, Any], values: dict[str, Any], message: str) -> None:
    titan, model = engine_capabilities("torchtitan"), EngineModel(path="models/tiny")
    sizes = {"num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12, "model_type": "qwen2"}
    parsed = TorchtitanOptions.from_dict(options)
    titan.check_family(parsed, sizes, model)
    with pytest.raises(EngineError, match=re.escape(message)):
        titan.check_family(parsed, sizes | values, model)
