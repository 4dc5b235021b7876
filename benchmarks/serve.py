"""Cost of the Tinker API: commands through HTTP beside calls of the role, GRPO beside `camshaft ppo`, and open polls.

    PYTHONPATH=.:tests python benchmarks/serve.py --out benchmarks/results/serve.md

The first table trains two equal models of one worker process in turns, one through HTTP with one request for each
command and one for its result, the other by calls of the same role. The difference is the cost of the server: HTTP, the
log with its flushes to the disk, order, promises and the conversion of messages.

The second table compares the steps of the same GRPO run in `camshaft ppo` and in a script with the Tinker SDK (of
`.venv-tinker`, see `make test-tinker`), with the same prompts, seeds and micro-batches, in rounds of one after the
other. Their tokens are equal (`tests/tinker_sdk/test_grpo.py`). The script computes the log-probs before the update in
a pass of their own.

The third table has a loop that trains on samples of the weights before the last step while it requests the next ones,
on servers whose ranks train and sample in turn, and on one with a process for each. Servers take turns within a round.

The last table has requests for samples that are all in flight at the same time, and CPU seconds of the process of the
server, without its worker.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from machine import machine
from support.tinker_clients import BASE, RunningServer, datum, running_server
from support.tinker_grpo import ADAM, train_with_ppo, train_with_sdk
from support.tinker_load import sample_all, server_process

from camshaft.algorithms.token_losses import LOSSES
from camshaft.config.engine import LoRAConfig
from camshaft.config.serve import ServeConfig
from camshaft.contracts.tinker.client import read_samples, training_request
from camshaft.engine import StepHyperparameters
from camshaft.models.tiny import make_tiny_model
from camshaft.service import codec
from camshaft.service.process import PerRank

QUICKSTART = [list(range(5, 28))]
"""One row of 23 tokens, as in `examples/tinker/quickstart.py`."""
BATCH = [[5 + (row * 7 + column) % 90 for column in range(256)] for row in range(16)]
RANK, STEPS = 8, 40


# -- commands through HTTP, and calls of the role ----------------------------------------------------


def command_seconds(
    server: RunningServer, number: int, tokens: list[list[int]], num_rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each command and of each call, over the rounds."""
    rate, model, role = 1e-4, server.client().create_model(number, RANK), server.role
    direct = f"direct-{number}"
    lora = LoRAConfig(
        rank=RANK, alpha=server.config.lora_alpha, seed=1, train_attn=True, train_mlp=True, train_unembed=True
    )
    folder = server.config.base_models()[BASE]
    role.call_ranks("create", direct, folder, lora, 1)
    data = [datum(row, weights=[1.0] * (len(row) - 1)) for row in tokens]
    loss, limits = LOSSES["cross_entropy"], codec.Limits(1024, 4096, 10**6)
    rows = codec.read_rows(training_request(direct, 1, data), loss, limits).with_meta(numbers=list(range(len(data))))
    settings = StepHyperparameters(lr=rate, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, clip_grad=0.0)

    def train_both() -> None:
        """Send both commands before the first result is there, as a script does."""
        promises = model.train(model.next(), data), model.step(model.next(), learning_rate=rate)
        for promise in promises:
            model.wait(promise)

    def call_pass() -> None:
        role.call_ranks("forward_backward", direct, PerRank([rows]), loss.name, {}, False)

    def call_step() -> None:
        role.call("optimizer_step", direct, settings)

    works: dict[str, Callable[[], Any]] = {
        "HTTP forward_backward": lambda: model.run(data),
        "HTTP optim_step": lambda: model.update(learning_rate=rate),
        "call forward_backward": call_pass,
        "call optim_step": call_step,
        "HTTP step": train_both,
        "call step": lambda: (call_pass(), call_step()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for round_number in range(num_rounds + 2):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if round_number > 1:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def command_table(num_rounds: int) -> Iterator[str]:
    yield "| data | command | call of the role, ms | through HTTP, ms | difference, ms | difference per command, ms |"
    yield "|---|---|---|---|---|---|"
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder), save_every=10**6) as server:
        for number, (title, tokens) in enumerate({"1 x 23": QUICKSTART, "16 x 256": BATCH}.items()):
            seconds = command_seconds(server, number, tokens, num_rounds)
            for name, commands in (("forward_backward", 1), ("optim_step", 1), ("step", 2)):
                http, call = seconds[f"HTTP {name}"], seconds[f"call {name}"]
                difference = statistics.median(a - b for a, b in zip(http, call, strict=True))
                numbers = [statistics.median(call), statistics.median(http), difference, difference / commands]
                label = "both, sent at once" if name == "step" else name
                yield f"| {title} | {label} | {' | '.join(f'{1000 * value:.1f}' for value in numbers)} |"
            server.finish()


# -- GRPO --------------------------------------------------------------------------------------------


def grpo_table(num_rounds: int, num_steps: int) -> Iterator[str]:
    yield "| model | tokens per step | `camshaft ppo`, s | through HTTP, s | ratio |"
    yield "|---|---|---|---|---|"
    sizes = {"hidden 32, 2 layers": (32, 2, 8), "hidden 256, 4 layers": (256, 4, 64)}
    for title, (hidden, layers, length) in sizes.items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model = make_tiny_model(folder / "model", hidden=hidden, layers=layers, initializer_range=0.1)
            options = {
                "actor_rollout_ref.model.path": model,
                "data.max_response_length": length,
                "actor_rollout_ref.actor.use_dynamic_bsz": True,
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": ServeConfig.model_fields["max_tokens"].default,
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "null",
            }
            ratios, walls = list[float](), list[tuple[float, float]]()
            for _ in range(num_rounds):
                steps = train_with_ppo(folder, ADAM, num_steps, options)
                lines, _ = train_with_sdk(folder, steps, ADAM, str(model), length)
                ppo = statistics.median(step.metrics["timing_s/step"] for step in steps[1:])
                sdk = statistics.median(line.seconds for line in lines[1:])
                walls.append((ppo, sdk))
                ratios.append(sdk / ppo)
            tokens = statistics.mean(sum(map(len, (row for group in line.groups for row in group))) for line in lines)
            ppo, sdk = (statistics.median(wall[side] for wall in walls) for side in (0, 1))
            yield f"| {title} | {tokens:.0f} | {ppo:.3f} | {sdk:.3f} | {statistics.median(ratios):.2f} |"


# -- training and sampling at the same time -----------------------------------------------------------


LAYOUTS = {
    "1 rank, 1 thread": (1, 0, 1),
    "1 rank, 2 threads": (1, 0, 2),
    "2 ranks, 1 thread each": (2, 0, 1),
    "1 rank and 1 sampling rank, 1 thread each": (1, 1, 1),
}
"""Ranks, sampling ranks, and threads of each."""


def overlapped_steps(server: RunningServer, num_steps: int) -> list[float]:
    """Return the seconds of each step of a loop whose samples are one step old."""
    client, length, seconds = server.client(), 64, list[float]()
    model = client.create_model(0, RANK)
    sampler = model.publish(0)

    def submit(step: int) -> list[Any]:
        options = {"max_tokens": length, "seed": 1000 * step, "stop": []}
        return [client.submit_sample(sampler, step * 8 + n, [5 + n, 6, 7], 8, **options) for n in range(8)]

    promises = submit(0)
    for step in range(num_steps):
        start = time.perf_counter()
        samples = [(n, sample) for n in range(8) for sample in read_samples(client.wait(promises[n]))]
        promises = submit(step + 1)
        mask = [0.0, 0.0] + [1.0] * length
        data = [
            datum(
                [5 + n, 6, 7, *sample.tokens],
                logprobs=[0.0, 0.0, *sample.log_probs],
                advantages=[value * (sum(sample.tokens) % 3 - 1.0) for value in mask],
            )
            for n, sample in samples
        ]
        commands = [
            model.train(model.next(), data, "ppo"),
            model.step(model.next(), learning_rate=1e-4),
            model.command("save_weights_for_sampler", model.next(), sampling_session_seq_id=step + 1),
        ]
        sampler = [model.wait(command) for command in commands][-1]["sampling_session_id"]
        seconds.append(time.perf_counter() - start)
    for promise in promises:
        client.wait(promise)
    return seconds[2:]


def overlap_table(num_rounds: int, num_steps: int) -> Iterator[str]:
    yield "| server | s per step | speed beside 1 rank, 1 thread | beside 1 rank, 2 threads |"
    yield "|---|---|---|---|"
    walls: dict[str, list[float]] = {title: [] for title in LAYOUTS}
    with tempfile.TemporaryDirectory() as name:
        model = make_tiny_model(Path(name) / "model", hidden=256, layers=4, initializer_range=0.1, tie_embeddings=False)
        for number in range(num_rounds):
            for title, (ranks, sampling_ranks, threads) in LAYOUTS.items():
                os.environ["OMP_NUM_THREADS"] = str(threads)
                folder = Path(name) / f"{number}-{ranks}-{sampling_ranks}-{threads}"
                folder.mkdir()
                options = {"model": f"{BASE}={model}", "ranks": ranks, "sampling_ranks": sampling_ranks}
                with running_server(folder, **options, save_every=10**6) as server:
                    walls[title].append(statistics.median(overlapped_steps(server, num_steps)))
    bases = list(walls.values())[:2]
    for title, seconds in walls.items():
        ratios = [statistics.median(b / a for a, b in zip(seconds, base, strict=True)) for base in bases]
        yield f"| {title} | {statistics.median(seconds):.3f} | {ratios[0]:.2f} | {ratios[1]:.2f} |"


# -- open polls --------------------------------------------------------------------------------------


def poll_table(counts: tuple[int, ...]) -> Iterator[str]:
    yield "| samples in flight | requests | failed | seconds | server CPU per request, ms |"
    yield "|---|---|---|---|---|"
    with tempfile.TemporaryDirectory() as folder, server_process(Path(folder)) as server:
        sample_all(server.client(), 4)
        for count in counts:
            start, before = time.perf_counter(), server.cpu_seconds()
            statuses = sample_all(server.client(), count)
            seconds, cpu = time.perf_counter() - start, server.cpu_seconds() - before
            total = statuses.total()
            failed = total - statuses[200] - statuses[408]
            yield f"| {count} | {total} | {failed} | {seconds:.1f} | {1000 * cpu / total:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of commands")
    parser.add_argument("--runs", type=int, default=3, help="rounds of runs of GRPO")
    parser.add_argument("--steps", type=int, default=10, help="steps of a run of GRPO")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = {
        "Commands": command_table(options.rounds),
        "Steps of GRPO": grpo_table(options.runs, options.steps),
        "Training and sampling at the same time": overlap_table(options.runs, options.steps + 2),
        "Open polls": poll_table((64, 512)),
    }
    load = os.getloadavg()[0]
    lines = [
        "# Cost of the Tinker API",
        "",
        f"`{' '.join(['python', 'benchmarks/serve.py', *sys.argv[1:]])}`; its docstring describes the measurement.",
        "",
        f"{machine()}. The load average was {load:.1f} at the start; the sides of a row are measured in turns.",
        "",
    ]
    for title, table in parts.items():
        lines += [f"## {title}", "", *table, ""]
    page = "\n".join(lines)
    sys.stdout.write(page)
    if options.out is not None:
        options.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
