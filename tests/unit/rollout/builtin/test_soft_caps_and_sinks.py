"""The built-in generator samples from models with soft-caps and attention sinks as transformers does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import CHANGED_SCORES

from camshaft.contracts.rollout.harness import RolloutHarness
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin.cpu import traced_decoder
from camshaft.rollout.builtin.rollout import TorchRollout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("family", CHANGED_SCORES)
def test_64_greedy_tokens_and_log_probs_are_those_of_transformers(family: str, folder: Path) -> None:
    """The fourth row waits for a slot, and rows end at different times."""
    harness = RolloutHarness(TorchRollout, folder)
    case = harness.case(family, CHANGED_SCORES[family], max_num_seqs=3, max_model_len=128)
    prompts = harness.prompts(3, 14, 1, 9)
    sampling = SamplingParams(64, temperature=0, ignore_eos=True)
    out = case.rollout.generate_sequences(prompts, sampling)
    for prompt, response in zip(prompts.rows(), out.responses.rows(), strict=True):
        assert response.tolist() == case.generate(prompt, 64, [])
    expected = case.log_probs(prompts, out.responses, sampling)
    torch.testing.assert_close(out.log_probs.values.double(), expected.values.double(), rtol=0, atol=1e-5)


def test_soft_capped_decode_steps_are_traced(folder: Path) -> None:
    harness = RolloutHarness(TorchRollout, folder)
    case = harness.case("gemma2", CHANGED_SCORES["gemma2"], max_num_seqs=traced_decoder.MIN_ROWS)
    rollout: Any = case.rollout
    prompts = harness.prompts(*[5] * traced_decoder.MIN_ROWS)
    sampling = SamplingParams(traced_decoder.MIN_STEPS, ignore_eos=True)
    out = rollout.generate_sequences(prompts, sampling)
    assert rollout.decoder.reason is None
    assert rollout.decoder._traced is not None
    case.check_log_probs(prompts, out, sampling)
