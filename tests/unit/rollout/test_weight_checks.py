"""What a model folder expects, and what is said of weights that do not fit."""

from typing import Any

import pytest
import torch
from support.tiny import tiny_folder
from torch import Tensor
from transformers import AutoModelForCausalLM

from camshaft.config.engine import LoRAConfig
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import RolloutError
from camshaft.rollout.weights.checks import ExpectedWeights

NAME = "model.layers.0.self_attn.q_proj.weight"
ADAPTED = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_folder())
    return {name: weight.detach() for name, weight in model.named_parameters()}


def expected(**config: Any) -> ExpectedWeights:
    return ExpectedWeights.of_folder(RolloutEngineConfig(model_path=str(tiny_folder()), **config))


def test_all_names_of_the_folder_pass_untouched(weights: dict[str, Tensor]) -> None:
    passed = dict(expected().validate(weights.items()))
    assert passed.keys() == weights.keys()
    assert all(passed[name] is weight for name, weight in weights.items())


def test_shapes_are_known_without_storage(weights: dict[str, Tensor]) -> None:
    known = expected(dtype="bfloat16")
    assert known.weights.keys() == weights.keys() | {"lm_head.weight"}
    assert {weight.meta.device.type for weight in known.weights.values()} == {"meta"}
    assert known.dtype_of(NAME) == torch.bfloat16
    assert known.dtype_of("sideways") is None
    assert known.weights["lm_head.weight"] is known.weights["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda w: {n: t for n, t in w.items() if n != NAME}, f"1 weights did not come: {NAME}"),
        (lambda w: w | {NAME: w[NAME][:-1]}, rf"'{NAME}' came with shape \(63, 64\), but .* \(64, 64\)"),
        (lambda w: w | {NAME + "s": w[NAME]}, f"no weight '{NAME}s'; did you mean '{NAME}'"),
        (lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"] + 1}, "'model.embed_tokens.weight' and"),
    ],
)
def test_what_does_not_fit_is_named(change: Any, told: str, weights: dict[str, Tensor]) -> None:
    with pytest.raises(RolloutError, match=told):
        list(expected().validate(change(weights).items()))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda w: {n: t for n, t in w.items() if n != ADAPTED}, f"load_adapter: 1 weights did not come: {ADAPTED}"),
        (lambda w: w | {ADAPTED: w[ADAPTED].t()}, r"lora_A.weight' came with shape \(64, 4\), but .* \(4, 64\)"),
        (lambda w: w | {ADAPTED + "s": w[ADAPTED]}, f"no weight '{ADAPTED}s'; did you mean '{ADAPTED}'"),
    ],
)
def test_what_does_not_fit_an_adapter_is_named(change: Any, told: str) -> None:
    lora = LoRAConfig(rank=4, exclude_modules=("o_proj",))
    known = ExpectedWeights.adapter_of_folder(
        RolloutEngineConfig(model_path=str(tiny_folder()), dtype="bfloat16"), lora
    )
    fitting = {name: torch.zeros(weight.meta.shape) for name, weight in known.weights.items()}
    assert len(fitting) == 2 * 2 * 6
    assert known.dtype_of(ADAPTED) == torch.bfloat16
    assert dict(known.validate(fitting.items())).keys() == fitting.keys()
    with pytest.raises(RolloutError, match=told):
        list(known.validate(change(fitting).items()))


def test_a_weight_that_comes_twice_is_named_before_it_is_passed_on(weights: dict[str, Tensor]) -> None:
    stream = expected().validate([*weights.items(), (NAME, weights[NAME])])
    for name in weights:
        assert next(stream)[0] == name
    with pytest.raises(RolloutError, match=f"'{NAME}' came twice"):
        next(stream)


def test_nobody_holds_on_to_weights_that_are_not_tied(weights: dict[str, Tensor]) -> None:
    stream = expected().validate((name, weight.clone()) for name, weight in weights.items())
    held = {}
    for name, weight in stream:
        held[name] = weight.data_ptr()
        del weight
    assert len(set(held.values())) < len(held), "each copy had a place of its own: none was freed on the way"


def test_tied_weights_with_equal_values_pass_under_both_names(weights: dict[str, Tensor]) -> None:
    both = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    assert dict(expected().validate(both.items())).keys() == both.keys()
