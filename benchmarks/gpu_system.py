"""Parts of `gpu.py` that run on the whole system or on one kernel: weight syncs, shared prompts, GRPO steps, kernels.

    sync_rows(job), prompt_rows(job), steps_rows(job), kernel_rows(job)     # lists of {"what", "measured", numbers}

The time of a weight sync is `Sync.seconds`: waking the rollout, loading the weights, and the checksums on both sides. A
transfer is `load_weights` alone, without checksums. Offloading is repeated, because the first copy to the host also
allocates pinned memory. The phases of a GRPO step are those of the metrics of a run; `gen` includes `sync`.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from camshaft_side import ActorUpdate, Steps
from gpu_model import random_weights, rows_of, settings, with_columns
from gpu_parts import NEEDS_CUDA, Job, median_seconds, synchronize
from transformers import Qwen2Config
from workload import FIRST_WORD, Rows

from camshaft.config.engine import EngineConfig, EngineModel
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.data import write_arithmetic
from camshaft.engine import build_engine
from camshaft.models.attention import packed_attention, packed_kwargs
from camshaft.models.blockwise import Scores
from camshaft.models.packing import Packing
from camshaft.ragged import Ragged
from camshaft.reshard import rollout_mode
from camshaft.rollout.base import BaseRollout, SamplingParams
from camshaft.rollout.builtin.kv_cache import KVCache
from camshaft.rollout.builtin.rollout import TorchRollout
from camshaft.rollout.process.rollout import ProcessRollout

SYNCS = 7
"""Number of weight syncs and of transfers. The first two are discarded; the median of the others is reported."""
MOVES = 3
"""Number of moves in each direction. The last ones are reported, and the first one to the host."""

PHASES = ("gen", "old_log_prob", "update_actor", "sync")

COMPILE = "actor_rollout_ref.actor.use_torch_compile"


def sync_rows(job: Job) -> list[dict[str, Any]]:
    """Measure offloading, and syncs from the sharded engine to the built-in generator; on CUDA, also with a larger
    model."""
    rows = _large_rows(job) if job.on_cuda else []
    side = ActorUpdate(job.folder, **(settings(job.size, job.device, job.dtype) | {COMPILE: False}))
    engine: Any = side.actor.engine
    rows += [_synced(job, job.folder, engine, kind) for kind in (TorchRollout, ProcessRollout)]
    side.update(rows_of(job.size, 1))  # creates the state of the optimizer
    return [*rows, *(_moved(job, engine, part) for part in ("model", "optimizer"))]


def _large_rows(job: Job) -> list[dict[str, Any]]:
    """Measure syncs of a model in the shape of Qwen2.5-7B."""
    folder = job.folder / "7B"
    Qwen2Config(
        hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, intermediate_size=18_944,
        vocab_size=152_064, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    model = EngineModel(path=str(folder), random_init=True)
    engine: Any = build_engine("fsdp", EngineConfig(model=model, device=job.device))
    with random_weights():
        engine.init_model()
    rows = [_synced(job, folder, engine, kind) for kind in (TorchRollout, ProcessRollout)]
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def _synced(job: Job, folder: Path, engine: Any, kind: type[TorchRollout] | type[ProcessRollout]) -> dict[str, Any]:
    config: Any = {"model_path": str(folder), "dtype": job.dtype, "device": job.device, "max_model_len": 64}
    rollout = kind(RolloutEngineConfig(**config, enforce_eager=not job.on_cuda))
    rollout.sleep()
    prompts = Ragged.from_rows([torch.full((8,), FIRST_WORD)] * 2)
    with rollout_mode(engine, rollout):
        rollout.generate_sequences(prompts, SamplingParams(max_tokens=32))  # joins the weights of fused decode steps
    syncs, transfers = [], []
    for _ in range(SYNCS):
        with rollout_mode(engine, rollout) as sync:
            syncs.append(sync)
        transfers.append(_transfer(job, engine, rollout))
    row: dict[str, Any] = {"gigabytes": syncs[0].bytes / 1e9, "tensors": len(syncs[0].digests)}
    row["seconds"] = statistics.median(sync.seconds for sync in syncs[2:])
    row["transfer_seconds"] = statistics.median(transfers[2:])
    row["gb_per_second"] = row["gigabytes"] / row["transfer_seconds"]
    row["of_copy_rate"] = 2e9 * row["gb_per_second"] / job.rates.copy
    form = (
        "{seconds:.4f} s; without checksums {transfer_seconds:.4f} s, {gb_per_second:.0f} GB/s, {of_copy_rate:.0%} of "
        "the copy rate"
    )
    what = "sync of {gigabytes:.1f} GB in {tensors} tensors to ".format(**row) + kind.__name__
    return {"what": what, "measured": form.format(**row), **row}


def _transfer(job: Job, engine: Any, rollout: BaseRollout) -> float:
    """Return the seconds of a weight sync without checksums."""
    with engine.eval_mode():
        rollout.wake_up()
        synchronize(job.device)
        start = time.perf_counter()
        dtype_of = None if rollout.casts_weights else rollout.sync_dtype
        rollout.load_weights(engine.named_weights(dtype_of=dtype_of))
        synchronize(job.device)
        seconds = time.perf_counter() - start
        rollout.sleep()
    return seconds


def _moved(job: Job, engine: Any, part: str) -> dict[str, Any]:
    if not job.on_cuda:
        return {"what": f"offload of the {part}", "measured": NEEDS_CUDA}
    parts = {"model": part == "model", "optimizer": part == "optimizer"}
    times: dict[str, list[float]] = {"down": [], "up": []}
    for _ in range(MOVES):
        for name, target in (("down", "cpu"), ("up", job.device)):
            synchronize(job.device)
            start = time.perf_counter()
            engine.to(target, **parts)
            synchronize(job.device)
            times[name].append(time.perf_counter() - start)
    row = {"first_down": times["down"][0], "down": times["down"][-1], "up": times["up"][-1]}
    form = "to the host {down:.2f} s ({first_down:.2f} s the first time), back {up:.2f} s"
    return {"what": f"offload of the {part}", "measured": form.format(**row), **row}


def steps_rows(job: Job) -> list[dict[str, Any]]:
    """Measure GRPO steps by phase: 64 prompts, 8 responses of 512 tokens each."""
    prompts, answer, budget = (64, 512, 32_768) if job.on_cuda else (4, 8, 2048)
    write_arithmetic(job.folder / "sums", left=(0, 999), right=(0, 999), num_train=4 * prompts, num_heldout=16)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    more = {
        f"{actor}.strategy": "fsdp",
        f"{actor}.fsdp_config.mixed_precision.param_dtype": "null" if job.dtype == "float32" else job.dtype,
        f"{actor}.ppo_max_token_len_per_gpu": budget,
        f"{actor}.ppo_mini_batch_size": prompts // 2,
        COMPILE: False,
        f"{rollout}.n": 8,
        f"{rollout}.dtype": job.dtype,
        f"{rollout}.enforce_eager": not job.on_cuda,
        f"{rollout}.ignore_eos": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "data.train_files": job.folder / "sums" / "train.parquet",
        "data.train_batch_size": prompts,
        "data.max_prompt_length": 64 if job.on_cuda else 16,
        "data.max_response_length": answer,
        "trainer.device": job.device,
    }
    steps = Steps(job.folder, learning_rate=1e-6, **more)
    timings = [steps.step() for _ in range(3)][1:]  # the first step compiles kernels
    row: dict[str, Any] = {
        name: statistics.mean(step[f"timing_s/{name}"] for step in timings) for name in (*PHASES, "step")
    }
    row["measured"] = "{step:.1f} s: ".format(**row) + ", ".join(f"{name} {row[name]:.2f} s" for name in PHASES)
    return [{"what": f"GRPO step, {prompts} prompts x 8 x {answer} tokens", **row}]


def prompt_rows(job: Job) -> list[dict[str, Any]]:
    """Measure actor updates in which several responses share a prompt, which is computed once or for each response."""
    prompts, samples, length = (16, 8, 512) if job.on_cuda else (2, 2, 8)
    rows = _rows_with_common_prompts(job, prompts, samples, length)
    results = []
    for share in (True, False):
        side = ActorUpdate(job.folder, **_settings_of_prompts(job, prompts, samples, length, share))
        side.update(rows)  # allocates memory and loads kernels
        seconds, result = _timed(job, lambda side=side: side.update(rows))
        results.append({"seconds": seconds, **result})
        del side
        gc.collect()
        if job.on_cuda:
            torch.cuda.empty_cache()
    tokens = sum(map(len, rows.prompts)) + sum(map(len, rows.responses))
    row: dict[str, Any] = {f"{name}_once": results[0][name] for name in results[0]}
    row |= {f"{name}_each": results[1][name] for name in results[1]}
    row |= {"ratio": row["seconds_each"] / row["seconds_once"], "tokens_per_second": tokens / row["seconds_once"]}
    form = (
        "{seconds_once:.3f} s if a prompt is computed once, {seconds_each:.3f} s if it is computed for each response: "
        "{ratio:.2f} times; loss {loss_once:.5f} and {loss_each:.5f}, "
        "gradient norm {grad_norm_once:.4f} and {grad_norm_each:.4f}"
    )
    what = f"update of {prompts} prompts x {samples} responses, {length} tokens each"
    return [{"what": what, "measured": form.format(**row), **row}]


def _timed(job: Job, run: Callable[[], dict[str, float]]) -> tuple[float, dict[str, float]]:
    """Return the seconds of the faster of two calls, and its result."""
    results = []
    for _ in range(2):
        synchronize(job.device)
        start = time.perf_counter()
        result = run()
        synchronize(job.device)
        results.append((time.perf_counter() - start, result))
    return min(results, key=lambda pair: pair[0])


def _rows_with_common_prompts(job: Job, prompts: int, samples: int, length: int) -> Rows:
    random = torch.Generator().manual_seed(1)

    def drawn(count: int) -> list[torch.Tensor]:
        return list(torch.randint(FIRST_WORD, job.size.shape.vocab_size, (count, length), generator=random))

    repeated = [prompt for prompt in drawn(prompts) for _ in range(samples)]
    return with_columns(repeated, drawn(prompts * samples), job.size, random)


def _settings_of_prompts(job: Job, prompts: int, samples: int, length: int, share: bool) -> dict[str, Any]:
    return settings(job.size, job.device, job.dtype) | {
        COMPILE: False,
        "actor_rollout_ref.actor.ppo_mini_batch_size": prompts,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.model.use_prefix_grouper": share,
        "actor_rollout_ref.rollout.n": samples,
        "data.train_batch_size": prompts,
        "data.max_prompt_length": length,
        "data.max_response_length": length,
    }


# -- kernels --------------------------------------------------------------------------------------


def kernel_rows(job: Job) -> list[dict[str, Any]]:
    """Measure single kernels: attention over the KV cache, sampling, variable-length attention, and casting copies."""
    if not job.on_cuda:
        return [{"what": "kernels", "measured": NEEDS_CUDA}]
    attention = [_cache_attention(job, rows, length) for rows, length in ((256, 768), (64, 4096), (16, 768))]
    return [*attention, _sampling(job), _packed_attention(job), _casting_copies(job)]


def _replayed(run: Callable[[], Any], device: str, calls: int = 10) -> float:
    """Return the seconds of one call, replayed in a CUDA graph."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return median_seconds(graph.replay, device) / calls


def _cache_attention(job: Job, rows: int, length: int) -> dict[str, Any]:
    from camshaft.rollout.builtin.cuda.kernels import TritonDecodeStep

    shape, layer = job.size.shape, SimpleNamespace(layer_idx=0)
    dim = shape.hidden // shape.heads
    cache = KVCache(Qwen2Config(num_hidden_layers=1), length)
    cache.reserve(rows, length)
    query, key, value = (
        torch.randn(rows, heads, 1, dim, device=job.device, dtype=torch.bfloat16)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    for block in cache.layer(layer, key, value):  # pyright: ignore[reportArgumentType]
        block.normal_()
    positions = torch.randint(length // 2, length, (rows,), device=job.device)
    step: Any = TritonDecodeStep(cache, positions)
    seconds = _replayed(lambda: step.attend(layer, query, key, value, Scores(dim**-0.5), None), job.device)
    read = 2 * int((positions + 1).sum()) * shape.kv_heads * dim * 2
    row = {"microseconds": 1e6 * seconds, "of_copy_rate": read / seconds / job.rates.copy}
    measured = "{microseconds:.0f} µs, {of_copy_rate:.0%} of the copy rate".format(**row)
    return {"what": f"attention over the KV cache, {rows} rows of up to {length} tokens", "measured": measured, **row}


def _sampling(job: Job) -> dict[str, Any]:
    from camshaft.rollout.builtin.cuda import sampling
    from camshaft.rollout.sampling import draw, restrict

    rows, size = job.size.batch, job.size.shape.vocab_size
    logits = torch.randn(rows, size, device=job.device, dtype=torch.bfloat16)
    uniforms = torch.rand(rows, device=job.device, dtype=torch.float64)
    row = {
        "microseconds": 1e6 * _replayed(lambda: sampling.draw(logits, uniforms, 0.8), job.device),
        "torch_microseconds": 1e6 * median_seconds(lambda: draw(restrict(logits, 0.8), uniforms), job.device),
    }
    measured = "{microseconds:.0f} µs; operators of torch {torch_microseconds:.0f} µs".format(**row)
    return {"what": f"sampling of {rows} x {size} logits", "measured": measured, **row}


def _packed_attention(job: Job) -> dict[str, Any]:
    shape, packing = job.size.shape, Packing([4096, 1000, 777, 8192, 1, 2318])
    dim = shape.hidden // shape.heads
    query, key, value = (
        torch.randn(1, heads, packing.size, dim, device=job.device, dtype=torch.bfloat16).requires_grad_()
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    kwargs, module = packed_kwargs(packing, job.device), torch.nn.Identity()

    def forward() -> torch.Tensor:
        return packed_attention(module, query, key, value, scaling=dim**-0.5, **kwargs)[0]

    def both() -> None:
        out = forward()
        torch.autograd.grad(out, [query, key, value], torch.ones_like(out))

    with torch.no_grad():
        once = median_seconds(forward, job.device)
    work = 4 * shape.heads * dim * sum(n * (n + 1) // 2 for n in packing.lengths)
    row = {"forward": work / once / 1e12, "backward": 2.5 * work / (median_seconds(both, job.device) - once) / 1e12}
    measured = "{forward:.0f} TFLOP/s forward, {backward:.0f} backward".format(**row)
    return {"what": f"attention over packed rows, {packing.size} tokens", "measured": measured, **row}


def _casting_copies(job: Job) -> dict[str, Any]:
    """Measure copies of 20 float32 weights of 68 million elements to bfloat16, one by one and all in one launch."""
    sources = [torch.randn(18_944, 3584, device=job.device) for _ in range(20)]
    targets = [torch.empty_like(source, dtype=torch.bfloat16) for source in sources]

    def copy_each() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    moved = sum(tensor.nbytes for tensor in (*sources, *targets))
    row = {
        "each": moved / median_seconds(copy_each, job.device) / 1e12,
        "together": moved / median_seconds(lambda: torch._foreach_copy_(targets, sources), job.device) / 1e12,  # pyright: ignore[reportPrivateImportUsage]
    }
    measured = "{each:.2f} TB/s one by one, {together:.2f} TB/s in one launch".format(**row)
    return {"what": "copies of large weights from float32 to bfloat16", "measured": measured, **row}
