"""Pools on a Ray cluster: a placement group for each, an actor for each rank.

    BACKENDS["ray"] = "camshaft.controller.ray:start"

Ray places the processes, moves the bytes and says who died. A request goes as one list of a small pickle and flat
buffers; a large one is put into the object store once for all ranks that get the same, and read there without a copy
(a batch makes itself writable again when it is rebuilt). Before anything is asked for, what all pools need is held
against what the cluster has (`resources.py`). While an answer is awaited, the cluster's own daemons are watched as
well: their ports are tried, which tells in a second what the cluster itself notices in fifteen.

Without a cluster to join (`ray_init.address`, RAY_ADDRESS, or one that runs on this machine) one is started here. It
is told that it has as many CPUs as the pools ask for, so that on a small machine ranks share the cores.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.exceptions
from ray import cloudpickle
from ray._private.state import available_resources_per_node
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from camshaft.controller.group import Options, Pool
from camshaft.controller.host import Host, log_to_file, set_environment
from camshaft.controller.machine import interface_of, lead_group, read_stacks, stack_file, stacks_on_signal
from camshaft.controller.processes import COLLECTIVE_EXTRA_SECONDS, Inbox, Link, Processes
from camshaft.controller.resources import Node, PoolSpec, shortage
from camshaft.controller.watch import Watch, answers
from camshaft.controller.wire import Frames
from camshaft.controller.worker import RankInfo, Worker
from camshaft.errors import ConfigError, WorkerError
from camshaft.stop import outlive_stop_signals

logger = logging.getLogger(__name__)

INLINE_BYTES = 64 * 1024
"""Smaller requests travel in the call itself; larger ones through the object store."""
RELEASE_SECONDS = 10.0
"""How long what is in use is waited for: it may be a run that has just ended."""
PLACEMENT_SECONDS = 60.0
"""How long a place that the cluster has may take to be given."""
HEAD_SECONDS = 30.0
"""How long the head of a cluster may take to come up."""
STACK_SECONDS = 10.0
"""How long a machine may take to read the stacks of one of its processes."""

CARRIED = re.compile(
    r"(CAMSHAFT|HF|TRANSFORMERS|TOKENIZERS|TORCH|TORCHINDUCTOR|NCCL|GLOO|OMP|MKL|VLLM|SGLANG|SGL|WANDB|MLFLOW|CUBLAS)_"
    r"|TMPDIR$|PYTORCH_|PYTHONHASHSEED$"
)
"""The driver's variables that workers on other machines get too. For others see `ray_init.runtime_env`."""


def start(specs: Sequence[PoolSpec], options: Options) -> list[Pool]:
    connect(specs, options.ray_init)
    told = shortage(specs, _nodes())
    deadline = time.monotonic() + RELEASE_SECONDS
    while told is not None and time.monotonic() < deadline and shortage(specs, _emptied(_nodes())) is None:
        time.sleep(0.2)
        told = shortage(specs, _nodes())
    if told is not None:
        raise ConfigError(
            f"{told}\n\nType less for trainer.nnodes and trainer.n_gpus_per_node (or for the pool of "
            "trainer.resource_pools), or a smaller trainer.cpus_per_rank; or wait for what is in use"
        )
    pools: list[RayPool] = []
    ranks = sum(spec.world_size for spec in specs)
    try:
        for spec in specs:
            pools.append(RayPool(spec, options, other_ranks=ranks - spec.world_size))
            pools[-1].begin()
        for pool in pools:
            pool.meet()
    except BaseException:
        for pool in pools:
            pool.shutdown()
        raise
    return list(pools)


def connect(specs: Sequence[PoolSpec], asked: Mapping[str, Any]) -> None:
    """Join the cluster, or start one on this machine that has room for `specs`."""
    if ray.is_initialized():
        return
    init: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING, **asked}
    address = init.pop("address", None) or os.environ.get("RAY_ADDRESS") or _running_here()
    _check_address(address)
    try:
        if address in (None, "local"):
            os.environ.setdefault("RAY_worker_niceness", "0")  # else workers yield to everything else on the machine
            cpus = sum(spec.cpus_per_rank * spec.world_size for spec in specs)
            cores = len(os.sched_getaffinity(0))
            if cpus > cores and "num_cpus" not in init:
                logger.info("%g CPUs are asked for and this machine has %d: the ranks share them", cpus, cores)
            ray.init(address="local", **{"num_cpus": max(cores, int(-(-cpus // 1))), **init})
        else:
            init.pop("num_cpus", None)  # a running cluster has what it has
            ray.init(address=address, **init)
    except (ConnectionError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"ray.init(address={address!r}, ...) failed: {error}. See ray_kwargs.ray_init") from error


def _check_address(address: str | None) -> None:
    """Ray itself tries for minutes, in silence, where nobody is."""
    if address is not None and "://" in address:
        raise ConfigError(
            f"the cluster's address is {address}, and a run joins one at <host>:<port>, from one of its machines, not "
            "through an API. Type that address there, or start the run with `ray job submit -- camshaft ppo ...`"
        )
    deadline = time.monotonic() + HEAD_SECONDS
    while not _answers(address):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"no Ray cluster answers at {address} (ray_kwargs.ray_init.address, or RAY_ADDRESS in the environment) "
                f"within {HEAD_SECONDS:g} s. Is its head running (`ray start --head`), and is the port open?"
            )
        time.sleep(0.2)


def _answers(address: str | None) -> bool:
    """False if the address names a place where nobody is."""
    host, _, port = (address or "").rpartition(":")
    return not port.isdigit() or answers(host.strip("[]"), int(port))


def _running_here() -> str | None:
    """The address of a cluster that was started on this machine and still answers."""
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    file = Path(temporary) / "ray" / "ray_current_cluster"
    address = file.read_text(encoding="utf-8").strip() if file.exists() else None
    return address if address and _answers(address) else None


def _nodes() -> list[Node]:
    free = available_resources_per_node()
    return [
        Node(node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


def _emptied(nodes: Sequence[Node]) -> list[Node]:
    """The machines without anybody else on them."""
    return [replace(node, free=node.total) for node in nodes]


def _head() -> tuple[str, int]:
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return host, int(port)


def _head_answers() -> bool:
    """Asked before what would wait for a dead one: `ray.kill` does, for a minute, and nothing is to be given back."""
    return answers(*_head())


def _watched(watch: Watch, names: set[str]) -> None:
    """Watch the cluster's head and the daemons of these nodes, and of the one that this process is on."""
    context = ray.get_runtime_context()
    watch.add("the head of the Ray cluster", *_head())
    for node in ray.nodes():
        if node["NodeID"] in names | {context.get_node_id()}:
            host = node["NodeManagerAddress"]
            watch.add(f"the Ray daemon of machine {host}", host, node["NodeManagerPort"])


class RayPool(Processes):
    """Actors on a placement group with one bundle for each machine."""

    def __init__(self, spec: PoolSpec, options: Options, other_ranks: int):
        super().__init__(spec, options)
        # Of a cluster of several machines it is not known which pools meet on one.
        self._other_ranks = other_ranks if len(_nodes()) == 1 else 0
        self._group: PlacementGroup | None = None
        self._watch = Watch()

    def start(self) -> None:
        spec = self.spec
        strategy = "STRICT_SPREAD" if spec.nnodes > 1 else "STRICT_PACK"
        name = f"camshaft/{spec.name}/{uuid.uuid4().hex[:8]}"  # a name is taken but once in a cluster
        self._group = placement_group([spec.per_node()] * spec.nnodes, strategy=strategy, name=name)
        if not self._group.wait(PLACEMENT_SECONDS):
            raise WorkerError(
                f"pool '{spec.name}': Ray gave no place within {PLACEMENT_SECONDS:g} s, though the cluster has one; "
                "another job may have taken it meanwhile. Look at `ray status`"
            )
        for rank in range(self.world_size):
            self.links.append(RayLink(self._rank_info(rank), self._options(rank), self.inbox, self._watch))

    def meet(self) -> None:
        super().meet()
        _watched(self._watch, {link.node() for link in self.links if isinstance(link, RayLink)})

    def rendezvous(self) -> str:
        return self.ask("__init__", ("open_rendezvous",), ranks={0})[0]

    def parcel(self, frames: Frames) -> Any:
        arrays = as_arrays(frames)
        return arrays if sum(map(len, frames)) < INLINE_BYTES else ray.put(arrays)

    def sendable(self, role_class: type[Worker]) -> Any:
        # Of the driver's script a worker knows nothing, so what it defines travels whole.
        return _Whole(role_class) if role_class.__module__ == "__main__" else role_class

    def troubled(self) -> str | None:
        return self._watch.trouble()

    def tidy(self) -> None:
        if self._group is not None and ray.is_initialized() and not self.troubled() and _head_answers():
            remove_placement_group(self._group)
        self._watch.end()

    def _rank_info(self, rank: int) -> RankInfo:
        spec = self.spec
        return RankInfo(
            rank,
            self.world_size,
            "cpu" if spec.device in (None, "cpu") else f"{spec.device}:0",  # Ray shows it no other
            self.options.timeout + COLLECTIVE_EXTRA_SECONDS,
            local_rank=rank % spec.ranks_per_node,
            local_world=spec.ranks_per_node,
            other_ranks=self._other_ranks,
            pool=spec.name,
            log_folder=self.options.log_folder,
        )

    def _options(self, rank: int) -> dict[str, Any]:
        spec = self.spec
        assert self._group is not None
        return {
            "num_cpus": spec.cpus_per_rank,
            "num_gpus": 0 if spec.device in (None, "cpu") else 1,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=rank // spec.ranks_per_node
            ),
        }


class RayLink(Link):
    """One actor."""

    def __init__(self, rank_info: RankInfo, options: Mapping[str, Any], inbox: Inbox, watch: Watch):
        self.rank = rank_info.rank
        self._inbox, self._watch = inbox, watch
        self._gone: str | None = None
        self._coming: deque[Future[Frames]] = deque()
        self._arriving = threading.Lock()
        carried = {name: value for name, value in os.environ.items() if CARRIED.match(name)}
        found = [entry for entry in sys.path if entry]
        self._actor = _ACTOR.options(**options).remote(rank_info, carried, found, os.getcwd())
        self._node = self._actor.node.remote()

    def node(self) -> str:
        """The cluster's name of the machine that it is on."""
        return ray.get(self._node, timeout=STACK_SECONDS)

    def post(self, parcel: Any) -> None:
        answer = self._actor.answer.remote(parcel).future()
        self._coming.append(answer)
        answer.add_done_callback(self._arrived)

    def _arrived(self, _: Future[Frames]) -> None:
        """In a thread of Ray's, which tells of a small answer before a large one that was given earlier."""
        with self._arriving:
            while self._coming and self._coming[0].done():
                answer = self._coming.popleft()
                error = answer.exception()
                if error is not None:
                    self._gone = self._gone or how_it_died(error)
                self._inbox.put((self.rank, None if error is not None else answer.result()))

    def ended(self) -> str | None:
        return self._gone

    def stacks(self) -> str:
        if self.pid is None:
            return ""
        if self._is_here():
            return read_stacks(self.pid, stack_file(self.pid))
        with contextlib.suppress(ray.exceptions.RayError):  # the machine does not answer either
            there = NodeAffinitySchedulingStrategy(self.node(), soft=False)
            task = ray.remote(_stacks_there).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
            return ray.get(task.remote(self.pid), timeout=STACK_SECONDS)
        return ""

    def stop(self) -> None:
        """A process that has answered everything may as well be killed."""

    def kill(self) -> None:
        if self.pid is not None and self._is_here():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # Ray gives a process five seconds, a frozen one too
        if not self._watch.trouble() and _head_answers():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self._actor, no_restart=True)  # pyright: ignore[reportArgumentType]

    def join(self, seconds: float) -> None:
        """Its group ends with it; nobody waits for a process of another machine."""

    def _is_here(self) -> bool:
        try:
            return self.node() == ray.get_runtime_context().get_node_id()
        except ray.exceptions.RayError:
            return False


class ActorHost:
    """A rank: the `Host` of `host.py` in an actor. Its methods run in the main thread, one after the other."""

    def __init__(self, rank_info: RankInfo, environment: dict[str, str], path: list[str], folder: str):
        lead_group()
        stacks_on_signal(stack_file(os.getpid()))
        outlive_stop_signals(signal.SIGTERM)
        sys.path.extend(entry for entry in path if entry not in sys.path and os.path.exists(entry))
        with contextlib.suppress(OSError):  # another machine may not have it
            os.chdir(folder)
        rank_info = replace(rank_info, address=get_node_ip_address())
        interface = interface_of(rank_info.address)
        if interface is not None and rank_info.world > rank_info.local_world:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        chosen = ray.get_runtime_context().runtime_env.env_vars()  # these win over what the driver happens to have
        environment.update({name: os.environ[name] for name in chosen if name in os.environ})
        set_environment(rank_info, environment)
        log_to_file(rank_info)
        self._host = Host(rank_info)

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def answer(self, frames: Frames) -> list[Any]:
        return as_arrays(self._host.answer(frames))


_ACTOR = ray.remote(ActorHost)


def _stacks_there(pid: int) -> str:
    """Of a process of the machine that this runs on, which knows where its files are."""
    return read_stacks(pid, stack_file(pid))


class _Whole:
    """A class that is pickled with its code."""

    def __init__(self, role_class: type):
        self._code = cloudpickle.dumps(role_class)  # pyright: ignore[reportPrivateImportUsage]

    def __reduce__(self) -> tuple[Any, ...]:
        return cloudpickle.loads, (self._code,)


def as_arrays(frames: Frames) -> list[Any]:
    """The pickle as bytes and its buffers as arrays, which the object store takes as they lie in memory."""
    head, *buffers = frames
    return [bytes(head), *(np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers)]


def how_it_died(error: BaseException) -> str:
    """What Ray knows, without the lines that repeat themselves in each of its errors."""
    text = str(error)
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return f"Ray killed it because memory ran out: {text.splitlines()[0]}"
    if "node has died" in text or "node was terminated" in text:
        return "its machine has died or is cut off"
    if "creation task" in text:
        return f"it could not be built: {text}"
    if "End of file" in text:
        return "without a word, as after SIGKILL, which is what the kernel sends when memory runs out"
    return " ".join(text.split())
