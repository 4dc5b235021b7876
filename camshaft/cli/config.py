"""`camshaft config`: explain or list config keys.

camshaft config explain algorithm.kl_ctrl.kl_coef
camshaft config explain learning rate
camshaft config show --trainer sft
camshaft config docs --out docs/config.md
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from camshaft.cli.explain import write_page
from camshaft.config import explain, reference_page, show
from camshaft.config.render import SCHEMAS


def main(argv: Sequence[str]) -> int:
    """Run the selected action, and return the exit status."""
    options = _parser().parse_args(argv)
    if options.action == "docs":
        write_page(Path(options.out), reference_page())
        return 0
    text = explain(" ".join(options.key), options.trainer) if options.action == "explain" else show(options.trainer)
    sys.stdout.write(text + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="camshaft config", description="Explain or list config keys.")
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    explain_key = actions.add_parser("explain", help="explain a key or a section")
    explain_key.add_argument(
        "key", nargs="+", help="dotted key such as algorithm.kl_ctrl.kl_coef, or text to search the descriptions for"
    )
    show_all = actions.add_parser("show", help="print all keys with their defaults and comments")
    docs = actions.add_parser("docs", help="write the reference page of all keys")
    docs.add_argument("--out", required=True, help="Markdown file to write")
    for action in (explain_key, show_all):
        action.add_argument("--trainer", choices=SCHEMAS, default="ppo", help="command to configure (default: ppo)")
    return parser
