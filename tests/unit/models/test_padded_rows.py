"""Calls on right-padded rows: the arguments of the decoder, the order of its states, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import run_warm_ranks
from support.tiny import predicted_tokens, tiny_batch, tiny_folder, tiny_rows
from torch import Tensor, nn
from transformers import AutoConfig

from camshaft.config.engine import EngineConfig, EngineModel, OptimConfig
from camshaft.dataproto import DataProto
from camshaft.engine import engine_class
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


def train(strategy: str, path: str, rank: int, ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """Take two steps on this rank's rows; return the losses and all weights."""
    optim = OptimConfig(optimizer="SGD", lr=0.1)
    engine = engine_class(strategy)(
        EngineConfig(model=EngineModel(path=path), optim=optim, dtype="float64", micro_batch_size=2)
    )
    engine.init_model()
    engine.set_loss_fn(mean_loss)
    batch = tiny_batch([3, 9, 5, 2, 7, 4]).chunk(ranks)[rank]
    losses = []
    for _ in range(2):
        with engine.train_mode():
            losses.append(engine.train_batch(batch).loss)
    return losses, {name: weight.clone() for name, weight in engine.named_weights()}


def mean_loss(data: DataProto, predictions: Any, ctx: Any) -> tuple[Tensor, Any]:
    return -(predictions["log_probs"].values * data["loss_mask"].values).sum() / ctx["num_tokens"], ctx


def train_on_ranks(strategy: str, path: str) -> tuple[list[float], dict[str, Tensor]]:
    return train(strategy, path, torch.distributed.get_rank(), 2)


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("fsdp1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["falcon", "mamba"])
def test_two_sharded_ranks_train_like_one(family: str, strategy: str) -> None:
    path = str(tiny_folder(family, hidden=32, initializer_range=0.1))
    losses, weights = train("reference", path, 0, 1)
    for rank_losses, rank_weights in run_warm_ranks(train_on_ranks, 2, strategy, path):
        assert rank_losses == pytest.approx(losses, rel=1e-7)
        for name, weight in weights.items():
            torch.testing.assert_close(rank_weights[name], weight, rtol=0, atol=1e-7)


@pytest.mark.parametrize("family", ["falcon", "mamba"])
def test_sequence_parallelism_is_refused(family: str) -> None:
    with pytest.raises(EngineError, match=f"{family} models have right-padded rows, which sequence parallelism"):
        check_heads(AutoConfig.for_model(family), 2)
