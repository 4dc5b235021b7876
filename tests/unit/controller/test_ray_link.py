"""Replies of a Ray actor are returned in request order, regardless of the order in which Ray reports them."""

import queue
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from camshaft.controller import ray as on_ray
from camshaft.controller.network import PortMonitor
from camshaft.controller.process_pool import Inbox
from camshaft.controller.worker import RankInfo


class Actor:
    """An actor that returns the given futures, one per request."""

    def __init__(self, answers: list[Future[Any]]):
        coming = iter(answers)
        self.node = SimpleNamespace(remote=lambda: "node")
        self.stack_file = SimpleNamespace(remote=lambda: "stacks")
        self.answer = SimpleNamespace(remote=lambda payload: SimpleNamespace(future=lambda: next(coming)))

    def options(self, **_: Any) -> Any:
        return SimpleNamespace(remote=lambda *_: self)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Future[Any]]:
    futures: list[Future[Any]] = [Future() for _ in range(4)]
    monkeypatch.setattr(on_ray, "_ACTOR", Actor(futures))
    return futures


def arrived(inbox: Inbox) -> list[Any]:
    arrivals = []
    while not inbox.empty():
        arrivals.append(inbox.get_nowait())
    return arrivals


def test_results_precede_the_report_of_a_death(answers: list[Future[Any]]) -> None:
    inbox: Inbox = queue.SimpleQueue()
    link = on_ray.ActorProcess(RankInfo(3, 4, "cpu", 60.0), {}, inbox, PortMonitor())
    answers[0].set_result([b"at once"])
    for number in range(4):
        link.post(number)
    assert arrived(inbox) == [(3, [b"at once"])]
    answers[2].set_result([b"small"])
    assert arrived(inbox) == []
    answers[3].set_exception(RuntimeError("End of file"))
    assert link.exit_description() is None
    answers[1].set_result([b"large"])
    assert arrived(inbox) == [(3, [b"large"]), (3, [b"small"]), (3, None)]
    assert "without an exit status" in (link.exit_description() or "")
