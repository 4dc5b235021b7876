"""Weights of Megatron and torchtitan engines on two ranks arrive in every rollout.

Run by `make test-megatron` and `make test-titan`; cases with vLLM run in its environment.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks, run_warm_ranks
from support.vllm_runs import run_with_vllm
from support.weight_syncs import gathered_dtypes, make_model, saved_checksums, sync_weights

from camshaft.controller import local

pytestmark = pytest.mark.timeout(900)

local.PRELOAD.append("camshaft.engine.torchtitan.weights")  # skipped in environments without torchtitan

ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "megatron_tp2": ("megatron", {"tensor_model_parallel_size": 2}),
    "megatron_pp2": ("megatron", {"pipeline_model_parallel_size": 2}),
    "torchtitan_fsdp2": ("torchtitan", {}),
}
"""Strategies and options on two ranks."""

MARKS = {"fsdp": (), "megatron": pytest.mark.megatron, "torchtitan": pytest.mark.titan}

ROLLOUTS: dict[str, tuple[str, dict[str, Any], float]] = {
    "torch": ("torch", {}, 1e-4),
    "torch_bfloat16": ("torch", {"dtype": "bfloat16"}, 0.3),
    "hf": ("hf", {}, 1e-4),
    "process": ("process", {"engine_kwargs": {"rollout": "torch"}}, 1e-4),
    "vllm": ("vllm", {"engine_kwargs": {"kv_cache_memory_bytes": 2**25}}, 1e-4),
}
"""Names and config fields of rollouts, and the accepted difference of log-probs."""
SERVER: dict[str, Any] = {"engine_kwargs": {"vllm_server_timeout": 600, "kv_cache_memory_bytes": 2**25}}
"""Config fields of a server for each rank."""

EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}
"""Arguments of `make_model` for mixture-of-experts models, by family."""


def cases() -> Iterator[Any]:
    for engine, (strategy, options) in ENGINES.items():
        for rollout, arguments in ROLLOUTS.items():
            marks = [MARKS[strategy], *[pytest.mark.vllm] * (rollout == "vllm")]
            yield pytest.param(strategy, options, *arguments, id=f"{engine}-{rollout}", marks=marks)


def check(
    strategy: str, options: dict[str, Any], rollout: str, fields: dict[str, Any], tolerance: float, folder: Path
) -> None:
    """Compare the checksums of two weight syncs with the checkpoints, and log-probs of the rollout with the engine."""
    dtype = getattr(torch, fields.get("dtype", "float32"))
    ranks = run_ranks(sync_weights, 2, strategy, options, rollout, fields, folder, timeout=800)
    first, last = ranks[0]
    assert [sync.sent for sync in ranks[1]] == [first.sent, last.sent]
    assert all(first.sent[name] != checksum for name, checksum in last.sent.items()), "every weight is trained"
    for step, sync in enumerate(ranks[0]):
        assert sync.sent == sync.received == saved_checksums(folder, step, dtype)
        assert (sync.log_probs - sync.trainer_log_probs).abs().max() < tolerance
        assert sync.log_probs.std() > 0.5, "a uniform distribution would hide wrong weights"


@pytest.mark.parametrize(("strategy", "options", "rollout", "fields", "tolerance"), list(cases()))
def test_weights_arrive_in_the_rollout(
    strategy: str, options: dict[str, Any], rollout: str, fields: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    make_model(tmp_path)
    check(strategy, options, rollout, fields, tolerance, tmp_path)


@pytest.mark.megatron
@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("rollout", ["torch", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_weights_of_split_experts_arrive_in_the_rollout(rollout: str, family: str, tmp_path: Path) -> None:
    make_model(tmp_path, family=family, **EXPERTS[family])
    check("megatron", {"expert_model_parallel_size": 2}, *ROLLOUTS[rollout], tmp_path)


@pytest.mark.titan
def test_weights_of_pipeline_stages_of_torchtitan_arrive_in_the_rollout(tmp_path: Path) -> None:
    make_model(tmp_path)
    check("torchtitan", {"pipeline_parallel_degree": 2}, "torch", {}, 1e-4, tmp_path)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param(*ENGINES[name], id=name, marks=MARKS[ENGINES[name][0]])
        for name in ("megatron_tp2", "torchtitan_fsdp2")
    ],
)
def test_weights_arrive_in_a_server_of_each_rank(strategy: str, options: dict[str, Any], tmp_path: Path) -> None:
    make_model(tmp_path)
    check(strategy, options, "server", SERVER, 1e-4, tmp_path)


@pytest.mark.vllm
@pytest.mark.megatron
def test_weights_of_split_experts_arrive_in_a_server_of_each_rank(tmp_path: Path) -> None:
    make_model(tmp_path, family="mixtral", **EXPERTS["mixtral"])
    check("megatron", {"expert_model_parallel_size": 2}, "server", SERVER, 1e-4, tmp_path)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param(strategy, options, id=name, marks=MARKS[strategy])
        for name, (strategy, options) in {"fsdp": ("fsdp", {}), **ENGINES}.items()
    ],
)
def test_weights_are_cast_before_they_are_gathered(strategy: str, options: dict[str, Any], tmp_path: Path) -> None:
    make_model(tmp_path)
    assert run_warm_ranks(gathered_dtypes, 2, strategy, options, tmp_path) == [{torch.bfloat16}] * 2


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("strategy", "options"),
    [pytest.param(*case, id=name, marks=MARKS[case[0]]) for name, case in ENGINES.items()],
)
def test_responses_of_vllm_follow_training(strategy: str, options: dict[str, Any], tmp_path: Path) -> None:
    """After each update of a run, greedy responses of vLLM equal those of transformers with the trained weights."""
    overrides: dict[str, Any] = {
        "actor_rollout_ref.actor.strategy": strategy,
        "trainer.n_gpus_per_node": 2,
        "actor_rollout_ref.rollout.engine_kwargs": "{kv_cache_memory_bytes: 33554432}",
        **{f"+actor_rollout_ref.actor.engine_kwargs.{name}": value for name, value in options.items()},
    }
    responses = run_with_vllm(tmp_path, overrides, steps=2)
    assert [step.by_vllm for step in responses] == [step.by_transformers for step in responses]
    assert responses[0].by_vllm != responses[-1].by_vllm
