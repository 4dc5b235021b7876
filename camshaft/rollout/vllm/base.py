"""Base class of the rollouts that generate with vLLM, either in the trainer's processes or over HTTP."""

from dataclasses import replace

from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import RolloutError
from camshaft.models.loader import has_tokenizer
from camshaft.ragged import Ragged
from camshaft.rollout.base import OpenRows, SamplingParams
from camshaft.rollout.external import ExternalRollout, RowRequest
from camshaft.rollout.sampling import mix_seeds

MIN_TEMPERATURE = 0.01
"""Minimum temperature of vLLM. vLLM silently increases lower temperatures to this value."""


class BaseVLLMRollout(ExternalRollout):
    """Base class that rejects options that vLLM does not support and converts seeds for vLLM."""

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        _check_quantization(config)

    def start_rows(
        self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None, generated: Ragged | None
    ) -> OpenRows:
        self.check_ready()
        if not sampling.greedy and sampling.temperature < MIN_TEMPERATURE:
            raise RolloutError(
                f"temperature={sampling.temperature} is unsupported by vLLM; use at least {MIN_TEMPERATURE}, or 0 for "
                "greedy decoding"
            )
        if sampling.stop and not has_tokenizer(self.folder):
            raise RolloutError(
                f"stop strings require a tokenizer, but {self.config.model_path} has none; use stop_token_ids"
            )
        return super().start_rows(prompts, sampling, seeds, generated)

    def build_requests(self, rows: OpenRows) -> list[RowRequest]:
        """Return requests with non-negative seeds whose 63 bits all depend on all bits of the original seeds.

        vLLM interprets -1 as "no seed", and torch uses only the low 32 bits of a seed on a CPU. The low 32 bits of the
        trainer's seeds do not depend on `trainer.seed` and repeat every 256 steps.
        """
        return super().build_requests(replace(rows, seeds=mix_seeds(rows.seeds) & (2**63 - 1)))


def _check_quantization(config: RolloutEngineConfig) -> None:
    """Reject quantization at load time, because a weight sync could silently leave old quantized weights in place."""
    quantization = config.engine_kwargs.get("quantization")
    if quantization is not None:
        raise RolloutError(
            f"engine_kwargs.quantization={quantization} is unsupported: the rollout receives and stores weights in "
            f"rollout.dtype={config.dtype}; remove quantization from engine_kwargs"
        )
