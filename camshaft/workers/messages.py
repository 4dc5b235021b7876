"""Messages between a worker and its owner.

The owner sends the worker its setup, which may be any value, and then batches of requests. The worker sends `Started`,
then `Ready`, and then one `Reply` per request. Concurrent requests may be answered in any order, and others are
answered in order.

Messages are pickled. A payload that may fail to unpickle, such as an object of user code, is pickled by the caller, so
that it fails its own call only.
"""

from typing import Any, NamedTuple


class Request(NamedTuple):
    """A call for the worker to make."""

    id: int
    payload: Any


class Batch(NamedTuple):
    """Requests that are sent together."""

    requests: list[Request]
    timeout: float
    """Time limit of each call, in seconds. The worker cancels concurrent calls; the owner kills the worker."""
    concurrent: bool
    """True if the calls run at the same time, in an event loop."""


class Started(NamedTuple):
    """The process runs."""

    pid: int


class Ready(NamedTuple):
    """The setup is complete, or has failed."""

    value: Any


class Reply(NamedTuple):
    """Result of one request."""

    id: int
    value: Any
    """Result of the handler. If the call was cancelled, it is not valid."""
    seconds: float
    cancelled: bool = False
    """True if a concurrent call was cancelled at its time limit, even if it suppressed the cancellation."""
