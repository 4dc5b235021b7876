"""Time and memory of the run page on large run folders.

    python benchmarks/view.py --label after --out benchmarks/results/view.md

Three folders are written by the trackers of camshaft: one run of 100,000 steps with 82 metrics each; one run of
1,000,000 responses in 1,000 files; 50 runs of 1,000 steps with 82 metrics each. `camshaft view` serves each of them in
its own process, and this program sends the requests of the page.

- first: from the first request until its answer. Overview and curves together are what a user waits for.
- later: the median of 10 rounds, each after one more line of metrics or one more file of responses.
- memory: the largest resident set size of the server.

`--label` names the column of the results, which are kept in a JSON file beside the table. `--folder` keeps the folders
for the next call.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from machine import machine

from camshaft.config.schema.trainer import SamplesConfig
from camshaft.dataproto import DataProto, Ragged
from camshaft.tracking.base import RunInfo
from camshaft.tracking.jsonl import JsonlTracker
from camshaft.tracking.names import METRICS
from camshaft.tracking.record import RunRecord
from camshaft.tracking.samples import SampleWriter

STEPS, NUM_METRICS = 100_000, 82
FILES, ROWS, TOKENS = 1_000, 1_000, 16
RUNS, RUN_STEPS, RUN_FILES = 50, 1_000, 100
ROUNDS = 10
SPIKE = 61_803
"""Step with a single large value, which the curves must contain."""

TARGETS = {
    "100,000 steps: first overview and curves, s": 4.0,
    "100,000 steps: the same, CPU s": None,
    "100,000 steps: later overview, s": 0.05,
    "100,000 steps: later curves, s": 0.05,
    "100,000 steps: memory, MB": 300.0,
    "1,000,000 responses: first worst 50, s": 3.0,
    "1,000,000 responses: the same, CPU s": None,
    "1,000,000 responses: later worst 50, s": 0.3,
    "1,000,000 responses: memory, MB": None,
    "50 runs: first overview and curves, s": 2.0,
    "50 runs: the same, CPU s": None,
    "50 runs: later overview, s": None,
    "50 runs: memory, MB": None,
}
"""Measurement -> largest value that is acceptable."""


# -- folders ----------------------------------------------------------------------------------------


def metric_names() -> list[str]:
    """Return names of metrics of PPO. `JsonlTracker` adds the time."""
    names = [name for metric in METRICS if metric.trainer == "ppo" for name in metric.names() if "<" not in name]
    return [name for name in dict.fromkeys(names) if name != "timing/at"][: NUM_METRICS - 1]


def write_run(folder: Path, steps: int, seed: int = 0) -> None:
    """Write a finished run without responses."""
    info = RunInfo("view", folder.name, folder, total_steps=steps, config={"trainer": {"experiment_name": folder.name}})
    record, tracker, names = RunRecord(info), JsonlTracker(info), metric_names()
    generator = np.random.default_rng(seed)
    for step in range(1, steps + 1):
        values = generator.random(len(names)).tolist()
        tracker.log(dict(zip(names, values, strict=True)) | {"actor/entropy": 1e6 if step == SPIKE else 1.0}, step)
    tracker.finish()
    record.on_run_end("finished")


def append_step(folder: Path, step: int) -> None:
    """Append a line to the metrics of a run, as its tracker would. A tracker that resumes rewrites the whole file."""
    values = {"step": step, "timing/at": time.time()} | dict.fromkeys(metric_names(), random.random())
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


def responses(seed: int) -> DataProto:
    """Return the batch of a step: groups of eight short responses with random scores."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.full((ROWS,), TOKENS)
    last = torch.arange(1, ROWS + 1) * TOKENS - 1

    def per_token(values: torch.Tensor) -> Ragged:
        return Ragged(values, lengths)

    scores = torch.zeros(ROWS * TOKENS)
    scores[last] = torch.randn(ROWS, generator=generator)
    log_probs = per_token(-torch.rand(ROWS * TOKENS, generator=generator))
    ids = per_token(torch.randint(0, 26, (ROWS * TOKENS,), generator=generator))
    columns: dict[str, Any] = {
        "prompts": ids,
        "responses": ids,
        "response_mask": per_token(torch.ones(ROWS * TOKENS, dtype=torch.bool)),
        "token_level_scores": per_token(scores),
        "token_level_rewards": per_token(scores),
        "advantages": per_token(scores),
        "old_log_probs": log_probs,
        "rollout_log_probs": log_probs,
        "finished": torch.ones(ROWS, dtype=torch.bool),
        "uid": [f"{seed}/{row // 8}" for row in range(ROWS)],
        "data_source": ["letters"] * ROWS,
        "ground_truth": ["42"] * ROWS,
        "score_failure": [None] * ROWS,
        "score_parts": [{} for _ in range(ROWS)],
    }
    return DataProto.from_dict(columns)


def decode(rows: list[list[int]]) -> list[str]:
    return ["".join(chr(97 + token) for token in row) for row in rows]


def sample_writer(folder: Path) -> SampleWriter:
    return SampleWriter(folder, SamplesConfig(enable=True, token_rows=32, max_gb=100.0), decode)


def write_folders(folder: Path) -> None:
    """Write all run folders that do not exist yet."""
    if not (folder / "steps").is_dir():
        write_run(folder / "steps" / "run", STEPS)
    if not (folder / "responses").is_dir():
        write_run(folder / "responses" / "run", 100)
        writer = sample_writer(folder / "responses" / "run")
        for step in range(1, FILES + 1):
            writer.write(responses(step), step)
    if not (folder / "runs").is_dir():
        for number in range(RUNS):
            run = folder / "runs" / f"run_{number:02}"
            write_run(run, RUN_STEPS, number)
            (run / "samples").mkdir()
            source = folder / "responses" / "run" / "samples" / "step_1.parquet"
            for step in range(1, RUN_FILES + 1):
                os.link(source, run / "samples" / f"step_{step * RUN_STEPS // RUN_FILES}.parquet")


# -- requests ---------------------------------------------------------------------------------------


class Server:
    """A client of `camshaft view` in another process."""

    def __init__(self, process: subprocess.Popen[str], url: str):
        parts = urlsplit(url)
        self.pid = process.pid
        self._token = parts.query
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)

    def get(self, path: str) -> tuple[float, Any]:
        """Return the seconds of a request and its answer, or None if the server does not offer the path."""
        start_time = time.perf_counter()
        self._connection.request("GET", f"{path}{'&' if '?' in path else '?'}{self._token}")
        reply = self._connection.getresponse()
        body = reply.read()
        seconds = time.perf_counter() - start_time
        return seconds, json.loads(body) if reply.status == 200 else None

    def cpu(self) -> float:
        """Return the CPU seconds that the process has used, in steps of 10 ms."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> float:
        """Return the largest resident set size in MB."""
        text = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
        return int(text.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "camshaft", "view", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Server(process, process.stdout.readline().strip())
        finally:
            process.terminate()


def measure_steps(folder: Path) -> dict[str, float]:
    results, later = {}, {"overview": [], "curves": []}
    with serve(folder) as server:
        before = server.cpu()
        overview, runs = server.get("/runs")
        curves, answer = server.get("/curves?run=0")
        results |= {"first overview and curves, s": overview + curves, "the same, CPU s": server.cpu() - before}
        first_step = runs["runs"][0]["step"]
        assert max(answer["runs"][0]["actor/entropy"]["values"]) == 1e6, "the spike is missing"
        for step in range(first_step + 1, first_step + 1 + ROUNDS):
            append_step(folder / "run", step)
            seconds, runs = server.get("/runs")
            assert runs["runs"][0]["step"] == step
            later["overview"].append(seconds)
            later["curves"].append(server.get("/curves?run=0")[0])
        results |= {f"later {name}, s": statistics.median(seconds) for name, seconds in later.items()}
        results["memory, MB"] = server.memory()
    return results


def measure_responses(folder: Path) -> dict[str, float]:
    with serve(folder) as server:
        before = server.cpu()
        first, answer = server.get("/ranked?run=0&order=worst")
        if answer is None:
            return {}  # a version without this view
        cpu = server.cpu() - before
        scores = [row["score"] for row in answer["rows"]]
        assert scores == sorted(scores), "the worst responses are out of order"
        assert len(scores) == 50
        writer, later = sample_writer(folder / "run"), []
        new_steps = range(FILES + 1, FILES + 1 + ROUNDS)
        for step in new_steps:
            writer.write(responses(step), step)
            later.append(server.get("/ranked?run=0&order=worst")[0])
        for step in new_steps:
            (folder / "run" / "samples" / f"step_{step}.parquet").unlink()
        return {
            "first worst 50, s": first,
            "the same, CPU s": cpu,
            "later worst 50, s": statistics.median(later),
            "memory, MB": server.memory(),
        }


def measure_runs(folder: Path) -> dict[str, float]:
    with serve(folder) as server:
        before = server.cpu()
        overview, runs = server.get("/runs")
        assert len(runs["runs"]) == RUNS
        curves, _ = server.get("/curves?run=0&run=1&run=2&run=3")
        cpu = server.cpu() - before
        later = statistics.median(server.get("/runs")[0] for _ in range(ROUNDS))
        return {
            "first overview and curves, s": overview + curves,
            "the same, CPU s": cpu,
            "later overview, s": later,
            "memory, MB": server.memory(),
        }


def measure(folder: Path) -> dict[str, float]:
    results: dict[str, float] = {}
    parts = {
        "100,000 steps": (measure_steps, "steps"),
        "1,000,000 responses": (measure_responses, "responses"),
        "50 runs": (measure_runs, "runs"),
    }
    for part, (function, name) in parts.items():
        for measurement, value in function(folder / name).items():
            results[f"{part}: {measurement}"] = value
            print(f"{part}: {measurement}: {value:.3f}", flush=True)
    return results


# -- results ----------------------------------------------------------------------------------------


def table(columns: dict[str, dict[str, float]]) -> str:
    lines = ["| measurement | target | " + " | ".join(columns) + " |", "| --- | --- |" + " --- |" * len(columns)]
    for name, target in TARGETS.items():
        digits = 0 if name.endswith("MB") else 3
        cells = [f"{column[name]:.{digits}f}" if name in column else "" for column in columns.values()]
        lines.append(f"| {name} | {'' if target is None else f'{target:g}'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--label", default="now", help="column of the results")
    parser.add_argument("--folder", type=Path, help="folder for the run folders; a temporary one by default")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_folders(folder)
        load = os.getloadavg()[0]
        results = measure(folder)
    columns = {options.label: results}
    if options.out:
        store = options.out.with_suffix(".json")
        stored = json.loads(store.read_text(encoding="utf-8")) if store.exists() else {}
        columns = stored | columns
        store.write_text(json.dumps(columns, indent=1) + "\n", encoding="utf-8")
        title, _, about = (__doc__ or "").partition("\n\n")
        how = f"{machine()}; load average at the start {load:.1f}. `python benchmarks/view.py`"
        text = [f"# {title.rstrip('.')}", about.partition("\n\n")[2].partition("\n\n`--label`")[0].strip(), how]
        options.out.write_text("\n\n".join([*text, table(columns)]) + "\n", encoding="utf-8")
    print(table(columns))


if __name__ == "__main__":
    main()
