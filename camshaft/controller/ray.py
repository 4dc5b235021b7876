"""The backend `ray`, which starts pools on a Ray cluster with one placement group per pool and one actor per rank.

    BACKENDS["ray"] = "camshaft.controller.ray_environment:start"

Ray places the processes, transfers messages and reports dead processes. A request is a list of a small pickle and its
buffers. A large request is put into the object store once for all ranks that get it. Restoring a batch from it copies
its tensors, because the buffers in the object store are read-only. Before the pools are created, `resources.py`
compares the requested resources with those of the cluster. While the driver waits for an answer, `network.py` connects
to the daemons of the cluster, which detects a dead machine within seconds. Ray itself needs fifteen seconds.

`ray_environment.py` configures Ray, and imports this module after that. A cluster that this backend starts declares at
least as many CPUs as the pools request, so on a small machine the ranks share the cores.
"""

# Ray annotates few of its functions.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
import atexit
import contextlib
import logging
import os
import re
import shlex
import signal
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import ray
import ray.exceptions
from ray import cloudpickle
from ray._private.state import available_resources_per_node
from ray._raylet import setproctitle  # pyright: ignore[reportAttributeAccessIssue]
from ray.job_config import JobConfig
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from camshaft.controller.executor import Executor, log_to_file, set_environment
from camshaft.controller.group import Options, Pool
from camshaft.controller.network import PortMonitor, accepts_connections, interface_of
from camshaft.controller.process_pool import Inbox, ProcessPool, WorkerProcess
from camshaft.controller.ray_cluster import check_head, find_cluster
from camshaft.controller.resources import Node, PoolSpec, shortage
from camshaft.controller.worker import RankInfo, Worker
from camshaft.errors import ClusterError, WorkerError
from camshaft.masking import mask_arguments, mask_value
from camshaft.stacks import dump_stacks_on_signal, read_stacks
from camshaft.stop import ignore_stop_signals
from camshaft.subprocesses import (
    Frames,
    GroupGuard,
    VariableGuard,
    end_with,
    extend_import_path,
    import_path,
    kill_group,
    safe_import_environment,
)
from camshaft.temporary import temporary_file

logger = logging.getLogger(__name__)

INLINE_BYTES = 64 * 1024
"""Minimum size of a request that is sent through the object store."""
RELEASE_SECONDS = 10.0
"""Time limit for the release of resources that are in use, for example by a run that has just ended."""
PLACEMENT_SECONDS = 60.0
"""Time limit for Ray to create a placement group for which the cluster has free resources."""
STACK_SECONDS = 10.0
"""Time limit for a machine to read the stacks of one of its processes."""

CLUSTER = "CAMSHAFT_RAY_CLUSTER"
"""Environment variable that marks all processes of a cluster that a run starts."""
RAY_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable with the job config of a run that `ray job submit` started."""

FORWARDED = re.compile(
    r"(CAMSHAFT|HF|TRANSFORMERS|TOKENIZERS|TORCH|TORCHINDUCTOR|NCCL|GLOO|OMP|MKL|VLLM|SGLANG|SGL|WANDB|MLFLOW|CUBLAS)_"
    r"|TMPDIR$|PYTORCH_|PYTHONHASHSEED$"
)
"""Environment variables of the driver that are forwarded to all workers. `ray_init.runtime_env` can set others."""


def start(specs: Sequence[PoolSpec], options: Options) -> list[Pool]:
    """Start all pools or none. Raise `ClusterError` if the cluster is too small."""
    connect(specs, options.ray_init)
    deadline = time.monotonic() + RELEASE_SECONDS
    while (problem := shortage(specs, _nodes())) is not None:
        free_nodes = [replace(node, free=node.total) for node in _nodes()]
        if time.monotonic() >= deadline or shortage(specs, free_nodes) is not None:
            raise ClusterError(
                f"{problem}\n\nReduce trainer.nnodes, trainer.n_gpus_per_node (or those of the pool in "
                "trainer.resource_pools) or trainer.cpus_per_rank, or wait until the resources are free"
            )
        time.sleep(0.2)
    pools: list[RayPool] = []
    ranks = sum(spec.world_size for spec in specs)
    try:
        for spec in specs:
            pools.append(RayPool(spec, options, other_ranks=ranks - spec.world_size))
            pools[-1].start()
        for pool in pools:
            pool.join_ranks()
    except BaseException:
        for pool in pools:
            pool.shutdown()
        raise
    return list(pools)


def connect(specs: Sequence[PoolSpec], ray_init: Mapping[str, Any]) -> None:
    """Join the cluster, or start one on this machine with enough CPUs for `specs`."""
    if ray.is_initialized():
        return
    init: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING, **ray_init}
    if variables := _variables(ray_init):
        public = {name: value for name, value in variables.items() if not _is_secret(name, value)}
        init["runtime_env"] = {**ray_init["runtime_env"], "env_vars": public}
    cluster = find_cluster(ray_init)
    init.pop("address", None)
    check_head(cluster)
    address = cluster.address
    try:
        if cluster.starts:
            os.environ.setdefault("RAY_worker_niceness", "0")  # otherwise Ray lowers the priority of workers
            cpus = sum(spec.cpus_per_rank * spec.world_size for spec in specs)
            cores = len(os.sched_getaffinity(0))
            if cpus > cores and "num_cpus" not in init:
                logger.info("the pools request %g CPUs, but this machine has %d; the ranks share them", cpus, cores)
            init = {"num_cpus": max(cores, int(-(-cpus // 1))), **init}
            address = "local"
            guard = _guard_cluster()
        else:
            init.pop("num_cpus", None)  # only valid for a new cluster
            guard = contextlib.nullcontext()
        _mask_command_line()
        with guard, safe_import_environment():  # Ray runs Python code with `-c`
            ray.init(address=address, **_job_config(init), **init)
    except Exception as error:  # Ray raises a plain exception if its daemons do not start in time
        raise ClusterError(f"ray.init(address={address!r}, ...) failed: {error}. Check ray_kwargs.ray_init") from error


def _mask_command_line() -> None:
    """Replace secrets in the command line of this process, which Ray stores and shows as the entry point of the job."""
    arguments = mask_arguments(sys.orig_argv)
    if arguments != sys.orig_argv:
        setproctitle(shlex.join(arguments))


def _variables(ray_init: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables of the runtime environment, as strings, which Ray requires."""
    variables = (ray_init.get("runtime_env") or {}).get("env_vars") or {}
    return {name: str(value) for name, value in variables.items()}


def _is_secret(name: str, value: str) -> bool:
    """Return True for an environment variable that is sent to the actors as an argument.

    Ray's dashboard and logs show the variables of a runtime environment.
    """
    return mask_value(value, name) != value


@contextlib.contextmanager
def _guard_cluster() -> Generator[None]:
    """Mark the processes that start in the block, and kill those that outlive this process if it is killed.

    Ray's agents would wait a minute for the head of the cluster, which ends together with this process.
    """
    mark = uuid.uuid4().hex
    atexit.register(VariableGuard(CLUSTER, mark).cancel)
    os.environ[CLUSTER] = mark
    try:
        yield
    finally:
        del os.environ[CLUSTER]


def run_on_nodes(
    ray_init: Mapping[str, Any], function: Callable[..., Any], args: Sequence[Any], seconds: float
) -> dict[str, Any]:
    """Call a function once on each machine of the cluster, and return the results by the address of the machine.

    The result is an exception if the call fails, or if it does not end within the time limit. The function must be in
    an importable module.
    """
    connect([], ray_init)
    tasks, pickled = {}, cloudpickle.dumps(function)  # pyright: ignore[reportPrivateImportUsage]
    for node in ray.nodes():
        if node["Alive"]:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            remote = ray.remote(_call_here).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
            tasks[node["NodeManagerAddress"]] = remote.remote(import_path(), os.getcwd(), pickled, args)
    done, _ = ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=seconds)
    results: dict[str, Any] = {}
    for address, task in tasks.items():
        try:
            results[address] = ray.get(task) if task in done else TimeoutError(f"no answer within {seconds:g} s")
        except ray.exceptions.RayError as error:
            results[address] = error
    return results


def _call_here(path: Sequence[str], folder: str, function: bytes, args: Sequence[Any]) -> Any:
    """Call a pickled function with the import path and the working directory of the driver."""
    extend_import_path([entry for entry in path if os.path.exists(entry)])
    with contextlib.suppress(OSError):  # the folder may not exist on this machine
        os.chdir(folder)
    return cloudpickle.loads(function)(*args)


def _job_config(init: Mapping[str, Any]) -> dict[str, Any]:
    """Return the argument of `ray.init` that keeps the working directory off the import path of Ray's processes.

    Ray would insert it before the installed packages. `ActorExecutor` appends it. Ray ignores files of a runtime
    environment in this mode, so a run that has such files uses Ray's default, which does not insert the directory if
    there is a `working_dir`.
    """
    uploads = {"working_dir", "py_modules", "worker_process_setup_hook"} & set(init.get("runtime_env") or {})
    submitted = RAY_JOB_CONFIG in os.environ
    return {} if uploads or submitted or "job_config" in init else {"job_config": JobConfig(_client_job=True)}


def _nodes() -> list[Node]:
    free = available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [Node(node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {})) for node in alive]


def _head() -> tuple[str, int]:
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return host, int(port)


def _head_answers() -> bool:
    """Return True if the head of the cluster answers.

    Check this before calls such as `ray.kill`, which wait a minute for a dead head.
    """
    return accepts_connections(*_head())


def _monitor_cluster(monitor: PortMonitor, node_ids: set[str]) -> None:
    """Monitor the head of the cluster and the daemons of the given nodes and of the driver's node."""
    context = ray.get_runtime_context()
    monitor.add("the head of the Ray cluster", *_head())
    for node in ray.nodes():
        if node["NodeID"] in node_ids | {context.get_node_id()}:
            host = node["NodeManagerAddress"]
            monitor.add(f"the Ray daemon of machine {host}", host, node["NodeManagerPort"])


class RayPool(ProcessPool):
    """A pool of actors in a placement group with one bundle per machine."""

    def __init__(self, spec: PoolSpec, options: Options, other_ranks: int):
        # With several machines, it is unknown which pools share a machine.
        super().__init__(spec, options, other_ranks if len(_nodes()) == 1 else 0)
        self._group: PlacementGroup | None = None
        self._monitor = PortMonitor()

    def create_processes(self) -> None:
        spec, self._monitor = self.spec, PortMonitor()
        strategy = "STRICT_SPREAD" if spec.nnodes > 1 else "STRICT_PACK"
        name = f"camshaft/{spec.name}/{uuid.uuid4().hex[:8]}"  # names are unique in a cluster
        self._group = placement_group([spec.per_node()] * spec.nnodes, strategy=strategy, name=name)
        if not self._group.wait(PLACEMENT_SECONDS):
            raise WorkerError(
                f"pool '{spec.name}': Ray did not create a placement group within {PLACEMENT_SECONDS:g} s, although "
                "the resources were free; another job may have taken them, so check `ray status`"
            )
        device = "cpu" if spec.device in (None, "cpu") else f"{spec.device}:0"  # Ray makes only this device visible
        variables = _variables(self.options.ray_init)
        secrets = {name: value for name, value in variables.items() if _is_secret(name, value)}
        for rank in range(self.world_size):
            rank_info = self.rank_info(rank, device)
            self.processes.append(ActorProcess(rank_info, self._options(rank), self.inbox, self._monitor, secrets))

    def join_ranks(self) -> None:
        super().join_ranks()
        node_ids = {process.node() for process in self.processes if isinstance(process, ActorProcess)}
        _monitor_cluster(self._monitor, node_ids)

    def rendezvous(self) -> str:
        return self.request("__init__", ("open_rendezvous",), ranks={0})[0]

    def payload(self, frames: Frames) -> Any:
        arrays = as_arrays(frames)
        return arrays if sum(map(len, frames)) < INLINE_BYTES else ray.put(arrays)

    def portable_class(self, role_class: type[Worker]) -> Any:
        # Workers cannot import the driver's script, so classes of the script are sent with their code.
        return _PickledClass(role_class) if role_class.__module__ == "__main__" else role_class

    def missing_service(self, probe: bool = False) -> str | None:
        return self._monitor.error() or (self._monitor.probe() if probe else None)

    def release(self) -> None:
        if self._group is not None and ray.is_initialized() and not self.missing_service() and _head_answers():
            remove_placement_group(self._group)
        self._monitor.stop()

    def _options(self, rank: int) -> dict[str, Any]:
        spec = self.spec
        assert self._group is not None
        return {
            "num_cpus": spec.cpus_per_rank,
            "num_gpus": 0 if spec.device in (None, "cpu") else 1,
            # Otherwise the memory of Ray's head grows by two kilobytes per call, up to 100,000 calls.
            "enable_task_events": False,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=rank // spec.ranks_per_node
            ),
        }


class ActorProcess(WorkerProcess):
    """An actor that runs one rank."""

    def __init__(
        self,
        rank_info: RankInfo,
        options: Mapping[str, Any],
        inbox: Inbox,
        monitor: PortMonitor,
        secrets: Mapping[str, str] = MappingProxyType({}),
    ):
        """Start an actor with the environment variables `secrets` in addition to those that are forwarded."""
        self.rank = rank_info.rank
        self._inbox, self._monitor = inbox, monitor
        self._death: str | None = None
        self._answers: deque[Future[Frames]] = deque()
        self._lock = threading.Lock()
        variables = {name: value for name, value in os.environ.items() if FORWARDED.match(name)} | dict(secrets)
        self._actor = _ACTOR.options(**options).remote(rank_info, variables, import_path(), os.getcwd())
        self._node, self._stack_file = self._actor.node.remote(), self._actor.stack_file.remote()

    def node(self) -> str:
        """Return the id of the actor's node in the cluster."""
        return ray.get(self._node, timeout=STACK_SECONDS)

    def post(self, payload: Any) -> None:
        answer = self._actor.answer.remote(payload).future()
        self._answers.append(answer)
        answer.add_done_callback(self._deliver)

    def _deliver(self, _: Future[Frames]) -> None:
        """Put answers into the inbox in the order of their requests.

        If a small answer follows a large one, Ray calls this for the small answer first.
        """
        with self._lock:
            while self._answers and self._answers[0].done():
                answer = self._answers.popleft()
                error = answer.exception()
                if error is not None:
                    self._death = self._death or describe_death(error)
                self._inbox.put((self.rank, None if error is not None else answer.result()))

    def exit_description(self) -> str | None:
        return self._death

    def local_pid(self) -> int | None:
        return self.pid if self._is_local() else None

    def stacks(self) -> str:
        if self.pid is None:
            return ""
        with contextlib.suppress(ray.exceptions.RayError):  # the machine itself may not answer
            file: Any = ray.get(self._stack_file, timeout=STACK_SECONDS)
            if self._is_local():
                return read_stacks(self.pid, file)
            node = NodeAffinitySchedulingStrategy(self.node(), soft=False)
            task = ray.remote(read_stacks).options(num_cpus=0, max_retries=0, scheduling_strategy=node)
            return ray.get(task.remote(self.pid, file), timeout=STACK_SECONDS)
        return ""

    def stop(self) -> None:
        """Do nothing, because an idle actor can simply be killed."""

    def kill(self) -> None:
        if self.pid is not None and self._is_local():
            kill_group(self.pid)  # ray.kill would wait five seconds for the process, even if it is suspended
        if not self._monitor.error() and _head_answers():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self._actor, no_restart=True)

    def join(self, seconds: float) -> None:
        """Do nothing. The process group ends with the actor, and the actor may run on another machine."""

    def _is_local(self) -> bool:
        try:
            return self.node() == ray.get_runtime_context().get_node_id()
        except ray.exceptions.RayError:
            return False


class ActorExecutor:
    """Actor class that runs the executor of a rank. Its methods run one at a time in the main thread."""

    def __init__(self, rank_info: RankInfo, environment: dict[str, str], path: list[str], folder: str):
        pid = os.getpid()
        if os.getpgid(0) != pid:
            os.setpgid(0, 0)
        self._stack_file = temporary_file()
        self._guard = GroupGuard(pid, self._stack_file)
        end_with(os.getppid())  # an actor in a collective operation would outlive its raylet
        dump_stacks_on_signal(self._stack_file)
        ignore_stop_signals(signal.SIGTERM, signal.SIGHUP)
        os.environ.pop("PYTHONSAFEPATH", None)  # only this process needs it, not the programs that a role starts
        extend_import_path([entry for entry in path if os.path.exists(entry)])
        with contextlib.suppress(OSError):  # the folder may not exist on this machine
            os.chdir(folder)
        rank_info = replace(rank_info, address=get_node_ip_address())
        interface = interface_of(rank_info.address)
        if interface is not None and rank_info.world > rank_info.local_world:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        runtime_variables = ray.get_runtime_context().runtime_env.env_vars()  # override the variables of the driver
        environment.update({name: os.environ[name] for name in runtime_variables if name in os.environ})
        set_environment(rank_info, environment)
        log_to_file(rank_info)
        self._executor = Executor(rank_info)

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def stack_file(self) -> Path:
        return self._stack_file

    def answer(self, frames: Frames) -> list[Any]:
        return as_arrays(self._executor.answer(frames))


_ACTOR: Any = ray.remote(ActorExecutor)


class _PickledClass:
    """Wrapper that pickles a class together with its code."""

    def __init__(self, role_class: type):
        self._code = cloudpickle.dumps(role_class)  # pyright: ignore[reportPrivateImportUsage]

    def __reduce__(self) -> tuple[Any, ...]:
        return cloudpickle.loads, (self._code,)


def as_arrays(frames: Frames) -> list[Any]:
    """Convert a message to bytes and NumPy arrays. Ray's object store does not copy arrays."""
    head, *buffers = frames
    return [bytes(head), *(np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers)]


def describe_death(error: BaseException) -> str:
    """Return a short description of an actor's death from the error that Ray raised."""
    text = str(error)
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return f"Ray killed it because memory ran out: {text.splitlines()[0]}"
    if "node has died" in text or "node was terminated" in text:
        return "its machine is dead or disconnected"
    if "creation task" in text:
        return f"the actor could not be built: {text}"
    if "End of file" in text:
        return "without an exit status, as after SIGKILL, which the kernel sends when memory runs out"
    return " ".join(text.split())
