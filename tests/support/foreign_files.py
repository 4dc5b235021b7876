"""A folder full of files that camshaft has not written, at the paths that camshaft uses, and processes that work there.

with sandbox() as world:
    for _ in range(3):
        world.fill(draw)                                # foreign files; each begins with a line of its own
        world.live(draw)                                # one process, which may be killed
        world.check()                                   # each line is still at the start of some file
"""

import contextlib
import functools
import json
import logging
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import pyarrow
import torch

from camshaft import storage, temporary
from camshaft.checkpoint.manager import CheckpointManager
from camshaft.config.schema.trainer import SamplesConfig
from camshaft.data import tokens
from camshaft.data.responses import ResponseFile
from camshaft.data.tables import write_parquet
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import CamshaftError
from camshaft.fetch import fetch
from camshaft.rewards import output
from camshaft.runs.inputs import save_rows
from camshaft.tracking import samples
from camshaft.tracking.base import RunInfo
from camshaft.tracking.jsonl import JsonlTracker
from camshaft.tracking.record import RunRecord, check_folder, replace_text
from camshaft.trainer.validate import Sample, save_samples
from support.recorded_disk import Disk, Killed, recording

PRIVATE = f".camshaft-tmp-{os.geteuid()}"
URL = "memory://foreign-files/data"
PARTS = ("actor", "trainer", "actor_huggingface")
CACHED = "0" * 64 + ".safetensors"

FILES = (
    *("tmp/camshaft-notes.txt", "tmp/camshaft-stacks-123.txt", "tmp/.new-camshaft-x/.lock", "tmp/camshaft-mine/.lock"),
    *("tmp/camshaft-mine/run.json", "tmp/camshaft-mine/global_step_2/actor/a.bin", "shm/camshaft-data/.lock"),
    *(f"{parent}/{PRIVATE}/{name}" for parent in ("tmp", "shm") for name in (
        "notes.txt", "0a1b2c3d.lock", "11111111.lock", "11111111/run.json", "22222222/.lock", "22222222/pool-x/notes",
        "33333333/global_step_1/actor/a.bin", "44444444/rank_0.txt",
    )),
    *(f"run/{name}" for name in (
        ".lock", "run.json", "status.json", "metrics.jsonl", "metrics.jsonl.damaged", "metrics.tmp", "metrics.1.jsonl",
        "log.txt", ".run.json.unfinished", "metrics.jsonl.unfinished", "latest_checkpointed_iteration.txt",
        "best_checkpointed_iteration.txt", "latest_checkpointed_iteration.txt.unfinished", "aside.1/notes.txt",
        "samples/notes.txt", "samples/step_2.parquet", "samples/step_9.parquet", "samples/.step_3.parquet.unfinished",
        "samples/step_3.parquet.unfinished", "samples/step_4.parquet.unfinished/notes.txt", "samples.1/step_1.parquet",
        "validation/step_1.jsonl", "validation/step_2.jsonl.unfinished/notes.txt", "rewards/output.log",
        "rewards/output.1.log", "inputs/notes.txt", "wandb_run_id.txt",
    )),
    *(f"run/global_step_{step}/notes.txt" for step in (1, 2, 3, 7)),
    *(f"run/global_step_{step}/{part}{suffix}/{name}"
      for step in (1, 2, 3, 7) for part in PARTS for suffix in ("", ".unfinished", ".replaced")
      for name in ("notes.txt", "manifest.json", "a.bin")),
    *("models/out.unfinished/notes.txt", "models/out.replaced/notes.txt", "models/out.replaced"),
    *("models/rows.parquet.unfinished", "models/rows.parquet", "models/out.parquet.parts/notes.txt"),
    *("models/out.parquet.parts/from_000000000/a.bin", "models/out.parquet.unfinished", "models/mirror/actor/a.bin"),
    *(f"cache/files/memory/foreign-files/{name}" for name in (
        "data.lock", "data.origin.json", "data", "data/a.txt", "data/b/c.txt", "data/notes.txt", "data.unfinished",
    )),
    *(f"cache/prompts/{CACHED}{suffix}" for suffix in ("", f".{os.getpid()}", ".unfinished")),
)  # fmt: skip
"""Paths of foreign files. Of two files that exclude each other, the first one exists."""


@dataclass
class World:
    """The sandbox and what has happened in it."""

    root: Path
    disk: Disk
    marks: set[bytes] = field(default_factory=set)
    saved_step: int = 0
    """Last step whose save has returned."""

    def fill(self, draw: random.Random) -> None:
        """Create foreign files, links to foreign files, and temporary files of processes that were killed."""
        share = draw.choice([0.02, 0.1, 0.3])
        for name in ("tmp", "shm", "run", "models", "cache", "elsewhere"):
            (self.root / name).mkdir(exist_ok=True)
        for name in FILES:
            if draw.random() < share:
                with contextlib.suppress(FileExistsError, NotADirectoryError):
                    self._create(self.root / name, draw)
        for parent in ("tmp", "shm"):
            folder = self.root / parent / PRIVATE
            if not os.path.lexists(folder) and draw.random() < 0.1:
                (self.root / "elsewhere" / parent).mkdir(exist_ok=True)
                folder.symlink_to(self.root / "elsewhere" / parent)
                self._create(folder / "66666666.lock", draw, temporary.MARKER)
            elif folder.is_dir():
                folder.chmod(0o700)
                self._abandon(folder, draw)
        self.disk.start()

    def _create(self, path: Path, draw: random.Random, start: bytes = b"") -> None:
        parents = [folder / storage.MANIFEST for folder in path.parents if storage.is_unfinished(folder)]
        if os.path.lexists(path) or any(storage._content(file) == storage._UNFINISHED_MANIFEST for file in parents):
            return  # a temporary folder is deleted with all its files
        path.parent.mkdir(parents=True, exist_ok=True)
        mark = f"foreign {len(self.marks)}\n".encode()
        if not start and draw.random() < 0.15:
            target = self.root / "elsewhere" / str(len(self.marks))
            target.write_bytes(mark)
            path.symlink_to(target)
        else:
            path.write_bytes(start + mark + draw.choice([b"", b"{}", b"text\n"]))
        self.marks.add(mark)

    def _abandon(self, private: Path, draw: random.Random) -> None:
        """Create entries whose process was killed, and add foreign files to some of them."""
        for _ in range(draw.randint(0, 3)):
            name = f"{draw.getrandbits(32):08x}"
            (private / f"{name}.lock").write_bytes(draw.choice([b"", temporary.MARKER, temporary.MARKER + b"stacks"]))
            if draw.random() < 0.7:
                (private / name / "pool-x").mkdir(parents=True)
                (private / name / "pool-x" / "rank_0.txt").write_text("stacks")
                if draw.random() < 0.5:
                    self._create(private / name / draw.choice(["run.json", "pool-x/rank_1.log", ".lock"]), draw)

    def live(self, draw: random.Random) -> None:
        """Run one process to its end, to a kill or to a power failure."""
        self.disk.count, self.disk.kill_at = 0, draw.choice([None, draw.randint(1, 150), draw.randint(1, 600)])
        end = "end"
        try:
            self._work(draw)
        except Killed:
            end = draw.choice(["kill", "power failure"])
        self.disk.kill_at = None
        for lock in temporary._locks:
            lock.close()
        temporary._locks.clear()
        output._started.clear()
        if end == "power failure":
            self.disk.lose_power(draw)
            self.disk.start()

    def _work(self, draw: random.Random) -> None:
        operations = [lambda _: self._train(draw), *draw.sample([*OPERATIONS, *OPERATIONS], draw.randint(2, 8))]
        draw.shuffle(operations)
        for operation in operations:
            with contextlib.suppress(CamshaftError):  # a sentence instead of a loss
                operation(self.root)

    def _train(self, draw: random.Random) -> None:
        """Start a run, which resumes from the newest checkpoint, and save some steps."""
        run = self.root / "run"
        temporary.remove_leftovers()
        lock = storage.lock_folder(run)
        assert lock is not None
        with lock:
            check_folder(run)
            mirror = draw.choice([None, str(self.root / "models" / "mirror")])
            manager = CheckpointManager(run, mirror)
            saved = manager.latest()
            step = 0 if saved is None else saved.step
            if saved is not None:
                assert (saved.folder / "actor" / "a.bin").read_bytes() == _content(step)
            assert step >= self.saved_step, f"resumed at step {step}, but step {self.saved_step} was saved"
            if draw.random() < 0.2:
                manager.move_aside(step)
            info = RunInfo("p", "e", run, 9, None if saved is None else step)
            trackers = [RunRecord(info), JsonlTracker(info)]
            info.save_run_id("wandb", "abc")
            responses = samples.SampleWriter(run, SamplesConfig(enable=True, token_rows=1, max_gb=1e-5), list)  # pyright: ignore[reportArgumentType]
            responses.start(info.resumed_step)
            for number in range(step + 1, step + draw.randint(2, 5)):
                responses.write(DataProto.from_dict({}), number)
                trackers[1].log({"loss": 1.0}, number)
                replace_text(run / "status.json", json.dumps({"step": number, "phase": "save"}))
                save_samples([Sample("p", "r", "g", float(number))], run / "validation" / f"step_{number}.jsonl")
                output.append_rotated(run / "rewards" / "output.log", b"printed\n" * 20)
                roles = {"actor": functools.partial(_write_role, number)}
                exports = {"actor": functools.partial(_write_role, number)} if draw.random() < 0.3 else None
                manager.save(number, roles, {}, {"actor": draw.randint(1, 2)}, exports, draw.choice([None, 1, number]))
                self.saved_step = number
            trackers[0].on_run_end("finished")
            trackers[1].finish()

    def check(self) -> None:
        """Fail if a foreign file is gone or no longer begins with its line."""
        starts = set()
        for parent, _, names in os.walk(self.root):
            for path in (Path(parent, name) for name in names):
                if not path.is_symlink():
                    starts.add(path.read_bytes().removeprefix(temporary.MARKER).partition(b"\n")[0] + b"\n")
        lost = self.marks - starts
        assert not lost, f"lost {sorted(lost)}"


def _content(step: int) -> bytes:
    return f"step {step}\n".encode() * 20


def _write_role(step: int, folder: str, copy: str | None) -> None:
    with storage.new_folder(folder, kind="engine", global_step=step) as work:
        (work / "a.bin").write_bytes(_content(step))
        (work / "empty").mkdir()
    if copy is not None:
        storage.copy_folder(folder, copy)


# -- operations that do not belong to a run ---------------------------------------------------------


def _use_temporary_files(root: Path) -> None:
    with temporary.temporary_folder() as folder:
        (folder / "adapter_config.json").write_text("{}")
    temporary.temporary_file()
    folder, lock = temporary._new_folder(root / "shm")
    temporary._locks.append(lock)
    (folder / "pool-a").mkdir()
    (folder / "pool-a" / "rank_0.txt").write_text("")


def _export(root: Path) -> None:
    target = root / "models" / "out"
    storage.check_replaceable(target, "huggingface")
    with storage.new_folder(target, kind="huggingface") as work:
        (work / "config.json").write_text("{}")


def _save_series(root: Path) -> None:
    for step in (1, 2, 3):
        target = root / "models" / "series" / f"global_step_{step}" / "actor"
        _write_role(step, str(target), None)
        storage.prune(target, 1)


def _download(root: Path) -> None:
    files = fsspec.filesystem("memory")
    if files.exists("/foreign-files"):
        files.rm("/foreign-files", recursive=True)
    else:
        files.pipe_file("/foreign-files/data/b/c.txt", b"c")
    files.pipe_file("/foreign-files/data/a.txt", os.urandom(4))
    fetch(URL)


def _cache_tokens(root: Path) -> None:
    path = root / "cache" / "prompts" / CACHED
    if tokens._load_cached(path, 1) is None:
        tokens._write(path, Ragged(torch.tensor([1, 2], dtype=torch.int32), torch.tensor([2])))


def _generate(root: Path) -> None:
    source = root / "models" / "rows.parquet"
    write_parquet(source, [{"prompt": "a"}])
    file = ResponseFile(root / "models" / "out.parquet", "responses", {})
    if file.exists():
        file.remove_parts()
        return
    with file.parts() as parts:
        if not parts.num_done:
            parts.add(1, {"": [["b"]]})
        file.write([source], range(1), parts)


def _save_inputs(root: Path) -> None:
    save_rows([{"prompt": "a"}], root / "run", "data")


OPERATIONS: list[Callable[[Path], None]] = [
    *(_use_temporary_files, _export, _save_series, _download, _cache_tokens, _generate, _save_inputs),
    lambda root: temporary.remove_leftovers(),
]


def _table(*_: Any) -> pyarrow.Table:
    return pyarrow.table({name: ["x" * 200] for name in samples._COLUMNS})


@contextlib.contextmanager
def sandbox() -> Iterator[World]:
    """Yield an empty sandbox, in which all paths of this process are that are not those of a run."""
    logging.disable(logging.CRITICAL)
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        stack.callback(logging.disable, logging.NOTSET)
        stack.enter_context(patch.object(tempfile, "tempdir", str(root / "tmp")))
        stack.enter_context(patch.object(temporary, "SHARED_MEMORY", root / "shm"))
        stack.enter_context(patch.object(temporary, "_locks", []))  # a killed process of the sandbox closes its locks
        environment = {"CAMSHAFT_CACHE": str(root / "cache"), "TMPDIR": str(root / "tmp")}
        stack.enter_context(patch.dict(os.environ, environment))
        stack.enter_context(patch.object(samples, "sample_table", _table))
        stack.enter_context(patch.object(output, "MAX_BYTES", 400))
        stack.enter_context(patch.object(output, "_started", {}))
        files = fsspec.filesystem("memory")
        if files.exists("/foreign-files"):
            files.rm("/foreign-files", recursive=True)
        yield World(root, stack.enter_context(recording(root)))


def run_world(seed: int) -> int:
    """Run some processes in a sandbox, and return the number of recorded changes."""
    draw, changes = random.Random(seed), 0
    with sandbox() as world:
        for _ in range(draw.randint(1, 4)):
            world.fill(draw)
            world.live(draw)
            changes += world.disk.count
            world.check()
    return changes
