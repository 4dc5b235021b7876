"""The controller: one driver program calls roles that live on one or many ranks.

    from camshaft.controller import Dispatch, Worker, register, spawn, shutdown

    class Scaler(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def scale(self, batch: DataProto) -> DataProto: ...

    scaler = spawn(Scaler, world_size=2)      # for a type checker this is a Scaler
    out = scaler.scale(batch)                 # split by seat, run on both ranks, merged in order
    shutdown(scaler)

`dispatch.py` splits and merges (pure functions of the ranks' seats), `worker.py` is the base class of
roles, `group.py` the proxy, `local.py` the backend for one machine (`serve.py` and `wire.py` are its
worker process and its pipe). Nothing here knows of reinforcement learning.
"""

from camshaft.controller.dispatch import Dispatch, register
from camshaft.controller.group import shutdown, spawn, workers
from camshaft.controller.worker import Place, Worker

__all__ = ["Dispatch", "Place", "Worker", "register", "shutdown", "spawn", "workers"]
