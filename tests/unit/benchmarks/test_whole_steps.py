"""Tests of the benchmarks with a critic and against TRL that do not need TRL."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import careful_ppo
import ppo_step
import trl_side
from camshaft_side import config, with_critic
from careful import CarefulCritic
from workload import Rows

from camshaft.data.tables import write_parquet
from camshaft.models.tiny import make_tiny_model


@pytest.fixture
def steps(tmp_path: Path) -> Any:
    make_tiny_model(tmp_path, hidden=16, layers=1)
    write_parquet(tmp_path / "train.parquet", [{"prompt": "ab"}, {"prompt": "c"}])
    return trl_side.Steps(tmp_path)


def test_a_missing_environment_names_its_make_target(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"there is no .*/no-such/bin/python: `make trl` makes no-such"):
        ppo_step.interpreter("no-such")


def test_a_step_spans_two_consecutive_pauses(steps: Any) -> None:
    calls = []

    def train() -> None:
        for number in range(4):
            steps.rest()
            calls.append(number)
            steps.lengths += [10, number]

    assert steps.prompts == ["ab", "c"]
    steps.begin(train)
    assert calls == []
    assert [steps.step() for _ in range(2)] == [{"lengths": [10, 0]}, {"lengths": [10, 1]}]
    assert calls == [0, 1]


def test_a_failing_loop_ends_its_side(steps: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        steps.rest()
        raise ValueError("no more memory")

    steps.begin(train)
    with pytest.raises(SystemExit, match="TRL's loop ended"):
        steps.step()
    assert "ValueError: no more memory" in capsys.readouterr().err


def test_reward_module_counts_even_ids_of_real_tokens() -> None:
    even = trl_side.EvenShare()
    even.starts = 2
    ids = torch.tensor([[0, 8, 4, 6, 7, 0], [9, 9, 5, 2, 0, 0]])  # two of a prompt, 0 for padding
    real = ids != 0
    scores = even.score(even.backbone(input_ids=ids, attention_mask=real).hidden_states[-1])
    assert torch.allclose(scores[..., 0], torch.tensor([[2 / 3] * 6, [1 / 2] * 6]))
    assert even.lengths == [3, 2]


def test_advantages_of_the_careful_loop_by_hand() -> None:
    rewards, values = [torch.tensor([0.0, 1.0]), torch.tensor([2.0])], [torch.tensor([0.5, 0.25]), torch.tensor([0.5])]
    first, second = careful_ppo.gae(rewards, values)
    # The last token: 1 - 0.25 = 0.75. The one before: 0 + 0.25 - 0.5 + 0.95 * 0.75.
    assert first.tolist() == pytest.approx([0.4625, 0.75])
    assert second.tolist() == pytest.approx([1.5])


def test_the_value_loss_of_the_careful_loop_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(tmp_path, hidden=16, layers=1)
    critic = CarefulCritic(tmp_path)
    monkeypatch.setattr(critic, "values", lambda part: torch.tensor([1.0, 1.0]))
    rows = Rows([], [], [], [], [torch.tensor([0.0]), torch.tensor([0.75])], [torch.tensor([2.0, 2.0])])
    # The first value moved by 1, clipped to 0.5: (2 - 0.5)^2 exceeds (2 - 1)^2. The second moved by 0.25.
    assert float(critic.loss(rows)) == pytest.approx((2.25 + 1.0) / 2)


def test_a_step_changes_actor_and_critic_but_not_the_reference(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, hidden=16, layers=1)
    torch.manual_seed(0)
    loop = careful_ppo.CarefulPPO(tmp_path, learning_rate=1e-3)
    trained = {name: part.state_dict() for name, part in (("actor", loop.model), ("critic", loop.critic.model))}
    before = {name: {k: v.clone() for k, v in state.items()} for name, state in trained.items()}
    kept = {key: value.clone() for key, value in loop.reference.state_dict().items()}
    lengths = loop.step([torch.tensor([5, 6, 7]), torch.tensor([8])])["lengths"]
    assert len(lengths) == 16
    assert min(lengths) >= 1
    for name, state in trained.items():
        assert any(not torch.equal(state[key], before[name][key]) for key in state), name
    assert all(torch.equal(value, kept[key]) for key, value in loop.reference.state_dict().items())


def test_settings_with_a_critic_match_the_stated_numbers(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, hidden=16, layers=1)
    (tmp_path / "train.parquet").touch()
    actual = config(tmp_path, **with_critic(tmp_path))
    assert actual.needs_critic()
    assert actual.kl_plan().needs_log_probs
    assert (actual.algorithm.lam, actual.algorithm.gamma, actual.algorithm.kl_ctrl.kl_coef) == (0.95, 1.0, 0.05)
    assert actual.critic_mini_batch() == actual.actor_mini_batch()
