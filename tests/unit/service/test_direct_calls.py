"""Training through HTTP equals the same calls of the role, to the bit."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ppo_runs import saved_weights
from support.tinker_clients import BASE, RunningServer, datum, running_server

from camshaft.algorithms.token_losses import LOSSES
from camshaft.config.engine import LoRAConfig
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import StepHyperparameters
from camshaft.service.checkpoints import Checkpoints, SavedPath
from camshaft.service.process import PerRank

Row = tuple[list[int], list[float], list[float]]
"""Tokens, and the log-prob and the advantage of each token but the first."""


def chunks(seed: int) -> list[list[Row]]:
    """Return two chunks of rows of unequal lengths."""
    chance = random.Random(seed)

    def row(length: int) -> Row:
        values = [chance.uniform(-6, -4) for _ in range(length)], [chance.uniform(-1, 1) for _ in range(length)]
        return [chance.randint(5, 99) for _ in range(length + 1)], *values

    return [[row(length) for length in lengths] for lengths in ((5, 1, 9), (3, 12))]


def train_through_http(server: RunningServer, loss: str, rank: int) -> tuple[list[Any], dict[str, Any]]:
    """Return what each command has answered, and the weights at the end."""
    model, results = server.client().create_model(0, rank), list[Any]()
    for step in range(5):
        for rows in chunks(step):
            data = [datum(tokens, logprobs=old, advantages=values) for tokens, old, values in rows]
            results.append(model.run(data, loss))
        results.append(model.update(learning_rate=1e-2 * (1 + step))["grad_norm"])
    path = model.call("save_weights", path="end")["path"]
    return results, saved_weights(Checkpoints(Path(server.config.folder)).get(SavedPath.parse(path)).folder)


def train_directly(server: RunningServer, loss: str, rank: int, folder: Path) -> tuple[list[Any], dict[str, Any]]:
    """Return the same of calls of the role, whose rows are made here."""
    role, name, results = server.role, "direct", list[Any]()
    lora = None
    if rank:
        alpha = server.config.lora_alpha
        lora = LoRAConfig(rank=rank, alpha=alpha, seed=1, train_attn=True, train_mlp=True, train_unembed=True)
    role.call_ranks("create", name, server.config.base_models()[BASE], lora, 1)
    options = LOSSES[loss].check_options({})
    for step in range(5):
        for rows in chunks(step):
            tokens = Ragged.from_rows([torch.tensor(tokens) for tokens, _, _ in rows])
            columns = {
                "input_ids": tokens,
                "targets": tokens,
                "loss_mask": Ragged.from_rows([torch.arange(len(row)) > 0 for row in tokens.rows()]),
                "logprobs": Ragged.from_rows([torch.tensor([0.0, *old]) for _, old, _ in rows]),
                "advantages": Ragged.from_rows([torch.tensor([0.0, *values]) for _, _, values in rows]),
            }
            part = DataProto.from_dict(columns, {"numbers": list(range(len(rows)))})
            (output,) = role.call_ranks("forward_backward", name, PerRank([part]), loss, options, False)
            log_probs = [row[1:].tolist() for row in output.ragged("log_probs").rows()]
            results.append((log_probs, output.meta_info["loss"]))
        settings = StepHyperparameters(
            lr=1e-2 * (1 + step), betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, clip_grad=0.0
        )
        results.append(role.call("optimizer_step", name, settings).grad_norm)
    role.call("save", name, str(folder), True)
    return results, saved_weights(folder)


@pytest.mark.parametrize("rank", [0, 4])
def test_training_through_http_equals_calls_of_the_role(tmp_path: Path, rank: int) -> None:
    with running_server(tmp_path) as server:
        results, weights = train_through_http(server, "ppo", rank)
        expected, others = train_directly(server, "ppo", rank, tmp_path / "direct")
    assert results == expected
    assert len(results) == 15
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in others)
