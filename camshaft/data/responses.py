"""Write generated responses to parts during generation and to one parquet file at the end.

    file = ResponseFile(Path("out.parquet"), "responses", settings)
    with file.parts() as parts:
        parts.num_done                          # number of prompts with responses
        parts.add(num_prompts, {"": [["a", "b"], ...]})
        file.write(["in.parquet"], rows=range(100), parts=parts)

The file contains the columns of the prompts and those of the responses. Parts are folders in `out.parquet.parts`, which
are written atomically with checksums (`storage`). The file is written atomically as well. `settings` contains all
values that affect the responses; a run with different settings rejects the existing parts and file.
"""

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from camshaft import storage
from camshaft.data.tables import Paths, open_files, read_metadata
from camshaft.errors import BatchError, CheckpointError, ConfigError, FormatError

TYPES = {
    "": pyarrow.string(),
    "_tokens": pyarrow.int32(),
    "_finished": pyarrow.bool_(),
    "_log_prob": pyarrow.float32(),
    "_score": pyarrow.float32(),
    "_pred": pyarrow.string(),
    "_messages": pyarrow.string(),
    "_stop_reason": pyarrow.string(),
}
"""Column suffix -> element type. Each row contains a list with one element per response."""

_PROMOTE = "default"
"""Option of pyarrow: fill missing columns with null, and require compatible types for columns of the same name."""

_KIND = "responses"
_METADATA = b"camshaft"
_FILE = "responses.parquet"

logger = logging.getLogger(__name__)

Columns = Mapping[str, Sequence[Sequence[Any]]]
"""Column suffix -> for each prompt, the list of values of its responses."""


class Parts:
    """Responses that are already written; they belong to the first `num_done` prompts."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]):
        self.folder, self.name, self._settings = folder, name, settings
        self.saved_settings: Mapping[str, Any] | None = None
        """Settings stored in the first part; None if there are no parts."""
        self.num_done = 0
        """Number of prompts whose responses are written."""
        self._folders: list[Path] = []
        while (metadata := self._read_metadata(self._next_folder())) is not None:
            self._folders.append(self._next_folder())
            self.saved_settings = self.saved_settings or metadata["settings"]
            self.num_done = metadata["stop"]

    def __len__(self) -> int:
        return len(self._folders)

    def add(self, num_prompts: int, columns: Columns) -> None:
        """Write a part with the responses to the next `num_prompts` prompts."""
        target, stop = self._next_folder(), self.num_done + num_prompts
        names = [f"{self.name}{suffix}" for suffix in columns]
        arrays = [pyarrow.array(values, pyarrow.list_(TYPES[suffix])) for suffix, values in columns.items()]
        with storage.new_folder(target, kind=_KIND, stop=stop, settings=self._settings) as folder:
            parquet.write_table(pyarrow.table(arrays, names), folder / _FILE)
        self._folders.append(target)
        self.num_done = stop

    def table(self) -> pyarrow.Table:
        """Read the responses of all parts into one table."""
        return pyarrow.concat_tables([parquet.ParquetFile(folder / _FILE).read() for folder in self._folders])

    def _next_folder(self) -> Path:
        """Return the folder of the next part, which is named after its first prompt."""
        return self.folder / f"from_{self.num_done:09}"

    def _read_metadata(self, folder: Path) -> dict[str, Any] | None:
        """Return the metadata of a part, or None if the part is missing or damaged, so that it is generated again."""
        try:
            return storage.verify(folder)
        except FormatError:
            raise
        except CheckpointError as error:
            if folder.exists():
                logger.warning("%s; generating these responses again", error)
            return None


class ResponseFile:
    """Output file of a generation run."""

    def __init__(self, path: Path, name: str, settings: Mapping[str, Any]):
        """`name` is the name of the response column and the prefix of the other new columns."""
        self.path, self.name = path.expanduser().absolute(), name
        self._setting = f"data.output_path={self.path}"
        self.settings: dict[str, Any] = json.loads(json.dumps(settings, default=str))  # comparable with stored settings
        self._folder = self.path.with_name(f"{self.path.name}.parts")

    def exists(self) -> bool:
        """Return True if the file exists. Raise ConfigError unless a run with the same settings wrote it."""
        if not self.path.exists():
            return False
        saved_settings = _read_settings(self.path)
        if saved_settings is None:
            raise ConfigError(f"{self._setting}: the file already exists; use another path, or delete it")
        self._compare(saved_settings, "already exists", "use another path, or delete it")
        return True

    def check_columns(self, sources: Paths) -> None:
        """Check the prompt files.

        Raise ConfigError if a file has a column that `write` adds, and BatchError if the schemas are incompatible.
        """
        schemas = []
        for source in open_files(sources):
            schemas.append(source.schema)
            conflicts = [f"{self.name}{suffix}" for suffix in TYPES if f"{self.name}{suffix}" in schemas[-1].names]
            if conflicts:
                raise ConfigError(
                    f"data.response_key={self.name}: data.path already has a column '{conflicts[0]}'; use another "
                    f"name, for example data.response_key={self.name}_2"
                )
        with _schema_errors():
            pyarrow.unify_schemas(schemas, promote_options=_PROMOTE)

    @contextlib.contextmanager
    def parts(self) -> Iterator[Parts]:
        """Lock the folder of the parts and yield the existing parts, to which the caller appends."""
        folder = self._folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = storage.lock_folder(folder)
        except OSError as error:
            raise ConfigError(f"{self._setting} is not writable ({error.strerror}); use another path") from error
        if lock is None:
            raise ConfigError(f"{self._setting}: another run is writing this file; wait for it, or use another path")
        with lock:
            parts = Parts(folder, self.name, self.settings)
            if parts.saved_settings is not None:
                fix = f"use another path, or delete {folder} to start again"
                self._compare(parts.saved_settings, "was started", fix)
            yield parts

    def write(self, sources: Paths, rows: Sequence[int], parts: Parts) -> None:
        """Write the selected rows of the sources with the responses of all parts, then delete the parts."""
        responses = parts.table()
        table = read_table(sources).take(pyarrow.array(rows, pyarrow.int64()))
        for name in responses.column_names:
            table = table.append_column(name, responses.column(name))
        metadata = dict(table.schema.metadata or {}) | {_METADATA: json.dumps(self.settings).encode()}
        with storage.new_file(self.path) as path:
            parquet.write_table(table.replace_schema_metadata(metadata), path)
        self.remove_parts()

    def remove_parts(self) -> None:
        """Delete the parts, which are unused once the file is written. Files of others remain."""
        for folder in self._folder.glob("from_*"):
            storage.remove(folder)
        lock = self._folder / storage.LOCK
        if lock.is_file() and not lock.stat().st_size:
            lock.unlink()
        with contextlib.suppress(OSError):  # it is not empty, or it does not exist
            self._folder.rmdir()

    def read(self, column: str) -> list[Any]:
        """Read a column of the written file as Python objects."""
        with parquet.ParquetFile(self.path) as source:
            return source.read([column]).column(column).to_pylist()

    def _compare(self, saved: Mapping[str, Any], state: str, fix: str) -> None:
        changes = [
            f"{key}: {_abbreviate(saved, key)} before, {_abbreviate(self.settings, key)} now"
            for key in {**saved, **self.settings}
            if saved.get(key) != self.settings.get(key)
        ]
        if changes:
            raise ConfigError(
                f"{self._setting} {state} with different settings ({'; '.join(changes)}); "
                f"use the previous settings, or {fix}"
            )


def read_table(sources: Paths) -> pyarrow.Table:
    """Read all rows and columns of the files into one table; raise BatchError if their schemas are incompatible."""
    tables = [source.table() for source in open_files(sources)]
    with _schema_errors():
        return pyarrow.concat_tables(tables, promote_options=_PROMOTE)


@contextlib.contextmanager
def _schema_errors() -> Iterator[None]:
    """Convert an error of pyarrow for incompatible schemas to a `BatchError`."""
    try:
        yield
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
        raise BatchError(
            f"the files of data.path have incompatible schemas: {error}. Use a separate run for each file"
        ) from error


def _read_settings(path: Path) -> Mapping[str, Any] | None:
    """Return the settings in the metadata of a file; None if another program wrote the file."""
    metadata = read_metadata(path)
    return json.loads(metadata[_METADATA]) if _METADATA in metadata else None


def _abbreviate(settings: Mapping[str, Any], key: str) -> str:
    text = json.dumps(settings.get(key))
    return text if len(text) <= 80 else f"{text[:80]}..."
