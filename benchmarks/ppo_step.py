"""GRPO steps (generate, score, log-probs, advantages, update), compared with a careful loop and TRL.

    python benchmarks/ppo_step.py --models 1M,4M --against careful,trl --rounds 6      # trl: after `make trl`

16 prompts of 1 to 64 tokens, 8 responses each of at most 96 tokens, two optimizer steps. Before the measurement the
model learns from random text to end a response at any token with a probability of 1/33. Lengths then have the long tail
of real runs, which costs time in a loop that waits for the longest row. The learning rate is so low that all rounds
sample from the same policy. The sides sample different tokens, so the benchmark compares the time per response token.

- camshaft: `collect` and `step` of `PPOTrainer` in one process; scoring runs in a second process.
- careful: `CarefulLoop.step`, with `transformers.generate`.
- trl: `GRPOTrainer` of TRL 1.16 in a separate environment (`trl_side.py`).
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import roofline
import torch
import workload
from paired import Case, Sides, main, middle, ratio, serve
from torch import Tensor

LEARNING_RATE = 1e-7
MEAN_ANSWER = 32
PHASES = ("gen", "old_log_prob", "ref", "values", "update_critic", "update_actor")
"""Timers of camshaft's phases that run a model. The rest of a step is reported as "outside of models"."""


def teach_lengths(folder: Path, vocabulary: int, steps: int = 60) -> None:
    """Train the model of the folder to end a response at any token with a probability of 1 / (`MEAN_ANSWER` + 1)."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids = torch.randint(workload.FIRST_WORD, vocabulary, (16, 96), generator=random)
        ids[torch.rand(ids.shape, generator=random) < 1 / (MEAN_ANSWER + 1)] = model.config.eos_token_id
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def build(name: str, case: Case) -> Callable[[int], dict[str, Any]]:
    """Build one side; the result runs a round."""
    folder = Path(case["folder"])
    if name == "careful":
        from careful import CarefulLoop

        return on_prompts(CarefulLoop(folder, LEARNING_RATE).step, folder)
    if name == "trl":
        from trl_side import GRPOSteps as Steps
    else:
        from camshaft_side import Steps
    steps = Steps(folder, LEARNING_RATE)
    return lambda number: steps.step()


def on_prompts(step: Callable[[list[Tensor]], dict[str, Any]], folder: Path) -> Callable[[int], dict[str, Any]]:
    """Wrap the step of a loop that takes the prompts of a round."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return lambda number: step([torch.tensor(tokenizer(text).input_ids) for text in workload.prompt_texts(number)])


def interpreter(environment: str) -> str:
    """Return the Python interpreter of another environment."""
    path = Path(__file__).parents[1] / environment / "bin" / "python"
    if not path.exists():
        raise SystemExit(f"there is no {path}: `make trl` makes {environment}")
    return str(path)


def compared(
    model: str, names: list[str], threads: int, rounds: int, script: str = Path(__file__).name, trl: str = ".venv-trl",
    critic: bool = False, denominators: Sequence[str] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """Return one result row per side of the script; `denominators` are further sides for ratios."""
    from camshaft.data.tables import write_parquet
    from camshaft.models.tiny import VOCABULARY_ROWS, make_tiny_model

    python = {"trl": interpreter(trl)} if "trl" in names else {}
    shape = replace(workload.SHAPES[model], vocab_size=VOCABULARY_ROWS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder, **asdict(shape))
        teach_lengths(folder, VOCABULARY_ROWS)
        texts = [text for number in range(rounds + 1) for text in workload.prompt_texts(number)]
        write_parquet(folder / "train.parquet", [{"prompt": text, "data_source": "letters"} for text in texts])
        with Sides(script, names, {"folder": name, "model": model}, threads, python) as sides:
            measurements = sides.rounds(rounds)
    work = {side: work_of(shape, [each[side]["result"]["lengths"] for each in measurements], critic) for side in names}
    seconds = {side: statistics.median(each[side]["wall"] for each in measurements) for side in names}
    for each in measurements:  # per response token
        for spent in each.values():
            tokens = sum(spent["result"]["lengths"])
            spent |= {"wall": spent["wall"] / tokens, "cpu": spent["cpu"] / tokens}
    rates = roofline.measured_rates(threads)
    inside = [sum(each["camshaft"]["result"].get(f"timing_s/{phase}", 0) for phase in PHASES) for each in measurements]
    steps = [each["camshaft"]["result"]["timing_s/step"] for each in measurements]
    return [
        {
            "model": model,
            "threads": threads,
            "side": side,
            "mean_length": statistics.mean(n for each in measurements for n in each[side]["result"]["lengths"]),
            "tokens_per_second": 1 / middle(measurements, side, "wall"),
            "tokens_per_cpu_second": 1 / middle(measurements, side, "cpu"),
            **roofline.reached(work[side], seconds[side], rates),
            "cpu_ratio": ratio(measurements, side, "camshaft", "cpu"),
            "wall_ratio": ratio(measurements, side, "camshaft", "wall"),
            **{
                f"{name}_{what}": ratio(measurements, side, name, what) if name in names else None
                for name, what in itertools.product(denominators, ("cpu", "wall"))
            },
            "outside": f"{1 - sum(inside) / sum(steps):.1%}" if side == "camshaft" else "",
        }
        for side in names
    ]


def work_of(shape: workload.Shape, rounds: list[list[int]], critic: bool) -> roofline.Work:
    """Return the minimum work of a step: the mean over rounds with responses of these lengths."""
    work = roofline.NOTHING
    for number, responses in enumerate(rounds, start=1):
        prompts = [len(text) for text in workload.prompt_texts(number) for _ in range(workload.SAMPLES)]
        groups, steps = roofline.groups_of(prompts, responses), len(responses) // workload.MINI_BATCH
        work += roofline.generation(shape, groups) + roofline.evaluation(shape, groups)
        work += roofline.update(shape, groups, steps)
        if critic:
            work += roofline.evaluation(shape, groups)  # by the reference
            work += roofline.evaluation(shape, groups, "critic") + roofline.update(shape, groups, steps, "critic")
    return work / len(rounds)


COLUMNS = {
    "model": "{model}",
    "threads": "{threads}",
    "side": "{side}",
    "tokens of a response": "{mean_length:.0f}",
    "tokens / s": "{tokens_per_second:.0f}",
    "tokens / CPU s": "{tokens_per_cpu_second:.0f}",
    **roofline.COLUMNS,
    "side / camshaft: CPU": "**{cpu_ratio:.2f}**",
    "wall": "{wall_ratio:.2f}",
    "outside of models": "{outside}",
}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(build)
    else:
        main(__doc__ or "", compared, COLUMNS, models="1M,4M", against="careful")
