"""Time of an update on packed rows and on right-padded rows, with the same Llama model on a CPU.

    python benchmarks/padded_rows.py --rounds 5      # writes results/padded_rows.md

Llama runs on packed rows. Here it is also forced onto right-padded rows, as families run whose layers cannot be packed.
All forms take turns in every round, so they see the same load of the machine. Their gradient norms must agree.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import machine
from micro_batches import Case, loss, make_batch, time_updates

from camshaft.config.engine import EngineConfig, EngineModel, OptimConfig
from camshaft.engine.micro_batches import padding_share, plan_padded_rows
from camshaft.engine.single import SingleDeviceEngine
from camshaft.models.packed import PackedModel
from camshaft.models.tiny import make_tiny_model

RESULTS = Path(__file__).parent / "results" / "padded_rows.md"
TOKENS = 4096
MODEL: dict[str, Any] = {"family": "llama", "hidden": 128, "intermediate": 512}
CASES = {
    "64 responses of 20 to 200 tokens": Case(MODEL, 8, 60, 20, 200),
    "16 responses of 200 tokens": Case(MODEL, 2, 60, 200, 200),
}
SHARED, PACKED, PADDED = "packed, prompts shared", "packed", "right-padded"


def build(folder: str, form: str) -> SingleDeviceEngine:
    model = EngineModel(path=folder, use_prefix_grouper=form == SHARED)
    engine = SingleDeviceEngine(EngineConfig(model=model, optim=OptimConfig(lr=1e-4), max_tokens=TOKENS))
    engine.init_model()
    engine.set_loss_fn(loss)
    if form == PADDED and isinstance(engine.module, PackedModel):
        engine.module.pads_rows, engine.module.supports_prefix_sharing = True, False
        engine.module.hf.set_attn_implementation("sdpa")
    return engine


def measure(case: Case, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round in each form."""
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder, **case.model)
        engines = {form: build(folder, form) for form in (SHARED, PACKED, PADDED)}
    return time_updates(engines, make_batch(case), rounds, time.process_time)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        f"CPU seconds of an update on one thread, median of {arguments.rounds} rounds; in parentheses the median of "
        "the ratios to packed rows.",
        "",
        machine(),
        "",
        f"| case | padding | {SHARED} | {PACKED} | {PADDED} |",
        "|---" * 5 + "|",
    ]
    for title, case in CASES.items():
        lengths = make_batch(case).ragged("input_ids").lengths
        share = padding_share(lengths, plan_padded_rows(lengths, None, TOKENS))
        seconds = measure(case, arguments.rounds)
        cells = [title, f"{share:.0%}"]
        for values in seconds.values():
            ratio = statistics.median(value / packed for value, packed in zip(values, seconds[PACKED], strict=True))
            cells.append(f"{statistics.median(values):.2f} ({ratio:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    RESULTS.write_text("\n".join(["# Packed and right-padded rows on a CPU", "", *lines, ""]))


if __name__ == "__main__":
    main()
