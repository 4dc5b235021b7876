"""CUDA's sync debug mode confirms the results of `tests/unit/engine/test_no_host_sync.py` on a real device.

`make test-gpu` runs these; without a CUDA device they are skipped.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.ppo_runs import ppo_config

from camshaft.config import Topology
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine.micro_batches import MicroBatches
from camshaft.engine.torch_engine import TorchEngine
from camshaft.roles import ActorWorker

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a CUDA device")]

ACTOR = "actor_rollout_ref.actor"
SIDES: dict[str, dict[str, Any]] = {
    f"{strategy}-{dtype}": {
        f"{ACTOR}.strategy": strategy,
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": dtype,
    }
    for strategy in ("fsdp", "reference")
    for dtype in ("bfloat16", "float32")
}


def batch_of() -> DataProto:
    prompts = Ragged.from_rows([torch.arange(3, 3 + n) for n in (3, 5, 2, 4, 4, 1, 6, 2)])
    responses = Ragged.from_rows([torch.arange(3, 3 + n) for n in (4, 6, 1, 3, 3, 7, 2, 5)])
    numbers = responses.map(lambda ids: -ids.float())
    mask = responses.map(lambda ids: torch.ones_like(ids, dtype=torch.bool))
    columns = {"prompts": prompts, "responses": responses, "response_mask": mask}
    return DataProto.from_dict({**columns, "old_log_probs": numbers, "advantages": numbers})


def actor_of(folder: Path, side: str) -> ActorWorker:
    """Return an actor after one update, so that one-time setup, which may wait, is done."""
    settings = {f"{ACTOR}.ppo_mini_batch_size": 8, "trainer.device": "cuda", **SIDES[side]}
    actor = ActorWorker(ppo_config(folder, settings), Topology(), total_steps=5)
    actor.init_model()
    actor.update_actor(batch_of())
    return actor


@contextmanager
def strict() -> Iterator[list[int]]:
    """Make CUDA raise if the host waits inside a micro-batch; return a list with one entry per micro-batch."""
    original, passes = TorchEngine.run_micro_batches, list[int]()

    def run(self: Any, micro_batches: MicroBatches) -> None:
        passes.extend(range(len(micro_batches)))
        torch.cuda.set_sync_debug_mode("error")
        try:
            original(self, micro_batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with mock.patch.object(TorchEngine, "run_micro_batches", run):
        yield passes


@pytest.mark.parametrize("side", SIDES)
def test_cuda_detects_no_wait_in_a_micro_batch(tmp_path: Path, side: str) -> None:
    actor = actor_of(tmp_path, side)
    with strict() as passes:
        actor.update_actor(batch_of())
    assert len(passes) == 4


def test_cuda_detects_an_injected_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = actor_of(tmp_path, "reference-float32")
    original = actor.policy_loss

    def planted(*args: Any, **options: Any) -> Any:
        loss, metrics = original(*args, **options)
        return loss * float(loss), metrics

    monkeypatch.setattr(actor, "policy_loss", planted)
    with strict(), pytest.raises(RuntimeError, match="synchronizing"):
        actor.update_actor(batch_of())
