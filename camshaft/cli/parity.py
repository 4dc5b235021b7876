"""`camshaft parity` and `camshaft check-model`: compare an engine with a rollout or with transformers, and diagnose."""

import argparse
from collections.abc import Sequence

DTYPES = ("float32", "bfloat16", "float64")
HEADS = ("causal_lm", "value", "reward")


def main(argv: Sequence[str]) -> int:
    """Compare an engine and a rollout, and return exit status 0 if their log-probs agree and 1 otherwise."""
    options = _parity_parser().parse_args(argv)
    from camshaft.parity import report

    return report.run(options)


def check_model(argv: Sequence[str]) -> int:
    """Compare a model with transformers, and return exit status 0 if they agree and 1 otherwise."""
    options = _model_parser().parse_args(argv)
    from camshaft.parity.model import report

    return report.run(options)


def _parity_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="camshaft parity",
        description="Compare the log-probs of a training engine and a rollout. Both load the same model folder in this "
        "process. The weights of the engine are synced to the rollout, the rollout generates responses, and the engine "
        "recomputes their log-probs. If the log-probs agree and the weights of the engine are not bfloat16, the "
        "comparison is repeated after one optimizer step. Exit status: 0 if no difference exceeds the limit, 1 if a "
        "difference exceeds it (the likely cause is reported), 2 if an argument is invalid.",
        epilog="example: camshaft parity --engine fsdp --rollout torch --model models/tiny --temperature 0.7",
    )
    pair = parser.add_argument_group("engine and rollout")
    pair.add_argument("--engine", required=True, metavar="NAME", help="fsdp, reference, ..., or pkg.mod:Class")
    pair.add_argument("--rollout", required=True, metavar="NAME", help="torch, hf, vllm, ..., or pkg.mod:Class")
    pair.add_argument("--model", required=True, metavar="FOLDER", help="Hugging Face folder with weights")
    pair.add_argument("--device", default="cpu", help="device of engine and rollout (default: cpu)")
    pair.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the engine (default: float32)")
    pair.add_argument(
        "--rollout-dtype", choices=DTYPES, default="float32", help="dtype of the rollout (default: float32)"
    )
    repeated = {
        "--option": "option of the engine, for example mixed_precision.param_dtype=bfloat16; can be repeated",
        "--engine-kwarg": "entry of the rollout's engine_kwargs; can be repeated",
    }
    for name, meaning in repeated.items():
        pair.add_argument(name, action="append", default=[], metavar="KEY=VALUE", help=meaning)
    pair.add_argument("--trust-remote-code", action="store_true", help="allow custom Python code of the model folder")
    inputs = parser.add_argument_group("prompts and sampling")
    inputs.add_argument("--data", metavar="FILE", help="data file with prompts (default: random tokens)")
    inputs.add_argument(
        "--tokenizer", metavar="FOLDER", help="tokenizer for the prompts; it is compared with the tokenizer of --model"
    )
    numbers = {
        "--prompts": (8, "number of prompts"),
        "--prompt-length": (32, "maximum prompt length in tokens; longer prompts are truncated on the left"),
        "--response-length": (32, "maximum response length in tokens"),
        "--seed": (0, "seed for random prompts and for sampling"),
        "--top-k": (0, "number of most likely tokens to sample from; 0 samples from all tokens"),
        "--temperature": (1.0, "sampling temperature; 0 uses greedy decoding"),
        "--top-p": (1.0, "cumulative probability of the most likely tokens to sample from"),
    }
    for name, (default, meaning) in numbers.items():
        kind, metavar = (int, "N") if isinstance(default, int) else (float, "X")
        inputs.add_argument(name, type=kind, default=default, metavar=metavar, help=f"{meaning} (default: {default})")
    limit = "maximum log-prob difference to accept (default: 0.001, suitable for float32)"
    parser.add_argument("--limit", type=float, default=1e-3, metavar="X", help=limit)
    return parser


def _model_parser() -> argparse.ArgumentParser:
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
    backend.add_argument(
        "--dtype", choices=("float32", "float64"), help="dtype of engine and rollout (default: float64 if supported)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of rows and weights (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser
