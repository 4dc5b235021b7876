"""Responses on disk: parts while they are made, and in the end one parquet file, beside the columns of the prompts.

    file = ResponseFile(Path("out.parquet"), settings)
    with file.parts() as parts:
        parts.num_done                          # prompts whose responses are there already
        parts.add(num_prompts, {"responses": [["a", "b"], ...]})
        file.write(["in.parquet"], rows=range(100), parts=parts)

A part is a folder that is whole or not there, with checksums (`storage.py`), in `out.parquet.parts`; so is the file.
`settings` are what the responses depend on: a run that has others neither goes on from the parts nor takes the file for
its own. Used by `camshaft generate`.
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
"""What is known of a response, by the ending of its column; each row holds a list, an entry for each response."""

_PROMOTE = "default"
"""A column that one of the files does not have is null there; types must be the same."""

_KIND = "responses"
_METADATA = b"camshaft"
_FILE = "responses.parquet"

logger = logging.getLogger(__name__)

Columns = Mapping[str, Sequence[Sequence[Any]]]
"""Ending -> for each prompt the values of its responses."""


class ResponseFile:
    """The file that a run writes."""

    def __init__(self, path: Path, name: str, settings: Mapping[str, Any]):
        """`name` is that of the column with the responses, with which those of the others begin."""
        self.path = path.expanduser().absolute()
        self.name = name
        self.settings = _plain(settings)
        self._folder = self.path.with_name(f"{self.path.name}.parts")

    def is_there(self) -> bool:
        """Has a run with these settings written it? An error if something else is there."""
        if not self.path.exists():
            return False
        theirs = _settings_of(self.path)
        if theirs is None:
            raise ConfigError(f"data.output_path={self.path}: there is such a file already. Name another, or remove it")
        self._compare(theirs, "is there already", "name another file, or remove it")
        return True

    def check_columns(self, sources: Paths) -> None:
        """An error if the prompts have a column that would be written, or files that do not become one table."""
        schemas = []
        for source in open_all(sources):
            with source:
                schemas.append(source.schema_arrow)
            taken = [f"{self.name}{ending}" for ending in TYPES if f"{self.name}{ending}" in schemas[-1].names]
            if taken:
                raise ConfigError(
                    f"data.response_key={self.name}: data.path has a column '{taken[0]}' already. Type another name, "
                    f"for instance data.response_key={self.name}_2"
                )
        try:
            pyarrow.unify_schemas(schemas, promote_options=_PROMOTE)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
            raise BatchError(
                f"the files of data.path do not fit below each other: {error}. Generate for each of them by itself"
            ) from error

    @contextlib.contextmanager
    def parts(self) -> Iterator[Parts]:
        """What is there of it, and place for more; nobody else may add to it at the same time."""
        folder = self._folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = storage.hold(folder)
        except OSError as error:
            raise ConfigError(
                f"data.output_path={self.path}: the run cannot write there ({error.strerror}). Name another file"
            ) from error
        if lock is None:
            raise ConfigError(
                f"data.output_path={self.path}: another run is making it. Wait for it, or name another file"
            )
        with lock:
            parts = Parts(folder, self.name, self.settings)
            if parts.settings_found is not None:
                again = f"name another file, or remove {folder} to begin anew"
                self._compare(parts.settings_found, "was begun", again)
            yield parts

    def write(self, sources: Paths, rows: Sequence[int], parts: Parts) -> None:
        """The chosen rows of all sources with the responses of all parts; the parts are removed."""
        made = parts.table()
        table = whole(sources).take(pyarrow.array(rows, pyarrow.int64()))
        for name in made.column_names:
            table = table.append_column(name, made.column(name))
        metadata = dict(table.schema.metadata or {}) | {_METADATA: json.dumps(self.settings).encode()}
        with storage.new_file(self.path) as path:
            parquet.write_table(table.replace_schema_metadata(metadata), path)
        self.remove_parts()

    def remove_parts(self) -> None:
        """They are no longer needed once the file is there."""
        if self._folder.exists():
            shutil.rmtree(self._folder)

    def read(self, column: str) -> list[Any]:
        """A column of the file that was written, as Python objects."""
        with parquet.ParquetFile(self.path) as source:
            return source.read([column]).column(column).to_pylist()

    def _compare(self, theirs: Mapping[str, Any], what: str, instead: str) -> None:
        differing = [key for key in {**theirs, **self.settings} if theirs.get(key) != self.settings.get(key)]
        if differing:
            shown = "; ".join(
                f"{key}: {_short(theirs, key)} then, {_short(self.settings, key)} now" for key in differing
            )
            raise ConfigError(
                f"data.output_path={self.path} {what}, and with other settings ({shown}). Type those, or {instead}"
            )


class Parts:
    """The responses that are there, to the first prompts of all."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]):
        self.folder, self.name, self._settings = folder, name, settings
        self.settings_found: Mapping[str, Any] | None = None
        """Those of the run that made the first part."""
        self.num_done = 0
        """Prompts."""
        self._folders: list[Path] = []
        while (facts := self._facts(self._next())) is not None:
            self._folders.append(self._next())
            self.settings_found = self.settings_found or facts["settings"]
            self.num_done = facts["stop"]

    def __len__(self) -> int:
        return len(self._folders)

    def add(self, num_prompts: int, columns: Columns) -> None:
        """The responses to the next prompts."""
        target, stop = self._next(), self.num_done + num_prompts
        names = [f"{self.name}{ending}" for ending in columns]
        arrays = [pyarrow.array(values, pyarrow.list_(TYPES[ending])) for ending, values in columns.items()]
        with storage.new_folder(target, kind=_KIND, stop=stop, settings=self._settings) as folder:
            parquet.write_table(pyarrow.table(arrays, names), folder / _FILE)
        self._folders.append(target)
        self.num_done = stop

    def table(self) -> pyarrow.Table:
        """All of them."""
        return pyarrow.concat_tables([parquet.ParquetFile(folder / _FILE).read() for folder in self._folders])

    def _next(self) -> Path:
        """Each part is named after its first prompt."""
        return self.folder / f"from_{self.num_done:09}"

    def _facts(self, folder: Path) -> dict[str, Any] | None:
        """What a part says of itself, if it is there and whole; one that is damaged is made again."""
        try:
            return storage.verify(folder)
        except CheckpointError as error:
            if folder.exists():
                logger.warning("%s; these responses are made again", error)
            return None


def whole(sources: Paths) -> pyarrow.Table:
    """All rows and columns of some files; `check_columns` found that they fit below each other."""
    opened = open_all(sources)
    tables = [source.read() for source in opened]
    for source in opened:
        source.close()
    return pyarrow.concat_tables(tables, promote_options=_PROMOTE)


def _settings_of(path: Path) -> Mapping[str, Any] | None:
    """Those of the run that wrote a file; None if it was none of ours."""
    try:
        metadata = parquet.read_metadata(path).metadata or {}
    except (pyarrow.ArrowInvalid, OSError):
        return None
    return json.loads(metadata[_METADATA]) if _METADATA in metadata else None


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As they come back from JSON, so that they can be compared."""
    return json.loads(json.dumps(settings, default=str))


def _short(settings: Mapping[str, Any], key: str) -> str:
    text = json.dumps(settings.get(key))
    return text if len(text) <= 80 else f"{text[:80]}..."
