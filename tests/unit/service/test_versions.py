"""Published weights in files, and the files of others beside them."""

from pathlib import Path

import pytest
import torch

from camshaft import storage
from camshaft.errors import RolloutError
from camshaft.roles.served import Versions


def test_weights_beyond_the_limit_are_in_files(tmp_path: Path) -> None:
    versions = Versions(tmp_path, max_in_memory=2)
    for number in range(4):
        versions.add(f"v{number}", {"weight": torch.full((3,), float(number))})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v0", "v1"]
    assert versions.get("v0")["weight"].tolist() == [0.0] * 3
    versions.remove("v0")
    assert not (tmp_path / "v0" / "model.safetensors").exists()
    with pytest.raises(RolloutError, match="v0 have been released"):
        versions.get("v0")


def test_versions_that_are_not_retained_are_removed_and_no_other_file(tmp_path: Path) -> None:
    killed = Versions(tmp_path, max_in_memory=2)
    for name in ("v0", "v1", "v2"):
        killed.add(name, {"weight": torch.full((1,), float(name[1:]))})
    killed.write("v1")
    with storage.new_folder(tmp_path / "checkpoint", kind="model") as folder:
        (folder / "model.safetensors").write_bytes(b"mine")
    (tmp_path / "notes.txt").write_text("mine")
    started = Versions(tmp_path, max_in_memory=1)
    assert [name in started for name in ("v0", "v1", "v2", "checkpoint")] == [True, True, False, False]
    started.retain(["v1", "v3"])
    assert started.get("v1")["weight"].tolist() == [1.0]
    assert "v0" not in started
    assert not (tmp_path / "v0" / "model.safetensors").exists()
    assert (tmp_path / "checkpoint" / "model.safetensors").read_bytes() == b"mine"
    assert (tmp_path / "notes.txt").read_text() == "mine"
