"""Checkpoints of engines: one folder, written by one or many processes, loaded at any world size.

    state = State.of(weights, optimizer, parameters, facts={"update": 20}, random=random_states(device))
    save(state, "ckpt/global_step_20/actor", group=group, global_step=20)
    loaded = load_into("ckpt/global_step_20/actor", weights, optimizer, parameters, group=group)

    model/*.safetensors       weights by Hugging Face names
    optimizer/*.safetensors   `<parameter>/<key>`: model.norm.weight/exp_avg
    random/rank_0.safetensors random state of each rank (dropout); loaded at the same world size only
    state.json                world size, class of the optimizer, facts of the engine
    manifest.json             every file with size and checksum (camshaft/storage.py)

Tensors may be DTensors over any mesh, and ranks may hold different tensors (the stages of a pipeline). Each rank writes
its shards into a folder that all ranks share, and torch.distributed.checkpoint assembles the shards for the layout that
loads them. One process without torch.distributed (`group=None`) writes unsharded files of the same names and loads both
kinds.

`group` is a process group with a CPU backend (gloo); its timeout must exceed the time of a copy to `hdfs_path`. An
error on one rank is raised on all ranks, and the folder then never gets its final name.

Tensors of an optimizer are stored under the Hugging Face names of its parameters, bitwise. Numbers that an optimizer
keeps as Python objects go to `state.json`. Settings of the config (lr, betas, weight decay) are not stored.
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
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from camshaft import storage
from camshaft.engine.collectives import Group, on_every_rank, on_rank_zero, seat_in
from camshaft.errors import CheckpointError

FACTS = "state.json"
_FILE_BYTES = 2 << 30

T = TypeVar("T")
TensorInfo = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor in a checkpoint."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class State:
    """Everything a resume needs. The tensors are the live ones until `staged` copies them."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    random: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    """Schedule position and model description of the engine; JSON, like the values below."""
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
        """Collect the state; `parameters` are the optimizer's, by the names they have in `model`."""
        tensors, values = ({}, {}) if optimizer is None else optimizer_state(optimizer, parameters)
        name = None if optimizer is None else type(optimizer).__name__
        return cls(model, tensors, random, facts, name, values)

    def staged(self) -> State:
        """Copy all tensors to host memory, where training does not change them."""

        def copied(part: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in part.items()}

        model, optimizer, random = map(copied, (self.model, self.optimizer, self.random))
        return replace(self, model=model, optimizer=optimizer, random=random, facts=copy.deepcopy(self.facts))

    def as_json(self, world_size: int) -> dict[str, Any]:
        """Return everything but the tensors, for `state.json`."""
        return {
            "world_size": world_size,
            "optimizer": self.optimizer_class,
            "optimizer_values": dict(self.optimizer_values),
            "engine": dict(self.facts),
        }


@dataclass(frozen=True)
class Loaded:
    """Parts of a checkpoint that the engine restores itself."""

    facts: dict[str, Any]
    random: dict[str, Tensor]
    """Random state of this rank; empty if the checkpoint was written at another world size."""


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
    """Write `state` atomically to the folder `local_path`; collective over `group`."""
    target = Path(local_path).expanduser().absolute()
    rank, world_size = seat_in(group)
    with _checkpoint_errors(rank, f"{target} could not be written"):
        work = on_rank_zero(group, lambda: _begin(target, state))
        _write(state.model, work / "model", group)
        _write(state.optimizer, work / "optimizer", group)
        fingerprints = on_every_rank(group, lambda: _finish_rank(state, work, group))
        files = {name: fingerprint for of_rank in fingerprints for name, fingerprint in of_rank.items()}
        state = replace(state, optimizer_values=_of_all_ranks(group, state.optimizer_values))
        on_rank_zero(group, lambda: _finish(target, work, files, state.as_json(world_size), global_step))
        if hdfs_path is not None:
            on_rank_zero(group, lambda: storage.copy_folder(str(target), hdfs_path))
        if max_ckpt_to_keep is not None:
            on_rank_zero(group, lambda: storage.prune(target, max_ckpt_to_keep))


def _begin(target: Path, state: State) -> Path:
    with _checkpoint_errors(0, f"{target} could not be written"):
        work = storage.begin(target)
        for part, tensors in (("model", state.model), ("optimizer", state.optimizer), ("random", state.random)):
            if tensors:
                (work / part).mkdir()
        return work


def _write(tensors: Mapping[str, Tensor], folder: Path, group: Group) -> None:
    """Write this rank's shards of `tensors`; one rank writes a tensor that several ranks hold."""
    if not tensors:
        return
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    if group is None:
        save_file(contiguous, folder / f"{folder.name}.safetensors")
        return
    _, world_size = seat_in(group)
    sizes = _of_all_ranks(group, {name: t.numel() * t.element_size() for name, t in contiguous.items()})
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_file_numbers(sizes, world_size), save_distributed=True
    )
    state_dict_saver.save(dict(contiguous), storage_writer=writer, process_group=group)


def _of_all_ranks(group: Group, entries: Mapping[str, T]) -> dict[str, T]:
    """Merge the mappings of all ranks: a rank may hold only some of the tensors, as a pipeline stage does."""
    merged: dict[str, T] = {}
    for entries_of_rank in on_every_rank(group, lambda: dict(entries)):
        merged.update(entries_of_rank)
    return merged


def _file_numbers(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Assign each tensor to a file, numbered from 1. A file is assembled in memory, so its size is limited."""
    numbers, number, filled = {}, 1, 0.0
    for name, size in sizes.items():
        share = size / world_size
        if filled and filled + share > _FILE_BYTES:
            number, filled = number + 1, 0.0
        numbers[name], filled = number, filled + share
    return numbers


def _finish_rank(state: State, work: Path, group: Group) -> dict[str, Any]:
    """Write this rank's random state, read all files of this rank again, and return their fingerprints."""
    rank, _ = seat_in(group)
    # torch.distributed.checkpoint numbers ranks from 1 in file names.
    pattern = "*.safetensors" if group is None else f"shard-{rank + 1:05d}-*.safetensors"
    with _checkpoint_errors(rank, f"{work} could not be written"):
        paths = [path for part in ("model", "optimizer") for path in (work / part).glob(pattern)]
        if state.random:
            paths.append(work / "random" / f"rank_{rank}.safetensors")
            save_file({name: tensor.contiguous() for name, tensor in state.random.items()}, paths[-1])
        return storage.fingerprints(work, paths)


def _finish(target: Path, work: Path, files: dict[str, Any], facts: Mapping[str, Any], global_step: int) -> None:
    with _checkpoint_errors(0, f"{target} could not be written"):
        visible = {str(path.relative_to(work)) for path in work.rglob("*") if path.is_file()}
        if missing := sorted(files.keys() - visible):
            raise CheckpointError(
                f"{target}: rank 0 does not see '{missing[0]}', which another rank has written; "
                "use a folder on a file system that all nodes share"
            )
        assert visible == files.keys(), f"no checksum of {sorted(visible - files.keys())}"
        (work / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        files |= storage.fingerprints(work, [work / FACTS])
        storage.finish(target, files, {"kind": "engine", "global_step": global_step})


class BackgroundSave:
    """Runs `save` in a thread, from copies in host memory; training continues once `start` has made the copies.

    `group` must not be used elsewhere: collectives of training would mix with those of the thread. Call `wait` before
    the process ends, before a load, and to raise the error of a save; `start` waits for the previous save.
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
        """Copy `state` and write the copy in the background; arguments as for `save`."""
        self.wait()
        copies: list[State] = []
        rank, _ = seat_in(self._group)
        with _checkpoint_errors(rank, f"no memory for the copy of {local_path}"):
            on_every_rank(self._group, lambda: copies.append(state.staged()))
        # A new thread uses device 0, where torch would create a context.
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
        """Wait for the save in progress; raise its error."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


# -- reading --------------------------------------------------------------------------------------


@contextlib.contextmanager
def fetched(local_path: str, hdfs_path: str | None, remove_after: bool, group: Group = None) -> Iterator[Path]:
    """Yield the folder to load: `local_path`, to which `hdfs_path` is copied first if given.

    `remove_after` removes such a copy on exit.
    """
    if hdfs_path is not None:
        on_rank_zero(group, lambda: storage.copy_folder(hdfs_path, local_path))
    yield Path(local_path).expanduser()
    if hdfs_path is not None and remove_after:
        on_every_rank(group, lambda: None)  # another rank may still be reading
        on_rank_zero(group, lambda: storage.remove(local_path))


def load_into(
    local_path: str | Path,
    model: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    parameters: Mapping[str, Tensor] | None = None,
    *,
    group: Group = None,
) -> Loaded:
    """Load weights into `model` in place, and the optimizer's state; collective over `group`.

    Checksums of all files, names and shapes are verified before anything is changed. Without an optimizer only the
    weights are loaded.
    """
    folder = Path(local_path).expanduser()
    rank, world_size = seat_in(group)
    with _checkpoint_errors(rank, f"{folder} could not be read"):
        on_every_rank(group, lambda: storage.verify(folder, (rank, world_size)))
        facts, stored, stored_state = on_rank_zero(group, lambda: _contents(folder))
        expected = _of_all_ranks(group, {name: tuple(tensor.shape) for name, tensor in model.items()})
        _compare(folder, stored, expected)
        targets: dict[str, Tensor] = {}
        if optimizer is not None:
            assert parameters is not None, "optimizer state is stored by parameter names"
            if _has_state_of(optimizer, facts, folder):
                local_state = _local_state(stored_state, parameters, group)
                make = functools.partial(optimizer_targets, optimizer, parameters, local_state, folder)
                on_every_rank(group, lambda: targets.update(make()))
        _load_tensors(folder / "model", model, group)
        _load_tensors(folder / "optimizer", targets, group)
        if optimizer is not None and parameters is not None:
            restore_optimizer(optimizer, parameters, targets, facts["optimizer_values"])
        return Loaded(facts["engine"], _random_state(folder, facts["world_size"], rank, world_size))


def _contents(folder: Path) -> tuple[dict[str, Any], dict[str, TensorInfo], dict[str, TensorInfo]]:
    """Return (facts, tensors of the model, tensors of the optimizer) of a checkpoint."""
    return facts_of(folder), _tensors(folder / "model"), _tensors(folder / "optimizer")


def facts_of(folder: Path) -> dict[str, Any]:
    """Read the `state.json` of a checkpoint (`State.as_json`)."""
    path = folder / FACTS
    if not path.is_file():
        raise CheckpointError(f"{folder} was not written by an engine: it has no {FACTS}")
    return json.loads(path.read_text(encoding="utf-8"))


def _tensors(folder: Path) -> dict[str, TensorInfo]:
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata if folder.is_dir() else {}
    return {name: (tuple(info.size), info.properties.dtype) for name, info in metadata.items()}  # pyright: ignore


def _compare(folder: Path, stored: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise an error that reports the differences between the checkpoint's model and this one."""
    problems = [f"'{name}' is missing" for name in expected if name not in stored]
    problems += [f"'{name}' is not in the model" for name in stored if name not in expected]
    problems += [
        f"'{name}' is {stored[name][0]}, the model has {shape}"
        for name, shape in expected.items()
        if name in stored and stored[name][0] != shape
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"{folder} belongs to another model: {'; '.join(problems[:5])}{more}; load it with the model that wrote it"
        )


def _local_state(
    stored: Mapping[str, TensorInfo], parameters: Mapping[str, Tensor], group: Group
) -> dict[str, TensorInfo]:
    """Return the stored optimizer tensors without those of parameters that only other ranks hold."""
    elsewhere = _of_all_ranks(group, dict.fromkeys(parameters)).keys() - parameters.keys()
    return {full: info for full, info in stored.items() if _split(full)[0] not in elsewhere}


def _has_state_of(optimizer: torch.optim.Optimizer, facts: Mapping[str, Any], folder: Path) -> bool:
    """Return True if the checkpoint has state of this optimizer's class; raise an error if of another class."""
    kind = type(optimizer).__name__
    if facts["optimizer"] is None:
        logger.warning("%s holds no optimizer state; %s starts with empty state", folder, kind)
        return False
    if facts["optimizer"] != kind:
        raise CheckpointError(
            f"{folder} was written with the optimizer {facts['optimizer']}, this engine has {kind}. "
            f"Set optim.optimizer={facts['optimizer']}, or start a new run from its weights only"
        )
    return True


def _load_tensors(folder: Path, targets: Mapping[str, Tensor], group: Group) -> None:
    """Load `targets` from the files of `folder`, written in any layout."""
    if not targets:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # expected for group=None
        reader = HuggingFaceStorageReader(str(folder))
        state_dict_loader.load(dict(targets), storage_reader=reader, process_group=group, no_dist=group is None)


def _random_state(folder: Path, written_by: int, rank: int, world_size: int) -> dict[str, Tensor]:
    if written_by == world_size:
        path = folder / "random" / f"rank_{rank}.safetensors"
        return load_file(path) if path.is_file() else {}
    if rank == 0:
        logger.info(
            "%s was written by %d ranks and is loaded by %d; dropout starts with new random states",
            folder,
            written_by,
            world_size,
        )
    return {}


@contextlib.contextmanager
def _checkpoint_errors(rank: int, problem: str) -> Iterator[None]:
    """Turn an error into a `CheckpointError` with `problem`, the rank and the cause."""
    try:
        yield
    except CheckpointError:
        raise
    except CheckpointException as error:
        failed, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        raise CheckpointError(f"{problem}: rank {failed}: {type(cause).__name__}: {cause}") from cause
    except Exception as error:
        raise CheckpointError(f"{problem}: rank {rank}: {type(error).__name__}: {error}") from error


# -- the state of an optimizer, by parameter names ------------------------------------------------


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, other values) by `<parameter>/<key>`; the tensors are not copied."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    named = {name: optimizer.state[p] for name, p in parameters.items() if p in optimizer.state}
    if unnamed := len(optimizer.state) - len(named):
        raise CheckpointError(
            f"{type(optimizer).__name__} has state of {unnamed} parameters without a name in the model"
        )
    for name, state in named.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = value
            elif value is None or isinstance(value, bool | int | float | str):
                values[f"{name}/{key}"] = value
            else:
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as '{key}' of {name}; a checkpoint "
                    "stores tensors, numbers and strings. Choose an optimizer with such a state"
                )
    return tensors, values


def optimizer_targets(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], stored: Mapping[str, TensorInfo], folder: Path
) -> dict[str, Tensor]:
    """Allocate a tensor for each optimizer tensor of the checkpoint `folder`.

    State of the parameter's shape has the parameter's layout (DTensors too); other state is not sharded.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    targets = {}
    for full, (shape, dtype) in stored.items():
        name, key = _split(full)
        parameter = parameters.get(name)
        if parameter is None or id(parameter) not in groups:
            raise CheckpointError(f"{folder} holds optimizer state of '{name}', which this engine does not train")
        if shape == tuple(parameter.shape) and shape:
            targets[full] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        else:
            group = groups[id(parameter)]
            # As in torch: the step counter is on the CPU unless a kernel reads it on the device.
            on_cpu = key == "step" and not (group.get("capturable") or group.get("fused"))
            targets[full] = torch.empty(shape, dtype=dtype, device="cpu" if on_cpu else parameter.device)
    return targets


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
) -> None:
    """Replace the state of `optimizer` by `tensors`, and by those of `values` whose parameter is in `parameters`."""
    optimizer.state.clear()
    for full, value in {**tensors, **values}.items():
        name, key = _split(full)
        if name in parameters:
            optimizer.state[parameters[name]][key] = value


def _split(full: str) -> tuple[str, str]:
    """Return (parameter, key) of `<parameter>/<key>`."""
    name, _, key = full.rpartition("/")
    return name, key
