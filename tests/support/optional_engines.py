"""Engines that need another library, which only a separate environment has (`make test-megatron`, for example)."""

OPTIONAL_ENGINES = frozenset({"megatron", "torchtitan"})
