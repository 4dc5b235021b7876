"""Programs in processes: faults cost their own episode, and nothing is left running."""

import json
import os
import re
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.fake_endpoint import CLIENT, FakeEndpoint

from camshaft import subprocesses
from camshaft.agents.callables import pickle_environments
from camshaft.agents.environment import Start
from camshaft.agents.episode import Episode
from camshaft.agents.jobs import ProgramSpec, last_reward
from camshaft.agents.messages import Source
from camshaft.agents.play import Question
from camshaft.agents.programs import ProgramPool
from camshaft.errors import RolloutError
from camshaft.plugins import is_function

SLEEP = "['sleep', '6054.5']"
"""A command line that no other process has."""
FAULTS = {
    "raise": "raise ValueError('no more pieces')",
    "exit": "sys.exit(3)",
    "os_exit": "os._exit(0)",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "kill_guard": f"subprocess.Popen({SLEEP}); os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)",
    "word": "return 'good'",
    "hang": "time.sleep(600)",
    "spin": "while True: pass",
    "fork": f"[os.fork() or os.setsid() for _ in range(2)]; os.execvp('sleep', {SLEEP})",
    "session": f"subprocess.Popen({SLEEP}, start_new_session=True); time.sleep(600)",
}
LIMITED = ("hang", "spin", "fork", "session")
HARMLESS = {
    "nothing": "pass",
    "leave": f"subprocess.Popen({SLEEP}, start_new_session=True)",
}
SOLVE = """
import signal, subprocess, sys, time


def solve(base_url, api_key, fault, seed, row_seed, prompt):
    messages = list(prompt)
    for turn in range(3):
        if turn == 2:
            FAULT
        answer = ask(messages)
        messages.append({"role": "user", "content": f"{answer} {seed} {row_seed}"})
    return len(messages) + 0.5
"""

Make = Callable[..., ProgramPool]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes a pool for a program with a fault."""
    pools: list[ProgramPool] = []

    def pool(fault: str = "pass", program: str = SOLVE, target: str = "", timeout: float = 60.0) -> ProgramPool:
        file = tmp_path / f"agent{len(pools)}.py"
        file.write_text(CLIENT + program.replace("FAULT", fault))
        source = Source("", target.replace("FILE", str(file)) or f"{file}:solve")
        pools.append(ProgramPool(ProgramSpec(source, timeout, 60.0, 16, []), tmp_path / "output.log"))
        return pools[-1]

    yield pool
    for each in pools:
        each.close()


def questions(faults: Sequence[str] = ("nothing",) * 4) -> list[Question]:
    rows = [{"fault": fault, "prompt": [{"role": "user", "content": "q"}]} for fault in faults]
    return [
        Question(row["prompt"], Start(row, seed=7, row_seed=number), sampling_seed=number)
        for number, row in enumerate(rows)
    ]


def play(pool: ProgramPool, faults: Sequence[str] = ("nothing",) * 4, **options: Any) -> list[Episode]:
    with FakeEndpoint(**options) as endpoint:
        sessions = pool.play(endpoint, questions(faults))
        assert not endpoint.sessions
    assert all(len(episodes) == 1 for episodes in sessions)
    for (episode,) in sessions:
        episode.seconds = 0.0
    return [episode for (episode,) in sessions]


def left_running() -> list[str]:
    """Return the processes that the faults have started."""
    found: list[str] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"6054.5" in command and b"sleep" in command.split(b"\0")[0]:
            found.append(pid)
    return found


def test_programs_play_their_episodes(make: Make) -> None:
    episodes = play(make())
    for number, episode in enumerate(episodes):
        assert (episode.turns, episode.stop_reason, episode.fault) == (3, "done", None)
        assert episode.rewards == [0.0] * 11 + [7.5]
        assert episode.messages[2]["content"].endswith(f" 7 {number}")
    assert len({tuple(episode.tokens) for episode in episodes}) == 4


def test_an_async_program_gives_the_same_episodes(make: Make) -> None:
    assert play(make(program=SOLVE.replace("def solve", "async def solve"))) == play(make())


def test_a_command_reads_the_row_and_prints_its_reward(make: Make) -> None:
    program = """
    import sys
    row = json.load(sys.stdin)
    assert sys.argv[1:] == [os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]]
    messages = list(row["prompt"])
    for _ in range(3):
        answer = ask(messages, *sys.argv[1:])
        messages.append({"role": "user", "content": f"{answer} {row['seed']} {row['row_seed']}"})
    print("finished", {"reward": None})
    print(json.dumps({"reward": len(messages) + 0.5}))
    print("bye")
    """
    program = "\n".join(line[4:] for line in program.splitlines())
    assert play(make(program=program, target="python FILE {base_url} {api_key}")) == play(make())


def test_a_slow_program_is_named(make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(subprocesses, "REPORT_SECONDS", 0.3)
    play(make("time.sleep(1 if fault == 'slow' else 0)"), ["nothing", "slow"])
    named = re.compile(
        r"no answer from the program \S+agent0.py:solve of episode 1 \(has run for \d s, no request for "
    )
    lines = [line for line in caplog.messages if named.search(line)]
    assert lines
    assert "launcher" not in lines[-1]


def test_a_fault_costs_its_episode_only(make: Make) -> None:
    faults = [*HARMLESS, *FAULTS]
    expected = play(make(), ["nothing"] * len(faults))
    branches = "".join(
        f"elif fault == '{fault}':\n                {code}\n            " for fault, code in (FAULTS | HARMLESS).items()
    )
    pool = make(branches.removeprefix("el"), timeout=5.0)
    episodes = dict(zip(faults, play(pool, faults), strict=True))
    for number, fault in enumerate(faults):
        episode = episodes[fault]
        if fault in HARMLESS:
            assert episode == expected[number]
            continue
        assert episode.fault is not None
        assert (episode.stop_reason, sum(episode.rewards)) == ("error", 0)
        assert episode.tokens == expected[number].tokens[:8]
        kinds = {"kill": "crash", "kill_guard": "crash", **dict.fromkeys(LIMITED, "timeout")}
        assert episode.fault.kind == kinds.get(fault, "error"), episode.fault
    assert pool.num_failures == 2 * len(FAULTS) - len(LIMITED)  # a time limit is not waited for twice
    assert not left_running()


@pytest.mark.parametrize("megabytes", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_a_large_output_goes_to_a_file(make: Make, tmp_path: Path, megabytes: int) -> None:
    pool = make(f"if row_seed == 1: [os.write(1, b'x' * 999999 + b'\\n') for _ in range({megabytes})]")
    assert play(pool) == play(make())
    pool.close()
    sizes = [file.stat().st_size for file in tmp_path.glob("output*.log")]
    assert 0 < sum(sizes) < 40e6


def test_a_command_that_prints_much_keeps_its_reward(make: Make) -> None:
    program = "ask([{'role': 'user', 'content': 'q'}])\nprint('x' * 199_999)\nprint(2)"
    assert [sum(episode.rewards) for episode in play(make(program=program, target="python FILE"))] == [2.0] * 4


def test_a_failure_that_does_not_repeat_is_repaired(make: Make, tmp_path: Path) -> None:
    flag = tmp_path / "failed"
    pool = make(f"if not os.path.exists('{flag}'): open('{flag}', 'w').close(); raise OSError('busy')")
    assert play(pool) == play(make())
    assert pool.num_failures == 1


def test_the_end_of_an_episode_is_no_fault(make: Make) -> None:
    pool = make()
    episodes = play(pool, max_turns=2)
    assert {(episode.stop_reason, episode.turns, episode.fault) for episode in episodes} == {("turns", 2, None)}
    assert pool.num_failures == 0


def test_a_program_without_a_request_has_failed(make: Make) -> None:
    pool = make(program="def solve(base_url, api_key):\n    return 1.0")
    assert {str(episode.fault) for episode in play(pool)} == {
        "error: the program has ended without a request to base_url"
    }


def test_a_program_gets_nothing_of_the_environment_of_the_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("LC_ALL", "C")
    names = "{'PATH', 'HOME', 'LC_ALL', 'OPENAI_BASE_URL', 'OPENAI_API_KEY', 'CAMSHAFT_PROGRAM'}"
    program = f"""
def solve(base_url, api_key):
    ask([{{"role": "user", "content": "q"}}])
    assert {names} <= set(os.environ), os.environ
    for text in ("".join(os.environ), open("/proc/self/environ").read()):
        assert "WANDB" not in text and "PYTHONPATH" not in "".join(os.environ)
    return 1.0
"""
    assert [episode.fault for episode in play(make(program=program))] == [None] * 4


def test_the_time_of_an_episode_is_limited(make: Make) -> None:
    pool = make("if fault == 'hang': time.sleep(600)")
    with FakeEndpoint() as endpoint:
        sessions = pool.play(endpoint, questions(["nothing", "hang"]), episode_timeout=4.0)
    assert [episodes[0].stop_reason for episodes in sessions] == ["done", "timeout"]
    assert sessions[1][0].turns == 2
    assert pool.num_failures == 0


KILL_GUARD_OF_LAUNCHER = """
def solve(base_url, api_key):
    import os, signal, subprocess, time
    pid = os.getpid()
    for _ in range(3):  # the guard of the program, the launcher, and its guard
        pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    subprocess.Popen(SLEEP, start_new_session=True)
    os.kill(pid, signal.SIGKILL)
    time.sleep(600)
"""


def test_programs_end_with_a_killed_guard_of_their_launcher(make: Make) -> None:
    (episode,) = play(make(program=KILL_GUARD_OF_LAUNCHER.replace("SLEEP", SLEEP)), ["nothing"])
    assert episode.fault is not None
    assert "the process that starts programs" in episode.fault.message
    assert not left_running()


def test_a_program_that_cannot_be_started_has_failed(make: Make) -> None:
    limit = "import os, resource\ncount = len(os.listdir('/proc/self/fd'))\n"
    limit += "resource.setrlimit(resource.RLIMIT_NOFILE, (count + 1, count + 1))\n"  # a program has two pipes
    pool = make(program=limit + SOLVE)
    (episode,) = play(pool, ["nothing"])
    assert episode.fault is not None
    assert "the program could not be started: [Errno 24] Too many open files" in str(episode.fault)
    assert pool.num_failures == 2  # it was repeated


@pytest.mark.timeout(60)
def test_a_reward_beyond_all_floats_is_a_fault(make: Make) -> None:
    program = "ask([{'role': 'user', 'content': 'q'}])\nprint(10**400)"
    (episode,) = play(make(program=program, target="python FILE"), ["nothing"])
    assert "the result of the program is 1000" in str(episode.fault)


@pytest.mark.timeout(60)
def test_what_a_program_writes_to_other_pipes_costs_its_episode(make: Make) -> None:
    program = """
def solve(base_url, api_key, fault, prompt):
    ask(list(prompt))
    for number in range(3, 64) if fault == "write" else ():
        try:
            os.write(number, b'{"fault": 3}')
        except OSError:
            pass
    if fault == "write":
        os._exit(0)
"""
    pool = make(program=program)
    first, second = play(pool, ["nothing", "write"])
    assert first.fault is None
    assert second.fault is not None
    assert second.fault.kind == "error"


def test_deeply_nested_output_has_no_reward() -> None:
    assert last_reward(b"0.5\n" + b"[" * 100_000) == 0.5


@pytest.mark.parametrize(
    ("program", "target", "message"),
    [
        ("solve = 3", "", "a program is a function"),
        ("def solve(question): ...", "", "no parameter base_url"),
        ("def other(base_url): ...", "", "has no program 'solve'"),
        ("def a(): ...\ndef b(): ...", "FILE", r"has more than one program; it defines ask, a, b\."),
        ("import nonexistent_module", "", "nonexistent_module"),
        ("", "nonexistent-program --url {base_url}", "there is no program"),
    ],
)
def test_errors_of_loading_are_reported(make: Make, program: str, target: str, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        make(program=program, target=target).check()


def test_columns_of_a_program_are_found(make: Make) -> None:
    loaded = make().check()
    assert loaded.columns == loaded.required == ("fault", "prompt")
    loaded = make(program="def solve(base_url, level=1, **row): ...").check()
    assert (loaded.columns, loaded.required) == (None, ())
    assert make(target="python FILE").check().columns is None


def test_a_function_from_python_is_played(tmp_path: Path) -> None:
    value = 0.25

    def solve(base_url: str, api_key: str, prompt: list[Any]) -> float:
        data = json.dumps({"messages": prompt}).encode()
        request = urllib.request.Request(f"{base_url}/chat/completions", data, {"Authorization": f"Bearer {api_key}"})
        with urllib.request.urlopen(request) as response:
            assert response.status == 200
        return value

    (source,) = pickle_environments(solve)
    pool = ProgramPool(ProgramSpec(source, 60.0, 60.0, 4, []), tmp_path / "output.log")
    assert [sum(episode.rewards) for episode in play(pool)] == [0.25] * 4
    pool.close()


def test_targets_are_functions_or_commands() -> None:
    functions = ["agent.py:solve", "agents/agent.py", "my_package.agent:solve", "/a/b.py:f"]
    commands = ["python agent.py {base_url}", "./agent", "node agent.js", "agent"]
    assert [is_function(target) for target in functions + commands] == [True] * 4 + [False] * 4
