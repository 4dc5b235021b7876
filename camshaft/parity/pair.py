"""An engine and a rollout on one model folder, as a run puts them together.

pair = Pair(ParityCase("reference", "torch", "models/tiny", sampling=SamplingParams(max_tokens=32)))
measured = pair.measure(prompts)       # weights over, generate, log-probs by the engine, the difference
pair.update(measured)                  # one optimizer step, so that the weights are no longer the folder's
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
"""Length of the one update, in the space of all weights: the log-probs of the tokens learned move by about as much."""

ROWS = 4
"""Sequences that the engine computes together."""


@dataclass(frozen=True)
class ParityCase:
    """Which two, on what, told what."""

    engine: str
    rollout: str
    model: str
    device: str = "cpu"
    dtype: DType = EXACT
    """Of the engine's weights; what it computes in is an option of its own (mixed_precision.param_dtype)."""
    rollout_dtype: DType = EXACT
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=32))
    longest_prompt: int = 64
    seed: int = 0
    trust_remote_code: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the engine, as `EngineConfig.options`."""
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Of the rollout."""

    def exact(self) -> ParityCase:
        """The same with float32 on both sides; float64 stays as it is."""
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

    def computes_in(self) -> str:
        """What the engine's forward pass is in."""
        return (self.options.get("mixed_precision") or {}).get("param_dtype") or self.dtype

    def engine_config(self) -> EngineConfig:
        """An engine that can be trained, where its weights are fine enough for that."""
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
        """Small updates of bfloat16 weights are lost to rounding, and engines refuse them."""
        return self.dtype != "bfloat16"

    def rollout_config(self) -> RolloutEngineConfig:
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
    """What one generation came to."""

    prompts: Ragged
    responses: Ragged
    rollout: Ragged
    """log-probs by the rollout"""
    engine: Ragged
    """log-probs by the engine"""
    metrics: dict[str, float]
    """See `algorithms.mismatch`."""

    @property
    def worst(self) -> float:
        """The largest difference; what is not a number is the worst of all."""
        largest = self.metrics["log_prob_diff_max"]
        return largest if largest == largest else float("inf")

    def against(self, engine: Ragged) -> Comparison:
        """The same generation and other log-probs by the engine."""
        ones = torch.ones_like(engine.values, dtype=torch.bool)
        found = mismatch(engine.values, self.rollout.values, ones, engine.lengths)
        return replace(self, engine=engine, metrics={name: float(value) for name, value in found.items()})


class WeightSyncError(RolloutError):
    """The weights did not arrive; generation was not begun."""


class Pair:
    """The two, built."""

    def __init__(self, case: ParityCase):
        self.case = case
        self.engine: BaseEngine = build_engine(case.engine, case.engine_config())
        self.engine.init_model()
        self.rollout: BaseRollout = build_rollout(case.rollout, case.rollout_config())

    def measure(self, prompts: Ragged, sampling: SamplingParams | None = None) -> Comparison:
        """Hand over, generate with the case's sampling or another, compute the log-probs again, compare."""
        sampling = sampling or self.case.sampling
        seeds = torch.arange(len(prompts)) + 1000 * self.case.seed
        arrived = False
        try:
            with rollout_mode(self.engine, self.rollout):
                arrived = True
                out = self.rollout.generate_sequences(prompts, sampling, seeds)
        except RolloutError as error:
            if arrived:
                raise
            raise WeightSyncError(str(error)) from error
        measured = Comparison(prompts, out.responses.to("cpu"), out.log_probs.to("cpu"), out.log_probs.to("cpu"), {})
        return measured.against(self.log_probs(prompts, measured.responses, temperature_of(sampling)))

    def log_probs(self, prompts: Ragged, responses: Ragged, temperature: float) -> Ragged:
        """Of the response tokens, by the engine."""
        ctx = StepContext(outputs=("log_probs",), temperature=temperature)
        with self.engine.eval_mode():
            found = self.engine.infer_batch(_sequences(prompts, responses), ctx)
        return found["log_probs"].suffix(responses.lengths).to("cpu")

    def update(self, measured: Comparison) -> float:
        """One optimizer step towards what was generated; returns how far its log-probs moved, the mean |change|."""
        batch = _sequences(measured.prompts, measured.responses)
        before = self.log_probs(measured.prompts, measured.responses, 1.0)
        with self.engine.train_mode():
            self.engine.train_batch(batch, StepContext(outputs=("log_probs",)), _likelihood)
            self.engine.optimizer_zero_grad()
        after = self.log_probs(measured.prompts, measured.responses, 1.0)
        return float((after.values - before.values).abs().mean())

    def first_tokens(self, prompts: Ragged, changed: str | None) -> tuple[Tensor, Tensor]:
        """(tokens, log-probs) of one-token responses; the weight called `changed` goes over as another one.

        Past the check of the hand-over, which would find it out.
        """
        with self.engine.eval_mode():
            self.rollout.wake_up()
            try:
                self.rollout.load_weights(
                    (name, _another(tensor) if name == changed else tensor)
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
        """Let go of both, so that others fit."""
        del self.engine, self.rollout
        gc.collect()


def temperature_of(sampling: SamplingParams) -> float:
    """What divides the logits: greedy rows come with log-probs at temperature 1."""
    return 1.0 if sampling.greedy else sampling.temperature


def _sequences(prompts: Ragged, responses: Ragged) -> DataProto:
    ids = Ragged.join(prompts, responses)
    wanted = ids.positions() >= torch.repeat_interleave(prompts.lengths, ids.lengths)
    return DataProto.from_dict({"input_ids": ids, "loss_mask": ids.like(wanted)})


def _likelihood(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
    ctx["metrics"] = {}
    counted = torch.where(data["loss_mask"].values, predictions["log_probs"].values, 0)
    return -counted.sum() / ctx["num_tokens"], ctx


def _another(tensor: Tensor) -> Tensor:
    """A tensor that a model with it computes something else with: turned around, and larger."""
    return (tensor.flatten().flip(0).view(tensor.shape) * 1.5 + 0.01).to(tensor.dtype)
