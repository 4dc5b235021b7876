"""Engines whose model has one defect each, of the kind that re-implementations of a model have.

Each defect is planted in the modules, the config or the attention of the engine's own model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from camshaft.engine.single import SingleDeviceEngine
from camshaft.models.loader import load_model
from camshaft.models.packed import PackedModel


class BrokenModel(SingleDeviceEngine):
    """Build the model with other entries of the config, and edit its modules."""

    override: ClassVar[Mapping[str, Any]] = {}

    def build_model(self) -> PackedModel:
        model = self.config.model.model_copy(update={"override_config": dict(self.override)})
        packed = load_model(model, self.config.dtype, str(self.device), self.config.seed)
        with torch.no_grad():
            self.edit(packed.hf)
        return packed

    def edit(self, hf: Any) -> None: ...


class RopeTheta(BrokenModel):
    override: ClassVar = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}


class OddRopeTheta(BrokenModel):
    override: ClassVar = {"rope_parameters": {"rope_type": "default", "rope_theta": 43000.0}}


class NormEps(BrokenModel):
    override: ClassVar = {"rms_norm_eps": 1e-5}


class WindowOffByOne(BrokenModel):
    """The comparison sets the window of the folder to 8."""

    override: ClassVar = {"sliding_window": 7}


class AttentionScale(BrokenModel):
    factor = 8**0.5

    def edit(self, hf: Any) -> None:
        for module in hf.modules():
            if hasattr(module, "scaling"):
                module.scaling *= self.factor


class OddAttentionScale(AttentionScale):
    factor = 1.3


class QueryAndKeySwapped(BrokenModel):
    """Load the weights of queries into the keys and vice versa, which the exported weights show."""

    def edit(self, hf: Any) -> None:
        for module in hf.modules():
            if hasattr(module, "q_proj"):
                first, second = module.q_proj.weight.data, module.k_proj.weight.data
                module.q_proj.weight.data, module.k_proj.weight.data = second, first


class QueryAndKeyExchanged(BrokenModel):
    """Exchange the results, as a wrong split of a fused projection does, which the exported weights do not show."""

    def edit(self, hf: Any) -> None:
        for module in hf.modules():
            if hasattr(module, "q_proj"):
                self._exchange(module.q_proj, module.k_proj)

    def _exchange(self, query: nn.Linear, key: nn.Linear) -> None:
        def split(given: Tensor) -> tuple[Tensor, ...]:
            both = nn.functional.linear(given, torch.cat([query.weight, key.weight]))
            return both.split([key.out_features, query.out_features], dim=-1)

        query.register_forward_hook(lambda _, given, __: split(given[0])[1])
        key.register_forward_hook(lambda _, given, __: split(given[0])[0])


class _One(nn.Module):
    def forward(self, gate: Tensor) -> Tensor:
        return torch.ones_like(gate)


class MissingGate(BrokenModel):
    def edit(self, hf: Any) -> None:
        for module in hf.modules():
            if hasattr(module, "act_fn"):
                module.act_fn = _One()


class UntiedHead(BrokenModel):
    """Train a copy of the embedding as output layer."""

    def edit(self, hf: Any) -> None:
        hf.lm_head.weight = nn.Parameter(hf.lm_head.weight.clone())


class RandomHead(BrokenModel):
    """Initialize the output layer, although the folder ties it to the embedding."""

    def edit(self, hf: Any) -> None:
        random = torch.Generator().manual_seed(1)
        hf.lm_head.weight = nn.Parameter(0.2 * torch.randn(hf.lm_head.weight.shape, generator=random).double())


class ExpertOrder(BrokenModel):
    """Load the experts in another order."""

    def edit(self, hf: Any) -> None:
        for name, parameter in hf.named_parameters():
            if ".experts." in name:
                parameter.copy_(parameter[[2, 0, 3, 1]])


class ExpertDispatch(BrokenModel):
    """Send each token to the experts after those that the router chose."""

    def edit(self, hf: Any) -> None:
        for name, module in hf.named_modules():
            if name.endswith(".experts"):
                count = module.num_experts
                module.register_forward_pre_hook(
                    lambda _, given, count=count: (given[0], (given[1] + 1) % count, *given[2:])
                )


class _OtherAttention(BrokenModel):
    """Compute the attention of packed rows with a mask that `visible` returns."""

    def visible(self, rows: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError

    def edit(self, hf: Any) -> None:
        AttentionInterface.register("planted", self._attend)
        AttentionMaskInterface.register("planted", sdpa_mask)
        hf.set_attn_implementation("planted")

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        packing = kwargs["packing"]
        rows = torch.repeat_interleave(torch.arange(len(packing.lengths)), torch.tensor(packing.lengths))
        mask = self.visible(rows, packing.position_ids())
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~mask, float("-inf"))
        return (scores.softmax(-1) @ value).transpose(1, 2), None


class MaskOffByOne(_OtherAttention):
    def visible(self, rows: Tensor, positions: Tensor) -> Tensor:
        return (rows[:, None] == rows) & (positions <= positions[:, None] + 1)


class LeakyAttention(_OtherAttention):
    """Attend to all earlier tokens of the micro-batch."""

    def visible(self, rows: Tensor, positions: Tensor) -> Tensor:
        return torch.ones(len(rows), len(rows)).tril().bool()


class LeakyMask(_OtherAttention):
    """Let the first token of a row attend to the last token of the row before it."""

    def visible(self, rows: Tensor, positions: Tensor) -> Tensor:
        numbers = torch.arange(len(rows))
        is_before = numbers[:, None] - numbers == 1
        return (rows[:, None] == rows) & (positions <= positions[:, None]) | is_before


class LeakyPositions(BrokenModel):
    """Number the positions of all packed rows from 0."""

    def edit(self, hf: Any) -> None:
        def renumber(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            numbers = torch.arange(kwargs["position_ids"].shape[1])[None]
            return args, {**kwargs, "position_ids": numbers}

        hf.base_model.register_forward_pre_hook(renumber, with_kwargs=True)


class LeakyCalls(BrokenModel):
    """Keep a state from one call to the next."""

    def edit(self, hf: Any) -> None:
        state: list[Tensor] = []

        def add(_: nn.Module, __: Any, hidden: Tensor) -> Tensor:
            state.append(hidden[0, -1].detach())
            return hidden if len(state) < 2 else hidden + 0.1 * state[-2]

        hf.get_input_embeddings().register_forward_hook(add)


class ShiftedTokens(BrokenModel):
    """Add a share of the attention output of the token before, within each row."""

    def edit(self, hf: Any) -> None:
        def shift(_: nn.Module, __: Any, kwargs: Any, out: Any) -> Any:
            positions = kwargs["position_ids"][0]
            share = 0.1 * (positions > 0)[:, None]
            return (out[0] + share * out[0].roll(1, dims=1), *out[1:])

        for layer in hf.base_model.layers:
            layer.self_attn.register_forward_hook(shift, with_kwargs=True)
