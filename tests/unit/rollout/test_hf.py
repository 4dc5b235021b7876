"""The transformers generator: batches that fit in memory, and the same samples as the built-in generator."""

from typing import Any

import pytest
import torch

from camshaft.contracts.rollout.harness import RolloutHarness
from camshaft.errors import RolloutError
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin.rollout import TorchRollout
from camshaft.rollout.hf import HFRollout


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> RolloutHarness:
    return RolloutHarness(HFRollout, tmp_path_factory.mktemp("models"))


def batches(rollout: Any, lengths: list[int]) -> list[list[int]]:
    return list(rollout.plan_batches(lengths, rollout.config.max_num_batched_tokens))


def test_a_batch_has_at_most_max_num_seqs_rows(harness: RolloutHarness) -> None:
    assert batches(harness.case(max_num_seqs=2).rollout, [3] * 5) == [[0, 1], [2, 3], [4]]


def test_padded_prompt_tokens_of_a_batch_respect_the_limit(harness: RolloutHarness) -> None:
    # 3 x 4 fit in 12; with a row of 6 they would be 4 x 6; a row of 20 is a batch by itself.
    rollout = harness.case(max_num_batched_tokens=12).rollout
    assert batches(rollout, [4, 3, 2, 6, 20, 1]) == [[0, 1, 2], [3], [4], [5]]


def test_batches_are_restored_in_row_order(harness: RolloutHarness) -> None:
    prompts, sampling = harness.prompts(5, 1, 8, 3, 13), SamplingParams(7)
    case = harness.case(max_num_seqs=2)
    out = case.rollout.generate_sequences(prompts, sampling)
    case.check_log_probs(prompts, out, sampling)


def test_batches_do_not_repeat_each_other(harness: RolloutHarness) -> None:
    case, prompts = harness.case(max_num_seqs=1), harness.prompts(4).select([0, 0, 0])
    out = case.rollout.generate_sequences(prompts, SamplingParams(12, ignore_eos=True)).responses.rows()
    assert len({tuple(row.tolist()) for row in out}) == 3


def test_samples_equal_those_of_the_built_in_generator(harness: RolloutHarness) -> None:
    builtin, hf = RolloutHarness(TorchRollout, harness.folder).case(), harness.case(max_num_seqs=2)
    prompts, seeds = harness.prompts(4, 9, 4, 1), torch.arange(4)
    for sampling in (SamplingParams(9, top_p=0.8), SamplingParams(9, temperature=0.7, top_k=9)):
        expected = builtin.rollout.generate_sequences(prompts, sampling, seeds)
        actual = hf.rollout.generate_sequences(prompts, sampling, seeds)
        assert torch.equal(expected.responses.values, actual.responses.values)


def test_generation_config_of_the_folder_is_ignored(harness: RolloutHarness) -> None:
    case, prompts, sampling = harness.case(), harness.prompts(4, 9), SamplingParams(8)
    folder = harness.folder / "qwen2"
    (folder / "generation_config.json").write_text('{"temperature": 0.1, "top_k": 2, "repetition_penalty": 1.5}')
    again = harness.case()
    (folder / "generation_config.json").unlink()
    seeds = torch.tensor([1, 2])
    expected = case.rollout.generate_sequences(prompts, sampling, seeds)
    actual = again.rollout.generate_sequences(prompts, sampling, seeds)
    assert torch.equal(expected.responses.values, actual.responses.values)


def test_metrics_count_padding_and_finished_rows_as_work(harness: RolloutHarness) -> None:
    # Prompts of 4 and 9 tokens are two rows of 9; limits of 5 tokens and, by max_model_len, of 2: of the four steps
    # after the first token the second row needs one.
    case = harness.case(max_model_len=11)
    metrics = case.rollout.generate_sequences(harness.prompts(4, 9), SamplingParams(5, ignore_eos=True)).metrics
    assert metrics.pop("seconds") > 0
    assert metrics == {
        "prompt_tokens_computed": 18,
        "response_tokens": 7,
        "decode_steps": 4,
        "rows_decoded": 8,
        "slot_use": 5 / 8,
    }


def test_non_finite_weights_are_an_error_for_greedy_too(harness: RolloutHarness) -> None:
    case = harness.case()
    case.rollout.load_weights([(name, weight.detach() * float("nan")) for name, weight in case.weights()])
    with pytest.raises(Exception, match="not finite"):
        case.rollout.generate_sequences(harness.prompts(4), SamplingParams(3, temperature=0))


def test_float64_is_rejected(harness: RolloutHarness) -> None:
    with pytest.raises(RolloutError, match=r"does not support dtype=float64.*set rollout\.dtype=float32"):
        harness.case(dtype="float64")
