"""Role that combines actor, rollout and reference in one worker.

The reference is optional: its weights are loaded only if the reward or the loss has a KL penalty. The reference may use
a different parallel layout than the actor, in which case batches are split differently for its calls. With
`hybrid_engine=false`, the rollout is a role of its own, for which this one publishes its weights.
"""

from collections.abc import Collection, Mapping
from typing import ClassVar

import torch

from camshaft.agents.jobs import ProgramSpec
from camshaft.agents.messages import Spec
from camshaft.config import PPOConfig, Topology, rollout_engine
from camshaft.controller import Dispatch, Worker, register
from camshaft.dataproto import DataProto
from camshaft.errors import EngineError, RolloutError
from camshaft.reshard import Publisher, Snapshot, machine_id
from camshaft.roles.actor import ActorWorker, AdapterlessRef, OldLogProbs, RefWorker
from camshaft.roles.base import SkippedSteps
from camshaft.roles.episodes import EpisodesWorker
from camshaft.roles.exact_kl import exact_kl
from camshaft.roles.rollout import RolloutWorker
from camshaft.seat import Seat


class ActorRolloutRefWorker(Worker):
    """Worker for the policy on one device: training, generation and the reference policy.

    To replace one of the roles, set the class attribute in a subclass.
    """

    actor_class: ClassVar[type[ActorWorker]] = ActorWorker
    ref_class: ClassVar[type[RefWorker]] = RefWorker
    rollout_class: ClassVar[type[RolloutWorker]] = RolloutWorker
    episodes_class: ClassVar[type[EpisodesWorker]] = EpisodesWorker
    """Class of the rollout in runs with environments."""

    def __init__(self, config: PPOConfig, topology: Topology, total_steps: int):
        super().__init__()
        self.kl = config.kl_plan()
        self.actor = self.actor_class(config, topology, total_steps)
        self.ref: RefWorker | None = None
        if self.kl.needs_model:
            self.ref = self.ref_class(config, topology)
        elif self.kl.is_used:
            self.ref = AdapterlessRef(config, self.actor.engine)
        self.actor.reference = self.ref
        snapshots, lora = config.async_training.max_staleness + 1, rollout_engine(config).lora
        self.publisher = Publisher(self.actor.engine, self.rank_info.rank == 0, snapshots, lora)
        self._rollout: RolloutWorker | None = None
        if config.actor_rollout_ref.hybrid_engine:
            self._rollout = self.rollout_role(config)(config, self.actor.engine)

    @property
    def rollout(self) -> RolloutWorker:
        """The rollout, unless it is on devices of its own (`hybrid_engine=false`)."""
        if self._rollout is None:
            raise RolloutError(
                "this worker does not generate, because with actor_rollout_ref.hybrid_engine=false the rollout has "
                "devices of its own; call the role of the rollout, or set actor_rollout_ref.hybrid_engine=true"
            )
        return self._rollout

    @classmethod
    def rollout_role(cls, config: PPOConfig) -> type[RolloutWorker]:
        """Return the class of the rollout, which may run in this worker or on devices of its own."""
        return cls.episodes_class if config.plays_episodes() else cls.rollout_class

    @property
    def seat(self) -> Seat:
        return self.actor.seat

    def seat_for(self, method: str) -> Seat:
        is_reference_call = method == RefWorker.compute_ref_log_prob.__name__
        return self.ref.seat if is_reference_call and self.ref is not None else self.seat

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the models. The rollout is built last, because it allocates its KV cache from the remaining memory."""
        self.actor.init_model()
        if self.ref is not None:
            self.ref.init_model()
        if self._rollout is not None:
            self._rollout.init_model()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_environments(self, spec: Spec | ProgramSpec) -> None:
        """Set the environments with which the rollout plays episodes."""
        if not isinstance(self.rollout, EpisodesWorker):
            raise RolloutError("this run plays no episodes; set actor_rollout_ref.rollout.multi_turn.environment")
        self.rollout.set_environments(spec)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def sync_weights(self) -> dict[str, float]:
        """Send the weights of the actor to the rollout, which stays awake until `sleep_rollout`."""
        return self.rollout.sync_weights()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep_rollout(self) -> None:
        self.rollout.sleep_rollout()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype in which the engine stores each weight."""
        return self.publisher.source_dtypes()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_readers(self, dtypes: Mapping[str, torch.dtype], machines: Collection[str]) -> None:
        """Set the dtypes in which the rollout receives the weights, and the machines of its ranks, for `publish`."""
        self.publisher.dtypes = dtypes
        self.publisher.writes |= self.rank_info.local_rank == 0 and machine_id() in machines

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def publish(self, version: int) -> Snapshot | None:
        """Write the weights to host memory on rank 0, and once on each other machine of the rollout.

        Return the snapshot, or None on ranks that do not write.
        """
        return self.publisher.publish(version)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def publish_base(self) -> Snapshot | None:
        """Write the weights without the adapter, as `publish` does, for a rollout that loads adapters."""
        return self.publisher.publish_base()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def portable_snapshot(self) -> Snapshot:
        """Return the snapshot that was published last with its bytes, for machines without a rank of the actor."""
        return self.publisher.portable()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(
        self, prompts: DataProto, validate: bool = False, recompute_log_prob: bool = True, greedy: bool = False
    ) -> DataProto:
        """Generate one response for each row; `recompute_log_prob` adds the columns of `compute_log_prob`.

        The trainer does not set it, because it computes the old log-probs in a separate phase. Without a preceding
        `sync_weights`, the call syncs the weights itself, and the rollout sleeps again at its end.
        """
        generated = self.rollout.generate_sequences(prompts, validate, greedy)
        if not recompute_log_prob:
            return generated
        return generated.union(self.actor.compute_log_prob(prompts.select("prompts").union(generated)))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Compute the columns `old_log_probs` and `entropy` with the actor."""
        return self.actor.compute_log_prob(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Compute the column `ref_log_prob`, and `full_kl` if the KL penalty in the reward is exact."""
        ref = self._reference()
        log_probs = ref.compute_ref_log_prob(data)
        if self.kl.in_reward != "full":
            return log_probs
        return log_probs.union(exact_kl(self.actor, ref, data, self.actor.temperature))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(
        self,
        data: DataProto,
        seed: int = 0,
        presharded: bool = False,
        old_log_probs: OldLogProbs = "actor",
        entropy_coeff: float | None = None,
    ) -> DataProto:
        return self.actor.update_actor(data, seed, presharded, old_log_probs, entropy_coeff)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def skipped_steps(self) -> SkippedSteps:
        return self.actor.skipped_steps()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def has_finite_outputs(self) -> bool:
        return self.actor.has_finite_outputs()

    def _reference(self) -> RefWorker:
        if self.ref is None:
            raise EngineError(
                "this run has no reference model; set algorithm.use_kl_in_reward=True or "
                "actor_rollout_ref.actor.use_kl_loss=True"
            )
        return self.ref

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        self.actor.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_for_checkpoint(self) -> None:
        self.actor.wait_for_checkpoint()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True) -> None:
        self.actor.load_checkpoint(local_path, hdfs_path, del_local_after_load)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self, local_path: str, hdfs_path: str | None = None, tokenizer: str | None = None) -> None:
        self.actor.export(local_path, hdfs_path, tokenizer)
