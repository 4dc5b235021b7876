"""Run any rollout in a process of its own."""
