"""Role of a rollout that plays episodes with environments or programs, instead of generating single responses.

    rollout.set_environments(spec)
    rollout.generate_sequences(rows)        # one episode for each row

It reads `raw_prompt`, `sampling_seed`, `environment_seed` and the columns of the data that the environments read, and
replaces the column `prompts`, because `reset` may add to it. Beside the columns of `rollout.py`, it writes
`stop_reason`, `turns`, `env_scores`, `env_failure`, `transcript` and `answer_options`. Everything behind the prompt is
in `responses`, and `response_mask` is true for sampled tokens. With programs, it also writes `sequence_lengths`,
because the rows of a session are one row of the batch (`sequences.py`).
"""

import functools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from camshaft.agents.bridge import Bridge
from camshaft.agents.endpoint import Endpoint
from camshaft.agents.environment import Start
from camshaft.agents.episode import Episode, join_rows
from camshaft.agents.jobs import ProgramSpec
from camshaft.agents.messages import Spec
from camshaft.agents.play import Limits, Question, Schedule, play
from camshaft.agents.pool import EnvironmentPool
from camshaft.agents.programs import ProgramPool
from camshaft.agents.setup import ENVIRONMENT, TOOLS, check_tools
from camshaft.config import GenerateConfig, PPOConfig
from camshaft.config.schema.agents import MultiTurnConfig
from camshaft.config.schema.roles import GeneratorConfig
from camshaft.controller import Dispatch, register
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import RolloutError
from camshaft.models.loader import load_tokenizer
from camshaft.roles.rollout import RolloutWorker
from camshaft.roles.sequences import SEQUENCES
from camshaft.rollout import BaseRollout, SamplingParams, mix_seeds, open_stream

SEED_BITS = 31
"""Number of bits of the seeds of environments, which any random number generator accepts."""

logger = logging.getLogger(__name__)


class EpisodesWorker(RolloutWorker):
    """A rollout that plays one episode for each row."""

    environments: Spec | ProgramSpec | None = None
    """Set by `set_environments`."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_environments(self, spec: Spec | ProgramSpec) -> None:
        """Set the environments or the program. Their processes are started by the first episodes."""
        self.environments = spec

    @functools.cached_property
    def player(self) -> "EpisodePlayer":
        if self.environments is None:
            raise RolloutError("generate_sequences: this rollout has no environments; call set_environments before")
        folder = Path(self.config.trainer.default_local_dir).expanduser() / "environments"
        return EpisodePlayer.of(self.config, self.environments, folder / f"output.{self.seat.rank}.log")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto, validate: bool = False, greedy: bool = False) -> DataProto:
        """Play one episode for each row with the sampling parameters of training or validation, or greedily."""
        with self._awake() as sync_metrics:
            played = self.player.play(self.rollout, prompts, self.params[validate, greedy])
        played = played.with_meta(metrics=played.meta_info["metrics"] | sync_metrics)
        return self.with_versions(played) if self.may_be_stale and not validate else played


@dataclass
class EpisodePlayer(ABC):
    """Plays the rows of a batch."""

    pool: EnvironmentPool | ProgramPool
    bridge: Bridge
    limits: Limits

    @staticmethod
    def of(config: PPOConfig | GenerateConfig, spec: Spec | ProgramSpec, output: Path | None) -> "EpisodePlayer":
        """Return the player of a run. `output` is the file for what environments or programs print."""
        is_ppo = isinstance(config, PPOConfig)
        rollout: GeneratorConfig = config.actor_rollout_ref.rollout if is_ppo else config.rollout
        trust = config.data.trust_remote_code if is_ppo else config.model.trust_remote_code
        tokenizer: Any = load_tokenizer(config.tokenizer_path(), trust, config.data.chat_template)
        section = rollout.multi_turn
        bridge = Bridge(tokenizer, config.data.chat_template_kwargs, section.format)
        limits = limits_of(rollout, section)
        if isinstance(spec, ProgramSpec):
            return ProgramPlayer(ProgramPool(spec, output), bridge, limits, section.allow_sampling)
        return EnvironmentPlayer(pool_of(spec, section, output), bridge, limits, section.schedule)

    @abstractmethod
    def episodes(self, rollout: BaseRollout, rows: Sequence[dict[str, Any]], sampling: SamplingParams) -> list[Episode]:
        """Play one episode for each row."""

    def metrics(self) -> dict[str, float]:
        """Return further metrics of the last episodes."""
        return {}

    def columns(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """Return further columns."""
        return {}

    def play(self, rollout: BaseRollout, rows: DataProto, sampling: SamplingParams) -> DataProto:
        """Play one episode for each row that is not padding, and return the columns of all rows."""
        start, count = time.perf_counter(), self.pool.num_failures
        played = [row for row in each_row(rows) if not row.get("is_padding")]
        episodes = self.episodes(rollout, played, sampling)
        seconds = time.perf_counter() - start
        metrics = {
            "agent/tool_seconds": sum(episode.seconds for episode in episodes),
            "agent/tool_calls": float(sum(episode.num_calls for episode in episodes)),
            "agent/tool_errors": float(
                sum(episode.num_errors for episode in episodes) + self.pool.num_failures - count
            ),
            "agent/prompt_tokens_recomputed": float(sum(episode.num_recomputed for episode in episodes)),
            "perf/rollout_tokens_per_second": sum(sum(episode.mask) for episode in episodes) / max(seconds, 1e-9),
        } | self.metrics()
        episodes += [Episode([], stop_reason="prompt") for _ in range(len(rows) - len(episodes))]  # padding
        columns = episode_columns(episodes, rows.ragged("prompts"), self.bridge.tokenizer)
        return DataProto.from_dict(columns | self.columns(episodes), {"metrics": metrics})


@dataclass
class EnvironmentPlayer(EpisodePlayer):
    """Plays with environments."""

    pool: EnvironmentPool
    schedule: Schedule = "waves"

    def episodes(self, rollout: BaseRollout, rows: Sequence[dict[str, Any]], sampling: SamplingParams) -> list[Episode]:
        questions = [question(row, self.pool.spec) for row in rows]
        return play(rollout, self.pool, questions, self.bridge, self.limits, sampling, self.schedule)

    def columns(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        return {} if self.pool.spec.rewards is None else {"env_outcomes": [episode.outcomes for episode in episodes]}


@dataclass
class ProgramPlayer(EpisodePlayer):
    """Lets programs play."""

    pool: ProgramPool
    allow_sampling: bool = False
    num_other_rows: int = 0
    """Number of rows of the last sessions behind their first ones."""
    has_reported: bool = False
    """True after the notice about sessions with several rows."""

    def episodes(self, rollout: BaseRollout, rows: Sequence[dict[str, Any]], sampling: SamplingParams) -> list[Episode]:
        questions = [question(row, self.pool.spec) for row in rows]
        arguments = self.bridge, self.limits, sampling, "policy", self.allow_sampling
        with open_stream(rollout) as stream, Endpoint(stream, *arguments) as endpoint:
            sessions = self.pool.play(endpoint, questions, self.limits.timeout)
        self.num_other_rows = sum(len(session) - 1 for session in sessions)
        if self.num_other_rows and not self.has_reported:
            self.has_reported = True
            logger.warning(
                "%d of %d sessions have several rows, because their programs have begun another history (%d times), "
                "run in parallel or asked for several answers. The %d further rows are trained on too, each in its own "
                "context, and an episode counts once, however many rows it has. agent/other_rows counts further rows",
                *(sum(len(session) > 1 for session in sessions), len(sessions)),
                *(endpoint.num_other_histories, self.num_other_rows),
            )
        return [join_rows(session) for session in sessions]

    def columns(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        pairs = [episode.sequences or [(0, len(episode.tokens) or 1)] for episode in episodes]
        return {SEQUENCES: Ragged.from_rows([torch.tensor(row) for row in pairs], torch.int64)}

    def metrics(self) -> dict[str, float]:
        return {"agent/other_rows": float(self.num_other_rows)}


def pool_of(spec: Spec, section: MultiTurnConfig, output: Path | None) -> EnvironmentPool:
    return EnvironmentPool(spec, section.num_workers, output)


def limits_of(rollout: GeneratorConfig, section: MultiTurnConfig) -> Limits:
    return Limits(
        max_prompt=rollout.prompt_length,
        max_response=rollout.response_length,
        max_turns=section.max_assistant_turns,
        max_turn_length=section.max_turn_length,
        max_text=section.max_tool_response_length,
        truncate_side=section.tool_response_truncate_side,
        timeout=section.episode_timeout,
    )


def each_row(rows: DataProto) -> Sequence[dict[str, Any]]:
    """Return the values of each row, without columns of tokens."""
    columns = {name: rows[name] for name in rows.columns if not isinstance(rows[name], Ragged)}
    lists = {name: values.tolist() if isinstance(values, Tensor) else values for name, values in columns.items()}
    return [{name: values[i] for name, values in lists.items()} for i in range(len(rows))]


def question(row: dict[str, Any], spec: Spec | ProgramSpec) -> Question:
    """Return the prompt, the environment, the tools and the seeds of a row."""
    data: dict[str, Any] = {
        "prompt": row["raw_prompt"],
        **row.get("data_row", {}),
        **{name: row[name] for name in ("ground_truth", "data_source", "extra_info") if name in row},
    }
    seeds = torch.tensor([row["environment_seed"], row["sampling_seed"]], dtype=torch.int64)
    seed, row_seed = (mix_seeds(seeds) & (2**SEED_BITS - 1)).tolist()
    names = [source.name for source in spec.sources] or [""]
    name = names[0] if len(names) == 1 else str(data.pop(ENVIRONMENT, None))
    schemas = spec.schemas.get(name, ())
    chosen = None if not schemas or data.get(TOOLS) is None else check_tools(data.pop(TOOLS), spec, "a row")
    start = Start(data, seed, row_seed, name, chosen)
    tools = tuple(schema for schema in schemas if chosen is None or schema["function"]["name"] in chosen)
    return Question(row["raw_prompt"], start, row["sampling_seed"], tools, name in spec.scored)


def episode_columns(episodes: Sequence[Episode], prompts: Ragged, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Convert episodes to the columns of a batch.

    An episode without tokens keeps its row of `prompts`, and gets one token, which was not sampled.
    """
    end = tokenizer.eos_token_id if isinstance(tokenizer.eos_token_id, int) else 0
    rows = zip(episodes, prompts.rows(), strict=True)
    return {
        "prompts": Ragged.from_rows(
            [torch.tensor(episode.prompt) if episode.tokens else prompt for episode, prompt in rows], torch.int64
        ),
        "responses": Ragged.from_rows([episode.tokens or [end] for episode in episodes], torch.int64),
        "response_mask": Ragged.from_rows([episode.mask or [False] for episode in episodes], torch.bool),
        "rollout_log_probs": Ragged.from_rows([episode.log_probs or [0.0] for episode in episodes], torch.float32),
        "env_scores": Ragged.from_rows([episode.rewards or [0.0] for episode in episodes], torch.float32),
        "finished": torch.tensor([episode.stop_reason == "done" for episode in episodes]),
        "turns": torch.tensor([episode.turns for episode in episodes]),
        "stop_reason": [episode.stop_reason for episode in episodes],
        "env_failure": [None if episode.fault is None else str(episode.fault) for episode in episodes],
        "transcript": [episode.messages for episode in episodes],
        "answer_options": [episode.sampling for episode in episodes],
    }
