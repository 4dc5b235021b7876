"""Tensor-parallel matrices, compared with the same model in one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_warm_ranks
from support.tiny import LINEAR, predicted_tokens, tiny_folder, tiny_rows
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoConfig, AutoModelForCausalLM

from camshaft.config.engine import EngineModel
from camshaft.engine.fsdp.tensor_parallel import apply_tensor_parallel
from camshaft.errors import EngineError
from camshaft.models.attention import PACKED
from camshaft.models.loader import load_model
from camshaft.models.packed import Head, PackedModel
from camshaft.models.packing import Packing

LENGTHS = [7, 1, 13, 4, 2]
NEAR = 1e-5
OUTPUTS: dict[Head, tuple[str, ...]] = {
    "causal_lm": ("log_probs", "entropy"),
    "value": ("values",),
    "reward": ("scores",),
}
Numbers = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Outputs and gradients of full parameters, by name."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2 tied": ("qwen2", {}),
    "qwen2 untied": ("qwen2", {"tie_embeddings": False}),
    "llama": ("llama", {"kv_heads": 4, "tie_embeddings": False}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "phi with biases": ("phi", {"tie_embeddings": False}),
    "gemma3 with scaled embeddings": (
        "gemma3_text",
        {"kv_heads": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3 with fused matrices": ("phi3", {"tie_embeddings": False, "pad_token_id": 0}),
    "qwen3.5 with linear attention": ("qwen3_5_text", LINEAR),
}


def folder_of(family: str, **sizes: Any) -> str:
    return str(tiny_folder(family, **{"hidden": 32, "initializer_range": 0.1, **sizes}))


def model_of(folder: str, head: Head = "causal_lm", checkpointing: bool = False, **override: Any) -> PackedModel:
    described = EngineModel(
        path=folder,
        head=head,
        random_init=head == "reward" or "vocab_size" in override,
        enable_gradient_checkpointing=checkpointing,
        override_config=override,
    )
    return load_model(described, "float32", "cpu", seed=0).train(checkpointing)


def numbers(model: PackedModel) -> Numbers:
    """Return the outputs, and the gradient of a loss that weights each output differently."""
    outputs = model(
        torch.cat(tiny_rows(LENGTHS)) % 100,
        Packing(LENGTHS),
        predicted_tokens(LENGTHS),
        OUTPUTS[model.head],
        temperature=0.8,
    )
    random = torch.Generator().manual_seed(1)
    terms = [(value * torch.randn(value.shape, generator=random)).sum() for value in outputs.values()]
    (torch.stack(terms).sum() / sum(LENGTHS)).backward()
    gradients = {}
    for name, weight in model.hf.named_parameters():
        if weight.grad is not None:
            gradients[name] = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
    return {name: value.detach() for name, value in outputs.items()}, gradients


def cut(folder: str, head: Head, checkpointing: bool, override: dict[str, Any]) -> Numbers:
    model = model_of(folder, head, checkpointing, **override)
    apply_tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))
    return numbers(model)


def same(actual: Numbers, expected: Numbers) -> None:
    for value, reference in zip(actual, expected, strict=True):
        assert value.keys() == reference.keys()
        for name, tensor in reference.items():
            torch.testing.assert_close(
                value[name], tensor, rtol=0, atol=NEAR, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("model", MODELS)
def test_log_probs_and_gradients_do_not_depend_on_ranks(model: str):
    family, sizes = MODELS[model]
    folder = folder_of(family, **sizes)
    expected = numbers(model_of(folder))
    assert expected[0]["log_probs"].std() > 0.05
    for actual in run_warm_ranks(cut, 2, folder, "causal_lm", False, {}):
        same(actual, expected)


@pytest.mark.parametrize("head", ["value", "reward"])
def test_values_and_scores_do_not_depend_on_the_ranks(head: Head):
    folder = folder_of("llama")
    for actual in run_warm_ranks(cut, 2, folder, head, False, {}):
        same(actual, numbers(model_of(folder, head)))


def test_gradient_checkpointing_changes_nothing():
    folder = folder_of("qwen3")
    for actual in run_warm_ranks(cut, 2, folder, "causal_lm", True, {}):
        same(actual, numbers(model_of(folder)))


@pytest.mark.parametrize(("vocabulary", "ranks"), [(113, 2), pytest.param(101, 4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_does_not_divide(vocabulary: int, ranks: int, tied: bool):
    folder = folder_of("llama", kv_heads=4, tie_embeddings=tied)
    override: dict[str, Any] = {"vocab_size": vocabulary}
    expected = numbers(model_of(folder, **override))
    for actual in run_warm_ranks(cut, ranks, folder, "causal_lm", False, override):
        same(actual, expected)


def whole_logits(folder: str) -> tuple[Tensor, bool]:
    model = model_of(folder)
    apply_tensor_parallel(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    hf: Any = model.hf
    with torch.no_grad():
        logits = hf(torch.arange(3, 9)[None]).logits
    return logits, hf.get_output_embeddings().weight is hf.get_input_embeddings().weight


def test_the_transformers_model_keeps_full_logits_and_tied_weights():
    folder = folder_of("qwen2")
    expected = AutoModelForCausalLM.from_pretrained(folder)(torch.arange(3, 9)[None]).logits
    for logits, tied in run_warm_ranks(whole_logits, 2, folder):
        torch.testing.assert_close(logits, expected, rtol=0, atol=NEAR)
        assert tied


def sums_over_ranks(folder: str) -> tuple[int, int]:
    model = model_of(folder)
    apply_tensor_parallel(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    counts = []
    with CommDebugMode() as forward:
        log_probs = model(torch.cat(tiny_rows(LENGTHS)), Packing(LENGTHS), predicted_tokens(LENGTHS), ("log_probs",))[
            "log_probs"
        ]
    counts.append(forward.get_comm_counts()[torch.ops.c10d_functional.all_reduce])
    with CommDebugMode() as backward:
        log_probs.sum().backward()
    counts.append(backward.get_comm_counts()[torch.ops.c10d_functional.all_reduce])
    return counts[0], counts[1]


def test_a_layer_sums_twice_in_each_direction():
    # Two layers: the outputs of attention and of the MLP, and the gradients of their inputs. The embedding adds one.
    assert run_warm_ranks(sums_over_ranks, 2, folder_of("qwen2"))[0] == (5, 4)


# -- with fully_shard ------------------------------------------------------------------------------


def tensor_parallel_and_sharded(
    folder: str, weights: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Build on the meta device, shard over both mesh axes (tensor parallel and FSDP), then load the weights."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED, dtype=torch.float32)
    model = PackedModel(hf, "causal_lm")
    model.enable_gradient_checkpointing()
    apply_tensor_parallel(model, mesh["tp"])
    assert all(weight.is_meta for weight in hf.parameters())
    layers = [module for module in hf.modules() if type(module).__name__ in (hf._no_split_modules or ())]
    for module in (*layers, model):
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    hf.to_empty(device="cpu")
    hf.tie_weights()
    for module in hf.modules():
        if "Rotary" in type(module).__name__:
            hf._init_weights(module)
    with torch.no_grad():
        for name, weight in hf.named_parameters():
            assert isinstance(weight, DTensor), name
            full = distribute_tensor(weights[name], weight.device_mesh, weight.placements, src_data_rank=None)
            weight.copy_(full)
    model.train()
    outputs, gradients = numbers(model)
    return outputs, gradients, [name for name, weight in hf.named_parameters() if weight.device_mesh.ndim == 2]


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_together_with_fully_shard_from_the_meta_device(tied: bool):
    folder = folder_of("qwen3", tie_embeddings=tied)
    model = model_of(folder)
    outputs, gradients = numbers(model)
    weights = {name: weight.detach() for name, weight in model.hf.named_parameters()}
    for actual, summed, cut_twice in run_warm_ranks(tensor_parallel_and_sharded, 4, folder, weights, timeout=120):
        # Both data-parallel ranks have the same rows in this test, and gradients are summed over them.
        same((actual, {name: gradient / 2 for name, gradient in summed.items()}), (outputs, gradients))
        assert {name for name in weights if name not in cut_twice} == {
            name for name in weights if "layernorm" in name or name == "model.norm.weight"
        }


# -- unsupported models ----------------------------------------------------------------------------


def refusal(folder: str) -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    with pytest.raises(EngineError) as exc_info:
        apply_tensor_parallel(model_of(folder), mesh)
    return str(exc_info.value)


REFUSED: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "experts": ("mixtral", {"num_local_experts": 4}, 2, "experts has the parallel style 'moe_tp_experts'"),
    "sinks": ("granite_swa", {}, 2, "no style for model.layers.0.self_attn.sinks"),
    "kv heads": ("qwen2", {"kv_heads": 2}, 4, "num_key_value_heads=2 is not divisible by tensor_parallel_size=4"),
    "units": (
        "llama",
        {"intermediate": 33},
        2,
        "the 33 units of its layer model.layers.0.mlp.gate_proj are not divisible by tensor_parallel_size=2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_do_not_fit_are_rejected(case: str):
    family, sizes, ranks, message = REFUSED[case]
    for text in run_warm_ranks(refusal, ranks, folder_of(family, **sizes)):
        assert message in text


class _Adapted(nn.Linear):
    """A layer that replaces a linear one, as adapters and quantizers do."""


def odd_layers(folder: str) -> list[str]:
    mesh, errors = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), []
    for change in (_adapt, _add_stray, _forget_plan):
        model = model_of(folder)
        change(model.hf)
        with pytest.raises(EngineError) as exc_info:
            apply_tensor_parallel(model, mesh)
        errors.append(str(exc_info.value))
    with pytest.raises(EngineError) as exc_info:
        apply_tensor_parallel(model_of(folder), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")))
    return [*errors, str(exc_info.value)]


def _adapt(hf: Any) -> None:
    hf.model.layers[1].self_attn.o_proj = _Adapted(32, 32)


def _add_stray(hf: Any) -> None:
    hf.model.layers[1].self_attn.scale = nn.Parameter(torch.ones(1))


def _forget_plan(hf: Any) -> None:
    hf.tp_plan = {}


def test_layers_missing_in_the_plan_are_rejected():
    adapted, stray, planless, mesh = run_warm_ranks(odd_layers, 2, folder_of("qwen2"))[0]
    assert "its layer model.layers.1.self_attn.o_proj is a _Adapted, not a Linear" in adapted
    assert "has no style for model.layers.1.self_attn.scale, which shares its input with sharded matrices" in stray
    assert "transformers defines no tensor-parallel plan for it" in planless
    assert "a mesh with one axis" in mesh
