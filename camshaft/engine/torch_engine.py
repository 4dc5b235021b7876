"""What engines around a `PackedModel` and a torch optimizer share: everything but how the model is laid out.

    class MyEngine(TorchEngine):
        def _build(self) -> PackedModel: ...       # the model, where it computes

`SingleDeviceEngine` adds a model on one device to this, `FSDPEngine` one over many ranks. A step is `step.py`, the
optimizer `optim.py`, places between phases `offload.py`, files `checkpoint.py`; this is how they hang together.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from camshaft.config.engine import EngineConfig
from camshaft.dataproto import DataProto
from camshaft.device import place, random_states, set_random_states
from camshaft.engine import checkpoint
from camshaft.engine.base import BaseEngine, Batch, LossFn, PostprocessFn, Predictions, PreprocessFn, StepContext
from camshaft.engine.micro_batches import attention_pivot
from camshaft.engine.offload import Part, Parts
from camshaft.engine.optim import Schedule, build_optimizer, clip_and_step
from camshaft.engine.step import MicroBatchRun, packed_forward
from camshaft.errors import EngineError
from camshaft.models.lora import adapter_weights, disable_adapter, merged_weights
from camshaft.models.packed import PackedModel


class TorchEngine(BaseEngine):
    """One model, its optimizer, and one way to lay them out."""

    _resting: tuple[Part, ...] = ()
    """What waits in host memory between `train_mode` / `eval_mode` contexts."""
    _files: dist.ProcessGroup | None = None
    """The ranks that write a checkpoint together, a group used for nothing else; None for one process."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self._module: PackedModel | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._schedule: Schedule | None = None
        self._parts: Parts | None = None
        self._loss_fn: LossFn | None = None
        self._skipped = 0

    # -- what differs -----------------------------------------------------------------------------

    @abstractmethod
    def _build(self) -> PackedModel:
        """The model with its weights, in eval mode, laid out on `self._device`."""

    def _sum(self, tensor: Tensor) -> Tensor:
        """Over the ranks that have rows of their own."""
        return tensor

    def _most(self, count: int) -> int:
        """The largest of what these ranks have."""
        return count

    def _forward(self, inputs: DataProto, ctx: StepContext) -> Predictions:
        return packed_forward(self.module, inputs, ctx, str(self._device), self._shares)

    @property
    def _shares(self) -> bool:
        """Whether a prompt that rows have in common is computed once."""
        module, model = self.module, self.config.model
        possible = module.continues and module.sequence is None and self._device.type == "cpu"
        return possible and model.use_prefix_grouper and model.head != "reward"

    def _after_inference(self) -> None:
        """Let go of what a backward pass would have let go of."""

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _clip_and_step(self) -> tuple[float, bool]:
        return clip_and_step(self.optimizer, self.config.grad_clip)

    @property
    def _home(self) -> torch.device:
        """Where parameters and optimizer are in a step."""
        return self._device

    def _whole(self, tensor: Tensor) -> Tensor:
        """All of a weight that this rank has a part of."""
        return tensor

    # -- parts, with the error that says which step was forgotten ---------------------------------

    def init_model(self) -> None:
        self._device = place(self.config.device)
        self._module = self._build()
        if self.config.optim is not None:
            # Before any forward pass: what the optimizer holds must be what the layout made of the parameters.
            self._optimizer = build_optimizer(self._module.parameters(), self.config.optim)
            self._schedule = Schedule(self._optimizer, self.config.optim)
        self._parts = Parts(self._module, self._optimizer, self._home, self._resting)

    @property
    def module(self) -> PackedModel:
        if self._module is None:
            raise EngineError("the engine has no model yet: call init_model() first")
        return self._module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        if self._optimizer is None:
            raise EngineError("this engine is forward-only (EngineConfig.optim is None) or init_model() was not called")
        return self._optimizer

    @property
    def schedule(self) -> Schedule:
        if self._schedule is None:
            raise EngineError("this engine is forward-only (EngineConfig.optim is None) or init_model() was not called")
        return self._schedule

    @property
    def parts(self) -> Parts:
        if self._parts is None:
            raise EngineError("the engine has no model yet: call init_model() first")
        return self._parts

    @property
    def skipped_steps(self) -> int:
        return self._skipped

    # -- modes and places -------------------------------------------------------------------------

    def train_mode(self) -> contextlib.AbstractContextManager[None]:
        return self._mode(True, "model", "gradients", "optimizer")

    def eval_mode(self) -> contextlib.AbstractContextManager[None]:
        return self._mode(False, "model")

    @contextlib.contextmanager
    def _mode(self, training: bool, *parts: Part) -> Iterator[None]:
        before = self.module.training
        with self.parts.on_device(*parts):
            self.module.train(training)
            try:
                yield
            finally:
                self.module.train(before)

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        target = torch.device(device)
        target = self._home if target.type == self._home.type else target
        if model:
            self.parts.move("model", target)
        if optimizer:
            self.parts.move("optimizer", target)

    # -- one step ---------------------------------------------------------------------------------

    def set_loss_fn(self, loss_fn: LossFn) -> None:
        self._loss_fn = loss_fn

    def forward_backward_step(
        self,
        batch: Batch,
        ctx: StepContext | None = None,
        forward_only: bool = False,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
    ) -> tuple[Any, ...]:
        if not forward_only and self._loss_fn is None:
            raise EngineError("there is no loss: call set_loss_fn(loss_fn) first, or pass forward_only=True")
        config = self.config
        run = MicroBatchRun(
            forward=self._forward,
            backward=self._backward,
            device=str(self._device),
            head=config.model.head,
            size=config.infer_micro_batch_size if forward_only else config.micro_batch_size,
            max_tokens=config.infer_max_tokens if forward_only else config.max_tokens,
            sum_over_ranks=self._sum,
            most_over_ranks=self._most,
            pivot=attention_pivot(self.module.hf.config.get_text_config().hidden_size),
            share=self._shares,
        )
        loss_fn = None if forward_only else self._loss_fn
        predictions, loss, ctx = run(batch, ctx, loss_fn, preprocess_fn, postprocess_fn)
        if forward_only:
            self._after_inference()
        return (predictions, ctx) if forward_only else (predictions, loss, ctx)

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.parts.forget_gradients()

    def optimizer_step(self) -> float:
        with self.parts.on_device("model", "gradients", "optimizer"):
            norm, done = self._clip_and_step()
        self._skipped += not done
        return norm

    def lr_scheduler_step(self) -> float:
        return self.schedule.go_to(self.schedule.update + 1)

    @property
    def learning_rate(self) -> float:
        return self.schedule.rate

    # -- weights and checkpoints ------------------------------------------------------------------

    def named_weights(self, adapter_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        yield from (adapter_weights if adapter_only else merged_weights)(self.module.hf, self._whole)

    def disable_adapter(self) -> contextlib.AbstractContextManager[Any]:
        return disable_adapter(self.module.hf)

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        self._save(self._state(), local_path, hdfs_path, global_step, max_ckpt_to_keep)

    def _save(
        self, state: checkpoint.State, local_path: str, hdfs_path: str | None, global_step: int, keep: int | None
    ) -> None:
        checkpoint.save(
            state,
            local_path,
            group=self._files,
            hdfs_path=hdfs_path,
            global_step=global_step,
            max_ckpt_to_keep=keep,
        )

    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True) -> None:
        copied = checkpoint.brought(local_path, hdfs_path, del_local_after_load, self._files)
        # Read to where a step finds them: what rests in host memory goes back there afterwards.
        with copied as folder, self.parts.on_device("model", "optimizer"):
            loaded = self._read(folder)
        if self._optimizer is not None:
            self.schedule.go_to(loaded.facts["update"])
            if loaded.random:
                set_random_states(loaded.random, self._device)
        self._skipped = loaded.facts["skipped_steps"]

    def _state(self) -> checkpoint.State:
        random = random_states(self._device)
        return checkpoint.State.of(self._kept(), self._optimizer, self._parameters(), self._facts(), random)

    def _read(self, folder: Path) -> checkpoint.Loaded:
        return checkpoint.load_into(folder, self._kept(), self._optimizer, self._parameters(), group=self._files)

    def _facts(self) -> dict[str, Any]:
        """Where the schedule is; and which model this is, for whoever takes it out of the checkpoint."""
        update, path = self._schedule.update if self._schedule else 0, Path(self.config.model.path).expanduser()
        model = self.config.model.model_dump(mode="json", fallback=str)
        if path.is_dir():
            model["path"] = str(path.absolute())
        return {"update": update, "skipped_steps": self._skipped, "model": model, "seed": self.config.seed}

    def _parameters(self) -> dict[str, Tensor]:
        return dict(self.module.hf.named_parameters())

    def _kept(self) -> dict[str, Tensor]:
        """The live weights that a checkpoint holds: all, or what is trained beside a frozen base from model.path."""
        if self.config.model.lora is None:
            return dict(merged_weights(self.module.hf))
        return {name: p.detach() for name, p in self.module.hf.named_parameters() if p.requires_grad}
