"""Recipes of tinker-cookbook, unmodified and offline, each to its last step.

make test-tinker

`load_dataset("org/name")` and `AutoTokenizer.from_pretrained("org/name")` accept a folder of that name in the working
directory, so the recipes find a tiny model and small data sets under the names that they ask for.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.tinker_sdk import run_python

from camshaft.models.tiny import make_tiny_model

pytestmark = pytest.mark.tinker
MODEL = "Qwen/Qwen3-4B-Instruct-2507"
RECIPE = "import runpy, sys; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working directory with the model and the data of the recipes."""
    folder = tmp_path_factory.mktemp("recipes")
    make_tiny_model(folder / MODEL, "qwen3", tie_embeddings=False)
    chats = [
        {"messages": [{"role": "user", "content": f"Count {n}"}, {"role": "assistant", "content": f"{n} {n + 1}"}]}
        for n in range(16)
    ]
    write_rows(folder / "HuggingFaceH4/no_robots/train.jsonl", chats)
    sums = [{"question": f"{n} + 1?", "answer": f"one more\n#### {n + 1}"} for n in range(8)]
    for name in ("train", "test"):
        write_rows(folder / f"openai/gsm8k/main/{name}.jsonl", sums)
    files = "\n".join(f"      - split: {name}\n        path: main/{name}.jsonl" for name in ("train", "test"))
    head = f"---\nconfigs:\n  - config_name: main\n    data_files:\n{files}\n---\n"
    (folder / "openai/gsm8k/README.md").write_text(head, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def variables(folder: Path) -> Iterator[dict[str, str]]:
    command = [sys.executable, "-m", "camshaft", "serve", f"model={MODEL}", "port=0", "device=cpu", "max_models=8"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        yield dict(line.removeprefix("export ").rstrip().split("=", 1) for line in lines)
        process.terminate()
        assert process.wait(60) == 0


def run_recipe(folder: Path, variables: dict[str, str], name: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a recipe, and return the metrics that it has logged."""
    log = folder / f"log-{name}"
    options = [f"model_name={MODEL}", f"log_path={log}", *arguments]
    run_python(RECIPE, f"tinker_cookbook.recipes.{name}", *options, environment=variables, folder=folder, seconds=280)
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_sl_loop_trains_and_saves(folder: Path, variables: dict[str, str]) -> None:
    metrics = run_recipe(folder, variables, "sl_loop", "batch_size=4", "max_steps=3", "save_every=2", "lora_rank=4")
    losses = [row["train_mean_nll"] for row in metrics if "train_mean_nll" in row]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    checkpoints = (folder / "log-sl_loop" / "checkpoints.jsonl").read_text()
    assert re.search(r"tinker://\w+:train:0/weights/", checkpoints)


def test_rl_loop_samples_and_trains(folder: Path, variables: dict[str, str]) -> None:
    metrics = run_recipe(
        folder, variables, "rl_loop", "loss_fn=importance_sampling", "batch_size=2", "group_size=4", "max_tokens=16",
        "lora_rank=4",
    )  # fmt: skip
    assert len(metrics) >= 2
