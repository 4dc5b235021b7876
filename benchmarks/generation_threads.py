"""Time of a decode step on a CPU by number of threads and rows, with the built-in generator.

    python benchmarks/generation_threads.py --rounds 5 --out benchmarks/results/generation_threads.md

All responses have the same length, so every step decodes the same number of rows. Both numbers of threads take turns
in every round, and the ratio is the median of the ratios per round: above 1, one thread is faster. On a busy machine,
start the script with `chrt -r 1`, because a thread that waits for a core delays the others.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import machine

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.models.tiny import make_tiny_model
from camshaft.ragged import Ragged
from camshaft.rollout.base import SamplingParams
from camshaft.rollout.builtin.cpu import threads
from camshaft.rollout.builtin.rollout import TorchRollout

MODELS: dict[str, dict[str, Any]] = {
    "0.1M": {"hidden": 64, "layers": 2},
    "1M": {"hidden": 128, "layers": 4, "intermediate": 384, "vocab_size": 512},
    "3M": {"hidden": 256, "layers": 4, "intermediate": 768, "vocab_size": 512},
    "27M": {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "intermediate": 1536, "vocab_size": 4096},
}
PROMPT, TOKENS = 32, 40


def measure(model: str, rows: int, rounds: int) -> list[tuple[float, float]]:
    """Return the milliseconds of a step with one thread and with all threads, of each round."""
    threads.MIN_PRODUCT = 0  # steps of few rows use all threads too
    counts, tokens = (1, os.cpu_count() or 1), torch.Generator().manual_seed(0)
    prompts = Ragged.from_rows([torch.randint(3, 60, (PROMPT,), generator=tokens) for _ in range(rows)])
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    pairs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder, **MODELS[model])
        rollout = TorchRollout(RolloutEngineConfig(model_path=folder, max_model_len=PROMPT + TOKENS))
        hf: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rollout.load_weights([(name, weight.detach()) for name, weight in hf.named_parameters()])
        for number in range(rounds + 1):
            spent: dict[int, float] = {}
            for count in counts[:: 1 if number % 2 else -1]:
                torch.set_num_threads(count)
                began = time.perf_counter()
                rollout.generate_sequences(prompts, sampling)
                spent[count] = 1000 * (time.perf_counter() - began) / TOKENS
            if number:  # the first round warms up
                pairs.append((spent[counts[0]], spent[counts[1]]))
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[2, 8, 32, 128])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [
        f"Milliseconds of a decode step with 1 and {os.cpu_count()} threads, and the time with {os.cpu_count()} "
        f"relative to 1; medians of {options.rounds} rounds. Load average {os.getloadavg()[0]:.0f}.",
        "",
        machine(),
        "",
        "| model | " + " | ".join(f"{rows} rows" for rows in options.rows) + " |",
        "|---" * (len(options.rows) + 1) + "|",
    ]
    for model in options.models:
        cells = [model]
        for rows in options.rows:
            pairs = measure(model, rows, options.rounds)
            one, many = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
            cells.append(f"{one:.2f}, {many:.2f} ({statistics.median(pair[1] / pair[0] for pair in pairs):.2f})")
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if options.out:
        text = "\n".join(["# Threads of generation", "", f"`{Path(__file__).name}`", "", *lines, ""])
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
