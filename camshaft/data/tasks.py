"""Generate small arithmetic data sets as parquet files.

    paths = write_arithmetic("data/sums", operations=("addition",), num_train=2000, num_heldout=200)
    paths.train           # prompt [{"role": "user", "content": "12+35="}], reward_model.ground_truth "47"
    paths.sft_train       # the same problems with a column `response`, for supervised fine-tuning before RL
    paths.preference_train    # the same problems with columns `chosen`, the result, and `rejected`, a wrong number

The demo and the tests use these data sets for runs that learn in minutes. The same arguments produce the same files.
"""

import math
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from camshaft.data.tables import write_parquet
from camshaft.errors import ConfigError

DATA_SOURCE = "camshaft/arithmetic"

OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "addition": ("+", operator.add),
    "subtraction": ("-", operator.sub),
    "multiplication": ("*", operator.mul),
}
"""Operation name -> (operator sign, function)."""

_COMMUTATIVE = {"addition", "multiplication"}

Problem = tuple[str, int, int]


@dataclass(frozen=True)
class ArithmeticPaths:
    """Files of a data set: prompts for RL, prompts with responses for SFT, and preference pairs."""

    train: Path
    heldout: Path
    sft_train: Path
    sft_heldout: Path
    preference_train: Path
    preference_heldout: Path


def write_arithmetic(
    folder: str | Path,
    *,
    operations: Sequence[str] = ("addition",),
    left: tuple[int, int] = (0, 99),
    right: tuple[int, int] = (0, 99),
    num_train: int = 4000,
    num_heldout: int = 500,
    careless: float = 0.0,
    seed: int = 0,
) -> ArithmeticPaths:
    """Write a training and a held-out split of problems with operands in the inclusive ranges `left` and `right`.

    The splits are disjoint up to commutation: if 12+35 is held out, 35+12 is not in the training split. `careless` is
    the fraction of SFT responses that add without carrying (57+68=15). A model trained on them makes this error, which
    RL can then correct.
    """
    if careless and tuple(operations) != ("addition",):
        raise ConfigError(f"careless={careless} requires operations=('addition',), but operations={tuple(operations)}")
    train, heldout = _split(operations, left, right, (num_train, num_heldout), seed)
    careless_rng, wrong_rng = random.Random(f"careless {seed}"), random.Random(f"slip {seed}")
    folder = Path(folder).expanduser()
    files = {}
    for split, problems in (("train", train), ("heldout", heldout)):
        rows = [_row(problem, split, index) for index, problem in enumerate(problems)]
        sft_rows: list[dict[str, Any]] = []
        for row, (_, a, b) in zip(rows, problems, strict=True):
            is_careless = careless_rng.random() < careless
            response = str(_without_carry(a, b)) if is_careless else row["reward_model"]["ground_truth"]
            sft_rows.append({"data_source": DATA_SOURCE, "prompt": row["prompt"], "response": response})
        pairs = [
            {"prompt": row["prompt"], "chosen": str(result), "rejected": str(_wrong_result(result, wrong_rng))}
            for row, result in zip(rows, map(_result, problems), strict=True)
        ]
        files[split] = write_parquet(folder / f"{split}.parquet", rows)
        files[f"preference_{split}"] = write_parquet(folder / f"preference_{split}.parquet", pairs)
        files[f"sft_{split}"] = write_parquet(folder / f"sft_{split}.parquet", sft_rows)
    return ArithmeticPaths(**files)


def _split(
    operations: Sequence[str], left: tuple[int, int], right: tuple[int, int], sizes: tuple[int, int], seed: int
) -> tuple[list[Problem], list[Problem]]:
    for name in operations:
        if name not in OPERATIONS:
            raise ConfigError(f"unknown operation '{name}'; use one of {', '.join(OPERATIONS)}")
    operations = list(dict.fromkeys(operations))
    shape = (len(operations), left[1] - left[0] + 1, right[1] - right[0] + 1)
    total = math.prod(shape) if min(shape) > 0 else 0
    num_train, num_heldout = sizes
    if min(sizes) < 1 or num_train + num_heldout > total:
        raise ConfigError(
            f"num_train={num_train} and num_heldout={num_heldout} must be at least 1 and sum to at most {total}, the "
            f"number of problems from {shape[0]} operations with {max(shape[1], 0)} x {max(shape[2], 0)} operands"
        )
    # A held-out problem excludes at most one other problem from training, so this sample is large enough.
    numbers = random.Random(seed).sample(range(total), min(total, num_train + 2 * num_heldout))
    problems = [_problem(number, operations, left[0], right[0], shape) for number in numbers]
    heldout = problems[:num_heldout]
    excluded = {_canonical_form(problem) for problem in heldout}
    train = [problem for problem in problems[num_heldout:] if _canonical_form(problem) not in excluded][:num_train]
    if len(train) < num_train:
        raise ConfigError(
            f"num_train={num_train} exceeds the {len(train)} problems that remain of {total} without the {num_heldout} "
            "held-out problems and their commuted forms. Widen the operand ranges, or lower num_train or num_heldout"
        )
    return train, heldout


def _problem(number: int, operations: Sequence[str], left: int, right: int, shape: tuple[int, ...]) -> Problem:
    rest, b = divmod(number, shape[2])
    operation, a = divmod(rest, shape[1])
    return operations[operation], left + a, right + b


def _without_carry(left: int, right: int) -> int:
    """Add without carrying: 57 + 68 = 15, because 7 + 8 gives 5 and 5 + 6 gives 1."""
    result, place = 0, 1
    while left or right:
        result += (left + right) % 10 * place
        left, right, place = left // 10, right // 10, place * 10
    return result


def _result(problem: Problem) -> int:
    name, a, b = problem
    return OPERATIONS[name][1](a, b)


def _wrong_result(result: int, rng: random.Random) -> int:
    """Return a wrong result that differs by at most max(9, |result|)."""
    difference = rng.randint(1, max(9, abs(result)))
    return result + rng.choice((-difference, difference))


def _canonical_form(problem: Problem) -> Problem:
    name, a, b = problem
    return (name, min(a, b), max(a, b)) if name in _COMMUTATIVE else problem


def _row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    name, a, b = problem
    sign, _ = OPERATIONS[name]
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{a}{sign}{b}="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(_result(problem))},
        "extra_info": {"split": split, "index": index, "operation": name, "left": a, "right": b},
    }
