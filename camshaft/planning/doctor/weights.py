"""Read the names and shapes of the weights of a model folder from the headers of its safetensors files.

    problems, shapes = read_shapes(Path("models/tiny"))
    sum(map(math.prod, shapes.values()))        # number of parameters

safetensors compares each header with the size of its file, so truncated and damaged files are found without reading
the weights.
"""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from camshaft.errors import StorageError
from camshaft.hub import read_weight_map

INDEX = "model.safetensors.index.json"


def read_shapes(folder: Path) -> tuple[list[str], dict[str, tuple[int, ...]]]:
    """Return the problems of the weight files of a folder, and the shapes of the weights by name."""
    problems: list[str] = []
    shapes: dict[str, tuple[int, ...]] = {}
    files, index = sorted(folder.glob("*.safetensors")), folder / INDEX
    try:
        listed = read_weight_map(index) if index.is_file() else {}
    except StorageError as error:
        return [str(error)], {}
    missing = sorted(set(listed.values()) - {file.name for file in files})
    problems += [f"{folder} lacks {name}, which {INDEX} lists" for name in missing]
    for file in files:
        try:
            with safe_open(file, "pt") as weights:
                shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            problems.append(f"{file} is damaged: {error}")
    if listed and not problems and (absent := sorted(set(listed) - set(shapes))):
        problems.append(f"{folder}: no file contains {absent[0]}, which {INDEX} lists")
    return problems, shapes
