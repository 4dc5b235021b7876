"""Find models in the local Hugging Face cache, and download them from the Hugging Face hub.

    cached_folder("Qwen/Qwen2.5-0.5B")      # folder of the snapshot in the cache, or None
    download("Qwen/Qwen2.5-0.5B")           # the same folder, after downloading the missing files

The config checks and the loader of models call `cached_folder`. A URL `hf://owner/name` stands for a model that may be
downloaded; `camshaft.fetch` resolves it. HF_HUB_CACHE, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN apply as in
`huggingface_hub`.
"""

import logging
import os.path
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from camshaft.errors import StorageError
from camshaft.storage import read_json_object
from camshaft.subprocesses import start_thread

T = TypeVar("T")

SCHEME = "hf://"
_SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
"""Config, tokenizer, and custom Python code of a model."""
_SAFETENSORS, _BIN = "model*.safetensors", "pytorch_model*.bin"
_SHARD = re.compile(r"-\d+-of-(\d+)\.\w+$")
_ANSWER_SECONDS = 8.0
"""Time in which the hub must answer the first request. The client itself sets no limit."""
_ATTEMPTS = 5
_RETRY_SECONDS = 1.0

logger = logging.getLogger(__name__)


def is_model_name(path: str) -> bool:
    """Return True if `path` has the form `owner/name`."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path) is not None


def is_model_url(path: str) -> bool:
    """Return True for `hf://owner/name`. URLs of files, such as `hf://datasets/...`, are left to fsspec."""
    return path.startswith(SCHEME) and is_model_name(path.removeprefix(SCHEME).rstrip("/"))


def source(path: str, may_download: bool) -> str:
    """Return the URL of a model name that may be downloaded, and any other path unchanged.

    A path whose first folder exists is not a model name, so that a misspelled local path is not sent to the hub.
    """
    if not may_download or not is_model_name(path) or os.path.isdir(path.partition("/")[0]) or is_offline():
        return path
    return f"{SCHEME}{path}"


def is_offline() -> bool:
    """Return True if HF_HUB_OFFLINE forbids downloads."""
    from huggingface_hub import constants

    return constants.is_offline_mode()


def cache_path() -> Path:
    """Return the folder of the Hugging Face cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached_folder(name: str, weights: bool = True) -> Path | None:
    """Return the folder of a model in the cache. None if its files are incomplete.

    A complete model has a config or a tokenizer and, with `weights`, all weight files. The snapshot of the main branch
    is used.
    """
    from huggingface_hub import constants

    folder_name = constants.REPO_ID_SEPARATOR.join(["models", *name.split("/")])
    if not (cache_path() / folder_name).is_dir():  # faster than importing what follows
        return None
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
    from huggingface_hub import HfApi, constants, snapshot_download

    folder = cached_folder(name, weights)
    if folder is not None:
        return folder
    if is_offline():
        raise StorageError(
            f"{name} is not completely in the Hugging Face cache ({cache_path()}), and HF_HUB_OFFLINE forbids to "
            "download it; unset HF_HUB_OFFLINE, or set the path to a model folder"
        )
    # Before the first request. A warning, because it must be seen without a configured logger as well.
    what = "the model" if weights else "config and tokenizer of the model"
    logger.warning(
        "downloading %s %s from %s to %s; download=false forbids it", what, name, constants.ENDPOINT, cache_path()
    )
    _ask("model", name, lambda: HfApi().model_info(name))
    patterns = [*_SMALL, _SAFETENSORS] if weights else [*_SMALL]
    folder = _retry("model", name, lambda: Path(snapshot_download(name, allow_patterns=patterns)))
    if weights and not any(folder.glob(_SAFETENSORS)):
        folder = _retry("model", name, lambda: Path(snapshot_download(name, allow_patterns=[*_SMALL, _BIN])))
    if not weights or _has_all_weights(folder):
        return folder
    raise StorageError(f"{name} has neither {_SAFETENSORS} nor {_BIN} on the hub; choose another model")


def announce_dataset(name: str) -> None:
    """Log that a data set will be downloaded, and check that the hub answers."""
    from huggingface_hub import HfApi, constants

    logger.warning("downloading the data set %s from %s; HF_HUB_OFFLINE=1 forbids it", name, constants.ENDPOINT)
    _ask("data set", name, lambda: HfApi().dataset_info(name))


def _ask(kind: str, name: str, request: Callable[[], T]) -> T:
    """Return the answer to the first request about a repository. Raise StorageError if there is none in time."""
    answer = start_thread(request, "hub")
    try:
        return answer.result(_ANSWER_SECONDS)
    except TimeoutError as error:
        raise _unreachable(kind, name, f"no answer for {_ANSWER_SECONDS:g} s") from error
    except Exception as error:  # of the HTTP client, whose classes depend on its version
        raise explain(kind, name, error) from error


def _retry(kind: str, name: str, request: Callable[[], T]) -> T:
    """Return the result of a download, which is resumed if the connection is lost.

    The client itself resumes a file after most errors of the connection. Files that are complete are kept.
    """
    attempts = _ATTEMPTS
    while True:
        try:
            return request()
        except (OSError, ValueError) as error:  # an answer of the hub, or a problem of this machine
            raise explain(kind, name, error) from error
        except Exception as error:  # of the HTTP client
            attempts -= 1
            if not attempts:
                raise explain(kind, name, error) from error
            logger.warning("the connection to the hub was lost (%s); resuming the download", type(error).__name__)
            time.sleep(_RETRY_SECONDS)


def explain(kind: str, name: str, error: Exception) -> StorageError:
    """Return the error to raise for an exception of the client of the hub."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError) or "is a gated dataset" in str(error):  # which `datasets` raises
        page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'data set' else ''}{name}"
        return StorageError(f"{name} is gated; accept its terms on {page}, and log in with hf auth login or HF_TOKEN")
    if isinstance(error, RepositoryNotFoundError):
        return StorageError(
            f"the hub has no {kind} '{name}', or it is private; check the name, or log in with hf auth login"
        )
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, HfHubHTTPError):
        return StorageError(f"{name} cannot be written to the Hugging Face cache ({cache_path()}): {error}")
    reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if isinstance(error, OSError | ValueError) and not isinstance(error, HfHubHTTPError | LocalEntryNotFoundError):
        return StorageError(f"the {kind} {name} cannot be read: {reason}")
    return _unreachable(kind, name, reason)


def _unreachable(kind: str, name: str, reason: str) -> StorageError:
    from huggingface_hub import constants

    return StorageError(
        f"the {kind} {name} is not in the local cache and cannot be downloaded from {constants.ENDPOINT} ({reason}); "
        "check the network connection and HF_ENDPOINT, or set the path of a local copy"
    )


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
