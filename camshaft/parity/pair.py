"""Builds an engine and a rollout on one model, and compares their log-probs like a training run.

pair = Pair(ParityCase("reference", "torch", "models/tiny", sampling=SamplingParams(max_tokens=32)))
comparison = pair.measure(prompts)     # sync weights, generate, recompute log-probs with the engine, compare
pair.update(comparison)                # one optimizer step; the weights now differ from those in the folder
pair.measure(prompts)
"""

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from camshaft.algorithms import mismatch
from camshaft.config import EngineConfig, EngineModel, OptimConfig, RolloutEngineConfig
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import BaseEngine, StepContext, build_engine
from camshaft.engine.torch_engine import TorchEngine
from camshaft.errors import RolloutError
from camshaft.reshard import rollout_mode
from camshaft.rollout import BaseRollout, SamplingParams, build_rollout, rollout_class

DType = Literal["float32", "bfloat16", "float64"]
EXACT: DType = "float32"
"""dtype of comparisons without the rounding of half precision."""

UPDATE_NORM = 0.1
"""Norm of the update over all weights. It changes the log-probs of the trained tokens by about the same amount."""

MICRO_BATCH_SIZE = 4
"""Sequences per micro-batch of the engine."""


@dataclass(frozen=True)
class ParityCase:
    """Names and settings of an engine and a rollout, and their model."""

    engine: str
    rollout: str
    model: str
    device: str = "cpu"
    dtype: DType = EXACT
    """dtype of the engine's weights. `mixed_precision.param_dtype` in `options` sets the dtype of its forward pass."""
    rollout_dtype: DType = EXACT
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=32))
    max_prompt_length: int = 64
    seed: int = 0
    trust_remote_code: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine, as in `EngineConfig.options`."""
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the rollout, as in `RolloutEngineConfig.engine_kwargs`."""

    def without_bfloat16(self) -> Self:
        """Return the case with float32 instead of bfloat16 in engine and rollout. Other dtypes do not change."""
        options = dict(self.options)
        mixed_precision = options.get("mixed_precision") or {}
        if mixed_precision.get("param_dtype") == "bfloat16":
            options["mixed_precision"] = {**mixed_precision, "param_dtype": EXACT}
        return replace(
            self,
            dtype=EXACT if self.dtype == "bfloat16" else self.dtype,
            rollout_dtype=EXACT if self.rollout_dtype == "bfloat16" else self.rollout_dtype,
            options=options,
        )

    def compute_dtype(self) -> str:
        """Return the dtype of the engine's forward pass."""
        return (self.options.get("mixed_precision") or {}).get("param_dtype") or self.dtype

    def engine_config(self) -> EngineConfig:
        """Return the config of the engine, with an optimizer if `can_train()`."""
        optim = OptimConfig(optimizer="SGD", lr=UPDATE_NORM, weight_decay=0.0) if self.can_train() else None
        return EngineConfig(
            model=EngineModel(path=self.model, trust_remote_code=self.trust_remote_code),
            optim=optim,
            grad_clip=1.0,
            micro_batch_size=MICRO_BATCH_SIZE,
            infer_micro_batch_size=MICRO_BATCH_SIZE,
            device=self.device,
            dtype=self.dtype,
            seed=self.seed,
            options=dict(self.options),
        )

    def can_train(self) -> bool:
        """Return False for bfloat16 weights, which lose small updates to rounding."""
        return self.dtype != "bfloat16"

    def rollout_config(self, return_experts: bool = False) -> RolloutEngineConfig:
        """Return the config of the rollout, which returns its expert choices if `return_experts` is set."""
        return RolloutEngineConfig(
            model_path=self.model,
            dtype=self.rollout_dtype,
            device=self.device,
            max_model_len=self.max_prompt_length + self.sampling.max_tokens,
            seed=self.seed,
            trust_remote_code=self.trust_remote_code,
            engine_kwargs=dict(self.engine_kwargs),
            enable_return_routed_experts=return_experts,
        )


@dataclass(frozen=True)
class Comparison:
    """Responses of the rollout, with their log-probs from the rollout and from the engine."""

    prompts: Ragged
    responses: Ragged
    rollout: Ragged
    """Log-probs of the response tokens from the rollout."""
    engine: Ragged
    """Log-probs of the response tokens from the engine."""
    metrics: dict[str, float]
    """Metrics that `algorithms.mismatch` computes from both."""
    routing_mismatch: float | None = None
    """Fraction of expert choices that differ; None if they are not compared."""

    @property
    def worst(self) -> float:
        """Maximum absolute difference of the log-probs; infinity if it is NaN."""
        maximum = self.metrics["log_prob_diff_max"]
        return maximum if maximum == maximum else float("inf")

    def with_engine(self, engine: Ragged) -> Self:
        """Compare the same responses with other log-probs from the engine."""
        mask = torch.ones_like(engine.values, dtype=torch.bool)
        metrics = mismatch(engine.values, self.rollout.values, mask, engine.lengths)
        return replace(self, engine=engine, metrics={name: float(value) for name, value in metrics.items()})


class WeightSyncError(RolloutError):
    """Raised if the weight sync failed, so that no response was generated."""


class Pair:
    """An engine and a rollout with the same model."""

    def __init__(self, case: ParityCase):
        self.case = case
        self.engine: BaseEngine = build_engine(case.engine, case.engine_config())
        self.engine.init_model()
        capabilities = rollout_class(case.rollout).capabilities
        return_experts = capabilities.supports_routed_experts and can_compare_routing(self.engine)
        self.rollout: BaseRollout = build_rollout(case.rollout, case.rollout_config(return_experts))

    def measure(self, prompts: Ragged, sampling: SamplingParams | None = None) -> Comparison:
        """Sync weights, generate, recompute the log-probs with the engine, and compare."""
        sampling = sampling or self.case.sampling
        seeds = torch.arange(len(prompts)) + 1000 * self.case.seed
        is_synced = False
        try:
            with rollout_mode(self.engine, self.rollout):
                is_synced = True
                out = self.rollout.generate_sequences(prompts, sampling, seeds)
        except RolloutError as error:
            if is_synced:
                raise
            raise WeightSyncError(str(error)) from error
        comparison = Comparison(prompts, out.responses.to("cpu"), out.log_probs.to("cpu"), out.log_probs.to("cpu"), {})
        if out.routed_experts is not None:
            fraction = self._routing_mismatch(prompts, comparison.responses, out.routed_experts)
            comparison = replace(comparison, routing_mismatch=fraction)
        return comparison.with_engine(self.log_probs(prompts, comparison.responses, log_prob_temperature(sampling)))

    def _routing_mismatch(self, prompts: Ragged, responses: Ragged, experts: Ragged) -> float:
        """Return the fraction of the engine's expert choices that differ from those of the rollout."""
        batch = _sequences(prompts, responses).with_columns(routed_experts=experts.to("cpu"))
        with self.engine.eval_mode():
            outputs = self.engine.infer_batch(batch, StepContext(routing="compare"))
        return float(outputs["routing_mismatch"].suffix(responses.lengths).values.mean())

    def log_probs(self, prompts: Ragged, responses: Ragged, temperature: float) -> Ragged:
        """Compute the engine's log-probs of the response tokens."""
        ctx = StepContext(outputs=("log_probs",), temperature=temperature)
        with self.engine.eval_mode():
            outputs = self.engine.infer_batch(_sequences(prompts, responses), ctx)
        return outputs["log_probs"].suffix(responses.lengths).to("cpu")

    def update(self, comparison: Comparison) -> float:
        """Apply one optimizer step that increases the likelihood of the responses.

        Returns the mean absolute change of their log-probs in the engine.
        """
        batch = _sequences(comparison.prompts, comparison.responses)
        old_log_probs = self.log_probs(comparison.prompts, comparison.responses, 1.0)
        with self.engine.train_mode():
            self.engine.train_batch(batch, StepContext(outputs=("log_probs",)), _likelihood)
            self.engine.optimizer_zero_grad()
        new_log_probs = self.log_probs(comparison.prompts, comparison.responses, 1.0)
        return float((new_log_probs.values - old_log_probs.values).abs().mean())

    def generate_one_token(self, prompts: Ragged, changed_weight: str | None) -> tuple[Tensor, Tensor]:
        """Return (tokens, log-probs) of responses of one token.

        The rollout receives other values for the weight named `changed_weight`. The weight sync is not verified,
        because the verification would detect the change.
        """
        with self.engine.eval_mode():
            self.rollout.wake_up()
            try:
                self.rollout.load_weights(
                    (name, _changed_values(tensor) if name == changed_weight else tensor)
                    for name, tensor in self.engine.named_weights()
                )
                out = self.rollout.generate_sequences(prompts, SamplingParams(max_tokens=1), torch.arange(len(prompts)))
            finally:
                self.rollout.sleep()
        return out.responses.values.to("cpu"), out.log_probs.values.to("cpu")

    def weight_names(self) -> list[str]:
        """Return the names of the weights that the engine sends to the rollout."""
        with self.engine.eval_mode():
            return [name for name, _ in self.engine.named_weights()]

    def close(self) -> None:
        """Delete the engine and the rollout to free their memory."""
        del self.engine, self.rollout
        gc.collect()


def log_prob_temperature(sampling: SamplingParams) -> float:
    """Return the temperature of the rollout's log-probs, which is 1 for greedy decoding."""
    return 1.0 if sampling.greedy else sampling.temperature


def can_compare_routing(engine: BaseEngine) -> bool:
    """Return True if the engine can compare the routing of its model with that of a rollout."""
    if not engine.capabilities.supports_router_replay or not isinstance(engine, TorchEngine):
        return False
    return engine.module.routers is not None


def _sequences(prompts: Ragged, responses: Ragged) -> DataProto:
    """Concatenate prompts and responses to an engine's batch whose `loss_mask` selects the responses."""
    ids = Ragged.join(prompts, responses)
    is_response = ids.positions() >= torch.repeat_interleave(prompts.lengths, ids.lengths)
    return DataProto.from_dict({"input_ids": ids, "loss_mask": ids.like(is_response)})


def _likelihood(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
    """Return the mean negative log-likelihood of the response tokens."""
    ctx["metrics"] = {}
    log_probs = torch.where(data["loss_mask"].values, predictions["log_probs"].values, 0)
    return -log_probs.sum() / ctx["num_tokens"], ctx


def _changed_values(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape with other values: reversed, scaled and shifted."""
    return (tensor.flatten().flip(0).view(tensor.shape) * 1.5 + 0.01).to(tensor.dtype)
