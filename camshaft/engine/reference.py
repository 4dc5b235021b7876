"""The reference engine: plain torch, one process. The oracle for the others, and the one to read first.

    engine = ReferenceEngine(EngineConfig(model=EngineModel(path="models/tiny"), optim=OptimConfig(lr=1e-3)))
    engine.init_model()

Nothing is sharded, so a checkpoint is what it looks like: `model.safetensors` with Hugging Face names,
`optimizer.safetensors` with the same names, and `state.json`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from camshaft import storage
from camshaft.config.engine import EngineConfig
from camshaft.dataproto import DataProto
from camshaft.engine.base import BaseEngine, Batch, LossFn, PostprocessFn, PreprocessFn, StepContext
from camshaft.engine.optim import Schedule, build_optimizer, clip_and_step
from camshaft.engine.step import MicroBatchRun, packed_forward
from camshaft.errors import CheckpointError, EngineError
from camshaft.models.loader import load_model
from camshaft.models.packed import PackedModel
from camshaft.seat import Seat


class ReferenceEngine(BaseEngine):
    """One model on one device."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        if config.options:
            raise EngineError(f"the reference engine has no options of its own, got {sorted(config.options)}")
        if config.optim is not None and config.dtype == "bfloat16":
            raise EngineError(
                "dtype=bfloat16: this engine would update the bfloat16 weights themselves, and small updates are lost "
                "to rounding. Train in float32; a forward-only engine may be bfloat16"
            )
        self._module: PackedModel | None = None
        self._optimizer: torch.optim.AdamW | None = None
        self._schedule: Schedule | None = None
        self._loss_fn: LossFn | None = None
        self._skipped = 0

    def init_model(self) -> None:
        config = self.config
        self._module = load_model(config.model, config.dtype, config.device, config.seed)
        self._module.eval()
        if config.optim is not None:
            self._optimizer = build_optimizer(self._module.parameters(), config.optim)
            self._schedule = Schedule(self._optimizer, config.optim)

    # -- parts, with the error that says which step was forgotten ---------------------------------

    @property
    def module(self) -> PackedModel:
        if self._module is None:
            raise EngineError("the engine has no model yet: call init_model() first")
        return self._module

    @property
    def optimizer(self) -> torch.optim.AdamW:
        if self._optimizer is None:
            raise EngineError("this engine is forward-only (EngineConfig.optim is None) or init_model() was not called")
        return self._optimizer

    @property
    def schedule(self) -> Schedule:
        if self._schedule is None:
            raise EngineError("this engine is forward-only (EngineConfig.optim is None) or init_model() was not called")
        return self._schedule

    @property
    def seat(self) -> Seat:
        return Seat()

    @property
    def skipped_steps(self) -> int:
        return self._skipped

    # -- modes ------------------------------------------------------------------------------------

    def train_mode(self) -> contextlib.AbstractContextManager[None]:
        return self._mode(training=True)

    def eval_mode(self) -> contextlib.AbstractContextManager[None]:
        return self._mode(training=False)

    @contextlib.contextmanager
    def _mode(self, training: bool) -> Iterator[None]:
        """Parameters (to train, the optimizer's state too) where the engine computes, and away again at the end."""
        before = self.module.training
        with contextlib.ExitStack() as put_back:
            for part in ("model", "optimizer") if training else ("model",):
                place = self._place(part)
                if place is not None and place.type != torch.device(self.config.device).type:
                    self._move(part, self.config.device)
                    put_back.callback(self._move, part, str(place))
            self.module.train(training)
            put_back.callback(self.module.train, before)
            yield

    def _place(self, part: str) -> torch.device | None:
        """Where the parameters are, or AdamW's moments; None where there are none."""
        if part == "model":
            return next(self.module.parameters()).device
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        return next((state["exp_avg"].device for state in states), None)

    def _move(self, part: str, device: str) -> None:
        self.to(device, model=part == "model", optimizer=part == "optimizer")

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
        config, device = self.config, self.config.device
        run = MicroBatchRun(
            forward=lambda inputs, context: packed_forward(self.module, inputs, context, device),
            backward=lambda loss: loss.backward(),
            device=device,
            head=config.model.head,
            size=config.infer_micro_batch_size if forward_only else config.micro_batch_size,
            max_tokens=config.infer_max_tokens if forward_only else config.max_tokens,
        )
        loss_fn = None if forward_only else self._loss_fn
        predictions, loss, ctx = run(batch, ctx, loss_fn, preprocess_fn, postprocess_fn)
        return (predictions, ctx) if forward_only else (predictions, loss, ctx)

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def optimizer_step(self) -> float:
        norm, done = clip_and_step(self.optimizer, self.config.grad_clip)
        self._skipped += not done
        return norm

    def lr_scheduler_step(self) -> float:
        return self.schedule.go_to(self.schedule.update + 1)

    @property
    def learning_rate(self) -> float:
        return self.schedule.rate

    def shard_data(self, data: DataProto) -> DataProto:
        return data

    def unshard_data(self, data: DataProto) -> DataProto:
        return data

    # -- weights ----------------------------------------------------------------------------------

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        if model:
            self.module.to(device)
        if optimizer and self._optimizer is not None:
            for state in self._optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and name != "step":
                        state[name] = value.to(device)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._state().items()

    def disable_adapter(self) -> contextlib.AbstractContextManager[Any]:
        raise EngineError("disable_adapter: this model has no adapter")

    # -- checkpoints ------------------------------------------------------------------------------

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        with storage.new_folder(local_path, kind="engine", global_step=global_step) as folder:
            save_file({n: t.contiguous() for n, t in self.named_weights()}, folder / "model.safetensors")
            save_file(self._optimizer_tensors(), folder / "optimizer.safetensors")
            facts = {"update": self._schedule.update if self._schedule else 0, "skipped_steps": self._skipped}
            (folder / "state.json").write_text(json.dumps(facts), encoding="utf-8")
        if hdfs_path is not None:
            storage.copy_folder(local_path, hdfs_path)
        if max_ckpt_to_keep is not None:
            storage.prune(local_path, max_ckpt_to_keep)

    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True) -> None:
        if hdfs_path is not None:
            storage.copy_folder(hdfs_path, local_path)
        folder = Path(local_path).expanduser()
        storage.verify(folder)
        self._load_model(load_file(folder / "model.safetensors"), folder)
        facts = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if self._optimizer is not None:
            self._load_optimizer(load_file(folder / "optimizer.safetensors"))
            self.schedule.go_to(facts["update"])
        self._skipped = facts["skipped_steps"]
        if hdfs_path is not None and del_local_after_load:
            storage.remove(local_path)

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """AdamW's state by parameter name, and the random state that dropout draws from."""
        tensors = {"rng": torch.get_rng_state()}
        if torch.device(self.config.device).type != "cpu":
            tensors["rng_device"] = torch.get_device_module(self.config.device).get_rng_state()
        if self._optimizer is not None:
            for name, parameter in self.module.hf.named_parameters():
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    tensors[f"{name}/{key}"] = value.contiguous()
        return tensors

    def _state(self) -> dict[str, Tensor]:
        """Parameters, tied ones once, and the buffers that belong to the weights."""
        hf = self.module.hf
        kept = hf.state_dict().keys()
        buffers = {name: buffer for name, buffer in hf.named_buffers() if name in kept}
        return {name: parameter.detach() for name, parameter in hf.named_parameters()} | buffers

    def _load_model(self, tensors: dict[str, Tensor], folder: Path) -> None:
        expected = self._state()
        if tensors.keys() != expected.keys():
            wrong = sorted(tensors.keys() ^ expected.keys())
            raise CheckpointError(f"{folder} is of another model; names that differ: {', '.join(wrong[:5])}")
        with torch.no_grad():
            for name, parameter in expected.items():
                if tensors[name].shape != parameter.shape:
                    raise CheckpointError(
                        f"{folder}: '{name}' is {tuple(tensors[name].shape)}, the model has {tuple(parameter.shape)}"
                    )
                parameter.copy_(tensors[name])

    def _load_optimizer(self, tensors: dict[str, Tensor]) -> None:
        torch.set_rng_state(tensors["rng"])
        if "rng_device" in tensors and torch.device(self.config.device).type != "cpu":
            torch.get_device_module(self.config.device).set_rng_state(tensors["rng_device"])
        self.optimizer.state.clear()
        for name, parameter in self.module.hf.named_parameters():
            state = {
                key: tensors[f"{name}/{key}"].clone()
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"{name}/{key}" in tensors
            }
            if state:
                moved = {k: v if k == "step" else v.to(parameter.device) for k, v in state.items()}
                self.optimizer.state[parameter] = moved
