"""Engine checkpoints: one folder, written by one or several processes, and loaded at any world size.

    state = State.collect(weights, optimizer, parameters, metadata={"update": 20}, random=random_states(device))
    save(state, "ckpt/global_step_20/actor", group=group, global_step=20)
    loaded = load_into("ckpt/global_step_20/actor", weights, optimizer, parameters, group=group)

    model/*.safetensors       weights by Hugging Face names
    optimizer/*.safetensors   optimizer tensors keyed by `<parameter>/<key>`, for example model.norm.weight/exp_avg
    random/rank_0.safetensors random state of each rank (for dropout); loaded only at the same world size
    state.json                world size, optimizer class, metadata of the engine
    manifest.json             size and checksum of every file (camshaft/storage)

Tensors may be DTensors over any mesh. Ranks may hold different tensors, as the stages of a pipeline do. Each rank
writes its shards into a folder that all ranks share. On load, torch.distributed.checkpoint assembles the shards for the
layout of the loading engine. A single process without torch.distributed (`group=None`) writes unsharded files under the
same names, and loads both sharded and unsharded files.

`group` is a process group with a CPU backend (gloo). Its timeout must exceed the duration of a copy to `hdfs_path`. An
error on one rank is raised on all ranks, and the folder is then not renamed to its final name.

Optimizer tensors are stored bitwise, under the Hugging Face names of their parameters. Optimizer state that consists
of Python numbers or strings goes to `state.json`. A tensor that the states of several parameters share is stored for
each of them, and is shared again after a load. Config settings (lr, betas, weight decay) are not stored.
"""

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
from torch.distributed.tensor import DTensor

from camshaft import storage
from camshaft.engine.collectives import Group, on_every_rank, on_rank_zero, rank_and_size
from camshaft.errors import CheckpointError
from camshaft.subprocesses import NO_LIMIT, POLL_SECONDS, Wait, call_limit, limit_waits

STATE_FILE = "state.json"
_FILE_BYTES = 2 << 30

T = TypeVar("T")
TensorInfo = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor in a checkpoint."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class State:
    """State that a checkpoint stores. The tensors are the engine's live tensors until `copy_to_cpu` copies them."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    random: Mapping[str, Tensor]
    metadata: Mapping[str, Any]
    """Schedule position and model description of the engine. JSON, as are the `optimizer_values`."""
    optimizer_class: str | None = None
    optimizer_values: Mapping[str, Any] = field(default_factory=dict)
    optimizer_shared: Mapping[str, str] = field(default_factory=dict)
    """Entries of `optimizer` that are one tensor: each with the first of them."""

    @classmethod
    def collect(
        cls,
        model: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer | None,
        parameters: Mapping[str, Tensor],
        metadata: Mapping[str, Any],
        random: Mapping[str, Tensor],
    ) -> "State":
        """Collect the state of an engine; `parameters` maps the names of `model` to the optimizer's parameters."""
        tensors, values = ({}, {}) if optimizer is None else optimizer_state(optimizer, parameters)
        name = None if optimizer is None else type(optimizer).__name__
        return cls(model, tensors, random, metadata, name, values, _find_shared(tensors))

    def copy_to_cpu(self) -> "State":
        """Return a copy with all tensors in host memory. Further training does not change it."""

        def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

        model, optimizer, random = map(copy_tensors, (self.model, self.optimizer, self.random))
        return replace(self, model=model, optimizer=optimizer, random=random, metadata=copy.deepcopy(self.metadata))

    def as_json(self, world_size: int) -> dict[str, Any]:
        """Return the content of `state.json`: everything except the tensors."""
        return {
            "world_size": world_size,
            "optimizer": self.optimizer_class,
            "optimizer_values": dict(self.optimizer_values),
            **({"optimizer_shared": dict(self.optimizer_shared)} if self.optimizer_shared else {}),
            "engine": dict(self.metadata),
        }


@dataclass(frozen=True)
class LoadedState:
    """State of a checkpoint that `load_into` does not restore; the engine restores it."""

    metadata: dict[str, Any]
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
    """Write `state` atomically to the folder `local_path`. This is a collective over `group`.

    `hdfs_path` and `max_ckpt_to_keep` are those of `BaseEngine.save_checkpoint`.
    """
    target = Path(local_path).expanduser().absolute()
    rank, world_size = rank_and_size(group)
    with _checkpoint_errors(rank, f"{target} could not be written"):
        work = on_rank_zero(group, lambda: _begin(target, state))
        _write(state.model, work / "model", group)
        _write(state.optimizer, work / "optimizer", group)
        fingerprints = on_every_rank(group, lambda: _finish_rank(state, work, group))
        files = {name: entry for entries in fingerprints for name, entry in entries.items()}
        values, shared = (_merge_over_ranks(group, v) for v in (state.optimizer_values, state.optimizer_shared))
        state = replace(state, optimizer_values=values, optimizer_shared=shared)
        on_rank_zero(group, lambda: _finish(target, work, files, state.as_json(world_size), global_step))
    if hdfs_path is not None or max_ckpt_to_keep is not None:
        on_rank_zero(group, lambda: _copy_and_prune(target, hdfs_path, max_ckpt_to_keep))


def _copy_and_prune(target: Path, hdfs_path: str | None, max_ckpt_to_keep: int | None) -> None:
    """Copy a complete checkpoint, then delete the older ones that exceed the limit."""
    if hdfs_path is not None:
        with _checkpoint_errors(0, f"{target} is complete, but could not be copied to {hdfs_path}"):
            storage.copy_folder(str(target), hdfs_path)
    if max_ckpt_to_keep is not None:
        with _checkpoint_errors(0, f"{target} is complete, but older checkpoints could not be deleted"):
            storage.prune(target, max_ckpt_to_keep)


def _begin(target: Path, state: State) -> Path:
    """Create the temporary folder of the checkpoint `target`, with its subfolders."""
    with _checkpoint_errors(0, f"{target} could not be written"):
        work = storage.begin(target)
        for part, tensors in (("model", state.model), ("optimizer", state.optimizer), ("random", state.random)):
            if tensors:
                (work / part).mkdir()
        return work


def _write(tensors: Mapping[str, Tensor], folder: Path, group: Group) -> None:
    """Write this rank's shards of `tensors`. Only one rank writes a tensor that several ranks hold."""
    if not tensors:
        return
    separate = _separate(tensors)
    if group is None:
        save_file(separate, folder / f"{folder.name}.safetensors")
        return
    _, world_size = rank_and_size(group)
    sizes = _merge_over_ranks(group, {name: t.numel() * t.element_size() for name, t in separate.items()})
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_assign_files(sizes, world_size), save_distributed=True
    )
    state_dict_saver.save(dict(separate), storage_writer=writer, process_group=group)


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors that do not overlap in memory, which safetensors requires. Only overlaps are copied."""
    separate = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in separate.items()}
    end = 0
    for name, tensor in sorted(local.items(), key=lambda item: item[1].data_ptr()):
        if tensor.nbytes and tensor.data_ptr() < end:
            separate[name] = separate[name].clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return separate


def _merge_over_ranks(group: Group, entries: Mapping[str, T]) -> dict[str, T]:
    """Merge the mappings of all ranks; a rank may hold only some of the tensors, as a pipeline stage does."""
    merged: dict[str, T] = {}
    for entries_of_rank in on_every_rank(group, lambda: dict(entries)):
        merged.update(entries_of_rank)
    return merged


def _assign_files(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Return the file number of each tensor, counted from 1.

    torch.distributed.checkpoint assembles a file in memory, so the size of a rank's file is limited to `_FILE_BYTES`.
    """
    numbers, number, file_size = {}, 1, 0.0
    for name, size in sizes.items():
        share = size / world_size
        if file_size and file_size + share > _FILE_BYTES:
            number, file_size = number + 1, 0.0
        numbers[name], file_size = number, file_size + share
    return numbers


def _finish_rank(state: State, work: Path, group: Group) -> dict[str, Any]:
    """Write this rank's random state; return the fingerprints of all files of this rank, read back from disk."""
    rank, _ = rank_and_size(group)
    # torch.distributed.checkpoint numbers ranks from 1 in file names.
    pattern = "*.safetensors" if group is None else f"shard-{rank + 1:05d}-*.safetensors"
    with _checkpoint_errors(rank, f"{work} could not be written"):
        paths = [path for part in ("model", "optimizer") for path in (work / part).glob(pattern)]
        if state.random:
            paths.append(work / "random" / f"rank_{rank}.safetensors")
            save_file({name: tensor.contiguous() for name, tensor in state.random.items()}, paths[-1])
        return storage.fingerprints(work, paths)


def _finish(target: Path, work: Path, files: dict[str, Any], state: Mapping[str, Any], global_step: int) -> None:
    """Write `state.json` and the manifest, and rename the folder to `target`."""
    with _checkpoint_errors(0, f"{target} could not be written"):
        visible = {str(path.relative_to(work)) for path in storage.files_in(work)}
        if missing_files := sorted(files.keys() - visible):
            raise CheckpointError(
                f"rank 0 cannot see '{missing_files[0]}' of {target}, which another rank has written; use a folder on "
                "a file system that all nodes share"
            )
        assert visible == files.keys(), f"no checksum of {sorted(visible - files.keys())}"
        engine = dict(state["engine"])
        # The series differs between runs that are otherwise equal, so only the manifest contains it.
        facts = {"series": engine.pop("series")} if "series" in engine else {}
        (work / STATE_FILE).write_text(json.dumps({**state, "engine": engine}), encoding="utf-8")
        files |= storage.fingerprints(work, [work / STATE_FILE])
        storage.finish(target, files, {"kind": "engine", "global_step": global_step, **facts})


class BackgroundSave:
    """Runs `save` in a background thread.

    `start` copies the state to host memory and returns, so that training continues while the thread writes the copy. It
    waits for the previous save first. `wait` waits for the save in progress and raises its error; call it before a load
    and before the process exits. Nothing else may use `group`, because collectives of two threads would interleave.
    """

    def __init__(self, group: Group = None):
        self._group = group
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, state: State, local_path: str | Path, **options: Any) -> None:
        """Copy `state` and write the copy in the background. The options are those of `save`."""
        self.wait()
        copies: list[State] = []
        rank, _ = rank_and_size(self._group)
        with _checkpoint_errors(rank, f"could not copy the state for {local_path} to host memory"):
            on_every_rank(self._group, lambda: copies.append(state.copy_to_cpu()))
        # A new thread starts on device 0, and torch would create a context there.
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
        limit, _ = call_limit()

        def run() -> None:
            try:
                if device is not None:
                    torch.accelerator.set_device_index(device)
                with limit_waits(limit):
                    save(copies.pop(), local_path, group=self._group, **options)
            except BaseException as error:
                logger.error("could not write the checkpoint %s: %s", local_path, error)
                self._error = error

        self._thread = threading.Thread(target=run, name=f"save {local_path}")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save in progress and raise its error, if any."""
        if self._thread is None:
            return
        wait = Wait("wait_for_checkpoint", CheckpointError, NO_LIMIT)
        while self._thread.is_alive():
            self._thread.join(POLL_SECONDS)
            wait.check(lambda: f"the thread that writes the checkpoint ({self._thread and self._thread.name})")
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


# -- reading --------------------------------------------------------------------------------------


@contextlib.contextmanager
def fetch_folder(local_path: str, hdfs_path: str | None, remove_after: bool, group: Group = None) -> Iterator[Path]:
    """Yield the folder `local_path`. If `hdfs_path` is given, it is first copied to `local_path`.

    `remove_after` removes this copy on exit.
    """
    if hdfs_path is not None:
        on_rank_zero(group, lambda: storage.copy_folder(hdfs_path, local_path))
    yield Path(local_path).expanduser()
    if hdfs_path is not None and remove_after:
        on_every_rank(group, lambda: None)  # a barrier, because another rank may still be reading
        on_rank_zero(group, lambda: storage.remove(local_path))


def load_into(
    local_path: str | Path,
    model: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    parameters: Mapping[str, Tensor] | None = None,
    *,
    group: Group = None,
) -> LoadedState:
    """Load a checkpoint into the tensors of `model` and the state of `optimizer`. This is a collective over `group`.

    The checksums of all files and the names and shapes of the weights are verified before any tensor changes. Without
    an optimizer, only the weights are loaded.
    """
    folder = Path(local_path).expanduser()
    rank, world_size = rank_and_size(group)
    with _checkpoint_errors(rank, f"{folder} could not be read"):
        on_every_rank(group, lambda: storage.verify(folder, (rank, world_size)))
        saved_state, weight_infos, optimizer_infos = on_rank_zero(group, lambda: _read_contents(folder))
        expected = _merge_over_ranks(group, {name: tuple(tensor.shape) for name, tensor in model.items()})
        _check_weights(folder, weight_infos, expected)
        targets: dict[str, Tensor] = {}
        if optimizer is not None:
            assert parameters is not None, "optimizer state is stored by parameter names"
            if _has_optimizer_state(optimizer, saved_state, folder):
                local_infos = _select_local(optimizer_infos, parameters, group)
                make = functools.partial(optimizer_targets, optimizer, parameters, local_infos, folder)
                on_every_rank(group, lambda: targets.update(make()))
        _load_tensors(folder / "model", model, group)
        _load_tensors(folder / "optimizer", targets, group)
        if optimizer is not None and parameters is not None:
            values, shared = saved_state["optimizer_values"], saved_state.get("optimizer_shared", {})
            restore_optimizer(optimizer, parameters, targets, values, shared)
        random = _load_random_state(folder, saved_state["world_size"], rank, world_size)
        facts = storage.read_manifest(folder)["facts"]
        series = {"series": facts["series"]} if "series" in facts else {}
        return LoadedState({**saved_state["engine"], **series}, random)


def _read_contents(folder: Path) -> tuple[dict[str, Any], dict[str, TensorInfo], dict[str, TensorInfo]]:
    """Return (content of `state.json`, tensors of the model, tensors of the optimizer) of a checkpoint."""
    return read_state_file(folder), _read_tensor_infos(folder / "model"), _read_tensor_infos(folder / "optimizer")


def read_state_file(folder: Path) -> dict[str, Any]:
    """Read the `state.json` of a checkpoint (`State.as_json`)."""
    path = folder / STATE_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {STATE_FILE}, so it is not a checkpoint of an engine; give the folder of one role, such "
            "as global_step_20/actor"
        )
    return storage.read_state(path)


def _read_tensor_infos(folder: Path) -> dict[str, TensorInfo]:
    """Read shape and dtype of each tensor in the safetensors files of `folder`."""
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata if folder.is_dir() else {}
    return {name: (tuple(info.size), info.properties.dtype) for name, info in metadata.items()}  # pyright: ignore


def _check_weights(folder: Path, stored: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `CheckpointError` if names or shapes in the checkpoint differ from those of the model."""
    problems = [f"'{name}' is missing" for name in expected if name not in stored]
    problems += [f"'{name}' is not in the model" for name in stored if name not in expected]
    problems += [
        f"'{name}' has shape {stored[name][0]} but the model has {shape}"
        for name, shape in expected.items()
        if name in stored and stored[name][0] != shape
    ]
    if problems:
        suffix = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"{folder} is a checkpoint of another model: {'; '.join(problems[:5])}{suffix}; load it with the model "
            "that wrote it"
        )


def _select_local(
    stored: Mapping[str, TensorInfo], parameters: Mapping[str, Tensor], group: Group
) -> dict[str, TensorInfo]:
    """Drop the stored optimizer tensors whose parameters are held by other ranks only."""
    remote_parameters = _merge_over_ranks(group, dict.fromkeys(parameters)).keys() - parameters.keys()
    return {entry: info for entry, info in stored.items() if entry.rpartition("/")[0] not in remote_parameters}


def _has_optimizer_state(optimizer: torch.optim.Optimizer, saved_state: Mapping[str, Any], folder: Path) -> bool:
    """Return True if the checkpoint holds optimizer state; raise `CheckpointError` if its class is another one."""
    name, saved_name = type(optimizer).__name__, saved_state["optimizer"]
    if saved_name is None:
        logger.warning("%s holds no optimizer state; %s starts with empty state", folder, name)
        return False
    if saved_name != name:
        raise CheckpointError(
            f"{folder} was written with the optimizer {saved_name}, but this engine uses {name}. "
            f"Set optim.optimizer={saved_name}, or start a new run from the weights of the checkpoint"
        )
    return True


def _load_tensors(folder: Path, targets: Mapping[str, Tensor], group: Group) -> None:
    """Load `targets` from the files of `folder`, which may have been written in another layout."""
    if not targets:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # expected for group=None
        reader = HuggingFaceStorageReader(str(folder))
        state_dict_loader.load(dict(targets), storage_reader=reader, process_group=group, no_dist=group is None)


def _load_random_state(folder: Path, saved_world_size: int, rank: int, world_size: int) -> dict[str, Tensor]:
    """Load the random state of this rank; return an empty dict if the world size has changed."""
    if saved_world_size == world_size:
        path = folder / "random" / f"rank_{rank}.safetensors"
        return load_file(path) if path.is_file() else {}
    if rank == 0:
        logger.info(
            "%s was written by %d ranks and is loaded by %d; dropout starts with new random states",
            folder,
            saved_world_size,
            world_size,
        )
    return {}


@contextlib.contextmanager
def _checkpoint_errors(rank: int, problem: str) -> Iterator[None]:
    """Convert any error to a `CheckpointError` that states `problem`, the rank and the cause."""
    try:
        yield
    except CheckpointError:
        raise
    except CheckpointException as error:
        failed, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        raise CheckpointError(f"{problem}: rank {failed}: {type(cause).__name__}: {cause}") from cause
    except Exception as error:
        raise CheckpointError(f"{problem}: rank {rank}: {type(error).__name__}: {error}") from error


# -- optimizer state by parameter names -----------------------------------------------------------


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of `optimizer` as (tensors, other values), keyed by `<parameter>/<key>`.

    Tensors are not copied.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    named = {name: optimizer.state[p] for name, p in parameters.items() if p in optimizer.state}
    if unnamed := len(optimizer.state) - len(named):
        raise CheckpointError(
            f"{type(optimizer).__name__} holds state of {unnamed} parameters that have no name in the model; train "
            "only parameters of the model"
        )
    for name, state in named.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = value
            elif value is None or isinstance(value, bool | int | float | str):
                values[f"{name}/{key}"] = value
            else:
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as '{key}' of {name}, which a "
                    "checkpoint cannot store; choose an optimizer whose state consists of tensors, numbers and strings"
                )
    return tensors, values


def _find_shared(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the entries that are one tensor, each with the name of the first."""
    entries: dict[int, list[str]] = {}
    for entry, tensor in tensors.items():
        entries.setdefault(id(tensor), []).append(entry)
    return {entry: group[0] for group in entries.values() if len(group) > 1 for entry in group}


def optimizer_targets(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], stored: Mapping[str, TensorInfo], folder: Path
) -> dict[str, Tensor]:
    """Allocate a tensor for each optimizer tensor that the checkpoint `folder` stores.

    State of the same shape as its parameter is sharded like the parameter; other state is not sharded.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    targets = {}
    for entry, (shape, dtype) in stored.items():
        name, _, key = entry.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None or id(parameter) not in groups:
            raise CheckpointError(
                f"{folder} holds optimizer state of '{name}', which this engine does not train; load the checkpoint "
                "into an engine that trains the same parameters"
            )
        if shape == tuple(parameter.shape) and shape:
            targets[entry] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        else:
            group = groups[id(parameter)]
            # As in torch.optim, the step counter is on the CPU unless a kernel reads it on the device.
            on_cpu = key == "step" and not (group.get("capturable") or group.get("fused"))
            targets[entry] = torch.empty(shape, dtype=dtype, device="cpu" if on_cpu else parameter.device)
    return targets


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    shared: Mapping[str, str],
) -> None:
    """Replace the state of `optimizer` with those `tensors` and `values` that belong to `parameters`.

    Entries with the same value in `shared` get one tensor.
    """
    optimizer.state.clear()
    first: dict[str, Any] = {}
    for entry, value in {**tensors, **values}.items():
        name, _, key = entry.rpartition("/")
        if name in parameters:
            optimizer.state[parameters[name]][key] = first.setdefault(shared.get(entry, entry), value)
