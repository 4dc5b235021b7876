"""Environments in processes: faults cost their own episode, and nothing is left running."""

import os
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from camshaft import subprocesses
from camshaft.agents.callables import pickle_environments
from camshaft.agents.environment import Fault, Start, Turn
from camshaft.agents.messages import Source, Spec
from camshaft.agents.pool import EnvironmentPool
from camshaft.errors import RolloutError

NEIGHBOURS = (0, 2, 3)
FAULTY = 1
FAULTS = {
    "raise": "raise ValueError('no more pieces')",
    "exit": "raise SystemExit(3)",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "hang": "time.sleep(600)",
    "fork": "[os.fork() for _ in range(3)]; time.sleep(600)",
    "session": "subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)",
}
PROGRAM = """
import os, random, signal, subprocess, time


class Game:
    def reset(self, fault=None):
        self.fault, self.turn = fault, 0
        return f"{random.random()}"

    def step(self, answer):
        self.turn += 1
        if self.fault and self.turn == 2:
            FAULT
        return f"{answer} {self.turn} {random.random()}", float(self.turn), self.turn == 3
"""

Make = Callable[..., EnvironmentPool]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes a pool for a program with a fault."""
    pools: list[EnvironmentPool] = []

    def pool(fault: str = "pass", program: str = PROGRAM, workers: int = 1, timeout: float = 60.0) -> EnvironmentPool:
        file = tmp_path / f"game{len(pools)}.py"
        file.write_text(textwrap.dedent(program).replace("FAULT", fault))
        spec = Spec((Source("Game", f"{file}:Game"),), {}, timeout, 120.0, [])
        pools.append(EnvironmentPool(spec, workers, tmp_path / "output.log"))
        return pools[-1]

    yield pool
    for each in pools:
        each.close()


def starts(fault: Any = None) -> dict[int, Start]:
    return {number: Start({"fault": fault} if number == FAULTY else {}, row_seed=number) for number in range(4)}


def play(pool: EnvironmentPool, fault: Any = None) -> dict[int, list[Turn | Fault]]:
    """Play three turns of four episodes, without those that have failed."""
    turns: dict[int, list[Turn | Fault]] = {number: [turn] for number, turn in pool.reset(starts(fault)).items()}
    for step in range(3):
        running = [number for number, results in turns.items() if not isinstance(results[-1], Fault)]
        for number, turn in pool.step({number: f"{number}-{step}" for number in running}).items():
            turns[number].append(turn)
    pool.end(list(turns))
    return {number: [_untimed(turn) for turn in results] for number, results in turns.items()}


def _untimed(turn: Turn | Fault) -> Turn | Fault:
    return turn._replace(seconds=0) if isinstance(turn, Turn) else turn


def test_results_do_not_depend_on_the_number_of_processes(make: Make) -> None:
    assert play(make(workers=1)) == play(make(workers=3))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_its_episode_only(make: Make, fault: str) -> None:
    expected = play(make())
    pool = make(FAULTS[fault], timeout=3.0 if "sleep" in FAULTS[fault] else 60.0)
    turns = play(pool, fault=True)
    assert {number: turns[number] for number in NEIGHBOURS} == {number: expected[number] for number in NEIGHBOURS}
    *before, failed = turns[FAULTY]
    assert before == expected[FAULTY][:2]
    assert isinstance(failed, Fault)
    kinds = {"raise": "error", "exit": "error", "kill": "crash"}
    assert failed.kind == kinds.get(fault, "timeout")
    assert pool.num_failures == (2 if fault in kinds else 1)  # a time limit is not waited for twice
    pids = [process.pid for process in pool._processes]
    pool.close()
    assert not any(pid and os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_large_output_goes_to_a_file(make: Make, tmp_path: Path) -> None:
    pool = make("[os.write(1, b'x' * 999999 + b'\\n') for _ in range(100)]")
    assert not any(isinstance(turn, Fault) for turns in play(pool, fault=True).values() for turn in turns)
    pool.close()
    sizes = [file.stat().st_size for file in tmp_path.glob("output*.log")]
    assert 0 < sum(sizes) < 40e6


def test_a_failure_that_does_not_repeat_is_repaired(make: Make, tmp_path: Path) -> None:
    flag = tmp_path / "failed"
    pool = make(f"if not os.path.exists('{flag}'): open('{flag}', 'w').close(); raise OSError('busy')")
    assert play(pool, fault=True) == play(make())
    assert pool.num_failures == 1


def test_reset_is_repeated_once(make: Make) -> None:
    program = """
    class Game:
        def reset(self, fault=None):
            if fault:
                raise RuntimeError("no server")
        def step(self, answer):
            return answer, 0.0, False
    """
    pool = make(program=program)
    results = pool.reset(starts(True))
    assert isinstance(results[FAULTY], Fault)
    assert "no server" in str(results[FAULTY])
    assert pool.num_failures == 2
    assert all(isinstance(results[number], Turn) for number in NEIGHBOURS)


def test_an_environment_that_says_something_else_when_repeated_has_failed(make: Make) -> None:
    program = PROGRAM.replace('f"{answer} {self.turn} {random.random()}"', "str(time.time_ns())")
    turns = play(make(FAULTS["kill"], program), fault=True)
    assert any("did not say the same again" in str(turns[number][-1]) for number in NEIGHBOURS)


def test_time_limits_are_kept(make: Make) -> None:
    pool = make(FAULTS["hang"], timeout=2.0)
    assert play(pool, fault=True)[FAULTY][-1] == Fault("timeout", "no result within 2 s; the process was killed")
    pool = make(
        program=PROGRAM.replace("self.fault, self.turn", "time.sleep(600 * bool(fault)); self.fault, self.turn")
    )
    pool.spec = pool.spec._replace(start_timeout=3.0)
    results = pool.reset(starts(True))
    assert results[FAULTY] == Fault("timeout", "no result within 3 s; the process was killed")
    assert pool.num_failures == 2
    assert all(isinstance(results[number], Turn) for number in NEIGHBOURS)


def test_a_slow_call_is_named(make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(subprocesses, "REPORT_SECONDS", 0.3)
    play(make("time.sleep(0.7)"), fault=True)
    line = next(line for line in caplog.messages if "no answer" in line and "step of" in line)
    assert re.search(r"step of \S+game0.py:Game \(episode 1, process \d+, limit 60 s\) for 0 s", line)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("Game = 3", "an environment is a class"),
        (
            "class Game:\n    def __init__(self, size): ...\n    def reset(self): ...\n    def step(self, a): ...",
            "'size'",
        ),
        ("class Game:\n    def reset(self): ...", "no method step"),
        ("class Other: ...", "has no environment 'Game'"),
        ("class Gam:\n    def reset(self): ...\n    def step(self, a): ...", r"Set environment=\S+game0.py:Gam$"),
        ("import nonexistent_module", "nonexistent_module"),
    ],
)
def test_errors_of_loading_are_reported(make: Make, program: str, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        make(program=program).check()


def test_columns_of_reset_are_found(make: Make) -> None:
    loaded = make(program=PROGRAM.replace("fault=None", "level, seed, fault=None")).check()
    assert loaded.columns == ("level", "fault")
    assert loaded.required == ("level",)


def test_a_class_from_python_is_played(tmp_path: Path) -> None:
    word = "captured"

    class Local:
        def reset(self) -> str:
            return word

        def step(self, answer: str) -> tuple[None, float, bool]:
            return None, 1.0, True

    pool = EnvironmentPool(Spec(pickle_environments(Local), {}, 60.0, 120.0, []), 1, tmp_path / "output.log")
    turn = pool.reset({0: Start({})})[0]
    assert isinstance(turn, Turn)
    assert turn.said == word
    pool.close()


def test_a_class_that_cannot_be_pickled_is_an_error() -> None:
    lock = __import__("threading").Lock()

    class Locked:
        def reset(self) -> None:
            lock.acquire()

        def step(self, answer: str) -> Any: ...

    with pytest.raises(RolloutError, match="cannot be sent"):
        pickle_environments(Locked)


def test_the_traceback_of_a_fault_begins_in_the_environment(make: Make) -> None:
    program = "class Game:\n    def reset(self):\n        raise ValueError('x')\n    def step(self, answer): ..."
    fault = make(program=program).reset({0: Start({})})[0]
    assert isinstance(fault, Fault)
    frames = re.findall(r'File "(.+)"', fault.trace)
    assert [Path(frame).name for frame in frames] == ["game0.py"]
