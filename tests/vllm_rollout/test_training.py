"""PPO with vLLM: after each update, greedy responses match those of the trained model, token for token.

Run by `make test-vllm`; `make test-server` runs the cases on two ranks, each of which imports vLLM.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import in_use
from support.vllm_runs import StepResponses, run_with_vllm

pytestmark = pytest.mark.vllm

SHARDED = {
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "trainer.n_gpus_per_node": 2,
    "actor_rollout_ref.rollout.engine_kwargs": "{kv_cache_memory_bytes: 33554432}",
}


def check(responses: list[StepResponses], steps: int) -> None:
    assert len(responses) == steps
    for step in responses:
        assert step.by_vllm == step.by_transformers
        assert step.metrics["rollout/sync_bytes"] > 0
        assert math.isfinite(step.metrics["actor/grad_norm"])
    assert responses[0].by_vllm != responses[-1].by_vllm  # the weights changed


@pytest.fixture(autouse=True)
def no_shared_memory_remains() -> Iterator[None]:
    """Check that no shared memory remains, which would make the next run fail."""
    before = set(Path("/dev/shm").glob("*cpushm*"))
    yield
    # A file in use belongs to another run on this machine.
    assert [path for path in set(Path("/dev/shm").glob("*cpushm*")) - before if not in_use(path)] == []


def test_vllm_follows_the_actor_of_one_process(tmp_path: Path) -> None:
    check(run_with_vllm(tmp_path, steps=3), 3)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [1, 2])
def test_vllm_follows_an_actor_sharded_over_two_ranks(parallel: int, tmp_path: Path) -> None:
    """Test one engine per rank, and one engine on both ranks."""
    more = {"actor_rollout_ref.rollout.tensor_model_parallel_size": parallel}
    check(run_with_vllm(tmp_path, SHARDED | more, steps=2), 2)
