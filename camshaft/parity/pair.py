"""Build an engine and a rollout on one model, and compare their log-probs as in a run.

pair = Pair(ParityCase("reference", "torch", "models/tiny", sampling=SamplingParams(max_tokens=32)))
comparison = pair.measure(prompts)     # sync weights, generate, recompute log-probs with the engine, compare
pair.update(comparison)                # one optimizer step, after which the weights differ from the folder's
pair.measure(prompts)
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from camshaft.algorithms import mismatch
from camshaft.config import EngineConfig, EngineModel, OptimConfig, RolloutEngineConfig
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import BaseEngine, StepContext, build_engine
from camshaft.errors import RolloutError
from camshaft.reshard import rollout_mode
from camshaft.rollout import BaseRollout, SamplingParams, build_rollout

DType = Literal["float32", "bfloat16", "float64"]
EXACT: DType = "float32"

STEP = 0.1
"""Norm of the update over all weights; it changes the log-probs of the learned tokens by about as much."""

ROWS = 4
"""Sequences per micro-batch of the engine."""


@dataclass(frozen=True)
class ParityCase:
    """An engine and a rollout, their model and their settings."""

    engine: str
    rollout: str
    model: str
    device: str = "cpu"
    dtype: DType = EXACT
    """dtype of the engine's weights; `mixed_precision.param_dtype` in `options` sets that of its forward pass."""
    rollout_dtype: DType = EXACT
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=32))
    longest_prompt: int = 64
    seed: int = 0
    trust_remote_code: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine, as in `EngineConfig.options`."""
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the rollout, as in `RolloutEngineConfig.engine_kwargs`."""

    def exact(self) -> ParityCase:
        """Return the case with float32 instead of bfloat16 on both sides; float64 is unchanged."""
        options = dict(self.options)
        numbers = options.get("mixed_precision") or {}
        if numbers.get("param_dtype") == "bfloat16":
            options["mixed_precision"] = {**numbers, "param_dtype": EXACT}
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
        """Return the config of the engine, with an optimizer if it can train."""
        optim = OptimConfig(optimizer="SGD", lr=STEP, weight_decay=0.0) if self.trains() else None
        return EngineConfig(
            model=EngineModel(path=self.model, trust_remote_code=self.trust_remote_code),
            optim=optim,
            grad_clip=1.0,
            micro_batch_size=ROWS,
            infer_micro_batch_size=ROWS,
            device=self.device,
            dtype=self.dtype,
            seed=self.seed,
            options=dict(self.options),
        )

    def trains(self) -> bool:
        """Return False for bfloat16 weights, where rounding discards small updates."""
        return self.dtype != "bfloat16"

    def rollout_config(self) -> RolloutEngineConfig:
        """Return the config of the rollout."""
        return RolloutEngineConfig(
            model_path=self.model,
            dtype=self.rollout_dtype,
            device=self.device,
            max_model_len=self.longest_prompt + self.sampling.max_tokens,
            seed=self.seed,
            trust_remote_code=self.trust_remote_code,
            engine_kwargs=dict(self.engine_kwargs),
        )


@dataclass(frozen=True)
class Comparison:
    """The responses of one generation, with log-probs from the rollout and from the engine."""

    prompts: Ragged
    responses: Ragged
    rollout: Ragged
    """log-probs from the rollout"""
    engine: Ragged
    """log-probs from the engine"""
    metrics: dict[str, float]
    """Metrics of `algorithms.mismatch`."""

    @property
    def worst(self) -> float:
        """The largest difference; infinity for NaN."""
        largest = self.metrics["log_prob_diff_max"]
        return largest if largest == largest else float("inf")

    def against(self, engine: Ragged) -> Comparison:
        """Compare the same generation with other log-probs of the engine."""
        ones = torch.ones_like(engine.values, dtype=torch.bool)
        metrics = mismatch(engine.values, self.rollout.values, ones, engine.lengths)
        return replace(self, engine=engine, metrics={name: float(value) for name, value in metrics.items()})


class WeightSyncError(RolloutError):
    """The weight sync failed, so nothing was generated."""


class Pair:
    """An engine and a rollout on the same model."""

    def __init__(self, case: ParityCase):
        self.case = case
        self.engine: BaseEngine = build_engine(case.engine, case.engine_config())
        self.engine.init_model()
        self.rollout: BaseRollout = build_rollout(case.rollout, case.rollout_config())

    def measure(self, prompts: Ragged, sampling: SamplingParams | None = None) -> Comparison:
        """Sync weights, generate, recompute the log-probs with the engine, and compare."""
        sampling = sampling or self.case.sampling
        seeds = torch.arange(len(prompts)) + 1000 * self.case.seed
        synced = False
        try:
            with rollout_mode(self.engine, self.rollout):
                synced = True
                out = self.rollout.generate_sequences(prompts, sampling, seeds)
        except RolloutError as error:
            if synced:
                raise
            raise WeightSyncError(str(error)) from error
        comparison = Comparison(prompts, out.responses.to("cpu"), out.log_probs.to("cpu"), out.log_probs.to("cpu"), {})
        return comparison.against(self.log_probs(prompts, comparison.responses, temperature_of(sampling)))

    def log_probs(self, prompts: Ragged, responses: Ragged, temperature: float) -> Ragged:
        """Return the engine's log-probs of the response tokens."""
        ctx = StepContext(outputs=("log_probs",), temperature=temperature)
        with self.engine.eval_mode():
            outputs = self.engine.infer_batch(_sequences(prompts, responses), ctx)
        return outputs["log_probs"].suffix(responses.lengths).to("cpu")

    def update(self, comparison: Comparison) -> float:
        """Train one step on the responses; return the mean absolute change of their log-probs."""
        batch = _sequences(comparison.prompts, comparison.responses)
        before = self.log_probs(comparison.prompts, comparison.responses, 1.0)
        with self.engine.train_mode():
            self.engine.train_batch(batch, StepContext(outputs=("log_probs",)), _likelihood)
            self.engine.optimizer_zero_grad()
        after = self.log_probs(comparison.prompts, comparison.responses, 1.0)
        return float((after.values - before.values).abs().mean())

    def first_tokens(self, prompts: Ragged, changed: str | None) -> tuple[Tensor, Tensor]:
        """Return (tokens, log-probs) of one-token responses, with other values for the weight `changed`.

        The weight sync is not verified, since the verification would detect the change.
        """
        with self.engine.eval_mode():
            self.rollout.wake_up()
            try:
                self.rollout.load_weights(
                    (name, _changed_values(tensor) if name == changed else tensor)
                    for name, tensor in self.engine.named_weights()
                )
                out = self.rollout.generate_sequences(prompts, SamplingParams(max_tokens=1), torch.arange(len(prompts)))
            finally:
                self.rollout.sleep()
        return out.responses.values.to("cpu"), out.log_probs.values.to("cpu")

    def weight_names(self) -> list[str]:
        with self.engine.eval_mode():
            return [name for name, _ in self.engine.named_weights()]

    def close(self) -> None:
        """Free the memory of both."""
        del self.engine, self.rollout
        gc.collect()


def temperature_of(sampling: SamplingParams) -> float:
    """Return the temperature of the log-probs, which is 1 for greedy rows."""
    return 1.0 if sampling.greedy else sampling.temperature


def _sequences(prompts: Ragged, responses: Ragged) -> DataProto:
    ids = Ragged.join(prompts, responses)
    is_response = ids.positions() >= torch.repeat_interleave(prompts.lengths, ids.lengths)
    return DataProto.from_dict({"input_ids": ids, "loss_mask": ids.like(is_response)})


def _likelihood(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
    ctx["metrics"] = {}
    counted = torch.where(data["loss_mask"].values, predictions["log_probs"].values, 0)
    return -counted.sum() / ctx["num_tokens"], ctx


def _changed_values(tensor: Tensor) -> Tensor:
    """Return a tensor with other values: reversed and scaled."""
    return (tensor.flatten().flip(0).view(tensor.shape) * 1.5 + 0.01).to(tensor.dtype)
