"""Streams of programs in which rows join those that are generated, compared with streams by waves.

    python benchmarks/joining_rows.py --out benchmarks/results/joining_rows.md

Programs ask for several answers, one after another, and compute between them for a fixed time. The limits of the
answers are lognormal. Two streams of the built-in generator serve the same programs with the same seeds, and take turns
within each round:

- joining: a row joins those that are generated (the stream of the rollout)
- waves: a row waits for the answers of the call in progress (the stream over any rollout)

Speeds are sampled tokens per second; ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from machine import machine

from camshaft.config.engine import EngineModel
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.models.loader import stored_weights
from camshaft.models.tiny import make_tiny_model
from camshaft.rollout import Answer, SamplingParams, Stream
from camshaft.rollout.builtin.rollout import TorchRollout
from camshaft.rollout.stream import WaveStream

PROGRAMS, TURNS = 32, 4
MEDIAN, SIGMA, LONGEST = 24, 0.8, 160
"""Parameters of the limits of answers, in tokens."""
TOLD = 12
"""Number of tokens behind each answer."""

HEADER = """\
| seconds between answers | waves, tokens/s | joining, tokens/s | ratio of wall times | median wait, waves | joining |
|---|---|---|---|---|---|"""


class Programs:
    """Programs, one thread each, and the answers for which they wait."""

    def __init__(self, stream: Stream, pause: float, number: int):
        self.stream, self.pause, self.number = stream, pause, number
        self.answers: dict[int | str, Answer] = {}
        self.changed = threading.Condition()
        self.num_tokens = 0
        self.waits: list[float] = []

    def run(self) -> float:
        """Run all programs and return the wall time."""
        threads = [threading.Thread(target=self._program, args=(i,), daemon=True) for i in range(PROGRAMS)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            taken = {answer.row_id: answer for answer in self.stream.take(0.02)}
            with self.changed:
                self.answers.update(taken)
                self.changed.notify_all()
        return time.perf_counter() - start

    def _program(self, row: int) -> None:
        numbers = random.Random(1000 * self.number + row)
        context = [3 + row % 7, 5, 8, 4]
        for turn in range(TURNS):
            limit = min(LONGEST, max(1, round(numbers.lognormvariate(0, SIGMA) * MEDIAN)))
            start = time.perf_counter()
            self.stream.put(row, context, SamplingParams(limit, ignore_eos=True), seed=row)
            with self.changed:
                assert self.changed.wait_for(lambda: row in self.answers, 600)
                answer = self.answers.pop(row)
                self.waits.append(time.perf_counter() - start)
                self.num_tokens += len(answer.tokens)
            context = [*context, *answer.tokens, *(4 + turn + i for i in range(TOLD))]
            time.sleep(self.pause)


def measured(rollout: TorchRollout, pause: float, rounds: int) -> str:
    streams = {"waves": WaveStream, "joining": TorchRollout.open_stream}
    seconds: dict[str, list[float]] = {name: [] for name in streams}
    waits: dict[str, list[float]] = {name: [] for name in streams}
    speeds: dict[str, list[float]] = {name: [] for name in streams}
    for number in range(rounds + 1):  # the first one warms up
        counts = set[int]()
        for name in list(streams)[:: 1 - 2 * (number % 2)]:
            with streams[name](rollout) as stream:
                programs = Programs(stream, pause, number)
                spent = programs.run()
            counts.add(programs.num_tokens)
            if number:
                seconds[name].append(spent)
                speeds[name].append(programs.num_tokens / spent)
                waits[name] += programs.waits
        assert len(counts) == 1
    ratio = statistics.median(waves / joining for waves, joining in zip(*seconds.values(), strict=True))
    cells = [f"{statistics.median(speeds[name]):,.0f}" for name in streams]
    cells += [f"{ratio:.2f}", *(f"{statistics.median(waits[name]):.2f} s" for name in streams)]
    return f"| {pause:g} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pauses", type=lambda text: [float(part) for part in text.split(",")], default=[0, 0.2, 1])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder, hidden=128, layers=4, seed=3)
        rollout = TorchRollout(RolloutEngineConfig(model_path=folder, max_model_len=1024))
        rollout.load_weights(stored_weights(EngineModel(path=folder)))
        rows = [measured(rollout, pause, arguments.rounds) for pause in arguments.pauses]
    text = f"""# Rows that join a running batch

{PROGRAMS} programs ask for {TURNS} answers each, whose limits are lognormal with the median {MEDIAN} and the maximum
{LONGEST}. The ratio is that of the wall times of waves and of joining rows. Median of {arguments.rounds} rounds on one
thread, in which the sides take turns.

{machine()}

{HEADER}
{chr(10).join(rows)}
"""
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
