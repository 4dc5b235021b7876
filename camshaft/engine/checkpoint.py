"""Checkpoints of engines: one folder, written by one process or by many, read at any world size.

    state = State.of(weights, optimizer, parameters, facts={"update": 20}, random=random_states(device))
    save(state, "ckpt/global_step_20/actor", group=group, global_step=20)
    loaded = load_into("ckpt/global_step_20/actor", weights, optimizer, parameters, group=group)

    model/*.safetensors       weights by Hugging Face names
    optimizer/*.safetensors   `<parameter>/<key>`: model.norm.weight/exp_avg
    random/rank_0.safetensors what each rank's dropout draws from; read again at the same world size only
    state.json                world size, class of the optimizer, what the engine adds
    manifest.json             every file with size and checksum (camshaft/storage.py)

Tensors are plain ones or DTensors over any mesh. Each rank writes its own part into a folder that all of them
see, and torch.distributed.checkpoint puts the parts together for whatever layout reads them. One process
without torch.distributed (`group=None`) writes plain files of the same names and reads both kinds.

`group` is a process group that moves CPU objects (gloo); give it a timeout longer than a copy to `hdfs_path`.
Whatever goes wrong on one rank is raised on all of them, and then the folder does not take its name.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from camshaft import storage
from camshaft.engine.collectives import Group, on_every_rank, on_rank_zero, seat_in
from camshaft.engine.optimizer_state import Held, optimizer_state, optimizer_targets, restore_optimizer
from camshaft.errors import CheckpointError

FACTS = "state.json"
_FILE_BYTES = 2 << 30

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class State:
    """All that an engine goes on from. The tensors are the live ones until `staged` copies them."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    random: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    """What the engine adds; JSON, like the values below."""
    optimizer_class: str | None = None
    optimizer_values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer | None,
        parameters: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        random: Mapping[str, Tensor],
    ) -> State:
        """`parameters` are the optimizer's, by the names that `model` has them under."""
        tensors, values = ({}, {}) if optimizer is None else optimizer_state(optimizer, parameters)
        name = None if optimizer is None else type(optimizer).__name__
        return cls(model, tensors, random, facts, name, values)

    def staged(self) -> State:
        """Copies in host memory, which training does not change."""

        def copied(part: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in part.items()}

        model, optimizer, random = map(copied, (self.model, self.optimizer, self.random))
        return replace(self, model=model, optimizer=optimizer, random=random, facts=copy.deepcopy(self.facts))

    def told(self, world_size: int) -> dict[str, Any]:
        """What is not a tensor, for `state.json`."""
        return {
            "world_size": world_size,
            "optimizer": self.optimizer_class,
            "optimizer_values": dict(self.optimizer_values),
            "engine": dict(self.facts),
        }


@dataclass(frozen=True)
class Loaded:
    """What the engine has to take up itself."""

    facts: dict[str, Any]
    random: dict[str, Tensor]
    """This rank's; empty if the checkpoint was written at another world size."""


# -- writing --------------------------------------------------------------------------------------


def save(
    state: State,
    local_path: str | Path,
    *,
    group: Group = None,
    hdfs_path: str | None = None,
    global_step: int = 0,
    max_ckpt_to_keep: int | None = None,
) -> None:
    """Write `state` to the folder `local_path`, whole or not at all; every rank of `group` calls it."""
    target = Path(local_path).expanduser().absolute()
    rank, world_size = seat_in(group)
    with _explained(rank, f"{target} could not be written"):
        work = on_rank_zero(group, lambda: _begin(target, state))
        _write(state.model, work / "model", group)
        _write(state.optimizer, work / "optimizer", group)
        parts = on_every_rank(group, lambda: _finish_own_part(state, work, group))
        files = {name: told for part in parts for name, told in part.items()}
        on_rank_zero(group, lambda: _finish(target, work, files, state.told(world_size), global_step))
        if hdfs_path is not None:
            on_rank_zero(group, lambda: storage.copy_folder(str(target), hdfs_path))
        if max_ckpt_to_keep is not None:
            on_rank_zero(group, lambda: storage.prune(target, max_ckpt_to_keep))


def _begin(target: Path, state: State) -> Path:
    with _explained(0, f"{target} could not be written"):
        work = storage.begin(target)
        for part, tensors in (("model", state.model), ("optimizer", state.optimizer), ("random", state.random)):
            if tensors:
                (work / part).mkdir()
        return work


def _write(tensors: Mapping[str, Tensor], folder: Path, group: Group) -> None:
    """This rank's part of `tensors`; a tensor that several ranks hold is written by one of them."""
    if not tensors:
        return
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    if group is None:
        save_file(whole, folder / f"{folder.name}.safetensors")
        return
    _, world_size = seat_in(group)
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_file_numbers(whole, world_size), save_distributed=True
    )
    state_dict_saver.save(dict(whole), storage_writer=writer, process_group=group)


def _file_numbers(tensors: Mapping[str, Tensor], world_size: int) -> dict[str, int]:
    """Tensor -> number of its file, counted from 1. A file is put together in memory, so none may grow large."""
    numbers, number, filled = {}, 1, 0.0
    for name, tensor in tensors.items():
        share = tensor.numel() * tensor.element_size() / world_size
        if filled and filled + share > _FILE_BYTES:
            number, filled = number + 1, 0.0
        numbers[name], filled = number, filled + share
    return numbers


def _finish_own_part(state: State, work: Path, group: Group) -> dict[str, Any]:
    """Write this rank's random state; the fingerprints of all that it wrote, which it reads for them again."""
    rank, _ = seat_in(group)
    # torch.distributed.checkpoint counts ranks from 1 in the names of their files.
    pattern = "*.safetensors" if group is None else f"shard-{rank + 1:05d}-*.safetensors"
    with _explained(rank, f"{work} could not be written"):
        own = [path for part in ("model", "optimizer") for path in (work / part).glob(pattern)]
        if state.random:
            own.append(work / "random" / f"rank_{rank}.safetensors")
            save_file({name: tensor.contiguous() for name, tensor in state.random.items()}, own[-1])
        return storage.fingerprints(work, own)


def _finish(target: Path, work: Path, files: dict[str, Any], facts: Mapping[str, Any], global_step: int) -> None:
    with _explained(0, f"{target} could not be written"):
        there = {str(path.relative_to(work)) for path in work.rglob("*") if path.is_file()}
        if unseen := sorted(files.keys() - there):
            raise CheckpointError(
                f"{target}: rank 0 does not see '{unseen[0]}', which another rank has written. "
                "Name a folder on a disk that all nodes share"
            )
        assert there == files.keys(), f"nobody took the checksum of {sorted(there - files.keys())}"
        (work / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        files |= storage.fingerprints(work, [work / FACTS])
        storage.finish(target, files, {"kind": "engine", "global_step": global_step})


class BackgroundSave:
    """`save` in a thread, from copies in host memory; training goes on after `start` has made them.

    `group` must be this object's own: a collective of training in the same group would meet one of the thread's.
    Call `wait` before the process ends, before a load, and to learn of an error; `start` waits for the one before.
    """

    def __init__(self, group: Group = None):
        self._group = group
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(
        self,
        state: State,
        local_path: str | Path,
        *,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Copy `state` and write the copy in the background; the arguments are those of `save`."""
        self.wait()
        copies: list[State] = []
        rank, _ = seat_in(self._group)
        with _explained(rank, f"no room for the copy to write {local_path} from"):
            on_every_rank(self._group, lambda: copies.append(state.staged()))
        # A thread begins on device 0, where torch would open a context that nobody asked for.
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

        def run() -> None:
            try:
                if device is not None:
                    torch.accelerator.set_device_index(device)
                save(
                    copies.pop(),
                    local_path,
                    group=self._group,
                    hdfs_path=hdfs_path,
                    global_step=global_step,
                    max_ckpt_to_keep=max_ckpt_to_keep,
                )
            except BaseException as error:
                logger.error("the checkpoint %s was not written: %s", local_path, error)
                self._error = error

        self._thread = threading.Thread(target=run, name=f"save {local_path}")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written; raises what went wrong since the last call."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


# -- reading --------------------------------------------------------------------------------------


@contextlib.contextmanager
def brought(local_path: str, hdfs_path: str | None, remove_after: bool, group: Group = None) -> Iterator[Path]:
    """The folder to load from: `local_path`, after a copy of `hdfs_path` came there if one is named.

    Only such a copy is removed again at the end, if `remove_after`.
    """
    if hdfs_path is not None:
        on_rank_zero(group, lambda: storage.copy_folder(hdfs_path, local_path))
    yield Path(local_path).expanduser()
    if hdfs_path is not None and remove_after:
        on_every_rank(group, lambda: None)  # until then another rank may still read
        on_rank_zero(group, lambda: storage.remove(local_path))


def load_into(
    local_path: str | Path,
    model: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    parameters: Mapping[str, Tensor] | None = None,
    *,
    group: Group = None,
) -> Loaded:
    """Fill `model` in place and, where there is one, make the optimizer's state that of the checkpoint.

    Nothing is changed before every file was found whole, by its checksum, and every name and shape was found to
    fit. Without an optimizer only the weights are read. Every rank of `group` calls it.
    """
    folder = Path(local_path).expanduser()
    rank, world_size = seat_in(group)
    with _explained(rank, f"{folder} could not be read"):
        on_every_rank(group, lambda: storage.verify(folder, (rank, world_size)))
        facts, held, held_state = on_rank_zero(group, lambda: _contents(folder))
        _compare(folder, held, {name: tuple(tensor.shape) for name, tensor in model.items()})
        targets: dict[str, Tensor] = {}
        if optimizer is not None:
            assert parameters is not None, "an optimizer's state is found by the names of its parameters"
            if _has_state_of(optimizer, facts, folder):
                make = functools.partial(optimizer_targets, optimizer, parameters, held_state, folder)
                on_every_rank(group, lambda: targets.update(make()))
        _read(folder / "model", model, group)
        _read(folder / "optimizer", targets, group)
        if optimizer is not None and parameters is not None:
            restore_optimizer(optimizer, parameters, targets, facts["optimizer_values"])
        return Loaded(facts["engine"], _random_of(folder, facts["world_size"], rank, world_size))


def _contents(folder: Path) -> tuple[dict[str, Any], dict[str, Held], dict[str, Held]]:
    """(facts, tensors of the model, tensors of the optimizer) of a checkpoint."""
    return facts_of(folder), _tensors(folder / "model"), _tensors(folder / "optimizer")


def facts_of(folder: Path) -> dict[str, Any]:
    """What `State.told` gave, read by itself."""
    path = folder / FACTS
    if not path.is_file():
        raise CheckpointError(f"{folder} was not written by an engine: it has no {FACTS}")
    return json.loads(path.read_text(encoding="utf-8"))


def _tensors(folder: Path) -> dict[str, Held]:
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata if folder.is_dir() else {}
    return {name: (tuple(info.size), info.properties.dtype) for name, info in found.items()}  # pyright: ignore


def _compare(folder: Path, held: Mapping[str, Held], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """An error that names what differs between the checkpoint's model and this one."""
    wrong = [f"'{name}' is missing" for name in wanted if name not in held]
    wrong += [f"'{name}' is unknown here" for name in held if name not in wanted]
    wrong += [
        f"'{name}' is {held[name][0]}, the model has {shape}"
        for name, shape in wanted.items()
        if name in held and held[name][0] != shape
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(f"{folder} is of another model: {'; '.join(wrong[:5])}{more}")


def _has_state_of(optimizer: torch.optim.Optimizer, facts: Mapping[str, Any], folder: Path) -> bool:
    """Was the checkpoint written with an optimizer of this class? An error if it was another one."""
    kind = type(optimizer).__name__
    if facts["optimizer"] is None:
        logger.warning("%s holds no optimizer state: %s starts anew", folder, kind)
        return False
    if facts["optimizer"] != kind:
        raise CheckpointError(
            f"{folder} was written with the optimizer {facts['optimizer']}, this engine has {kind}. "
            f"Set optim.optimizer={facts['optimizer']}, or start a new run from the weights alone"
        )
    return True


def _read(folder: Path, targets: Mapping[str, Tensor], group: Group) -> None:
    """Fill `targets` from the files of `folder`, whatever layout they were written in."""
    if not targets:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is what None means
        reader = HuggingFaceStorageReader(str(folder))
        state_dict_loader.load(dict(targets), storage_reader=reader, process_group=group, no_dist=group is None)


def _random_of(folder: Path, written_by: int, rank: int, world_size: int) -> dict[str, Tensor]:
    if written_by == world_size:
        path = folder / "random" / f"rank_{rank}.safetensors"
        return load_file(path) if path.is_file() else {}
    if rank == 0:
        logger.info("%s was written by %d ranks and is read by %d: dropout draws anew", folder, written_by, world_size)
    return {}


@contextlib.contextmanager
def _explained(rank: int, what: str) -> Iterator[None]:
    """A CheckpointError that says on which rank `what` came about, and from which cause."""
    try:
        yield
    except CheckpointError:
        raise
    except CheckpointException as error:
        failed, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        raise CheckpointError(f"{what}: rank {failed}: {type(cause).__name__}: {cause}") from cause
    except Exception as error:
        raise CheckpointError(f"{what}: rank {rank}: {type(error).__name__}: {error}") from error
