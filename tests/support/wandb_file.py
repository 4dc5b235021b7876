"""Read the files of wandb's offline mode without wandb: protobuf records in LevelDB's log format.

steps = history(folder)     # [{"step": 1, "critic/score/mean": 0.5}, ...], of all files of the run in order
config_of(folder)
"""

import importlib
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record  # from the installed protobuf's module

_BLOCK, _HEAD = 32768, 7
_FULL, _LAST = 1, 4


def records(folder: Path) -> list[Any]:
    """Yield the records of all finished offline runs in `<folder>/wandb`, file by file."""
    all_records: list[Any] = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        deadline = time.monotonic() + 120
        of_file: list[Any] = []
        while not any(record.HasField("exit") for record in of_file):
            of_file = list(_records(path.read_bytes()))
            assert time.monotonic() < deadline, f"{path} has no end"
            time.sleep(0.01)  # the library's `finish` returns shortly before the file is complete
        all_records += of_file
    return all_records


def _records(data: bytes) -> Iterator[Any]:
    place, parts = _HEAD, b""  # size of the file header
    while place + _HEAD <= len(data):
        remaining = _BLOCK - place % _BLOCK
        if remaining < _HEAD:
            place += remaining
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + _HEAD])
        parts += data[place + _HEAD : place + _HEAD + length]
        place += _HEAD + length
        if kind in (_FULL, _LAST):
            yield Record.FromString(parts)
            parts = b""


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the logged metrics without wandb's internal entries."""
    entries = []
    for record in records(folder):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = {"step": record.history.step.num}
            entries.append(step | {key: value for key, value in items.items() if not key.startswith("_")})
    return entries


def exit_codes(folder: Path) -> list[int]:
    """Return the exit code of the run in each file."""
    return [record.exit.exit_code for record in records(folder) if record.WhichOneof("record_type") == "exit"]


def run_record(folder: Path) -> Any:
    """Return the last started run."""
    return [record.run for record in records(folder) if record.WhichOneof("record_type") == "run"][-1]
