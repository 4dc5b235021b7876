"""Role of `camshaft generate`: a rollout that loads the weights of a model folder, without an engine.

    generator = spawn(GenerateWorker, config, world_size=2)
    generator.init_model()
    generator.generate_sequences(batch)       # columns as in roles/rollout.py

Each rank builds a rollout. The weights are synced once, with the same checks as in training.
"""

import time

from camshaft.agents.jobs import ProgramSpec
from camshaft.agents.messages import Spec
from camshaft.config import GenerateConfig, generate_engine, generate_model, generate_sampling
from camshaft.controller import Dispatch, Worker, register
from camshaft.dataproto import DataProto
from camshaft.models.loader import stored_weights
from camshaft.reshard import load_verified
from camshaft.roles.episodes import EpisodePlayer
from camshaft.roles.rollout import generation_columns
from camshaft.rollout import BaseRollout, SamplingParams, build_rollout


class GenerateWorker(Worker):
    """A rollout with fixed weights, without an engine."""

    rollout: BaseRollout
    """Set by `init_model`."""
    player: EpisodePlayer | None = None
    """Plays episodes instead of generating single responses, after `set_environments`."""

    def __init__(self, config: GenerateConfig):
        super().__init__()
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the rollout and sync the weights of the model folder to it."""
        self.rollout = build_rollout(self.config.rollout.name, generate_engine(self.config))
        load_verified(stored_weights(generate_model(self.config)), self.rollout, "cpu")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_environments(self, spec: Spec | ProgramSpec) -> None:
        """Set the environments with which the rollout plays episodes."""
        self.player = EpisodePlayer.of(self.config, spec, None)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate one response for each row of `prompts`, or play an episode."""
        params, start = SamplingParams(**generate_sampling(self.config)), time.perf_counter()
        if self.player is not None:
            return self.player.play(self.rollout, prompts, params)
        out = self.rollout.generate_sequences(prompts.ragged("prompts"), params, prompts["sampling_seed"])
        speed = len(out.responses.values) / max(time.perf_counter() - start, 1e-9)
        return DataProto.from_dict(generation_columns(out), {"metrics": {"perf/rollout_tokens_per_second": speed}})
