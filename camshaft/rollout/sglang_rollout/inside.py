"""The generator in the process that `SGLangRollout` starts: what the contract asks for, in terms of SGLang.

Nobody builds it elsewhere: an engine of SGLang's kills the children of its process, and the process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import RolloutError
from camshaft.models.loader import load_config, load_tokenizer, model_folder
from camshaft.ragged import Ragged
from camshaft.rollout.arrivals import Expected
from camshaft.rollout.base import BaseRollout, Generation, SamplingParams, refuse_load, refuse_use
from camshaft.rollout.borrowed import stop_ids_of
from camshaft.rollout.sglang_rollout.engine import Answer, Request, SGLangEngine
from camshaft.rollout.stops import StopStrings, cut_at_strings


class InsideRollout(BaseRollout):
    """See the map above. `seeds` decide each row's samples, as they do for the built-in generator."""

    keeps_tensors = False

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        self.expected = Expected.of_folder(config)
        self._folder = model_folder(config.model_path)
        hf_config = load_config(self._folder, config.trust_remote_code, config.override_config)
        self.stop_ids = stop_ids_of(self._folder, hf_config, config.trust_remote_code)
        self._num_embeddings: int = hf_config.get_text_config().vocab_size
        self._digests: dict[str, int] | None = None
        self._asleep = False
        self.engine = SGLangEngine(config)

    # -- weights --------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        refuse_load(self._asleep)
        self._digests = None
        came: dict[str, str] = {}
        digests = self.engine.load(self._under_own_names(self.expected.checked(weights), came))
        self._digests = {name: digests[own] for name, own in came.items()}

    def _under_own_names(
        self, weights: Iterable[tuple[str, Tensor]], came: dict[str, str]
    ) -> Iterator[tuple[str, Tensor]]:
        """In the dtype that the model computes with; a tied weight once, under the name of the embedding."""
        passed: set[str] = set()
        for name, tensor in weights:
            weight = self.expected.weights[name]
            own = came[name] = weight.names[0]
            if own not in passed:
                passed.add(own)
                yield own, tensor.to(weight.empty.dtype)

    def weight_digests(self) -> Mapping[str, int]:
        """Of what the model of SGLang holds, and for weights that it makes others of, of what arrived there."""
        self._ready()
        assert self._digests is not None
        return self._digests

    def arrival_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        return self.expected.dtype_of(name) or super().arrival_dtype(name, tensor)

    def _ready(self) -> None:
        refuse_use(self._asleep, self._digests is not None)

    # -- memory ---------------------------------------------------------------------------------------

    def sleep(self) -> None:
        self.engine.sleep()
        self._asleep, self._digests = True, None

    def wake_up(self) -> None:
        self.engine.wake_up()
        self._asleep = False

    # -- tokens ---------------------------------------------------------------------------------------

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        start = time.perf_counter()
        self._ready()
        limits = self.limits(prompts, sampling, self._num_embeddings).tolist()
        drawn = self.seeds_of_call(len(prompts), seeds).tolist()
        if not len(prompts):
            return Generation.empty(prompts)
        rows = [row.tolist() for row in prompts.rows()]
        requests = [Request(*row) for row in zip(rows, limits, drawn, strict=True)]
        stop_ids = [*(() if sampling.ignore_eos else self.stop_ids), *sampling.stop_token_ids]
        generation = self._generation(prompts, self.engine.generate(requests, sampling, stop_ids))
        if sampling.stop:
            tokenizer = load_tokenizer(str(self._folder), self.config.trust_remote_code)
            generation = cut_at_strings(generation, StopStrings(tokenizer, sampling.stop))
        generation.metrics["seconds"] = time.perf_counter() - start
        return generation

    def _generation(self, prompts: Ragged, answers: list[Answer]) -> Generation:
        responses = Ragged.from_rows([answer.tokens for answer in answers], torch.int64)
        log_probs = Ragged.from_rows([answer.log_probs for answer in answers], torch.float32)
        bad = log_probs.row_ids()[~log_probs.values.isfinite()]
        if len(bad):
            raise RolloutError(f"the model's logits are not finite for row {int(bad[0])}; look at the weights")
        cached = sum(answer.cached for answer in answers)
        metrics = {
            "prompt_tokens_computed": float(len(prompts.values) - cached),
            "prompt_tokens_cached": float(cached),
            "response_tokens": float(len(responses.values)),
        }
        return Generation(responses, log_probs, torch.tensor([answer.finished for answer in answers]), metrics)
