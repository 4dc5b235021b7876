"""Speed of whole steps of GRPO: generate, score, log-probs, advantages, update; beside a careful loop by hand.

    python benchmarks/ppo_step.py --models 1M,4M --rounds 6

16 prompts of 1 to 64 tokens, 8 responses each of at most 96, two optimizer steps. Before anything is timed the model
learns, from random text, to end a response at any token with one chance in 33: lengths have the long tail that they
have in real runs, and a loop that waits for the longest row pays for it. The rate is so low that all rounds draw from
one policy. Sides draw different tokens, so what counts is the time for each token of a response.

- camshaft: `PPOTrainer.step` in one process; scoring runs in a process beside it and counts in wall time alone.
- careful: `CarefulLoop.step`, with `transformers.generate`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import workload
from paired import Case, Sides, main, middle, ratio, serve

LEARNING_RATE = 1e-7
MEAN_ANSWER = 32
PHASES = ("gen", "old_log_prob", "update_actor")
"""Where camshaft runs a model; what is left of a step is outside of models."""


def teach_lengths(folder: Path, vocabulary: int, steps: int = 60) -> None:
    """Make the model of the folder end what it says at any token with one chance in `MEAN_ANSWER` + 1."""
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


def build(name: str, case: Case) -> Callable[[int], dict[str, float]]:
    """One side, ready for its rounds."""
    folder = Path(case["folder"])
    if name == "camshaft":
        from camshaft_side import GRPOSteps

        steps = GRPOSteps(folder, LEARNING_RATE)
        return lambda number: steps.step()
    import transformers
    from careful import CarefulLoop

    loop = CarefulLoop(folder, LEARNING_RATE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return lambda number: loop.step([torch.tensor(tokenizer(text).input_ids) for text in workload.prompt_texts(number)])


def compared(model: str, names: list[str], threads: int, rounds: int) -> list[dict[str, Any]]:
    """A row of the result for each side."""
    from camshaft.data.parquet import write_parquet
    from camshaft.models.tiny import VOCABULARY_ROWS, make_tiny_model

    sizes = workload.SHAPES[model].options() | {"vocab_size": VOCABULARY_ROWS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder, **sizes)
        teach_lengths(folder, VOCABULARY_ROWS)
        texts = [text for number in range(rounds + 1) for text in workload.prompt_texts(number)]
        write_parquet(folder / "train.parquet", [{"prompt": text, "data_source": "letters"} for text in texts])
        with Sides(Path(__file__).name, names, {"folder": name, "model": model}, threads) as sides:
            found = sides.rounds(rounds)
    for each in found:  # of one token of a response
        for spent in each.values():
            spent |= {"wall": spent["wall"] / spent["told"]["tokens"], "cpu": spent["cpu"] / spent["told"]["tokens"]}
    inside = [sum(each["camshaft"]["told"][f"timing_s/{phase}"] for phase in PHASES) for each in found]
    whole = [each["camshaft"]["told"]["timing_s/step"] for each in found]
    return [
        {
            "model": model,
            "threads": threads,
            "side": side,
            "mean_length": statistics.mean(each[side]["told"]["tokens"] for each in found)
            / (workload.PROMPTS * workload.SAMPLES),
            "tokens_per_second": 1 / middle(found, side, "wall"),
            "tokens_per_cpu_second": 1 / middle(found, side, "cpu"),
            "cpu_ratio": ratio(found, side, "camshaft", "cpu"),
            "wall_ratio": ratio(found, side, "camshaft", "wall"),
            "outside": f"{1 - sum(inside) / sum(whole):.1%}" if side == "camshaft" else "",
        }
        for side in names
    ]


COLUMNS = {
    "model": "{model}",
    "threads": "{threads}",
    "side": "{side}",
    "tokens of a response": "{mean_length:.0f}",
    "tokens / s": "{tokens_per_second:.0f}",
    "tokens / CPU s": "{tokens_per_cpu_second:.0f}",
    "side / camshaft: CPU": "**{cpu_ratio:.2f}**",
    "wall": "{wall_ratio:.2f}",
    "outside of models": "{outside}",
}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(build)
    else:
        main(__doc__ or "", compared, COLUMNS, models="1M,4M", against="careful")
