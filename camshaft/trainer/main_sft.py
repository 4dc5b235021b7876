"""Entry point `python -m camshaft.trainer.main_sft key=value ...`, which is equivalent to `camshaft sft`."""

import sys

from camshaft.cli import main

if __name__ == "__main__":
    sys.exit(main(["sft", *sys.argv[1:]]))
