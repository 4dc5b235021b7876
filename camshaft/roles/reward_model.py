"""The reward model: a score for each whole response, by a sequence-classification model that never changes.

    model = spawn(reward_worker(config.reward_model), config, topology)
    model.init_model()
    batch = batch.union(model.compute_rm_score(batch))

Reads `prompts`, `responses`, `response_mask`, and, for a model with another chat template, `raw_prompt` or
`raw_input_ids`; writes `rm_scores` and `rm_truncated`. What the model reads of a row is `reward_input.py`.

A class of the user's own (`reward_model.worker_cls`) may derive from `RewardModelWorker`, or be any `Worker` with the
two methods; it is built with the config and the topology.
"""

from __future__ import annotations

from typing import cast

from camshaft.config import PPOConfig, RewardModelConfig, Topology, reward_engine
from camshaft.controller import Dispatch, Worker, register
from camshaft.controller.dispatch import registered
from camshaft.dataproto import DataProto
from camshaft.engine import StepContext, build_engine
from camshaft.errors import ConfigError
from camshaft.models.loader import import_external, load_config, load_tokenizer, model_folder
from camshaft.plugins import load
from camshaft.rewards.last_token import on_last_token
from camshaft.roles.base import EngineRole
from camshaft.roles.reward_input import OtherTemplate, RewardInput, SameTokens, begins_with

GROUP = "camshaft.reward_models"
"""Entry points that offer workers."""


class RewardModelWorker(EngineRole):
    """A model of the family `AutoModelForSequenceClassification` with one label, on any engine."""

    reads: RewardInput
    """Since `init_model`."""

    def __init__(self, config: PPOConfig, topology: Topology):
        super().__init__()
        self.config, self.reward = config, config.reward_model
        self.engine = build_engine(self.reward.strategy, reward_engine(config, topology))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """The tokenizers, then the engine's model: what is wrong with the former is told at once."""
        self.reads = reward_input(self.config)
        super().init_model()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """`rm_scores`, each on the last response token that counts; `rm_truncated`, rows that were read in part."""
        read = self.reads(data)
        with self.engine.eval_mode():
            found = self.engine.infer_batch(
                DataProto.from_dict({"input_ids": read.ids}), StepContext(outputs=("scores",))
            )
        scores = found["scores"].float().cpu()
        return DataProto.from_dict(
            {"rm_scores": on_last_token(scores, data.ragged("response_mask")), "rm_truncated": read.truncated}
        )


def reward_input(config: PPOConfig) -> RewardInput:
    """How rows become what the model of this config reads."""
    model, longest = config.reward_model.model, config.longest_scored()
    import_external(model.external_lib)
    settings = load_config(model_folder(model.path), model.trust_remote_code, model.override_config)
    pad = settings.get_text_config().pad_token_id
    if model.input_tokenizer is None:
        policys = load_tokenizer(config.tokenizer_path(), config.data.trust_remote_code)
        return SameTokens(longest, pad, begins_with(policys))
    policys = load_tokenizer(model.input_tokenizer, config.data.trust_remote_code)
    return OtherTemplate(longest, pad, policys, load_tokenizer(model.path, model.trust_remote_code))


def reward_worker(config: RewardModelConfig) -> type[RewardModelWorker]:
    """The class that scores: ours, or the user's own, which has the same two methods."""
    if config.worker_cls is None:
        return RewardModelWorker
    found = load(config.worker_cls, {}, GROUP, Worker)
    missing = [name for name in ("init_model", "compute_rm_score") if name not in registered(found)]
    if missing:
        raise ConfigError(
            f"reward_model.worker_cls={config.worker_cls}: the class has no registered method {', '.join(missing)}. "
            "Derive it from camshaft.roles.RewardModelWorker, or write @register(dispatch_mode=Dispatch.ONE_TO_ALL) "
            "above init_model and @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO) above compute_rm_score"
        )
    return cast(type[RewardModelWorker], found)
