"""Role of `camshaft serve`: the engines of the models that clients train, and the rollouts that sample from them.

    worker.create("s:train:0", "models/tiny", LoRAConfig(rank=8, alpha=32), seed=0)
    worker.forward_backward("s:train:0", rows, "ppo", {"clip_low_threshold": 0.9}, forward_only=False)
    worker.optimizer_step("s:train:0", hyperparameters)
    worker.publish("s:train:0", "v1")
    worker.sample("models/tiny", "v1", prompts, SamplingParams(max_tokens=16), seeds)

Models are known by the id that clients have for them. A published version is a copy of all weights in host memory that
never changes; a rollout holds one version at a time. Of many versions, the least recently used are in files.

An error that a client can cause is returned as a `Refusal`, because an exception ends the worker process, and all
models with it.
"""

import contextlib
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from camshaft import storage
from camshaft.algorithms.token_losses import LOSSES, BoundLoss
from camshaft.config.engine import LoRAConfig
from camshaft.config.serve import ServeConfig
from camshaft.controller import Dispatch, Worker, register
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import (
    BaseEngine,
    EngineConfig,
    EngineModel,
    OptimConfig,
    StepContext,
    StepHyperparameters,
    build_engine,
)
from camshaft.errors import CamshaftError, CheckpointError, EngineError, RolloutError
from camshaft.models.loader import stored_weights
from camshaft.reshard import load_verified
from camshaft.roles.rollout import generation_columns
from camshaft.rollout import BaseRollout, RolloutEngineConfig, SamplingParams, build_rollout

F = TypeVar("F", bound=Callable[..., Any])
Weights = dict[str, Tensor]

OUTPUT = "target_log_probs"
VERSION = "version"
"""Kind of the folders with published weights."""


@dataclass(frozen=True)
class Refusal:
    """An error that leaves the worker usable, in place of the result of a call."""

    message: str


@dataclass(frozen=True)
class StepReport:
    """Outcome of an optimizer step. `grad_norm` is the norm before clipping."""

    grad_norm: float
    num_calls: int
    """Number of calls of `forward_backward` whose gradients the step has applied."""


def _refusing(method: F) -> F:
    """Return errors of this package and of files instead of raising them."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except (CamshaftError, OSError) as error:  # such as a full disk
            return Refusal(str(error))

    return call  # pyright: ignore[reportReturnType]


@dataclass
class ServedModel:
    """A model in training."""

    engine: BaseEngine
    base: str
    """Folder of the model from which the training has started."""
    num_calls: int = 0
    """Number of calls of `forward_backward` since the last optimizer step."""


class Versions:
    """Published weights by name. The least recently used ones beyond a limit are in files.

    The files of an earlier process are kept, because the name of a version never has other weights.
    """

    def __init__(self, folder: Path, max_in_memory: int):
        self.folder, self.max_in_memory = folder, max_in_memory
        for leftover in folder.glob("*"):
            storage.remove_unfinished(leftover)
        self._in_memory: OrderedDict[str, Weights] = OrderedDict()
        self._in_files = {path.name for path in folder.glob("*") if _is_version(path)}

    def __contains__(self, name: str) -> bool:
        return name in self._in_memory or name in self._in_files

    def add(self, name: str, weights: Weights) -> None:
        self._in_memory[name] = weights
        while len(self._in_memory) > self.max_in_memory:
            oldest = next(iter(self._in_memory))
            self.write(oldest)
            del self._in_memory[oldest]

    def get(self, name: str) -> Weights:
        if name in self._in_memory:
            self._in_memory.move_to_end(name)
        elif name in self._in_files:
            self.add(name, load_file(self._path(name) / "model.safetensors"))
        else:
            raise RolloutError(f"the weights {name} have been released")
        return self._in_memory[name]

    def write(self, name: str) -> None:
        """Write weights to a file, so that they survive the process."""
        if name in self._in_memory and name not in self._in_files:
            with storage.new_folder(self._path(name), kind=VERSION) as folder:
                save_file(self._in_memory[name], folder / "model.safetensors")
            self._in_files.add(name)

    def remove(self, name: str) -> None:
        self._in_memory.pop(name, None)
        if name in self._in_files:
            self._in_files.discard(name)
            storage.remove(self._path(name))

    def retain(self, names: Collection[str]) -> None:
        """Remove all weights but these."""
        for name in {*self._in_memory, *self._in_files}.difference(names):
            self.remove(name)

    def _path(self, name: str) -> Path:
        return self.folder / name


def _is_version(folder: Path) -> bool:
    with contextlib.suppress(CheckpointError):
        return storage.is_complete(folder) and storage.read_manifest(folder)["facts"].get("kind") == VERSION
    return False


class ServedWorker(Worker):
    """Engines and rollouts of one server, on one device."""

    def __init__(self, config: ServeConfig):
        super().__init__()
        self.config = config
        self.models: dict[str, ServedModel] = {}
        self.versions = Versions(Path(config.folder).absolute() / "versions", config.max_versions)
        self.rollouts: dict[str, BaseRollout] = {}
        """Rollout of each base model, by its folder."""
        self.held: dict[str, str] = {}
        """Version that the rollout of a base model holds."""

    # -- training ---------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @_refusing
    def create(self, model_id: str, base: str, lora: LoRAConfig | None, seed: int) -> None:
        """Build the engine of a model, with an adapter or for the training of all weights."""
        engine = self._build_engine(base, lora, seed, OptimConfig())
        engine.optimizer_zero_grad()
        self.models[model_id] = ServedModel(engine, base)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @_refusing
    def forward_backward(
        self, model_id: str, rows: DataProto, loss: str, options: Mapping[str, float], forward_only: bool
    ) -> DataProto:
        """Compute the log-probs of the targets and, unless `forward_only`, add the gradients of the loss.

        Return the column `log_probs`, with an entry for each token of `input_ids`, and the sum `loss` of all tokens in
        the meta information.
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
        return DataProto.from_dict({"log_probs": log_probs}, {"loss": value})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @_refusing
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
            raise EngineError(
                f"the gradient of {name or 'the model'} is not finite (norm {norm}), so no weight has changed and the "
                "gradients are cleared; lower the learning rate, or check the log-probs and advantages of the data"
            )
        return StepReport(norm, num_calls)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @_refusing
    def clear_gradients(self, model_id: str) -> None:
        """Discard the gradients since the last step."""
        model = self._model(model_id)
        with model.engine.train_mode():
            self._clear(model)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @_refusing
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
    @_refusing
    def load(self, model_id: str, folder: str, with_optimizer: bool) -> None:
        """Replace the weights, and the optimizer state by that of the checkpoint or by none. Gradients are cleared."""
        model = self._model(model_id)
        model.engine.load_checkpoint(folder, del_local_after_load=False)
        if not with_optimizer:
            model.engine.reset_optimizer()
        with model.engine.train_mode():
            self._clear(model)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @_refusing
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
        engine = build_engine(self.config.engine, config)
        engine.init_model()
        return engine

    # -- sampling ---------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @_refusing
    def publish(self, model_id: str, version: str) -> None:
        """Keep a copy of the weights of a model."""
        model = self._model(model_id)
        self.versions.add(version, self._copy_weights(model.engine, model.base))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @_refusing
    def publish_checkpoint(self, base: str, lora: LoRAConfig | None, folder: str, version: str) -> None:
        """Keep a copy of the weights of a checkpoint."""
        engine = self._build_engine(base, lora, 0, None)
        engine.load_checkpoint(folder, del_local_after_load=False)
        self.versions.add(version, self._copy_weights(engine, base))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @_refusing
    def publish_base(self, base: str, version: str) -> None:
        """Keep the weights of a model folder."""
        rollout = self._rollout(base)
        weights = stored_weights(EngineModel(path=base))
        self.versions.add(version, {name: tensor.to(rollout.sync_dtype(name, tensor)) for name, tensor in weights})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def has_version(self, version: str) -> bool:
        """Return True if published weights are in memory or in a file."""
        return version in self.versions

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @_refusing
    def keep_versions(self, versions: Sequence[str]) -> None:
        """Write published weights to files, so that they survive this process."""
        for version in versions:
            self.versions.write(version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @_refusing
    def retain_versions(self, versions: Sequence[str]) -> None:
        """Free all published weights but these."""
        self.versions.retain(versions)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @_refusing
    def forget_version(self, version: str) -> None:
        """Free published weights, which must not be sampled any more."""
        self.versions.remove(version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @_refusing
    def sample(self, base: str, version: str, prompts: Ragged, sampling: SamplingParams, seeds: Tensor) -> DataProto:
        """Sample one response for each prompt; the columns are those of `generation_columns`."""
        rollout = self._rollout(base)
        rollout.check_sampling(sampling)
        if self.held.get(base) != version:
            weights = self.versions.get(version)
            self.held.pop(base, None)
            load_verified(iter(weights.items()), rollout, "cpu")
            self.held[base] = version
        return DataProto.from_dict(generation_columns(rollout.generate_sequences(prompts, sampling, seeds)))

    def _rollout(self, base: str) -> BaseRollout:
        if base not in self.rollouts:
            config = RolloutEngineConfig(
                model_path=base,
                device=self.device,
                dtype="float32" if self.config.engine_options(self.device != "cpu") == {} else "bfloat16",
                max_model_len=self.config.context_length(base),
                seed=self.config.seed,
            )
            self.rollouts[base] = build_rollout(self.config.rollout, config)
        return self.rollouts[base]

    def _copy_weights(self, engine: BaseEngine, base: str) -> Weights:
        rollout = self._rollout(base)
        with engine.share_weights():
            weights = engine.named_weights(dtype_of=rollout.sync_dtype)
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}


def _check_finite(rows: DataProto, log_probs: Ragged, loss: float, loss_fn: BoundLoss) -> None:
    """Raise `EngineError` that names the first datum whose log-probs or loss are not finite."""
    if math.isfinite(loss) and bool(log_probs.values.isfinite().all()):
        return
    cause = "the sum of the losses"
    for index in range(len(rows)):
        row = log_probs.select([index])
        is_finite = bool(row.values.isfinite().all())
        if not is_finite or not math.isfinite(float(loss_fn(rows.reorder([index]), {OUTPUT: row}, {})[0])):
            cause = f"datum {index}: {'the loss' if is_finite else 'a log-prob'}"
            break
    raise EngineError(
        f"{cause} is not finite; check the logprobs and advantages of the data for extreme values, or go back to an "
        "earlier state of the model with a lower learning rate"
    )
