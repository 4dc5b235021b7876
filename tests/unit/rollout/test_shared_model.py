"""A model without weights uses those of another model, by storage if possible and by copy otherwise."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import tiny_folder
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3Config

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import EngineError, RolloutError
from camshaft.models.attention import PACKED
from camshaft.models.tiny import make_tiny_model
from camshaft.rollout import shared_model
from camshaft.rollout.shared_model import ALIGNMENT, SharedModel, load_stop_ids
from camshaft.rollout.weights.checks import _parameters_on_meta


def borrowed(folder: Path, **config: Any) -> SharedModel:
    return SharedModel(RolloutEngineConfig(model_path=str(folder), **config), attention=PACKED)


def owner(folder: Path, **config: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **config)


def test_a_new_model_has_no_weights() -> None:
    model = borrowed(tiny_folder())
    assert {parameter.device.type for parameter in model.hf.parameters()} == {"meta"}
    assert not model.hf.training


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "phi3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_computed_buffers_equal_those_of_a_loaded_model(family: str, dtype: str) -> None:
    model, real = borrowed(tiny_folder(family), dtype=dtype), owner(tiny_folder(family), dtype=dtype)
    actual, expected = dict(model.hf.named_buffers()), dict(real.named_buffers())
    assert actual.keys() == expected.keys()
    for name, buffer in expected.items():
        assert actual[name].dtype == buffer.dtype, name
        assert torch.equal(actual[name], buffer), name


def test_weights_of_the_right_dtype_are_shared() -> None:
    model, real = borrowed(tiny_folder()), owner(tiny_folder())
    model.load(real.named_parameters())
    for name, parameter in real.named_parameters():
        assert model.hf.get_parameter(name).data_ptr() == parameter.data_ptr(), name
    assert not any(parameter.requires_grad for parameter in model.require_model().parameters())


def test_weights_of_another_dtype_are_copied_and_rounded() -> None:
    model, real = borrowed(tiny_folder(), dtype="bfloat16"), owner(tiny_folder())
    model.load(real.named_parameters())
    for name, parameter in real.named_parameters():
        assert torch.equal(model.hf.get_parameter(name), parameter.bfloat16()), name


def test_a_tied_weight_is_one_tensor_under_both_names() -> None:
    model, real = borrowed(tiny_folder()), owner(tiny_folder())
    model.load((("lm_head.weight" if "embed" in name else name), w) for name, w in real.named_parameters())
    module: Any = model.require_model()
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert module.lm_head.weight.data_ptr() == real.lm_head.weight.data_ptr()


def test_both_copies_of_a_tied_weight_must_be_equal() -> None:
    model, real = borrowed(tiny_folder()), owner(tiny_folder())
    weights = dict(real.named_parameters(remove_duplicate=False))
    model.load(weights.items())
    model.load((weights | {"lm_head.weight": weights["lm_head.weight"].clone()}).items())
    with pytest.raises(RolloutError, match="are tied in this model but were sent with different values"):
        model.load((weights | {"lm_head.weight": weights["lm_head.weight"] + 1}).items())
    with pytest.raises(RolloutError, match="load_weights"):
        model.require_model()


def test_override_config_can_untie_the_weights() -> None:
    model, real = borrowed(tiny_folder(), override_config={"tie_word_embeddings": False}), owner(tiny_folder())
    with pytest.raises(RolloutError, match=r"weights are missing: lm_head\.weight"):
        model.load(real.named_parameters())
    model.load([*real.named_parameters(), ("lm_head.weight", real.lm_head.weight + 1)])
    module: Any = model.require_model()
    assert not torch.equal(module.lm_head.weight, module.model.embed_tokens.weight)


def test_a_persistent_buffer_must_be_loaded() -> None:
    sizes = {"kv_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    experts = {"v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
    folder = tiny_folder("deepseek_v3", **sizes, **experts, num_experts_per_tok=2, first_k_dense_replace=1, head_dim=8)
    model, real = borrowed(folder), owner(folder)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    with pytest.raises(RolloutError, match=name):
        model.load(real.named_parameters())
    bias = torch.tensor([0.5, 0.0, -0.5, 1.0])
    model.load([*real.named_parameters(), (name, bias)])
    assert torch.equal(model.require_model().get_buffer(name), bias)


def test_one_weight_under_one_name_twice_is_rejected() -> None:
    model, real = borrowed(tiny_folder()), owner(tiny_folder())
    with pytest.raises(RolloutError, match=r"'model\.norm\.weight' was sent twice"):
        model.load([*real.named_parameters(), ("model.norm.weight", real.model.norm.weight)])


def test_a_misspelt_weight_is_answered_with_the_nearest_name() -> None:
    model = borrowed(tiny_folder())
    with pytest.raises(RolloutError, match=r"no weight 'model\.norms\.weight'; did you mean 'model\.norm\.weight'"):
        model.load([("model.norms.weight", torch.zeros(64))])


def test_sleep_frees_the_weights() -> None:
    model, real = borrowed(tiny_folder()), owner(tiny_folder())
    model.load(real.named_parameters())
    model.sleep()
    assert {parameter.device.type for parameter in model.hf.parameters()} == {"meta"}
    with pytest.raises(RolloutError, match="call wake_up"):
        model.load(real.named_parameters())
    model.wake_up()
    model.load(real.named_parameters())
    assert model.require_model() is model.hf


def test_modules_built_by_other_threads_keep_their_weights() -> None:
    built: list[nn.Linear] = []
    with _parameters_on_meta():
        thread = threading.Thread(target=lambda: built.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        module = nn.Linear(2, 2)
    assert module.weight.is_meta
    assert not built[0].weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_all_end_tokens_of_the_model_folder_end_a_row(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert borrowed(tmp_path).stop_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 5]}))
    assert borrowed(tmp_path).stop_ids == (2, 5, 7)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    assert borrowed(tmp_path).stop_ids == (2, 5, 7, 9)  # 2 belongs to the tokenizer
    for file in tmp_path.glob("*token*"):
        file.unlink()
    (tmp_path / "generation_config.json").unlink()
    assert borrowed(tmp_path).stop_ids == (9,)


def test_a_composite_config_may_have_no_end_token_of_its_own(tmp_path: Path) -> None:
    config = Gemma3Config(text_config={"eos_token_id": 5})
    assert not hasattr(config, "eos_token_id")
    assert load_stop_ids(tmp_path, config, trust_remote_code=False) == (5,)


def test_external_lib_is_imported_and_a_missing_one_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "registers_models.py").write_text("import os\nos.environ['REGISTERED'] = 'yes'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("REGISTERED", "no")
    borrowed(tiny_folder(), external_lib="registers_models")
    import os

    assert os.environ["REGISTERED"] == "yes"
    with pytest.raises(EngineError, match="no module 'nowhere_to_be_found'"):
        borrowed(tiny_folder(), external_lib="nowhere_to_be_found")


@pytest.mark.parametrize("name", ["torch", "hf"])
def test_engine_kwargs_are_for_other_generators(name: str) -> None:
    from camshaft.rollout import build_rollout

    with pytest.raises(RolloutError, match=r"accept no engine_kwargs, got \{'enforce_eager': True\}"):
        build_rollout(name, RolloutEngineConfig(model_path=str(tiny_folder()), engine_kwargs={"enforce_eager": True}))


@pytest.mark.parametrize("large_bytes", [0, 1000, 2**24])
def test_joined_weights_share_one_tensor_that_loads_write_to(large_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_model, "LARGE_BYTES", large_bytes)
    model, real = borrowed(tiny_folder()), owner(tiny_folder())
    layer = "model.layers.0.self_attn"
    names = [f"{layer}.{part}_proj.weight" for part in "qkv"]
    model.load(real.named_parameters(), copy=True)
    model.join([names])
    joined = model.joined(names)
    assert list(map(id, model._joined.values())) == [id(joined)]  # no separate copy of a joined weight is kept
    for _ in range(2):
        expected = torch.cat([real.get_parameter(name) for name in names])
        assert torch.equal(joined, expected)
        assert torch.equal(torch.cat([model.hf.get_parameter(name) for name in names]), expected)
        for parameter in real.parameters():
            parameter.data.add_(1)
        model.load(real.named_parameters(), copy=True)
    model.sleep()
    model.wake_up()
    model.load(real.named_parameters(), copy=True)
    assert model.joined(names) is not joined
    assert torch.equal(model.joined(names), torch.cat([real.get_parameter(name) for name in names]))
    (size,) = {
        memory.untyped_storage().data_ptr(): memory.untyped_storage().nbytes() for memory in model._memory.values()
    }.values()  # all weights are allocated at once
    assert size <= model.num_bytes + 4 * ALIGNMENT * len(model._memory)
    for name, weight in real.named_parameters():
        assert torch.equal(model.hf.get_parameter(name), weight), name
