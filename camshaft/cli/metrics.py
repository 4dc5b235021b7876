"""The command `camshaft metrics`: what a name means, and the page of all of them.

camshaft metrics explain actor/ppo_kl
camshaft metrics docs --out docs/metrics.md
"""

import argparse
import sys
from pathlib import Path

from camshaft.tracking.names import explain, reference_page


def add_arguments(metrics: argparse.ArgumentParser) -> None:
    """The words of the command."""
    actions = metrics.add_subparsers(required=True, metavar="ACTION")
    one = actions.add_parser("explain", help="what one metric means")
    one.add_argument("name", help="as it is logged, for instance actor/ppo_kl")
    one.set_defaults(run=_explain)
    docs = actions.add_parser("docs", help="write the reference page of all metrics")
    docs.add_argument("--out", required=True, help="the Markdown file to write")
    docs.set_defaults(run=_docs)


def _explain(options: argparse.Namespace) -> int:
    sys.stdout.write(explain(options.name) + "\n")
    return 0


def _docs(options: argparse.Namespace) -> int:
    Path(options.out).write_text(reference_page(), encoding="utf-8")
    return 0
