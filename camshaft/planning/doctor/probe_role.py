"""The role of the ranks that `camshaft doctor --deep` starts."""

import torch
import torch.distributed as dist

from camshaft.controller import Dispatch, Worker, register


class Adder(Worker):
    """A role whose ranks add up a tensor on their devices."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self) -> int:
        """Return the sum of the ranks, counted from 1."""
        tensor = torch.tensor([self.rank + 1], device=self.device)
        if self.world > 1:
            dist.all_reduce(tensor)
        return int(tensor)
