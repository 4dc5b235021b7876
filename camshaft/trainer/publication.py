"""Sends the weights of the actor to a rollout on devices of its own."""

from typing import Any

from camshaft.reshard import Snapshot
from camshaft.roles import ActorRolloutRefWorker, RolloutWorker


class Publication:
    """The path of the weights: the actor publishes snapshots in host memory, and the rollout loads them.

    Each machine of the actor has a snapshot. To other machines, the driver sends the bytes.
    """

    def __init__(self, actor: ActorRolloutRefWorker, rollout: RolloutWorker, actor_ranks: int):
        self._actor, self._rollout, self._actor_ranks = actor, rollout, actor_ranks
        self._readers: set[str] = set()
        """Machines of the rollout."""

    def send(self, version: int) -> dict[str, float]:
        """Publish the weights of the actor as `version`, wait until the rollout has them, and return the metrics."""
        if not self._readers:
            self._actor.set_published_dtypes(self._rollout.sync_dtypes(self._actor.weight_dtypes()))
            self._readers = set(self._rollout.machine())
        publish: Any = self._actor.publish  # takes and returns one value for each rank
        snapshots: list[Snapshot] = [each for each in publish([version] * self._actor_ranks) if each is not None]
        if self._readers - {snapshot.machine for snapshot in snapshots}:
            snapshots.append(self._actor.portable_snapshot())
        return self._rollout.receive_weights(snapshots)
