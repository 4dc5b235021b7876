"""Measure the start of a run with many prompts: time with an empty and with a filled cache, and memory per prompt.

    python benchmarks/large_data.py [--out benchmarks/results/large_data.md] [rows ...]

Each start is a process of its own, which loads the prompts as a run does: it reads a parquet file of conversations,
tokenizes them, checks that the built-in reward can score them, builds the loader with the checksum of its state, and
takes a batch. Memory is the growth of the process from before the load: at its end, and at its peak.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow
from machine import machine
from pyarrow import parquet

from camshaft.config.schema.reward import CustomRewardConfig
from camshaft.data import PromptOptions, StatefulLoader, load_prompts
from camshaft.models.loader import load_tokenizer
from camshaft.models.tiny import make_tiny_tokenizer
from camshaft.subprocesses import resident_memory
from camshaft.trainer.scoring import check_scorable

TEXT = "Natalia sold clips to {0} of her friends in April, and then half as many in May. How many did she sell? "
BATCH = 256


def write_rows(path: Path, rows: int) -> None:
    """Write prompts like those of GSM8K, in row groups of 10,000."""
    with parquet.ParquetWriter(path, pyarrow.Table.from_pylist([_row(0)]).schema) as writer:
        for start in range(0, rows, 10_000):
            part = [_row(number) for number in range(start, min(start + 10_000, rows))]
            writer.write_table(pyarrow.Table.from_pylist(part))


def _row(number: int) -> dict[str, object]:
    return {
        "prompt": [{"role": "user", "content": TEXT.format(number) * 2}],
        "data_source": "openai/gsm8k",
        "ground_truth": str(number),
        "extra_info": {"split": "train", "index": number},
    }


def load(folder: str) -> None:
    """Load the data in a folder, and print the time and the memory in bytes."""
    tokenizer = load_tokenizer(f"{folder}/tokenizer")
    load_prompts(f"{folder}/one.parquet", tokenizer, PromptOptions())  # imports what the first call imports
    before, clock, cpu = resident_memory(os.getpid()), time.perf_counter(), sum(os.times()[:4])
    data = load_prompts(f"{folder}/data.parquet", tokenizer, PromptOptions()).batch
    check_scorable(data, CustomRewardConfig(name="gsm8k"))
    loader = StatefulLoader(data, BATCH, total_epochs=1)
    state = loader.state_dict()
    batch = loader.next_batch()
    seconds, spent = time.perf_counter() - clock, sum(os.times()[:4]) - cpu
    after, peak = resident_memory(os.getpid()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    facts = {
        "state": state,
        "tokens": int(data["prompts"].lengths.sum()),
        "first": [batch["uid"][0], batch["ground_truth"][0]],
    }
    print(json.dumps({"seconds": seconds, "cpu": spent, "kept": after - before, "peak": peak - before, "facts": facts}))


def start(folder: Path) -> dict:
    command = [sys.executable, __file__, "--load", str(folder)]
    environment = {**os.environ, "CAMSHAFT_CACHE": str(folder / "cache")}
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", nargs="*", type=int, default=[100_000, 1_000_000])
    parser.add_argument("--out")
    parser.add_argument("--load")
    options = parser.parse_args()
    if options.load:
        load(options.load)
        return
    lines = ["| prompts | start | seconds | CPU seconds | kept per prompt | peak per prompt |", "|" + " --- |" * 6]
    for rows in options.rows:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_tiny_tokenizer(folder / "tokenizer")
            write_rows(folder / "one.parquet", 1)
            write_rows(folder / "data.parquet", rows)
            for label in ("first", "second"):
                result = start(folder)
                kept, peak = (f"{result[key] / rows / 1000:.2f} kB" for key in ("kept", "peak"))
                lines.append(
                    f"| {rows:,} | {label} | {result['seconds']:.1f} | {result['cpu']:.1f} | {kept} | {peak} |"
                )
                print(lines[-1], result["facts"], flush=True)
    text = "\n".join(["# Start of a run with many prompts", "", machine(), "", *lines, ""])
    print(text)
    if options.out:
        Path(options.out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
