"""Runs micro-batches through the pipeline stages, with Megatron's 1F1B schedules.

    run_pipeline(model, micro_batches, nullcontext)      # collective over the ranks of a pipeline

Without virtual stages, the schedule is 1F1B; with them, it is interleaved 1F1B. The last stage calls the hooks and the
loss within the schedule. The other stages call them afterwards, on the outputs that the last stage broadcasts, so that
every rank returns the same results. An error of a hook or of the loss is raised on all stages.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor, nn

from camshaft.engine.collectives import on_every_rank
from camshaft.engine.megatron.model import Call, MegatronModel
from camshaft.engine.micro_batches import MicroBatches

Outputs = Mapping[str, Tensor]


def run_pipeline(
    model: MegatronModel, micro_batches: MicroBatches, forward_context: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Run all micro-batches forward, inside `forward_context`, and with gradients enabled also backward."""
    inputs = [micro_batches.prepare(index) for index in range(len(micro_batches))]
    virtual = len(model.stages) > 1
    # The interleaved schedule exchanges both directions between the same ranks at the same time. Megatron would confuse
    # the sizes of the two messages, so all micro-batches get the same size.
    length = max(len(each.tokens) for each in inputs) if virtual else 0
    calls = [model.prepare(*each, length=length) for each in inputs]
    last_outputs: list[Outputs] = []
    errors: list[Exception] = []

    def forward_step(indices: Iterator[int], stage: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        index = next(indices)
        call = calls[index]

        def compute_loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            loss = None
            if not errors:
                try:
                    with forward_context():
                        outputs = model.apply_head(hidden, call)
                    last_outputs.append({name: output.detach() for name, output in outputs.items()})
                    loss = micro_batches.finish(index, outputs)
                except Exception as error:  # raised on all stages after the schedule, for which they wait
                    errors.append(error)
            num_tokens = torch.zeros((), dtype=torch.int, device=hidden.device)
            return (hidden * 0).sum() if loss is None else loss, num_tokens, {}

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
    on_every_rank(model.groups.pp, lambda: _raise_first(errors))
    is_last = model.groups.pp.rank() == model.groups.pp.size() - 1
    for index, call in enumerate(calls):
        outputs = _broadcast(model, call, last_outputs[index] if is_last else None)
        if not is_last:
            micro_batches.finish(index, outputs)


def _raise_first(errors: Sequence[Exception]) -> None:
    if errors:
        raise errors[0]


def _broadcast(model: MegatronModel, call: Call, outputs: Outputs | None) -> Outputs:
    """Return the outputs of the last stage on every stage."""
    received = {}
    for name in call.outputs:
        if outputs is None:
            tokens, rows = len(call.at), len(call.packing.lengths)
            shape = {"scores": (rows,), "distribution": (tokens, model.vocabulary_size)}.get(name, (tokens,))
            dtype = torch.promote_types(model.config.params_dtype, torch.float32)
            received[name] = torch.empty(shape, dtype=dtype, device=call.tokens.device)
        else:
            received[name] = outputs[name].contiguous()
        dist.broadcast(received[name], group=model.groups.pp, group_src=model.groups.pp.size() - 1)
    return received
