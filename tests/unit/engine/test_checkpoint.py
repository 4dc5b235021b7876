"""Checkpoints over real ranks: every layout reads what another layout wrote bit by bit, and rejects incomplete ones."""

import json
import logging
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.ranks import run_ranks, run_warm_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from camshaft import storage
from camshaft.engine import checkpoint
from camshaft.engine.checkpoint import BackgroundSave, State, load_into, save
from camshaft.errors import CheckpointError, WorkerError

PLAIN = ("step", "mask")
"""Tensors that no engine shards."""


def full_tensors() -> dict[str, Tensor]:
    """Return tensors with uneven rows, fewer rows than ranks, no rows to shard, and other dtypes."""
    draw = torch.Generator().manual_seed(3)
    return {
        "layers.0.weight": torch.randn(8, 6, generator=draw),
        "layers.1.weight": torch.randn(5, 3, generator=draw),
        "one.row": torch.randn(1, 4, generator=draw),
        "norm.weight": torch.randn(7, generator=draw),
        "half": torch.randn(4, 4, generator=draw).bfloat16(),
        "step": torch.tensor(3.0),
        "mask": torch.arange(10, dtype=torch.uint8),
    }


def laid_out(layout: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Lay out `tensors` on this rank: unsharded, over one axis, replicated and sharded, or sharded over both axes."""
    if layout == "plain":
        return {name: tensor.clone() for name, tensor in tensors.items()}
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,) if layout == "1d" else (2, size // 2), mesh_dim_names=None)
    placements: dict[str, Any] = {"1d": [Shard(0)], "hsdp": [Replicate(), Shard(0)], "dp_tp": [Shard(0), Shard(1)]}
    placed = {}
    for name, tensor in tensors.items():
        where = placements[layout]
        if layout == "dp_tp" and tensor.ndim < 2:
            where = [Shard(0), Replicate()]
        placed[name] = tensor.clone() if name in PLAIN else distribute_tensor(tensor, mesh, where)
    return placed


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def write(folder: str, layout: str, limit: int | None = None) -> None:
    random = {"cpu": torch.full((3,), dist.get_rank() if dist.is_initialized() else 0)}
    group = None if layout == "plain" else dist.group.WORLD
    state = State(laid_out(layout, full_tensors()), {}, random, {"update": 5})
    with mock.patch.object(checkpoint, "_FILE_BYTES", limit or checkpoint._FILE_BYTES):
        save(state, folder, group=group, global_step=5)


def read(folder: str, layout: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a checkpoint and compare every bit; return (facts, random state)."""
    group = None if layout == "plain" else dist.group.WORLD
    targets = laid_out(layout, {name: torch.zeros_like(tensor) for name, tensor in full_tensors().items()})
    kept = dict(targets)
    loaded = load_into(folder, targets, group=group)
    assert all(targets[name] is kept[name] for name in kept)
    for name, tensor in full_tensors().items():
        assert torch.equal(full(targets[name]), tensor), name
        assert full(targets[name]).dtype == tensor.dtype, name
    return loaded.metadata, loaded.random


def on(layout: str, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function` on `size` ranks, or in this process without torch.distributed for one."""
    return [function(*args)] if layout == "plain" else run_warm_ranks(function, size, *args)


@pytest.mark.parametrize(
    ("written", "by", "read_as", "readers"),
    [
        ("1d", 2, "1d", 4),
        ("1d", 4, "plain", 1),
        ("plain", 1, "1d", 3),
        ("1d", 1, "1d", 2),
        ("hsdp", 4, "1d", 2),
        ("dp_tp", 4, "1d", 3),
        ("1d", 3, "dp_tp", 4),
        ("dp_tp", 4, "plain", 1),
    ],
)
def test_checkpoints_load_on_another_number_of_ranks(
    written: str, by: int, read_as: str, readers: int, tmp_path: Path
) -> None:
    folder = str(tmp_path / "ckpt")
    on(written, by, write, folder, written)
    assert storage.verify(folder) == {"kind": "engine", "global_step": 5}
    assert {path.suffix for path in Path(folder).rglob("*") if path.is_file()} == {".safetensors", ".json"}
    for facts, random in on(read_as, readers, read, folder, read_as):
        assert facts == {"update": 5}
        assert random == {}


def test_large_parts_are_split_into_files(tmp_path: Path) -> None:
    run_warm_ranks(write, 2, str(tmp_path / "ckpt"), "1d", 60)
    assert len(list((tmp_path / "ckpt" / "model").glob("shard-00001-*"))) > 2
    read(str(tmp_path / "ckpt"), "plain")
    run_warm_ranks(read, 3, str(tmp_path / "ckpt"), "1d")


def test_a_copy_of_a_weight_is_written_once(tmp_path: Path) -> None:
    run_warm_ranks(write, 4, str(tmp_path / "ckpt"), "hsdp")
    files = [load_file(path) for path in (tmp_path / "ckpt" / "model").iterdir()]
    assert sum(t.nbytes for file in files for t in file.values()) == sum(t.nbytes for t in full_tensors().values())


def test_random_state_is_separate_for_each_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = str(tmp_path / "ckpt")
    run_warm_ranks(write, 2, folder, "1d")
    results = run_warm_ranks(read, 2, folder, "1d")
    assert [random["cpu"].tolist() for _, random in results] == [[0] * 3, [1] * 3]
    with caplog.at_level(logging.INFO):
        assert read(folder, "plain")[1] == {}
    assert "written by 2 ranks and is loaded by 1; dropout starts with new random states" in caplog.text


# -- modules sharded by torch itself --------------------------------------------------------------


def block(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def cut_both_ways(module: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(module, mesh=mesh["dp"])


def write_module(folder: str) -> list[bool]:
    module = block(1)
    cut_both_ways(module)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
    module(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    named = dict(module.named_parameters())
    save(State.collect(named, optimizer, named, {}, {}), folder, group=dist.group.WORLD)

    again = block(2)
    cut_both_ways(again)
    named_again = dict(again.named_parameters())
    fresh = torch.optim.AdamW(again.parameters(), foreach=True)
    load_into(folder, named_again, fresh, named_again, group=dist.group.WORLD)
    state, loaded = optimizer.state_dict()["state"], fresh.state_dict()["state"]
    same = [torch.equal(full(named[name]), full(named_again[name])) for name in named]
    return same + [torch.equal(full(state[i][key]), full(loaded[i][key])) for i in state for key in state[i]]


def test_sharded_checkpoints_load_into_an_unsharded_model(tmp_path: Path) -> None:
    folder = str(tmp_path / "ckpt")
    assert run_warm_ranks(write_module, 4, folder) == [[True] * (4 + 4 * 3)] * 4

    unsharded = block(1)
    optimizer = torch.optim.AdamW(unsharded.parameters())
    unsharded(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    other = block(2)
    fresh, named = torch.optim.AdamW(other.parameters()), dict(other.named_parameters())
    load_into(folder, named, fresh, named)
    for (name, expected), actual in zip(unsharded.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, msg=name)
        for key, value in optimizer.state[expected].items():
            torch.testing.assert_close(fresh.state[actual][key], value, msg=f"{name}/{key}")


# -- rejected checkpoints -------------------------------------------------------------------------


def refusal(folder: str, layout: str = "plain") -> str:
    """Return the error of a rejected checkpoint; reading changed no tensor before the error."""
    targets = laid_out(layout, {name: torch.zeros_like(tensor) for name, tensor in full_tensors().items()})
    try:
        load_into(folder, targets, group=None if layout == "plain" else dist.group.WORLD)
    except CheckpointError as error:
        assert not any(full(tensor).any() for tensor in targets.values())
        return str(error)
    return "loaded"


def spoil_truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def spoil_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("spoil", [spoil_truncate, spoil_bit, Path.unlink])
def test_a_damaged_file_is_named_on_every_rank(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    run_warm_ranks(write, 2, str(tmp_path / "ckpt"), "1d")
    (victim,) = (tmp_path / "ckpt" / "model").glob("shard-00002-*")
    spoil(victim)
    errors = run_warm_ranks(refusal, 3, str(tmp_path / "ckpt"), "1d")
    assert len(set(errors)) == 1
    assert f"model/{victim.name}" in errors[0]


def test_another_model_is_rejected_by_the_names_that_differ(tmp_path: Path) -> None:
    tensors = full_tensors()
    tensors["more"] = tensors.pop("half")
    tensors["norm.weight"] = torch.zeros(9)
    save(State(tensors, {}, {}, {}), tmp_path / "ckpt")
    phrases = ("'half' is missing", "'more' is not in the model", "'norm.weight' has shape (9,) but the model has (7,)")
    for error in [refusal(str(tmp_path / "ckpt")), *run_warm_ranks(refusal, 2, str(tmp_path / "ckpt"), "1d")]:
        assert all(part in error for part in phrases), error


def test_a_folder_of_something_else_is_no_checkpoint(tmp_path: Path) -> None:
    with storage.new_folder(tmp_path / "x", kind="huggingface") as work:
        (work / "model.safetensors").write_bytes(b"")
    assert "is not a checkpoint of an engine" in refusal(str(tmp_path / "x"))
    assert "nowhere is not a complete checkpoint" in refusal(str(tmp_path / "nowhere"))


def adamw_state(optimizer: Callable[..., Any] = torch.optim.AdamW) -> State:
    parameter = torch.nn.Parameter(torch.ones(3))
    created = optimizer([parameter], lr=0.1)
    parameter.sum().backward()
    created.step()
    return State.collect({"p": parameter}, created, {"p": parameter}, {}, {})


def test_an_optimizer_of_another_class_is_rejected_by_both_names(tmp_path: Path) -> None:
    save(adamw_state(), tmp_path / "ckpt")
    parameter = torch.nn.Parameter(torch.zeros(3))
    other = torch.optim.NAdam([parameter])
    with pytest.raises(CheckpointError, match=r"AdamW, but this engine uses NAdam\. Set optim\.optimizer=AdamW"):
        load_into(tmp_path / "ckpt", {"p": parameter}, other, {"p": parameter})
    assert not parameter.any()


def test_state_of_untrained_parameters_is_rejected(tmp_path: Path) -> None:
    save(adamw_state(), tmp_path / "ckpt")
    frozen, trained = torch.nn.Parameter(torch.zeros(3), requires_grad=False), torch.nn.Parameter(torch.zeros(3))
    other = torch.optim.AdamW([trained])
    with pytest.raises(CheckpointError, match="optimizer state of 'p', which this engine does not train"):
        load_into(tmp_path / "ckpt", {"p": frozen}, other, {"p": frozen, "q": trained})
    assert not frozen.any()


def test_weights_load_with_or_without_an_optimizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(State.collect({"p": torch.ones(3)}, None, {}, {}, {}), tmp_path / "weights")
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    load_into(tmp_path / "weights", {"p": parameter}, optimizer, {"p": parameter})
    assert parameter.tolist() == [1.0] * 3
    assert not optimizer.state
    assert "holds no optimizer state; AdamW starts with empty state" in caplog.text

    save(adamw_state(), tmp_path / "all")
    alone = torch.zeros(3)
    load_into(tmp_path / "all", {"p": alone})
    assert torch.allclose(alone, torch.tensor(0.899), atol=1e-6)  # AdamW: rate, and decay of 1%


# -- failures during a write ----------------------------------------------------------------------


def write_with_file_limit(folder: str, rank: int) -> str:
    """Run `write` with a limit of 100 bytes per file on one rank, which simulates a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        write(folder, "1d")
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "written"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_keeps_the_older_checkpoint(rank: int, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    run_warm_ranks(write, 2, str(folder), "1d")
    (folder / "older").touch()
    errors = run_warm_ranks(write_with_file_limit, 2, str(folder), rank)
    assert len(set(errors)) == 1
    assert f"rank {rank}: " in errors[0]
    assert "File too large" in errors[0]
    assert (folder / "older").exists()
    run_warm_ranks(read, 2, str(folder), "1d")


def write_on_separate_disks(folder: str) -> str:
    """Rank 1 writes to another folder: its node has a separate disk under the same name."""
    real, group = checkpoint._write, dist.group.WORLD

    def elsewhere(tensors: Any, work: Path, group: Any) -> None:
        real(tensors, work if dist.get_rank() == 0 else Path(f"{folder}.other") / work.name, group)

    def finish_rank(state: State, work: Path, group: Any) -> Any:
        return {} if dist.get_rank() == 0 else {"model/shard-00002-model-00001-of-00001.safetensors": {}}

    state = State(laid_out("1d", full_tensors()), {}, {}, {})
    with mock.patch.object(checkpoint, "_write", elsewhere), mock.patch.object(checkpoint, "_finish_rank", finish_rank):
        try:
            save(state, folder, group=group)
        except CheckpointError as error:
            return str(error)
    return "written"


def test_separate_disks_are_an_error(tmp_path: Path) -> None:
    errors = run_warm_ranks(write_on_separate_disks, 2, str(tmp_path / "ckpt"))
    assert all("use a folder on a file system that all nodes share" in text for text in errors)
    assert not (tmp_path / "ckpt").exists()


# -- background writes ----------------------------------------------------------------------------


def numbers(value: float) -> State:
    return State({"p": torch.full((4,), value)}, {}, {}, {"value": value})


def value_in(folder: Path) -> float:
    target = torch.zeros(4)
    facts = load_into(folder, {"p": target}).metadata
    assert target.tolist() == [facts["value"]] * 4
    return facts["value"]


def test_a_background_save_has_the_state_at_its_start(tmp_path: Path) -> None:
    go_on, begin = threading.Event(), storage.begin

    def later(target: Path) -> Path:
        assert go_on.wait(20)
        return begin(target)

    saves, state = BackgroundSave(), numbers(1.0)
    with mock.patch.object(storage, "begin", later):
        saves.start(state, tmp_path / "a")
        state.model["p"].fill_(9.0)
        assert not (tmp_path / "a").exists()
        go_on.set()
        saves.wait()
    assert value_in(tmp_path / "a") == 1.0


def test_a_second_background_save_waits_for_the_first(tmp_path: Path) -> None:
    saves = BackgroundSave()
    for value in (1.0, 2.0, 3.0):
        saves.start(numbers(value), tmp_path / f"global_step_{value:.0f}" / "actor", max_ckpt_to_keep=2)
        if value > 1:
            assert storage.is_complete(tmp_path / f"global_step_{value - 1:.0f}" / "actor")
    saves.wait()
    assert [step for step, _ in storage.step_folders(tmp_path)] == [2, 3]


def test_wait_raises_what_went_wrong_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    saves = BackgroundSave()
    saves.wait()
    saves.start(numbers(1.0), tmp_path / "file" / "actor")
    with pytest.raises(CheckpointError, match="file/actor could not be written: rank 0: NotADirectoryError"):
        saves.wait()
    saves.wait()
    saves.start(numbers(2.0), tmp_path / "b")
    saves.wait()
    assert value_in(tmp_path / "b") == 2.0


def own_group() -> Any:
    return dist.new_group(backend="gloo")


def train_while_saving(folder: str) -> list[float]:
    """Run collectives of training while the background thread runs others; weights change during the save."""
    saves = BackgroundSave(own_group())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(torch.zeros(64, 8), mesh, [Shard(0)])
    sums = []
    for step in range(1, 4):
        weight.add_(1.0)
        saves.start(State({"weight": weight}, {}, {}, {}), f"{folder}/global_step_{step}", global_step=step)
        for _ in range(5):
            weight.add_(100.0)
            sums.append(float(full(weight.sum())))
            weight.sub_(100.0)
    saves.wait()
    return sums


def test_training_continues_during_a_background_save(tmp_path: Path) -> None:
    expected = [512.0 * (100 + step) for step in (1, 2, 3) for _ in range(5)]
    assert run_warm_ranks(train_while_saving, 2, str(tmp_path)) == [expected] * 2
    for step in (1, 2, 3):
        target = torch.zeros(64, 8)
        load_into(tmp_path / f"global_step_{step}", {"weight": target})
        assert torch.equal(target, torch.full((64, 8), float(step)))


MOMENTS = {
    "before the first file": "camshaft.engine.checkpoint._write",
    "before the checksums": "camshaft.storage.fingerprints",
    "before the manifest": "camshaft.storage.finish",
    "before the first rename": "os.replace",
    "between the renames": "os.replace",
    "before the old one is deleted": "camshaft.storage._remove_local",
}


def die_while_saving(folder: str, moment: str) -> None:
    """Write step 1, then step 2 in the background under the same name; the process exits at `moment`."""
    saves = BackgroundSave(dist.group.WORLD)
    saves.start(numbers(1.0), folder)
    saves.wait()
    module, _, name = MOMENTS[moment].rpartition(".")
    remaining = [{"before the first rename": 1, "between the renames": 2}.get(moment, 0)]  # after that of the manifest
    real = getattr(__import__("sys").modules[module], name)

    def last(*args: Any, **kwargs: Any) -> Any:
        if not remaining[0]:
            assert threading.current_thread() is not threading.main_thread()
            os._exit(9)
        remaining[0] -= 1
        return real(*args, **kwargs)

    with mock.patch(MOMENTS[moment], last):
        saves.start(numbers(2.0), folder)
        saves.wait()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(moment: str, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    with pytest.raises(WorkerError, match="exit code 9"):
        run_ranks(die_while_saving, 1, str(folder), moment)
    assert storage.is_complete(folder)
    assert value_in(folder) == (2.0 if moment == "before the old one is deleted" else 1.0)
    save(numbers(3.0), folder)
    assert value_in(folder) == 3.0
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def die_on_rank_one(folder: str) -> None:
    def last(*_: Any) -> None:
        os._exit(9)

    saves = BackgroundSave(own_group())
    with mock.patch.object(storage, "fingerprints", last if dist.get_rank() == 1 else storage.fingerprints):
        saves.start(numbers(2.0), folder)
        saves.wait()


def test_a_rank_killed_during_a_save_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    save(numbers(1.0), tmp_path / "ckpt")
    with pytest.raises((WorkerError, CheckpointError)):
        run_ranks(die_on_rank_one, 2, str(tmp_path / "ckpt"))
    assert value_in(tmp_path / "ckpt") == 1.0


# -- copies and retention over ranks --------------------------------------------------------------


def write_and_copy(root: str) -> None:
    for step in (1, 2, 3):
        state = State(laid_out("1d", full_tensors()), {}, {}, {"update": 5})
        where = f"{root}/run/global_step_{step}/actor"
        save(state, where, group=dist.group.WORLD, hdfs_path=f"{root}/far/{step}", max_ckpt_to_keep=2)


def read_copied(root: str) -> bool:
    with checkpoint.fetch_folder(f"{root}/back", f"{root}/far/3", True, dist.group.WORLD) as folder:
        read(str(folder), "1d")
        return folder.exists()


def copy_to_a_file(root: str) -> str:
    Path(root, "file").touch()
    with pytest.raises(CheckpointError) as caught:
        save(
            State(laid_out("1d", full_tensors()), {}, {}, {}),
            f"{root}/ckpt",
            group=dist.group.WORLD,
            hdfs_path=f"{root}/file/x",
        )
    return str(caught.value)


def test_a_failed_copy_is_not_reported_as_a_failed_save(tmp_path: Path) -> None:
    for message in run_warm_ranks(copy_to_a_file, 2, str(tmp_path)):
        assert message.startswith(f"{tmp_path}/ckpt is complete, but could not be copied to {tmp_path}/file/x: rank 0")
    assert storage.is_complete(tmp_path / "ckpt")


def test_copies_and_retention_are_rank_zeros(tmp_path: Path) -> None:
    run_warm_ranks(write_and_copy, 2, str(tmp_path))
    assert [step for step, _ in storage.step_folders(tmp_path / "run")] == [2, 3]
    assert run_warm_ranks(read_copied, 2, str(tmp_path)) == [True, True]
    assert not (tmp_path / "back").exists()
    shutil.rmtree(tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "far").iterdir()) == ["1", "2", "3"]


def test_facts_name_the_writer(tmp_path: Path) -> None:
    run_warm_ranks(write, 2, str(tmp_path / "ckpt"), "1d")
    facts = json.loads((tmp_path / "ckpt" / "state.json").read_text())
    assert facts == {"world_size": 2, "optimizer": None, "optimizer_values": {}, "engine": {"update": 5}}


@pytest.fixture(autouse=True)
def _random_state() -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)
