"""Custom roles: an actor with another loss, a critic that counts its updates, and a class that is not a role."""

from typing import Any

from torch import Tensor

from camshaft.controller import Dispatch, Worker, register
from camshaft.dataproto import DataProto
from camshaft.engine import StepContext
from camshaft.reshard import Snapshot, machine_id
from camshaft.roles import ActorRolloutRefWorker, ActorWorker, CriticWorker, RolloutWorker


class DoubledActor(ActorWorker):
    """An actor with twice the PPO loss."""

    def _loss(self, source: Any, data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
        loss, ctx = super()._loss(source, data, predictions, ctx)
        ctx["metrics"]["doubled_loss"] = 2 * ctx["metrics"]["pg_loss"]
        return 2 * loss, ctx


class DoubledPolicy(ActorRolloutRefWorker):
    actor_class = DoubledActor


class ElsewhereRollout(RolloutWorker):
    """A rollout whose last rank is on another machine, and gets the bytes of the weights as the only one."""

    def is_elsewhere(self) -> bool:
        return self.rank_info.rank == self.rank_info.world - 1

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def machine(self) -> str:
        return "another machine" if self.is_elsewhere() else machine_id()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def receive_weights(self, snapshot: Snapshot) -> dict[str, float]:
        assert (snapshot.content is not None) == self.is_elsewhere()
        return super().receive_weights(snapshot)


class GeneratesElsewhere(ActorRolloutRefWorker):
    rollout_class = ElsewhereRollout


class CountingCritic(CriticWorker):
    updates = 0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto, seed: int = 0, presharded: bool = False) -> DataProto:
        result = super().update_critic(data, seed, presharded)
        self.updates += 1
        return result.with_meta(metrics=result.meta_info["metrics"] | {"critic/updates": float(self.updates)})


class NoRole(Worker):
    """A worker without the methods of a role."""
