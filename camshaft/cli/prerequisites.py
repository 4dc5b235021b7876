"""Check what a run needs besides a valid config, before it imports torch.

configs = prepare_runs(compose(argv, PPOConfig))
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

from camshaft import hub, storage
from camshaft.config import GenerateConfig, PPOConfig, SupervisedConfig
from camshaft.config.checks import check_families
from camshaft.config.checks.backends import check_libraries
from camshaft.config.errors import format_problems
from camshaft.config.load import REMOTE_PATHS
from camshaft.config.tree import get, has_key
from camshaft.errors import ConfigError
from camshaft.fetch import fetch_models
from camshaft.rewards.auto import check_sources
from camshaft.storage.urls import check_client

Config = TypeVar("Config", bound=PPOConfig | SupervisedConfig | GenerateConfig)


def prepare_runs(configs: Sequence[Config]) -> Sequence[Config]:
    """Check the prerequisites of all configs, download their models, and return the configs."""
    for config in configs:
        check_prerequisites(config)
    sources = [source for config in configs for source in config.model_sources()]
    fetch_models((path, False) for path, _ in sources)  # an unsupported model is rejected before its weights come
    for config in configs:
        if problems := list(check_families(config)):
            raise ConfigError(format_problems(problems))
    fetch_models(sources)
    return configs


def check_prerequisites(config: PPOConfig | SupervisedConfig | GenerateConfig) -> None:
    """Raise an error if a library, the client of a file system or a reward function is missing."""
    check_libraries(config)
    values = config.model_dump()
    for key in sorted(REMOTE_PATHS):
        value = get(values, key) if has_key(values, key) else None
        for path in [value] if isinstance(value, str) else value or ():
            if storage.is_url(path) and not hub.is_model_url(path):
                check_client(path)
    if isinstance(config, PPOConfig) and config.needs_function():
        names = {function.name for function in config.custom_reward_function.selected() if function.path is None}
        if "auto" in names and config.data.reward_fn_key is not None:
            files = (*config.data.train_files, *config.data.val_files)
            sources = {source for file in files for source in _first_source(Path(file), config.data.reward_fn_key)}
            check_sources(sources, config.reward_model.enable)


def _first_source(file: Path, column: str) -> Iterator[str]:
    """Yield the data source of the first row of a local parquet or JSON lines file.

    The other rows, and files of other formats, are checked when the data is loaded, which also reports damaged files.
    """
    from pyarrow import ArrowException, parquet

    try:
        if file.suffix == ".parquet":
            with parquet.ParquetFile(file) as rows:
                if column in rows.schema_arrow.names:
                    batches = rows.iter_batches(batch_size=1, columns=[column])
                    yield from (str(value) for batch in islice(batches, 1) for value in batch.column(0).to_pylist())
        elif file.suffix in (".jsonl", ".ndjson"):
            with file.open(encoding="utf-8") as lines:
                row = json.loads(next(lines, "{}"))
            if isinstance(row, dict) and row.get(column):
                yield str(row[column])
    except (OSError, ValueError, ArrowException):
        return
