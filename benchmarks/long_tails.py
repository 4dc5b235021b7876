"""Single answers with long-tailed lengths compared with equal lengths, on the built-in generator.

    python benchmarks/long_tails.py --out benchmarks/results/long_tails.md

Lengths are lognormal with sigma 1, at most 16 medians. More answers than slots are generated, so that slots are
refilled. Sides take turns within each round:

- equal: all answers have the mean length
- equal, longer: a quarter as many answers, all so long that a token needs as many positions as with the lengths
- long-tailed: the lengths
- small pages: the lengths, and no huge pages, as in a cache of more than 64 MiB, so unused positions need no memory
- one class: the long-tailed lengths, with attention over as many positions as the longest live row has

Numbers of positions are exact. The needed ones are those of each row itself; a decode step reads more of them. The size
of the cache is that of its pages in memory (Linux), and the needed size is that of the positions of the live rows.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from conversations import Counted
from machine import machine

from camshaft.config.engine import EngineModel
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.models.loader import stored_weights
from camshaft.models.tiny import make_tiny_model
from camshaft.ragged import Ragged
from camshaft.rollout.base import SamplingParams
from camshaft.rollout.builtin import kv_cache, length_classes, scheduler
from camshaft.rollout.builtin.kv_cache import KVCache
from camshaft.rollout.builtin.steps import DecodeStep, LengthClass

PROMPT = 16
EXCLUSIVE = 56
"""Flag of a page in /proc/self/pagemap that only one process maps."""
LARGE = kv_cache.MAX_HUGE_PAGE_BYTES
EVERY = 32
"""Number of decode steps between two measurements of the memory, besides those with more positions than before."""
SIDES = ("equal", "equal, longer", "long-tailed", "small pages", "one class")

HEADER = """\
| answers | time per token | steps | positions read per needed one | needed per token | cache / needed | needed |
|---|---|---|---|---|---|---|"""


class CountedStep(DecodeStep):
    """A decode step that counts positions, and measures the memory in use."""

    measures = False
    read = needed = peak = peak_needed = calls = 0

    def attend(self, module: Any, *arguments: Any) -> torch.Tensor:
        if module.layer_idx == 0:
            needed = int(self.positions.sum()) + len(self.positions)
            CountedStep.read += sum((rows.stop - rows.start) * length for rows, length in self.spans)
            CountedStep.needed += needed
            if CountedStep.measures and (needed > CountedStep.peak_needed or CountedStep.calls % EVERY == 0):
                CountedStep.peak = max(CountedStep.peak, resident(self.cache))
            CountedStep.peak_needed = max(CountedStep.peak_needed, needed)
            CountedStep.calls += 1
        return super().attend(module, *arguments)


@dataclass
class Side:
    """Seconds per token of each round, and counts."""

    seconds: list[float]
    steps: float = 0
    read: int = 0
    needed: int = 0
    tokens: int = 0
    cache: float = 0
    needed_cache: float = 0


def resident(cache: KVCache) -> int:
    """Return the size of the pages of the keys and values that have been written.

    The flag of a page that only this process maps is not set for the page of zeros, which is read where none is.
    """
    count = 0
    with Path("/proc/self/pagemap").open("rb") as pages:
        for tensor in itertools.chain(*cache.layers.values()):
            first, last = (
                address // mmap.PAGESIZE for address in (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
            )
            pages.seek(8 * first)
            entries = torch.frombuffer(bytearray(pages.read(8 * (last + 1 - first))), dtype=torch.int64)
            count += int((entries >> EXCLUSIVE & 1).sum())
    return count * mmap.PAGESIZE


def one_class(lengths: list[int]) -> tuple[list[LengthClass], list[int]]:
    return [(len(lengths), max(lengths))], [0] * len(lengths)


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Side]:
    median, slots = arguments.median, arguments.slots
    limit = 16 * median
    sampling = SamplingParams(limit, ignore_eos=True)
    config = RolloutEngineConfig(model_path=str(folder), max_model_len=limit + PROMPT, max_num_seqs=slots)
    rollout = Counted(config)
    random = torch.Generator().manual_seed(1)
    tail = (torch.randn(arguments.answers * slots, generator=random).exp() * median).long().clamp(1, limit)
    equal = torch.full_like(tail, round(float(tail.float().mean())))
    longer = round(2 * float((tail * (tail - 1) / 2).sum() / tail.sum()))
    lengths: dict[str, torch.Tensor] = dict.fromkeys(SIDES, tail)
    lengths |= {"equal": equal, "equal, longer": torch.full_like(tail[::4], longer)}
    prompts = [(torch.arange(PROMPT) * 7 + i) % 100 for i in range(len(tail))]
    sides = {name: Side([]) for name in SIDES}
    for number in range(arguments.rounds + 1):  # the first one warms up
        for name in SIDES[:: -1 if number % 2 else 1]:
            limits = lengths[name]
            rollout.limit_of = limits
            CountedStep.read = CountedStep.needed = CountedStep.peak = CountedStep.peak_needed = 0
            CountedStep.calls, CountedStep.measures = 0, number == 0  # the measurement takes time
            plan = one_class if name == "one class" else length_classes.plan
            rollout.sleep()
            rollout.wake_up()
            rollout.load_weights(stored_weights(EngineModel(path=str(folder))))
            start = time.perf_counter()
            with (
                mock.patch.object(scheduler, "DecodeStep", CountedStep),
                mock.patch.object(length_classes, "plan", plan),
                mock.patch.object(kv_cache, "MAX_HUGE_PAGE_BYTES", 0 if name == "small pages" else LARGE),
            ):
                rows = Ragged.from_rows(prompts[: len(limits)])
                out = rollout.generate_sequences(rows, sampling, torch.arange(len(limits)))
            seconds = time.perf_counter() - start
            side, position = sides[name], sum(rollout.cache.position_bytes.values())
            side.tokens, side.steps = len(out.responses.values), out.metrics["decode_steps"]
            side.read, side.needed = CountedStep.read, CountedStep.needed
            if number:
                side.seconds.append(seconds / side.tokens)
            else:
                side.cache, side.needed_cache = CountedStep.peak, CountedStep.peak_needed * position
    return sides


def line(name: str, sides: dict[str, Side]) -> str:
    side = sides[name]
    used = [f"{side.cache / side.needed_cache:.2f}", f"{side.needed_cache / 2**20:.0f} MiB"]
    ratios = [a / b for a, b in zip(side.seconds, sides["equal"].seconds, strict=True)]
    cells = [
        name,
        f"{statistics.median(ratios):.2f}",
        f"{side.steps:,.0f}",
        f"{side.read / side.needed:.2f}",
        f"{side.needed / side.tokens:.0f}",
        *used,
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--answers", type=int, default=12, help="answers per slot")
    parser.add_argument("--median", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder, hidden=arguments.hidden, layers=arguments.layers, seed=3)
        sides = measure(Path(folder), arguments)
    text = f"""# Long-tailed lengths

Time per sampled token relative to equal lengths, and positions of the KV cache that decode steps read: hidden size
{arguments.hidden}, {arguments.layers} layers, {arguments.slots} slots, {arguments.answers * arguments.slots} answers of
a median of {arguments.median} tokens. Median of {arguments.rounds} rounds on one thread, in which the sides take turns.

{machine()}

{HEADER}
{chr(10).join(line(name, sides) for name in SIDES)}

"needed" is the size of the keys and values of the live rows at their peak, and "cache / needed" that of the cache at
its own, relative to it.
"""
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
