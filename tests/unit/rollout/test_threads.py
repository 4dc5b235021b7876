"""Steps of few rows of a small model compute on one thread, and nobody notices behind them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.tiny import tiny_folder
from torch import nn

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.ragged import Ragged
from camshaft.rollout import threads as threads_module
from camshaft.rollout.base import SamplingParams
from camshaft.rollout.threads import WORTH, step_threads
from camshaft.rollout.torch_rollout import TorchRollout


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_a_second_thread_comes_with_as_many_rows_as_are_worth_it() -> None:
    """1024 x 64 products in each of two layers: of 128 rows they are 2**23."""
    assert WORTH == 2**23
    with step_threads(nn.Linear(1024, 128, bias=False), num_layers=2) as threads:
        found = []
        for rows in (1, 127, 128, 500, 127):
            threads.serve(rows)
            found.append(torch.get_num_threads())
        assert found == [1, 1, 3, 3, 1]
        threads.serve_all()
        assert torch.get_num_threads() == 3


def test_behind_a_call_that_fails_the_threads_are_back() -> None:
    def call() -> None:
        with step_threads(nn.Linear(2, 2), num_layers=1) as threads:
            threads.serve(1)
            raise RuntimeError(f"{torch.get_num_threads()} thread")

    with pytest.raises(RuntimeError, match="1 thread"):
        call()
    assert torch.get_num_threads() == 3


def test_a_model_on_another_device_keeps_them() -> None:
    with step_threads(nn.Linear(2, 2, device="meta"), num_layers=1) as threads:
        threads.serve(1)
        assert torch.get_num_threads() == 3


def test_prompts_have_all_threads_and_steps_those_that_they_are_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = TorchRollout(RolloutEngineConfig(model_path=str(tiny_folder()), max_model_len=40, max_num_seqs=4))
    hf: Any = rollout.model.hf
    weights = {name: torch.zeros(tensor.shape) for name, tensor in hf.named_parameters()}
    rollout.load_weights(weights.items())
    per_row = sum(tensor.numel() for tensor in weights.values()) / hf.config.num_hidden_layers
    monkeypatch.setattr(threads_module, "WORTH", 3 * per_row)
    seen: list[tuple[int, int]] = []

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((kwargs["input_ids"].numel(), torch.get_num_threads()))

    hf.register_forward_pre_hook(look, with_kwargs=True)
    prompts = Ragged.from_rows([torch.arange(3, 3 + length) for length in (9, 11, 13, 14, 15)])
    rollout.limits = lambda *_: torch.tensor([2, 3, 4, 4, 2])  # type: ignore[method-assign]
    rollout.generate_sequences(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
    # Four prompts, a step of all slots, the last prompt in the slot of the row that has ended, and what is left.
    assert seen == [(47, 3), (4, 3), (15, 3), (4, 3), (2, 1)]
    assert torch.get_num_threads() == 3
