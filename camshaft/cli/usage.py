"""Help text that all commands with a config share."""

import sys
import textwrap
from collections.abc import Sequence

from camshaft.config.schema.algorithm import ESTIMATORS
from camshaft.config.schema.fields import Section
from camshaft.config.short_names import RECIPES, declared_short_names

CONFIG_OPTIONS = """\
  -m key=1,2,3                           start one run per value, one after another
  --cfg job                              print and validate the config without starting a run
  --config-dir DIR --config-name NAME    merge DIR/NAME.yaml into the defaults
"""


def print_help(argv: Sequence[str], usage: str) -> bool:
    """Print `usage` if `argv` contains `-h` or `--help`, and return whether it does."""
    asks_for_help = bool({"-h", "--help"} & set(argv))
    if asks_for_help:
        sys.stdout.write(usage)
    return asks_for_help


def short_name_table(schema: type[Section]) -> str:
    """Return the short names of a command with their values and keys, as lines of a help text."""
    lines = ["Short names of the most common keys:"]
    entries = declared_short_names(schema).items()
    lines += [f"  {entry.name + '=':<17} {entry.values:<{min(56, 99 - len(key))}} {key}" for key, entry in entries]
    return "\n".join(lines)


def algorithm_names() -> str:
    """Return the values of `algorithm` as lines of a help text."""
    recipes = [name for name in RECIPES if name not in ("ppo", "reinforce++", "reinforce++_baseline")]
    names = ", ".join(["ppo", *(name for name in ESTIMATORS if name != "gae"), *recipes])
    return textwrap.fill(
        f"Algorithms: {names}, or package.module:function (docs/algorithms.md)", 120, subsequent_indent="  "
    )
