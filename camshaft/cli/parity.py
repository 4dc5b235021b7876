"""`camshaft parity`: compare the log-probs of a training engine and a rollout, and diagnose a difference.

camshaft parity --engine fsdp --rollout torch --model models/tiny --temperature 0.7
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

DTYPES = ("float32", "bfloat16", "float64")


def main(argv: Sequence[str]) -> int:
    """Compare the pair; returns 0 if the log-probs agree and 1 if they do not."""
    options = _parser().parse_args(argv)
    from camshaft.parity.report import run

    return run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="camshaft parity",
        description="Compare the log-probs of a training engine and a rollout. Both are built on one model folder in "
        "this process. The rollout receives the engine's weights and generates responses; the engine recomputes their "
        "log-probs. If these agree and the engine's weights are not bfloat16, the comparison is repeated after one "
        "optimizer step. Exit status 0: no difference exceeds the limit; 1: one does, and the likely cause is "
        "reported; 2: an argument is wrong.",
        epilog="example: camshaft parity --engine fsdp --rollout torch --model models/tiny --temperature 0.7",
    )
    pair = parser.add_argument_group("the pair")
    pair.add_argument("--engine", required=True, metavar="NAME", help="fsdp, reference, ..., or pkg.mod:Class")
    pair.add_argument("--rollout", required=True, metavar="NAME", help="torch, hf, vllm, ..., or pkg.mod:Class")
    pair.add_argument("--model", required=True, metavar="FOLDER", help="a Hugging Face folder with weights")
    pair.add_argument("--device", default="cpu", help="device of both (default: cpu)")
    pair.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the engine (default: float32)")
    pair.add_argument(
        "--rollout-dtype", choices=DTYPES, default="float32", help="dtype of the rollout (default: float32)"
    )
    repeated = {
        "--option": "an option of the engine, for example mixed_precision.param_dtype=bfloat16; may be repeated",
        "--engine-kwarg": "an entry of the rollout's engine_kwargs; may be repeated",
    }
    for name, meaning in repeated.items():
        pair.add_argument(name, action="append", default=[], metavar="KEY=VALUE", help=meaning)
    pair.add_argument("--trust-remote-code", action="store_true", help="run Python code of the model folder")
    inputs = parser.add_argument_group("prompts and sampling")
    inputs.add_argument("--data", metavar="FILE", help="a parquet file of prompts (default: random tokens)")
    inputs.add_argument("--tokenizer", metavar="FOLDER", help="tokenizer of the prompts, compared with that of --model")
    numbers = {
        "--prompts": (8, "number of prompts"),
        "--prompt-length": (32, "maximum prompt length; longer prompts keep their last tokens"),
        "--response-length": (32, "maximum response length"),
        "--seed": (0, "seed of random prompts and of sampling"),
        "--top-k": (0, "sample from the k likeliest tokens; 0 for all"),
    }
    for name, (default, meaning) in numbers.items():
        inputs.add_argument(name, type=int, default=default, metavar="N", help=f"{meaning} (default: {default})")
    shares = {"--temperature": "sampling temperature; 0 is greedy", "--top-p": "nucleus probability"}
    for name, meaning in shares.items():
        inputs.add_argument(name, type=float, default=1.0, metavar="X", help=f"{meaning} (default: 1.0)")
    limit = "largest log-prob difference that counts as agreement (default: 0.001, suitable for float32)"
    parser.add_argument("--limit", type=float, default=1e-3, metavar="X", help=limit)
    return parser
