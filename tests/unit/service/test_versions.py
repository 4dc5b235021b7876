"""Published weights in files, and the files of others beside them."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import tiny_folder
from torch import Tensor
from transformers import AutoModelForCausalLM

from camshaft import storage
from camshaft.errors import RolloutError
from camshaft.reshard import SnapshotMemory
from camshaft.roles.versions import PublishedVersions
from camshaft.rollout import BaseRollout, RolloutEngineConfig, build_rollout
from camshaft.rollout.builtin.rollout import TorchRollout


@pytest.fixture(scope="module")
def rollout() -> BaseRollout:
    return build_rollout("torch", RolloutEngineConfig(model_path=str(tiny_folder()), device="cpu", dtype="float32"))


def weights(rollout: BaseRollout, value: float) -> Iterator[tuple[str, Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder())
    return iter([(name, torch.full_like(tensor, value)) for name, tensor in model.named_parameters()])


def loaded(versions: PublishedVersions, name: str, rollout: BaseRollout) -> float:
    """Return the value of all weights of a version in the rollout."""
    versions.load(name, rollout)
    assert isinstance(rollout, TorchRollout)
    values = {float(value) for weight in rollout.model.hf.parameters() for value in weight.flatten()[:3]}
    assert len(values) == 1
    return values.pop()


def test_weights_beyond_the_limit_are_in_files(tmp_path: Path, rollout: BaseRollout) -> None:
    versions, memories = PublishedVersions(tmp_path, max_in_memory=2), num_memories()
    for number in range(3):
        versions.add(f"v{number}", weights(rollout, number))
    assert num_memories() > memories
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v0"]
    assert loaded(versions, "v1", rollout) == 1.0  # which is then used more recently than v2
    versions.add("v3", weights(rollout, 3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v0", "v2"]
    assert [loaded(versions, f"v{number}", rollout) for number in range(4)] == [0.0, 1.0, 2.0, 3.0]
    versions.remove("v0")
    versions.remove("v1")
    assert not (tmp_path / "v0" / "model.safetensors").exists()
    for name in ("v0", "v1"):
        with pytest.raises(RolloutError, match=f"{name} have been released"):
            versions.load(name, rollout)
    versions.remove("v3")
    assert num_memories() == memories


def num_memories() -> int:
    """Return the number of open memory files of this process, which contain versions."""
    gc.collect()
    return sum("/memfd:" in os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink())


def test_versions_that_are_not_retained_are_removed_and_no_other_file(tmp_path: Path, rollout: BaseRollout) -> None:
    killed = PublishedVersions(tmp_path, max_in_memory=2)
    for name in ("v0", "v1", "v2"):
        killed.add(name, weights(rollout, float(name[1:])))
    killed.write("v1")
    with storage.new_folder(tmp_path / "checkpoint", kind="model") as folder:
        (folder / "model.safetensors").write_bytes(b"mine")
    (tmp_path / "notes.txt").write_text("mine")
    started = PublishedVersions(tmp_path, max_in_memory=1)
    assert [name in started for name in ("v0", "v1", "v2", "checkpoint")] == [True, True, False, False]
    started.retain(["v1", "v3"])
    assert loaded(started, "v1", rollout) == 1.0
    assert "v0" not in started
    assert not (tmp_path / "v0" / "model.safetensors").exists()
    assert (tmp_path / "checkpoint" / "model.safetensors").read_bytes() == b"mine"
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_failed_copy_leaves_no_memory_and_no_rank_behind(
    tmp_path: Path, rollout: BaseRollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks gather all weights together with the one that has failed."""

    def fail(memory: SnapshotMemory, weights: Iterator[tuple[str, Tensor]], version: int) -> Any:
        next(weights)
        raise MemoryError("no memory is left")

    versions, memories, left = PublishedVersions(tmp_path, max_in_memory=2), num_memories(), weights(rollout, 1.0)
    monkeypatch.setattr(SnapshotMemory, "snapshot", fail)
    with pytest.raises(MemoryError):
        versions.add("v1", left)
    assert next(left, None) is None
    assert "v1" not in versions
    assert num_memories() == memories
