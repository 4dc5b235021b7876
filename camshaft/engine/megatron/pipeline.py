"""Runs micro-batches through the pipeline stages, with Megatron's 1F1B schedules.

    run_pipeline(model, micro_batches, nullcontext)      # collective over the ranks of a pipeline
    run_layers(model, inputs, rows_of)                   # forward, without the output head

Without virtual stages, the schedule is 1F1B; with them, it is interleaved 1F1B.
"""

# pyright: reportMissingImports=false

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor, nn

from camshaft.engine.megatron.model import Call, MegatronModel
from camshaft.engine.megatron.routing import MegatronRoutingStep, RowRouting
from camshaft.engine.micro_batches import MicroBatches, ModelInputs
from camshaft.engine.pipeline import Outputs, PipelineRun

ForwardContext = Callable[[], AbstractContextManager[Any]]
RowsOf = Callable[[int], RowRouting]


def run_pipeline(model: MegatronModel, micro_batches: MicroBatches, forward_context: ForwardContext) -> None:
    """Run all micro-batches forward, inside `forward_context`, and with gradients enabled also backward."""
    extension = micro_batches.extension
    if extension is not None:
        extension.prepare(micro_batches)
    routing = extension if isinstance(extension, MegatronRoutingStep) else None
    run = PipelineRun(micro_batches, model.groups.pp, None if routing is None else routing.compared)
    calls = _prepare(model, run.inputs, None if routing is None else routing.rows)

    def compute_loss(index: int, hidden: Tensor) -> Tensor:
        def apply_head(hidden: Tensor) -> Outputs:
            with forward_context():
                return model.apply_head(hidden, calls[index])

        return run.compute_loss(index, hidden, apply_head)

    _run_schedule(model, calls, compute_loss, forward_context)
    run.finish(model.vocabulary_size, model.config.params_dtype)


def run_layers(
    model: MegatronModel, inputs: Sequence[ModelInputs], rows_of: RowsOf, forward_context: ForwardContext
) -> None:
    """Run micro-batches forward, without gradients and without the output head."""
    calls = _prepare(model, inputs, rows_of)
    if model.groups.pp.size() > 1:
        _run_schedule(model, calls, lambda index, hidden: hidden.sum(), forward_context)
        return
    for call in calls:
        with forward_context():
            model.stages[0](call.padded, call.angles, call.rows)


def _prepare(model: MegatronModel, inputs: Sequence[ModelInputs], rows_of: RowsOf | None) -> list[Call]:
    """Return the arguments of the stages for each micro-batch."""
    # The interleaved schedule exchanges both directions between the same ranks at the same time. Megatron would confuse
    # the sizes of the two messages, so all micro-batches get the same size.
    length = max(len(each.tokens) for each in inputs) if len(model.stages) > 1 else 0
    return [
        model.prepare(each, length, None if rows_of is None else rows_of(index)) for index, each in enumerate(inputs)
    ]


def _run_schedule(
    model: MegatronModel,
    calls: Sequence[Call],
    compute_loss: Callable[[int, Tensor], Tensor],
    forward_context: ForwardContext,
) -> None:
    """Run the schedule of the stages. The last one calls `compute_loss` on the hidden states of each micro-batch."""

    def forward_step(indices: Iterator[int], stage: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        index = next(indices)
        call = calls[index]

        def finish(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            return compute_loss(index, hidden), torch.zeros((), dtype=torch.int, device=hidden.device), {}

        with forward_context():
            return stage(call.padded, call.angles, call.rows), finish

    virtual = len(model.stages) > 1
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
