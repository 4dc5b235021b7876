"""Read data sets of the Hugging Face Hub by name, with the optional library `datasets`.

    dataset_file(dataset_name("openai/gsm8k/main:test"))    # a parquet file in `cache_folder("datasets")`

A name consists of the repository, the name of a configuration if there are several, and the split, by default train. A
data set is downloaded once. The file contains the columns of the data set, and `data_source` with the name of the
repository unless there is such a column. Rewards and metrics read it.
"""

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from camshaft import hub, storage
from camshaft.config.files import DatasetName
from camshaft.errors import CamshaftError, StorageError
from camshaft.fetch import download_lock
from camshaft.plugins import install_command

DEFAULT_CONFIGS = ("default", "main")
"""Configurations that are read if the name contains none. Others must be named."""
DEFAULT_SPLIT = "train"
_SOURCE = "data_source"

logger = logging.getLogger(__name__)


def dataset_file(name: DatasetName) -> Path:
    """Return a split as a local parquet file. If it is not in the cache, download the data set."""
    target = name.cached_file()
    with download_lock(str(name), target):
        if not target.is_file():
            table = _load(name)
            with storage.new_file(target) as work:
                parquet.write_table(table, work)
    return target


def _load(name: DatasetName) -> pyarrow.Table:
    """Return the rows of a split, from the cache of `datasets` or from the hub."""
    if importlib.util.find_spec("datasets") is None:
        raise StorageError(
            f"the data set {name} of the Hugging Face Hub requires 'datasets', which is not installed: "
            f"{install_command('datasets')}, or set the path of a file"
        )
    if not hub.is_offline():
        hub.announce_dataset(name.repository)
    import datasets  # pyright: ignore[reportMissingImports]

    try:
        config = name.config if name.config or hub.is_offline() else _default_config(name)
        splits: Any = datasets.load_dataset(name.repository, config)
    except CamshaftError:
        raise
    except Exception as error:  # of the network, of the files of others, or of their content
        raise hub.explain("data set", name.repository, error) from error
    rows = splits[_split(name, list(splits))]
    table: pyarrow.Table = rows.data.table
    logger.info("%s: %d rows with the columns %s", name, len(table), ", ".join(table.column_names))
    if _SOURCE in table.column_names:
        return table
    return table.append_column(_SOURCE, pyarrow.array([name.repository] * len(table)))


def _default_config(name: DatasetName) -> str:
    from datasets import get_dataset_config_names  # pyright: ignore[reportMissingImports]

    names = get_dataset_config_names(name.repository)
    if len(names) == 1:
        return names[0]
    chosen = next((config for config in DEFAULT_CONFIGS if config in names), None)
    if chosen is None:
        raise StorageError(
            f"the data set {name} has the configurations {', '.join(names)}; set one of them, for example "
            f"{name._replace(config=names[0])}"
        )
    return chosen


def _split(name: DatasetName, splits: list[str]) -> str:
    if name.split in splits:
        return str(name.split)
    if name.split is None and (DEFAULT_SPLIT in splits or len(splits) == 1):
        return DEFAULT_SPLIT if DEFAULT_SPLIT in splits else splits[0]
    raise StorageError(
        f"the data set {name} has the splits {', '.join(splits)}; set one of them, for example "
        f"{name._replace(split=splits[0])}"
    )
