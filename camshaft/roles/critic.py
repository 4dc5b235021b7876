"""The critic: what a response is worth at each of its tokens.

Reads `prompts`, `responses`, `response_mask`; for an update also `values` and `returns`. Writes `values`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from camshaft.algorithms import value_loss
from camshaft.config import PPOConfig, Topology, critic_engine
from camshaft.controller import Dispatch, register
from camshaft.dataproto import DataProto
from camshaft.engine import StepContext, build_engine
from camshaft.roles.base import TrainedRole, UpdatePlan, counts_of, of_responses


class CriticWorker(TrainedRole):
    """Value model and its optimizer."""

    def __init__(self, config: PPOConfig, topology: Topology, total_steps: int):
        super().__init__()
        self.config, self.topology, self.critic = config, topology, config.critic
        self.engine = build_engine(self.critic.strategy, critic_engine(config, topology, total_steps))
        self.computes_in = self.critic.model.fsdp_config.computes_in()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        """`values` of the responses; 0 at tokens that the policy did not choose."""
        found = self.infer(data, StepContext(outputs=("values",)))
        return DataProto.from_dict({"values": of_responses(found, "values", data).to("cpu")})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto, seed: int = 0, dealt: bool = False) -> DataProto:
        """Regression on `returns`; `seed` and `dealt` as in `ActorWorker.update_actor`."""
        plan = UpdatePlan(
            mini_batch_size=self.config.critic_mini_batch_per_rank(self.topology),
            epochs=self.critic.ppo_epochs,
            seed=seed if self.critic.shuffle else None,
        )
        wanted = data.select("prompts", "responses", "response_mask", "values", "returns")
        metrics = self.update(wanted, self._loss, StepContext(outputs=("values",)), plan.of(dealt))
        return DataProto({}, {"metrics": {f"critic/{name}": value for name, value in metrics.items()}})

    def _loss(self, data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
        loss, metrics = value_loss(
            of_responses(predictions, "values", data).values,
            data["values"].values,
            data["returns"].values,
            counts_of(data, ctx, horizon=self.config.data.max_response_length),
            cliprange=self.critic.cliprange_value,
            mode=self.critic.loss_agg_mode,
        )
        ctx["metrics"] = metrics | {"vf_loss": loss}
        return loss, ctx
