"""Runs micro-batches through the pipeline stages, with Megatron's 1F1B schedules.

    run_pipeline(model, micro_batches, nullcontext)      # collective over the ranks of a pipeline

Without virtual stages, the schedule is 1F1B; with them, it is interleaved 1F1B.
"""

# pyright: reportMissingImports=false

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor, nn

from camshaft.engine.megatron.model import MegatronModel
from camshaft.engine.micro_batches import MicroBatches
from camshaft.engine.pipeline import Outputs, PipelineRun


def run_pipeline(
    model: MegatronModel, micro_batches: MicroBatches, forward_context: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Run all micro-batches forward, inside `forward_context`, and with gradients enabled also backward."""
    run = PipelineRun(micro_batches, model.groups.pp)
    virtual = len(model.stages) > 1
    # The interleaved schedule exchanges both directions between the same ranks at the same time. Megatron would confuse
    # the sizes of the two messages, so all micro-batches get the same size.
    length = max(len(each.tokens) for each in run.inputs) if virtual else 0
    calls = [model.prepare(each, length) for each in run.inputs]

    def forward_step(indices: Iterator[int], stage: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        index = next(indices)
        call = calls[index]

        def apply_head(hidden: Tensor) -> Outputs:
            with forward_context():
                return model.apply_head(hidden, call)

        def compute_loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            num_tokens = torch.zeros((), dtype=torch.int, device=hidden.device)
            return run.compute_loss(index, hidden, apply_head), num_tokens, {}

        with forward_context():
            return stage(call.padded, call.angles, call.rows), compute_loss

    indices = [iter(range(len(calls))) for _ in model.stages]
    schedule = get_forward_backward_func(model.groups.pp.size(), len(model.stages) if virtual else None)
    schedule(
        forward_step_func=forward_step,
        data_iterator=indices if virtual else indices[0],
        model=list(model.stages) if virtual else model.stages[0],
        num_microbatches=len(calls),
        seq_length=len(calls[0].padded),
        micro_batch_size=1,
        forward_only=not torch.is_grad_enabled(),
        p2p_communicator=P2PCommunicator(model.groups.pp, model.config),
        pg_collection=model.groups,
    )
    run.finish(model.vocabulary_size, model.config.params_dtype)
