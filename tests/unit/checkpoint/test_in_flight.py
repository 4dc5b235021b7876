"""Which columns of a batch under way a checkpoint contains."""

import json
import math
from typing import Any

import pytest
import torch

from camshaft.checkpoint import in_flight
from camshaft.dataproto import DataProto, Ragged


def stored(values: list[Any]) -> dict[str, Any]:
    columns = {"responses": Ragged.from_rows([[1, 2], [3]]), "finished": torch.tensor([True, False]), "calls": values}
    state = in_flight.store({4: DataProto.from_dict(columns, {"metrics": {"response_length/mean": 1.5}})})
    objects = json.loads(json.dumps(state.pop(in_flight.IN_FLIGHT)))
    return state | {in_flight.IN_FLIGHT: objects}


def test_objects_that_json_preserves_are_stored_with_the_tensors() -> None:
    calls = [{"name": "add", "arguments": [1, 2.5, None, True]}, {}]
    batch = in_flight.load(4, stored(calls))
    assert list(batch["calls"]) == calls
    assert [row.tolist() for row in batch.ragged("responses").rows()] == [[1, 2], [3]]
    assert batch.meta_info["metrics"] == {"response_length/mean": 1.5}


def test_a_tool_call_with_nan_is_stored() -> None:
    batch = in_flight.load(4, stored([{"x": math.nan}, {"x": [math.inf]}]))
    assert math.isnan(batch["calls"][0]["x"])
    assert batch["calls"][1] == {"x": [math.inf]}


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, {"x": object()}, [{"x": {3}}]])
def test_a_batch_with_objects_that_json_changes_is_left_out(value: Any) -> None:
    assert stored([value, None])[in_flight.IN_FLIGHT] == {}
