"""Adapters, compared with PEFT on transformers models, row by row."""

import json
from pathlib import Path
from typing import Any

import fsspec
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.ranks import run_warm_ranks
from support.tiny import CHANGED_SCORES, predicted_tokens, tiny_folder, tiny_rows
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from camshaft.config.engine import EngineModel, LoRAConfig
from camshaft.errors import EngineError
from camshaft.models.loader import load_model, skeleton
from camshaft.models.lora import (
    adapter_layers,
    adapter_shapes,
    adapter_weights,
    add_adapter,
    apply_scaling,
    disable_adapter,
    merged_weights,
    save_adapter,
    unembed_notice,
)
from camshaft.models.packed import PackedModel
from camshaft.models.packing import Packing

LENGTHS = [7, 1, 12, 3]
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},  # q, k and v have biases, and the embedding is tied
    "llama": {"tie_embeddings": False},
    "mixtral": {"num_local_experts": 4},  # its experts are not linear layers
    "phi": {"tie_embeddings": False},  # every layer has a bias
    **CHANGED_SCORES,
}
each_family = pytest.mark.parametrize(
    "family",
    ["qwen2", "mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "phi", *CHANGED_SCORES))],
)
LORA = LoRAConfig(rank=4, alpha=6)


def folder_of(family: str = "qwen2") -> str:
    return str(tiny_folder(family, hidden=32, initializer_range=0.1, **FAMILIES[family]))


def load(family: str = "qwen2", dtype: str = "float32", lora: LoRAConfig | None = LORA, **more: Any) -> PackedModel:
    return load_model(EngineModel(path=folder_of(family), lora=lora, **more), dtype, "cpu", seed=3)


def randomize_trained(hf: nn.Module, seed: int = 1) -> None:
    """Fill all trained weights with random numbers: with B at zero an adapter has no effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def inputs() -> tuple[Tensor, Packing, Tensor]:
    return torch.cat(tiny_rows(LENGTHS)), Packing(LENGTHS), predicted_tokens(LENGTHS)


def log_probs(model: PackedModel) -> Tensor:
    return model(*inputs(), ("log_probs",))["log_probs"]


def by_transformers(model: Any) -> Tensor:
    """Return log-probs of all tokens but the first of each row, from transformers or PEFT, one row at a time."""
    log_probs_of_rows = []
    for row in tiny_rows(LENGTHS):
        log_p = torch.log_softmax(model(input_ids=row[None]).logits[0, :-1], dim=-1)
        log_probs_of_rows.append(log_p.gather(1, row[1:, None])[:, 0])
    return torch.cat(log_probs_of_rows)


def base_model(family: str = "qwen2", dtype: str = "float32") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder_of(family), dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def peft_folder(folder: Path, family: str = "qwen2", **changes: Any) -> Path:
    """Write a random adapter with PEFT."""
    # PEFT's own "all-linear" means more for mixtral: it adapts the fused experts too.
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if family == "mixtral" else "all-linear"
    settings = {"r": 4, "lora_alpha": 6, "target_modules": targets, "task_type": "CAUSAL_LM"} | changes
    model = peft.get_peft_model(base_model(family), peft.LoraConfig(**settings))
    randomize_trained(model.get_base_model())
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def edit_adapter(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


# -- the same numbers as PEFT -------------------------------------------------------------------------


@each_family
def test_a_fresh_adapter_changes_nothing(family: str):
    assert torch.equal(log_probs(load(family)), log_probs(load(family, lora=None)))


def test_an_adapter_may_be_at_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CAMSHAFT_CACHE", str(tmp_path / "cache"))
    stored, files = peft_folder(tmp_path, "qwen2"), fsspec.filesystem("memory")
    for path in stored.iterdir():
        files.pipe_file(f"/bucket/adapter/{path.name}", path.read_bytes())
    local = log_probs(load(lora=LORA.model_copy(update={"adapter_path": str(stored)})))
    assert torch.equal(log_probs(load(lora=LORA.model_copy(update={"adapter_path": "memory://bucket/adapter"}))), local)
    files.rm("/bucket", recursive=True)


HEAD: dict[str, Any] = {"train_unembed": True}
LAYERS_AND_HEAD = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
    "phi": ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2", "lm_head"],  # its head has a bias
}


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_match_peft(family: str, tmp_path: Path):
    check_log_probs_and_gradients(family, peft_folder(tmp_path, family))


@pytest.mark.parametrize("family", LAYERS_AND_HEAD)
def test_log_probs_and_gradients_of_an_adapted_head_match_peft(family: str, tmp_path: Path):
    stored = peft_folder(tmp_path, family, target_modules=LAYERS_AND_HEAD[family])
    check_log_probs_and_gradients(family, stored, **HEAD)


def check_log_probs_and_gradients(family: str, stored: Path, dtype: str = "float64", **fields: Any) -> None:
    model = load(family, dtype, LORA.model_copy(update={"adapter_path": str(stored), **fields}))
    reference = peft.PeftModel.from_pretrained(base_model(family, dtype), str(stored), is_trainable=True)
    actual, expected = log_probs(model), by_transformers(reference)
    assert (actual - log_probs(load(family, dtype, None))).abs().max() > 0.1
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    weights = torch.randn(len(actual), dtype=actual.dtype, generator=torch.Generator().manual_seed(0))
    (actual * weights).mean().backward()
    (expected * weights).mean().backward()
    gradients = {name: p.grad for name, p in model.hf.named_parameters() if p.grad is not None}
    wanted_gradients = {n: p.grad for n, p in reference.get_base_model().named_parameters() if p.grad is not None}
    assert gradients.keys() == wanted_gradients.keys()
    assert all(".lora_" in name for name in gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted_gradients[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradient_checkpointing_changes_no_gradient(mode: str):
    results = []
    for checkpointing in (False, True):
        model = load(enable_gradient_checkpointing=checkpointing, gradient_checkpointing_mode=mode).train()
        randomize_trained(model.hf)
        log_probs(model).sum().backward()
        results.append([p.grad for p in model.hf.parameters() if p.requires_grad])
    assert len(results[0]) == 2 * 14
    assert all(gradient.any() for gradient in results[0])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_train_mode_gives_the_numbers_of_eval_mode():
    model = load()
    randomize_trained(model.hf)
    calm = log_probs(model)
    assert torch.equal(log_probs(model.train()), calm)


# -- which layers, which weights ----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "llama", "phi"])
def test_all_linear_layers_are_those_that_peft_takes(family: str):
    reference = peft.get_peft_model(
        base_model(family), peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    names = [name for name, _ in reference.get_base_model().named_parameters() if ".lora_A." in name]
    assert list(adapter_layers(load(family).hf)) == [name.partition(".lora_A.")[0] for name in names]


def test_experts_and_their_router_get_no_adapter():
    # transformers keeps them as fused tensors, not as linear layers
    assert {name.rpartition(".")[2] for name in adapter_layers(load("mixtral").hf)} == {
        "q_proj", "k_proj", "v_proj", "o_proj",
    }  # fmt: skip


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_layers_whose_weights_a_kernel_reads_get_no_adapter(family: str):
    """A fused kernel of train mode would leave the adapter out, and eval mode would apply it."""
    sizes = {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8} if family == "mamba2" else {}
    folder = tiny_folder(family, hidden=32, initializer_range=0.1, **sizes)
    model = load_model(EngineModel(path=str(folder), lora=LORA), "float32", "cpu", seed=3)
    assert {name.rpartition(".")[2] for name in adapter_layers(model.hf)} == {"in_proj"}
    randomize_trained(model.hf)
    arguments = (torch.cat(tiny_rows(LENGTHS)), Packing(LENGTHS), predicted_tokens(LENGTHS), ("log_probs",))
    expected = model(*arguments)["log_probs"]
    with disable_adapter(model.hf):
        assert not torch.allclose(model(*arguments)["log_probs"], expected, atol=1e-3)
    torch.testing.assert_close(model.train()(*arguments)["log_probs"], expected, rtol=0, atol=1e-5)


def test_targets_and_exclusions_are_endings_of_names():
    chosen = adapter_layers(load(lora=LoRAConfig(rank=2, target_modules=("q_proj", "1.mlp.up_proj"))).hf)
    assert list(chosen) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    ]
    config = LoRAConfig(rank=2, exclude_modules=("mlp.down_proj", "0.self_attn.q_proj", "lm_head"))
    layers = adapter_layers(load(lora=config).hf)
    assert len(layers) == 14 - 2 - 1
    assert not [name for name in layers if "down_proj" in name]
    assert list(adapter_layers(load(lora=LoRAConfig(rank=2, target_modules="o_proj")).hf)) == [
        "model.layers.0.self_attn.o_proj",
        "model.layers.1.self_attn.o_proj",
    ]


def test_groups_select_layers_of_attention_mlp_and_head():
    def layers(family: str, **fields: Any) -> set[str]:
        hf = load(family, lora=LoRAConfig(rank=2, **fields)).hf
        return {name.removeprefix("model.layers.0.") for name in adapter_layers(hf) if ".1." not in name}

    attention, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    attention, mlp = {f"self_attn.{name}" for name in attention}, {f"mlp.{name}" for name in mlp}
    assert layers("llama", train_mlp=False) == attention
    assert layers("llama", train_attn=False) == mlp
    assert layers("llama", **HEAD) == attention | mlp | {"lm_head"}
    assert layers("llama", **HEAD, train_attn=False, train_mlp=False) == {"lm_head"}
    assert layers("llama", **HEAD, train_attn=False, exclude_modules=("lm_head",)) == mlp
    assert layers("qwen2", **HEAD) == attention | mlp
    with pytest.raises(EngineError, match=r"lora\.train_attn=False, lora\.train_mlp=False select no linear layer"):
        layers("llama", train_attn=False, train_mlp=False)


def test_a_head_that_gets_no_adapter_is_named():
    tied, untied = load("qwen2", lora=None).hf, load("llama", lora=None).hf
    with_head = LoRAConfig(rank=2, **HEAD)
    sentence = "train_unembed=True: this model ties its embeddings; the head gets no adapter"
    assert unembed_notice(tied, with_head, "causal_lm") == sentence
    assert unembed_notice(untied, with_head, "causal_lm") is None
    assert unembed_notice(tied, LORA, "causal_lm") is None
    assert "head=value has no output head" in (unembed_notice(untied, with_head, "value") or "")


def test_a_layer_of_no_group_is_an_error():
    hf = load("llama", lora=None).hf
    hf.base_model.add_module("mixer", nn.Linear(4, 4))
    with pytest.raises(
        EngineError, match=r"lora\.train_attn=True and lora\.train_mlp=False do not say if model.mixer of"
    ):
        add_adapter(hf, LoRAConfig(rank=2, train_mlp=False), seed=0)
    assert not adapter_layers(hf)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"target_modules": ("q_porj",)}, r"target_modules contains 'q_porj'.* Did you mean 'q_proj'.*\(down_proj"),
        ({"target_modules": ("proj",)}, r"target_modules contains 'proj', but no linear layer"),
        (
            {"target_modules": ("lm_head",)},
            r"contains 'lm_head', but no linear layer in the decoder of Qwen2ForCausalLM has",
        ),
        ({"exclude_modules": ("up_prj",)}, r"exclude_modules contains 'up_prj'.* Did you mean 'up_proj'"),
        ({"target_modules": ("q_proj",), "exclude_modules": ("q_proj",)}, "select no linear layer"),
        ({"target_modules": ()}, "select no linear layer"),
    ],
)
def test_targets_that_match_nothing_are_an_error(config: dict[str, Any], message: str):
    with pytest.raises(EngineError, match=message):
        load(lora=LoRAConfig(rank=2, **config))


def test_only_adapter_and_value_head_are_trainable():
    trained = {name for name, p in load().hf.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 14
    assert all(".lora_A.default." in name or ".lora_B.default." in name for name in trained)
    value = {name for name, p in load(head="value").hf.named_parameters() if p.requires_grad}
    assert value - trained == {"score.weight", "score.bias"}


def test_initial_adapters_depend_only_on_the_seed():
    def begun(engine_seed: int, seed: int | None = None) -> Tensor:
        lora = LORA.model_copy(update={"seed": seed})
        model = load_model(EngineModel(path=folder_of(), lora=lora), "float32", "cpu", engine_seed)
        return torch.cat([tensor.flatten() for _, tensor in adapter_weights(model.hf)])

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = begun(7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(first, begun(7))
    assert not torch.equal(first, begun(8))
    assert torch.equal(first, begun(8, seed=7))


def test_a_new_adapter_uses_pefts_initial_range():
    tensors = dict(adapter_weights(load().hf))
    # U(-1/sqrt(in), 1/sqrt(in)): the default of nn.Linear
    largest = {name: tensor.abs().max() * tensor.shape[1] ** 0.5 for name, tensor in tensors.items() if "_A." in name}
    assert all(0.9 < value <= 1 for value in largest.values())
    assert not any(tensor.any() for name, tensor in tensors.items() if "_B." in name)


def test_a_half_precision_base_gets_an_adapter_in_float32(tmp_path: Path):
    model = load(dtype="bfloat16")
    assert {tensor.dtype for _, tensor in adapter_weights(model.hf)} == {torch.float32}
    assert {tensor.dtype for _, tensor in merged_weights(model.hf)} == {torch.bfloat16}
    randomize_trained(model.hf)
    actual = log_probs(model)
    actual.sum().backward()
    save_adapter(adapter_weights(model.hf), tmp_path, LORA, folder_of())
    expected = by_transformers(peft.PeftModel.from_pretrained(base_model(), str(tmp_path)))
    assert (actual - expected).abs().mean() < 0.1
    assert (actual - log_probs(load(lora=None))).abs().mean() > 0.3


def test_a_meta_device_model_supports_adapters():
    # as in a sharded engine: build on the meta device, then load weights by name
    full, bones = load(head="value"), skeleton(EngineModel(path=folder_of(), lora=LORA, head="value"), "float32")
    randomize_trained(full.hf)
    assert all(parameter.is_meta for parameter in bones.parameters())
    named = dict(bones.hf.named_parameters())
    assert {n: (p.shape, p.requires_grad) for n, p in named.items()} == {
        n: (p.shape, p.requires_grad) for n, p in full.hf.named_parameters()
    }
    bones.hf.load_state_dict(full.hf.state_dict(), assign=True)
    for (name, _), (_, value) in zip(bones.hf.named_buffers(), full.hf.named_buffers(), strict=True):
        owner, _, last = name.rpartition(".")
        bones.hf.get_submodule(owner).register_buffer(last, value, persistent=False)
    assert torch.equal(bones(*inputs(), ("values",))["values"], full(*inputs(), ("values",))["values"])


def test_a_second_adapter_is_rejected():
    with pytest.raises(EngineError, match="already has an adapter"):
        add_adapter(load().hf, LORA, 0)


# -- without the adapter ------------------------------------------------------------------------------


def test_disable_adapter_restores_the_exact_base_model():
    model, base = load().train(), log_probs(load(lora=None))
    randomize_trained(model.hf)
    adapted, trained = log_probs(model), [p.requires_grad for p in model.hf.parameters()]
    with disable_adapter(model.hf):
        assert torch.equal(log_probs(model), base)
        with disable_adapter(model.hf):
            assert torch.equal(log_probs(model), base)
        assert torch.equal(log_probs(model), base)
        assert [p.requires_grad for p in model.hf.parameters()] == trained
    assert torch.equal(log_probs(model), adapted)
    with pytest.raises(ZeroDivisionError), disable_adapter(model.hf):
        raise ZeroDivisionError
    assert torch.equal(log_probs(model), adapted)
    assert [p.requires_grad for p in model.hf.parameters()] == trained


def test_frozen_parameters_stay_frozen_after_the_adapter_was_off():
    model = load()
    model.hf.requires_grad_(False)
    with disable_adapter(model.hf):
        pass
    assert not any(p.requires_grad for p in model.hf.parameters())


def test_a_model_without_adapter_is_an_error():
    hf = load(lora=None).hf
    with (
        pytest.raises(EngineError, match="disable_adapter requires an adapter, but this model has no adapter"),
        disable_adapter(hf),
    ):
        pass
    with pytest.raises(EngineError, match="adapter_weights requires an adapter, but this model has no adapter"):
        list(adapter_weights(hf))
    with pytest.raises(EngineError, match=r"no adapter among these weights: model\.embed_tokens\.weight"):
        save_adapter(merged_weights(hf), "nowhere", LORA, folder_of())


# -- exported weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [LORA, LORA.model_copy(update=HEAD)], ids=["layers", "head"])
@each_family
def test_merged_weights_give_a_base_model_with_equal_outputs(family: str, lora: LoRAConfig):
    model = load(family, "float64", lora)
    randomize_trained(model.hf)
    before = {name: tensor.clone() for name, tensor in model.hf.state_dict().items()}
    merged, bare = dict(merged_weights(model.hf)), base_model(family, "float64")
    assert list(merged) == [name for name, _ in bare.named_parameters()]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.hf.state_dict().items())
    bare.load_state_dict(merged, strict=False)  # a tied head has no separate entry
    torch.testing.assert_close(by_transformers(bare), log_probs(model), rtol=0, atol=1e-5)


def test_merged_weights_match_those_of_peft(tmp_path: Path):
    stored = peft_folder(tmp_path)
    model = load(lora=LORA.model_copy(update={"adapter_path": str(stored)}))
    reference: Any = peft.PeftModel.from_pretrained(base_model(), str(stored))
    expected = reference.merge_and_unload().state_dict()
    for name, tensor in merged_weights(model.hf):
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


def test_half_precision_weights_are_merged_in_float32():
    model = load(dtype="bfloat16", lora=LoRAConfig(rank=4, alpha=4))
    randomize_trained(model.hf)
    merged = dict(merged_weights(model.hf))
    layer: Any = model.hf.get_submodule("model.layers.0.mlp.up_proj")
    a, b, base = layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.base_layer.weight
    exact = base.double() + b.double() @ a.double()
    error = (merged["model.layers.0.mlp.up_proj.weight"].double() - exact).abs()
    assert (error <= exact.abs() * 2**-8).all()  # half a step of bfloat16


def test_weights_inside_disable_adapter_equal_the_base():
    bare = load(lora=None).hf
    parameters = dict(bare.named_parameters())
    assert all(tensor.data_ptr() == parameters[name].data_ptr() for name, tensor in merged_weights(bare))
    model = load()
    randomize_trained(model.hf)
    with disable_adapter(model.hf):
        weights = dict(merged_weights(model.hf))
    assert weights.keys() == parameters.keys()
    assert all(torch.equal(weights[name], parameter) for name, parameter in parameters.items())


@each_family
@pytest.mark.parametrize("exclude", [(), ("1.self_attn.q_proj",)])
def test_peft_reads_an_exported_adapter(family: str, exclude: tuple[str, ...], tmp_path: Path):
    check_exported_adapter(family, LoRAConfig(rank=3, alpha=5, exclude_modules=exclude), tmp_path)


@pytest.mark.parametrize("fields", [HEAD, {"train_mlp": False}, {"train_attn": False}], ids=str)
def test_peft_reads_an_exported_adapter_of_groups(fields: dict[str, Any], tmp_path: Path):
    check_exported_adapter("llama", LoRAConfig(rank=3, alpha=5, **fields), tmp_path)


def check_exported_adapter(family: str, config: LoRAConfig, tmp_path: Path) -> None:
    model = load(family, lora=config)
    randomize_trained(model.hf)
    save_adapter(adapter_weights(model.hf), tmp_path / "new" / "adapter", config, folder_of(family))
    reference: Any = peft.PeftModel.from_pretrained(base_model(family), str(tmp_path / "new" / "adapter"))
    assert adapter_layers(reference.get_base_model()).keys() == adapter_layers(model.hf).keys()
    torch.testing.assert_close(by_transformers(reference), log_probs(model), rtol=0, atol=1e-5)
    by_peft: Any = peft.get_peft_model_state_dict(reference, save_embedding_layers=False)
    exported = dict(adapter_weights(model.hf))
    assert exported.keys() == by_peft.keys()
    assert all(torch.equal(tensor, by_peft[name]) for name, tensor in exported.items())


def test_a_value_head_travels_with_the_adapter(tmp_path: Path):
    model = load(head="value")
    randomize_trained(model.hf)
    values = model(*inputs(), ("values",))["values"]
    save_adapter(adapter_weights(model.hf), tmp_path, LORA, folder_of())
    bare = AutoModelForTokenClassification.from_pretrained(folder_of(), num_labels=1).eval()
    reference = peft.PeftModel.from_pretrained(bare, str(tmp_path))
    expected = [reference(input_ids=row[None]).logits[0, :-1, 0] for row in tiny_rows(LENGTHS)]
    torch.testing.assert_close(values, torch.cat(expected), rtol=0, atol=1e-5)
    again = load(head="value", lora=LORA.model_copy(update={"adapter_path": str(tmp_path)}))
    assert torch.equal(again(*inputs(), ("values",))["values"], values)
    merged = dict(merged_weights(model.hf))
    assert torch.equal(merged["score.weight"], model.hf.get_parameter("score.weight"))


def test_a_value_model_may_start_from_a_policy_adapter(tmp_path: Path):
    stored = peft_folder(tmp_path)
    config = LORA.model_copy(update={"adapter_path": str(stored)})
    value, policy = load(head="value", lora=config), load(lora=config)
    actual, expected = dict(adapter_weights(value.hf)), dict(adapter_weights(policy.hf))
    assert actual.keys() - expected.keys() == {"base_model.model.score.weight", "base_model.model.score.bias"}
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


@each_family
def test_adapter_shapes_match_an_adapted_model(family: str):
    lora = LORA.model_copy(update={"exclude_modules": ("0.self_attn.q_proj",)})
    hf = load(family, lora=lora).hf
    assert adapter_shapes(load(family, lora=None).hf, lora) == {n: tuple(w.shape) for n, w in adapter_weights(hf)}


def test_with_the_scaling_in_b_a_layer_adds_their_product():
    hf = load().hf
    name = "model.layers.0.mlp.down_proj"
    with torch.no_grad():
        hf.get_parameter(f"{name}.lora_B.default.weight").fill_(0.5)
    scaled = dict(apply_scaling(adapter_weights(hf), LORA))
    a, b = (scaled[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    with disable_adapter(hf):
        base = dict(merged_weights(hf))[f"{name}.weight"]
    torch.testing.assert_close(base + b @ a, dict(merged_weights(hf))[f"{name}.weight"])
    assert torch.equal(a, hf.get_parameter(f"{name}.lora_A.default.weight"))


# -- invalid adapters ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "config", "message"),
    [
        ({}, {"rank": 8}, r"lora.rank=8, but the adapter in .* has r=4"),
        ({}, {"alpha": 8.5}, r"lora.alpha=8.5, but the adapter in .* has lora_alpha=6"),
        ({"target_modules": ["q_proj", "v_proj"]}, {}, r"all-linear selects 14 layers .* has 4 \(q_proj, v_proj\)"),
        ({"exclude_modules": ["0.mlp.up_proj"]}, {}, r"has 13 .*differ in model.layers.0.mlp.up_proj"),
        ({"use_rslora": True}, {}, "use_rslora=True"),
        ({"use_dora": True}, {}, "use_dora=True"),
        ({"rank_pattern": {"q_proj": 2}}, {}, "rank_pattern={'q_proj': 2}"),
        ({"init_lora_weights": "olora"}, {}, "init_lora_weights=olora, which also changes the base"),
    ],
)
def test_an_adapter_of_another_kind_is_an_error(
    stored: dict[str, Any], config: dict[str, Any], message: str, tmp_path: Path
):
    folder = peft_folder(tmp_path, **stored)
    with pytest.raises(EngineError, match=message):
        load(lora=LORA.model_copy(update={"adapter_path": str(folder), **config}))


def test_missing_unknown_and_misshapen_tensors_are_all_named(tmp_path: Path):
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"]
        tensors["base_model.model.lm_head.weight"] = torch.zeros(1)
        tensors["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"] = torch.zeros(4, 5)

    edit_adapter(peft_folder(tmp_path), change)
    with pytest.raises(EngineError) as exc_info:
        load(lora=LORA.model_copy(update={"adapter_path": str(tmp_path)}))
    assert "model.layers.1.mlp.up_proj.lora_B.default.weight is missing" in str(exc_info.value)
    assert "lm_head.weight is unknown" in str(exc_info.value)
    assert "model.layers.0.mlp.up_proj.lora_A.default.weight has shape (4, 5), not (4, 32)" in str(exc_info.value)


def test_a_folder_that_is_no_adapter_is_an_error(tmp_path: Path):
    config = LORA.model_copy(update={"adapter_path": str(tmp_path)})
    with pytest.raises(EngineError, match=r"has no adapter_config.json; set it to a folder"):
        load(lora=config)
    peft_folder(tmp_path)
    facts = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**facts, "peft_type": "IA3"}))
    with pytest.raises(EngineError, match="peft_type=IA3, but only LORA"):
        load(lora=config)
    (tmp_path / "adapter_config.json").write_text(json.dumps(facts))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(EngineError, match="cannot be read"):
        load(lora=config)


# -- with sharded parameters --------------------------------------------------------------------------


def sharded(folder: str, adapter: str) -> dict[str, Any]:
    """Return a rank's view of a model with sharded parameters, first for the base model as in a reference pass."""
    lora = LORA.model_copy(update={"adapter_path": adapter})
    model = load_model(EngineModel(path=folder, lora=lora), "float32", "cpu", 0)
    for layer in model.hf.model.layers:
        fully_shard(layer)
    fully_shard(model)

    def full(tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    results: dict[str, Any] = {}
    with torch.no_grad(), disable_adapter(model.hf):
        results["base"] = log_probs(model)
    actual = log_probs(model)
    results["log_probs"] = actual.detach()
    actual.sum().backward()
    results["gradients"] = {n: full(p.grad) for n, p in model.hf.named_parameters() if p.grad is not None}
    results["sharded"] = all(isinstance(p, DTensor) for p in model.parameters())
    results["merged"] = dict(merged_weights(model.hf, full))
    results["adapter"] = dict(adapter_weights(model.hf, full))
    return results


def test_sharded_parameters_match_unsharded_ones(tmp_path: Path):
    stored = peft_folder(tmp_path)
    model = load(lora=LORA.model_copy(update={"adapter_path": str(stored)}))
    actual = log_probs(model)
    actual.sum().backward()
    gradients = {name: p.grad for name, p in model.hf.named_parameters() if p.grad is not None}
    for results in run_warm_ranks(sharded, 2, folder_of(), str(stored), timeout=120):
        assert results["sharded"]
        torch.testing.assert_close(results["base"], log_probs(load(lora=None)), rtol=0, atol=1e-6)
        torch.testing.assert_close(results["log_probs"], actual.detach(), rtol=0, atol=1e-6)
        assert results["gradients"].keys() == gradients.keys()
        for name, gradient in gradients.items():  # FSDP averages over the ranks, which have the same rows
            torch.testing.assert_close(results["gradients"][name], gradient, rtol=1e-5, atol=1e-5)
        for what, weights in (("merged", merged_weights(model.hf)), ("adapter", adapter_weights(model.hf))):
            expected = dict(weights)
            assert list(results[what]) == list(expected)
            for name, tensor in expected.items():
                torch.testing.assert_close(results[what][name], tensor, rtol=0, atol=1e-6)
