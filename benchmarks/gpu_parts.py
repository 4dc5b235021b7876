"""Parts of `gpu.py` that run in one process: log-prob memory, generation, and host waits inside a micro-batch.

    memory_rows(job), decode_rows(job), syncs_rows(job)     # lists of {"what": ..., "measured": ..., numbers}

Parts that only CUDA can measure report `NEEDS_CUDA` on other devices.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import roofline
import torch
import transformers
from camshaft_side import ActorUpdate
from gpu_model import DTYPES, Size, rows_of, settings
from roofline import Group, Rates
from torch import Tensor
from torch._C._autograd import DeviceType

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.engine.micro_batches import MicroBatches
from camshaft.engine.torch_engine import TorchEngine
from camshaft.models.linear_logprob import linear_logprob
from camshaft.ragged import Ragged
from camshaft.rollout.base import SamplingParams
from camshaft.rollout.builtin.rollout import TorchRollout

NEEDS_CUDA = "needs CUDA"
OUT_OF_MEMORY = "out of memory"

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "Memcpy DtoH")
"""Prefixes of profiler events that make the host wait."""

MARK = "micro_batch"


@dataclass(frozen=True)
class Job:
    """Inputs of all parts."""

    size: Size
    folder: Path
    device: str
    dtype: str
    rates: Rates
    rounds: int

    @property
    def on_cuda(self) -> bool:
        return self.device.startswith("cuda")


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def in_process(script: str, task: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Run a script with `--task` and return what it prints last, or the reason for which it ended, in "failed"."""
    command = [sys.executable, str(Path(__file__).parent / script), "--task", json.dumps(task)]
    try:
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {seconds:.0f} s"}
    if process.returncode:
        return {"failed": f"exit status {process.returncode}"}  # its error is on standard error
    return json.loads(process.stdout.splitlines()[-1])


def answer(run: Callable[[dict[str, Any]], dict[str, Any]], task: str) -> None:
    """Run a task of `in_process` and print its result."""
    try:
        result = run(json.loads(task))
    except torch.OutOfMemoryError as error:
        print(error, file=sys.stderr)
        result = {"failed": OUT_OF_MEMORY}
    sys.stdout.write("\n" + json.dumps(result) + "\n")


def write_page(
    out: str, description: str, about: str, how: str, tables: Sequence[str], record: Mapping[str, Any]
) -> None:
    """Write a report as Markdown to <out>.md and its numbers to <out>.json.

    `description` is the docstring of the script: its title, its commands, which are left out, and the rest.
    """
    title, _, rest = description.partition("\n\n")
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    page = [f"# {title.rstrip('.')}", rest.partition("\n\n")[2].strip(), f"{about}. `{command}` {how}".strip(), *tables]
    Path(f"{out}.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    numbers = {"machine": about, "command": command, **record}
    Path(f"{out}.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def median_seconds(run: Callable[[], Any], device: str, times: int = 7) -> float:
    """Return the median time of a call after an untimed one; on CUDA without the launch of its kernels."""
    run()
    timed = roofline.on_cuda if device.startswith("cuda") else roofline.on_cpu
    return statistics.median(timed(run) for _ in range(times))


# -- memory of the log-probs ----------------------------------------------------------------------


def memory_rows(job: Job) -> list[dict[str, Any]]:
    """Measure the peak memory of log-probs and entropy beyond inputs, outputs and gradients, per vocabulary."""
    rows = []
    for vocabulary_size in job.size.vocabularies:
        row: dict[str, Any] = {
            "what": f"vocabulary of {vocabulary_size}, {job.size.head_tokens} tokens",
            "vocabulary": vocabulary_size,
        }
        row |= _head_memory(job, vocabulary_size)
        form = (
            "{forward_mib:.0f} MiB forward, {backward_mib:.0f} with backward, beside gradients of {gradients_mib:.0f}"
        )
        row["measured"] = form.format(**row) if job.on_cuda else NEEDS_CUDA
        rows.append(row)
    return rows


def _head_memory(job: Job, vocabulary_size: int) -> dict[str, float]:
    options: Any = {"device": job.device, "dtype": DTYPES[job.dtype]}
    hidden = torch.randn(job.size.head_tokens, job.size.shape.hidden, **options).requires_grad_()
    weight = torch.randn(vocabulary_size, job.size.shape.hidden, **options).mul_(0.02).requires_grad_()
    targets = torch.randint(vocabulary_size, (len(hidden),), device=job.device)

    def forward() -> Tensor:
        log_probs, entropy, _ = linear_logprob(hidden, weight, targets, outputs=("entropy",))
        return torch.stack([log_probs, log_probs if entropy is None else entropy])

    forward().sum().backward()  # libraries allocate their workspaces here
    hidden.grad = weight.grad = None
    outputs = 2 * 4 * len(hidden)
    with torch.no_grad():
        once = _peak(job, forward)
    both = _peak(job, lambda: forward().sum().backward())
    gradients = 4 * hidden.numel() + weight.nbytes  # the hidden states' gradient is accumulated in float32
    if not job.on_cuda:
        return {}
    return {
        "forward_mib": (once - outputs) / 2**20,
        "backward_mib": (both - outputs - gradients) / 2**20,
        "gradients_mib": gradients / 2**20,
    }


def _peak(job: Job, run: Callable[[], Any]) -> int:
    """Return the peak memory minus the memory before the call, in bytes; 0 on other devices than CUDA."""
    if not job.on_cuda:
        run()
        return 0
    torch.cuda.reset_peak_memory_stats(job.device)
    before = torch.cuda.memory_allocated(job.device)
    run()
    return torch.cuda.max_memory_allocated(job.device) - before


# -- generation -----------------------------------------------------------------------------------


def decode_rows(job: Job) -> list[dict[str, Any]]:
    """Measure decode steps of the built-in generator: the time of all tokens minus that of the first."""
    return [_decoded(job, eager) if eager or job.on_cuda else _not_here() for eager in (True, False)]


def _not_here() -> dict[str, Any]:
    return {"what": "enforce_eager=False", "measured": NEEDS_CUDA}


def _decoded(job: Job, eager: bool) -> dict[str, Any]:
    size = job.size
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = load(job.folder, dtype=DTYPES[job.dtype]).to(job.device)
    rollout = TorchRollout(
        RolloutEngineConfig(
            model_path=str(job.folder),
            dtype=job.dtype,  # pyright: ignore[reportArgumentType]
            device=job.device,
            max_model_len=size.prompt + size.answer,
            max_num_seqs=size.batch,
            enforce_eager=eager,
        )
    )
    rollout.load_weights((name, weight.detach()) for name, weight in model.named_parameters())
    random = torch.Generator().manual_seed(7)
    prompts = torch.randint(3, size.shape.vocab_size, (size.batch, size.prompt), generator=random)
    rows = Ragged.from_rows(list(prompts))

    def seconds(tokens: int) -> float:
        synchronize(job.device)
        start = time.perf_counter()
        out = rollout.generate_sequences(rows, SamplingParams(tokens, ignore_eos=True))
        synchronize(job.device)
        assert len(out.log_probs.values) == tokens * size.batch
        return time.perf_counter() - start

    for tokens in (1, size.answer):
        seconds(tokens)  # allocates memory and captures CUDA graphs
    spent = [seconds(size.answer) - seconds(1) for _ in range(job.rounds)]
    return _decode_row(job, eager, statistics.median(spent))


def decode_work(size: Size, dtype: str) -> roofline.Work:
    """Count all tokens but the first: the weights once per step, keys and values at each row's current length."""

    def upto(tokens: int) -> roofline.Work:
        groups = [Group(size.prompt, [tokens])] * size.batch
        return roofline.generation(size.shape, groups, number=DTYPES[dtype].itemsize)

    total, first = upto(size.answer), upto(1)
    return roofline.Work(total.operations - first.operations, total.bytes - first.bytes)


def _decode_row(job: Job, eager: bool, seconds: float) -> dict[str, Any]:
    size, steps = job.size, job.size.answer - 1
    row = roofline.reached(decode_work(size, job.dtype), seconds, job.rates)
    row |= {"seconds": seconds, "ms": 1000 * seconds / steps, "tokens_per_second": steps * size.batch / seconds}
    form = "{of_copy_rate:.1%} of the bound by bytes, {ms:.2f} ms a step, {tokens_per_second:.0f} tokens/s"
    return {"what": f"enforce_eager={eager}", "measured": form.format(**row), **row}


# -- waits ----------------------------------------------------------------------------------------


def syncs_rows(job: Job) -> list[dict[str, Any]]:
    """Find host waits inside micro-batches of an update, by the profiler's trace and by CUDA's check."""
    names = ("profiler", 'set_sync_debug_mode("error")')
    actor = ActorUpdate(job.folder, **settings(job.size, job.device, job.dtype))
    rows = rows_of(job.size, seed=1)
    actor.update(rows)  # allocations synchronize
    if not job.on_cuda:
        with marked() as passes:
            actor.update(rows)
        return [{"what": name, "micro_batches": len(passes), "measured": NEEDS_CUDA} for name in names]
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with marked() as passes, torch.profiler.profile(activities=activities) as profile:
        actor.update(rows)
    waits = waits_inside(profile.events() or [])
    first = {"what": names[0], "measured": f"{len(waits)} in {len(passes)} micro-batches", "waits": waits}
    return [first | {"micro_batches": len(passes)}, {"what": names[1], **_refused(lambda: actor.update(rows))}]


@contextlib.contextmanager
def marked(around: Callable[[], Any] = contextlib.nullcontext) -> Iterator[list[int]]:
    """Mark the micro-batches in the profiler's trace and run them inside `around()`; yield a number for each."""
    original, passes = TorchEngine.run_micro_batches, list[int]()

    def run(self: Any, micro_batches: MicroBatches) -> None:
        passes.extend(range(len(micro_batches)))
        with torch.profiler.record_function(MARK), around():
            original(self, micro_batches)

    with mock.patch.object(TorchEngine, "run_micro_batches", run):
        yield passes


def waits_inside(events: Any) -> list[str]:
    """Return the names of host events inside marked ranges that wait or start a copy to the host."""
    ranges = [e.time_range for e in events if e.name == MARK and e.device_type == DeviceType.CPU]
    waits = []
    for event in events:
        if not any(r.start <= event.time_range.start <= r.end for r in ranges):
            continue
        if event.device_type == DeviceType.CPU:
            names = [event.name, *(kernel.name for kernel in event.kernels)]
            waits += [name for name in names if name.startswith(WAITS)]
    return waits


def _refused(update: Callable[[], Any]) -> dict[str, Any]:
    @contextlib.contextmanager
    def strict() -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    try:
        with marked(strict) as passes:
            update()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return {"measured": f"refused: {str(error).splitlines()[0]}"}
    return {"measured": f"nothing refused in {len(passes)} micro-batches", "micro_batches": len(passes)}
