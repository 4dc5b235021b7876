"""Messages between the driver and a worker process on one machine: pickles with their buffers apart.

    send(socket, pack(value))
    value = unpack(receive(socket))

Tensors of a `DataProto` and numpy arrays go from their own memory into the socket and arrive in writable
memory of their own, with no copy between.
"""

import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

Frames = Sequence[bytes | memoryview]


def pack(value: Any) -> Frames:
    """The pickle of `value`, then its buffers, which still share memory with it."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return [head, *(buffer.raw() for buffer in buffers)]


def unpack(frames: Frames) -> Any:
    return pickle.loads(frames[0], buffers=frames[1:])


def send(connection: socket.socket, frames: Frames) -> None:
    sizes = [len(frame) for frame in frames]
    connection.sendall(struct.pack(f"!Q{len(sizes)}Q", len(sizes), *sizes))
    for frame in frames:
        connection.sendall(frame)


def receive(connection: socket.socket) -> Frames:
    """The next message; `ConnectionError` if the other side is gone."""
    (count,) = struct.unpack("!Q", _read(connection, 8))
    sizes = struct.unpack(f"!{count}Q", _read(connection, 8 * count))
    return [_read(connection, size) for size in sizes]


def _read(connection: socket.socket, size: int) -> memoryview:
    view = np.empty(size, dtype=np.uint8).data  # not a bytearray: that would be filled with zeros first
    filled = 0
    while filled < size:
        received = connection.recv_into(view[filled:])
        if not received:
            raise ConnectionError("the other side of the connection is gone")
        filled += received
    return view
