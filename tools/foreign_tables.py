"""Write the tables of docs/from-verl.md and docs/from-trl.md, from the tables of names in camshaft.config.foreign.

python tools/foreign_tables.py
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from camshaft.config import PPOConfig  # noqa: E402
from camshaft.config.foreign.rows import Expanded, Missing, NotNeeded, PassedOn, Renamed, Row  # noqa: E402
from camshaft.config.foreign.topics import Topic  # noqa: E402
from camshaft.config.foreign.trl import TRL  # noqa: E402
from camshaft.config.foreign.verl import ACTOR, MODEL, ROLLOUT  # noqa: E402
from camshaft.config.foreign.verl import TABLES as VERL  # noqa: E402
from camshaft.config.short_names import short_names  # noqa: E402
from camshaft.config.tree import format_value  # noqa: E402

TABLES = {"docs/from-verl.md": ("verl", VERL), "docs/from-trl.md": ("TRL", TRL)}
SECTIONS = {"Model": MODEL, "Engine": ACTOR, "Megatron": f"{ACTOR}.megatron", "Rollout": ROLLOUT}
"""Sections that the names in a table are relative to."""
PLACE = r"(?P<before>^##+ {title}\n\n(?:(?!#)[^|\n].*\n|\n)*)(?:\|.*\n)+"
"""Pattern of the first table in a section."""


def page(text: str, library: str, tables: Mapping[str, tuple[Row, ...]]) -> str:
    """Return the text of a page with current tables."""
    for title, rows in tables.items():
        table = "".join(f"{line}\n" for line in table_lines(rows, library, SECTIONS.get(title, "")))
        text, count = re.subn(
            PLACE.format(title=re.escape(title)), lambda match, table=table: match["before"] + table, text, flags=re.M
        )
        if count != 1:
            raise SystemExit(f"the page for users of {library} has no table in a section {title}")
    return text


def table_lines(rows: Iterable[Row], library: str, section: str = "") -> Iterator[str]:
    """Yield the lines of a table. Names with the same meaning share a line, and are relative to a section."""
    names: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, here, note in cells(row):
            names.setdefault((here, note), []).append(name.replace(f"`{section}.", "`") if section else name)
    yield f"| {library} | camshaft | notes |"
    yield "|---|---|---|"
    for (here, note), written in names.items():
        yield f"| {', '.join(dict.fromkeys(written))} | {here or 'none'} | {note} |".replace("|  |", "| |")


def cells(row: Row) -> Iterator[tuple[str, str, str]]:
    """Yield the names, the keys here, and the notes of a row. The keys are empty if there are none."""
    name = f"`{row.name}`"
    if isinstance(row, Renamed):
        values = "; ".join(f"{_code(old)} is {_code(new)}" for old, new in row.values.items())
        yield name, _key(row.key), "; ".join(part for part in (row.note, values) if part)
    elif isinstance(row, Expanded):
        for value, settings in row.values.items():
            yield f"`{row.name}={format_value(value)}`", _settings(settings), row.note
        if not row.values:
            yield name, "", row.note
        if isinstance(row.otherwise, Topic):
            yield f"other values of `{row.name}`", "", _link(row.otherwise)
    elif isinstance(row, NotNeeded):
        values = (
            f" with {' or '.join(map(_code, row.accepts))}" if isinstance(row.accepts, tuple) and row.accepts else ""
        )
        yield f"{name}{values}", "", row.why
        if isinstance(row.otherwise, Topic):
            yield f"other values of `{row.name}`", "", _link(row.otherwise)
    elif isinstance(row, PassedOn):
        yield name, _key(row.key), f"passed on with `{row.setting}`"
    elif isinstance(row, Missing):
        written = ", ".join(f"`{row.name}={format_value(value)}`" for value in row.only) or name
        yield written, "", _link(row.topic)


def _code(value: Any) -> str:
    return f"`{format_value(value)}`"


def _key(name: str) -> str:
    section, is_option, option = name.partition(".engine_kwargs.")
    if is_option:
        return f"option `{option}` of `{section}.engine_kwargs`"
    key = short_names(PPOConfig).get(name, name)
    return f"`{key}`" if key == name else f"`{key}` (short: `{name}`)"


def _settings(settings: Mapping[str, Any]) -> str:
    names = short_names(PPOConfig)
    return ", ".join(f"`{names.get(key, key)}={format_value(value)}`" for key, value in settings.items())


def _link(topic: Topic) -> str:
    return f"not here: [{topic.title}](not-here.md#{topic.anchor})"


if __name__ == "__main__":
    for name, (library, tables) in TABLES.items():
        path = ROOT / name
        path.write_text(page(path.read_text(encoding="utf-8"), library, tables), encoding="utf-8")
