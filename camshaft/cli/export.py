"""`camshaft export CHECKPOINT FOLDER`: export the model of a checkpoint as a Hugging Face folder.

camshaft export checkpoints/demo/tiny models/mine                       the actor of the newest checkpoint
camshaft export checkpoints/demo/tiny/global_step_20/critic models/values --dtype bfloat16
camshaft export checkpoints/demo/tiny models/mine_lora --adapter        only the LoRA adapter
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from camshaft.errors import ConfigError
from camshaft.runs.export import ExportOptions, export_checkpoint

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def main(argv: Sequence[str]) -> int:
    """Export the model or the adapter that `argv` describes, and return the exit status."""
    options = _parser().parse_args(argv)
    content = export_checkpoint(
        Path(options.checkpoint),
        Path(options.folder),
        ExportOptions(
            model=options.model,
            adapter=options.adapter,
            dtype=options.dtype,
            file_bytes=file_bytes(options.max_shard_size),
            force=options.force,
            trust_remote_code=options.trust_remote_code,
        ),
    )
    sys.stdout.write(f"{content}; transformers reproduces the engine's outputs\n")
    return 0


def file_bytes(size: str) -> int:
    """Convert a size such as '5GB' or '500MiB' to bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg]i?b)?", size.strip().lower())
    count = int(float(match[1]) * UNITS[(match[2] or "").upper()]) if match else 0
    if count < 1:
        raise ConfigError(f"--max-shard-size {size} is not a valid size; use for example 5GB or 500MB")
    return count


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="camshaft export",
        description="Export the model of a checkpoint as a Hugging Face folder, without starting a run. The export is "
        "verified before the folder appears: transformers loads it, and its weights and outputs are compared with "
        "those of the checkpoint.",
    )
    parser.add_argument(
        "checkpoint",
        help="folder of a run (exports its newest checkpoint), of a checkpoint (exports its actor), or of a role, for "
        "example global_step_20/critic",
    )
    parser.add_argument("folder", help="folder to write")
    parser.add_argument("--model", metavar="FOLDER", help="initial model of the run, if its folder has moved")
    parser.add_argument(
        "--adapter", action="store_true", help="export only the LoRA adapter (default: merge it into the weights)"
    )
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="dtype of the weights (default: float32)")
    size = "maximum size of a weight file (default: 4GiB); a larger model is split into several files with an index"
    parser.add_argument("--max-shard-size", metavar="SIZE", default="4GiB", help=size)
    parser.add_argument(
        "--force", action="store_true", help="replace an older export; folders with other contents are never replaced"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="allow custom Python code of the run's model")
    return parser
