"""The built-in generator returns the experts that a mixture of experts chose for each token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.moe import MODELS, MoEHarness, load_oracle
from support.tiny import tiny_folder, tiny_rows
from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.dataproto import Ragged
from camshaft.engine import engine_class
from camshaft.errors import RolloutError
from camshaft.rollout import Generation, SamplingParams, rollout_class
from camshaft.rollout.builtin.rollout import TorchRollout


def generate(folder: Path, prompts: Ragged, generated: Ragged | None = None, **fields: Any) -> Generation:
    fields = {"enable_return_routed_experts": True, "max_num_seqs": 3, "max_model_len": 64} | fields
    rollout = TorchRollout(RolloutEngineConfig(model_path=str(folder), **fields))
    rollout.load_weights(load_oracle(folder).state_dict().items())
    return rollout.generate_sequences(prompts, SamplingParams(max_tokens=20), torch.arange(len(prompts)), generated)


def oracle_choices(folder: Path, tokens: Tensor) -> Tensor:
    """Return the choices (tokens, layers, top-k) of transformers for one sequence."""
    model = load_oracle(folder)
    choices: list[Tensor] = []
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda module, args, output: choices.append(output[2]))
    with torch.no_grad():
        model(input_ids=tokens[None], use_cache=False)
    return torch.stack(choices, dim=1)


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return MoEHarness(engine_class("reference"), tmp_path, None, MODELS[request.param]).model_folder


@pytest.mark.parametrize(
    "folder", [pytest.param("qwen3_moe"), pytest.param("mixed", marks=pytest.mark.slow)], indirect=True
)
def test_generator_returns_the_choices_of_transformers(folder: Path) -> None:
    first, second, third = tiny_rows([5, 9, 3], seed=2)
    prompts = Ragged.from_rows([first, second, first, first, third, first, second])
    out = generate(folder, prompts)
    experts = out.routed_experts
    assert experts is not None
    assert experts.values.dtype == torch.uint8
    assert torch.equal(experts.lengths, prompts.lengths + out.responses.lengths)
    assert len(set(out.responses.lengths.tolist())) > 1, "rows end at different steps"
    for prompt, response, choices in zip(prompts.rows(), out.responses.rows(), experts.rows(), strict=True):
        expected = oracle_choices(folder, torch.cat([prompt, response]))
        assert torch.equal(choices[:-1].long(), expected[:-1])
        assert bool((choices[-1] == 255).all())
    assert len(out.to("cpu").routed_experts or ()) == len(prompts)


@pytest.mark.parametrize("folder", ["qwen3_moe"], indirect=True)
def test_choices_of_continued_rows_follow_those_of_earlier_calls(folder: Path) -> None:
    prompts, cuts = Ragged.from_rows(tiny_rows([5, 9, 5], seed=2)), torch.tensor([4, 0, 20])
    full = generate(folder, prompts)
    generated = full.responses.prefix(full.responses.lengths.minimum(cuts))
    rest = generate(folder, prompts, generated)
    assert full.routed_experts is not None
    assert rest.routed_experts is not None
    first, second, third = rest.routed_experts.rows()
    assert torch.equal(first, full.routed_experts.rows()[0][5 + 4 :])  # new tokens only
    assert torch.equal(second, full.routed_experts.rows()[1])  # a new row, with its prompt
    assert len(third) == 0  # an ended row


@pytest.mark.parametrize("folder", ["mixtral"], indirect=True)
def test_rows_are_not_kept_because_their_choices_are_not(folder: Path) -> None:
    config = RolloutEngineConfig(model_path=str(folder), max_model_len=64)
    assert TorchRollout(config).capabilities.keeps_rows
    recording = config.model_copy(update={"enable_return_routed_experts": True})
    assert not TorchRollout(recording).capabilities.keeps_rows


@pytest.mark.parametrize("folder", ["mixtral"], indirect=True)
def test_choices_do_not_change_tokens_and_are_omitted_by_default(folder: Path) -> None:
    prompts = Ragged.from_rows(tiny_rows([5, 4], seed=1))
    recorded, usual = generate(folder, prompts), generate(folder, prompts, enable_return_routed_experts=False)
    assert usual.routed_experts is None
    assert torch.equal(recorded.responses.values, usual.responses.values)


def test_a_dense_model_has_no_choices_to_return() -> None:
    with pytest.raises(RolloutError, match="requires a mixture of experts with supported routers"):
        generate(tiny_folder("qwen2"), Ragged.from_rows(tiny_rows([3])))


@pytest.mark.parametrize("name", ["hf", "process", "server", "vllm"])
def test_other_rollouts_reject_the_option(name: str) -> None:
    config = RolloutEngineConfig(model_path=str(tiny_folder("qwen2")), enable_return_routed_experts=True)
    with pytest.raises(RolloutError, match=r"does not return expert choices; set .*rollout\.name=torch"):
        rollout_class(name)(config)
