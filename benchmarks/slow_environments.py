"""Episodes with slow environments: answers in waves compared with answers as soon as an environment has acted.

    python benchmarks/slow_environments.py --out benchmarks/results/slow_environments.md

The environment waits in `async def step`, a lognormal time with sigma 1 that is a function of episode and turn. Both
schedules play the same episodes in turn within each round; ratios are medians of the ratios within a round. The lower
bound is the time of the episode whose calls take the longest, without the policy.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from machine import machine

from camshaft.agents.bridge import Bridge
from camshaft.agents.environment import Start
from camshaft.agents.messages import Source, Spec
from camshaft.agents.play import Limits, Question, Schedule, play
from camshaft.agents.pool import EnvironmentPool
from camshaft.config.engine import EngineModel
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.models.loader import load_tokenizer, stored_weights
from camshaft.models.tiny import make_tiny_model
from camshaft.rollout import SamplingParams, build_rollout

TURNS = 4
SCHEDULES: tuple[Schedule, Schedule] = ("waves", "stream")
PROGRAM = """
import asyncio


class Slow:
    def reset(self, waits):
        self.waits = list(waits)
        return "Go."

    async def step(self, answer):
        await asyncio.sleep(self.waits.pop(0))
        return "On.", 0.0, not self.waits
"""

HEADER = """\
| median of a call | longest episode | waves | stream | waves / stream |
|---|---|---|---|---|"""


def waits(episodes: int, median: float) -> list[list[float]]:
    generator = random.Random(1)
    return [[median * generator.lognormvariate(0, 1) for _ in range(TURNS)] for _ in range(episodes)]


def measured(folder: Path, median: float, arguments: argparse.Namespace) -> str:
    file = folder / "slow.py"
    file.write_text(PROGRAM)
    pool = EnvironmentPool(Spec((Source("", f"{file}:Slow"),), {}, 600.0, 120.0, []), num_workers=1)
    pool.spec = pool.spec.described(pool.check())
    model = folder / "model"
    rollout = build_rollout("torch", RolloutEngineConfig(model_path=str(model), max_model_len=256))
    rollout.load_weights(stored_weights(EngineModel(path=str(model))))
    bridge = Bridge(load_tokenizer(str(model)))
    limits = Limits(max_prompt=64, max_response=190, max_turn_length=24)
    calls = waits(arguments.episodes, median)
    questions = [
        Question([{"role": "user", "content": ""}], Start({"waits": each}, row_seed=i), i)
        for i, each in enumerate(calls)
    ]
    seconds: dict[str, list[float]] = {schedule: [] for schedule in SCHEDULES}
    tokens: dict[str, list[list[int]]] = {}
    for number in range(arguments.rounds + 1):  # the first one warms up
        for schedule in SCHEDULES[:: -1 if number % 2 else 1]:
            start = time.perf_counter()
            episodes = play(rollout, pool, questions, bridge, limits, SamplingParams(190), schedule)
            seconds[schedule].append(time.perf_counter() - start)
            tokens[schedule] = [episode.tokens for episode in episodes]
        assert tokens["waves"] == tokens["stream"]
    pool.close()
    waves, stream = (seconds[schedule][1:] for schedule in SCHEDULES)
    ratio = statistics.median(a / b for a, b in zip(waves, stream, strict=True))
    cells = [f"{median:g} s", f"{max(map(sum, calls)):.1f} s"]
    cells += [f"{statistics.median(each):.1f} s" for each in (waves, stream)]
    return f"| {' | '.join(cells)} | {ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument(
        "--medians", type=lambda text: [float(part) for part in text.split(",")], default=[0.0, 0.1, 0.5]
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder) / "model", hidden=128, layers=4, seed=3)
        rows = [measured(Path(folder), median, arguments) for median in arguments.medians]
    text = f"""# Slow environments

Seconds for {arguments.episodes} episodes of {TURNS} turns, whose environments wait a lognormal time (sigma 1) in each
call. Medians of {arguments.rounds} rounds on one thread, in which the schedules take turns; the ratio is the
median of those within a round. Both schedules give the same tokens. "longest episode" is the time that the calls of one
episode take, without the policy: a lower bound. The model has a hidden size of 128 and 4 layers, and `step` is a
coroutine.

{machine()}

{HEADER}
{chr(10).join(rows)}
"""
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
