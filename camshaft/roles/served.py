"""Role of `camshaft serve` that trains: the engines of the models of clients.

It also samples, unless the server has `sampling_ranks`.

    worker.create("s:train:0", "models/tiny", LoRAConfig(rank=8, alpha=32), seed=0)     # on all ranks
    worker.forward_backward("s:train:0", rows, "ppo", {"clip_low_threshold": 0.9}, forward_only=False)
    worker.optimizer_step("s:train:0", hyperparameters)
    worker.publish("s:train:0", "v1")
    worker.sample("models/tiny", "v1", prompts, SamplingParams(max_tokens=16), seeds)

Models are known by the id that clients have for them. All ranks of an engine take part in a command, each with rows of
its own. Published weights are in memory or in files (versions.py), from where the rollouts of these ranks load them, or
those of a pool of their own (sampled.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from camshaft.algorithms.token_losses import LOSSES, BoundLoss
from camshaft.config.engine import LoRAConfig
from camshaft.config.serve import ServeConfig
from camshaft.controller import Dispatch, register
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import (
    BaseEngine,
    DtypeOf,
    EngineConfig,
    EngineModel,
    OptimConfig,
    StepContext,
    StepHyperparameters,
    build_engine,
)
from camshaft.errors import EngineError
from camshaft.models.loader import stored_weights
from camshaft.reshard import Snapshot
from camshaft.roles.sampled import ElsewhereError, Loader, SamplingRole, refusing
from camshaft.roles.versions import VERSIONS, PublishedVersions
from camshaft.seat import Seat

OUTPUT = "target_log_probs"


@dataclass(frozen=True)
class StepReport:
    """Outcome of an optimizer step. `grad_norm` is the norm before clipping."""

    grad_norm: float
    num_calls: int
    """Number of calls of `forward_backward` whose gradients the step has applied."""


@dataclass
class ServedModel:
    """A model in training."""

    engine: BaseEngine
    base: str
    """Folder of the model from which the training has started."""
    num_calls: int = 0
    """Number of calls of `forward_backward` since the last optimizer step."""


class ServedWorker(SamplingRole):
    """Engines and rollouts of one server, on one device. All ranks have the same models and versions."""

    def __init__(self, config: ServeConfig):
        super().__init__(config)
        self.models: dict[str, ServedModel] = {}
        self.versions = PublishedVersions(
            Path(config.folder).absolute() / VERSIONS, config.max_versions, self.group, self.rank_info.local_rank == 0
        )
        self._dtypes: dict[str, Mapping[str, torch.dtype]] = {}
        """Dtypes in which the rollouts of other ranks receive the weights of base models."""

    @property
    def loader(self) -> Loader:
        return self.versions

    # -- training ---------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    @refusing
    def create(self, model_id: str, base: str, lora: LoRAConfig | None, seed: int) -> Seat:
        """Build the engine of a model, with an adapter or for the training of all weights. Return its seat."""
        engine = self._build_engine(base, lora, seed, OptimConfig())
        engine.optimizer_zero_grad()
        self.models[model_id] = ServedModel(engine, base)
        return engine.seat

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    @refusing
    def forward_backward(
        self, model_id: str, rows: DataProto, loss: str, options: Mapping[str, float], forward_only: bool
    ) -> DataProto:
        """Compute the log-probs of the targets and, unless `forward_only`, add the gradients of the loss.

        `rows` are those of this rank. Their meta information `numbers` has their numbers in the request. Return the
        column `log_probs`, with an entry for each token of `input_ids`, and in the meta information the share of the
        rank in the sum `loss` of all tokens.
        """
        model = self._model(model_id)
        loss_fn, ctx = LOSSES[loss].bind(options), StepContext(outputs=(OUTPUT,))
        engine = model.engine
        if forward_only:
            with engine.eval_mode():
                log_probs = engine.infer_batch(rows, ctx)[OUTPUT]
            with torch.no_grad():
                value = float(loss_fn(rows.to(log_probs.values.device), {OUTPUT: log_probs}, {})[0])
        else:
            engine.set_loss_fn(loss_fn)
            model.num_calls += 1
            with engine.train_mode():
                predictions, result, _ = engine.forward_backward_step(rows, ctx)
            log_probs, value = predictions[OUTPUT], float(result)
        log_probs = log_probs.map(lambda values: values.detach().float()).to("cpu")
        _check_finite(rows, log_probs, value, loss_fn)
        share = value if forward_only or engine.seat.dp_rank == 0 else 0.0  # an update returns the sum of all ranks
        return DataProto.from_dict({"log_probs": log_probs}, {"loss": share})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @refusing
    def optimizer_step(self, model_id: str, hyperparameters: StepHyperparameters) -> StepReport:
        """Apply the gradients of all calls since the last step, and clear them."""
        model = self._model(model_id)
        if not model.num_calls:
            raise EngineError(
                "optim_step found no gradient, so no weight has changed; call forward_backward before, and optim_step "
                "once after it"
            )
        engine, num_calls, skipped = model.engine, model.num_calls, model.engine.skipped_steps
        with engine.train_mode():
            norm = engine.optimizer_step(hyperparameters)
            name = engine.non_finite_gradient() if engine.skipped_steps > skipped else None
            self._clear(model)
        if not math.isfinite(norm):
            kind = EngineError if name else ElsewhereError
            raise kind(
                f"the gradient of {name or 'the model'} is not finite (norm {norm}), so no weight has changed and the "
                "gradients are cleared; lower the learning rate, or check the log-probs and advantages of the data"
            )
        return StepReport(norm, num_calls)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @refusing
    def clear_gradients(self, model_id: str) -> None:
        """Discard the gradients since the last step."""
        model = self._model(model_id)
        with model.engine.train_mode():
            self._clear(model)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @refusing
    def save(self, model_id: str, folder: str, is_state: bool) -> None:
        """Write weights and optimizer as a checkpoint of the engine. A state may not leave gradients behind."""
        model = self._model(model_id)
        if is_state and model.num_calls:
            raise EngineError(
                f"the model has gradients of {model.num_calls} calls of forward_backward, which a saved state does not "
                "contain; call optim_step before save_state"
            )
        model.engine.save_checkpoint(folder)
        model.engine.wait_for_checkpoint()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @refusing
    def load(self, model_id: str, folder: str, with_optimizer: bool) -> None:
        """Replace the weights, and the optimizer state by that of the checkpoint or by none. Gradients are cleared."""
        model = self._model(model_id)
        model.engine.load_checkpoint(folder, del_local_after_load=False)
        if not with_optimizer:
            model.engine.reset_optimizer()
        with model.engine.train_mode():
            self._clear(model)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @refusing
    def release(self, model_id: str) -> None:
        """Free the engine of a model. Its published versions remain."""
        self.models.pop(model_id, None)

    def _model(self, model_id: str) -> ServedModel:
        if model_id not in self.models:
            raise EngineError(f"the model {model_id} has no engine; create it, or load saved weights")
        return self.models[model_id]

    def _clear(self, model: ServedModel) -> None:
        model.engine.optimizer_zero_grad()
        model.num_calls = 0

    def _build_engine(self, base: str, lora: LoRAConfig | None, seed: int, optim: OptimConfig | None) -> BaseEngine:
        config = EngineConfig(
            model=EngineModel(path=base, lora=lora),
            optim=optim,
            max_tokens=self.config.max_tokens,
            infer_max_tokens=self.config.max_tokens,
            device=self.device,
            seed=seed,
            options=self.config.engine_options(self.device != "cpu"),
        )
        engine = build_engine(self.config.engine_name(), config)
        engine.init_model()
        return engine

    # -- published weights ------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_dtypes(self, base: str, dtypes: Mapping[str, torch.dtype]) -> None:
        """Set the dtypes in which the rollouts of other ranks receive the weights of a base model."""
        self._dtypes[base] = dtypes

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @refusing
    def publish(self, model_id: str, version: str) -> None:
        """Keep a copy of the weights of a model."""
        model = self._model(model_id)
        self._add_version(version, model.engine, model.base)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @refusing
    def publish_checkpoint(self, base: str, lora: LoRAConfig | None, folder: str, version: str) -> None:
        """Keep a copy of the weights of a checkpoint."""
        engine = self._build_engine(base, lora, 0, None)
        engine.load_checkpoint(folder, del_local_after_load=False)
        self._add_version(version, engine, base)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @refusing
    def publish_base(self, base: str, version: str) -> None:
        """Keep the weights of a model folder."""
        dtype_of, weights = self._dtype_of(base), stored_weights(EngineModel(path=base))
        self.versions.add(version, ((name, tensor.to(dtype_of(name, tensor))) for name, tensor in weights))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def has_version(self, version: str) -> bool:
        """Return True if published weights are in memory or in a file."""
        return version in self.versions

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def snapshots(self, version: str) -> list[Snapshot]:
        """Return the snapshots of published weights, one for each machine. There are none if they are in a file."""
        return self.versions.snapshots(version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @refusing
    def keep_versions(self, versions: Sequence[str]) -> None:
        """Write published weights to files, so that they survive this process."""
        for version in versions:
            self.versions.write(version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @refusing
    def retain_versions(self, versions: Sequence[str]) -> None:
        """Free all published weights but these."""
        self.versions.retain(versions)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @refusing
    def forget_version(self, version: str) -> None:
        """Free published weights, which no call may use afterwards."""
        self.versions.remove(version)

    def _add_version(self, version: str, engine: BaseEngine, base: str) -> None:
        dtype_of = self._dtype_of(base)
        with engine.share_weights():
            self.versions.add(version, engine.named_weights(dtype_of=dtype_of))

    def _dtype_of(self, base: str) -> DtypeOf:
        """Return the function for the dtypes in which the rollouts of a base model receive its weights."""
        dtypes = self._dtypes.get(base)
        return self._rollout(base).sync_dtype if dtypes is None else lambda name, tensor: dtypes.get(name, tensor.dtype)


def _check_finite(rows: DataProto, log_probs: Ragged, loss: float, loss_fn: BoundLoss) -> None:
    """Raise `EngineError` that names the first datum whose log-probs or loss are not finite."""
    if math.isfinite(loss) and bool(log_probs.values.isfinite().all()):
        return
    cause, kind = "the sum of the losses", ElsewhereError
    for index, number in enumerate(rows.meta_info["numbers"]):
        row = log_probs.select([index])
        is_finite = bool(row.values.isfinite().all())
        if not is_finite or not math.isfinite(float(loss_fn(rows.reorder([index]), {OUTPUT: row}, {})[0])):
            cause, kind = f"datum {number}: {'the loss' if is_finite else 'a log-prob'}", EngineError
            break
    raise kind(
        f"{cause} is not finite; check the logprobs and advantages of the data for extreme values, or go back to an "
        "earlier state of the model with a lower learning rate"
    )
