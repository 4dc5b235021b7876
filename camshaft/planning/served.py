"""The memory plan of `camshaft serve`: models in training, rollouts of base models, and published weights.

plan = plan_service(config, memory=None, lora_rank=32, samples=64)

A client may train any of the base models, so the plan assumes the one with the largest forecast for all `max_models`.
Training is forecast as that of a supervised run with the same engine, micro-batches and length. With `sampling_ranks`,
the rollouts are in a pool of their own.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from camshaft.config import GLOBAL_POOL, PPOConfig, SFTConfig, compose
from camshaft.config.backends import SINGLE_PROCESS_ENGINE
from camshaft.config.serve import ServeConfig
from camshaft.config.tree import leaf_fields
from camshaft.device import available_device
from camshaft.errors import ConfigError
from camshaft.planning.generator import GENERATORS, UNLIMITED, Generator, model_size
from camshaft.planning.layers import Phase
from camshaft.planning.plan import Plan, Row, check_supported, format_size, memory_per_rank
from camshaft.planning.trace import MODEL, POLICY, ROLLOUT, TRACED_ROLLOUT, forecast

SAMPLER_POOL = "sampler"
"""Pool of the ranks that only sample."""


class _Base(NamedTuple):
    """A base model, in bytes on each rank."""

    phases: list[Phase]
    """Training of one model that starts from it."""
    weights: int
    """Weights of its rollout. A published version has as many."""


def plan_service(config: ServeConfig, memory: int | None, lora_rank: int, samples: int) -> Plan:
    """Forecast a server whose clients train adapters of `lora_rank`, or all weights if it is 0.

    `samples` is the number of responses that a rank generates at once. `memory` is that of each device, or of the whole
    machine if the server uses none.
    """
    device = config.device or available_device("auto").type
    on_cpu = device == "cpu"
    runs = {folder: _supervised(config, folder, device, lora_rank) for folder in config.base_models().values()}
    for run in runs.values():
        check_supported(run)
    limit = memory_per_rank(next(iter(runs.values())), memory)
    if on_cpu:  # ranks that only sample share the memory of the machine
        limit = limit * config.ranks // (config.ranks + config.sampling_ranks)
    bases = {
        folder: _Base(forecast(run, MODEL), model_size(config.rollout_config(folder, device)).weights)
        for folder, run in runs.items()
    }
    trained = max(bases, key=lambda folder: max(phase.peak for phase in bases[folder].phases))
    phases = bases[trained].phases
    at_rest = phases[-1].rest
    version = max(base.weights for base in bases.values())
    versions = config.max_versions * version
    sampled = sorted((base.weights for base in bases.values()), reverse=True)[: config.max_samplers]
    trains, sampling = config.max_models * at_rest + (versions // config.ranks if on_cpu else 0), sum(sampled)
    is_separate = config.sampling_ranks > 0
    # Besides the weights of the rollouts, ranks that also train have the memory of training.
    resident = sampling if is_separate else trains + sampling
    generator = _generator(config, trained, device, limit, resident, samples)
    # One model computes, or its rollout. All others keep their memory.
    others = trains - at_rest
    if not is_separate:
        others += sampling + (generator.rest if generator else 0)
    rows = [Row(GLOBAL_POOL, MODEL, phase.name, phase.peak + others, phase.disk, phase.host) for phase in phases]
    if generator is not None:
        pool = SAMPLER_POOL if is_separate else GLOBAL_POOL
        rows.append(Row(pool, ROLLOUT, "gen", resident + generator.gen, 0))
    generated = f"{samples} rows of {config.context_length(trained)} tokens"
    return Plan(rows, limit, list(_notes(config, on_cpu, version, lora_rank, generated, generator)))


def _supervised(config: ServeConfig, folder: str, device: str, lora_rank: int) -> SFTConfig:
    """Return the config of a supervised run that trains with the engine of the server."""
    length = config.context_length(folder)
    values = {
        "model": folder,
        "lora": lora_rank,
        "engine": config.engine_name(),
        "device": device,
        "devices": config.ranks,
        "trainer.nnodes": config.nnodes,
        "data": folder,  # is not read
        "val_data": "null",
        "max_length": length,
        "batch": config.max_data * config.world_size,
        "data.use_dynamic_bsz": True,
        "data.max_token_len_per_gpu": max(config.max_tokens, length),
        **dict(_engine_keys(config.engine_options(device != "cpu"))),
    }
    (run,) = compose([f"{key}={value}" for key, value in values.items()], SFTConfig)
    return run


def _engine_keys(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a supervised run that set these options of its engine."""
    leaves = [key for key in leaf_fields(SFTConfig) if not key.startswith(("data.", "model.", "trainer."))]
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _engine_keys(value, f"{prefix}{name}.")
            continue
        keys = [leaf for leaf in leaves if f".{leaf}".endswith(f".{prefix}{name}")]
        if len(keys) != 1:
            raise ConfigError(f"camshaft plan does not forecast engine_kwargs.{prefix}{name}; omit it")
        yield keys[0], value


def _generator(
    config: ServeConfig, folder: str, device: str, memory: int, resident: int, samples: int
) -> Generator | None:
    """Return the memory of the rollout of a base model besides its weights; None if it is unknown.

    A server does not free the KV cache between samples.
    """
    if device == "cpu":
        return _generator_on_cpu(config, folder, samples) if config.rollout == TRACED_ROLLOUT else None
    if config.rollout not in GENERATORS:
        return None
    engine = config.rollout_config(folder, device).model_copy(update={"free_cache_engine": False})
    return GENERATORS[config.rollout](engine, model_size(engine), memory, resident, samples)


def _generator_on_cpu(config: ServeConfig, folder: str, samples: int) -> Generator:
    """Trace a run that generates as the server does, whose generator shares the weights of an engine."""
    length = config.context_length(folder)
    values = {
        "model": folder,
        "engine": SINGLE_PROCESS_ENGINE,
        "rollout": config.rollout,
        "algorithm": "reinforce_plus_plus",
        "n": 1,
        "device": "cpu",
        "devices": 1,
        "data": folder,  # is not read
        "val_data": "null",
        "prompt_length": length // 2,
        "response_length": length - length // 2,
        "batch": samples,
    }
    (run,) = compose([f"{key}={value}" for key, value in values.items()], PPOConfig)
    phases = {phase.name: phase for phase in forecast(run, POLICY)}
    generating = phases["gen"].peak - phases["update_actor"].rest  # besides the weights and states of the actor
    engine = config.rollout_config(folder, "cpu").model_copy(update={"free_cache_engine": False})
    cache = GENERATORS[config.rollout](engine, model_size(engine), UNLIMITED, 0, samples)
    assert cache is not None
    return Generator(0, generating, cache.rest)


def _notes(
    config: ServeConfig, on_cpu: bool, version: int, lora_rank: int, generated: str, generator: Generator | None
) -> Iterator[str]:
    trained = f"adapters of rank {lora_rank} (--lora-rank)" if lora_rank else "all weights (--lora-rank 0)"
    yield f"{config.max_models} models in training (max_models), each with {trained}"
    yield f"sampling of {generated}, prompt and response, at once on each rank (--samples)"
    place = "are part of each phase" if on_cpu else "are in the host memory of each machine"
    versions, files = (format_size(count * version) for count in (config.max_versions, config.max_published))
    yield f"published weights of {versions} (max_versions={config.max_versions}) {place}"
    yield f"those of each model need up to {files} of the disk (max_published={config.max_published})"
    if generator is None:
        yield f"gen: the memory of rollout={config.rollout} is not forecast"
    yield "the figures are live tensors; processes, libraries and communication buffers need more (docs/plan.md)"
