"""Routers of every supported family are observed and replayed with their own gate weights."""

from typing import Any

import pytest
import torch
from support.moe import load_oracle
from support.tiny import tiny_folder
from torch import Tensor

from camshaft.models.packing import Packing
from camshaft.models.routing import GATES, find_routers, gate_weights

FAMILIES: dict[str, dict[str, Any]] = {
    "MixtralTopKRouter": {"family": "mixtral", "num_local_experts": 4},
    "OlmoeTopKRouter": {"family": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "Qwen2MoeTopKRouter": {
        "family": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "Qwen3MoeTopKRouter": {
        "family": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}
TOKENS = torch.tensor([[5, 9, 4, 30, 7]])


def forward(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


@pytest.mark.parametrize(
    ("name", "normalized"), [(name, value) for name, fixed in GATES.items() for value in {True, fixed or False}]
)
def test_gate_weights_equal_those_of_the_router(name: str, normalized: bool) -> None:
    norm: dict[str, Any] = {"norm_topk_prob": normalized} if GATES[name] is None else {}
    model = load_oracle(tiny_folder(**FAMILIES[name], **norm, layers=2))
    outputs: list[tuple[Any, tuple[Tensor, Tensor, Tensor]]] = []
    for module in model.modules():
        if type(module).__name__ == name:
            module.register_forward_hook(lambda module, args, output: outputs.append((module, output)))
    forward(model)
    assert len(outputs) == 2
    for router, (logits, weights, experts) in outputs:
        assert torch.equal(gate_weights(router, logits, experts), weights)


@pytest.mark.parametrize("name", GATES)
def test_other_experts_are_replayed_until_the_context_ends(name: str) -> None:
    model = load_oracle(tiny_folder(**FAMILIES[name], layers=2))
    usual, routers = forward(model), find_routers(model)
    assert routers is not None
    assert (routers.num_layers, routers.num_experts) == (2, 4)
    routers.start()
    assert torch.equal(forward(model), usual)
    choices = torch.stack([layer.choices for layer in routers.finish()], dim=1)
    assert choices.shape == (5, 2, routers.top_k)
    with routers.separate():
        routers.start((choices + 1).to(torch.uint8) % 4)
        replayed = forward(model)
        assert all(torch.equal(layer.experts, (choices[:, i] + 1) % 4) for i, layer in enumerate(routers.finish()))
        assert not torch.allclose(replayed, usual)
        assert torch.equal(forward(model), replayed), "checkpointing calls the routers again"
        with routers.separate():
            assert torch.equal(forward(model), usual)
        assert torch.equal(forward(model), replayed)
    assert torch.equal(forward(model), usual)


def test_dense_models_and_other_routers_are_not_supported() -> None:
    assert find_routers(load_oracle(tiny_folder("qwen2"))) is None
    assert find_routers(load_oracle(tiny_folder("phimoe", num_local_experts=4))) is None


def test_a_prefix_counts_once_for_each_of_its_rows() -> None:
    packing = Packing([2, 1, 3, 1], prefix_of=[None, 0, 0, None])
    assert packing.row_counts().tolist() == [2, 2, 1, 1, 1, 1, 1]
