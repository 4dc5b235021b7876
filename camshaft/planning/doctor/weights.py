"""Read the names, dtypes and shapes of the weights of a model folder from the headers of its safetensors files.

    problems, weights = read_headers(Path("models/tiny"))
    sum(weight.count for weight in weights.values())        # number of parameters

Each header is compared with the size of its file, so truncated and damaged files are found without reading the weights.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import NamedTuple

INDEX = "model.safetensors.index.json"
MAX_HEADER = 100 * 2**20
"""Limit of the format for the size of a header."""


class Weight(NamedTuple):
    """A weight in a file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_headers(folder: Path) -> tuple[list[str], dict[str, Weight]]:
    """Return the problems of the weight files of a folder, and the weights by name."""
    problems: list[str] = []
    weights: dict[str, Weight] = {}
    files = sorted(folder.glob("*.safetensors"))
    try:
        listed = _listed(folder)
    except ValueError as error:
        return [f"{folder / INDEX} is not valid JSON ({error})"], {}
    missing = sorted(set(listed.values()) - {file.name for file in files})
    problems += [f"{folder} lacks {name}, which {INDEX} lists" for name in missing]
    for file in files:
        try:
            weights |= read_header(file)
        except (ValueError, KeyError, TypeError, struct.error) as error:
            problems.append(f"{file} is damaged: {error}")
    if listed and not problems and (absent := sorted(set(listed) - set(weights))):
        problems.append(f"{folder}: no file contains {absent[0]}, which {INDEX} lists")
    return problems, weights


def read_header(file: Path) -> dict[str, Weight]:
    """Return the weights of a file; raise ValueError if the header does not match the size of the file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > min(MAX_HEADER, size - 8):
            raise ValueError(f"its header claims {length} bytes, and the file has {size}")
        entries = json.loads(stream.read(length))
    weights, end = {}, 0
    for name, entry in entries.items():
        if name != "__metadata__":
            weights[name] = Weight(entry["dtype"], tuple(entry["shape"]))
            end = max(end, entry["data_offsets"][1])
    if 8 + length + end != size:
        raise ValueError(f"its header describes {8 + length + end} bytes, and the file has {size}")
    return weights


def _listed(folder: Path) -> dict[str, str]:
    """Map the weights that the index lists to their files. Empty if the folder has no index."""
    index = folder / INDEX
    return json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else {}
