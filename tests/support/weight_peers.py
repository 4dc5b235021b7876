"""Peers of a weight transport in other processes, which the fork server starts.

receiver = Peer(receive_weights, 1)
assert receiver.hear() == "ready"
"""

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from camshaft.controller.local import PRELOAD
from camshaft.digest import digest
from camshaft.errors import RolloutError
from camshaft.rollout.weights.buckets import Assembler, Piece
from camshaft.rollout.weights.transport import Broadcast, Receiver, SharedMemory, open_receiver
from support.processes import start_fork_server


class Peer:
    """A process that runs `function(connection, *args)`."""

    def __init__(self, function: Callable[..., None], *args: Any):
        start_fork_server(*PRELOAD)
        self._connection, connection = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=function, args=(connection, *args), daemon=True)
        self.process.start()
        connection.close()  # the end of the process is then the end of the stream

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def tell(self, value: Any) -> None:
        self._connection.send(value)

    def hear(self) -> Any:
        """Return the next message, or None if the process has ended."""
        try:
            return self._connection.recv()
        except EOFError:
            return None

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._connection.close()


def receive_weights(connection: Connection, rank: int) -> None:
    """Open a receiver for each handle, and answer each bucket with the digests of its tensors, or with the error."""
    receiver: Receiver | None = None
    assembler = Assembler("cpu")
    connection.send("ready")
    while True:
        message = connection.recv()
        try:
            if "means" in message:
                receiver, assembler = open_receiver(message, rank=rank), Assembler("cpu")
                connection.send("open")
                continue
            assert receiver is not None
            pieces: list[Piece] = message["pieces"]
            tensors = assembler.unpack(pieces, receiver.pull(message["buffer"], message["used"]))
            connection.send({name: digest(tensor) for name, tensor in tensors})
        except RolloutError as error:
            connection.send(str(error))


def send_by_broadcast(connection: Connection, size: int) -> None:
    """Announce a broadcast, and report when the receiver has connected."""
    sender = Broadcast(torch.device("cpu"), size, "127.0.0.1", seconds=60)
    connection.send(sender.handle())
    sender.connect()
    connection.send("met")
    time.sleep(1000)


def share_memory(connection: Connection, size: int) -> None:
    """Announce shared memory that is filled with sevens."""
    sender = SharedMemory(size)
    for buffer in sender.buffers:
        buffer.fill_(7)
    connection.send(sender.handle())
    time.sleep(1000)
