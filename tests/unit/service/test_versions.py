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


def test_a_start_removes_the_versions_of_a_killed_server_only(tmp_path: Path) -> None:
    killed = Versions(tmp_path, max_in_memory=1)
    for name in ("v0", "v1"):
        killed.add(name, {"weight": torch.zeros(1)})
    with storage.new_folder(tmp_path / "checkpoint", kind="model") as folder:
        (folder / "model.safetensors").write_bytes(b"mine")
    (tmp_path / "notes.txt").write_text("mine")
    Versions(tmp_path, max_in_memory=1)
    assert not (tmp_path / "v0" / "model.safetensors").exists()
    assert (tmp_path / "checkpoint" / "model.safetensors").read_bytes() == b"mine"
    assert (tmp_path / "notes.txt").read_text() == "mine"
