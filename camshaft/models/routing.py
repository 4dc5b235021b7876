"""Routers of mixture-of-experts models: records their choices, and replays choices that were recorded elsewhere.

    routers = find_routers(hf)                 # None for a dense model
    routers.start(replayed)                    # (N, layers, top-k) experts, or None for the choices of the routers
    hf(...)
    for layer in routers.finish(): ...         # logits, choices of the router, experts that were used

A router is the linear layer with softmax and top-k in front of the experts of a layer. `Routers` observes it with a
forward hook. Only routers with the interface and the gate weights of `GATES` are supported: the gate weights are the
softmax probabilities of the chosen experts, normalized to sum 1 or not. `engine/routing.py` computes metrics and the
auxiliary loss; the built-in generator returns recorded choices.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

GATES: dict[str, bool | None] = {
    "MixtralTopKRouter": True,
    "OlmoeTopKRouter": None,
    "Qwen2MoeTopKRouter": None,
    "Qwen3MoeTopKRouter": None,
}
"""Supported router classes. True if the gate weights are normalized; None if the router's `norm_topk_prob` decides."""

SAMPLING_ROUTERS = ("PhimoeTopKRouter",)
"""Router classes that draw experts at random in train mode. They stay in eval mode, because a policy gradient requires
the log-probs of the experts that generated the response."""


class LayerRouting(NamedTuple):
    """Routing of N tokens in one layer."""

    logits: Tensor
    """(N, experts) router logits."""
    choices: Tensor
    """(N, top-k) experts that the router chose, int64, in descending order of their logits."""
    experts: Tensor
    """(N, top-k) experts that computed the tokens: `choices`, or the replayed experts."""


class Routers:
    """The routers of one model, in the order of the layers.

    They are observed from `start` to `finish`. Replayed choices also apply after `finish`, until the next `start` or
    the end of `separate`, because activation checkpointing calls the routers again in the backward pass.
    """

    def __init__(self, routers: Sequence[nn.Module]):
        first: Any = routers[0]
        self.num_layers, self.num_experts, self.top_k = len(routers), int(first.num_experts), int(first.top_k)
        self._is_recording = False
        self._layers: dict[int, LayerRouting] = {}
        self._replayed: Tensor | None = None
        for index, router in enumerate(routers):
            router.register_forward_hook(functools.partial(self._route, index))  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def dtype(self) -> torch.dtype:
        """Integer dtype of recorded choices."""
        return torch.uint8 if self.num_experts <= torch.iinfo(torch.uint8).max else torch.int16

    @property
    def unknown(self) -> int:
        """Entry of tokens without a recorded choice: the largest value of `dtype`, which is no expert."""
        return torch.iinfo(self.dtype).max

    def start(self, replayed: Tensor | None = None) -> None:
        """Record the routing of the next forward pass.

        `replayed` (N, layers, top-k) holds the experts of each token. A token whose entries are not expert numbers is
        routed by the routers.
        """
        self._is_recording, self._layers, self._replayed = True, {}, replayed

    def finish(self) -> list[LayerRouting]:
        """Return the routing of each layer since `start`."""
        layers, self._is_recording, self._layers = self._layers, False, {}
        return [layers[index] for index in range(self.num_layers)]

    @contextmanager
    def separate(self) -> Iterator[None]:
        """Enter without choices to replay and without a recording. On exit, restore those of the surrounding pass."""
        surrounding = self._is_recording, self._layers, self._replayed
        self._is_recording, self._layers, self._replayed = False, {}, None
        try:
            yield
        finally:
            self._is_recording, self._layers, self._replayed = surrounding

    @torch.compiler.disable
    def _route(self, index: int, router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        """Forward hook of router `index`: record its output, and replace it with that of the replayed experts."""
        if not self._is_recording and self._replayed is None:
            return None
        logits, weights, choices = output
        experts = choices
        if self._replayed is not None:
            replayed = self._replayed[:, index].to(torch.int64)
            experts = torch.where(replayed < self.num_experts, replayed, choices)
            weights = gate_weights(router, logits, experts).to(weights.dtype)
        if self._is_recording:
            self._layers.setdefault(index, LayerRouting(logits, choices, experts))
        return logits, weights, experts


def gate_weights(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """Return the weights (N, top-k) with which the outputs of `experts` (N, top-k) are summed."""
    weights = logits.softmax(dim=-1, dtype=torch.float32).gather(1, experts)
    is_normalized = GATES[type(router).__name__]
    if router.norm_topk_prob if is_normalized is None else is_normalized:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights


def find_routers(hf: PreTrainedModel) -> Routers | None:
    """Return the routers of a model; None for a dense model or unsupported routers."""
    routers = [module for module in hf.modules() if type(module).__name__ in GATES]
    return Routers(routers) if routers else None


def supported_models() -> str:
    """Return the names of the model families with supported routers, for error messages."""
    return ", ".join(name.removesuffix("TopKRouter") for name in GATES)
