"""The built-in generator samples from models with recurrent states as transformers does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import LINEAR

from camshaft.contracts.rollout.harness import RolloutHarness
from camshaft.ragged import Ragged
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin.rollout import TorchRollout

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": LINEAR,
    "qwen3_next": {**LINEAR, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "olmo_hybrid": LINEAR,
    "minimax": {"layer_types": LINEAR["layer_types"], "num_local_experts": 4, "block_size": 8},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("family", SIZES)
def test_sixty_four_greedy_tokens_and_their_log_probs(folder: Path, family: str) -> None:
    harness = RolloutHarness(TorchRollout, folder)
    case, prompts = harness.empty_case(family, SIZES[family], max_num_seqs=3), harness.prompts(5, 17, 9, 1, 5)
    for weight in case.oracle.parameters():
        weight.data /= 3 if weight.ndim > 1 else 1  # with less rounding than the sharper weights of the contract
    buffers = [item for item in case.oracle.named_buffers() if item[0] in case.oracle.state_dict()]
    case.rollout.load_weights([*case.weights(), *buffers])
    out = case.rollout.generate_sequences(prompts, SamplingParams(64, temperature=0, ignore_eos=True))
    for prompt, response in zip(prompts.rows(), out.responses.rows(), strict=True):
        assert response.tolist() == case.generate(prompt, 64, [])
    expected = case.untruncated_log_probs(prompts, out.responses)
    torch.testing.assert_close(out.log_probs.values.double(), expected.values, rtol=0, atol=1e-5)


def test_rows_that_join_and_leave_do_not_change_a_neighbour(folder: Path) -> None:
    harness = RolloutHarness(TorchRollout, folder)
    case = harness.case("qwen3_5_text", LINEAR, max_num_seqs=4)
    prompts = harness.prompts(6, 11, 3).select([0, *[1] * 5, *[2] * 7])
    sampling, seeds = SamplingParams(40, stop_token_ids=tuple(range(3, 14))), torch.arange(13)
    out = case.rollout.generate_sequences(prompts, sampling, seeds)
    assert len(set(out.responses.lengths.tolist())) > 3
    for row, response in enumerate(out.responses.rows()):
        alone = case.rollout.generate_sequences(Ragged.from_rows([prompts.rows()[row]]), sampling, seeds[row : row + 1])
        assert alone.responses.rows()[0].tolist() == response.tolist()
