"""`camshaft engines`: explain the features of training engines.

camshaft engines explain fsdp
camshaft engines docs --out docs/engine-features.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from camshaft.config.engine_features import explain, features_page


def main(argv: Sequence[str]) -> int:
    """Run the selected action, and return the exit status."""
    options = _parser().parse_args(argv)
    if options.action == "docs":
        Path(options.out).write_text(features_page(), encoding="utf-8")
    else:
        sys.stdout.write(explain(options.name) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="camshaft engines", description="Explain the features of training engines.")
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    explain_engine = actions.add_parser("explain", help="list the features of an engine")
    explain_engine.add_argument("name", metavar="NAME|pkg.module:Class", help="name of the engine, or import path")
    docs = actions.add_parser("docs", help="write the page of the features of all built-in engines")
    docs.add_argument("--out", required=True, help="Markdown file to write")
    return parser
