"""Role of the reward model, a frozen sequence classifier that scores responses.

    model = spawn(RewardModelWorker, config, topology)
    model.init_model()
    batch = batch.union(model.compute_rm_score(batch))

`compute_rm_score` reads the columns `prompts`, `responses` and `response_mask`, and writes `rm_scores` and
`rm_truncated`. For a model with a different chat template it also reads `raw_prompt` or `raw_input_ids`
(`reward_input.py`).

A custom class (`reward_model.worker_cls`) derives from `RewardModelWorker` or is any `Worker` that registers the
methods in `REWARD_METHODS`. Its constructor receives the config and the topology.
"""

from camshaft.config import PPOConfig, Topology, reward_engine
from camshaft.controller import Dispatch, register
from camshaft.dataproto import DataProto
from camshaft.engine import StepContext, build_engine
from camshaft.models.loader import import_external, load_config, load_tokenizer, model_folder
from camshaft.ragged import on_last_token
from camshaft.roles.base import EngineRole
from camshaft.roles.reward_input import RewardInput

REWARD_METHODS = ("init_model", "compute_rm_score")
"""Methods of the reward model that a PPO run calls."""


class RewardModelWorker(EngineRole):
    """A model of `AutoModelForSequenceClassification` with one label, on an engine."""

    to_input: RewardInput
    """Conversion to the inputs of the model; created by `init_model`."""

    def __init__(self, config: PPOConfig, topology: Topology):
        super().__init__()
        self.config, self.reward = config, config.reward_model
        self.engine = build_engine(self.reward.strategy, reward_engine(config, topology))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the tokenizers, whose errors are thus reported early, and then build the model."""
        self.to_input = build_reward_input(self.config)
        super().init_model()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Compute `rm_scores`, with the score at the last masked-in response token, and `rm_truncated`."""
        ids, truncated = self.to_input(data)
        rows = DataProto.from_dict({"input_ids": ids})
        with self.engine.eval_mode():
            predictions = self.engine.infer_batch(rows, StepContext(outputs=("scores",)))
        scores = predictions["scores"].float().cpu()
        token_scores = on_last_token(scores, data.ragged("response_mask"))
        return DataProto.from_dict({"rm_scores": token_scores, "rm_truncated": truncated})


def build_reward_input(config: PPOConfig) -> RewardInput:
    model, max_length = config.reward_model.model, config.max_scored_length()
    import_external(model.external_lib)
    settings = load_config(model_folder(model.source()), model.trust_remote_code, model.override_config)
    pad = settings.get_text_config().pad_token_id
    if model.input_tokenizer is None:
        policy_tokenizer = load_tokenizer(config.tokenizer_path(), config.data.trust_remote_code)
        return RewardInput(max_length, pad, policy_tokenizer)
    policy_tokenizer = load_tokenizer(model.source(model.input_tokenizer), config.data.trust_remote_code)
    return RewardInput(max_length, pad, policy_tokenizer, load_tokenizer(model.source(), model.trust_remote_code))
