"""Write models, tokenizers and rows that are Python objects to the folder of a run.

    path = save_model(model, tokenizer, folder)         # inputs/model-5e0f8c1b2a3d
    path = save_rows(rows, folder, "train")             # inputs/train-9a0c4d2e1f3b.jsonl

The name of a file or folder contains a checksum of its content. Equal objects get the same path, so a run can resume
with them. Different objects never overwrite the inputs of existing checkpoints.
"""

import filecmp
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from camshaft import storage
from camshaft.errors import CamshaftError, ConfigError

FOLDER = "inputs"
"""Subfolder of a run."""


def is_path(value: Any) -> bool:
    """Return True for a path, and for a list of paths."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(is_path, value))
    return isinstance(value, str | os.PathLike)


def plain(value: Any) -> Any:
    """Return a value with paths as strings and tuples as lists, as a config file would contain it."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return value


def save_rows(rows: Iterable[Any], run_folder: Path, name: str) -> str:
    """Write rows as JSON lines, and return the path. `name` is that of the argument, `data` or `val_data`."""
    if isinstance(rows, Mapping) or not hasattr(rows, "__iter__"):
        raise ConfigError(f"{name} has type {type(rows).__name__}; pass a path, or a sequence of dicts, one per row")
    if not hasattr(rows, "__len__"):
        raise ConfigError(f"{name} is an iterator without a length, which can be read only once; pass list({name})")
    folder = run_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    checksum = hashlib.sha256()
    with tempfile.NamedTemporaryFile("wb", dir=folder, delete=False) as file:
        try:
            for number, row in enumerate(rows):
                line = _json_line(row, f"{name}, row {number}")
                checksum.update(line)
                file.write(line)
        except BaseException:
            os.unlink(file.name)
            raise
    target = folder / f"{name}-{checksum.hexdigest()[:12]}.jsonl"
    storage.flush(Path(file.name))
    if os.path.lexists(target) and not (target.is_file() and filecmp.cmp(file.name, target, shallow=False)):
        storage.rename_aside(target)
    os.replace(file.name, target)
    storage.flush(folder)
    return str(target)


def _json_line(row: Any, location: str) -> bytes:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{location} has type {type(row).__name__}; each row must be a dict")
    try:
        return (json.dumps(dict(row), ensure_ascii=False, default=_to_json) + "\n").encode()
    except (TypeError, ValueError, UnicodeEncodeError) as error:
        raise ConfigError(
            f"{location} cannot be written as JSON: {_invalid_columns(row)}{error}; convert the value, or write a file"
        ) from error


def _invalid_columns(row: Mapping[Any, Any]) -> str:
    """Return the names of the columns with values that are not JSON types, with a colon."""
    invalid = []
    for name, value in row.items():
        try:
            json.dumps(value, default=_to_json)
        except (TypeError, ValueError):
            invalid.append(str(name))
    return f"column {', '.join(invalid)}: " if invalid else ""


def _to_json(value: Any) -> Any:
    import numpy

    if isinstance(value, numpy.ndarray | numpy.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not a JSON type")


def save_model(model: Any, tokenizer: Any, run_folder: Path) -> str:
    """Write a model of transformers and its tokenizer, and return the path of the folder.

    `tokenizer` is an object, a path, or None to use the tokenizer of the folder from which the model was loaded.
    """
    if not hasattr(model, "save_pretrained"):
        raise ConfigError(
            f"model has type {type(model).__name__}; pass the path of a Hugging Face folder, or a model of transformers"
        )
    from camshaft.models.loader import load_tokenizer, quiet_transformers

    if tokenizer is None or is_path(tokenizer):
        try:
            tokenizer = load_tokenizer(os.fspath(tokenizer or model.name_or_path))
        except (CamshaftError, AttributeError) as error:
            raise ConfigError(
                f"model is an object, and its tokenizer cannot be loaded ({error}); pass tokenizer=<tokenizer or "
                "folder>"
            ) from error

    def write(folder: Path) -> None:
        with quiet_transformers():
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return _save_folder("model", run_folder, write)


def save_tokenizer(tokenizer: Any, run_folder: Path) -> str:
    """Write a tokenizer of transformers, and return the path of its folder."""
    if not hasattr(tokenizer, "save_pretrained"):
        raise ConfigError(f"tokenizer has type {type(tokenizer).__name__}; pass a path, or a tokenizer of transformers")
    return _save_folder("tokenizer", run_folder, tokenizer.save_pretrained)


def _save_folder(name: str, run_folder: Path, write: Callable[[Path], object]) -> str:
    from camshaft.trainer.resume import checksum

    folder = run_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder))
    try:
        write(work)
        files: Sequence[Path] = sorted(path for path in work.rglob("*") if path.is_file())
        target = folder / f"{name}-{checksum(files)[:12]}"
        if not target.exists():
            work.chmod(0o755)  # mkdtemp creates private folders
            for path in (*files, work):
                storage.flush(path)
            os.replace(work, target)
            storage.flush(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return str(target)
