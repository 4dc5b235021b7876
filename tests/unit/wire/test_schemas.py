"""JSON bodies: types, defaults, unknown fields, and errors that name the field."""

from typing import Any

import pytest

from camshaft.wire import schemas

STEP = {"model_id": "s:train:0", "seq_id": 3, "adam_params": {"learning_rate": 1, "beta2": 0.99}}


def test_missing_fields_have_the_defaults_of_the_sdk() -> None:
    step, ignored = schemas.read(schemas.OptimStep, STEP)
    settings = step.adam_params
    assert settings is not None
    assert settings == schemas.AdamSettings(1.0, 0.9, 0.99, 1e-12, 0.0, 0.0)
    assert isinstance(settings.learning_rate, float)
    assert ignored == []


def test_unknown_fields_are_named_with_their_place() -> None:
    body = {**STEP, "priority": 1, "adam_params": {"nu": 2}}
    assert schemas.read(schemas.OptimStep, body)[1] == ["priority", "adam_params.nu"]


def test_a_null_is_the_default() -> None:
    body = {"session_id": "s", "model_seq_id": 0, "base_model": "m", "lora_config": {"rank": 4, "train_mlp": None}}
    model, _ = schemas.read(schemas.CreateModel, body)
    assert model.lora_config == schemas.LoraSettings(4)


@pytest.mark.parametrize("stop", [None, [], ["a"], [1, 2], "a"])
def test_each_form_of_stop_is_kept(stop: Any) -> None:
    assert schemas.read(schemas.SampleSettings, {"stop": stop})[0].stop == stop


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"model_id": "m"}, "seq_id is missing; OptimStep requires it"),
        ({"model_id": 1, "seq_id": 1}, "model_id must be a text, got 1"),
        ({"model_id": "m", "seq_id": True}, "seq_id must be an integer, got True"),
        ({"model_id": "m", "seq_id": 1.5}, "seq_id must be an integer, got 1.5"),
        ({"model_id": "m", "seq_id": 1, "adam_params": []}, r"adam_params must be a JSON object, got \[\]"),
        ({**STEP, "adam_params": {"eps": "x"}}, "adam_params.eps must be a number, got 'x'"),
        ({**STEP, "adam_params": {"eps": float("inf")}}, "adam_params.eps must be a finite number, got inf"),
        ({**STEP, "adam_params": {"eps": 10**400}}, "adam_params.eps must be a finite number, got 1000"),
        ({**STEP, "seq_id": 2**63}, "seq_id must be an integer from -9223372036854775808 to 9223372036854775807, got"),
        ([], r"the body must be a JSON object, got \[\]"),
    ],
)
def test_a_wrong_body_names_field_and_value(body: Any, message: str) -> None:
    with pytest.raises(schemas.InvalidBody, match=message):
        schemas.read(schemas.OptimStep, body)


def test_a_wrong_token_of_a_prompt_is_named() -> None:
    body = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, "x"]}]}
    with pytest.raises(schemas.InvalidBody, match=r"chunks\[0\].tokens\[2\] must be an integer, got 'x'"):
        schemas.read(schemas.Prompt, body)


@pytest.mark.parametrize(
    ("schema", "body", "message"),
    [
        (schemas.SampleSettings, {"stop": [1, 2**63]}, r"stop\[1\] must be an integer from -9223372036854775808 to"),
        (schemas.SampleSettings, {"seed": -(2**63) - 1}, "seed must be an integer from -9223372036854775808 to"),
        (
            schemas.TokenTable,
            {"data": [], "dtype": "int64", "shape": [0, 10**30]},
            r"shape\[1\] must be an integer from",
        ),
        (schemas.CreateModel, {"session_id": "s", "model_seq_id": -1}, "model_seq_id must be an integer from 0 to 999"),
        (
            schemas.LoadWeights,
            {"path": "p", "model_seq_id": 10**9},
            "model_seq_id must be an integer from 0 to 999999999",
        ),
    ],
)
def test_an_integer_that_is_too_large_is_named(schema: type[Any], body: Any, message: str) -> None:
    with pytest.raises(schemas.InvalidBody, match=message):
        schemas.read(schema, body)


def test_the_largest_integers_are_kept() -> None:
    body = {"chunks": [{"type": "encoded_text", "tokens": [-(2**63), 2**63 - 1]}]}
    assert schemas.read(schemas.Prompt, body)[0].chunks[0].tokens == [-(2**63), 2**63 - 1]
