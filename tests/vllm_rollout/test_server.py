"""The server rollout with real servers: started, given by URL, killed, restarted, and ended with the trainer.

Run by `make test-vllm`. `make test-server` runs the contract.
"""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import still_running
from support.vllm_runs import run_with_vllm, wait_until_it_generates

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.contracts.rollout.harness import Case, RolloutHarness, largest_difference
from camshaft.errors import RolloutError
from camshaft.rollout.base import SamplingParams
from camshaft.rollout.server import ServerRollout
from camshaft.rollout.server.launch import ServerProcess
from camshaft.subprocesses import is_running

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

SLOW = {"vllm_server_timeout": 600}
SAMPLING = SamplingParams(12, temperature=0.7)


KEY = "a secret of the tests"


@pytest.fixture(scope="module", autouse=True)
def key() -> Iterator[None]:
    """Set the key of started servers, so that tests can connect to them by URL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", KEY)
        yield


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> RolloutHarness:
    return RolloutHarness(ServerRollout, tmp_path_factory.mktemp("models"), sizes={"hidden": 128})


@pytest.fixture(scope="module")
def started_case(harness: RolloutHarness) -> Case:
    """Return a rollout that started its server."""
    return harness.case(engine_kwargs=SLOW, max_model_len=1024, max_num_seqs=64)


def connected_case(harness: RolloutHarness, url: str, **options: Any) -> Case:
    """Return a rollout with the URL of a running server."""
    return harness.empty_case(engine_kwargs={"vllm_server_base_url": url, **options})


def process_of(rollout: Any) -> ServerProcess:
    return rollout._process


def group_of(leader: int) -> list[int]:
    """Return all processes of one group."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(int(folder.name)) == leader:
                pids.append(int(folder.name))
    return pids


def off(case: Case, harness: RolloutHarness) -> float:
    prompts = harness.prompts(4, 9)
    out = case.rollout.generate_sequences(prompts, SAMPLING)
    return largest_difference(out.log_probs, case.log_probs(prompts, out.responses, SAMPLING))


def train(case: Case) -> None:
    """Change the weights of the reference model only."""
    for weight, (_, new) in zip(case.oracle.parameters(), case.other_weights(), strict=True):
        weight.data = new


def resident(pids: list[int]) -> int:
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids if is_running(pid)]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def test_started_server_follows_the_weights(started_case: Case, harness: RolloutHarness) -> None:
    assert off(started_case, harness) < 1e-4
    train(started_case)
    assert off(started_case, harness) > 0.1
    started_case.rollout.load_weights(started_case.weights())
    assert off(started_case, harness) < 1e-4


def test_prefix_cache_is_reset_by_a_weight_sync(started_case: Case, harness: RolloutHarness) -> None:
    prompts = harness.prompts(300, 300)

    def cached() -> float:
        return started_case.rollout.generate_sequences(prompts, SAMPLING).metrics["prompt_tokens_cached"]

    cached()
    assert cached() == 2 * 256  # full blocks: the cache is used
    started_case.rollout.load_weights(started_case.weights())
    assert cached() == 0


def test_sleep_frees_the_kv_cache(started_case: Case, harness: RolloutHarness) -> None:
    pids = group_of(process_of(started_case.rollout)._server.pid)
    awake = resident(pids)
    started_case.rollout.sleep()
    assert awake - resident(pids) > 0.9 * 2**28
    started_case.rollout.wake_up()
    started_case.rollout.load_weights(started_case.weights())
    assert off(started_case, harness) < 1e-4


def test_given_server_receives_weights_by_broadcast(started_case: Case, harness: RolloutHarness) -> None:
    url = started_case.rollout.http.url  # pyright: ignore[reportAttributeAccessIssue]
    case = connected_case(harness, url, weight_transfer="broadcast")
    train(case)
    case.rollout.load_weights(case.weights())
    assert off(case, harness) < 1e-4
    with pytest.raises(RolloutError, match=r"holds the weights of weight sync .*another process also sends it weights"):
        started_case.rollout.generate_sequences(harness.prompts(4), SAMPLING)
    started_case.rollout.load_weights(started_case.weights())
    assert off(started_case, harness) < 1e-4


ROUTES = ["/health", "/metrics", "/v1/models", "/v1/completions", "/collective_rpc", "/sleep", "/pause", "/docs"]


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_every_route_requires_the_key(started_case: Case, method: str) -> None:
    url = process_of(started_case.rollout).url
    for route in ROUTES:
        for headers in ({}, {"Authorization": "Bearer another"}):
            request = urllib.request.Request(f"{url}{route}", method=method, headers=headers)
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(request, timeout=60)
    command = Path(f"/proc/{process_of(started_case.rollout)._server.pid}/cmdline").read_text()
    assert KEY not in command


def test_interrupted_weight_sync_leaves_no_weights(started_case: Case, harness: RolloutHarness) -> None:
    def broken() -> Iterator[Any]:
        yield from started_case.weights()[:4]
        raise ZeroDivisionError("the engine broke")

    with pytest.raises(ZeroDivisionError):
        started_case.rollout.load_weights(broken())
    with pytest.raises(RolloutError, match="has no weights"):
        started_case.rollout.generate_sequences(harness.prompts(4), SAMPLING)
    train(started_case)
    started_case.rollout.load_weights(started_case.weights())
    assert off(started_case, harness) < 1e-4


def test_unknown_options_are_rejected_by_vllm(started_case: Case) -> None:
    config = started_case.rollout.config.model_copy(update={"engine_kwargs": SLOW | {"no_such_option": 1}})
    with pytest.raises(RolloutError, match=r"(?s)has ended.*last lines.*no-such-option"):
        ServerRollout(config)


ANOTHER_TRAINER = """
import sys, time
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.rollout.server import launch
launch._free_port = lambda: int(sys.argv[2])
launched = launch.ServerProcess(RolloutEngineConfig.model_validate_json(sys.argv[1]), {})
launched.wait(600)
print(launched._server.pid, flush=True)
time.sleep(600)
"""


def test_server_killed_restarted_and_ended_with_its_trainer(started_case: Case, harness: RolloutHarness) -> None:
    """The last test of the module, because it ends the server."""
    rollout: Any = started_case.rollout
    url, server = rollout.http.url, process_of(rollout)._server.pid
    case = connected_case(harness, url)
    case.rollout.load_weights(case.weights())

    # Killed during a generation.
    threading.Thread(target=kill_while_it_generates, args=(server, url)).start()
    begun = time.monotonic()
    with pytest.raises(RolloutError, match=f"{url} did not answer /v1/completions"):
        generate_until_it_fails(case, harness)
    assert time.monotonic() - begun < 30
    with pytest.raises(RolloutError, match=rf"(?s){url} did not answer .*has ended.*SIGKILL"):
        rollout.load_weights(started_case.weights())
    assert not still_running(group_of(server), seconds=10)

    # Restarted on the same port by another trainer.
    config: RolloutEngineConfig = started_case.rollout.config
    arguments = [config.model_dump_json(), url.rpartition(":")[2]]
    command = [sys.executable, "-c", ANOTHER_TRAINER, *arguments]
    before = unmapped_memory()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        leader = int(trainer.stdout.readline())
        with pytest.raises(RolloutError, match=f"the server at {url} was restarted"):
            case.rollout.generate_sequences(harness.prompts(4), SAMPLING)
        case.rollout.load_weights(case.weights())
        assert off(case, harness) < 1e-4

        # The server ends with its trainer, and frees its shared memory.
        processes = group_of(leader)
        assert len(processes) >= 3
        os.kill(trainer.pid, signal.SIGKILL)
    assert not still_running(processes, seconds=10)
    assert not unmapped_memory() - before


def kill_while_it_generates(pid: int, url: str) -> None:
    wait_until_it_generates(url, KEY)
    os.kill(pid, signal.SIGKILL)


def generate_until_it_fails(case: Case, harness: RolloutHarness) -> None:
    while True:
        case.rollout.generate_sequences(harness.prompts(*[4] * 64), SamplingParams(80, ignore_eos=True))


def unmapped_memory() -> set[str]:
    """Return the names of shared memory of Python's multiprocessing that no process maps."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped += maps.read_text()
    return {path.name for path in Path("/dev/shm").glob("psm_*") if path.name not in mapped}


def test_an_ended_server_leaves_no_shared_memory(started_case: Case) -> None:
    before = unmapped_memory()
    process = ServerProcess(started_case.rollout.config, {})
    process.wait(600)
    process.end()
    assert process.exit_report() == "was stopped"
    assert not unmapped_memory() - before


def test_server_follows_training_and_ends_with_it(tmp_path: Path) -> None:
    """After each update, greedy responses of the server equal those of the trained model."""
    name = {"actor_rollout_ref.rollout.name": "server"}
    kwargs = {"actor_rollout_ref.rollout.engine_kwargs": "{vllm_server_timeout: 600}"}
    responses = run_with_vllm(tmp_path, name | kwargs, steps=2)
    assert len(responses) == 2
    for step in responses:
        assert step.by_vllm == step.by_transformers
        assert step.metrics["rollout/http_retries"] == 0
        assert step.metrics["rollout/log_prob_diff_max"] < 1e-4
    assert responses[0].by_vllm != responses[-1].by_vllm
    gc.collect()
    assert not [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if serves(pid, tmp_path)]


def serves(pid: int, folder: Path) -> bool:
    """Return True if the process is a server of a model in this folder."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_text()
        return "api_server" in command and str(folder) in command
    return False
