"""`camshaft metrics` and `camshaft engines`: explain the logged metrics, and the features of training engines.

camshaft metrics explain actor/ppo_kl
camshaft metrics docs --out docs/metrics.md
camshaft engines explain fsdp
camshaft engines docs --out docs/engine-features.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def metrics(argv: Sequence[str]) -> int:
    """Explain a metric, or write the page of all metrics."""
    from camshaft.tracking.names import explain, reference_page

    parser, name = _parser(
        "metrics", "Explain or list logged metrics.", "explain a metric", "reference page of all metrics"
    )
    name.add_argument("name", help="name of the metric as it is logged, for example actor/ppo_kl")
    return _run(parser, argv, explain, reference_page)


def engines(argv: Sequence[str]) -> int:
    """List the features of an engine, or write the page of the features of all built-in engines."""
    from camshaft.config.engine_features import explain, features_page

    page = "page of the features of all built-in engines"
    description = "Explain the features of training engines."
    parser, name = _parser("engines", description, "list the features of an engine", page)
    name.add_argument("name", metavar="NAME|pkg.module:Class", help="name of the engine, or import path")
    return _run(parser, argv, explain, features_page)


def _parser(
    command: str, description: str, help_of_explain: str, page: str
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser of a command, and that of its action `explain`, to which the caller adds `name`."""
    parser = argparse.ArgumentParser(prog=f"camshaft {command}", description=description)
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    explain = actions.add_parser("explain", help=help_of_explain)
    docs = actions.add_parser("docs", help=f"write the {page}")
    docs.add_argument("--out", required=True, help="Markdown file to write")
    return parser, explain


def _run(
    parser: argparse.ArgumentParser, argv: Sequence[str], explain: Callable[[str], str], page: Callable[[], str]
) -> int:
    """Run the selected action, and return the exit status."""
    options = parser.parse_args(argv)
    if options.action == "docs":
        Path(options.out).write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(explain(options.name) + "\n")
    return 0
