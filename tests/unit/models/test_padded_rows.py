"""Calls on right-padded rows: the arguments of the decoder, the order of its states, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny import predicted_tokens, tiny_folder, tiny_rows
from torch import Tensor, nn
from transformers import AutoConfig

from camshaft.config.engine import EngineModel
from camshaft.errors import EngineError
from camshaft.models.loader import load_model
from camshaft.models.packing import Packing
from camshaft.models.padded_rows import padded_hidden_states
from camshaft.models.sequence import check_heads


class Decoder(nn.Module):
    """Returns token ids and positions as hidden states, and keeps the arguments of the call."""

    def forward(self, input_ids: Tensor, **arguments: Any) -> SimpleNamespace:
        self.input_ids, self.arguments = input_ids, arguments
        columns = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return SimpleNamespace(last_hidden_state=torch.stack([input_ids, columns], dim=-1))


def test_rows_are_padded_on_the_right_and_states_are_packed_again() -> None:
    decoder = Decoder()
    states = padded_hidden_states(decoder, torch.tensor([7, 8, 5, 4, 3, 9]), Packing([2, 1, 3]))
    assert decoder.input_ids.tolist() == [[7, 8, 0], [5, 0, 0], [4, 3, 9]]
    assert decoder.arguments == {"use_cache": False}
    assert states.tolist() == [[7, 0], [8, 1], [5, 0], [4, 0], [3, 1], [9, 2]]


def test_shared_prefixes_are_refused() -> None:
    with pytest.raises(EngineError, match="do not support prefix sharing"):
        padded_hidden_states(Decoder(), torch.arange(5), Packing([3, 1, 1], [None, 0, 0]))


@pytest.mark.parametrize("family", ["falcon", "mamba"])
def test_a_row_has_the_same_log_probs_beside_longer_rows(family: str) -> None:
    model = load_model(
        EngineModel(path=str(tiny_folder(family, hidden=32, initializer_range=0.1))), "float64", "cpu", seed=0
    )
    assert model.pads_rows
    assert not model.supports_prefix_sharing
    rows, lengths = tiny_rows([3, 9, 5]), [3, 9, 5]
    together = model(torch.cat(rows), Packing(lengths), predicted_tokens(lengths), ("log_probs",))["log_probs"]
    alone = [model(r, Packing([len(r)]), predicted_tokens([len(r)]), ("log_probs",))["log_probs"] for r in rows]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-12)


def test_the_weights_of_rwkv_do_not_change_in_eval_mode() -> None:
    folder = tiny_folder("rwkv", hidden=32, layers=7, attention_hidden_size=32, intermediate_size=32)
    model = load_model(EngineModel(path=str(folder)), "float32", "cpu", seed=0)
    before = {name: weight.clone() for name, weight in model.weights()}
    model(torch.arange(3, 8), Packing([5]), torch.tensor([4]), ("log_probs",))
    assert all(torch.equal(weight, before[name]) for name, weight in model.weights())


@pytest.mark.parametrize("family", ["falcon", "mamba"])
def test_sequence_parallelism_is_refused(family: str) -> None:
    with pytest.raises(EngineError, match=f"{family} models have right-padded rows, which sequence parallelism"):
        check_heads(AutoConfig.for_model(family), 2)
