"""Keys of the vLLM rollout and of weight buckets, without the libraries.

`make test-vllm` and `make test-sglang` test the effect of the keys in the libraries.
"""

from typing import Any

import pytest
from support.tiny import tiny_folder

from camshaft.config import EngineModel, RolloutEngineConfig
from camshaft.models.loader import stored_weights
from camshaft.rollout.process import rollout as process_rollout
from camshaft.rollout.vllm.engine import engine_arguments

VLLM: dict[str, tuple[Any, str, Any, Any]] = {
    # key: value, argument of vLLM, default, result
    "gpu_memory_utilization": (0.25, "gpu_memory_utilization", 0.5, 0.25),
    "enforce_eager": (False, "enforce_eager", True, False),
    "load_format": ("auto", "load_format", "dummy", "auto"),
    "tensor_model_parallel_size": (2, "tensor_parallel_size", 1, 2),
    "enable_prefix_caching": (False, "enable_prefix_caching", True, False),
    "free_cache_engine": (False, "enable_sleep_mode", True, False),
    "dtype": ("bfloat16", "dtype", "float32", "bfloat16"),
    "max_model_len": (99, "max_model_len", 1024, 99),
    "max_num_seqs": (9, "max_num_seqs", 1024, 9),
    "max_num_batched_tokens": (99, "max_num_batched_tokens", 8192, 99),
}


@pytest.mark.parametrize("key", VLLM)
def test_key_reaches_the_library(key: str) -> None:
    value, name, before, after = VLLM[key]
    config = RolloutEngineConfig(model_path=str(tiny_folder()), device="cuda")
    default, changed = engine_arguments(config), engine_arguments(config.model_copy(update={key: value}))
    assert (default[name], changed[name]) == (before, after)
    assert {other for other in default if default[other] != changed[other]} == {name}


@pytest.mark.parametrize("load_format", ["auto", "hf", "dtensor", "megatron"])
def test_load_format_without_dummy_reads_the_model_folder(load_format: str) -> None:
    config = RolloutEngineConfig(model_path=str(tiny_folder()))
    for name, loads in ((load_format, "auto"), (f"dummy_{load_format}", "dummy")):
        assert engine_arguments(config.model_copy(update={"load_format": name}))["load_format"] == loads


@pytest.mark.slow
def test_weight_buckets_have_the_configured_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sync weights to a real process, which confirms each bucket."""
    real, pushed = process_rollout.open_sender, []

    def open_sender(device: Any, size: int) -> Any:
        sender = real(device, size)
        push, used_of_call = sender.push, []
        pushed.append(used_of_call)
        sender.push = lambda number, num_bytes: (used_of_call.append(num_bytes), push(number, num_bytes))[1]
        return sender

    monkeypatch.setattr(process_rollout, "open_sender", open_sender)
    folder = tiny_folder(hidden=128, intermediate=2304)
    config = RolloutEngineConfig(model_path=str(folder), update_weights_bucket_megabytes=1)
    weights = list(stored_weights(EngineModel(path=str(folder))))
    process_rollout.ProcessRollout(config).load_weights(iter(weights))
    total = sum(weight.nbytes for _, weight in weights)
    default = RolloutEngineConfig(model_path=str(folder)).update_weights_bucket_megabytes
    assert total < default * 2**20, "the default size needs a single bucket"
    (buckets,) = pushed
    assert len(buckets) > 1
    assert max(buckets) <= 2**20
    assert sum(buckets) >= total
