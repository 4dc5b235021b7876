"""A rollout in a child process: equal tokens, verified weights, and bounded waits."""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faulty_rollouts import CRASHES, EXITS, FORGETS, HANGS, NAME, PRINTS, STARTS
from support.forked_python import fork_python
from support.processes import none_left_behind, still_running
from support.tiny import tiny_folder, tiny_rows
from torch import Tensor

from camshaft.config import EngineConfig, EngineModel, RolloutEngineConfig
from camshaft.device import with_device_index
from camshaft.engine import BaseEngine, build_engine
from camshaft.errors import ConfigError, RolloutError
from camshaft.ragged import Ragged
from camshaft.reshard import rollout_mode
from camshaft.rollout import BaseRollout, SamplingParams, build_rollout
from camshaft.rollout.process import rollout as module
from camshaft.rollout.process.rollout import ProcessRollout
from camshaft.rollout.weights.transport import SharedMemory
from camshaft.stop import STOP_SIGNALS
from camshaft.subprocesses import is_running, start_python

pytestmark = pytest.mark.timeout(240)

PROMPTS = Ragged.from_rows(tiny_rows([5, 3, 1]), torch.int64)
SAMPLING = SamplingParams(6, top_p=0.9)


def folder() -> str:
    """Return a model with more than one bucket of a megabyte, and with tensors larger than a bucket."""
    return str(tiny_folder(hidden=128, intermediate=2304))


def start(**options: Any) -> ProcessRollout:
    config = RolloutEngineConfig(model_path=folder(), update_weights_bucket_megabytes=1, seed=3, engine_kwargs=options)
    return ProcessRollout(config)


@pytest.fixture(scope="module", autouse=True)
def path() -> Iterator[None]:
    """Make the faulty rollout importable in the child process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        yield


@pytest.fixture(scope="module")
def faulty() -> ProcessRollout:
    """Return one rollout for all tests that leave its process alive. The process gets all stop signals at its start."""

    def start_and_stop(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start_python(*arguments, **options)
        for number in STOP_SIGNALS:
            process.send_signal(number)
        return process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "start_python", start_and_stop)
        return start(rollout=NAME)


@pytest.fixture
def engine() -> BaseEngine:
    engine = build_engine("reference", EngineConfig(model=EngineModel(path=folder())))
    engine.init_model()
    return engine


def pid_of(rollout: ProcessRollout) -> int:
    return rollout._child._process.pid


def generate(rollout: BaseRollout, first: int | None = None) -> list[Any]:
    prompts = PROMPTS if first is None else Ragged.from_rows([[first]], torch.int64)
    seeds = torch.arange(len(prompts))
    out = rollout.generate_sequences(prompts, SAMPLING, seeds)
    return [out.responses.values.tolist(), out.responses.lengths.tolist(), out.log_probs.values.tolist(),
            out.finished.tolist()]  # fmt: skip


def change(engine: BaseEngine) -> None:
    for _, weight in engine.named_weights():
        weight.data.mul_(1.3)


def test_output_equals_that_of_the_same_process(faulty: ProcessRollout, engine: BaseEngine) -> None:
    in_process = build_rollout("torch", RolloutEngineConfig(model_path=folder(), seed=3))
    outputs = []
    for _ in range(2):
        with rollout_mode(engine, faulty) as sync, rollout_mode(engine, in_process) as expected:
            assert (sync.digests, sync.bytes) == (expected.digests, expected.bytes)
            outputs.append(generate(faulty))
            assert outputs[-1] == generate(in_process)
        change(engine)
    assert outputs[0] != outputs[1]


def test_errors_of_the_rollout_are_forwarded(faulty: ProcessRollout, engine: BaseEngine) -> None:
    with rollout_mode(engine, faulty):
        with pytest.raises(RolloutError, match="row 1 has an empty prompt"):
            faulty.generate_sequences(Ragged.from_rows([[5], []], torch.int64), SAMPLING)
        with pytest.raises(RolloutError, match="no weight 'sideways'"):
            faulty.load_weights([("sideways", torch.ones(3))])
        with pytest.raises(RolloutError, match="load_weights"):
            generate(faulty)
    with pytest.raises(RolloutError, match="call wake_up"):
        generate(faulty)


def test_interrupted_weight_sync_leaves_no_weights(faulty: ProcessRollout, engine: BaseEngine) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        for number, weight in enumerate(engine.named_weights()):
            if number == 9:
                raise ZeroDivisionError("the engine broke")
            yield weight

    faulty.wake_up()
    with pytest.raises(ZeroDivisionError, match="the engine broke"):
        faulty.load_weights(broken())
    with pytest.raises(RolloutError, match="load_weights"):
        generate(faulty)
    faulty.load_weights(engine.named_weights())
    generate(faulty)


def test_weight_sync_during_sleep_is_rejected(faulty: ProcessRollout, engine: BaseEngine) -> None:
    faulty.sleep()
    for _ in range(2):
        with pytest.raises(RolloutError, match=r"the rollout is asleep: call wake_up\(\) before load_weights"):
            faulty.load_weights(engine.named_weights())
    faulty.wake_up()
    assert faulty.sync_dtype("of its own", torch.ones(1)) == torch.float32
    faulty.load_weights(engine.named_weights())
    generate(faulty)


def test_unreadable_shared_memory_is_an_error(
    faulty: ProcessRollout, engine: BaseEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty.wake_up()
    with monkeypatch.context() as patch:
        handle = SharedMemory.handle
        patch.setattr(SharedMemory, "handle", lambda sender: {**handle(sender), "inode": 0})
        with pytest.raises(RolloutError, match="the sender has ended"):
            faulty.load_weights(engine.named_weights())
    faulty.load_weights(engine.named_weights())
    generate(faulty)


@pytest.mark.slow
def test_error_of_the_weight_stream_takes_precedence() -> None:
    rollout = start()

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "model.norm.weight", torch.ones(128)
        os.kill(pid_of(rollout), signal.SIGKILL)
        assert still_running([pid_of(rollout)], seconds=5) == []
        raise ZeroDivisionError("the engine broke")

    with pytest.raises(ZeroDivisionError, match="the engine broke"):
        rollout.load_weights(broken())


def test_exception_in_the_child_has_its_traceback(faulty: ProcessRollout, engine: BaseEngine) -> None:
    with rollout_mode(engine, faulty):
        with pytest.raises(RolloutError, match=r'faulty_rollouts.py", line (.|\n)*ZeroDivisionError: boom'):
            generate(faulty, CRASHES)
        with pytest.raises(RolloutError, match=r"BrokenPipeError: the reader of the output is gone"):
            generate(faulty, PRINTS)
        generate(faulty)


def test_child_ignores_stop_signals_from_its_start_on(faulty: ProcessRollout) -> None:
    faulty.wake_up()
    assert is_running(pid_of(faulty))


def test_weights_of_another_sync_are_rejected(faulty: ProcessRollout, engine: BaseEngine) -> None:
    with rollout_mode(engine, faulty) as sync:
        generate(faulty, FORGETS)
    message = f"holds the weights of weight sync {sync.version}, not those of {sync.version + 1}"
    with pytest.raises(RolloutError, match=message), rollout_mode(engine, faulty):
        pytest.fail("generated with stale weights")
    faulty.wake_up()
    faulty.load_weights(engine.named_weights())
    generate(faulty)


@pytest.fixture(scope="module")
def killed() -> list[ProcessRollout]:
    """Return one rollout for each of the following tests, which kill its process."""
    options: list[dict[str, Any]] = [{"rollout": NAME}, {"rollout": NAME, "timeout": 2}, {"timeout": 1}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "start_python", fork_python)
        return [start(**some) for some in options]


@pytest.mark.alone
def test_killed_child_is_an_error_within_seconds(killed: list[ProcessRollout], engine: BaseEngine) -> None:
    rollout = killed[0]

    def generate_until_killed() -> None:
        threading.Timer(0.3, os.kill, (pid_of(rollout), signal.SIGKILL)).start()
        generate(rollout, HANGS)

    message = r"died in generate_sequences \(SIGKILL"
    with pytest.raises(RolloutError, match=message), rollout_mode(engine, rollout):
        generate_until_killed()
    with pytest.raises(RolloutError, match=r"has ended \(it died in generate_sequences\); build the rollout again"):
        rollout.wake_up()


@pytest.mark.slow
def test_exit_code_of_the_child_is_reported(engine: BaseEngine) -> None:
    rollout = start(rollout=NAME)
    rollout.load_weights(engine.named_weights())
    with pytest.raises(RolloutError, match=r"died in generate_sequences \(exit code 3\)"):
        generate(rollout, EXITS)


@pytest.mark.alone
def test_child_that_does_not_answer_is_killed(killed: list[ProcessRollout], engine: BaseEngine) -> None:
    rollout = killed[1]
    rollout.load_weights(engine.named_weights())
    with pytest.raises(
        RolloutError,
        match=r"generate_sequences: no answer from the generator's process \d+ for 2.* engine_kwargs.timeout=2",
    ):
        generate(rollout, HANGS)
    assert not is_running(pid_of(rollout))


@pytest.mark.alone
def test_child_that_does_not_read_is_killed(killed: list[ProcessRollout]) -> None:
    rollout = killed[2]
    os.kill(pid_of(rollout), signal.SIGSTOP)
    more_than_a_pipe_takes = Ragged.from_rows([torch.zeros(2**20, dtype=torch.int64)])
    with pytest.raises(
        RolloutError, match=r"generate_sequences: no answer .*suspended; `kill -CONT .* engine_kwargs.timeout=1"
    ):
        rollout.generate_sequences(more_than_a_pipe_takes, SAMPLING)
    assert not is_running(pid_of(rollout))
    with pytest.raises(RolloutError, match=r"has ended \(it did not read generate_sequences\)"):
        rollout.sleep()


@pytest.mark.slow
@pytest.mark.parametrize("doing", [HANGS, STARTS], ids=["busy", "idle"])
def test_child_and_its_children_end_with_the_parent(doing: int) -> None:
    code = f"""
import sys
from camshaft.config import EngineConfig, EngineModel, RolloutEngineConfig
from camshaft.ragged import Ragged
from camshaft.rollout import SamplingParams
from camshaft.rollout.process.rollout import ProcessRollout
from transformers import AutoModelForCausalLM
config = RolloutEngineConfig(model_path={folder()!r}, engine_kwargs={{"rollout": {NAME!r}}})
rollout = ProcessRollout(config)
rollout.load_weights(AutoModelForCausalLM.from_pretrained({folder()!r}).named_parameters())
print(rollout._child._process.pid, flush=True)
rollout.generate_sequences(Ragged.from_rows([[{doing}]]), SamplingParams(1))
import time
time.sleep(1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    lines = 1 if doing == HANGS else 2  # the second is a process that the rollout started
    children = [int(parent.stdout.readline()) for _ in range(lines)]
    assert all(map(is_running, children))
    parent.kill()
    parent.wait()
    assert still_running(children, seconds=10) == []


@pytest.mark.slow
def test_collected_rollout_ends_its_process() -> None:
    rollout = start()
    child = pid_of(rollout)
    assert is_running(child)
    del rollout
    gc.collect()
    assert still_running([child], seconds=5) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout": "tortch"}, "tortch"),
        pytest.param({"speed": 9}, r"accept no engine_kwargs, got \{'speed': 9\}", marks=pytest.mark.slow),
    ],
)
def test_failed_build_leaves_no_process(options: dict[str, Any], message: str) -> None:
    with none_left_behind(seconds=2), pytest.raises((ConfigError, RolloutError), match=message) as exc_info:
        start(**options)
    assert exc_info.tb is not None  # the traceback still references the rollout
    assert "Traceback" not in str(exc_info.value)


@pytest.mark.slow
def test_timeout_also_extends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 0.5)
    with pytest.raises(RolloutError, match=r"start: no answer .* increase the limit engine_kwargs.timeout=0.2"):
        start(timeout=0.2)
    start(timeout=200).wake_up()


def test_current_device_has_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    devices = [with_device_index(name) for name in ("cuda", "cuda:1", "cpu")]
    assert devices == [torch.device("cuda:3"), torch.device("cuda:1"), torch.device("cpu")]
