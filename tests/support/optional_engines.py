"""Engines that need another library, which only a separate environment has (`make test-megatron`)."""

OPTIONAL_ENGINES = frozenset({"megatron"})
