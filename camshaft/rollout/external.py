"""Base class of rollouts that wrap a library with its own copy of the weights: vLLM, vLLM's server and SGLang.

    class MyRollout(ExternalRollout):
        def generate_sequences(self, prompts, sampling, seeds=None, generated=None):
            rows = self.start_rows(prompts, sampling, seeds, generated)
            responses = my_library(self.build_requests(rows), self.all_stop_ids(sampling))
            return rows.complete(self.build_generation(rows, responses, seconds))

These rollouts validate the weights and then copy them into the library. Each open row becomes a request with a length
limit and a seed. Each response contains tokens and log-probs.
"""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import RolloutError
from camshaft.models.loader import load_config, load_tokenizer, model_folder
from camshaft.ragged import Ragged
from camshaft.rollout.base import (
    BaseRollout,
    Generation,
    OpenRows,
    SamplingParams,
    check_can_generate,
    check_can_load,
    check_finite,
)
from camshaft.rollout.shared_model import load_stop_ids
from camshaft.rollout.stop_strings import StopStrings, has_stop
from camshaft.rollout.weights.checks import ExpectedWeights

CPU_CACHE_BYTES = 2**28
"""Default size of the KV cache on a CPU. A fraction of host memory per rank, as on a GPU, would be too large."""


@dataclass(frozen=True)
class RowRequest:
    """Request for one row: its prompt and earlier tokens, the maximum number of new tokens, and the row's seed."""

    prompt: list[int]
    limit: int
    seed: int


@dataclass(frozen=True)
class RowResponse:
    """Response to one prompt row."""

    tokens: list[int]
    log_probs: list[float]
    finished: bool
    num_cached: int
    """Number of prompt tokens served from the prefix cache."""


class ExternalRollout(BaseRollout):
    """Base class of rollouts that copy weights into an external library."""

    keeps_tensors = False

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        self.expected = ExpectedWeights.from_config(config)
        self.folder = model_folder(config.model_path)
        self.hf_config = load_config(self.folder, config.trust_remote_code, config.override_config)
        self.stop_ids = load_stop_ids(self.folder, self.hf_config, config.trust_remote_code)
        self._asleep = False

    @abstractmethod
    def has_weights(self) -> bool:
        """Return True if all weights are loaded."""

    def sync_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        return self.expected.dtype_of(name) or super().sync_dtype(name, tensor)

    def check_ready_to_load(self) -> None:
        check_can_load(self._asleep)

    def check_ready(self) -> None:
        check_can_generate(self._asleep, self.has_weights())

    def all_stop_ids(self, sampling: SamplingParams) -> list[int]:
        """Return all token ids that end a row.

        These are the model's end-of-sequence tokens, unless `ignore_eos` is set, and `sampling.stop_token_ids`.
        """
        return [*(() if sampling.ignore_eos else self.stop_ids), *sampling.stop_token_ids]

    def start_rows(
        self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None, generated: Ragged | None
    ) -> OpenRows:
        """Return the rows of a call that have not ended. Raise an error if the rollout cannot generate."""
        self.check_ready()
        vocab_size = self.hf_config.get_text_config().vocab_size
        strings = self.stop_strings(sampling) if generated is not None else None
        ends = partial(has_stop, stop_ids=self.all_stop_ids(sampling), stops=strings)
        return self.open_rows(prompts, sampling, seeds, generated, vocab_size, ends)

    def stop_strings(self, sampling: SamplingParams) -> StopStrings | None:
        """Return the search for stop strings, or None if there are no stop strings."""
        if not sampling.stop:
            return None
        return StopStrings(load_tokenizer(str(self.folder), self.config.trust_remote_code), sampling.stop)

    def build_requests(self, rows: OpenRows) -> list[RowRequest]:
        """Return one request per row."""
        contexts = [row.tolist() for row in rows.contexts.rows()]
        return [RowRequest(*row) for row in zip(contexts, rows.limits.tolist(), rows.seeds.tolist(), strict=True)]

    def build_generation(self, rows: OpenRows, responses: Sequence[RowResponse], seconds: float) -> Generation:
        """Build the `Generation` of the open rows from one response per row, in the order of the rows."""
        if not len(rows.prompts):
            return Generation.empty(rows.prompts)
        device = rows.prompts.values.device
        tokens = Ragged.from_rows([response.tokens for response in responses], torch.int64).to(device)
        log_probs = Ragged.from_rows([response.log_probs for response in responses], torch.float32).to(device)
        check_finite(log_probs)
        num_cached = sum(response.num_cached for response in responses)
        metrics = {
            "prompt_tokens_computed": float(len(rows.contexts.values) - num_cached),
            "prompt_tokens_cached": float(num_cached),
            "response_tokens": float(len(tokens.values)),
            "seconds": seconds,
        }
        finished = torch.tensor([response.finished for response in responses], device=device)
        return Generation(tokens, log_probs, finished, metrics)


def reject_reserved(engine_kwargs: Collection[str], arguments: Collection[str]) -> None:
    """Raise an error if `engine_kwargs` sets one of `arguments`, which the rollout derives from the config."""
    reserved = [name for name in sorted(engine_kwargs) if name in arguments]
    if reserved:
        raise RolloutError(
            f"engine_kwargs sets {', '.join(reserved)}, which camshaft derives from the config; remove it from "
            "engine_kwargs and set the corresponding key of rollout or model"
        )
