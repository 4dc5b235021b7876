"""Entry point `python -m camshaft.trainer.main_ppo key=value ...`, which is equivalent to `camshaft ppo`."""

import sys

from camshaft.cli import main

if __name__ == "__main__":
    sys.exit(main(["ppo", *sys.argv[1:]]))
