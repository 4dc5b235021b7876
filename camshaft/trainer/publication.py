"""Sends the weights of the actor to a rollout on devices of its own."""

from typing import Any

from camshaft.config import Topology
from camshaft.roles import ActorRolloutRefWorker, RolloutWorker
from camshaft.trainer.metrics import merge_ranks


class Publication:
    """The path of the weights: the actor publishes a snapshot in host memory, and the rollout loads it."""

    def __init__(self, actor: ActorRolloutRefWorker, rollout: RolloutWorker, topology: Topology):
        self._actor, self._rollout = actor, rollout
        self._ranks, self._readers = topology.world_size, topology.rollout_topology().world_size
        self._has_dtypes = False

    def send(self, version: int) -> dict[str, float]:
        """Publish the weights of the actor as `version`, wait until the rollout has them, and return the metrics."""
        if not self._has_dtypes:
            self._actor.set_published_dtypes(self._rollout.sync_dtypes(self._actor.weight_dtypes()))
            self._has_dtypes = True
        publish: Any = self._actor.publish  # of each rank
        snapshots = [snapshot for snapshot in publish([version] * self._ranks) if snapshot is not None]
        receive: Any = self._rollout.receive_weights
        return merge_ranks(receive([snapshots] * self._readers))
