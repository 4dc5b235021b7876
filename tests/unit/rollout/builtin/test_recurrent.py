"""The built-in generator samples from models with recurrent states as transformers does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.recorders import OperatorCapture
from support.tiny import LINEAR

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.contracts.rollout.harness import Case, RolloutHarness
from camshaft.contracts.rollout.suite import RULES
from camshaft.contracts.rules import Rule
from camshaft.ragged import Ragged
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin.cuda import graphs
from camshaft.rollout.builtin.cuda.graphs import CUDAGraphDecoder, full_length_step
from camshaft.rollout.builtin.rollout import TorchRollout

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": LINEAR,
    "qwen3_next": {**LINEAR, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "olmo_hybrid": LINEAR,
    "minimax": {"layer_types": LINEAR["layer_types"], "num_local_experts": 4, "block_size": 8},
}


class RecurrentHarness(RolloutHarness):
    """A harness whose default model has recurrent states."""

    def empty_case(self, family: str = "qwen2", sizes: dict[str, Any] | None = None, **config: Any) -> Case:
        if family == "qwen2":
            family, sizes = "qwen3_5_text", LINEAR | (sizes or {})
        return super().empty_case(family, sizes, **config)


class Captured(TorchRollout):
    """The built-in generator with captured steps, with a CPU stand-in for CUDA graphs."""

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        self.graphs = CUDAGraphDecoder(self.decoder, self.cache, OperatorCapture(), full_length_step)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


FAST_RULES = {"rows do not depend on the batch", "prompts of mixed lengths", "sleep and wake"}


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=[pytest.mark.slow] * (rule.name not in FAST_RULES)) for rule in RULES],
    ids=lambda rule: rule.name.replace(" ", "_"),
)
@pytest.mark.parametrize("rollout", [TorchRollout, Captured])
def test_generator_keeps_rule(
    rule: Rule, rollout: type[TorchRollout], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MIN_STEPS", 1)
    rule.check(RecurrentHarness(rollout, folder))


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
    case = RecurrentHarness(TorchRollout, folder).case(max_num_seqs=4)
    prompts = RolloutHarness(TorchRollout, folder).prompts(6, 11, 3).select([0, *[1] * 5, *[2] * 7])
    sampling, seeds = SamplingParams(40, stop_token_ids=tuple(range(3, 14))), torch.arange(13)
    out = case.rollout.generate_sequences(prompts, sampling, seeds)
    assert len(set(out.responses.lengths.tolist())) > 3
    for row, response in enumerate(out.responses.rows()):
        alone = case.rollout.generate_sequences(Ragged.from_rows([prompts.rows()[row]]), sampling, seeds[row : row + 1])
        assert alone.responses.rows()[0].tolist() == response.tolist()
