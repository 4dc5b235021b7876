"""Read JSON that others have written, so that everything that can be wrong with it is a ValueError with a reason.

value = parse_json(text)
settings = read_json_object(folder / "config.json")
"""

import json
from pathlib import Path
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raise ValueError also if its brackets exceed the recursion limit of Python."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise ValueError with the file and the reason if it contains anything else."""
    try:
        content = parse_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        kind = "null" if content is None else f"a {type(content).__name__}"
        raise ValueError(f"{file} contains {kind} instead of a JSON object")
    return content
