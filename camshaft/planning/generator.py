"""Memory of the rollout on a device, besides what the engine holds there.

    generator = forecast_generator(config, memory, resident)
    generator.sync, generator.gen, generator.rest       # bytes in these phases, and in all others

`vllm`, `sglang` and `server` reserve a share of the device for weights and KV cache. `torch` and `process` with `torch`
use the memory that is free. The limits of their KV cache are computed by the functions of the rollout itself.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from camshaft.config import PPOConfig, rollout_engine
from camshaft.config.engine import EngineModel
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import RolloutError
from camshaft.models.loader import DTYPES, load_config, model_folder, skeleton
from camshaft.models.lora import adapter_shapes
from camshaft.rollout.builtin.kept_rows import BUDGET_SHARE
from camshaft.rollout.builtin.kv_cache import KVCache
from camshaft.rollout.builtin.rollout import SAMPLING_BYTES, cache_budget
from camshaft.rollout.weights.transport import BUFFERS

UNLIMITED = 2**60
"""Memory of a generator on a CPU, in bytes."""


class Generator(NamedTuple):
    """Memory of the rollout on each device, in bytes."""

    sync: int
    """During a weight sync, in addition to the gathered weights."""
    gen: int
    """During generation."""
    rest: int
    """In all other phases."""
    rows: int | None = None
    """Rows that are generated at once, if the memory limits them."""


class ModelSize(NamedTuple):
    """Sizes of the model of a rollout, in bytes."""

    weights: int
    largest: int
    """The largest weight."""
    position: tuple[int, ...]
    """Keys and values of one token, by layer."""
    num_embeddings: int
    adapter: int = 0
    """The LoRA adapter, if the rollout loads adapters."""


def keeps_tensors(name: str) -> bool:
    """Return True for rollouts that generate with the weights that an engine sends, and do not copy them."""
    return name in SHARING


def forecast_generator(config: PPOConfig, memory: int, resident: int, rows: int) -> Generator | None:
    """Return the memory of the rollout; None if its memory is unknown.

    `memory` is that of a device, `resident` its part that all roles use during generation, and `rows` the number of
    rows of each rank.
    """
    name, engine = config.actor_rollout_ref.rollout.name, rollout_engine(config)
    if name not in GENERATORS:
        return None
    if name == "torch" and config.plays_episodes():
        return _builtin(engine, model_size(engine), memory, resident, rows, keeps_rows=True)
    return GENERATORS[name](engine, model_size(engine), memory, resident, rows)


def forecast_alone(config: PPOConfig, memory: int, ranks: int) -> int | None:
    """Return the memory of each of `ranks` ranks of a rollout on devices of its own; None if it is unknown.

    The KV cache of the built-in rollout has no limit on a CPU. The memory that a library reserves there is unknown.
    """
    policy, on_cpu = config.actor_rollout_ref, config.trainer.device == "cpu"
    generating = policy.rollout.engine_kwargs.get("rollout", "torch")
    if on_cpu and (policy.rollout.name if policy.rollout.name != "process" else generating) in RESERVING:
        return None
    rows = -(-config.data.train_batch_size * policy.rollout.n // ranks)
    weights = model_size(rollout_engine(config)).weights if keeps_tensors(policy.rollout.name) else 0
    generator = forecast_generator(config, UNLIMITED if on_cpu else memory, weights, rows)
    return None if generator is None else weights + generator.gen


def model_size(config: RolloutEngineConfig) -> ModelSize:
    """Return the sizes of the model of a rollout, from its config alone."""
    return _model_size(config.model_dump_json())


def snapshots_size(config: PPOConfig) -> int:
    """Return the bytes of host memory in which the actor publishes weights for a rollout on devices of its own."""
    rollout, count = rollout_engine(config), config.async_training.max_staleness + 1
    size = model_size(rollout)
    return count * size.weights if rollout.lora is None else size.weights + count * size.adapter


@functools.cache
def _model_size(text: str) -> ModelSize:
    config = RolloutEngineConfig.model_validate_json(text)
    model = EngineModel(
        path=config.model_path,
        override_config=config.override_config,
        external_lib=config.external_lib,
        trust_remote_code=config.trust_remote_code,
    )
    hf = skeleton(model, config.dtype).hf
    sizes = [parameter.nbytes for parameter in hf.parameters()]
    embeddings: Any = hf.get_input_embeddings()
    itemsize = DTYPES[config.dtype].itemsize
    shapes = {} if config.lora is None else adapter_shapes(hf, config.lora)
    adapter = itemsize * sum(map(math.prod, shapes.values()))
    return ModelSize(sum(sizes), max(sizes), position_bytes(hf.config, itemsize), embeddings.weight.shape[0], adapter)


def position_bytes(config: Any, itemsize: int) -> tuple[int, ...]:
    """Return the bytes of the keys and values of one token, by layer."""
    text = config.get_text_config()
    values = text.to_dict()
    heads = text.num_attention_heads
    if values.get("kv_lora_rank") is not None:  # the heads are expanded from the compressed keys and values
        width = heads * (values["qk_nope_head_dim"] + values["qk_rope_head_dim"] + values["v_head_dim"])
    else:
        dim = values.get("head_dim") or text.hidden_size // heads
        width = 2 * (values.get("num_key_value_heads") or heads) * dim
    return (itemsize * width,) * text.num_hidden_layers


# -- the rollouts ---------------------------------------------------------------------------------


def _builtin(
    config: RolloutEngineConfig, size: ModelSize, memory: int, resident: int, rows: int, keeps_rows: bool = False
) -> Generator:
    """The built-in generator: the weights are among those of the engine, and the KV cache uses free memory.

    With `keeps_rows`, a share of this memory is for the rows that are kept between the answers of an episode.
    """
    hf_config = load_config(
        model_folder(config.model_path, weights=False), config.trust_remote_code, config.override_config
    )
    cache = KVCache(hf_config, config.max_model_len)
    cache.position_bytes = dict(enumerate(size.position))
    budget = cache_budget(memory - resident, memory, config.gpu_memory_utilization, size.weights)
    row_bytes, longest = SAMPLING_BYTES * size.num_embeddings, config.max_model_len - 1
    kept = 0
    if keeps_rows:
        share = max(0, int(budget * BUDGET_SHARE))
        kept, budget = min(share, rows * longest * sum(size.position)), budget - share
    try:
        rows = cache.allocate(min(config.max_num_seqs, rows), longest, budget, row_bytes)
        slots, length = cache.num_slots, cache.length
    except RolloutError:  # not even one row fits
        rows, slots, length = 1, 2, longest
    keys_and_values = slots * length * sum(size.position)
    return Generator(
        0, keys_and_values + kept + rows * row_bytes, 0 if config.free_cache_engine else keys_and_values, rows
    )


def _process(config: RolloutEngineConfig, size: ModelSize, memory: int, resident: int, rows: int) -> Generator | None:
    """Any rollout in a process of its own, which receives the weights in buckets on the device."""
    kwargs = dict(config.engine_kwargs)
    name = kwargs.pop("rollout", "torch")
    if name not in GENERATORS:
        return None
    inner = config.model_copy(update={"engine_kwargs": kwargs})
    weights = size.weights if keeps_tensors(name) else 0
    generator = GENERATORS[name](inner, size, memory, resident + weights, rows)
    if generator is None:
        return None
    sync = weights + generator.sync + _transfer(config, size, BUFFERS)
    return generator._replace(sync=sync, gen=weights + generator.gen)


def _vllm(config: RolloutEngineConfig, size: ModelSize, memory: int, _resident: int, _rows: int) -> Generator:
    """vLLM reserves its share of the device, and frees it in its sleep mode."""
    ranks = config.tensor_model_parallel_size
    one_row = config.max_model_len * sum(size.position)
    least = math.ceil((size.weights + one_row) / ranks)
    reserved = max(int(config.gpu_memory_utilization * memory), least)
    return Generator(reserved, reserved, 0 if config.free_cache_engine else reserved)


def _sglang(config: RolloutEngineConfig, size: ModelSize, memory: int, resident: int, rows: int) -> Generator:
    """SGLang reserves its share of the device in a process of its own."""
    generator = _vllm(config, size, memory, resident, rows)
    return generator._replace(sync=generator.sync + _transfer(config, size, 1))


def _server(config: RolloutEngineConfig, size: ModelSize, memory: int, resident: int, rows: int) -> Generator:
    """vLLM's server on the device of the rank, which receives the weights in buckets there, or a server elsewhere."""
    if config.engine_kwargs.get("vllm_server_base_url"):
        return Generator(0, 0, 0)
    generator = _vllm(config, size, memory, resident, rows)
    return generator._replace(sync=generator.sync + _transfer(config, size, BUFFERS))


def _transfer(config: RolloutEngineConfig, size: ModelSize, buckets: int) -> int:
    """Return the bytes of all buckets, and of the weight that the receiver assembles from them."""
    return buckets * config.update_weights_bucket_megabytes * 2**20 + size.largest


SHARING = ("torch", "hf")
"""Rollouts that run the engine's own tensors, if their dtype and device are right."""
RESERVING = ("vllm", "sglang", "server")
"""Rollouts that reserve a share of a device."""
GENERATORS: dict[str, Callable[[RolloutEngineConfig, ModelSize, int, int, int], Generator | None]] = {
    "torch": _builtin,
    "process": _process,
    "vllm": _vllm,
    "sglang": _sglang,
    "server": _server,
}
"""Forecasts by the name of the rollout."""
