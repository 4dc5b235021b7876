"""The tool that composes command lines of verl tells which become a valid config, and why others do not."""

import json
import runpy
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOOL = runpy.run_path(str(ROOT / "tools" / "foreign_lines.py"))
LINES = ROOT.parent / "shared" / "data" / "verl-scripts.jsonl"
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = [
    "algorithm.adv_estimator=grpo", "data.train_files=['/data/a.parquet', '/data/b.parquet']", "data.val_files=/c",
    "data.train_batch_size=64", "actor_rollout_ref.model.path=Qwen/Qwen3-8B", f"{A}.optim.lr=1e-6",
    f"{A}.ppo_mini_batch_size=16", f"{R}.name=vllm", f"{R}.n=4", f"{R}.tensor_model_parallel_size=2",
    "trainer.balance_batch=True", "trainer.n_gpus_per_node=8", "trainer.nnodes=1", "model_engine=megatron",
    f"{A}.megatron.tensor_model_parallel_size=4", f"{A}.megatron.pipeline_model_parallel_size=3",
]  # fmt: skip


def compose(*args: str):
    (result,) = TOOL["compose_lines"]([TOOL["Line"]("run_qwen3_8b.sh", "megatron text", list(args))])
    return result


def test_files_are_made_up_and_machines_added():
    result = compose(*GRPO)
    assert (result.error, result.devices) == ("", "3 x 8")


def test_an_error_is_reported():
    result = compose(*GRPO, f"{A}.megatron.use_megatron_fsdp=True")
    assert "Megatron-FSDP is not implemented" in result.error


TARGETS = {"fsdp text": 21, "megatron text": 8}
"""Number of the lines of each kind that become a valid config."""
ANSWERS = (
    "docs/not-here.md#",
    "training bfloat16 weights is not implemented",
    "does not return expert choices",
)
"""Parts of the errors of the other lines: a topic, or what is not implemented."""


@pytest.mark.skipif(not LINES.is_file(), reason="requires the command lines of verl in ../shared/data")
def test_command_lines_of_verl_become_valid_configs_or_name_a_topic():
    lines = [TOOL["Line"](**json.loads(text)) for text in LINES.read_text("utf-8").splitlines()]
    results = list(TOOL["compose_lines"](lines))
    valid = Counter(result.kind for result in results if not result.error)
    assert all(valid[kind] >= count for kind, count in TARGETS.items()), valid
    others = {result.name: result.error for result in results if result.error}
    assert not [name for name, error in others.items() if not any(answer in error for answer in ANSWERS)]
