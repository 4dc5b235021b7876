"""Keys of generators that are libraries, without the libraries: under which name each is told, and to what.

What the libraries make of it is tested with them, by `make test-vllm` and `make test-sglang`.
"""

from typing import Any

import pytest
from support.tiny import tiny_folder

from camshaft.config import EngineModel, RolloutEngineConfig
from camshaft.models.loader import stored_weights
from camshaft.rollout.process import rollout as process_rollout
from camshaft.rollout.vllm.engine import engine_arguments

VLLM: dict[str, tuple[Any, str, Any, Any]] = {
    # key: told, vLLM's name, what it is by default, what with the key
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
    told, name, before, after = VLLM[key]
    config = RolloutEngineConfig(model_path=str(tiny_folder()), device="cuda")
    plain, changed = engine_arguments(config), engine_arguments(config.model_copy(update={key: told}))
    assert (plain[name], changed[name]) == (before, after)
    assert {other for other in plain if plain[other] != changed[other]} == {name}


@pytest.mark.parametrize("load_format", ["auto", "hf", "dtensor", "megatron"])
def test_load_format_without_dummy_reads_the_model_folder(load_format: str) -> None:
    config = RolloutEngineConfig(model_path=str(tiny_folder()))
    for name, loads in ((load_format, "auto"), (f"dummy_{load_format}", "dummy")):
        assert engine_arguments(config.model_copy(update={"load_format": name}))["load_format"] == loads


def test_weight_buckets_have_the_configured_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a real process, which answers each bucket."""
    real, pushed = process_rollout.open_sender, []

    def opened(device: Any, size: int) -> Any:
        sender = real(device, size)
        push, used_of_call = sender.push, []
        pushed.append(used_of_call)
        sender.push = lambda used: (used_of_call.append(used), push(used))[1]
        return sender

    monkeypatch.setattr(process_rollout, "open_sender", opened)
    folder = tiny_folder(hidden=128, intermediate=2304)
    config = RolloutEngineConfig(model_path=str(folder), update_weights_bucket_megabytes=1)
    weights = list(stored_weights(EngineModel(path=str(folder))))
    process_rollout.ProcessRollout(config).load_weights(iter(weights))
    total = sum(weight.nbytes for _, weight in weights)
    assert total < RolloutEngineConfig(model_path=str(folder)).update_weights_bucket_megabytes * 2**20  # without: one
    (buckets,) = pushed
    assert len(buckets) > 1
    assert max(buckets) <= 2**20
    assert sum(buckets) >= total
