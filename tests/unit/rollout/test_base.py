"""Code shared by all rollouts: validation of a call and seeds of its rows."""

from typing import Any

import pytest
import torch

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import ConfigError, RolloutError
from camshaft.ragged import Ragged
from camshaft.rollout import BaseRollout, Generation, SamplingParams, build_rollout


class NoCapabilities(BaseRollout):
    """A rollout without capabilities."""

    def load_weights(self, weights: Any) -> None: ...

    def weight_digests(self) -> dict[str, int]:
        return {}

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Any = None) -> Generation:
        return Generation.empty(prompts)

    def sleep(self) -> None: ...

    def wake_up(self) -> None: ...


def mute(**config: Any) -> NoCapabilities:
    return NoCapabilities(RolloutEngineConfig(model_path="nowhere", **config))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": -0.5}, "temperature must be 0 .* got -0.5"),
        ({"temperature": float("nan")}, "temperature .* got nan"),
        ({"top_k": -2}, "top_k .* got -2"),
        ({"top_p": 0.0}, "top_p .* got 0.0"),
        ({"top_p": 1.5}, "top_p .* got 1.5"),
        ({"min_p": -0.1}, "min_p .* got -0.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty .* got 0.0"),
        ({"presence_penalty": 2.5}, "presence_penalty .* got 2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty .* got nan"),
        ({"stop": "###"}, "stop must be a tuple of non-empty strings, got '###'"),
        ({"stop": ("###", "")}, "stop must be a tuple of non-empty strings, got"),
    ],
)
def test_impossible_sampling_is_rejected_with_its_value(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        SamplingParams(**{"max_tokens": 4, **wrong})


def test_temperature_zero_or_do_sample_off_is_greedy() -> None:
    assert SamplingParams(4, temperature=0).greedy
    assert SamplingParams(4, do_sample=False).greedy
    assert not SamplingParams(4, temperature=0.1, top_k=0).greedy


def test_rows_are_limited_by_max_tokens_and_max_model_len() -> None:
    prompts = Ragged.from_rows([[1] * 3, [1] * 9, [1] * 6])
    assert mute(max_model_len=10).limits(prompts, SamplingParams(4), 50).tolist() == [4, 1, 4]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1], []], "row 1 has an empty prompt"),
        ([[1], [2] * 10], "row 1 has a prompt of 10 tokens, but max_model_len=10 allows prompts of at most 9 tokens"),
        ([[1], [2], [3, 50]], "row 2 has token id 50, but the model's token ids are 0..49"),
        ([[1, -4]], "row 0 has token id -4"),
    ],
)
def test_a_prompt_without_room_for_a_response_is_named(rows: list[list[int]], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        mute(max_model_len=10).limits(Ragged.from_rows(rows, torch.int64), SamplingParams(4), 50)


def test_calls_without_seeds_are_numbered() -> None:
    rollout, twin, other = mute(seed=1), mute(seed=1), mute(seed=2)
    first, second = rollout.seeds_of_call(5, None), rollout.seeds_of_call(5, None)
    assert len({*first.tolist(), *second.tolist(), *other.seeds_of_call(5, None).tolist()}) == 15
    assert torch.equal(twin.seeds_of_call(5, None), first)


@pytest.mark.parametrize("seeds", [torch.arange(4), torch.zeros(3), torch.zeros(3, 1, dtype=torch.int64)])
def test_seeds_that_are_not_one_integer_per_row_are_rejected(seeds: torch.Tensor) -> None:
    with pytest.raises(RolloutError, match=r"seeds must be an int64 tensor of shape \(3,\)"):
        mute().seeds_of_call(3, seeds)


def test_an_unknown_generator_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'torch'"):
        build_rollout("tourch", RolloutEngineConfig(model_path="nowhere"))
