"""Messages between the reward manager and its workers: length-prefixed pickles.

    os.write(fd, pack([[sample.packed() for sample in call] for call in calls]))
    frames = FrameReader()
    for message in frames.feed(os.read(fd, 65536)): ...

To a worker: one `Spec`, then lists of calls. A call is a list of packed `Sample`s: one sample, or a batch for batched
functions. From a worker: `Loaded`, then one `Answer` per call, in order. Each sample is pickled separately, so that a
sample that cannot be unpickled fails without affecting others. Both ends belong to camshaft and run as the same user,
so pickle adds no risk beyond the reward function itself. Only the standard library is imported, because each worker
imports this module.
"""

import pickle
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

_HEAD = struct.Struct("<Q")


class Spec(NamedTuple):
    """Reward function to load, with its settings."""

    path: str | None
    """A .py file or a module; None: `name` is a built-in, an entry point or `module:function`."""
    name: str
    kwargs: dict[str, Any]
    timeout: float
    sys_path: list[str]
    """Module search path of the driver, added to that of the worker."""
    batched: bool | None = None
    """True if the function takes lists of samples; None: detect from its parameter names."""


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
    """Result of loading the function; `problem` is the error, or None."""

    problem: str | None
    batched: bool = False


class Reply(NamedTuple):
    """Result of one sample."""

    kind: str
    """`ok`, `error` (it raised) or `invalid` (not a finite number)."""
    score: float
    parts: dict[str, float]
    message: str = ""
    trace: str = ""
    answer: str | None = None
    """`pred` of a dict result as a string: the extracted answer."""


class Answer(NamedTuple):
    """Result of one call: a reply per sample, or a single reply if the call failed as a whole."""

    replies: list[Reply]
    seconds: float


def pack(message: Any) -> bytes:
    """Serialize a message with its length prefix."""
    body = pickle.dumps(message, protocol=5)
    return _HEAD.pack(len(body)) + body


class FrameReader:
    """Reassemble messages from received bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add received bytes and yield complete messages."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            end = _HEAD.size + _HEAD.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEAD.size : end])
            del self._buffer[:end]
            yield pickle.loads(body)
