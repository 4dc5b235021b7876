"""The built-in generator samples from models with soft-caps and attention sinks as transformers does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import CHANGED_SCORES

from camshaft.contracts.rollout.harness import Case, RolloutHarness
from camshaft.contracts.rollout.suite import RULES
from camshaft.contracts.rules import Rule
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin.cpu import traced_decoder
from camshaft.rollout.builtin.rollout import TorchRollout


class FamilyHarness(RolloutHarness):
    """The harness of the contract with another default model."""

    default_family = "gemma2"

    def empty_case(self, family: str = "qwen2", sizes: dict[str, Any] | None = None, **config: Any) -> Case:
        if family == "qwen2":
            family, sizes = self.default_family, CHANGED_SCORES[self.default_family] | (sizes or {})
        return super().empty_case(family, sizes, **config)


class GptOssHarness(FamilyHarness):
    default_family = "gpt_oss"


HARNESSES: dict[str, type[FamilyHarness]] = {"gemma2": FamilyHarness, "gpt_oss": GptOssHarness}
ELSEWHERE = {"weight errors name the weight", "thousands of prompts", "model types", "stop strings end a row"}
"""Rules that name weights of dense models, take long, or depend on the text of one model."""
FAST = {"rows do not depend on the batch", "prompts of mixed lengths", "greedy matches transformers"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(
    "rule",
    [pytest.param(r, marks=[pytest.mark.slow] * (r.name not in FAST)) for r in RULES if r.name not in ELSEWHERE],
    ids=lambda rule: rule.name.replace(" ", "_"),
)
@pytest.mark.parametrize("family", HARNESSES)
def test_rollout_keeps_rule(family: str, rule: Rule, folder: Path) -> None:
    rule.check(HARNESSES[family](TorchRollout, folder))


@pytest.mark.parametrize("family", HARNESSES)
def test_64_greedy_tokens_and_log_probs_are_those_of_transformers(family: str, folder: Path) -> None:
    """The fourth row waits for a slot, and rows end at different times."""
    case = HARNESSES[family](TorchRollout, folder).case(max_num_seqs=3, max_model_len=128)
    harness = HARNESSES[family](TorchRollout, folder)
    prompts = harness.prompts(3, 14, 1, 9)
    sampling = SamplingParams(64, temperature=0, ignore_eos=True)
    out = case.rollout.generate_sequences(prompts, sampling)
    for prompt, response in zip(prompts.rows(), out.responses.rows(), strict=True):
        assert response.tolist() == case.generate(prompt, 64, [])
    expected = case.log_probs(prompts, out.responses, sampling)
    torch.testing.assert_close(out.log_probs.values.double(), expected.values.double(), rtol=0, atol=1e-5)


def test_soft_capped_decode_steps_are_traced(folder: Path) -> None:
    case = FamilyHarness(TorchRollout, folder).case(max_num_seqs=traced_decoder.MIN_ROWS)
    rollout: Any = case.rollout
    prompts = FamilyHarness(TorchRollout, folder).prompts(*[5] * traced_decoder.MIN_ROWS)
    sampling = SamplingParams(traced_decoder.MIN_STEPS, ignore_eos=True)
    out = rollout.generate_sequences(prompts, sampling)
    assert rollout.decoder.reason is None
    assert rollout.decoder._traced is not None
    case.check_log_probs(prompts, out, sampling)
