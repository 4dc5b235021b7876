"""The messages between the reward manager and its workers: pickles with their length in front.

    os.write(fd, pack([[sample.packed() for sample in call] for call in calls]))
    frames = FrameReader()
    for message in frames.feed(os.read(fd, 65536)): ...

To a worker: one `Spec`, then lists of calls, each a list of packed `Sample`s: one sample, or a batch for a function
that takes batches. From a worker: `Loaded`, then one `Answer` per call, in order. A sample is a pickle of its own, so
that one which cannot be read fails alone. Both sides are ours and run as the same user, so pickle carries no risk that
the reward function itself does not. Standard library only: this is imported in each worker.
"""

import pickle
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

_HEAD = struct.Struct("<Q")


class Spec(NamedTuple):
    """Which function to load."""

    path: str | None
    """A .py file or a module; None: `name` is a built-in, an entry point or `module:function`."""
    name: str
    kwargs: dict[str, Any]
    timeout: float
    sys_path: list[str]
    """Where the driver finds modules; a worker looks there too."""
    batched: bool | None = None
    """Whether a call has lists of samples; None: its parameters tell."""


class Sample(NamedTuple):
    """The arguments of one call."""

    data_source: Any
    solution_str: str
    ground_truth: Any
    extra_info: Any

    def packed(self) -> bytes:
        return pickle.dumps(self, protocol=5)

    @staticmethod
    def unpacked(data: bytes) -> "Sample":
        return pickle.loads(data)


class Loaded(NamedTuple):
    """The function is there, or why it is not."""

    problem: str | None
    batched: bool = False


class Reply(NamedTuple):
    """What became of one sample."""

    kind: str
    """`ok`, `error` (it raised) or `invalid` (not a finite number)."""
    score: float
    parts: dict[str, float]
    message: str = ""
    trace: str = ""
    answer: str | None = None
    """The `pred` of a dict result, as text: what the response answers."""


class Answer(NamedTuple):
    """What one call gave: a reply for each of its samples, or a single one that says why it failed as a whole."""

    replies: list[Reply]
    seconds: float


def pack(message: Any) -> bytes:
    """One message as it travels."""
    body = pickle.dumps(message, protocol=5)
    return _HEAD.pack(len(body)) + body


class FrameReader:
    """Puts messages together from the bytes that arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete now."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            end = _HEAD.size + _HEAD.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEAD.size : end])
            del self._buffer[:end]
            yield pickle.loads(body)
