"""Losses, metrics and replay of the routers of a mixture of experts, in every layout.

    routing = step.rows(index)                  # of a micro-batch; `MegatronModel.prepare` sets the tokens of this rank
    probs, is_chosen = routing.replay(layer, logits, probs, is_chosen)      # in the router of a layer
    probs = routing.observe(layer, logits, is_chosen, probs)

The losses of a mini-batch with N tokens, L layers, E experts and top-k experts per token are

    c_aux  E sum_e (sum_l n_le) (sum_lt p_lte) / (N L)^2            router_aux_loss_coef, as in `engine/routing.py`
    c_moe  sum_l E sum_e n_le (sum_t p_lte) / (k N^2)               moe_aux_loss_coeff, the loss of each layer
    c_z    sum_lt (log sum_e exp x_lte)^2 / N                       moe_z_loss_coeff

with the number of tokens n that an expert computes, its probabilities p and the logits x. The first two have the form
sum_le w_le sum_t p_lte with constant weights w. A stage of a pipeline holds some layers only, and checkpointed layers
compute their routers twice, so each router adds the gradient of its part to its own output. The weights must therefore
be known before: all micro-batches first run forward without gradients and without the output layer. In a pipeline, this
pass also compares the choices of all stages with those of another forward pass.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from camshaft.device import random_states, set_random_states, to_device
from camshaft.engine.context import RoutingMode
from camshaft.engine.micro_batches import MicroBatches, ModelInputs
from camshaft.engine.routing import MISMATCH, RoutingStep
from camshaft.models.packed import unwrap

if TYPE_CHECKING:
    from camshaft.engine.megatron.engine import MegatronEngine
    from camshaft.engine.megatron.model import Call


class LossWeights(NamedTuple):
    """Constants of the losses of a mini-batch."""

    experts: Tensor
    """(L, E) weights of the summed probabilities of each expert."""
    z: Tensor
    """Weight of the summed squares of the logarithms."""


@dataclass
class RowRouting:
    """Routing of one micro-batch on this rank."""

    is_dummy: bool
    losses: LossWeights | None = None
    """None adds no gradient."""
    experts: Tensor | None = None
    """(n, L, k) experts of another forward pass. A token whose entries are not expert numbers has none."""
    replays: bool = False
    """Compute the tokens with `experts` instead of those that the routers choose."""
    is_normalized: bool = True
    """The probabilities of the experts of a token sum to 1."""
    weights: Tensor = field(default_factory=lambda: torch.empty(0))
    """(n,) 1 for each token of this rank, and 0 for padding and for the tokens of a dummy."""
    layers: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Sums over tokens of each layer (2 E + 2,): loads, probabilities, entropies and squares of logarithms."""
    differing: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """(n,) number of the choices of each layer that `experts` does not contain."""

    def replay(self, layer: int, logits: Tensor, probs: Tensor, is_chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Compare the choices (n, E) of a layer with `experts`; return the probabilities and choices to compute."""
        if self.experts is None:
            return probs, is_chosen
        experts = self.experts[:, layer].to(torch.int64)
        is_known = (experts < logits.shape[-1]).all(dim=-1, keepdim=True)
        recorded = torch.zeros_like(is_chosen).scatter(1, experts.where(is_known, 0), True).where(is_known, is_chosen)
        self.differing.setdefault(layer, (is_chosen & ~recorded).sum(dim=-1))
        if not self.replays:
            return probs, is_chosen
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.is_normalized:
            scores = scores.masked_fill(~recorded, -torch.inf)
        return (scores.softmax(dim=-1) * recorded).to(probs.dtype), recorded

    def observe(self, layer: int, logits: Tensor, is_chosen: Tensor, probs: Tensor) -> Tensor:
        """Record sums over the tokens (n, E) of a layer, and return `probs` with the gradient of the losses."""
        needs_gradient = self.losses is not None and torch.is_grad_enabled()
        dtype = torch.promote_types(logits.dtype, torch.float32)
        weights = self.weights.to(dtype)
        with torch.set_grad_enabled(needs_gradient):
            logits = logits.to(dtype)
            log_sum = logits.logsumexp(dim=-1)
            log_p = logits - log_sum[:, None]
            probabilities, squares = weights @ log_p.exp(), weights @ log_sum.square()
        if layer not in self.layers:
            with torch.no_grad():
                entropy = -(weights @ (log_p.exp() * log_p)).sum()
                parts = weights @ is_chosen.to(dtype), probabilities.detach(), entropy[None], squares.detach()[None]
                self.layers[layer] = torch.cat(parts).double()
        if self.losses is None or not needs_gradient:
            return probs
        loss = (self.losses.experts[layer] * probabilities).sum() + self.losses.z * squares
        return _AddGradient.apply(probs, loss.to(dtype))  # pyright: ignore[reportReturnType]


class _AddGradient(torch.autograd.Function):
    """Returns its first argument. The backward pass also differentiates the second one, a loss."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, gradient.new_ones((), dtype=ctx.dtype)


class Routers(NamedTuple):
    """The routers of all stages."""

    num_layers: int
    num_experts: int
    top_k: int
    is_normalized: bool

    def separate(self) -> AbstractContextManager[None]:
        """Enter without choices to replay, which belong to the rows of a pass."""
        return nullcontext()


class MegatronRoutingStep(RoutingStep):
    """Routing of the micro-batches of one `forward_backward_step`, on all ranks of a layout."""

    def __init__(self, engine: MegatronEngine, routers: Any, mode: RoutingMode | None = None):
        super().__init__(engine, routers, mode)
        self._is_normalized: bool = routers.is_normalized
        self._groups, self._run_layers = engine.groups, engine.run_layers
        self._moe, self._z = engine.options.moe_aux_loss_coeff, engine.options.moe_z_loss_coeff
        self._losses: LossWeights | None = None
        self._rows: list[RowRouting] = []
        self._compared: list[dict[str, Tensor]] = []

    def prepare(self, micro_batches: MicroBatches) -> None:
        """Run all micro-batches if the mini-batch has router losses, or if a pipeline compares choices."""
        self._micro_batches = micro_batches
        has_losses = any((self.coefficient, self._moe, self._z)) and torch.is_grad_enabled()
        compares_stages = self._mode is not None and self._groups.pp.size() > 1
        if has_losses or compares_stages:
            random = random_states(self._device)
            inputs = [micro_batches.prepare(index) for index in range(len(micro_batches))]
            with torch.no_grad():
                self._run_layers(inputs, self.rows)
                tokens, layers = self._sums()
            set_random_states(random, self._device)
            if compares_stages:
                self._compared = [self._compare(*pair) for pair in zip(self._rows, inputs, strict=True)]
            if has_losses:
                self._losses = self._loss_weights(tokens, layers[:, : self.routers.num_experts])
            self._rows = []

    def rows(self, index: int) -> RowRouting:
        """Return the routing of a micro-batch, which the routers fill."""
        experts, replays = self._micro_batches.routed_experts(index), self._mode == "replay"
        is_dummy = self._micro_batches.is_dummy(index)
        self._rows.append(RowRouting(is_dummy, self._losses, experts, replays, self._is_normalized))
        return self._rows[-1]

    def forward(self, index: int, inputs: ModelInputs) -> dict[str, Tensor]:
        module: Any = self._module
        rows = self.rows(index)
        call: Call = module.prepare(inputs, routing=rows)
        outputs = module.apply_head(module.stages[0](call.padded, call.angles, call.rows), call)
        return outputs if rows.experts is None else outputs | self._compare(rows, inputs)

    def compared(self, index: int) -> dict[str, Tensor]:
        """Return the outputs of a micro-batch of a pipeline that compare choices; without `routing` there are none."""
        return self._compared[index] if self._compared else {}

    def _compare(self, rows: RowRouting, inputs: ModelInputs) -> dict[str, Tensor]:
        """Return the fraction (M,) of differing choices at the tokens before `inputs.at`, which predict them."""
        local = sum(rows.differing.values(), rows.weights.new_zeros(rows.weights.shape)).double()
        group = self._groups.tp_cp
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local, group=group)
        differing = torch.cat(parts)
        dist.all_reduce(differing, group=self._groups.pp)
        previous = to_device(inputs.packing.previous(unwrap(inputs.at)), self._device)
        return {MISMATCH: differing[previous] / (self.routers.num_layers * self.routers.top_k)}

    def add_loss(self, loss: Tensor) -> Tensor:
        """Return the loss, because each router adds the gradient of its own part."""
        return loss

    def results(self) -> tuple[Tensor, dict[str, Tensor]]:
        experts = self.routers.num_experts
        tokens, layers = self._sums()
        loads, probabilities, entropies, squares = layers.split([experts, experts, 1, 1], dim=1)
        aux, metrics = self.metrics(tokens, loads, probabilities.sum(0), entropies.sum())
        metrics["moe/z_loss"] = z_loss = squares.sum() / tokens.clamp(min=1)
        per_layer = experts * (loads * probabilities).sum() / (self.routers.top_k * tokens.clamp(min=1).square())
        return self.coefficient * aux + self._moe * per_layer + self._z * z_loss, metrics

    def _sums(self) -> tuple[Tensor, Tensor]:
        """Return the number of tokens and the sums (L, 2 E + 2) of each layer, over all ranks and micro-batches."""
        sizes, total = self.routers, torch.zeros((), dtype=torch.float64, device=self._device)
        layers = total.new_zeros((sizes.num_layers, 2 * sizes.num_experts + 2))
        for rows in self._rows:
            total = total + rows.weights.sum()
            for layer, sums in rows.layers.items():
                layers[layer] += sums
        flat = torch.cat([total[None] * (self._groups.pp.rank() == 0), layers.flatten()])
        for group in (self._groups.tp_dp_cp, self._groups.pp):
            dist.all_reduce(flat, group=group)
        return flat[0], flat[1:].view_as(layers)

    def _loss_weights(self, tokens: Tensor, loads: Tensor) -> LossWeights:
        """Return the constants of the losses from the number of tokens and the loads (L, E)."""
        tokens, sizes = tokens.clamp(min=1), self.routers
        aux = self.coefficient * sizes.num_experts * loads.sum(0) / (tokens * sizes.num_layers).square()
        per_layer = self._moe * sizes.num_experts * loads / (sizes.top_k * tokens.square())
        return LossWeights(aux + per_layer, self._z / tokens)
