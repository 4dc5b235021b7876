"""Weight sync between an engine and a rollout, including the release of memory on devices that both share.

    from camshaft.reshard import rollout_mode
    with rollout_mode(engine, rollout) as sync:
        rollout.generate_sequences(...)
    sync.metrics()

`rollout_mode` is made of `enter` and `leave`, which a caller with several generations per sync uses directly.
`sync_weights` sends copies to a rollout that stays awake while the engine trains, and `load_verified` sends weights
without an engine.

    hybrid.py    syncs and verifies weights, and switches between training and generation
    snapshot.py  publishes weights in host memory for rollouts in other processes

The specification calls this the sharding manager. It depends on the interfaces `BaseEngine` and `BaseRollout` and on no
backend: any engine yields names and tensors, and any rollout loads them.
"""

from camshaft.reshard.hybrid import (
    Sync,
    asleep_after_error,
    enter,
    is_entered,
    leave,
    load_verified,
    rollout_mode,
    sync_weights,
)
from camshaft.reshard.snapshot import Publisher, Snapshot, SnapshotMemory, machine_id, receive, receive_base

__all__ = [
    "Publisher",
    "Snapshot",
    "SnapshotMemory",
    "Sync",
    "asleep_after_error",
    "enter",
    "is_entered",
    "leave",
    "load_verified",
    "machine_id",
    "receive",
    "receive_base",
    "rollout_mode",
    "sync_weights",
]
