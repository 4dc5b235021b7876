"""`camshaft check-model`: compare a model on an engine with plain transformers, and name what differs."""

import argparse
from collections.abc import Sequence

DTYPES = ("float32", "float64")
HEADS = ("causal_lm", "value", "reward")


def main(argv: Sequence[str]) -> int:
    """Compare a model with transformers, and return exit status 0 if they agree and 1 otherwise."""
    options = _parser().parse_args(argv)
    from camshaft.parity.model.report import run

    return run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="camshaft check-model",
        description="Compare a model on a training engine with plain transformers in float64, one row at a time: "
        "log-probs of ten rows, packed rows, rows with a common prompt, gradients, greedy tokens of a rollout, and the "
        "value and reward heads. For a difference, variants of the transformers model with one change each are "
        "compared with the engine, so that the cause is named. Of a large model, the first layers are compared. Exit "
        "status: 0 if all comparisons agree, 1 if one does not, 2 if an argument is invalid.",
        epilog="example: camshaft check-model models/tiny --engine my_package.engine:MyEngine",
    )
    parser.add_argument("model", metavar="PATH_OR_NAME", help="model folder, or name of a model on the hub")
    model = parser.add_argument_group("model and oracle")
    model.add_argument("--layers", type=int, metavar="N", help="compare only the first N layers (default: by size)")
    model.add_argument(
        "--random-weights", action="store_true", help="ignore the weights (default if the folder has none)"
    )
    model.add_argument("--oracle", metavar="TYPE", help="model type of transformers that the oracle has, such as llama")
    model.add_argument("--trust-remote-code", action="store_true", help="allow custom Python code of the model folder")
    model.add_argument("--external-lib", metavar="MODULES", help="modules to import first, which register models")
    model.add_argument("--head", choices=HEADS, help="compare only this head (default: all)")
    backend = parser.add_argument_group("engine and rollout")
    backend.add_argument(
        "--engine", default="reference", metavar="NAME", help="name or pkg.mod:Class (default: reference)"
    )
    backend.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="option of the engine; can be repeated"
    )
    backend.add_argument("--rollout", default="torch", metavar="NAME", help="rollout, or none (default: torch)")
    backend.add_argument("--device", default="cpu", help="device of engine and rollout (default: cpu)")
    backend.add_argument("--dtype", choices=DTYPES, help="dtype of engine and rollout (default: float64 if supported)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of rows and weights (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser
