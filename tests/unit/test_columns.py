"""The table of columns is complete and consistent."""

import pytest
import torch

from camshaft.columns import _TABLE, COLUMNS


def test_every_name_appears_once():
    assert len({column.name for column in _TABLE}) == len(_TABLE) == len(COLUMNS)
    assert all(COLUMNS[name].name == name for name in COLUMNS)


@pytest.mark.parametrize("column", _TABLE, ids=lambda column: column.name)
def test_every_column_is_described(column):
    assert column.kind in ("ragged", "tensor", "object")
    assert column.meaning
    assert column.written_by
    assert column.read_by
    if column.kind != "object":
        assert isinstance(getattr(torch, column.dtype), torch.dtype)


def test_the_table_cannot_be_changed():
    with pytest.raises(AttributeError):
        COLUMNS["prompts"].dtype = "float32"  # type: ignore[misc]
