"""Roles without a model that the controller contract runs on the ranks of a pool."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from camshaft.controller import Dispatch, Worker, register
from camshaft.dataproto import DataProto
from camshaft.seat import Seat


class Toy(Worker):
    """A data-parallel role with one method for each behavior that the contract tests."""

    def __init__(self, factor: float = 2.0, fail_on: int | None = None):
        if fail_on == self.rank:
            raise ValueError("no such model")
        self.factor = factor
        self.child: subprocess.Popen[bytes] | None = None

    # -- DP_COMPUTE_PROTO

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def scale(self, batch: DataProto, shift: float = 0.0) -> DataProto:
        scaled = batch["tokens"].map(lambda values: values * self.factor + shift)
        return DataProto({"scaled": scaled, "uid": batch["uid"]}, {"answered_by": self.seat.dp_rank})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows_seen(self, batch: DataProto) -> DataProto:
        return batch.with_columns(seen=torch.full((len(batch),), len(batch)))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def keep(self, batch: DataProto) -> None:
        self.batch = batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def same(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def mean(self, batch: DataProto) -> DataProto:
        return float(batch["x"].mean())  # pyright: ignore[reportReturnType]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def wait_for_file(self, batch: DataProto, folder: str) -> DataProto:
        """Wait until `folder` contains a file named after this rank, then return the batch.

        If the file contains text, raise a KeyError with this text.
        """
        file = Path(folder) / str(self.rank)
        while not file.exists():
            time.sleep(0.01)
        if text := file.read_text():
            raise KeyError(text)
        return batch

    # -- ONE_TO_ALL

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_factor(self, factor: float) -> float:
        self.factor = factor
        return factor + 100 * self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sum_over_ranks(self, value: float) -> float:
        total = torch.tensor(value + self.rank)
        if self.world > 1:
            dist.all_reduce(total)
        return total.item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, on_rank: int) -> None:
        if self.rank == on_rank:
            raise KeyError("weights of layer 3")
        if self.world > 1:
            dist.barrier()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_everywhere(self) -> None:
        raise KeyError("weights of layer 3")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stall(self, on_rank: int, seconds: float = 120.0) -> None:
        if self.rank == on_rank:
            time.sleep(seconds)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kill(self, on_rank: int) -> None:
        if self.rank == on_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def crash(self, on_rank: int) -> None:
        if self.rank == on_rank:
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(60)

    # -- RANK_ZERO, ALL_TO_ALL

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def calls_of_rank_zero(self) -> int:
        self.count = vars(self).get("count", 0) + 1
        return self.count

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def counts(self) -> Any:
        return vars(self).get("count", 0)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def echo(self, value: Any) -> Any:
        return self.rank, value

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def pids(self) -> Any:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def environment(self) -> Any:
        return os.environ.get("TOY"), os.environ.get("RANK"), torch.get_num_threads()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def start_child(self) -> Any:
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
        return self.child.pid

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def give_a_lambda(self) -> Any:
        return lambda: None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def log(self, text: str) -> None:
        logging.getLogger(__name__).info(text)
        os.system(f"echo of a child: {text}")

    def helper(self) -> None:
        """Do nothing. The driver cannot call this method, because it is not registered."""


class PairedToy(Toy):
    """A role in which pairs of ranks get the same slice of the rows, as with tensor parallelism.

    Only the first rank of each pair returns results.
    """

    @property
    def seat(self) -> Seat:
        return Seat(self.rank, self.world, self.rank // 2, self.world // 2, collects=self.rank % 2 == 0)


class TwoLayouts(PairedToy):
    """A role in which pairs of ranks get the same slice of the rows, except in `rows_seen`."""

    def seat_for(self, method: str) -> Seat:
        all_ranks = Seat(self.rank, self.world, self.rank, self.world)
        return all_ranks if method == "rows_seen" else self.seat


class LateToy(Toy):
    """A role whose seat is unknown until its model is built."""

    ready = False

    @property
    def seat(self) -> Seat:
        if not self.ready:
            raise RuntimeError("call init_model first")
        return Seat(self.rank, self.world, self.world - 1 - self.rank, self.world)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.ready = True
