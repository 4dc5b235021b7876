"""Datums become rows, and wrong ones become errors that name datum, field, index, value and remedy."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.tinker_clients import datum, put, read_output, training_request

from camshaft.dataproto import Ragged
from camshaft.service import codec
from camshaft.service.errors import CommandError
from camshaft.service.futures import Result
from camshaft.wire import messages

LIMITS = codec.Limits(num_data=2, context=6, vocabulary=100)
RATIO: dict[str, Any] = {"logprobs": [0.0, 0.0], "advantages": [1.0, 1.0]}


def rows(*data: Any, loss: str = "cross_entropy", **options: Any) -> Any:
    request = training_request("m", 1, data, loss, **options)
    return codec.read_rows(request, codec.read_loss(request)[0], LIMITS)


def test_entry_j_of_a_row_belongs_to_the_prediction_of_token_j() -> None:
    batch = rows(datum([5, 6, 7], targets=[0, 50, 3], weights=[0.0, 1.0, -2.0]), datum([8, 9]))
    columns = {name: [row.tolist() for row in batch.ragged(name).rows()] for name in batch.columns}
    assert columns == {
        "input_ids": [[5, 6, 7, 3], [8, 9]],
        "targets": [[0, 0, 50, 3], [0, 9]],
        "loss_mask": [[False, True, True, True], [False, True]],
        "weights": [[0.0, 0.0, 1.0, -2.0], [0.0, 1.0]],
    }


def test_chunks_of_text_are_one_row() -> None:
    message = datum([5, 6, 7], targets=[1, 2, 3])
    message.model_input[0].encoded_text.tokens = np.array([5], "<i4").tobytes()
    message.model_input.add().encoded_text.tokens = np.array([6, 7], "<i4").tobytes()
    assert rows(message).ragged("input_ids").values.tolist() == [5, 6, 7, 3]


def test_the_newer_form_of_an_option_wins() -> None:
    request = training_request("m", 1, [datum([1, 2])], "ppo", clip_low_threshold=0.9)
    request.loss_fn_config["clip_low_threshold"] = 0.1
    request.loss_fn_config["clip_high_threshold"] = 1.5
    assert codec.read_loss(request)[1] == {"clip_low_threshold": 0.9, "clip_high_threshold": 1.5}


def with_input(name: str, values: np.ndarray, base: Any = None) -> Any:
    message = base or datum([5, 6, 7])
    message.loss_fn_inputs.pop(name, None)
    put(message, name, values)
    return message


def image() -> Any:
    message = datum([5, 6, 7])
    message.model_input.add().image.data = b"x"
    return message


def without_targets() -> Any:
    message = datum([5, 6, 7])
    del message.loss_fn_inputs["target_tokens"]
    return message


@pytest.mark.parametrize(
    ("data", "loss", "sentence"),
    [
        ([], "cross_entropy", "the request has no datum; pass at least one"),
        ([datum([1, 2])] * 3, "cross_entropy", "the request has 3 datums, and this server accepts 2"),
        ([datum([1, 2]), datum([5, 200])], "cross_entropy", r"datum 1: target_tokens\[0\] is 200, but the token ids"),
        ([datum([5, -1, 2])], "cross_entropy", r"datum 0: model_input\[1\] is -1, but"),
        ([datum([], targets=[])], "cross_entropy", "datum 0: model_input has no token; give it at least one"),
        ([datum([1] * 7)], "cross_entropy", "datum 0: model_input has 6 tokens, and this server accepts 5"),
        ([datum([5, 6], targets=[1])], "cross_entropy", "datum 0: target_tokens has 1 entries for 2 tokens"),
        ([without_targets()], "cross_entropy", "datum 0: target_tokens is missing; give one token for each"),
        ([image()], "cross_entropy", "datum 0: chunk 1 of model_input is image, and this server trains on text only"),
        (
            [with_input("target_tokens", np.zeros((2, 3), "<i8"))],
            "cross_entropy",
            r"target_tokens has shape \[2, 3\]; several targets per position are not supported",
        ),
        ([with_input("target_tokens", np.zeros(2, "<f4"))], "cross_entropy", "has dtype float32; give integers"),
        ([datum([5, 6, 7], weights=[1.0])], "cross_entropy", "datum 0: weights has 1 entries for 2 tokens"),
        (
            [datum([5, 6, 7], weights=[1.0, float("nan")])],
            "cross_entropy",
            r"datum 0: weights\[1\] is nan; give finite",
        ),
        ([datum([5, 6, 7], mask=[1.0, 1.0])], "cross_entropy", "datum 0: loss_fn_inputs: .*does not read.*'mask'"),
        ([datum([5, 6, 7])], "ppo", "datum 0: loss_fn_inputs: .*requires.*'logprobs'"),
        ([datum([5, 6, 7])], "stable_reinforce", "its formula is not public; set loss_fn=importance_sampling"),
        ([datum([5, 6, 7])], "grpo", "loss_fn=grpo is not supported: the losses are cross_entropy, importance"),
        ([datum([5, 6, 7], **RATIO)], "dro", "requires the option 'beta'"),
    ],
)
def test_a_wrong_datum_is_named(data: list[Any], loss: str, sentence: str) -> None:
    with pytest.raises(CommandError, match=sentence):
        rows(*data, loss=loss)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(CommandError, match="no option 'clip'"):
        rows(datum([5, 6, 7], **RATIO), loss="ppo", clip=0.1)


def test_bytes_that_do_not_fit_the_shape_are_named() -> None:
    message = datum([5, 6, 7], weights=[1.0, 2.0])
    message.loss_fn_inputs["weights"].shape[0] = 3
    with pytest.raises(CommandError, match=r"datum 0: weights has 2 entries, but its shape is \[3\]"):
        rows(message)


def test_the_output_leaves_out_the_first_token_of_each_row() -> None:
    log_probs = Ragged.from_rows([[0.0, -1.0, -2.0], [0.0, -3.0]])
    content = codec.write_output(log_probs, 6.0).SerializeToString()
    assert read_output(content) == ([[-1.0, -2.0], [-3.0]], 6.0)
    field = messages.ForwardBackwardOutput.FromString(content).loss_fn_outputs[0].fields["logprobs"]
    assert np.frombuffer(field.offsets, "<i8").tolist() == [0, 8, 12]  # bytes


@pytest.mark.parametrize(
    ("change", "expected"), [(0.0, 0.0), (0.25, 0.25), (-0.5, 0.5)], ids=["equal", "larger", "smaller"]
)
def test_the_difference_of_results_is_the_largest_of_a_number(change: float, expected: float) -> None:
    def result(value: float) -> Result:
        rows = Ragged.from_rows([torch.tensor([0.0, -1.0, value]), torch.tensor([0.0, -2.0])])
        return Result.of_message(codec.write_output(rows, 4.0))

    assert codec.difference(result(-3.0), result(-3.0 + change)) == expected


def test_results_that_are_not_comparable_differ_infinitely() -> None:
    step = Result.of_json({"metrics": {"grad_norm": 1.0}})
    failed = Result.of_error("user", "wrong")
    assert codec.difference(step, Result.of_json({"metrics": {"grad_norm": 1.5}})) == 0.5
    assert codec.difference(failed, failed) == 0.0
    for other in (failed, Result.of_json({"metrics": {}}), Result.of_message(codec.write_samples([]))):
        assert codec.difference(step, other) == math.inf
