"""Recipes of tinker-cookbook, unmodified and offline, each to its last step.

make test-tinker    three of them
make test-recipes   all

`load_dataset("org/name")` and `AutoTokenizer.from_pretrained("org/name")` accept a folder of that name in the working
directory, so the recipes find tiny models and small data sets under the names that they ask for.
"""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.tinker_sdk import run_python
from transformers import AutoTokenizer

from camshaft.models.tiny import make_tiny_model

pytestmark = pytest.mark.tinker
MODEL, TEACHER, PLAYER = "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-8B", "Qwen/Qwen3.5-9B"
RECIPE = "import runpy, sys; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
AGREEMENT = 1e-5
"""Allowed divergence of the log-probs of samples from those of the engine for the same tokens, in float32."""


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def make_chat(number: int) -> dict[str, Any]:
    count = {"role": "user", "content": f"Count {number}"}, {"role": "assistant", "content": f"{number} {number + 1}"}
    return {"messages": list(count)}


def make_pair(number: int) -> dict[str, str]:
    prompt = f"\n\nHuman: Say {number}\n\nAssistant:"
    return {"chosen": f"{prompt} {number}", "rejected": f"{prompt} not {number + 1}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working directory with the models and the data of the recipes."""
    folder = tmp_path_factory.mktemp("recipes")
    for seed, name in enumerate((MODEL, TEACHER, PLAYER)):
        make_tiny_model(folder / name, "qwen3", seed=seed, tie_embeddings=False, max_position_embeddings=4096)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder / name)
        tokenizer.add_tokens(["<think>", "</think>"])  # single tokens, as renderers expect
        tokenizer.save_pretrained(folder / name)
    write_rows(folder / "chats.jsonl", [make_chat(number) for number in range(16)])
    for name, count in (("train", 136), ("test", 4)):
        write_rows(folder / f"HuggingFaceH4/no_robots/{name}.jsonl", [make_chat(number) for number in range(count)])
        write_rows(folder / f"Anthropic/hh-rlhf/{name}.jsonl", [make_pair(number) for number in range(16)])
        sums = [{"question": f"{n} + 1?", "answer": f"one more\n#### {n + 1}"} for n in range(8)]
        write_rows(folder / f"openai/gsm8k/main/{name}.jsonl", sums)
    write_rows(folder / "zwhe99/DeepMath-103K/train.jsonl", [{"question": f"{n} + 1?"} for n in range(8)])
    files = "\n".join(f"      - split: {name}\n        path: main/{name}.jsonl" for name in ("train", "test"))
    head = f"---\nconfigs:\n  - config_name: main\n    data_files:\n{files}\n---\n"
    (folder / "openai/gsm8k/README.md").write_text(head, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def variables(folder: Path) -> Iterator[dict[str, str]]:
    models = f"model=[{MODEL},{TEACHER},{PLAYER}]"
    command = [sys.executable, "-m", "camshaft", "serve", models, "port=0", "device=cpu", "max_models=8"]
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


def values_of(metrics: list[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in metrics if name in row]


def test_sl_loop_trains_and_saves(folder: Path, variables: dict[str, str]) -> None:
    options = ("batch_size=4", "max_steps=3", "save_every=2", "lora_rank=4", "learning_rate=1e-2")
    metrics = run_recipe(folder, variables, "sl_loop", *options)
    losses = values_of(metrics, "train_mean_nll")
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


def test_dpo_begins_at_ln_2_and_prefers_the_chosen_answers(folder: Path, variables: dict[str, str]) -> None:
    metrics = run_recipe(
        folder, variables, "preference.dpo.train", "batch_size=4", "max_steps=3", "max_length=512", "learning_rate=1e-3"
    )
    losses = values_of(metrics, "dpo_loss")
    assert len(losses) == 3
    assert abs(losses[0] - math.log(2)) < 1e-6
    assert losses[-1] < losses[0] - 1e-3
    assert values_of(metrics, "margin")[-1] > 0


@pytest.mark.recipes
def test_sl_basic_trains(folder: Path, variables: dict[str, str]) -> None:
    losses = values_of(run_recipe(folder, variables, "sl_basic"), "train_mean_nll")
    assert len(losses) == 1


@pytest.mark.recipes
def test_chat_sl_trains(folder: Path, variables: dict[str, str]) -> None:
    options = ("dataset=no_robots", "batch_size=8", "max_steps=3", "learning_rate=1e-3", "max_length=512")
    losses = values_of(run_recipe(folder, variables, "chat_sl.train", *options), "train_mean_nll")
    assert len(losses) == 3
    assert losses[-1] < losses[0]


@pytest.mark.recipes
def test_prompt_distillation_trains(folder: Path, variables: dict[str, str]) -> None:
    options = ("file_path=chats.jsonl", "batch_size=4", "max_steps=3", "learning_rate=1e-3", "max_length=512")
    losses = values_of(run_recipe(folder, variables, "prompt_distillation.train", *options), "train_mean_nll")
    assert len(losses) == 3
    assert losses[-1] < losses[0]


@pytest.mark.recipes
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("math_rl.train", ("env=arithmetic", "loss_fn=ppo", "groups_per_batch=2", "group_size=4")),
        ("preference.shorter.train", ("renderer_name=qwen3_instruct", "batch_size=2", "group_size=4", "max_tokens=8")),
        (
            "multiplayer_rl.guess_number.train",
            ("renderer_name=qwen3_instruct", "batch_size=1", "group_size=2", "max_tokens=8"),
        ),
        (
            "multiplayer_rl.twenty_questions.train",
            ("renderer_name=qwen3_instruct", "batch_size=1", "group_size=2", "max_tokens=8"),
        ),
    ],
)
def test_log_probs_of_rl_recipes_are_those_of_the_engine(
    name: str, options: tuple[str, ...], folder: Path, variables: dict[str, str]
) -> None:
    metrics = run_recipe(folder, variables, name, "max_steps=2", "eval_every=0", *options)
    divergences = values_of(metrics, "optim/kl_sample_train_v1")
    assert divergences
    assert max(map(abs, divergences)) < AGREEMENT


@pytest.mark.recipes
def test_on_policy_distillation_learns_from_another_base_model(folder: Path, variables: dict[str, str]) -> None:
    metrics = run_recipe(
        folder, variables, "distillation.on_policy_distillation", f"teacher_model={TEACHER}", "dataset=deepmath",
        "groups_per_batch=2", "group_size=2", "max_tokens=16", "max_steps=2", "lora_rank=4", "eval_every=0",
    )  # fmt: skip
    assert values_of(metrics, "teacher_kl")[0] > 0
    assert max(map(abs, values_of(metrics, "optim/kl_sample_train_v1"))) < AGREEMENT
