"""Explain why a run ran out of memory: its forecast and its peak side by side.

with explain_memory_errors(config, arguments):
    run(config, PPOTrainer.open)
"""

import contextlib
import logging
import os
import re
import shlex
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from camshaft.config import PPOConfig
from camshaft.controller.placement import pool_specs
from camshaft.device import peak_memory
from camshaft.errors import WorkerError
from camshaft.masking import mask_arguments
from camshaft.planning.plan_process import PlanUnavailable, plan_in_process
from camshaft.subprocesses import resident_memory

SECONDS = 60.0
"""Time limit of the forecast."""
BUFFERS = 100 << 20
"""Upper bound of the growth of a process besides its tensors, for libraries and buffers (docs/plan.md)."""
PHASES = {
    "init_model": "build",
    "sync_weights": "sync",
    "publish": "sync",
    "publish_base": "sync",
    "portable_snapshot": "sync",
    "receive_weights": "gen",
    "receive_base": "gen",
    "generate_sequences": "gen",
    "compute_rm_score": "reward",
    "compute_log_prob": "old_log_prob",
    "compute_ref_log_prob": "ref",
    "compute_values": "values",
    "update_critic": "update_critic",
    "update_actor": "update_actor",
    "save_checkpoint": "save",
}
"""Phases of `camshaft plan` by the methods of the roles."""
MESSAGE = re.compile("MemoryError|out of memory|an't allocate memory|annot allocate memory|memory runs? out")
"""Messages of torch, Python, the operating system and the controller, also for ranks that the kernel killed."""
KERNEL_COUNTERS = Path("/proc/vmstat")

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def explain_memory_errors(config: PPOConfig, arguments: Sequence[str]) -> Iterator[None]:
    """Add a memory report to an error in the block that says that memory ran out.

    `arguments` are those with which `camshaft plan` forecasts the run.
    """
    start, earlier_kills = resident_memory(os.getpid()), kernel_kills()
    with contextlib.suppress(OSError):  # reset VmHWM, because a notebook may have used more memory before the run
        Path("/proc/self/clear_refs").write_bytes(b"5")
    try:
        yield
    except Exception as error:
        growth = resident_memory(os.getpid(), "VmHWM") - start
        with contextlib.suppress(MemoryError):
            if is_out_of_memory(error) and not _killed_by_another_process(error, config, earlier_kills):
                headline = str(error).partition("\n")[0] or type(error).__name__
                message = "%s\nMemory may have run out. Forecasting the memory of the run (at most %.0f s)"
                logger.warning(message, headline, SECONDS)
                error.add_note(memory_report(error, config, arguments, growth))
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error, or one that caused it, says that memory ran out."""
    return any(MESSAGE.search(f"{type(each).__name__}: {each}") for each in _chain(error))


def kernel_kills() -> int | None:
    """Return how many processes of this machine the kernel has killed because memory ran out, or None if unknown."""
    with contextlib.suppress(OSError):
        if match := re.search(r"^oom_kill (\d+)$", KERNEL_COUNTERS.read_text(encoding="ascii"), re.MULTILINE):
            return int(match[1])
    return None


def _killed_by_another_process(error: BaseException, config: PPOConfig, earlier_kills: int | None) -> bool:
    """Return True if SIGKILL ended a process although the kernel has killed none for lack of memory since the start.

    This is known only for a run on one machine.
    """
    is_kill = "SIGKILL" in str(error)
    return is_kill and config.trainer.nnodes == 1 and earlier_kills is not None and kernel_kills() == earlier_kills


def memory_report(error: BaseException, config: PPOConfig, arguments: Sequence[str], growth: int) -> str:
    """Return the forecast and the peak of the phase that failed, and the command that shows the entire forecast.

    `growth` is that of this process, and is used if no rank in another process has failed. If `camshaft plan` does not
    support the run or takes too long, the report has no forecast.
    """
    phase, peak = phase_of(error), _peak(error, config, growth)
    for each in _chain(error):
        traceback.clear_frames(each.__traceback__)  # frees the tensors of the step
    is_cpu, ranks = config.trainer.device == "cpu", sum(spec.world_size for spec in pool_specs(config))
    # The run exceeded the memory at this peak, so a change must lower the peak to nine tenths.
    memory = (peak - BUFFERS) * 9 // 10 * ranks if is_cpu and peak is not None and peak > 2 * BUFFERS else None
    option = [] if memory is None else ["--memory", f"{memory >> 20}MiB"]
    lines = [f"Memory {'may have run' if 'SIGKILL' in str(error) else 'ran'} out in {phase or 'an unknown phase'}:"]
    measured = "not measured" if peak is None else _mib(peak)
    try:
        plan = plan_in_process(arguments, memory, SECONDS)
    except PlanUnavailable as reason:
        lines.append(f"  peak of a rank {measured}; no forecast: {reason}")
    else:
        lines += _forecast_lines(plan, phase, measured)
    command = shlex.join(["camshaft", "plan", *option, *mask_arguments(list(arguments))])
    return "\n".join([*lines, f"To see the forecast of all phases, run: {command}"])


def _forecast_lines(plan: dict[str, Any], phase: str | None, measured: str) -> Iterator[str]:
    """Yield the forecast beside the peak, and the change with which the run fits."""
    for row in [row for row in plan["rows"] if row["phase"] == phase] or [plan["tightest"]]:
        forecast = _mib(row["peak"])
        yield f"  {row['phase']} of {row['role']}: forecast {forecast} of tensors, peak of a rank {measured}"
    if "change" in plan:
        yield f"It fits with {' '.join(plan['change'])}."


def phase_of(error: BaseException) -> str | None:
    """Return the phase in which an error was raised, from the call of a rank or from the stack."""
    for each in _chain(error):
        if isinstance(each, WorkerError) and (match := re.search(r"^\w+\.(\w+) raised|died in (\w+)", str(each))):
            return PHASES.get(match[1] or match[2])
        for frame, _ in traceback.walk_tb(each.__traceback__):
            if frame.f_code.co_name in PHASES:
                return PHASES[frame.f_code.co_name]
    return None


def _peak(error: BaseException, config: PPOConfig, growth: int) -> int | None:
    """Return the peak of the failed rank (`WorkerError.peak_memory`), or of this process if it is the only rank."""
    workers = [each for each in _chain(error) if isinstance(each, WorkerError)]
    if workers:
        return workers[0].peak_memory
    return growth if config.trainer.device == "cpu" else peak_memory(config.trainer.device)


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _mib(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"
