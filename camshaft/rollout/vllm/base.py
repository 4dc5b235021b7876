"""What vLLM cannot do as asked, in the trainer's process (`rollout.py`) and as a server (`server_rollout`)."""

from __future__ import annotations

from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import RolloutError
from camshaft.models.loader import has_tokenizer
from camshaft.ragged import Ragged
from camshaft.rollout.base import SamplingParams
from camshaft.rollout.external import ExternalRollout, RowRequest
from camshaft.rollout.sampling import spread

COLDEST = 0.01
"""vLLM raises a lower temperature to this one."""


class BaseVLLMRollout(ExternalRollout):
    """See the map above."""

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        _check_quantization(config)

    def build_requests(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None) -> list[RowRequest]:
        self.ready()
        if not sampling.greedy and sampling.temperature < COLDEST:
            raise RolloutError(
                f"vLLM samples at temperatures of {COLDEST} and more, got {sampling.temperature}; use 0 for greedy"
            )
        if sampling.stop and not has_tokenizer(self.folder):
            raise RolloutError(f"{self.config.model_path} has no tokenizer, so no text in which to find stop strings")
        return super().build_requests(prompts, sampling, seeds)

    def seeds_of_call(self, num_rows: int, seeds: Tensor | None) -> Tensor:
        """What vLLM is told: it takes -1 for "no seed", and on a CPU torch draws from the low 32 bits of a seed alone.

        Those of the trainer's seeds do not depend on the run's, and come again every 256 steps.
        """
        return spread(super().seeds_of_call(num_rows, seeds)) & (2**63 - 1)


def _check_quantization(config: RolloutEngineConfig) -> None:
    """What is quantized on arrival may keep what was there before, and nothing here would notice."""
    asked = config.engine_kwargs.get("quantization")
    if asked is not None:
        raise RolloutError(
            f"engine_kwargs.quantization={asked}: take it out, weights are handed over as rollout.dtype={config.dtype} "
            "and generated with as they come"
        )
