"""`camshaft metrics`: explain the logged metrics.

camshaft metrics explain actor/ppo_kl
camshaft metrics docs --out docs/metrics.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from camshaft.tracking.names import explain, reference_page


def main(argv: Sequence[str]) -> int:
    """Run the selected action, and return the exit status."""
    options = _parser().parse_args(argv)
    if options.action == "docs":
        Path(options.out).write_text(reference_page(), encoding="utf-8")
    else:
        sys.stdout.write(explain(options.name) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="camshaft metrics", description="Explain or list logged metrics.")
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    explain_metric = actions.add_parser("explain", help="explain a metric")
    explain_metric.add_argument("name", help="name of the metric as it is logged, for example actor/ppo_kl")
    docs = actions.add_parser("docs", help="write the reference page of all metrics")
    docs.add_argument("--out", required=True, help="Markdown file to write")
    return parser
