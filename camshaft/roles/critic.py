"""Role of the critic, which learns the value function.

`compute_values` reads the columns `prompts`, `responses` and `response_mask`, and writes `values`. `update_critic` also
reads `values` and `returns`.
"""

from typing import Any

from torch import Tensor

from camshaft.algorithms import value_loss
from camshaft.config import PPOConfig, Topology, critic_engine
from camshaft.controller import Dispatch, register
from camshaft.dataproto import DataProto
from camshaft.engine import StepContext, build_engine
from camshaft.roles.base import TrainedRole, loss_counts, mini_batches, select_responses, token_columns


class CriticWorker(TrainedRole):
    """The value model with its optimizer and update."""

    def __init__(self, config: PPOConfig, topology: Topology, total_steps: int):
        super().__init__()
        self.config, self.critic = config, config.critic
        self.aggregation = self.critic.aggregation()
        self.mini_batch_size = config.critic_mini_batch_per_rank(topology)
        self.engine = build_engine(self.critic.strategy, critic_engine(config, topology, total_steps))
        self.compute_dtype = self.critic.model.fsdp_config.compute_dtype()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        """Compute the column `values` of the responses, which is 0 at masked tokens."""
        predictions = self.infer(data, StepContext(outputs=("values",)))
        return DataProto.from_dict({"values": select_responses(predictions, "values", data).to("cpu")})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto, seed: int = 0, presharded: bool = False) -> DataProto:
        """Regress the values on `returns`. `seed` and `presharded` have the meaning of `ActorWorker.update_actor`."""
        rows = data.select(*token_columns(data), "values", "returns")
        order = seed if self.critic.shuffle else None
        ctx = StepContext(outputs=("values",))
        with self.update() as metrics:
            for mini_batch in mini_batches(rows, self.mini_batch_size, self.critic.ppo_epochs, order, presharded):
                metrics.add(self.engine.train_batch(mini_batch, ctx, self._loss))
        return DataProto({}, {"metrics": metrics.result("critic")})

    def _loss(self, data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
        loss, metrics = value_loss(
            select_responses(predictions, "values", data).values,
            data["values"].values,
            data["returns"].values,
            loss_counts(data, ctx, self.config.data.max_response_length),
            cliprange=self.critic.cliprange_value,
            mode=self.aggregation,
        )
        ctx["metrics"] = metrics | {"vf_loss": loss}
        return loss, ctx
