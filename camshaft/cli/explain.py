"""`camshaft metrics`, `camshaft engines` and `camshaft rollouts`: explain metrics, and list and explain backends.

camshaft metrics explain actor/ppo_kl
camshaft metrics explain policy kl
camshaft metrics docs --out docs/metrics.md
camshaft engines
camshaft engines explain fsdp
camshaft engines explain --model qwen3
camshaft engines docs --out docs/engine-features.md
camshaft rollouts
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from camshaft import storage
from camshaft.errors import ConfigError


def metrics(argv: Sequence[str]) -> int:
    """Explain a metric, or write the page of all metrics."""
    from camshaft.tracking.names import explain, reference_page

    parser, name = _parser(
        "metrics", "Explain or list logged metrics.", "explain a metric", "reference page of all metrics"
    )
    name.add_argument(
        "name",
        nargs="+",
        help="name of the metric as it is logged, word of the step line such as reward, or text to search for",
    )
    return _run(parser, argv, lambda options: explain(" ".join(options.name)), reference_page)


def engines(argv: Sequence[str]) -> int:
    """List the engines or the features of an engine, or write the page of the features of all built-in engines."""
    from camshaft.config.backends import ENGINES, list_backends
    from camshaft.config.engine_features import explain, features_page
    from camshaft.config.families import table

    page = "page of the features of all built-in engines"
    description = "List training engines, and explain their features. Without an action, list the engines."
    parser, name = _parser("engines", description, "list the features of an engine", page, "list all engines")
    name.add_argument("name", nargs="?", metavar="NAME|pkg.module:Class", help="name of the engine, or import path")
    name.add_argument(
        "--model",
        metavar="TYPE|PATH",
        help="what all engines and rollouts support for a model type, such as qwen3, or for the model in a folder; "
        "with NAME, the features of one engine for this model",
    )

    def explain_engine(options: argparse.Namespace) -> str:
        if options.model is None:
            return explain(options.name) if options.name else name.error("NAME or --model is required")
        return (
            explain(options.name, table.find_family(options.model).values)
            if options.name
            else table.explain(options.model)
        )

    return _run(parser, argv, explain_engine, features_page, partial(list_backends, ENGINES, "camshaft.engines"))


def rollouts(argv: Sequence[str]) -> int:
    """List the rollouts."""
    from camshaft.config.backends import ROLLOUTS, list_backends, used_capabilities

    argparse.ArgumentParser(
        prog="camshaft rollouts", description="List the rollouts: built-in ones, and those of installed packages."
    ).parse_args(argv)
    features = {
        "continues rows": lambda name: used_capabilities(name, {}).continues_rows,
        "scores prompts": lambda name: used_capabilities(name, {}).scores_prompts,
    }
    sys.stdout.write(list_backends(ROLLOUTS, "camshaft.rollouts", features) + "\n")
    return 0


def write_page(path: Path, text: str) -> None:
    """Write a generated page. Raise ConfigError if the file exists and has another first line, as other pages have."""
    first_line = text.partition("\n")[0].encode() + b"\n"
    if path.exists() and not (path.is_file() and path.read_bytes().startswith(first_line)):
        raise ConfigError(f"--out {path}: the file already exists and is another page; use another file")
    with storage.new_file(path) as work:
        work.write_text(text, encoding="utf-8")


def _parser(
    command: str, description: str, help_of_explain: str, page: str, help_of_list: str | None = None
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser of a command, and that of its action `explain`, to which the caller adds `name`.

    With `help_of_list`, the command has an action `list`, which is the default.
    """
    parser = argparse.ArgumentParser(prog=f"camshaft {command}", description=description)
    actions = parser.add_subparsers(required=help_of_list is None, metavar="ACTION", dest="action")
    if help_of_list is not None:
        actions.add_parser("list", help=help_of_list)
    explain = actions.add_parser("explain", help=help_of_explain)
    docs = actions.add_parser("docs", help=f"write the {page}")
    docs.add_argument("--out", required=True, help="Markdown file to write")
    return parser, explain


def _run(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    explain: Callable[[argparse.Namespace], str],
    page: Callable[[], str],
    list_all: Callable[[], str] | None = None,
) -> int:
    """Run the selected action, and return the exit status."""
    options = parser.parse_args(argv)
    if options.action == "docs":
        write_page(Path(options.out), page())
    elif options.action == "explain" or list_all is None:
        sys.stdout.write(explain(options) + "\n")
    else:
        sys.stdout.write(list_all() + "\n")
    return 0
