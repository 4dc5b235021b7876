"""Explain why transformers cannot use a model folder: the file, the reason, and the fix if it is known.

    with convert_folder_errors(folder, f"transformers cannot read a tokenizer from {folder}"):
        tokenizer = AutoTokenizer.from_pretrained(folder)

transformers raises exceptions of any class for a damaged folder, often without the name of the file or the key. A block
contains only the call of transformers. A lack of memory is not an error of the folder, and is not converted.
"""

import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from camshaft import hub
from camshaft.config.model_settings import is_dropout, quantization, quantization_problem
from camshaft.errors import CamshaftError, EngineError, StorageError
from camshaft.models.attention import PACKED
from camshaft.storage import read_json_object

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
OBJECTS = (
    *(CONFIG, GENERATION_CONFIG, "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "adapter_config.json", "*.index.json"),
)
"""Patterns of the files that contain a JSON object."""
INDEX = "model.safetensors.index.json"
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "n_embd", "n_layer", "n_head", "n_inner", "max_position_embeddings", "n_positions"),
)
"""Keys of a config whose values are positive integers."""
MAX_LAYERS = 10_000
"""Maximum number of layers. Above it, transformers takes minutes and gigabytes before it reads a weight."""
_EXPLAINED = (OSError, ValueError, ImportError, StrictDataclassError, SafetensorError)
"""Exceptions whose messages need no name of a class to be understood."""


def convert_folder_errors(folder: Path, problem: str, fix: str) -> AbstractContextManager[None]:
    """Convert each exception of transformers in a block to an `EngineError`.

    If the cause is a known mistake or an entry of config.json, the error states it, and otherwise `problem`.
    """
    return convert_errors(lambda error: _mistake(error, folder) or f"{problem}: {reason(error)}\n{fix}")


def convert_model_errors(folder: Path, model_type: str, head: str) -> AbstractContextManager[None]:
    """Convert errors that transformers raises when it builds a model or reads its weights to an `EngineError`."""
    return convert_errors(lambda error: _model_message(error, folder, model_type, head))


@contextlib.contextmanager
def convert_errors(message: Callable[[Exception], str]) -> Iterator[None]:
    """Convert each exception in a block that calls transformers to an `EngineError` with the returned message."""
    try:
        yield
    except CamshaftError:
        raise
    except Exception as error:  # of classes that transformers does not document, such as KeyError for hidden_act
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error):
            raise
        raise EngineError(message(error)) from error


def _model_message(error: Exception, folder: Path, model_type: str, head: str) -> str:
    if isinstance(error, KeyError) and error.args == (PACKED,):
        return (
            f"{model_type} models do not use the attention interface of transformers, so they do not support "
            f"attn_implementation='{PACKED}'; choose another model"
        )
    if isinstance(error, UnpicklingError):
        return (
            f"the weight files in {folder} contain objects other than tensors, which run code when they are loaded, "
            "so they were not loaded; use a folder with safetensors files"
        )
    if mistake := _mistake(error, folder):
        return mistake
    damage = damaged_weights(folder)
    if damage or isinstance(error, (OSError, SafetensorError)):
        return (
            f"cannot read the weights in {folder}: {damage or reason(error)}\n"
            "To initialize random weights instead, set random_init=True"
        )
    return f"transformers cannot build a {model_type} model with head={head} from {folder / CONFIG}: {reason(error)}"


def _mistake(error: Exception, folder: Path) -> str | None:
    """Return the mistake in a JSON file of a folder that caused an exception; None if it is not known."""
    if mistake := find_mistake(folder):
        return mistake
    text = reason(error)
    words = {(key, value) for key, value in _entries(read_config(folder)) if isinstance(value, str) and value}
    quoted = sorted(item for item in words if re.search(rf"['\"`]{re.escape(item[1])}['\"`]", text))
    if not quoted and not isinstance(error, StrictDataclassError):  # which only the config classes raise
        return None
    listed = f" (it contains {', '.join(f'{key}={value!r}' for key, value in quoted)})" if quoted else ""
    return (
        f"{folder / CONFIG} cannot be read: {text}{listed}\n"
        "Correct the file, or set the path to a folder that save_pretrained wrote"
    )


def reason(error: Exception) -> str:
    """Return the message of an exception in one line, with the name of its class if the message needs it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    if isinstance(error, StrictDataclassError):  # its first line names a validator
        return re.sub(r"^\w+: ", "", lines[min(1, len(lines) - 1)])
    return lines[0] if lines[0] and isinstance(error, _EXPLAINED) else f"{type(error).__name__}: {lines[0]}"


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the config and that of its text model, if it has one."""
    yield config
    if isinstance(text := config.get("text_config"), Mapping):
        yield text


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a config, including those of lists and objects in it."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _entries(value)
        elif isinstance(value, list):
            yield from ((key, item) for item in dict.fromkeys(map(str, value)))
        else:
            yield key, value


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json; empty if the file is missing or damaged."""
    try:
        return read_json_object(folder / CONFIG)
    except (OSError, ValueError):
        return {}


def check_config(folder: Path, override: Mapping[str, Any]) -> None:
    """Raise `EngineError` for mistakes in config.json that transformers does not report before a model runs.

    These are so many layers that transformers would not return, and dropout that is not a probability.
    """
    if message := _damaged_json_message(folder, [CONFIG]):
        raise EngineError(message)
    for values in _parts({**read_config(folder), **override}):
        layers = next((values[key] for key in ("num_hidden_layers", "n_layer") if key in values), None)
        if isinstance(layers, int | float) and layers > MAX_LAYERS:
            raise EngineError(
                f"the model in {folder} has num_hidden_layers={layers}, but at most {MAX_LAYERS} layers are "
                f"supported; correct {CONFIG} or override_config"
            )
        for key, value in values.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_dropout(key) and is_number and not 0 <= value < 1:
                raise EngineError(
                    f"the model in {folder} has {key}={value}, which must be at least 0 and less than 1; correct "
                    f"{CONFIG} or override_config"
                )


# -- mistakes ---------------------------------------------------------------------------------------


def find_mistake(folder: Path) -> str | None:
    """Return a known mistake in the JSON files of a folder, with the file and the fix; None if there is none."""
    return _damaged_json_message(folder, OBJECTS) or next(_config_mistakes(folder / CONFIG), None)


def _config_mistakes(file: Path) -> Iterator[str]:
    config = read_config(file.parent)
    if message := quantization_message(file.parent, config):
        yield message
    for values in _parts(config):
        layers, types = values.get("num_hidden_layers"), values.get("layer_types")
        if isinstance(layers, int) and isinstance(types, list) and layers != len(types):
            change = "shorten" if layers < len(types) else "extend"
            yield (
                f"{file} has num_hidden_layers={layers}, but layer_types lists {len(types)} layers; {change} "
                f"layer_types to {layers} entries, or remove it"
            )
    sizes = [(key, value) for key, value in _entries(config) if key in SIZES and isinstance(value, int) and value < 1]
    if sizes:
        listed = ", ".join(f"{key}={value}" for key, value in sizes)
        yield f"{file} has {listed}, which must be positive; correct the number"


def quantization_message(folder: Path, values: Mapping[str, Any]) -> str | None:
    """Return the error for quantized weights, which a config with these values describes; None if it does not."""
    method = quantization(values)
    return None if method is None else f"{folder} {quantization_problem(method)}"


def _damaged_json_message(folder: Path, patterns: Iterable[str]) -> str | None:
    """Return which JSON file of a folder is damaged, why, and how to fix it. None if there is none."""
    for file in sorted(file for pattern in patterns for file in folder.glob(pattern) if file.is_file()):
        try:
            listed = hub.read_weight_map(file).values() if file.name.endswith(".index.json") else ()
            if missing := sorted(name for name in set(listed) if not (folder / name).is_file()):
                return f"{file} lists {missing[0]}, which the folder lacks; copy it to the folder"
            read_json_object(file)
        except StorageError as error:
            return str(error)
        except (OSError, ValueError) as error:
            return f"{error}; copy the file to the folder again"
    return None


def damaged_weights(folder: Path) -> str | None:
    """Return which file of weights is damaged, and why. None if each file by itself can be read."""
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]):
        if not file.stat().st_size:
            return f"{file} is empty"
        if file.suffix == ".safetensors":
            try:
                with safe_open(file, "pt"):
                    pass
            except (SafetensorError, OSError) as error:
                return f"{file} is damaged ({error})"
    return None


@contextlib.contextmanager
def complete_index(folder: Path) -> Iterator[Path]:
    """Yield the folder, or links to its files beside a complete index if the index lacks its metadata.

    The entry is optional, and other libraries read and write files without it, but transformers requires it.
    """
    index = folder / INDEX
    try:
        content = read_json_object(index) if index.is_file() else {"metadata": {}}
    except (OSError, ValueError):  # transformers raises an error, which is converted
        content = {"metadata": {}}
    if isinstance(content.get("metadata"), dict):
        yield folder
        return
    with tempfile.TemporaryDirectory() as parent:
        links = Path(parent) / folder.resolve().name
        links.mkdir()
        for file in folder.absolute().iterdir():
            if file.name != INDEX:
                (links / file.name).symlink_to(file)
        (links / INDEX).write_text(json.dumps({**content, "metadata": {}}), encoding="utf-8")
        yield links
