"""Shared code of pipeline-parallel engines: losses on the last stage, and its outputs and all weights on every stage.

    run = PipelineRun(micro_batches, pipeline)                       # on every rank of the process group `pipeline`
    ... run.compute_loss(index, hidden, apply_head)                  # the schedule calls it, on the last stage
    run.finish(vocabulary_size, dtype)

The last stage calls the hooks and the loss within the schedule. The other stages call them afterwards, on the outputs
that the last stage broadcasts, so that every rank returns the same results. An error of a hook or of the loss is raised
on all stages.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from camshaft.engine.base import DtypeOf, cast_weight
from camshaft.engine.collectives import on_every_rank
from camshaft.engine.micro_batches import MicroBatches, ModelInputs
from camshaft.models.heads import DIMENSIONS
from camshaft.models.packed import unwrap

Outputs = Mapping[str, Tensor]


class PipelineRun:
    """The inputs, losses and outputs of one call on the ranks of a pipeline."""

    def __init__(
        self,
        micro_batches: MicroBatches,
        pipeline: dist.ProcessGroup,
        more_outputs: Callable[[int], Outputs] | None = None,
    ):
        """`more_outputs` returns outputs of a micro-batch that every stage knows before the schedule."""
        self._more_outputs = more_outputs
        self.inputs = [micro_batches.prepare(index) for index in range(len(micro_batches))]
        self._micro_batches, self._pipeline = micro_batches, pipeline
        self._outputs: list[Outputs] = []
        self._errors: list[Exception] = []

    def compute_loss(self, index: int, hidden: Tensor, apply_head: Callable[[Tensor], Outputs]) -> Tensor:
        """Return the loss of a micro-batch from the output `hidden` of the last stage.

        After an error, return a loss of zero that is connected to the graph, so that the schedule completes.
        """
        loss = None
        if not self._errors:
            try:
                outputs = apply_head(hidden)
                self._outputs.append({name: output.detach() for name, output in outputs.items()})
                loss = self._finish(index, outputs)
            except Exception as error:  # `PipelineRun.finish` raises it on all stages
                self._errors.append(error)
        return (hidden * 0).sum() if loss is None else loss

    def finish(self, vocabulary_size: int, dtype: torch.dtype) -> None:
        """Call hooks and losses on all other stages. Collective; call it after the schedule.

        `dtype` is the dtype of the hidden states.
        """
        on_every_rank(self._pipeline, self._raise_error)
        is_last = self._pipeline.rank() == self._pipeline.size() - 1
        for index, inputs in enumerate(self.inputs):
            outputs = self._broadcast(inputs, self._outputs[index] if is_last else None, vocabulary_size, dtype)
            if not is_last:
                self._finish(index, outputs)

    def _finish(self, index: int, outputs: Outputs) -> Tensor | None:
        more = {} if self._more_outputs is None else self._more_outputs(index)
        return self._micro_batches.finish(index, {**outputs, **more})

    def _raise_error(self) -> None:
        if self._errors:
            raise self._errors[0]

    def _broadcast(
        self, inputs: ModelInputs, outputs: Outputs | None, vocabulary_size: int, dtype: torch.dtype
    ) -> Outputs:
        """Return the outputs of the last stage, the only one whose `outputs` are not None, on every stage."""
        sizes = {"token": len(unwrap(inputs.at)), "row": len(inputs.packing.lengths), "vocabulary": vocabulary_size}
        received = {}
        for name in inputs.outputs:
            if outputs is None:
                shape = [sizes[dimension] for dimension in DIMENSIONS[name]]
                output_dtype = torch.promote_types(dtype, torch.float32)
                received[name] = torch.empty(shape, dtype=output_dtype, device=inputs.tokens.device)
            else:
                received[name] = outputs[name].contiguous()
            dist.broadcast(received[name], group=self._pipeline, group_src=self._pipeline.size() - 1)
        return received


def locate_weights(names: Iterable[str], local_names: Collection[str], pipeline: dist.ProcessGroup) -> dict[str, int]:
    """Return the first stage that has each of the weights `names`. Collective; `local_names` are this stage's."""
    names_of_stages: list[Any] = [None] * pipeline.size()
    dist.all_gather_object(names_of_stages, set(local_names), group=pipeline)
    return {name: next(i for i, stage in enumerate(names_of_stages) if name in stage) for name in names}


def weights_of_all_stages(
    stage_of: Mapping[str, int],
    full_weight: Callable[[str], Tensor],
    templates: Mapping[str, Tensor],
    dtype_of: DtypeOf | None,
    pipeline: dist.ProcessGroup,
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the full tensor of every weight, on every stage. Collective.

    `full_weight` returns a weight of this stage by its name, with the dtype of `dtype_of`. `templates` are meta tensors
    with the shapes and dtypes of all weights.
    """
    for name, stage in stage_of.items():
        if stage == pipeline.rank():
            full = full_weight(name)
        else:
            full = torch.empty_like(cast_weight(name, templates[name], dtype_of), device=device)
        if pipeline.size() > 1:
            dist.broadcast(full, group=pipeline, group_src=stage)
        yield name, full
