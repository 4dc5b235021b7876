"""A clock that a process sets ahead, for time limits that a module measures with `time.monotonic`.

clock = EventClock(tmp_path / "events")
monkeypatch.setattr(worker, "time", clock)
f"if is_odd: {clock.event}; time.sleep(600)"     # code of any process, which then exceeds a time limit of 20 s
"""

import time
from pathlib import Path
from typing import Any


class EventClock:
    """The module `time`, with a monotonic clock that is ahead by `seconds` for each event."""

    def __init__(self, file: Path, seconds: float = 30.0):
        self._file, self.seconds = file, seconds
        self.event = f"__import__('time').sleep(0.1); open({str(file)!r}, 'a').write('x')"
        """Code of an event. Before it, the owner of the process has time to read earlier replies."""
        file.touch()

    def advance(self) -> None:
        """Add an event."""
        with self._file.open("a") as file:
            file.write("x")

    @property
    def num_events(self) -> int:
        return self._file.stat().st_size

    def monotonic(self) -> float:
        return time.monotonic() + self.seconds * self.num_events

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
