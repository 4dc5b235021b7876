"""Batches in checkpoints that were generated and are not learned yet: their tensors, and their objects as JSON values.

    state = {"in_flight": objects} | tensors         # objects, tensors = store({3: generated})
    load(3, state)                                   # the columns of batch 3

A batch consists of the columns that the rollout wrote. Those of the data are drawn again.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import CheckpointError

IN_FLIGHT = "in_flight"
"""Key of the objects in the state of a checkpoint, and first part of the names of the tensors."""


def store(batches: Mapping[int, DataProto]) -> dict[str, Any]:
    """Return the state of batches by step: JSON values under the key `IN_FLIGHT`, and tensors.

    A batch with objects that JSON does not preserve, such as results of reward functions, is left out.
    """
    tensors: dict[str, Tensor] = {}
    objects: dict[str, dict[str, Any]] = {}
    for step, batch in batches.items():
        if not all(_survives(list(c)) for c in batch.columns.values() if not isinstance(c, Ragged | Tensor)):
            continue
        kept: dict[str, list[Any]] = {}
        for name, column in batch.columns.items():
            key = f"{IN_FLIGHT}/{step}/{name}"
            if isinstance(column, Ragged):
                tensors |= {f"{key}/values": column.values, f"{key}/lengths": column.lengths}
            elif isinstance(column, Tensor):
                tensors[key] = column
            else:
                kept[name] = list(column)
        objects[str(step)] = {"columns": list(batch.columns), "objects": kept, "metrics": batch.meta_info["metrics"]}
    return {IN_FLIGHT: objects} | tensors


def _survives(value: Any) -> bool:
    """Return True if JSON preserves a value. NaN, which a tool call can contain, is written as Python writes it."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_survives, value.values()))
    return all(map(_survives, value)) if isinstance(value, list) else isinstance(value, str | int | float | None)


def load(step: int, state: Mapping[str, Any]) -> DataProto:
    """Return the columns and the metrics of a batch from what `store` returned."""
    stored, prefix = state[IN_FLIGHT][str(step)], f"{IN_FLIGHT}/{step}"
    columns: dict[str, Any] = {}
    try:
        for name in stored["columns"]:
            if name in stored["objects"]:
                columns[name] = stored["objects"][name]
            elif f"{prefix}/{name}" in state:
                columns[name] = state[f"{prefix}/{name}"]
            else:
                columns[name] = Ragged(state[f"{prefix}/{name}/values"], state[f"{prefix}/{name}/lengths"])
    except KeyError as error:
        raise CheckpointError(f"the checkpoint is damaged: batch {step} under way has no {error}") from error
    return DataProto.from_dict(columns, {"metrics": stored["metrics"]})
