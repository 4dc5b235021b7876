"""What the two ways to run vLLM (`rollout.py` beside this file, and `server_rollout`) have in common.

Both check weights before vLLM sees them, send it rows with a limit and a seed each, and get tokens and log-probs back.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import RolloutError
from camshaft.models.loader import has_tokenizer, load_config, model_folder
from camshaft.ragged import Ragged
from camshaft.rollout.arrivals import Expected
from camshaft.rollout.base import BaseRollout, Generation, SamplingParams, refuse_load, refuse_use
from camshaft.rollout.borrowed import stop_ids_of

COLDEST = 0.01
"""vLLM raises a lower temperature to this one."""


@dataclass(frozen=True)
class Request:
    """One row: what it continues, how long it may get, and what it is drawn from."""

    prompt: list[int]
    limit: int
    seed: int


@dataclass(frozen=True)
class Answer:
    """One response."""

    tokens: list[int]
    log_probs: list[float]
    finished: bool
    cached: int
    """Tokens of the prompt that were not computed, because they were in the prefix cache."""


class VLLMBase(BaseRollout):
    """See the map above."""

    keeps_tensors = False

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        _check_quantization(config)
        self.expected = Expected.of_folder(config)
        folder = model_folder(config.model_path)
        hf_config = load_config(folder, config.trust_remote_code, config.override_config)
        self.stop_ids = stop_ids_of(folder, hf_config, config.trust_remote_code)
        self._num_embeddings: int = hf_config.get_text_config().vocab_size
        self._asleep = False

    @abstractmethod
    def has_weights(self) -> bool:
        """Whether they came, all of them, since the last time that they were thrown away."""

    def arrival_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        return self.expected.dtype_of(name) or super().arrival_dtype(name, tensor)

    def ready_to_load(self) -> None:
        refuse_load(self._asleep)

    def ready(self) -> None:
        refuse_use(self._asleep, self.has_weights())

    def all_stop_ids(self, sampling: SamplingParams) -> list[int]:
        return [*(() if sampling.ignore_eos else self.stop_ids), *sampling.stop_token_ids]

    def requests(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None) -> list[Request]:
        """What vLLM is asked for; what it could not do as asked is an error."""
        self.ready()
        if not sampling.greedy and sampling.temperature < COLDEST:
            raise RolloutError(
                f"vLLM samples at temperatures of {COLDEST} and more, got {sampling.temperature}; use 0 for greedy"
            )
        if sampling.stop and not has_tokenizer(model_folder(self.config.model_path)):
            raise RolloutError(f"{self.config.model_path} has no tokenizer, so no text in which to find stop strings")
        limits = self.limits(prompts, sampling, self._num_embeddings).tolist()
        # vLLM takes -1 for "no seed".
        drawn = (self.seeds_of_call(len(prompts), seeds) & (2**63 - 1)).tolist()
        rows = [row.tolist() for row in prompts.rows()]
        return [Request(*row) for row in zip(rows, limits, drawn, strict=True)]

    def generation(self, prompts: Ragged, answers: Sequence[Answer], seconds: float) -> Generation:
        """The answers, one per prompt, as the contract wants them."""
        if not len(prompts):
            return Generation.empty(prompts)
        device = prompts.values.device
        responses = Ragged.from_rows([answer.tokens for answer in answers], torch.int64).to(device)
        log_probs = Ragged.from_rows([answer.log_probs for answer in answers], torch.float32).to(device)
        bad = log_probs.row_ids()[~log_probs.values.isfinite()]
        if len(bad):
            raise RolloutError(f"the model's logits are not finite for row {int(bad[0])}; look at the weights")
        cached = sum(answer.cached for answer in answers)
        metrics = {
            "prompt_tokens_computed": float(len(prompts.values) - cached),
            "prompt_tokens_cached": float(cached),
            "response_tokens": float(len(responses.values)),
            "seconds": seconds,
        }
        finished = torch.tensor([answer.finished for answer in answers], device=device)
        return Generation(responses, log_probs, finished, metrics)


def _check_quantization(config: RolloutEngineConfig) -> None:
    """What is quantized on arrival may keep what was there before, and nothing here would notice."""
    asked = config.engine_kwargs.get("quantization")
    if asked is not None:
        raise RolloutError(
            f"engine_kwargs.quantization={asked}: take it out, weights are handed over as rollout.dtype={config.dtype} "
            "and generated with as they come"
        )
