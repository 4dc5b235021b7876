"""The reference: the frozen policy of the KL penalty.

Reads `prompts`, `responses`, `response_mask`; writes `ref_log_prob`.

It has its own weights, or, if the actor trains an adapter, it is the actor's model without the adapter:

    ref = RefWorker(config, topology) if config.needs_reference_model() else AdapterlessRef(config, actor.engine)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from camshaft.config import PPOConfig, Topology, ref_engine
from camshaft.controller import Dispatch, register
from camshaft.dataproto import DataProto
from camshaft.engine import BaseEngine, StepContext, build_engine
from camshaft.roles.base import EngineRole, of_responses


class RefWorker(EngineRole):
    """The initial model of the actor, without an optimizer."""

    def __init__(self, config: PPOConfig, topology: Topology):
        super().__init__()
        self.config = config
        self.engine = build_engine(config.actor_rollout_ref.actor.strategy, ref_engine(config, topology))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Compute `ref_log_prob` of the responses at the sampling temperature."""
        temperature = self.config.actor_rollout_ref.rollout.temperature
        predictions = self.infer(data, StepContext(outputs=("log_probs",), temperature=temperature))
        return DataProto.from_dict({"ref_log_prob": of_responses(predictions, "log_probs", data).to("cpu")})


class AdapterlessRef(RefWorker):
    """The base model of the actor's adapter, in the actor's engine: no second copy of the weights."""

    def __init__(self, config: PPOConfig, engine: BaseEngine):
        self.config, self.engine = config, engine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Nothing: the actor builds its engine's model."""

    def infer(self, data: DataProto, ctx: StepContext) -> Mapping[str, Any]:
        with self.engine.disable_adapter():
            return super().infer(data, ctx)
