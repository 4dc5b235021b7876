"""Write generated responses: in parts during generation, finally as one parquet file with the prompt columns.

    file = ResponseFile(Path("out.parquet"), "responses", settings)
    with file.parts() as parts:
        parts.num_done                          # number of prompts with responses
        parts.add(num_prompts, {"": [["a", "b"], ...]})
        file.write(["in.parquet"], rows=range(100), parts=parts)

Parts are folders in `out.parquet.parts`, written atomically with checksums (`storage.py`); the final file is atomic
too. `settings` are the values that the responses depend on; a run with other settings rejects the parts and the file.
Used by `camshaft generate`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from camshaft import storage
from camshaft.data.parquet import Paths, open_all
from camshaft.errors import BatchError, CheckpointError, ConfigError

TYPES = {
    "": pyarrow.string(),
    "_tokens": pyarrow.int32(),
    "_finished": pyarrow.bool_(),
    "_log_prob": pyarrow.float32(),
    "_score": pyarrow.float32(),
    "_pred": pyarrow.string(),
}
"""Column suffix -> element type; each row contains a list with one element per response."""

_PROMOTE = "default"
"""Fill columns that a file lacks with null; types of equal columns must agree."""

_KIND = "responses"
_METADATA = b"camshaft"
_FILE = "responses.parquet"

logger = logging.getLogger(__name__)

Columns = Mapping[str, Sequence[Sequence[Any]]]
"""Column suffix -> per prompt, the values of its responses."""


class ResponseFile:
    """Output file of a generation run."""

    def __init__(self, path: Path, name: str, settings: Mapping[str, Any]):
        """`name` is the response column and the prefix of the other new columns."""
        self.path = path.expanduser().absolute()
        self.name = name
        self.settings = _plain(settings)
        self._folder = self.path.with_name(f"{self.path.name}.parts")

    def exists(self) -> bool:
        """Return True if a run with these settings wrote the file; raise ConfigError if another program or run did."""
        if not self.path.exists():
            return False
        saved = _settings_of(self.path)
        if saved is None:
            raise ConfigError(f"data.output_path={self.path}: the file already exists; use another name, or delete it")
        self._compare(saved, "already exists", "use another name, or delete it")
        return True

    def check_columns(self, sources: Paths) -> None:
        """Raise an error if the prompts have a column that `write` adds, or if the files have incompatible schemas."""
        schemas = []
        for source in open_all(sources):
            with source:
                schemas.append(source.schema_arrow)
            conflicts = [f"{self.name}{ending}" for ending in TYPES if f"{self.name}{ending}" in schemas[-1].names]
            if conflicts:
                raise ConfigError(
                    f"data.response_key={self.name}: data.path already has a column '{conflicts[0]}'; use another "
                    f"name, for example data.response_key={self.name}_2"
                )
        try:
            pyarrow.unify_schemas(schemas, promote_options=_PROMOTE)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
            raise BatchError(
                f"the files of data.path have incompatible schemas: {error}. Generate for each file separately"
            ) from error

    @contextlib.contextmanager
    def parts(self) -> Iterator[Parts]:
        """Open the existing parts for appending, with an exclusive lock."""
        folder = self._folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = storage.hold(folder)
        except OSError as error:
            raise ConfigError(
                f"data.output_path={self.path} is not writable ({error.strerror}); use another path"
            ) from error
        if lock is None:
            raise ConfigError(
                f"data.output_path={self.path}: another run is writing this file; wait for it, or use another path"
            )
        with lock:
            parts = Parts(folder, self.name, self.settings)
            if parts.settings_found is not None:
                fix = f"use another path, or delete {folder} to start again"
                self._compare(parts.settings_found, "was started", fix)
            yield parts

    def write(self, sources: Paths, rows: Sequence[int], parts: Parts) -> None:
        """Write the selected rows of all sources with the responses of all parts, then delete the parts."""
        responses = parts.table()
        table = read_table(sources).take(pyarrow.array(rows, pyarrow.int64()))
        for name in responses.column_names:
            table = table.append_column(name, responses.column(name))
        metadata = dict(table.schema.metadata or {}) | {_METADATA: json.dumps(self.settings).encode()}
        with storage.new_file(self.path) as path:
            parquet.write_table(table.replace_schema_metadata(metadata), path)
        self.remove_parts()

    def remove_parts(self) -> None:
        """Delete the parts, which are not needed after the file is written."""
        if self._folder.exists():
            shutil.rmtree(self._folder)

    def read(self, column: str) -> list[Any]:
        """Read a column of the written file as Python objects."""
        with parquet.ParquetFile(self.path) as source:
            return source.read([column]).column(column).to_pylist()

    def _compare(self, saved: Mapping[str, Any], state: str, fix: str) -> None:
        differing = [key for key in {**saved, **self.settings} if saved.get(key) != self.settings.get(key)]
        if differing:
            changes = "; ".join(
                f"{key}: {_short(saved, key)} then, {_short(self.settings, key)} now" for key in differing
            )
            raise ConfigError(
                f"data.output_path={self.path} {state} with other settings ({changes}); use those settings, or {fix}"
            )


class Parts:
    """Responses written so far, to a prefix of the prompts."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]):
        self.folder, self.name, self._settings = folder, name, settings
        self.settings_found: Mapping[str, Any] | None = None
        """Settings stored in the first part, or None."""
        self.num_done = 0
        """Number of prompts with responses."""
        self._folders: list[Path] = []
        while (facts := self._facts(self._next())) is not None:
            self._folders.append(self._next())
            self.settings_found = self.settings_found or facts["settings"]
            self.num_done = facts["stop"]

    def __len__(self) -> int:
        return len(self._folders)

    def add(self, num_prompts: int, columns: Columns) -> None:
        """Append the responses to the next `num_prompts` prompts."""
        target, stop = self._next(), self.num_done + num_prompts
        names = [f"{self.name}{ending}" for ending in columns]
        arrays = [pyarrow.array(values, pyarrow.list_(TYPES[ending])) for ending, values in columns.items()]
        with storage.new_folder(target, kind=_KIND, stop=stop, settings=self._settings) as folder:
            parquet.write_table(pyarrow.table(arrays, names), folder / _FILE)
        self._folders.append(target)
        self.num_done = stop

    def table(self) -> pyarrow.Table:
        """Return the responses of all parts."""
        return pyarrow.concat_tables([parquet.ParquetFile(folder / _FILE).read() for folder in self._folders])

    def _next(self) -> Path:
        """Return the folder of the next part, which is named after its first prompt."""
        return self.folder / f"from_{self.num_done:09}"

    def _facts(self, folder: Path) -> dict[str, Any] | None:
        """Return the metadata of a part, or None if it is missing or damaged; damaged parts are generated again."""
        try:
            return storage.verify(folder)
        except CheckpointError as error:
            if folder.exists():
                logger.warning("%s; these responses are generated again", error)
            return None


def read_table(sources: Paths) -> pyarrow.Table:
    """Read all rows and columns of the files into one table; `check_columns` verifies that the schemas agree."""
    opened = open_all(sources)
    tables = [source.read() for source in opened]
    for source in opened:
        source.close()
    return pyarrow.concat_tables(tables, promote_options=_PROMOTE)


def _settings_of(path: Path) -> Mapping[str, Any] | None:
    """Return the settings of the run that wrote a file; None if no such run wrote it."""
    try:
        metadata = parquet.read_metadata(path).metadata or {}
    except (pyarrow.ArrowInvalid, OSError):
        return None
    return json.loads(metadata[_METADATA]) if _METADATA in metadata else None


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Normalize settings through JSON, so that they compare equal to stored ones."""
    return json.loads(json.dumps(settings, default=str))


def _short(settings: Mapping[str, Any], key: str) -> str:
    text = json.dumps(settings.get(key))
    return text if len(text) <= 80 else f"{text[:80]}..."
