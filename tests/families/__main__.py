"""Command line of the families harness: prints a table, and fails if it differs from the list of refused types."""

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from .checks import HEADS, Outcome, check_type
from .configs import decoder_types
from .refused import REFUSED


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.families", description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; by default all decoder-only types")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of processes")
    options = parser.parse_args()
    names = options.types or decoder_types()
    equal, errors = dict.fromkeys(HEADS, 0), []
    write(f"{'type':<22}" + "".join(f"{head:<12}" for head in HEADS))
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for name, outcomes in zip(names, pool.map(check_type, names), strict=True):
            write(f"{name:<22}" + "".join(f"{cell(outcome):<12}" for outcome in outcomes))
            errors += find_errors(name, outcomes)
            for head, outcome in zip(HEADS, outcomes, strict=False):
                equal[head] += outcome.status == "equal"
    write(f"\nof {len(names)} types, " + ", ".join(f"{count} equal with {head}" for head, count in equal.items()))
    for error in errors:
        write(f"\n{error}")
    return 1 if errors else 0


def write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def cell(outcome: Outcome) -> str:
    return outcome.detail.split()[0] if outcome.status == "equal" else outcome.status


def find_errors(name: str, outcomes: list[Outcome]) -> Iterator[str]:
    """Yield the contradictions between the outcomes of a type and the list of refused types."""
    reason = REFUSED.get(name)
    for head, outcome in zip(HEADS, outcomes, strict=False):
        if outcome.status in ("different", "failed"):
            yield f"{name} ({head}) {outcome.status}: {outcome.detail}"
        elif outcome.status == "refused" and (reason is None or reason not in outcome.detail):
            yield f"{name} ({head}) is refused, but `refused.py` says {reason}: {outcome.detail}"
    if reason is not None and all(outcome.status == "equal" for outcome in outcomes):
        yield f"{name} equals transformers, but `refused.py` lists it: {reason}"


if __name__ == "__main__":
    sys.exit(main())
