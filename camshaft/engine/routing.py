"""Routing of one `forward_backward_step` of a mixture-of-experts model: auxiliary loss, metrics and replay.

    routing = routing_step(engine, ctx, forward_only)   # None for a dense model
    with separate_routing(engine):                      # a step can run within another, in a hook
        routing.prepare(micro_batches)
        outputs = routing.forward(index, inputs)        # for each micro-batch
        loss = routing.add_loss(loss)
    aux_loss, metrics = routing.results()               # of the mini-batch

The auxiliary loss of a mini-batch with N tokens, L layers and E experts is that of `load_balancing_loss_func` in
transformers (Fedus et al., "Switch Transformers", 2021, equations 4 to 6):

    aux = E sum_e f_e P_e,    f_e = (1 / NL) sum_l n_le,    P_e = (1 / NL) sum_lt p_lte

n_le is the number of tokens that expert e of layer l computes, and p_lte its router probability for token t. Both
fractions cover all tokens of the mini-batch, of all micro-batches and data-parallel ranks. For fixed f, the loss is a
sum over tokens, so its gradient is a sum over micro-batches. f is not differentiable, but must be known before the
first backward pass. With one micro-batch, the ranks sum n between its forward and its backward pass. With several, all
micro-batches first run forward without gradients and without the output layer, to count n.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from camshaft.config.engine import EngineModel
from camshaft.device import random_states, set_random_states, to_device
from camshaft.engine.context import RoutingMode, StepContext
from camshaft.engine.micro_batches import MicroBatches, ModelInputs, StepExtension
from camshaft.errors import EngineError
from camshaft.models.heads import default_output
from camshaft.models.packed import OpaqueTensor, unwrap
from camshaft.models.routing import LayerRouting, Routers, supported_models

if TYPE_CHECKING:
    from camshaft.engine.torch_engine import TorchEngine

MISMATCH = "routing_mismatch"
"""Name of the prediction that compares the routers' choices with the batch's column `routed_experts`."""


def check_coefficient(model: EngineModel, routers: Routers | None) -> None:
    """Raise `EngineError` if the model has an auxiliary loss, but no routers that it can be computed from."""
    if model.router_aux_loss_coef and routers is None:
        raise EngineError(
            f"router_aux_loss_coef={model.router_aux_loss_coef} requires a mixture of experts with supported routers "
            f"({supported_models()}), which {model.path} is not; set router_aux_loss_coef=0"
        )


def routing_step(engine: TorchEngine, ctx: StepContext, forward_only: bool) -> RoutingStep | None:
    """Return the routing of a step; None for a dense model, or if the engine or the step does not use it."""
    routers, mode, capabilities = engine.module.routers, ctx.get("routing"), engine.capabilities
    if mode is not None and (routers is None or not capabilities.supports_router_replay):
        raise EngineError(
            f"ctx['routing']={mode} requires an engine that supports router replay and a model with routers "
            f"({supported_models()}), got {type(engine).__name__} and {engine.config.model.path}; omit the key"
        )
    if routers is None or not capabilities.supports_router_aux_loss or (forward_only and mode is None):
        return None
    return engine.routing_class(engine, routers, mode)


def separate_routing(engine: TorchEngine) -> AbstractContextManager[None]:
    """Return a context whose passes replay no choices of the passes before it, and which restores them."""
    routers = engine.module.routers
    return nullcontext() if routers is None else routers.separate()


class RoutingSums(NamedTuple):
    """Sums over tokens. A prefix that several rows share counts once per row."""

    tokens: Tensor
    """Number of tokens N, a scalar."""
    loads: Tensor
    """(L, E) number of tokens that each expert computes."""
    probabilities: Tensor
    """(E,) router probabilities, summed over tokens and layers."""
    entropies: Tensor
    """Entropies of the routers' distributions, summed over tokens and layers."""


class RoutingStep(StepExtension):
    """Routing of the micro-batches of one `forward_backward_step`."""

    def __init__(self, engine: TorchEngine, routers: Routers, mode: RoutingMode | None = None):
        self.routers, self.coefficient, self._mode = routers, engine.config.model.router_aux_loss_coef, mode
        self._module, self._device, self._sum_over_ranks = engine.module, engine.device, engine.sum_over_ranks
        self._micro_batch: RoutingSums | None = None
        self._total: Tensor | None = None
        self._factors: Tensor | None = None

    # -- auxiliary loss ---------------------------------------------------------------------------

    def prepare(self, micro_batches: MicroBatches) -> None:
        """Count the loads of all micro-batches if they must be known before the first backward pass."""
        self._micro_batches = micro_batches
        if self.coefficient > 0 and torch.is_grad_enabled() and len(micro_batches) > 1:
            self._count_loads([micro_batches.prepare(index) for index in range(len(micro_batches))])

    @torch.no_grad()
    def _count_loads(self, inputs: Sequence[ModelInputs]) -> None:
        """Count the loads of all micro-batches in forward passes without gradients and without the output layer.

        The passes draw the same random numbers as those of the training step, which dropout and router noise use.
        """
        nothing = OpaqueTensor(torch.empty(0, dtype=torch.int64))
        outputs = (default_output(self._module.head),)
        random = random_states(self._device)
        counts = []
        for index, each in enumerate(inputs):
            weights, experts = self._local_tokens(index, each)
            _, layers = self._run_model(each._replace(at=nothing, outputs=outputs, log_q=None, targets=None), experts)
            sums, is_dummy = self._sum_routing(layers, weights), self._micro_batches.is_dummy(index)
            counts.append(torch.cat([sums.tokens[None], sums.loads.sum(0)]).double() * (not is_dummy))
        set_random_states(random, self._device)
        self._set_factors(torch.stack(counts).sum(0))

    def forward(self, index: int, inputs: ModelInputs) -> dict[str, Tensor]:
        """Run the model on one micro-batch, whose column `routed_experts` is compared or replayed."""
        weights, experts = self._local_tokens(index, inputs)
        outputs, layers = self._run_model(inputs, experts)
        if experts is not None:
            outputs[MISMATCH] = self._mismatch_before(layers, experts, inputs)
        if not torch.is_grad_enabled():
            return outputs
        sums, is_dummy = self._sum_routing(layers, weights), self._micro_batches.is_dummy(index)
        self._micro_batch = None if is_dummy else sums
        if not is_dummy:
            flat = torch.cat([tensor.detach().double().flatten() for tensor in sums])
            self._total = flat if self._total is None else self._total + flat
        if self.coefficient > 0 and self._factors is None:
            self._set_factors(torch.cat([sums.tokens[None], sums.loads.sum(0)]).double() * (not is_dummy))
        return outputs

    def add_loss(self, loss: Tensor) -> Tensor:
        """Add this micro-batch's part of the auxiliary loss, times its coefficient."""
        if self._factors is None or self._micro_batch is None:
            return loss
        return loss + self.coefficient * (self._factors * self._micro_batch.probabilities).sum().to(loss.dtype)

    def _set_factors(self, local: Tensor) -> None:
        """Compute E f_e / NL, by which the loss multiplies the sums of probabilities. `local` holds N and n_e."""
        tokens, *_ = total = self._sum_mini_batch(local.double())
        scale = (tokens * self.routers.num_layers).clamp(min=1)
        self._factors = self.routers.num_experts * total[1:] / scale.square()

    def _sum_mini_batch(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks that hold tokens of the mini-batch."""
        if self._module.sequence is not None:
            dist.all_reduce(tensor, group=self._module.sequence.group)
        return self._sum_over_ranks(tensor)

    # -- one forward pass -------------------------------------------------------------------------

    def _run_model(self, inputs: ModelInputs, experts: Tensor | None) -> tuple[dict[str, Tensor], list[LayerRouting]]:
        self.routers.start(experts if self._mode == "replay" else None)
        outputs = self._module(*inputs.arguments())
        return outputs, self.routers.finish()

    def _local_tokens(self, index: int, inputs: ModelInputs) -> tuple[Tensor, Tensor | None]:
        """Return the number of rows that contain each token of this rank (n,), 0 for padding, and its experts."""
        split, count = self._module.sequence, len(inputs.tokens)
        weights, routed_experts = inputs.packing.row_counts(), self._micro_batches.routed_experts(index)
        if split is not None:
            extra = -count % split.size
            chunk = split.chunk(count + extra)
            weights = torch.nn.functional.pad(weights, (0, extra))[chunk]
            if routed_experts is not None:
                padding = routed_experts.new_full((extra, *routed_experts.shape[1:]), self.routers.unknown)
                routed_experts = torch.cat([routed_experts, padding])[chunk]
        return to_device(weights, self._device), routed_experts

    def _sum_routing(self, layers: Sequence[LayerRouting], weights: Tensor) -> RoutingSums:
        """Sum the routing of this rank's tokens. Probabilities receive gradients if the auxiliary loss is used."""
        loads, entropies, probabilities = [], [], []
        dtype = torch.promote_types(layers[0].logits.dtype, torch.float32)
        weights = weights.to(dtype)
        for layer in layers:
            experts = layer.experts.flatten()
            load = weights.new_zeros(self.routers.num_experts)
            loads.append(load.index_add_(0, experts, weights.repeat_interleave(self.routers.top_k)))
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.coefficient > 0):
                log_p = layer.logits.log_softmax(dim=-1, dtype=dtype)
                p = log_p.exp()
                probabilities.append(weights @ p)
            entropies.append(-(weights @ (p * log_p).detach()).sum())
        probability_sum, entropy_sum = torch.stack(probabilities).sum(0), torch.stack(entropies).sum()
        return RoutingSums(weights.sum(), torch.stack(loads), probability_sum, entropy_sum)

    def _mismatch_before(self, layers: Sequence[LayerRouting], experts: Tensor, inputs: ModelInputs) -> Tensor:
        """Return the fraction (M,) of differing choices at the tokens before `inputs.at`, which predict them."""
        mismatch, split = routing_mismatch(layers, experts), self._module.sequence
        previous = inputs.packing.previous(unwrap(inputs.at))
        if split is None:
            return mismatch[to_device(previous, self._device)]
        share = split.share(previous, len(inputs.tokens))
        return split.gather(share, mismatch[to_device(share.offsets, self._device)])[0]

    # -- results of the mini-batch ----------------------------------------------------------------

    def results(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the auxiliary loss, times its coefficient, and the metrics of the mini-batch."""
        routers = self.routers
        sizes = [1, routers.num_layers * routers.num_experts, routers.num_experts, 1]
        assert self._total is not None, "every rank runs at least one row"
        tokens, loads, probabilities, entropies = self._sum_mini_batch(self._total).split(sizes)
        loads = loads.view(routers.num_layers, routers.num_experts)
        aux, metrics = self.metrics(tokens[0], loads, probabilities, entropies[0])
        return self.coefficient * aux, metrics

    def metrics(
        self, tokens: Tensor, loads: Tensor, probabilities: Tensor, entropies: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the auxiliary loss and the metrics from sums over the tokens of the mini-batch (`RoutingSums`)."""
        scale = (tokens * self.routers.num_layers).clamp(min=1)
        aux = self.routers.num_experts * (loads.sum(0) * probabilities).sum() / scale.square()
        violations = loads / loads.mean(dim=1, keepdim=True).clamp(min=1) - 1
        metrics = {
            "moe/max_vio": violations.amax(dim=1).mean(),
            "moe/avg_vio": violations.abs().mean(),
            "moe/aux_loss": aux,
            "moe/router_entropy": entropies / scale,
        }
        return aux, metrics


def routing_mismatch(choices: Sequence[LayerRouting], routed_experts: Tensor) -> Tensor:
    """Return the fraction (n,) of each token's choices, over layers and slots, that `routed_experts` does not contain.

    It is 0 for tokens without recorded choices.
    """
    own = torch.stack([layer.choices for layer in choices], dim=1)
    recorded = routed_experts.to(torch.int64)
    contained = (own[..., :, None] == recorded[..., None, :]).any(dim=-1)
    known = recorded.amax(dim=(1, 2)) < choices[0].logits.shape[-1]
    return (~contained).double().mean(dim=(1, 2)) * known
