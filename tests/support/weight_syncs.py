"""Weight syncs from engines on several ranks, for `run_ranks`.

first, second = run_ranks(sync_weights, 2, "megatron", {"tensor_model_parallel_size": 2}, "hf", {}, folder)
first[0].sent == first[0].received           # checksums by name: rank 0, first step
saved_checksums(folder, step=0)              # of the weights in the checkpoint of that step
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from camshaft.config.engine import OptimConfig
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.contracts.engine.harness import EngineHarness
from camshaft.dataproto import DataProto
from camshaft.digest import digest
from camshaft.engine import BaseEngine, StepContext, engine_class
from camshaft.models.tiny import make_tiny_model
from camshaft.ragged import Ragged
from camshaft.reshard import rollout_mode
from camshaft.rollout import SamplingParams, build_rollout
from support.ppo_runs import saved_weights

SAMPLING = SamplingParams(max_tokens=12, temperature=0.7, ignore_eos=True)
LENGTHS = (3, 9, 5, 1)


@dataclass(frozen=True)
class SyncResult:
    """One weight sync and the generation after it, on one rank."""

    sent: dict[str, int]
    """Checksums of the weights that the engine sent, by name."""
    received: dict[str, int]
    """Checksums that the rollout computed from the weights that it holds."""
    num_bytes: int
    log_probs: Tensor
    """Log-probs of the responses, from the rollout."""
    trainer_log_probs: Tensor
    """Log-probs of the same tokens, from the engine."""


def make_model(folder: Path, **sizes: Any) -> None:
    """Write the model of the other functions; its heads are wide enough for vLLM on a CPU."""
    make_tiny_model(folder / "model", **{"hidden": 128, "initializer_range": 0.1, **sizes})


def sync_weights(
    strategy: str, options: dict[str, Any], rollout_name: str, fields: dict[str, Any], folder: Path, steps: int = 2
) -> list[SyncResult]:
    """Train, save a checkpoint, sync the weights and generate, `steps` times."""
    harness, engine = _build(strategy, options, folder)
    config = {"max_model_len": 64, "max_num_seqs": 8, "update_weights_bucket_megabytes": 1, **fields}
    rollout = build_rollout(rollout_name, RolloutEngineConfig(model_path=str(harness.model_folder), **config))
    rollout.sleep()
    random = torch.Generator().manual_seed(0)
    prompts = Ragged.from_rows([torch.randint(3, 90, (length,), generator=random) for length in LENGTHS])
    results = []
    for step in range(steps):
        harness.train(engine, harness.batch)
        harness.save(engine, folder / f"step_{step}")
        with rollout_mode(engine, rollout) as sync:
            received = dict(rollout.weight_digests())
            out = rollout.generate_sequences(prompts, SAMPLING, torch.arange(len(prompts)) + step)
        expected = _log_probs(engine, prompts, out.responses)
        results.append(SyncResult(sync.digests, received, sync.bytes, out.log_probs.values, expected.values))
    return results


def gathered_dtypes(strategy: str, options: dict[str, Any], folder: Path) -> set[torch.dtype]:
    """Return the dtypes of all tensors in collectives while the engine yields its weights in bfloat16."""
    _, engine = _build(strategy, options, folder)
    with engine.eval_mode(), _Collectives() as collectives:
        for _, weight in engine.named_weights(dtype_of=lambda name, tensor: torch.bfloat16):
            assert weight.dtype == torch.bfloat16
    return collectives.dtypes


def saved_checksums(folder: Path, step: int, dtype: torch.dtype) -> Mapping[str, int]:
    """Return the checksums of the weights in the checkpoint of a step, cast to `dtype`."""
    return {name: digest(weight.to(dtype)) for name, weight in saved_weights(folder / f"step_{step}").items()}


class _Collectives(TorchDispatchMode):
    """Record the dtypes of the tensors in collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.dtypes |= {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        return func(*args, **(kwargs or {}))


def _build(strategy: str, options: dict[str, Any], folder: Path) -> tuple[EngineHarness, BaseEngine]:
    harness = EngineHarness(engine_class(strategy), folder, common_fields={"options": options})
    harness.model_folder = folder / "model"
    return harness, harness.build(optim=OptimConfig(lr=1e-2), grad_clip=1.0, micro_batch_size=3)


def _log_probs(engine: BaseEngine, prompts: Ragged, responses: Ragged) -> Ragged:
    """Return the engine's log-probs of the responses."""
    ids = Ragged.join(prompts, responses)
    mask = Ragged.join(
        prompts.like(torch.zeros(len(prompts.values), dtype=torch.bool)),
        responses.like(torch.ones(len(responses.values), dtype=torch.bool)),
    )
    context = StepContext(outputs=("log_probs",), temperature=SAMPLING.temperature)
    with engine.eval_mode():
        predictions = engine.infer_batch(DataProto.from_dict({"input_ids": ids, "loss_mask": mask}), context)
    return predictions["log_probs"].suffix(responses.lengths)
