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
from camshaft.rollout.builtin.rollout import TorchRollout
from camshaft.rollout.threads import WORTH, StepThreads, step_threads


def config() -> RolloutEngineConfig:
    return RolloutEngineConfig(model_path=str(tiny_folder()), max_model_len=40, max_num_seqs=4)


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_a_second_thread_comes_with_as_many_products_as_are_worth_it() -> None:
    """Of 64 rows, the products with 32768 weights and those with 128 keys and values of 128 numbers are 2**22."""
    assert WORTH == 2**22
    threads, found = StepThreads(weights=32768, width=128), []
    for rows, places in [(1, 128), (64, 127), (64, 128), (63, 128), (500, 1), (500, 0), (1, 10**6)]:
        threads.serve(rows, places)
        found.append(torch.get_num_threads())
    assert found == [1, 1, 3, 1, 3, 3, 3]
    threads.serve(1, 1)
    threads.serve_all()
    assert torch.get_num_threads() == 3


def test_behind_a_call_that_fails_the_threads_are_back() -> None:
    def call() -> None:
        with step_threads(TorchRollout(config()).model.hf.to_empty(device="cpu")) as threads:
            threads.serve(1, 1)
            raise RuntimeError(f"{torch.get_num_threads()} thread")

    with pytest.raises(RuntimeError, match="1 thread"):
        call()
    assert torch.get_num_threads() == 3


def test_a_model_on_another_device_keeps_them() -> None:
    with step_threads(TorchRollout(config()).model.hf.to("meta")) as threads:
        threads.serve(1, 1)
        assert torch.get_num_threads() == 3


def test_prompts_have_all_threads_and_steps_those_that_they_are_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = TorchRollout(config())
    hf: Any = rollout.model.hf
    weights = {name: torch.zeros(tensor.shape) for name, tensor in hf.named_parameters()}
    rollout.load_weights(weights.items())
    of_layer = sum(tensor.numel() for tensor in weights.values()) / hf.config.num_hidden_layers
    monkeypatch.setattr(threads_module, "WORTH", 3 * of_layer)
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
