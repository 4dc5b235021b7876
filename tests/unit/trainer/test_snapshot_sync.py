"""When the actor may overwrite a snapshot of its weights, from which a rollout that dies would load them again."""

from typing import Any, cast

from camshaft.controller import Pending
from camshaft.trainer.build import SnapshotSync


class Call:
    """A call that has not ended; `result` records that something waited for it."""

    def __init__(self, waits: list[str], name: str):
        self.waits, self.name = waits, name

    def result(self) -> str:
        self.waits.append(self.name)
        return self.name


class Sync(SnapshotSync):
    """Records the publications and the waits for calls in their order."""

    def __init__(self, snapshots: int):
        super().__init__(cast(Any, None), cast(Any, None), 1, snapshots)
        self.events: list[str] = []

    def _send(self, version: int) -> Pending[Any]:
        self.events.append(f"publish {version}")
        return cast(Any, Call(self.events, f"load {version}"))

    def probe(self, version: int) -> None:
        self.keep_for(cast(Any, Call(self.events, f"probe of {version}")))


def test_a_snapshot_is_kept_until_the_calls_that_need_it_have_ended() -> None:
    sync = Sync(snapshots=2)
    for version in (0, 1, 2, 2, 3):
        sync.start(version)
        sync.probe(version)
    ends_0, ends_1 = ["load 0", "probe of 0"], ["load 1", "probe of 1"]
    assert sync.events == ["publish 0", "publish 1", *ends_0, "publish 2", *ends_1, "publish 3"]
