"""Models with gated linear attention on several ranks."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_warm_ranks
from support.tiny import LINEAR, tiny_batch, tiny_folder
from torch import Tensor

from camshaft.config.engine import EngineConfig, EngineModel, OptimConfig
from camshaft.dataproto import DataProto
from camshaft.engine.base import BaseEngine
from camshaft.engine.fsdp.engine import FSDPEngine
from camshaft.engine.single import SingleDeviceEngine
from camshaft.errors import EngineError

LENGTHS = (9, 4, 13, 6)


def config(folder: str, **options: Any) -> EngineConfig:
    model = EngineModel(path=folder, enable_gradient_checkpointing=True)
    return EngineConfig(
        model=model, optim=OptimConfig(lr=1e-2, optimizer="SGD", weight_decay=0.0), micro_batch_size=1, options=options
    )


def train(engine: BaseEngine, data: DataProto) -> dict[str, Tensor]:
    """Take two steps, and return the weights."""

    def loss_fn(batch: DataProto, predictions: Mapping[str, Any], ctx: Any) -> tuple[Tensor, Any]:
        mask = batch["loss_mask"].values.to(predictions["log_probs"].values.device)
        return -predictions["log_probs"].values[mask].sum() / ctx["num_tokens"], ctx

    engine.init_model()
    engine.set_loss_fn(loss_fn)
    for _ in range(2):
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.forward_backward_step(data, {"outputs": ("log_probs",)})
            engine.optimizer_step()
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def train_share(folder: str) -> dict[str, Tensor]:
    rows = list(range(dist.get_rank(), len(LENGTHS), dist.get_world_size()))
    return train(FSDPEngine(config(folder)), tiny_batch(LENGTHS).reorder(rows))


@pytest.mark.parametrize("family", ["qwen3_5_text"])
def test_weights_equal_those_of_a_single_process(family: str) -> None:
    folder = str(tiny_folder(family, hidden=32, initializer_range=0.1, **LINEAR))
    expected = train(SingleDeviceEngine(config(folder)), tiny_batch(LENGTHS))
    for weights in run_warm_ranks(train_share, 2, folder):
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)


def refusal(folder: str, options: dict[str, Any]) -> str:
    with pytest.raises(EngineError) as exc_info:
        FSDPEngine(config(folder, **options)).init_model()
    return str(exc_info.value)


def test_sequence_parallelism_is_rejected() -> None:
    folder = str(tiny_folder("qwen3_5_text", hidden=32, initializer_range=0.1, **LINEAR))
    for text in run_warm_ranks(refusal, 2, folder, {"ulysses_sequence_parallel_size": 2}):
        assert "a recurrent state, which sequence parallelism does not support" in text
