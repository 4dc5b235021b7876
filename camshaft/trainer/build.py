"""Build the components of a PPO run from its config.

    with PPOParts(config) as parts, PPOTrainer(parts) as trainer:
        ...

Components that are cheap to check are built first, so that errors are reported early: tokenizer, reward function and
data, then the worker pools and their roles. One worker process per device hosts actor, rollout and reference, and also
the critic and the reward model unless these have separate pools. A single rank runs in this process. When the `with`
block exits, all worker processes are ended.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from camshaft.agents.jobs import ProgramSpec
from camshaft.agents.messages import Loaded, Source, Spec
from camshaft.agents.setup import (
    check_environment_rows,
    data_columns,
    episode_chat,
    episode_inputs,
    join_columns,
    open_environments,
    report_template,
)
from camshaft.config import PPOConfig, Topology
from camshaft.config.auto.fitting import fit_to_rows
from camshaft.config.checks import check_critic_warmup
from camshaft.config.errors import format_problems
from camshaft.controller import Pending, Pool, spawn, submit
from camshaft.controller.placement import pool_specs, run_pools
from camshaft.controller.worker import registered_methods
from camshaft.data import PromptOptions, StatefulLoader, data_files, load_prompts
from camshaft.dataproto import DataProto
from camshaft.errors import CamshaftError, ConfigError, RewardError, RolloutError
from camshaft.fetch import fetch_models
from camshaft.reshard import Snapshot
from camshaft.rewards.manager import PendingScores
from camshaft.rewards.messages import FunctionSpec
from camshaft.roles import (
    REWARD_METHODS,
    ActorRolloutRefWorker,
    CriticWorker,
    RewardModelWorker,
    RolloutWorker,
    load_worker_class,
)
from camshaft.roles.sequences import SEQUENCES, last_sequences, scores_of_rows
from camshaft.stop import Stop
from camshaft.tracking.record import RunStatus
from camshaft.tracking.samples import SampleWriter
from camshaft.trainer.advantages import load_estimator
from camshaft.trainer.metrics import merge_ranks
from camshaft.trainer.scoring import build_run_rewards, check_scorable
from camshaft.trainer.session import fit_prompts, run_length, run_tokenizer

REWARD_MODEL_COLUMNS = (
    *("prompts", "responses", "response_mask", "raw_prompt", "raw_input_ids"),
    *("uid", "prompt_id", "data_source", "ground_truth", "extra_info"),
)
"""Columns that the reward model receives if they exist. The built-in one reads the first five."""


PUBLISHING_METHODS = ("weight_dtypes", "set_readers", "publish", "portable_snapshot")
"""Methods of the policy that only a run with a rollout on devices of its own calls."""


class PPOParts(contextlib.AbstractContextManager["PPOParts"]):
    """Tokenizer, data, rewards and roles of a run."""

    def __init__(
        self,
        config: PPOConfig,
        reward: Sequence[FunctionSpec] = (),
        environments: Sequence[Source] = (),
        stop: Stop | None = None,
    ):
        """Build the parts. `reward` and `environments` replace those that the config names."""
        fetch_models(config.model_sources())
        self.reward, self.passed_environments = reward, environments
        self._exit = contextlib.ExitStack()
        self.config = config
        """Config of the run, with the batch size and the prompt length that fit the data."""
        self.folder = Path(config.trainer.default_local_dir)
        data = config.data
        self.tokenizer = run_tokenizer(
            config.tokenizer_path(), data.trust_remote_code, data.chat_template, config.trainer.default_local_dir
        )
        own_template = data.chat_template is not None
        self.exported_tokenizer = self.tokenizer.name_or_path if own_template else config.tokenizer_path()
        """Folder or URL of the tokenizer that exports contain."""
        self.estimator = load_estimator(config.algorithm)
        topology = config.topology()
        self.actor_dp_size = config.actor_dp_size(topology)
        """Number of shards into which batches for the actor are split."""
        self.rollout_dp_size = config.rollout_dp_size(topology)
        """Number of shards into which the rows of a generation are split."""
        self.critic_dp_size = config.critic_dp_size(topology)
        with self._exit as stack:  # closes what was already started if a later line raises
            self.stop = stop or Stop()
            """Stop requests, which also end the scoring of a step."""
            self.rewards = build_run_rewards(config, self.stop, reward)
            stack.callback(self.rewards.close)
            self.status = stack.enter_context(RunStatus(config.trainer.default_local_dir))
            self.environments = self._open_environments(environments)
            """Environments of the run, and the columns that they read; None for single responses."""
            self.replaced = () if self.environments is None else ("prompts",)
            """Columns of the data that the rollout replaces."""
            self._load_prompts(config)
            self.total_steps = run_length(config.trainer, self.loader)
            problems = list(check_critic_warmup(config.trainer.critic_warmup, self.total_steps))
            if problems and not config.trainer.val_only:
                raise ConfigError(format_problems(problems))
            self.samples = SampleWriter(self.folder, config.trainer.samples, self.decode)
            specs, logs = pool_specs(config), self.folder / "logs"
            pools = stack.enter_context(run_pools(config.trainer, specs, config.ray_kwargs.ray_init, logs))
            self._spawn_roles(config, topology, pools)
            self._exit = stack.pop_all()

    def _spawn_roles(self, config: PPOConfig, topology: Topology, pools: Mapping[str, Pool]) -> None:
        """Build the roles on the ranks of their pools."""
        pool_of = {role: pools[name] for role, name in config.pools().items()}
        policy_class, critic_class, reward_class = role_classes(config)
        arguments, name = (self.config, topology, self.total_steps), "actor_rollout_ref"
        self.actor = spawn(policy_class, *arguments, pool=pool_of[name], name=name)
        self.rollout: RolloutWorker | None = None
        """The rollout, if it has devices of its own."""
        self.snapshot_sync: SnapshotSync | None = None
        """Sends weights to a rollout on devices of its own."""
        self._generate: Callable[..., DataProto] = self.actor.generate_sequences
        self._options = {"recompute_log_prob": False}
        if "rollout" in pool_of:
            role_of = getattr(policy_class, "rollout_role", ActorRolloutRefWorker.rollout_role)
            rollout_class: type[RolloutWorker] = role_of(config)
            self.rollout = spawn(rollout_class, self.config, pool=pool_of["rollout"], name="rollout")
            snapshots = self.config.async_training.max_staleness + 1
            sends_adapter = config.actor_rollout_ref.rollout.lora_weights == "adapter"
            self.snapshot_sync = SnapshotSync(
                self.actor, self.rollout, topology.world_size, snapshots, sends_adapter=sends_adapter
            )
            self._generate, self._options = self.rollout.generate_sequences, {}
        if self.environments is not None:
            player: Any = self.actor if self.rollout is None else self.rollout
            player.set_environments(self.environments[0])
        self.critic: CriticWorker | None = None
        self.trained: dict[str, ActorRolloutRefWorker | CriticWorker] = {"actor": self.actor}
        """Trained roles by the name of their checkpoint."""
        if config.needs_critic():
            self.critic = spawn(critic_class, *arguments, pool=pool_of["critic"], name="critic")
            self.trained["critic"] = self.critic
        self.reward_model: RewardModelWorker | None = None
        self.reward_model_ranks = topology.reward_model_topology().world_size
        self.is_rollout_awake = False
        """True between `sync_weights` and `sleep_rollout`."""
        self._scores_beside_rollout = False
        if config.reward_model.enable:
            pool = pool_of["reward_model"]
            self._scores_beside_rollout = self.rollout is None and pool is pool_of[name]
            self.reward_model = spawn(reward_class, self.config, topology, pool=pool, name="reward_model")

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def roles(self) -> list[ActorRolloutRefWorker | CriticWorker | RewardModelWorker | RolloutWorker]:
        others = (self.rollout, self.reward_model)
        return [*self.trained.values(), *(role for role in others if role is not None)]

    # -- generation and scoring -------------------------------------------------------------------

    @contextlib.contextmanager
    def rollout_phase(self) -> Iterator[None]:
        """Put the rollout to sleep at the end of the block, and before an error leaves it."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(CamshaftError):  # its workers may have ended
                self.sleep_rollout()
            raise
        self.sleep_rollout()

    def sync_weights(self, version: int) -> dict[str, float]:
        """Send the weights after `version` steps to the rollout, which stays awake. Return the metrics of the sync."""
        self.is_rollout_awake = True  # on some ranks, even if the call fails
        if self.snapshot_sync is not None:
            return self.snapshot_sync.send(version)
        ranks: Any = self.actor.sync_weights()
        return merge_ranks(ranks)

    def sleep_rollout(self) -> None:
        """Free the memory of the rollout if it is awake. One on devices of its own waits for the next weights."""
        if self.is_rollout_awake:
            self.is_rollout_awake = False
            if self.snapshot_sync is None:
                self.actor.sleep_rollout()

    def start_generation(
        self, batch: DataProto, *, validate: bool = False, greedy: bool = False
    ) -> "StartedGeneration":
        """Start to generate one response for each row, and return at once if the ranks are other processes."""
        if self.environments is None:
            inputs = batch.select(*(name for name in ("prompts", "sampling_seed") if name in batch))
            padded, num_padding_rows = inputs.pad_to_divisor(self.rollout_dp_size)
        else:
            padded, num_padding_rows = episode_inputs(batch, self.rollout_dp_size)
        pending = submit(self._generate, padded, validate=validate, greedy=greedy, **self._options)
        return StartedGeneration(self, batch, pending, num_padding_rows)

    def add_model_scores(self, batch: DataProto) -> DataProto:
        """Add the column `rm_scores` if the run has a reward model. A rollout on its devices is put to sleep.

        The batch is padded to the same number of rows per rank. The result does not contain the padding rows.
        """
        if self.reward_model is None:
            return batch
        if self._scores_beside_rollout:
            self.sleep_rollout()
        rows = last_sequences(batch) if SEQUENCES in batch else batch
        inputs = rows.select(*(name for name in REWARD_MODEL_COLUMNS if name in batch))
        padded, num_padding_rows = inputs.pad_to_divisor(self.reward_model_ranks)
        scores = DataProto(self.reward_model.compute_rm_score(padded).unpad(num_padding_rows).columns)
        return batch.union(scores_of_rows(scores, batch) if SEQUENCES in batch else scores)

    def decode(self, ids: list[list[int]]) -> list[str]:
        """Decode token ids without special tokens."""
        return decode_rows(self.tokenizer, ids)

    def _open_environments(self, passed: Sequence[Source]) -> tuple[Spec | ProgramSpec, Loaded] | None:
        """Load the environments of the run, and check the chat template, in a run with environments."""
        self._num_tool_tokens = 0
        if not self.config.plays_episodes():
            return None
        section = self.config.actor_rollout_ref.rollout.multi_turn
        has_others = self.config.needs_function() or self.config.reward_model.enable
        output = self.folder / "environments/output.log"
        spec, loaded = open_environments(section, passed, output, has_others, self.rewards.environment_functions)
        self._num_tool_tokens = report_template(
            self.tokenizer, self.config.data.chat_template_kwargs, loaded.schemas, section.format
        )
        return spec, loaded

    def _load_prompts(self, config: PPOConfig) -> None:
        """Load the prompts, fit the config to them, and check that the reward function can score them."""
        prompts = self._prompts(config, train=True)
        self.config = fit_to_rows(config, len(prompts))
        self.loader = StatefulLoader(
            prompts,
            self.config.prompts_per_generation_batch(),
            total_epochs=config.trainer.total_epochs,
            shuffle=config.data.shuffle,
            seed=config.data_seed(),
            rows_per_step=self.config.data.train_batch_size,
        )
        self.val_prompts = self._prompts(config, train=False) if config.data.val_files else DataProto()
        self.config = fit_prompts(self.config, [prompts, self.val_prompts], self._num_tool_tokens)
        for prompts, key in ((self.loader.data, "data.train_files"), (self.val_prompts, "data.val_files")):
            try:
                if config.needs_function() and not self.reward:
                    check_scorable(prompts, config.custom_reward_function, has_reward_model=config.reward_model.enable)
                self.rewards.check_rows(prompts)
                if self.environments is not None:
                    check_environment_rows(*self.environments, prompts)
            except (RewardError, RolloutError) as error:
                raise type(error)(f"{key}: {error}") from error

    def _prompts(self, config: PPOConfig, train: bool) -> DataProto:
        paths, max_rows = prompt_files(config, train)
        columns = self.rewards.columns
        if self.environments is not None:
            columns = join_columns(columns, data_columns(*self.environments))
        options = prompt_options(config, columns)
        label = "training data" if train else "validation data"
        return load_prompts(data_files(paths), self.tokenizer, options, max_rows, label).batch


class SnapshotSync:
    """The weight sync of a rollout on devices of its own: the actor publishes snapshots, and the rollout loads them.

    Each machine that both have has a snapshot in host memory. To the ranks on other machines, the driver sends bytes.
    """

    def __init__(
        self,
        actor: ActorRolloutRefWorker,
        rollout: RolloutWorker,
        actor_ranks: int,
        snapshots: int = 1,
        sends_adapter: bool = False,
    ):
        """Set `snapshots` to the number of snapshots that the actor keeps in host memory.

        With `sends_adapter`, the rollout loads the base weights once, and then adapters.
        """
        self._actor, self._rollout, self._actor_ranks, self._snapshots = actor, rollout, actor_ranks, snapshots
        self._sends_adapter = sends_adapter
        self._machines: list[str] = []
        """Machine of each rank of the rollout."""
        self._version: int | None = None
        """Version of the last weights that were sent to the rollout."""
        self._readers: deque[list[Pending[Any]]] = deque()
        """Calls that load each snapshot in host memory, or need the loaded weights. The oldest snapshot is first."""

    def send(self, version: int) -> dict[str, float]:
        """Wait until the rollout has the weights of the actor, which are `version`, and return the metrics.

        Weights that it has, such as those of a validation, are not sent again.
        """
        if version == self._version:
            return {"rollout/weights_version": float(version)}
        return merge_ranks(self.start(version).result())

    def start(self, version: int) -> Pending[Any]:
        """Publish the weights of the actor, which are `version`, and return the call with which the rollout loads them.

        The rollout loads them after the calls that were submitted before. This waits only if all snapshots are in
        use, until no call needs the oldest one any more, because the actor overwrites it.
        """
        if version != self._version:
            if len(self._readers) == self._snapshots:
                for call in self._readers.popleft():
                    call.result()
            self._readers.append([self._send(version)])
            self._version = version
        return self._readers[-1][0]

    def keep_for(self, call: Pending[Any]) -> None:
        """Keep the newest snapshot until a call has ended, which a rollout that dies meanwhile would have to repeat."""
        self._readers[-1].append(call)

    def _send(self, version: int) -> Pending[Any]:
        if not self._machines:
            dtypes = self._rollout.sync_dtypes(self._actor.weight_dtypes())
            self._machines = list(self._rollout.machine())
            self._actor.set_readers(dtypes, set(self._machines))
            if self._sends_adapter:
                publish_base: Any = self._actor.publish_base
                self._deliver(publish_base(), self._rollout.receive_base)
        publish: Any = self._actor.publish  # takes and returns one value for each rank
        return self._deliver(publish([version] * self._actor_ranks), self._rollout.receive_weights)

    def _deliver(self, published: Sequence[Snapshot | None], receive: Any) -> Pending[Any]:
        """Let each rank of the rollout load what the actor has just published."""
        snapshots = {snapshot.machine: snapshot for snapshot in published if snapshot is not None}
        if any(machine not in snapshots for machine in self._machines):
            portable = self._actor.portable_snapshot()
            snapshots |= {machine: portable for machine in self._machines if machine not in snapshots}
        return submit(receive, [snapshots[machine] for machine in self._machines])


@dataclass(frozen=True)
class StartedGeneration:
    """A generation that may still be running."""

    parts: PPOParts
    batch: DataProto
    pending: Pending[DataProto]
    num_padding_rows: int

    def result(self) -> tuple[DataProto, PendingScores | None]:
        """Wait for the responses, and return them and the reward calls that have started as soon as ranks returned."""
        scoring = self.parts.rewards.begin(self.batch)
        if scoring is not None:
            for dp_rank, shard in self.pending.parts():
                self._score(scoring, dp_rank, shard)
        return self.responses(), scoring

    def begin_scoring(self) -> PendingScores | None:
        """Start the reward calls for the responses of a rank when they arrive, while the driver waits for any call."""
        scoring = self.parts.rewards.begin(self.batch)
        if scoring is not None:
            self.pending.listen(partial(self._score, scoring))
        return scoring

    def responses(self) -> DataProto:
        """Wait for the responses and return them."""
        return self.pending.result().unpad(self.num_padding_rows)

    def _score(self, scoring: PendingScores, dp_rank: int, shard: DataProto) -> None:
        """Start the reward calls for the rows of a rank, without those that pad the batch."""
        first_row = dp_rank * len(shard)
        responses = shard.ragged("responses").rows()[: max(0, len(self.batch) - first_row)]
        scoring.add(first_row, self.parts.decode([row.tolist() for row in responses]))


def role_classes(config: PPOConfig) -> tuple[type[ActorRolloutRefWorker], type[CriticWorker], type[RewardModelWorker]]:
    """Return the role classes: the built-in ones or those that `worker_cls` names."""
    policy, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    group = "camshaft.reward_models"
    unused = PUBLISHING_METHODS if policy.hybrid_engine else ()
    methods = tuple(name for name in registered_methods(ActorRolloutRefWorker) if name not in unused)
    return (
        load_worker_class("actor_rollout_ref.worker_cls", policy.worker_cls, ActorRolloutRefWorker, methods=methods),
        load_worker_class("critic.worker_cls", critic.worker_cls, CriticWorker),
        load_worker_class("reward_model.worker_cls", reward.worker_cls, RewardModelWorker, group, REWARD_METHODS),
    )


def prompt_files(config: PPOConfig, train: bool) -> tuple[tuple[str, ...], int]:
    """Return the training or validation files and the maximum number of rows to read from them."""
    data = config.data
    return (data.train_files, data.train_max_samples) if train else (data.val_files, data.val_max_samples)


def prompt_options(config: PPOConfig, reward_columns: tuple[str, ...] | None = ()) -> PromptOptions:
    """Return the options for loading the prompts of a run. `reward_columns` are those of the reward function."""
    data = config.data
    return PromptOptions(
        max_prompt_length=data.max_prompt_length,
        truncation=data.truncation,
        filter_overlong=data.filter_overlong_prompts,
        workers=data.filter_overlong_prompts_workers,
        prompt_key=data.prompt_key,
        chat=episode_chat(data) if config.plays_episodes() else data,
        prompt_id_key=data.prompt_id_key,
        max_prompt_id_length=data.max_prompt_id_length,
        reward_fn_key=data.reward_fn_key,
        reward_columns=reward_columns,
        return_raw_chat=config.needs_raw_chat() or config.plays_episodes(),
        return_raw_input_ids=data.return_raw_input_ids,
    )


def decode_rows(tokenizer: PreTrainedTokenizerBase, ids: list[list[int]]) -> list[str]:
    """Decode token ids without special tokens.

    Tokenizers that do not change the text of their backend are called directly, in half of the time: `tokenizer.decode`
    checks the type of each token id.
    """
    is_plain = isinstance(tokenizer, PreTrainedTokenizerFast) and not tokenizer.clean_up_tokenization_spaces
    decoder: Any = tokenizer
    if is_plain and type(tokenizer)._decode is PreTrainedTokenizerFast._decode:
        decoder = tokenizer.backend_tokenizer
    return [decoder.decode(row, skip_special_tokens=True) for row in ids]
