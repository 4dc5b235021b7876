"""Parts that the `--help` texts of all commands with a config share."""

from collections.abc import Sequence

CONFIG_OPTIONS = """\
  -m key=1,2,3                           one run per value, one after another
  --cfg job                              print and check the config without starting a run
  --config-dir DIR --config-name NAME    merge DIR/NAME.yaml into the defaults
  --hydra-help                           other options of Hydra
"""


def asks_for_help(argv: Sequence[str]) -> bool:
    return bool({"-h", "--help"} & set(argv))
