"""`camshaft export CHECKPOINT FOLDER`: the model of a checkpoint as a Hugging Face folder, in this process.

    camshaft export checkpoints/demo/tiny models/mine                       the actor of the newest step
    camshaft export checkpoints/demo/tiny/global_step_20/critic models/values --dtype bfloat16
    camshaft export checkpoints/demo/tiny models/mine_lora --adapter        the adapter alone

The reference engine reads the checkpoint, whatever engine wrote it on however many ranks, and tells the numbers that
plain transformers must give with the folder before the folder takes its name.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from camshaft.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from camshaft.cli.stored import Stored
    from camshaft.config import EngineModel
    from camshaft.engine import BaseEngine

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    options = _parser().parse_args(words)
    # Heavy, and not needed for --help.
    from camshaft.checkpoint import Probe, export_adapter, export_hugging_face
    from camshaft.cli.stored import find

    most, target = file_bytes(options.max_shard_size), Path(options.folder).expanduser()
    found = find(Path(options.checkpoint))
    model, tokenizer = _model(found, options), _tokenizer(found, options)
    _check_target(target, options.force)
    engine = _engine(found, model, options.dtype)
    with engine.eval_mode():
        check = Probe(engine.infer_batch, options.dtype)
        if options.adapter:
            dtype = next(weight.dtype for _, weight in engine.named_weights())
            weights = ((name, weight.to(dtype)) for name, weight in engine.named_weights(adapter_only=True))
            export_adapter(weights, model, target, check, tokenizer)
        else:
            export_hugging_face(engine.named_weights(), model, target, check, file_bytes=most, tokenizer=tokenizer)
    what = "the adapter" if options.adapter else f"the model ({model.head}, {options.dtype})"
    sys.stdout.write(f"{target}: {what} of {found.folder}; transformers gives the numbers of the checkpoint\n")
    return 0


def file_bytes(size: str) -> int:
    """'5GB' or '500MiB' in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg]i?b)?", size.strip().lower())
    found = int(float(match[1]) * UNITS[(match[2] or "").upper()]) if match else 0
    if found < 1:
        raise ConfigError(f"--max-shard-size {size}: type a size, for instance 5GB or 500MB")
    return found


def _model(found: Stored, options: argparse.Namespace) -> EngineModel:
    """The model to export, as the run had it but for what the command line says."""
    model = found.model
    if (model.trust_remote_code or model.external_lib) and not options.trust_remote_code:
        raise ConfigError(
            f"{found.folder}: the run let its model bring Python code (external_lib={model.external_lib}, "
            f"trust_remote_code={model.trust_remote_code}). If you trust it, type --trust-remote-code"
        )
    if options.model is not None:
        model = model.model_copy(update={"path": options.model})
    elif not Path(model.path).is_dir():
        raise CheckpointError(
            f"{found.folder} is of the model {model.path}, and there is no such folder here. Its config and tokenizer "
            "are needed, and with an adapter its weights: type --model FOLDER"
        )
    if options.adapter and model.lora is None:
        raise ConfigError(f"{found.folder} was trained without an adapter: leave out --adapter")
    if options.adapter and model.random_init:
        raise ConfigError(
            f"{found.folder}: the weights that its adapter belongs to were drawn from a seed and are in no folder: "
            "leave out --adapter, which merges it into them"
        )
    return model


def _tokenizer(found: Stored, options: argparse.Namespace) -> str | None:
    """The run's, if it is not that of the model's folder."""
    if found.tokenizer in (None, found.model.path):
        return None
    if Path(found.tokenizer).is_dir():
        return found.tokenizer
    if options.model is not None:
        return None
    raise CheckpointError(
        f"{found.folder} is of a run with the tokenizer {found.tokenizer}, and there is no such folder here: type "
        "--model FOLDER to take config and tokenizer from there"
    )


def _check_target(target: Path, force: bool) -> None:
    from camshaft.checkpoint import check_export_path

    check_export_path(target)
    if target.is_dir() and any(target.iterdir()) and not force:
        raise ConfigError(f"{target} holds an older export. Name another folder, or type --force to replace it")


def _engine(found: Stored, model: EngineModel, dtype: str) -> BaseEngine:
    """One that has read the checkpoint."""
    from camshaft.engine import EngineConfig, build_engine

    if model.lora is None:
        built = model.model_copy(update={"random_init": True})  # all weights are in the checkpoint
    else:
        built = model.model_copy(update={"lora": model.lora.model_copy(update={"adapter_path": None})})
    engine = build_engine("reference", EngineConfig(model=built, dtype=dtype, seed=found.seed))  # pyright: ignore
    engine.init_model()
    engine.load_checkpoint(str(found.folder))
    return engine


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="camshaft export",
        description="Take the model out of a checkpoint, as a folder in the Hugging Face layout. No run is started. "
        "Before the folder appears, transformers has loaded it, weight by weight the same, with the same numbers.",
    )
    parser.add_argument(
        "checkpoint", help="a run's folder (its newest step), a step (its actor), or a role: global_step_20/critic"
    )
    parser.add_argument("folder", help="where to write")
    parser.add_argument("--model", metavar="FOLDER", help="the model that the run began with, if it is elsewhere now")
    parser.add_argument("--adapter", action="store_true", help="a LoRA adapter alone, for PEFT (default: merged)")
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="of the weights (default: float32)")
    size = "largest file of weights (default: 4GiB); a model with more becomes several files with an index"
    parser.add_argument("--max-shard-size", metavar="SIZE", default="4GiB", help=size)
    parser.add_argument("--force", action="store_true", help="replace an older export; nothing else is ever replaced")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that the run's model brought along")
    return parser
