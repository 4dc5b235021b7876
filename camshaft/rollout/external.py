"""What generators that are libraries of their own have in common: vLLM, its server, SGLang.

    class MyRollout(ExternalRollout):
        def generate_sequences(self, prompts, sampling, seeds=None):
            requests = self.build_requests(prompts, sampling, seeds)
            answers = my_library(requests, self.all_stop_ids(sampling))
            return self.build_generation(prompts, answers, seconds)

They copy weights, which are checked before the library sees them; they are given rows with a limit and a seed each,
and give back tokens and log-probs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import RolloutError
from camshaft.models.loader import load_config, model_folder
from camshaft.ragged import Ragged
from camshaft.rollout.base import BaseRollout, Generation, SamplingParams, refuse_load, refuse_use
from camshaft.rollout.shared_model import stop_ids_of
from camshaft.rollout.weights.checks import ExpectedWeights

CPU_CACHE_BYTES = 2**28
"""Keys and values on a CPU, where a share of all memory would be too much for each of several ranks."""


@dataclass(frozen=True)
class RowRequest:
    """One row: what it continues, how long it may get, and what it is drawn from."""

    prompt: list[int]
    limit: int
    seed: int


@dataclass(frozen=True)
class RowResponse:
    """One response."""

    tokens: list[int]
    log_probs: list[float]
    finished: bool
    cached: int
    """Tokens of the prompt that were not computed, because they were in the prefix cache."""


class ExternalRollout(BaseRollout):
    """See the map above."""

    keeps_tensors = False

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        self.expected = ExpectedWeights.of_folder(config)
        self.folder = model_folder(config.model_path)
        hf_config = load_config(self.folder, config.trust_remote_code, config.override_config)
        self.stop_ids = stop_ids_of(self.folder, hf_config, config.trust_remote_code)
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

    def build_requests(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None) -> list[RowRequest]:
        """What the library is asked for."""
        self.ready()
        limits = self.limits(prompts, sampling, self._num_embeddings).tolist()
        drawn = self.seeds_of_call(len(prompts), seeds).tolist()
        rows = [row.tolist() for row in prompts.rows()]
        return [RowRequest(*row) for row in zip(rows, limits, drawn, strict=True)]

    def build_generation(self, prompts: Ragged, answers: Sequence[RowResponse], seconds: float) -> Generation:
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


def reject_reserved(asked: Collection[str], arguments: Collection[str]) -> None:
    """`engine_kwargs` may add what is `asked` for to the `arguments` that the config makes, and may not replace one."""
    own = [name for name in sorted(asked) if name in arguments]
    if own:
        raise RolloutError(
            f"engine_kwargs sets {', '.join(own)}: take it out, the rollout and the model have keys for that, or it "
            "has to be as it is"
        )
