"""Engines with one bug each, of the kind that real backends have had. The contract must detect every one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from camshaft.config.engine import OptimConfig
from camshaft.dataproto import DataProto
from camshaft.engine import micro_batches
from camshaft.engine.base import Batch, DtypeOf, Seat, StepHyperparameters
from camshaft.engine.context import StepContext
from camshaft.engine.micro_batches import MicroBatches, as_batch
from camshaft.engine.optim import clip_and_step
from camshaft.engine.single import SingleDeviceEngine
from camshaft.models import packed
from camshaft.models.attention import packed_kwargs
from camshaft.models.packed import PackedModel
from camshaft.models.packing import Packing


def _as_ever(engine: SingleDeviceEngine, *args: Any, **kwargs: Any) -> Any:
    return SingleDeviceEngine.forward_backward_step(engine, *args, **kwargs)


class LocalCounts(SingleDeviceEngine):
    """Divide by the counts of the micro-batch instead of the mini-batch."""

    def set_loss_fn(self, loss_fn: Any) -> None:
        def local(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
            mask = data["loss_mask"]
            ctx["num_tokens"] = max(float(mask.values.sum()), 1.0)
            ctx["num_sequences"] = max(float((mask.map(Tensor.float).sum() > 0).sum()), 1.0)
            return loss_fn(data, predictions, ctx)

        super().set_loss_fn(local)


class IgnoresSequenceWeights(SingleDeviceEngine):
    """Count each row of an episode with several sequences."""

    def forward_backward_step(self, batch: Batch, *args: Any, **kwargs: Any) -> Any:
        rows = batch.drop("sequence_weight") if isinstance(batch, DataProto) else batch
        return _as_ever(self, rows, *args, **kwargs)


class MeanOfMicroBatches(SingleDeviceEngine):
    """Average the losses of the micro-batches, as gradient accumulation often does."""

    def forward_backward_step(
        self, batch: Batch, ctx: Any = None, forward_only: bool = False, *hooks: Any, **k: Any
    ) -> Any:
        if forward_only or self.config.micro_batch_size is None:
            return _as_ever(self, batch, ctx, forward_only, *hooks, **k)
        parts = -(-len(batch) // self.config.micro_batch_size)
        predictions, loss, ctx = _as_ever(self, batch, ctx, forward_only, *hooks, **k)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= parts
        return predictions, loss / parts, ctx


class ReturnsExecutionOrder(SingleDeviceEngine):
    """Return predictions in execution order of the micro-batches."""

    def forward_backward_step(self, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(micro_batches, "restore_order", _in_order_of_running):
            return _as_ever(self, *args, **kwargs)


def _in_order_of_running(plan: Any, parts: Any) -> Any:
    return parts[0].concat(list(parts)) if hasattr(parts[0], "lengths") else torch.cat(list(parts))


class ExceedsTokenBudget(SingleDeviceEngine):
    """Exceed the token budget."""

    def __init__(self, config: Any):
        loose = {n: getattr(config, n) and 10 * getattr(config, n) for n in ("max_tokens", "infer_max_tokens")}
        super().__init__(config.model_copy(update=loose))


class NormAfterClipping(SingleDeviceEngine):
    """Report the gradient norm after clipping."""

    def optimizer_step(self) -> float:
        return min(super().optimizer_step(), self.config.grad_clip)


class NoClipping(SingleDeviceEngine):
    """Report the gradient norm without clipping."""

    def __init__(self, config: Any):
        super().__init__(config.model_copy(update={"grad_clip": 1e9}))


class ForgetsGradients(SingleDeviceEngine):
    """Free gradients with the activations when train_mode ends."""

    @contextlib.contextmanager
    def train_mode(self) -> Iterator[None]:
        with super().train_mode():
            yield
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()


class AdapterStaysOn(SingleDeviceEngine):
    """Ignore disable_adapter."""

    def disable_adapter(self) -> contextlib.AbstractContextManager[Any]:
        super().disable_adapter()
        return contextlib.nullcontext()


class StepsIntoNaN(SingleDeviceEngine):
    """Apply the update even for non-finite gradients."""

    def optimizer_step(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.config.grad_clip)
        self.optimizer.step()
        return float(norm)


class ReadsEachLoss(SingleDeviceEngine):
    """Read the loss of every micro-batch back from the device."""

    def set_loss_fn(self, loss_fn: Any) -> None:
        def reading(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
            loss, ctx = loss_fn(data, predictions, ctx)
            assert loss.item() == loss.item()
            return loss, ctx

        super().set_loss_fn(reading)


class AlwaysTrains(SingleDeviceEngine):
    """Keep dropout active in eval_mode."""

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[None]:
        with self.train_mode():
            yield


class TrainsSharedWeights(SingleDeviceEngine):
    """Train while a rollout reads the weights in place."""

    def check_not_shared(self) -> None:
        pass


class IgnoresTemperature(SingleDeviceEngine):
    """Compute log-probs at temperature 1 for any sampling temperature."""

    def forward_backward_step(self, batch: Batch, ctx: Any = None, *args: Any, **kwargs: Any) -> Any:
        ctx = None if ctx is None else {k: v for k, v in ctx.items() if k != "temperature"}
        return _as_ever(self, batch, ctx, *args, **kwargs)


class DropsUnknownKeys(SingleDeviceEngine):
    """Drop unknown ctx keys."""

    def forward_backward_step(self, batch: Batch, ctx: Any = None, *args: Any, **kwargs: Any) -> Any:
        control_keys = StepContext.__annotations__
        ctx = None if ctx is None else {k: v for k, v in ctx.items() if k in control_keys}
        return _as_ever(self, batch, ctx, *args, **kwargs)


class ForgetsOptimizer(SingleDeviceEngine):
    """Save weights but no optimizer state."""

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().load_checkpoint(*args, **kwargs)
        self.optimizer.state.clear()


class ForgetsRandomState(SingleDeviceEngine):
    """Do not restore the random state of dropout."""

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().load_checkpoint(*args, **kwargs)
        torch.manual_seed(12345)


class ForgetsSchedule(SingleDeviceEngine):
    """Restart the schedule of the learning rate after a resume."""

    def _checkpoint_metadata(self) -> dict[str, Any]:
        return super()._checkpoint_metadata() | {"update": 0}


class ForgetsSkippedSteps(SingleDeviceEngine):
    """Restart the count of skipped steps after a resume."""

    def _checkpoint_metadata(self) -> dict[str, Any]:
        return super()._checkpoint_metadata() | {"skipped_steps": 0}


class IgnoresWeightDecay(SingleDeviceEngine):
    """Train without weight decay."""

    def optimizer_step(self) -> float:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.0
        return super().optimizer_step()


class KeepsHyperparameters(SingleDeviceEngine):
    """Write the hyperparameters of a step into the optimizer, where they stay."""

    def optimizer_step(self, hyperparameters: StepHyperparameters | None = None) -> float:
        if hyperparameters is not None:
            for group in self.optimizer.param_groups:
                group.update(weight_decay=hyperparameters.weight_decay, betas=hyperparameters.betas)
        return super().optimizer_step(hyperparameters)


class ClipsAsConfigured(SingleDeviceEngine):
    """Clip the gradient norm by the config instead of the hyperparameters of the step."""

    def clip_and_step(self) -> tuple[float, bool]:
        return clip_and_step(self.optimizer, self.config.grad_clip)


class ScoresTheInput(SingleDeviceEngine):
    """Return the log-probs of the input as those of the targets."""

    def forward_backward_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if "targets" in batch:
            batch = batch.with_columns(targets=batch["input_ids"])
        return _as_ever(self, batch, *args, **kwargs)


class AcceptsUnknownTargets(SingleDeviceEngine):
    """Replace targets that the model does not have."""

    def forward_backward_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if "targets" in batch and batch["targets"].values.ndim == 1:
            batch = batch.with_columns(targets=batch["targets"].map(lambda ids: ids % self.module.vocabulary_size))
        return _as_ever(self, batch, *args, **kwargs)


class AdaptsAllLayers(SingleDeviceEngine):
    """Ignore the groups of layers of an adapter."""

    def __init__(self, config: Any):
        super().__init__(_with_lora(config, train_attn=True, train_mlp=True))


class SeedsAdaptersByTheEngine(SingleDeviceEngine):
    """Ignore the seed of an adapter."""

    def __init__(self, config: Any):
        super().__init__(_with_lora(config, seed=None))


def _with_lora(config: Any, **fields: Any) -> Any:
    """Return the config with other fields of the adapter, if it has one."""
    if config.model.lora is None:
        return config
    lora = config.model.lora.model_copy(update=fields)
    return config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})


class ForgetsTheTiedHead(SingleDeviceEngine):
    """Leave out the adapter of a tied head silently."""

    def notices(self) -> tuple[str, ...]:
        super().notices()
        return ()


class DecaysFrozenWeights(SingleDeviceEngine):
    """Apply weight decay to weights without a gradient."""

    def optimizer_step(self) -> float:
        group = self.optimizer.param_groups[0]
        for parameter in self.module.parameters():
            if not parameter.requires_grad:
                parameter.data *= 1 - group["lr"] * group["weight_decay"]
        return super().optimizer_step()


class SparesAdaptersFromDecay(SingleDeviceEngine):
    """Train adapters without weight decay."""

    def build_optimizer(self, config: OptimConfig) -> torch.optim.Optimizer:
        with_adapter = self.config.model.lora is not None
        return super().build_optimizer(config.model_copy(update={"weight_decay": 0.0}) if with_adapter else config)


class CountsSkippedUpdates(SingleDeviceEngine):
    """Count a skipped update in the bias correction of the moments."""

    def optimizer_step(self) -> float:
        skipped_before = self.skipped_steps
        norm = super().optimizer_step()
        if self.skipped_steps > skipped_before:
            for parameter in self.module.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()
        return norm


class MisstatesRanksPerRow(SingleDeviceEngine):
    """Take the rows of two data-parallel ranks."""

    @property
    def seat(self) -> Seat:
        return Seat(dp_rank=0, dp_size=1, world=2)


class SkipsChecksums(SingleDeviceEngine):
    """Load files without verifying the checksums."""

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with mock.patch("camshaft.storage.verify", return_value={}):
            super().load_checkpoint(*args, **kwargs)


class IgnoresRetention(SingleDeviceEngine):
    """Accept max_ckpt_to_keep and delete nothing."""

    def save_checkpoint(
        self, local_path: str, hdfs_path: Any = None, global_step: int = 0, max_ckpt_to_keep: Any = None
    ) -> None:
        super().save_checkpoint(local_path, hdfs_path, global_step, None)


class KeepsUnnumberedCheckpoints(SingleDeviceEngine):
    """Apply max_ckpt_to_keep only to folders that are named after their step."""

    def save_checkpoint(
        self, local_path: str, hdfs_path: Any = None, global_step: int = 0, max_ckpt_to_keep: Any = None
    ) -> None:
        keep = max_ckpt_to_keep if "global_step_" in local_path else None
        super().save_checkpoint(local_path, hdfs_path, global_step, keep)


class DeletesCheckpointsOfOtherEngines(SingleDeviceEngine):
    def _checkpoint_metadata(self) -> dict[str, Any]:
        return super()._checkpoint_metadata() | {"series": "all"}


class DeletesOriginals(SingleDeviceEngine):
    """Delete the loaded folder even if it was not downloaded."""

    def load_checkpoint(self, local_path: str, hdfs_path: Any = None, del_local_after_load: bool = True) -> None:
        super().load_checkpoint(local_path, hdfs_path, False)
        if del_local_after_load and Path(local_path).exists():
            __import__("shutil").rmtree(local_path)


class PrefixesWeightNames(SingleDeviceEngine):
    """Stream weights under the names of a wrapper module."""

    def named_weights(
        self, adapter_only: bool = False, dtype_of: DtypeOf | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, weight in super().named_weights(adapter_only, dtype_of):
            yield f"module.{name}", weight


class IgnoresTheDtypeOfWeights(SingleDeviceEngine):
    """Stream weights in the dtype of training."""

    def named_weights(
        self, adapter_only: bool = False, dtype_of: DtypeOf | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        return super().named_weights(adapter_only)


class StreamsMasterWeights(SingleDeviceEngine):
    """Stream the weights of a bfloat16 model in float32."""

    def named_weights(
        self, adapter_only: bool = False, dtype_of: DtypeOf | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, weight in super().named_weights(adapter_only, dtype_of):
            yield name, weight.float() if dtype_of is None and weight.dtype == torch.bfloat16 else weight


class TransposesWeights(SingleDeviceEngine):
    """Stream some weights in the layout of another library, transposed."""

    def named_weights(
        self, adapter_only: bool = False, dtype_of: DtypeOf | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, weight in super().named_weights(adapter_only, dtype_of):
            yield name, weight.T if name.endswith("down_proj.weight") else weight


class ReusesItsBuffer(SingleDeviceEngine):
    """Stream all weights through one buffer."""

    @property
    def yields_live_weights(self) -> bool:
        return False

    def named_weights(
        self, adapter_only: bool = False, dtype_of: DtypeOf | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        weights = super().named_weights(adapter_only, dtype_of)
        if adapter_only or dtype_of is not None:
            yield from weights
            return
        buffer = torch.empty(max(parameter.numel() for parameter in self.module.parameters()))
        for name, weight in weights:
            yield name, buffer[: weight.numel()].view_as(weight).copy_(weight)


class SavesPrefixedNames(SingleDeviceEngine):
    """Save weights under the names of a wrapper module."""

    def checkpoint_weights(self) -> dict[str, Tensor]:
        return {f"module.{name}": weight for name, weight in super().checkpoint_weights().items()}


class WarmsUpTooLow(SingleDeviceEngine):
    """Warm up at half the learning rate."""

    def lr_scheduler_step(self) -> float:
        super().lr_scheduler_step()
        return self.learning_rate

    @property
    def learning_rate(self) -> float:
        return self.schedule.learning_rate * (0.5 if self.schedule.update < 2 else 1.0)


class RenamesParameter(SingleDeviceEngine):
    """Rename a parameter of the interface."""

    def to(self, where: str, model: bool = True, optimizer: bool = True) -> None:
        super().to(where, model, optimizer)


class PatchesTransformers(SingleDeviceEngine):
    """Replace a method of the model class."""

    def init_model(self) -> None:
        super().init_model()
        import transformers.models.qwen2.modeling_qwen2 as modeling

        original = modeling.Qwen2Attention.forward
        modeling.Qwen2Attention.forward = lambda *args, **kwargs: original(*args, **kwargs)


class SkipsHooks(SingleDeviceEngine):
    """Run the hooks once for the whole batch."""

    def forward_backward_step(
        self,
        batch: Any,
        ctx: Any = None,
        forward_only: bool = False,
        preprocess_fn: Any = None,
        postprocess_fn: Any = None,
    ) -> Any:
        ctx = dict(ctx or {})
        if preprocess_fn is not None:
            batch, ctx = preprocess_fn(batch, ctx)
        predictions, *rest = _as_ever(self, batch, ctx, forward_only)
        if postprocess_fn is not None:
            predictions, _ = postprocess_fn(predictions, ctx)
        return predictions, *rest


class HalfGradient(SingleDeviceEngine):
    """Average gradients over two ranks that do not exist."""

    def optimizer_step(self) -> float:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= 2
        return super().optimizer_step()


class TrainsPadToken(SingleDeviceEngine):
    """Compute a gradient for the embedding of the pad token."""

    def build_model(self) -> PackedModel:
        model = super().build_model()
        embeddings: Any = model.hf.get_input_embeddings()
        embeddings.padding_idx = None
        return model


class LosesStateOnMove(SingleDeviceEngine):
    """Lose the optimizer's moments on a move."""

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        super().to(device, model, optimizer)
        if optimizer:
            self.optimizer.state.clear()


class CountsPadding(SingleDeviceEngine):
    """Treat pad tokens of a padded batch as tokens."""

    def forward_backward_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(batch, DataProto):
            batch = dict(batch) | {"attention_mask": torch.ones_like(batch["attention_mask"])}
        return _as_ever(self, batch, *args, **kwargs)


class UnseededStart(SingleDeviceEngine):
    """Draw initial weights from the global random state."""

    def __init__(self, config: Any):
        super().__init__(config.model_copy(update={"seed": int(torch.randint(1 << 30, ()))}))


class LosesRowsInShards(SingleDeviceEngine):
    """Return only half of the rows after sharding."""

    def unshard_data(self, data: DataProto) -> DataProto:
        return data.split(4)[0]


class SilentWithoutLoss(SingleDeviceEngine):
    """Train with a zero loss if none is set."""

    def forward_backward_step(self, batch: Any, ctx: Any = None, forward_only: bool = False, **kwargs: Any) -> Any:
        if self._loss_fn is None and not forward_only:
            result, ctx = _as_ever(self, batch, ctx, True)
            return result, torch.zeros(()), ctx
        return _as_ever(self, batch, ctx, forward_only, **kwargs)


class StartsResponsesAtZero(SingleDeviceEngine):
    """Share the prefix, but count the positions of each response from zero."""

    def forward_backward_step(self, *args: Any, **kwargs: Any) -> Any:
        def from_zero(packing: Packing, device: Any) -> dict[str, Any]:
            counted = packed_kwargs(Packing(packing.lengths), device)["position_ids"]
            return packed_kwargs(packing, device) | {"position_ids": counted}

        with mock.patch.object(packed, "packed_kwargs", from_zero):
            return _as_ever(self, *args, **kwargs)


class ChangesOutputs(SingleDeviceEngine):
    """Base class of engines that return changed outputs of the model."""

    def change(self, outputs: dict[str, Tensor], temperature: float) -> dict[str, Tensor]:
        raise NotImplementedError

    def run_micro_batches(self, micro_batches: MicroBatches) -> None:
        finish, temperature = micro_batches.finish, micro_batches.ctx["temperature"]

        def finish_changed(index: int, outputs: Any) -> Tensor | None:
            return finish(index, self.change(outputs, temperature))

        with mock.patch.object(micro_batches, "finish", finish_changed):
            super().run_micro_batches(micro_batches)


class EstimatesTheGradient(ChangesOutputs):
    """Return the exact divergence with the gradient of its estimate, log p(token) - log q(token)."""

    def change(self, outputs: dict[str, Tensor], temperature: float) -> dict[str, Tensor]:
        if "full_kl" not in outputs:
            return outputs
        estimate = outputs["log_probs"] - outputs["log_probs"].detach()
        return outputs | {"full_kl": outputs["full_kl"].detach() + estimate}


class DetachesEntropy(ChangesOutputs):
    """Return the entropy without its gradient."""

    def change(self, outputs: dict[str, Tensor], temperature: float) -> dict[str, Tensor]:
        return outputs | {"entropy": outputs["entropy"].detach()} if "entropy" in outputs else outputs


class SquaresTheTokenOnly(ChangesOutputs):
    """Return the squared probability of the token instead of the sum over the vocabulary."""

    def change(self, outputs: dict[str, Tensor], temperature: float) -> dict[str, Tensor]:
        if "sum_pi_squared" not in outputs:
            return outputs
        return outputs | {"sum_pi_squared": (2 * outputs["log_probs"].detach()).exp()}


class IgnoresTemperatureInBackward(ChangesOutputs):
    """Compute log-probs without entropy by a kernel whose backward pass does not divide by the temperature."""

    def change(self, outputs: dict[str, Tensor], temperature: float) -> dict[str, Tensor]:
        if outputs.keys() != {"log_probs"}:
            return outputs
        log_probs = outputs["log_probs"]
        return {"log_probs": log_probs.detach() + temperature * (log_probs - log_probs.detach())}


class TrainsOnlyTheRewardHead(SingleDeviceEngine):
    """Freeze the decoder of a reward model."""

    def build_model(self) -> PackedModel:
        model = super().build_model()
        if self.config.model.head == "reward":
            model.hf.base_model.requires_grad_(False)
        return model


class ClearsGradientsOnInference(SingleDeviceEngine):
    """Clear the gradients of a step on inference."""

    def infer_batch(self, *args: Any, **kwargs: Any) -> Any:
        self.optimizer_zero_grad()
        return super().infer_batch(*args, **kwargs)


class DropsCustomKeys(SingleDeviceEngine):
    """Return only the control keys of a context."""

    def forward_backward_step(self, *args: Any, **kwargs: Any) -> Any:
        *results, ctx = _as_ever(self, *args, **kwargs)
        return *results, {key: value for key, value in ctx.items() if key in StepContext.__annotations__}


class RejectsRawData(SingleDeviceEngine):
    """Reject raw data before preprocess_fn converts it."""

    def forward_backward_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return _as_ever(self, as_batch(batch), *args, **kwargs)


class DropsNonTensorOutputs(SingleDeviceEngine):
    """Drop predictions that are not tensors."""

    def forward_backward_step(self, *args: Any, **kwargs: Any) -> Any:
        predictions, *rest = _as_ever(self, *args, **kwargs)
        return {name: value for name, value in predictions.items() if not isinstance(value, list)}, *rest


class IgnoresUnreadCounts(SingleDeviceEngine):
    """Do not report a loss that ignores the counts."""

    def _warn_of_unread_counts(self, ctx: Any, micro_batches: int) -> None:
        pass


class WorksWithoutModel(SingleDeviceEngine):
    """Accept a loss, and other calls, before init_model."""

    def require_model(self) -> None:
        pass


CAUGHT_BY: dict[type[SingleDeviceEngine], str] = {
    LocalCounts: "split invariance",
    MeanOfMicroBatches: "split invariance",
    ReturnsExecutionOrder: "order of rows",
    ExceedsTokenBudget: "token budget is hard",
    NormAfterClipping: "norm is before clipping",
    NoClipping: "norm is before clipping",
    StepsIntoNaN: "non finite gradient is skipped",
    ReadsEachLoss: "no wait per micro batch",
    AlwaysTrains: "modes",
    TrainsSharedWeights: "modes",
    IgnoresTemperature: "predictions",
    DropsUnknownKeys: "context",
    IgnoresSequenceWeights: "context",
    ForgetsOptimizer: "resume is bitwise",
    ForgetsRandomState: "resume is bitwise",
    ForgetsSchedule: "resume is bitwise",
    ForgetsSkippedSteps: "resume is bitwise",
    SavesPrefixedNames: "resume is bitwise",
    IgnoresWeightDecay: "updates equal adamw",
    KeepsHyperparameters: "hyperparameters of a step",
    ClipsAsConfigured: "hyperparameters of a step",
    ScoresTheInput: "free targets",
    AcceptsUnknownTargets: "free targets",
    AdaptsAllLayers: "adapter groups",
    SeedsAdaptersByTheEngine: "adapter groups",
    ForgetsTheTiedHead: "adapter groups",
    CountsSkippedUpdates: "non finite gradient is skipped",
    MisstatesRanksPerRow: "seat and shards",
    SkipsChecksums: "damaged checkpoints are rejected",
    IgnoresRetention: "retention",
    KeepsUnnumberedCheckpoints: "retention",
    DeletesCheckpointsOfOtherEngines: "retention",
    DeletesOriginals: "remote copy",
    PrefixesWeightNames: "weights have hugging face names",
    IgnoresTheDtypeOfWeights: "weights have hugging face names",
    StreamsMasterWeights: "weights have hugging face names",
    ReusesItsBuffer: "weights have hugging face names",
    TransposesWeights: "predictions",
    SquaresTheTokenOnly: "predictions",
    WarmsUpTooLow: "schedule",
    RenamesParameter: "interface",
    PatchesTransformers: "libraries stay unpatched",
    SkipsHooks: "hooks",
    HalfGradient: "step equals oracle",
    TrainsPadToken: "step equals oracle",
    TrainsOnlyTheRewardHead: "step equals oracle",
    DetachesEntropy: "step equals oracle",
    IgnoresTemperatureInBackward: "step equals oracle",
    LosesStateOnMove: "offload changes nothing",
    CountsPadding: "padded batch",
    UnseededStart: "runs are reproducible",
    LosesRowsInShards: "seat and shards",
    SilentWithoutLoss: "errors name the missing call",
    ForgetsGradients: "step outside train mode",
    AdapterStaysOn: "adapter",
    DecaysFrozenWeights: "adapter",
    SparesAdaptersFromDecay: "adapter",
    StartsResponsesAtZero: "prefix sharing",
    EstimatesTheGradient: "exact kl",
    ClearsGradientsOnInference: "inference within a step",
    DropsCustomKeys: "context",
    RejectsRawData: "raw batches",
    DropsNonTensorOutputs: "hooks",
    IgnoresUnreadCounts: "unread counts are reported",
    WorksWithoutModel: "errors name the missing call",
}
"""The rule that detects each bug."""
