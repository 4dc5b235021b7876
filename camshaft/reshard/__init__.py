"""Weight sync between an engine and a rollout that share devices, including the release of memory on both sides.

    from camshaft.reshard import rollout_mode
    with rollout_mode(engine, rollout) as sync:
        rollout.generate_sequences(...)
    sync.metrics()

    hybrid.py    syncs and verifies weights, and switches between training and generation

The specification calls this the sharding manager. It depends on the interfaces `BaseEngine` and `BaseRollout` and on no
backend: any engine yields names and tensors, and any rollout loads them.
"""

from camshaft.reshard.hybrid import Sync, rollout_mode, sync_weights

__all__ = ["Sync", "rollout_mode", "sync_weights"]
