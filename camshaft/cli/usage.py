"""Help text that all commands with a config share."""

from collections.abc import Sequence

CONFIG_OPTIONS = """\
  -m key=1,2,3                           start one run per value, one after another
  --cfg job                              print and validate the config without starting a run
  --config-dir DIR --config-name NAME    merge DIR/NAME.yaml into the defaults
  --hydra-help                           other options of Hydra
"""


def asks_for_help(argv: Sequence[str]) -> bool:
    """Return True if `argv` contains `-h` or `--help`."""
    return bool({"-h", "--help"} & set(argv))
