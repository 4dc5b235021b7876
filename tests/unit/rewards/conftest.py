"""Reward functions in files, scored by real processes; the tests fail if a process outlives them."""

import textwrap

import pytest
from support.clock import EventClock
from support.processes import marked, none_left_behind, process_name

from camshaft.dataproto import DataProto, Ragged
from camshaft.rewards import pool
from camshaft.rewards.manager import RewardManager
from camshaft.workers import worker


@pytest.fixture(autouse=True)
def mark():
    """Mark all processes that the test starts, and fail if one is left."""
    with none_left_behind() as mark:
        yield mark


@pytest.fixture
def clock(tmp_path, monkeypatch):
    """Let `clock.event` in a reward function exceed the time limits of calls, 20 s by default, of all workers."""
    clock = EventClock(tmp_path / "events")
    monkeypatch.setattr(pool, "time", clock)
    monkeypatch.setattr(worker, "time", clock)
    return clock


@pytest.fixture
def file(tmp_path):
    """Write the body of a module and return its path."""

    def write(body: str, name: str = "my_reward.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(body))
        return str(tmp_path / name)

    return write


@pytest.fixture
def manager(file):
    """Return a manager of `compute_score(data_source, solution_str, ground_truth, extra_info)` with this body."""
    opened = []

    def make(body: str, head: str = "def", **options) -> RewardManager:
        lines = textwrap.indent(textwrap.dedent(body), "    ")
        source = f"{head} compute_score(data_source, solution_str, ground_truth, extra_info=None):\n{lines}"
        opened.append(RewardManager(file(source), **({"num_workers": 2, "timeout": 20.0} | options)))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def batch_of(texts: list[str], truths: list | None = None, extra_info: list | None = None) -> DataProto:
    """Build responses whose tokens are the characters of `texts`."""
    columns = {
        "responses": Ragged.from_rows([[ord(c) for c in text] for text in texts]),
        "data_source": ["test"] * len(texts),
        "ground_truth": truths or [""] * len(texts),
    }
    return DataProto.from_dict(columns | ({"extra_info": extra_info} if extra_info else {}))


def decode(rows: list[list[int]]) -> list[str]:
    return ["".join(map(chr, row)) for row in rows]


@pytest.fixture
def score():
    """Score texts with a manager."""

    def score(manager: RewardManager, texts: list[str], **columns):
        return manager.score(batch_of(texts, **columns), decode)

    return score


@pytest.fixture
def alive(mark):
    """Return the running worker processes of this test and their children, without guards."""
    return lambda: [pid for pid in marked(mark) if process_name(pid) != "camshaft-guard"]
