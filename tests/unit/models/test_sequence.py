"""A packed row over several ranks equals the same row in one process.

Other tests compare the packed model of the one process with transformers.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_warm_ranks, world_group
from support.tiny import CHANGED_SCORES, predicted_tokens, tiny_folder, tiny_rows
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig, Qwen3NextConfig

from camshaft.config.engine import EngineConfig, EngineModel
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine.single import SingleDeviceEngine
from camshaft.errors import EngineError
from camshaft.models.attention import packed_kwargs
from camshaft.models.loader import load_model
from camshaft.models.packed import Head, PackedModel
from camshaft.models.packing import Packing, pad_tokens
from camshaft.models.sequence import SequenceSplit, check_heads, join_columns, split_columns

LENGTHS = [7, 1, 13, 4, 2]  # 27 tokens: neither 2 nor 4 divides them
NEAR = 1e-6
OUTPUTS: dict[Head, tuple[str, ...]] = {
    "causal_lm": ("log_probs", "entropy"),
    "value": ("values",),
    "reward": ("scores",),
}
Numbers = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Outputs and parameter gradients, by name."""


def model_of(folder: str, head: Head, train: bool = False) -> PackedModel:
    described = EngineModel(path=folder, head=head, random_init=head == "reward", enable_gradient_checkpointing=train)
    return load_model(described, "float32", "cpu", seed=0).train(train)


def numbers(model: PackedModel, lengths: Sequence[int], at: Tensor) -> Numbers:
    """Return the outputs, and the gradient of a loss that weights each output differently."""
    model.zero_grad()
    outputs = model(torch.cat(tiny_rows(lengths)), Packing(lengths), at, OUTPUTS[model.head], temperature=0.8)
    random = torch.Generator().manual_seed(1)
    terms = [(value * torch.randn(value.shape, generator=random)).sum() for value in outputs.values()]
    (torch.stack(terms).sum() / sum(lengths)).backward()
    named = model.hf.named_parameters()
    gradients = {name: weight.grad.clone() for name, weight in named if weight.grad is not None}
    return {name: value.detach() for name, value in outputs.items()}, gradients


def summed(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return gradients


def on_each_rank(folder: str, head: Head, lengths: list[int], at: Tensor, train: bool) -> Numbers:
    model = model_of(folder, head, train)
    model.sequence = SequenceSplit(world_group())
    outputs, gradients = numbers(model, lengths, at)
    return outputs, summed(gradients)


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name], tensor, rtol=NEAR, atol=NEAR, msg=lambda text, name=name: f"{name}: {text}"
        )


def folder_of(family: str, **sizes: Any) -> str:
    return str(tiny_folder(family, hidden=32, initializer_range=0.1, **sizes))


MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},  # 2 key heads: with 4 ranks each head is on two of them
    "llama": {"kv_heads": 4, "tie_embeddings": False},
    "mistral": {"sliding_window": 5},
    "qwen3": {"heads": 12, "kv_heads": 6, "hidden": 96},  # 4 does not divide 6, and 6 does not divide 4
    **CHANGED_SCORES,
}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", MODELS)
def test_log_probs_and_gradients_do_not_depend_on_ranks(family: str, size: int):
    folder = str(tiny_folder(family, **{"hidden": 32, "initializer_range": 0.1, **MODELS[family]}))
    expected = numbers(model_of(folder, "causal_lm"), LENGTHS, predicted_tokens(LENGTHS))
    assert expected[0]["log_probs"].std() > 0.05
    for outputs, gradients in run_warm_ranks(
        on_each_rank, size, folder, "causal_lm", LENGTHS, predicted_tokens(LENGTHS), False
    ):
        same(outputs, expected[0])
        same(gradients, expected[1])


@pytest.mark.parametrize("head", ["value", "reward"])
def test_values_and_scores_do_not_depend_on_the_ranks(head: Head):
    folder = folder_of("llama")
    expected = numbers(model_of(folder, head), LENGTHS, predicted_tokens(LENGTHS))
    assert next(iter(expected[0].values())).std() > 0.01
    for outputs, gradients in run_warm_ranks(on_each_rank, 4, folder, head, LENGTHS, predicted_tokens(LENGTHS), False):
        same(outputs, expected[0])
        same(gradients, expected[1])


@pytest.mark.parametrize(
    ("lengths", "at"),
    [
        ([9, 6], [12, 13, 14]),  # only the last rank has outputs
        ([9, 6], [14, 2, 8, 3, 11]),  # not in order
        ([3], [1, 2]),  # fewer tokens than ranks
        ([6, 6], []),
    ],
)
@pytest.mark.parametrize("head", ["causal_lm", pytest.param("value", marks=pytest.mark.slow)])
def test_every_rank_takes_part_for_any_output_positions(head: Head, lengths: list[int], at: list[int]):
    folder, places = folder_of("qwen2"), torch.tensor(at, dtype=torch.int64)
    expected = numbers(model_of(folder, head), lengths, places)
    for outputs, gradients in run_warm_ranks(on_each_rank, 4, folder, head, lengths, places, False):
        same(outputs, expected[0])
        same(gradients, expected[1])  # and the same names: a rank without outputs has gradients for all parameters


def test_gradient_checkpointing_exchanges_again_in_the_backward_pass():
    folder = folder_of("qwen2")
    expected = numbers(model_of(folder, "causal_lm"), LENGTHS, predicted_tokens(LENGTHS))
    for outputs, gradients in run_warm_ranks(
        on_each_rank, 2, folder, "causal_lm", LENGTHS, predicted_tokens(LENGTHS), True
    ):
        same(outputs, expected[0])
        same(gradients, expected[1])


def engine_step(folder: str) -> dict[str, Ragged]:
    engine = SingleDeviceEngine(EngineConfig(model=EngineModel(path=folder), device="cpu"))
    engine.init_model()
    if dist.get_world_size() > 1:
        engine.module.sequence = SequenceSplit(world_group())
    ids = Ragged.from_rows(tiny_rows(LENGTHS))
    batch = DataProto.from_dict({"input_ids": ids, "loss_mask": ids.like(ids.positions() >= 2)})
    with engine.eval_mode():
        return dict(engine.infer_batch(batch))


def test_every_rank_passes_full_rows_to_an_engine_step():
    folder = folder_of("qwen2")
    (alone,) = run_warm_ranks(engine_step, 1, folder)
    for predictions in run_warm_ranks(engine_step, 2, folder):
        torch.testing.assert_close(predictions["log_probs"].values, alone["log_probs"].values, rtol=0, atol=NEAR)


def with_dropout(folder: str) -> tuple[Tensor, Tensor]:
    described = EngineModel(path=folder, override_config={"attention_dropout": 0.5})
    model = load_model(described, "float32", "cpu", seed=0)
    model.sequence = SequenceSplit(world_group())
    inputs = (torch.cat(tiny_rows(LENGTHS)), Packing(LENGTHS), predicted_tokens(LENGTHS), ("log_probs",))
    calm = model(*inputs)["log_probs"].detach()
    return calm, model.train()(*inputs)["log_probs"].detach()


def test_attention_dropout_acts_in_train_mode():
    (calm, trained), (_, other) = run_warm_ranks(with_dropout, 2, folder_of("qwen2"))
    assert not torch.allclose(calm, trained)
    assert torch.equal(trained, other)


# -- unsupported models ----------------------------------------------------------------------------


def test_heads_that_do_not_divide_are_rejected():
    config = AutoConfig.from_pretrained(folder_of("qwen2"))
    check_heads(config, 4)
    with pytest.raises(
        EngineError,
        match="the 4 query heads of this qwen2 model cannot be split evenly over 3 sequence-parallel ranks;",
    ):
        check_heads(config, 3)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
            r"depend on the longest row of a call \(rope_type=dynamic\)",
        ),
        (Qwen3NextConfig(), "a recurrent state, which sequence parallelism does not support"),
    ],
)
def test_layers_that_need_whole_rows_are_rejected(config: PreTrainedConfig, reason: str):
    check_heads(config, 1)
    with pytest.raises(EngineError, match=reason):
        check_heads(config, 2)


def three_ranks(folder: str) -> None:
    on_each_rank(folder, "causal_lm", LENGTHS, predicted_tokens(LENGTHS), False)


def test_indivisible_heads_are_an_error_in_the_call():
    with pytest.raises(EngineError, match="4 query heads cannot be split evenly over 3 sequence-parallel ranks"):
        run_warm_ranks(three_ranks, 3, folder_of("qwen2"))


def test_a_chunk_without_exchange_is_an_error():
    model = model_of(folder_of("qwen2"), "causal_lm")
    inputs = packed_kwargs(Packing([6, 4]), "cpu")
    inputs["position_ids"] = inputs["position_ids"][:, :5]
    with pytest.raises(EngineError, match="a packing of 10 tokens does not match input_ids with 5 tokens"):
        model.hf.base_model(input_ids=torch.arange(5)[None], **inputs)


# -- batches ---------------------------------------------------------------------------------------


def batch_of(lengths: list[int]) -> DataProto:
    ids = Ragged.from_rows(tiny_rows(lengths), dtype=torch.int64)
    random = torch.Generator().manual_seed(2)
    wide = torch.randn(sum(lengths), 3, generator=random)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "loss_mask": ids.like(ids.positions() > 0),
            "old_log_probs": ids.like(torch.randn(sum(lengths), generator=random).bfloat16()),
            "wide": ids.like(wide),
            "responses": ids.suffix(ids.lengths // 2),
            "reward": torch.arange(len(lengths)) / 2,
            "uid": [f"row {i}" for i in range(len(lengths))],
        },
        {"step": 3},
    )


def split_and_merge(lengths: list[int]) -> tuple[DataProto, DataProto]:
    split = SequenceSplit(world_group())
    part = split_columns(batch_of(lengths), split)
    return part, join_columns(part, split)


@pytest.mark.parametrize(("size", "lengths"), [(2, [5, 1, 7, 4]), (4, [5, 1, 7, 4]), (4, [2, 3]), (2, [1])])
def test_split_columns_are_restored(size: int, lengths: list[int]):
    batch = batch_of(lengths)
    for _, back in run_warm_ranks(split_and_merge, size, lengths):
        assert back.meta_info == {"step": 3}
        assert list(back.columns) == list(batch.columns)
        batch.union(back)  # raises an error with the column name if two ranks differ in values, lengths or dtype


def test_a_part_has_the_tokens_of_its_rank():
    # 17 tokens over 2 ranks: 9 and 8. The first rank has rows of 5 and 1 and 3 of the 7 tokens of the third row.
    (first, _), (second, _) = run_warm_ranks(split_and_merge, 2, [5, 1, 7, 4])
    assert first["input_ids"].lengths.tolist() == [5, 1, 3, 0]
    assert second["input_ids"].lengths.tolist() == [0, 0, 4, 4]
    rows = tiny_rows([5, 1, 7, 4])
    assert torch.equal(first["input_ids"].rows()[2], rows[2][:3])
    assert torch.equal(second["input_ids"].rows()[2], rows[2][3:])
    assert torch.equal(second["reward"], torch.arange(4) / 2)


def test_padding_repeats_a_token_of_the_batch() -> None:
    tokens = torch.tensor([7, 0, 3])
    assert pad_tokens(tokens, 2).tolist() == [7, 0, 3, 7, 7]
    assert pad_tokens(tokens, 0) is tokens
