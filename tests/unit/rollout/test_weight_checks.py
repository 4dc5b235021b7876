"""`ExpectedWeights`: the weights of a model folder, and the errors for weights that do not fit."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny import tiny_folder
from torch import Tensor
from transformers import AutoModelForCausalLM

from camshaft.config.engine import LoRAConfig
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import RolloutError
from camshaft.models.loader import file_layout
from camshaft.rollout.weights.checks import ExpectedWeights, split_stacked

NAME = "model.layers.0.self_attn.q_proj.weight"
ADAPTED = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_folder())
    return {name: weight.detach() for name, weight in model.named_parameters()}


def expected(**config: Any) -> ExpectedWeights:
    return ExpectedWeights.from_config(RolloutEngineConfig(model_path=str(tiny_folder()), **config))


def test_valid_weights_are_yielded_unchanged(weights: dict[str, Tensor]) -> None:
    passed = dict(expected().validate(weights.items()))
    assert passed.keys() == weights.keys()
    assert all(passed[name] is weight for name, weight in weights.items())


def test_shapes_and_dtypes_need_no_storage(weights: dict[str, Tensor]) -> None:
    expected_weights = expected(dtype="bfloat16")
    assert expected_weights.weights.keys() == weights.keys() | {"lm_head.weight"}
    assert {weight.meta.device.type for weight in expected_weights.weights.values()} == {"meta"}
    assert expected_weights.dtype_of(NAME) == torch.bfloat16
    assert expected_weights.dtype_of("sideways") is None
    assert expected_weights.weights["lm_head.weight"] is expected_weights.weights["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {n: t for n, t in w.items() if n != NAME}, f"1 weights are missing: {NAME}"),
        (lambda w: w | {NAME: w[NAME][:-1]}, rf"'{NAME}' has shape \(63, 64\), but the model expects \(64, 64\)"),
        (lambda w: w | {NAME + "s": w[NAME]}, f"no weight '{NAME}s'; did you mean '{NAME}'"),
        (lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"] + 1}, "'model.embed_tokens.weight' and"),
    ],
)
def test_invalid_weight_is_named(change: Any, message: str, weights: dict[str, Tensor]) -> None:
    with pytest.raises(RolloutError, match=message):
        list(expected().validate(change(weights).items()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {n: t for n, t in w.items() if n != ADAPTED}, f"load_adapter: 1 weights are missing: {ADAPTED}"),
        (
            lambda w: w | {ADAPTED: w[ADAPTED].t()},
            r"lora_A.weight' has shape \(64, 4\), but .* expects \(4, 64\)",
        ),
        (lambda w: w | {ADAPTED + "s": w[ADAPTED]}, f"no weight '{ADAPTED}s'; did you mean '{ADAPTED}'"),
    ],
)
def test_invalid_adapter_weight_is_named(change: Any, message: str) -> None:
    lora = LoRAConfig(rank=4, exclude_modules=("o_proj",))
    expected_weights = ExpectedWeights.adapter_from_config(
        RolloutEngineConfig(model_path=str(tiny_folder()), dtype="bfloat16"), lora
    )
    fitting = {name: torch.zeros(weight.meta.shape) for name, weight in expected_weights.weights.items()}
    assert len(fitting) == 2 * 2 * 6
    assert expected_weights.dtype_of(ADAPTED) == torch.bfloat16
    assert dict(expected_weights.validate(fitting.items())).keys() == fitting.keys()
    with pytest.raises(RolloutError, match=message):
        list(expected_weights.validate(change(fitting).items()))


def test_duplicate_weight_is_named_before_it_is_yielded(weights: dict[str, Tensor]) -> None:
    stream = expected().validate([*weights.items(), (NAME, weights[NAME])])
    for name in weights:
        assert next(stream)[0] == name
    with pytest.raises(RolloutError, match=f"'{NAME}' was sent twice"):
        next(stream)


def test_untied_weights_are_not_kept_alive(weights: dict[str, Tensor]) -> None:
    stream = expected().validate((name, weight.clone()) for name, weight in weights.items())
    addresses = {}
    for name, weight in stream:
        addresses[name] = weight.data_ptr()
        del weight
    assert len(set(addresses.values())) < len(addresses), "every copy has a separate address, so none was freed"


def test_tied_weights_may_be_sent_under_both_names(weights: dict[str, Tensor]) -> None:
    both = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    assert dict(expected().validate(both.items())).keys() == both.keys()


@pytest.mark.parametrize(("family", "sizes"), [("mixtral", {"num_local_experts": 4}), ("llama", {})])
def test_stacked_experts_are_split_as_in_files(family: str, sizes: dict[str, Any]) -> None:
    folder = tiny_folder(family, **sizes)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    split = dict(split_stacked(model.named_parameters(), file_layout(model.config, False)))
    stored = load_file(folder / "model.safetensors")
    assert split.keys() == stored.keys()
    assert all(torch.equal(split[name], weight) for name, weight in stored.items())
