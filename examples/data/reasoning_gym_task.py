"""Generate a reasoning-gym task, without a download (requires pip install 'camshaft[reasoning-gym]').

    python examples/data/reasoning_gym_task.py --task gcd --size 2000 --test_size 200 --set max_value=20 --out data/gcd

`--set name=value` passes a setting to the task (a number, true, a list, or a string). `--system` adds a system message
that asks the model to reason first. The reward scores the last <answer>...</answer>, or the full response if it has
none.
"""

import argparse
import json
import sys
from typing import Any

from camshaft.data.reasoning_gym import write_reasoning_gym
from camshaft.errors import CamshaftError, ConfigError, report_error


def setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text} has no value; use name=value")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, help="name of the task in reasoning-gym")
    parser.add_argument("--out", required=True, help="folder for train.parquet and test.parquet")
    parser.add_argument("--size", type=int, default=2000, help="rows of train.parquet (%(default)s)")
    parser.add_argument("--test_size", type=int, default=200, help="rows of test.parquet (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the questions (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the task")
    parser.add_argument("--system", help="a system message before each question")
    options = parser.parse_args(arguments)
    try:
        paths = write_reasoning_gym(
            options.out,
            options.task,
            num_train=options.size,
            num_heldout=options.test_size,
            seed=options.seed,
            settings=dict(map(setting, options.set)),
            system=options.system,
        )
    except CamshaftError as error:
        return report_error(error)
    print(f"{paths.train}: {options.size} rows\n{paths.test}: {options.test_size} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
