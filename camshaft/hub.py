"""Find models in the local Hugging Face cache, and download them from the Hugging Face hub.

    cached_folder("Qwen/Qwen2.5-0.5B")      # folder of the snapshot in the cache, or None
    download("Qwen/Qwen2.5-0.5B")           # the same folder, after downloading the missing files

The config checks and the loader of models call `cached_folder`. A URL `hf://owner/name` stands for a model that may be
downloaded; `camshaft.fetch` resolves it. HF_HUB_CACHE, HF_HOME, HF_ENDPOINT and HF_TOKEN apply as in `huggingface_hub`.
"""

import os.path
import re
from pathlib import Path

from camshaft.errors import StorageError
from camshaft.storage import read_json_object

SCHEME = "hf://"
_SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
"""Config, tokenizer, and custom Python code of a model."""
_SAFETENSORS, _BIN = "model*.safetensors", "pytorch_model*.bin"
_SHARD = re.compile(r"-\d+-of-(\d+)\.\w+$")


def is_model_name(path: str) -> bool:
    """Return True if `path` has the form `owner/name`."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path) is not None


def is_model_url(path: str) -> bool:
    """Return True for `hf://owner/name`. URLs of files, such as `hf://datasets/...`, are left to fsspec."""
    return path.startswith(SCHEME) and is_model_name(path.removeprefix(SCHEME).rstrip("/"))


def source(path: str, may_download: bool) -> str:
    """Return the URL of a model name that may be downloaded, and any other path unchanged."""
    return f"{SCHEME}{path}" if may_download and is_model_name(path) and not os.path.isdir(path) else path


def cache_path() -> Path:
    """Return the folder of the Hugging Face cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached_folder(name: str, weights: bool = True) -> Path | None:
    """Return the folder of a model in the cache. None if its files are incomplete.

    A complete model has a config or a tokenizer and, with `weights`, all weight files. The snapshot of the main branch
    is used.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    patterns = [*_SMALL, _SAFETENSORS] if weights else [*_SMALL]
    try:
        folder = Path(snapshot_download(name, local_files_only=True, allow_patterns=patterns))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    described = any((folder / file).is_file() for file in ("config.json", "tokenizer.json", "tokenizer_config.json"))
    return folder if described and (not weights or _has_all_weights(folder)) else None


def download(name: str, weights: bool = True) -> Path:
    """Return the folder of a model in the cache. If files are missing, download the main branch first.

    Weights are downloaded as safetensors files, or as `pytorch_model*.bin` files if the model has no others.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    folder = cached_folder(name, weights)
    if folder is not None:
        return folder
    try:
        folder = Path(snapshot_download(name, allow_patterns=[*_SMALL, _SAFETENSORS] if weights else [*_SMALL]))
        if weights and not any(folder.glob(_SAFETENSORS)):
            folder = Path(snapshot_download(name, allow_patterns=[*_SMALL, _BIN]))
    except GatedRepoError as error:
        raise StorageError(
            f"{name} is a gated model; accept its terms on the hub, and log in with hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise StorageError(
            f"the hub has no model '{name}', or it is private; check the name, or log in with hf auth login"
        ) from error
    except LocalEntryNotFoundError as error:
        raise StorageError(
            f"{name} is not in the Hugging Face cache ({cache_path()}) and cannot be downloaded: {error}; check the "
            "network connection, HF_ENDPOINT and HF_HUB_OFFLINE, or set the path to a model folder"
        ) from error
    if not weights or _has_all_weights(folder):
        return folder
    raise StorageError(f"{name} has neither {_SAFETENSORS} nor {_BIN} on the hub; choose another model")


def _has_all_weights(folder: Path) -> bool:
    """Return True if the folder contains weights in one format, including all shards."""
    return any(_is_complete_format(folder, pattern) for pattern in (_SAFETENSORS, _BIN))


def _is_complete_format(folder: Path, pattern: str) -> bool:
    files = {path.name for path in folder.glob(pattern) if path.is_file()}
    listed = {name for index in folder.glob(f"{pattern}.index.json") for name in read_weight_map(index).values()}
    shards = [match[1] for match in map(_SHARD.search, files) if match]
    return bool(files) and listed <= files and all(len(shards) >= int(count) for count in shards)


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the files of the weights by name, from the index of a model with several weight files."""
    try:
        weight_map = read_json_object(index).get("weight_map")
    except ValueError as error:
        raise StorageError(f"{error}; download or copy the file again") from error
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise StorageError(
            f"{index} has no weight_map that maps the names of weights to files; download or copy the file again"
        )
    return weight_map
