"""Backends of another package, as the config sees them: classes with `capabilities` and nothing else.

actor_rollout_ref.actor.strategy=support.own_backends:OwnEngine
"""

from pydantic import Field

from camshaft.config.engine import EngineCapabilities, EngineOptions
from camshaft.config.rollout import RolloutCapabilities


class OwnOptions(EngineOptions):
    pipeline_stages: int = Field(default=1, ge=1)
    context_parallel_size: int = Field(default=1, ge=1)
    ulysses_sequence_parallel_size: int = Field(default=1, ge=1)
    tensor_parallel_size: int = Field(default=1, ge=1)

    def ranks_per_row(self) -> int:
        return (
            self.pipeline_stages
            * self.context_parallel_size
            * self.ulysses_sequence_parallel_size
            * self.tensor_parallel_size
        )


class OwnEngine:
    capabilities = EngineCapabilities(options=OwnOptions, supports_lora=False)


class UndeclaredEngine:
    """Declares nothing: no options, any number of ranks."""


class OwnRollout:
    capabilities = RolloutCapabilities(supports_adapter=True, reads=frozenset({"load_format"}))
