"""The engine contract."""
