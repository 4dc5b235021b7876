"""A worker of `camshaft serve` that counts the commands that it executes.

with running_server(folder, worker=CountingWorker) as server:
    server.role.call("counts")                     # {"s:train:0": {"forward_backward": 3, "optimizer_step": 1}}
"""

from collections import Counter
from typing import Any

from camshaft.config.serve import ServeConfig
from camshaft.controller import Dispatch, register
from camshaft.roles.served import ServedWorker


class CountingWorker(ServedWorker):
    def __init__(self, config: ServeConfig):
        super().__init__(config)
        self._counts: dict[str, Counter[str]] = {}

    def forward_backward(self, model_id: str, rows: Any, loss: str, options: Any, forward_only: bool) -> Any:
        if not forward_only:
            self._counts.setdefault(model_id, Counter())["forward_backward"] += 1
        return super().forward_backward(model_id, rows, loss, options, forward_only)

    def optimizer_step(self, model_id: str, hyperparameters: Any) -> Any:
        self._counts.setdefault(model_id, Counter())["optimizer_step"] += 1
        return super().optimizer_step(model_id, hyperparameters)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of calls of each method, by model."""
        return {model_id: dict(counter) for model_id, counter in self._counts.items()}
