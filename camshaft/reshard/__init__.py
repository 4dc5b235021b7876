"""Between training and generation: weights go over, memory is handed on, and back again.

    from camshaft.reshard import rollout_mode
    with rollout_mode(engine, rollout) as sync:
        rollout.generate_sequences(...)
    sync.metrics()

This is what the specification calls the sharding manager. It knows the two interfaces and no backend: any
engine yields names and tensors, any rollout takes them.
"""

from camshaft.reshard.hybrid import Sync, hand_over, rollout_mode

__all__ = ["Sync", "hand_over", "rollout_mode"]
