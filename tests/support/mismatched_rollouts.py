"""The built-in generator with one bug each, which `camshaft parity` must identify.

camshaft("parity", "--engine", "reference", "--rollout", "support.mismatched_rollouts:StaleHead", ...)
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.digest import digest
from camshaft.ragged import Ragged
from camshaft.rollout import Generation, SamplingParams
from camshaft.rollout.builtin.rollout import TorchRollout

START = 1
"""The first token of a turn in the tiny template."""
HEAD, NORM = "lm_head.weight", "model.layers.0.post_attention_layernorm.weight"


class Transposed(TorchRollout):
    """Transpose one square weight on load; the digests show it."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(
            (n, t.T.contiguous() if n.endswith("0.self_attn.o_proj.weight") else t) for n, t in weights
        )


class _ReportsReceivedDigests(TorchRollout):
    """Report digests of the received weights but compute with others."""

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        self._received_digests: dict[str, int] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._received_digests = {}
        super().load_weights(self._noted(weights))

    def weight_digests(self) -> Mapping[str, int]:
        return self._received_digests

    def _noted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self._received_digests[name] = digest(tensor)
            yield name, self._used(name, tensor)

    def _used(self, name: str, tensor: Tensor) -> Tensor:
        raise NotImplementedError


class StaleHead(_ReportsReceivedDigests):
    """Copy the output head on the first load, and never again."""

    _head: Tensor | None = None

    def _used(self, name: str, tensor: Tensor) -> Tensor:
        if name != HEAD:
            return tensor
        if self._head is None:
            self._head = tensor.clone()
        return self._head


class WithoutNorm(_ReportsReceivedDigests):
    """Compute one normalization without its weight."""

    def _used(self, name: str, tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, 0.5) if name == NORM else tensor


class AddsStart(TorchRollout):
    """Prepend a special token to each prompt, as a second tokenizer would."""

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        start = Ragged(prompts.values.new_full((len(prompts),), START), torch.ones_like(prompts.lengths))
        return super().generate_sequences(Ragged.join(start, prompts), sampling, seeds)


class DropsFirst(TorchRollout):
    """Drop the first token of each prompt."""

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        return super().generate_sequences(prompts.suffix(prompts.lengths - 1), sampling, seeds)


class OwnTemperature(TorchRollout):
    """Sample at the temperature of its generation config."""

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        return super().generate_sequences(prompts, replace(sampling, temperature=0.6), seeds)


class OwnTopK(TorchRollout):
    """Exclude improbable tokens without being configured to."""

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        return super().generate_sequences(prompts, replace(sampling, top_k=20), seeds)


class RawLogProbs(TorchRollout):
    """Apply the temperature, but return log-probs at temperature 1."""

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        out = super().generate_sequences(prompts, sampling, seeds)
        model: Any = self.model.require_model()
        log_probs = []
        for prompt, response in zip(prompts.rows(), out.responses.rows(), strict=True):
            ids, config = torch.cat([prompt, response])[None], model.config
            attention, config._attn_implementation = config._attn_implementation, "eager"
            with torch.no_grad():
                scores = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            config._attn_implementation = attention
            log_probs.append(scores.gather(-1, response[:, None])[:, 0])
        return replace(out, log_probs=Ragged.from_rows(log_probs))


class NoisyLogProbs(TorchRollout):
    """Add small noise to all log-probs, a fault that matches none of parity's explanations."""

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        out = super().generate_sequences(prompts, sampling, seeds)
        noise = torch.randn(len(out.log_probs.values), generator=torch.Generator().manual_seed(0))
        return replace(out, log_probs=out.log_probs.like(out.log_probs.values + 0.05 * noise))
