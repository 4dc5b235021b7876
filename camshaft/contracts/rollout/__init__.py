"""The rollout contract."""
