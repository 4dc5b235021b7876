"""Runs micro-batches through pipeline stages, with the 1F1B schedule of torch.distributed.pipelining.

run_pipeline(module, micro_batches, meshes, dtype, engine.forward_context)   # collective over a pipeline
"""

# pyright: reportMissingImports=false
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _ScheduleForwardOnly
from torch.distributed.tensor import DTensor, Replicate, Shard

from camshaft.engine.micro_batches import MicroBatches
from camshaft.engine.pipeline import Outputs, PipelineRun
from camshaft.engine.torchtitan.mesh import Meshes
from camshaft.engine.torchtitan.model import TitanModel


class Stage(PipelineStage):
    """The pipeline stage of this rank for one call, with micro-batches of different sizes."""

    def __init__(
        self,
        module: TitanModel,
        meshes: Meshes,
        sizes: Sequence[int],
        dtype: torch.dtype,
        context: Callable[[], AbstractContextManager[Any]],
    ):
        """`sizes` are the numbers of tokens of the micro-batches, and `dtype` the one of the hidden states."""
        assert meshes.pipeline is not None
        layout, device = meshes.layout, next(module.parameters()).device
        index = dist.get_rank() // layout.ranks_per_stage
        # With complete metadata, stages do not run the model to infer it.
        hidden = torch.empty(1, sizes[0], module.hidden_size, dtype=dtype, device="meta", requires_grad=True)
        tokens = torch.empty(1, sizes[0], dtype=torch.int64, device="meta")
        super().__init__(
            module.decoder,
            index,
            layout.pipeline,
            device,
            input_args=hidden if index else tokens,
            output_args=hidden,
            group=meshes.pipeline,
        )
        self._sizes, self._context = sizes, context
        self._tensor_mesh: DeviceMesh | None = meshes.dims.get_optional_mesh("tp")
        self._placement = Shard(1) if module.token_multiple > 1 else Replicate()

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the stage. Tensor-parallel layers compute with DTensors; stages exchange their local tensors."""
        if self._tensor_mesh is not None and not self.is_first:
            args = (DTensor.from_local(args[0], self._tensor_mesh, [self._placement], run_check=False),)
        with self._context():
            hidden = super().forward_maybe_with_nosync(*args, **kwargs)
        return hidden.to_local() if isinstance(hidden, DTensor) else hidden

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        self._resize_buffers(self.args_recv_info)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        self._resize_buffers(self.grad_recv_info)

    def _resize_buffers(self, receives: Mapping[int, Sequence[Any]]) -> None:
        """Replace the receive buffers, which have the size of the first micro-batch, with ones of the right sizes."""
        for index, receives_of_batch in receives.items():
            for receive in receives_of_batch:
                if receive.buffer is not None:
                    receive.buffer = receive.buffer.new_empty(1, self._sizes[index], receive.buffer.shape[-1])


def run_pipeline(
    module: TitanModel,
    micro_batches: MicroBatches,
    meshes: Meshes,
    dtype: torch.dtype,
    context: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Run all micro-batches forward and, with gradients enabled, backward.

    Hidden states have the dtype `dtype`. Each forward pass of a stage runs in a new `context`.
    """
    assert meshes.pipeline is not None
    run = PipelineRun(micro_batches, meshes.pipeline)
    count = len(run.inputs)
    calls = [module.decoder_inputs(each.tokens, each.packing) for each in run.inputs]
    stage = Stage(module, meshes, [call[0].shape[1] // module.token_multiple for call in calls], dtype, context)

    def compute_loss(hidden: Tensor, index: int) -> Tensor:
        def apply_head(hidden: Tensor) -> Outputs:
            with context():
                return module.outputs_of_last_stage(hidden, run.inputs[index])

        return run.compute_loss(index, hidden, apply_head)

    arguments = ([(call[0],) for call in calls], [{"positions": c[1], "attention_masks": c[2]} for c in calls])
    stage.has_backward = torch.is_grad_enabled()
    if stage.has_backward:
        # 1F1B requires as many micro-batches as stages. With fewer of them, GPipe does the same.
        kind = Schedule1F1B if count >= stage.num_stages else ScheduleGPipe
        schedule = kind(stage, count, compute_loss, scale_grads=False)
        schedule._step_microbatches(*arguments, target_mbs=list(range(count)), return_outputs=False)
    else:
        _ScheduleForwardOnly(stage, count)._step_microbatches(*arguments)
        for index, hidden in enumerate(stage.output_chunks):
            compute_loss(hidden, index)
    run.finish(module.vocabulary_size, dtype)
