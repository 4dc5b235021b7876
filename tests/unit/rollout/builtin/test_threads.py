"""On a CPU, decode steps of few rows use one thread, and prompts and steps of many rows use all threads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from camshaft.contracts.rollout.harness import RolloutHarness
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin.cpu import threads
from camshaft.rollout.builtin.cpu.threads import MIN_PRODUCT, limited_threads
from camshaft.rollout.builtin.rollout import TorchRollout


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def used_threads(model: nn.Module, *rows: int) -> list[int]:
    """Return the number of threads of a step for each number of rows."""
    seen: list[int] = []

    def forward(tokens: Tensor, positions: Tensor, slots: Any) -> Tensor:
        seen.append(torch.get_num_threads())
        return tokens

    before, slots = torch.get_num_threads(), Mock()
    with limited_threads(forward, model) as limited:
        for count in rows:
            limited(torch.zeros(count), torch.zeros(count), slots)
    assert torch.get_num_threads() == before
    return seen


def test_the_number_of_threads_follows_the_rows() -> None:
    model = nn.Sequential(nn.Linear(100, 300), nn.Linear(300, 100))  # products of 30,000 multiplications a row
    assert 66 * 30_000 < MIN_PRODUCT <= 67 * 30_000
    assert used_threads(model, 67, 66, 1, 100) == [2, 1, 1, 2]


def test_one_thread_remains_one() -> None:
    torch.set_num_threads(1)
    assert used_threads(nn.Linear(4000, 4000), 1, 100) == [1, 1]


def test_a_generation_changes_threads_and_restores_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end at different steps. The log-probs are those of the model."""
    case, changes = (harness := RolloutHarness(TorchRollout, tmp_path)).case(), list[int]()
    monkeypatch.setattr(threads, "MIN_PRODUCT", 1)
    prompts, sampling = harness.prompts(4, 9, 2, 14), SamplingParams(12, stop_token_ids=(5, 6, 7, 8), ignore_eos=True)
    both = case.rollout.generate_sequences(prompts, sampling, torch.arange(4))
    monkeypatch.setattr(threads, "MIN_PRODUCT", MIN_PRODUCT)
    set_num_threads = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda count: changes.append(count) or set_num_threads(count))
    out = case.rollout.generate_sequences(prompts, sampling, torch.arange(4))
    case.check_log_probs(prompts, out, sampling)
    assert out.responses.values.tolist() == both.responses.values.tolist()
    assert (set(changes[:-1]), changes[-1]) == ({1}, 2)
