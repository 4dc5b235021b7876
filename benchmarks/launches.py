"""Count the kernel launches and host waits of decode steps and micro-batches on a GPU, without a GPU.

    PYTHONPATH=.:tests:.venv-triton TRITON_INTERPRET=1 python benchmarks/launches.py --out benchmarks/results/launches

The code of CUDA runs on a device emulated in host memory (`tests/support/emulated_cuda.py`). Models with two and
with four layers give the launches of a layer and those of the rest. An operator counts as one launch, although some
operators launch several kernels on a GPU. Triton kernels need Triton and its interpreter, as in the command.
"""

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from support.emulated_cuda import DEVICE, Emulator, emulated_cuda
from transformers import AutoModelForCausalLM

from camshaft.config.engine import EngineConfig, EngineModel, OptimConfig
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.contracts.engine.harness import make_batch
from camshaft.engine.single import SingleDeviceEngine
from camshaft.models.tiny import make_tiny_model
from camshaft.ragged import Ragged
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin.rollout import TorchRollout

LAYERS = (2, 4)
STEPS = (20, 28)
"""Numbers of tokens; the difference of two generations is that of eight decode steps."""


def counts(device: Emulator) -> Counter[str]:
    return device.launches + Counter({"host waits": sum(device.waits.values())})


def per_step(more: Counter[str], fewer: Counter[str], steps: int) -> dict[str, float]:
    names = more.keys() | fewer.keys()
    return {name: (more[name] - fewer[name]) / steps for name in sorted(names) if more[name] != fewer[name]}


def decode_step(device: Emulator, folder: Path, **config: Any) -> dict[str, float]:
    """Return the counts of one decode step of eight rows that may end, in bfloat16."""
    rollout = TorchRollout(
        RolloutEngineConfig(model_path=str(folder), dtype="bfloat16", device=DEVICE, max_model_len=96, **config)
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    rollout.load_weights((name, weight.detach().to(DEVICE)) for name, weight in model.named_parameters())
    prompts, results = Ragged.from_rows([torch.arange(3, 9) + i for i in range(8)]), []
    for max_tokens in (STEPS[1], *STEPS):  # the first generation captures graphs
        device.reset()
        # No row ends: the stop token is not in the vocabulary.
        sampling = SamplingParams(max_tokens, temperature=0.8, ignore_eos=True, stop_token_ids=(10**6,))
        rollout.generate_sequences(prompts, sampling, torch.arange(8))
        results.append(counts(device))
    return per_step(results[2], results[1], STEPS[1] - STEPS[0])


def micro_batch(device: Emulator, folder: Path, checkpointing: bool) -> dict[str, float]:
    """Return the counts of one micro-batch, forward and backward, in bfloat16."""
    model = EngineModel(path=str(folder), enable_gradient_checkpointing=checkpointing)
    results = []
    for size in (4, 2):  # two and four micro-batches
        config = EngineConfig(model=model, optim=OptimConfig(lr=1e-3), device=DEVICE, micro_batch_size=size)
        engine = SingleDeviceEngine(config)
        engine.init_model()
        engine.module.to(torch.bfloat16)  # as in a sharded engine with float32 weights
        engine.set_loss_fn(lambda data, out, ctx: (-out["log_probs"].values.sum() / ctx["num_tokens"], ctx))
        with engine.train_mode():
            engine.train_batch(make_batch())
            device.reset()
            engine.train_batch(make_batch())
        results.append(counts(device))
    return per_step(results[1], results[0], 2)


def measure() -> dict[str, dict[str, float]]:
    """Return, for each case, launches per layer, launches of the rest, and host waits."""
    table = {}
    with tempfile.TemporaryDirectory() as scratch, emulated_cuda() as device:
        folders = [make_tiny_model(f"{scratch}/{layers}", hidden=32, layers=layers) for layers in LAYERS]
        cases: dict[str, Any] = {
            "decode step, eager": lambda folder: decode_step(device, folder, enforce_eager=True),
            "decode step, inside the CUDA graph and around it": lambda folder: decode_step(
                device, folder, enforce_eager=False
            ),
            "micro-batch": lambda folder: micro_batch(device, folder, checkpointing=False),
            "micro-batch, full gradient checkpointing": lambda folder: micro_batch(device, folder, checkpointing=True),
        }
        for name, count in cases.items():
            few, many = (Counter(count(folder)) for folder in folders)
            waits = {few.pop("host waits", 0), many.pop("host waits", 0)}
            layer = (sum(many.values()) - sum(few.values())) / (LAYERS[1] - LAYERS[0])
            by_operator = {key: (many[key] - few[key]) / (LAYERS[1] - LAYERS[0]) for key in sorted(many)}
            table[name] = {
                "per_layer": layer,
                "rest": sum(few.values()) - LAYERS[0] * layer,
                "host_waits": max(waits),
                "operators_of_a_layer": {key: value for key, value in by_operator.items() if value},
            }
    return table


def format_page(table: dict[str, Any]) -> str:
    lines = [
        "# Kernel launches, counted without a GPU",
        "",
        "`benchmarks/launches.py` wrote this page. It runs a Qwen2 model in bfloat16 with the code of CUDA on a device",
        "that is emulated in host memory. An operator counts as one launch.",
        "",
        "| | launches per layer | other launches | with 28 layers | host waits |",
        "|---|---|---|---|---|",
    ]
    for name, row in table.items():
        total = 28 * row["per_layer"] + row["rest"]
        lines.append(f"| {name} | {row['per_layer']:g} | {row['rest']:g} | {total:,.0f} | {row['host_waits']:g} |")
    lines += ["", "Operators of one layer:", ""]
    for name, row in table.items():
        operators = ", ".join(f"{key} {value:g}" for key, value in row["operators_of_a_layer"].items())
        lines.append(f"- {name}: {operators}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="path without suffix of the results, written as .json and .md")
    out = parser.parse_args().out
    table = measure()
    page = format_page(table)
    if out:
        Path(f"{out}.json").write_text(json.dumps(table, indent=1) + "\n")
        Path(f"{out}.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
