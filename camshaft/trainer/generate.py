"""Generate responses to the prompts of a file, for `camshaft generate`. An interrupted run resumes.

    with GenerateRun(config) as run, Tracking(["console"], run.info()) as tracking:
        run.generate(tracking)
        run.write()

For each batch of prompts, responses are generated, scored if a reward function is configured, and saved as a part. At
the end, the parts are merged into the output file. The seed of a row depends only on `trainer.seed` and the row index.
Responses therefore do not depend on interruptions, and they equal those of validation with the same seed and sampling.
"""

import contextlib
import hashlib
import json
import logging
import time
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from camshaft.agents.setup import (
    check_environment_rows,
    data_columns,
    episode_chat,
    episode_inputs,
    join_columns,
    open_environments,
    report_template,
    with_rewards,
)
from camshaft.config import GLOBAL_POOL, GenerateConfig, unread_keys, without_secrets
from camshaft.controller import spawn
from camshaft.controller.placement import global_pool, run_pools
from camshaft.data import PromptOptions, ResponseFile, data_files, load_prompts
from camshaft.dataproto import DataProto
from camshaft.models.loader import load_tokenizer, local_folder, model_folder
from camshaft.rewards.environments import EnvironmentRewards, last_answer
from camshaft.rewards.manager import RewardManager
from camshaft.roles import GenerateWorker
from camshaft.storage import fingerprints
from camshaft.tracking import RunInfo, Tracking
from camshaft.trainer.mini_batches import VALIDATION, sampling_seeds
from camshaft.trainer.scoring import build_answer_rewards, check_scorable
from camshaft.trainer.session import fit_prompts
from camshaft.trainer.validate import ScoredResponse, at_n_metrics

PATH_KEYS = (
    *("data.path", "data.output_path", "data.tokenizer"),
    *("model.path", "model.download", "custom_reward_function.path", "custom_reward_function.functions"),
)
"""Keys whose values may change before a run resumes, as long as the content of the files does not change."""

SPEED_KEYS = (
    "data.batch_size", "custom_reward_function.timeout", "custom_reward_function.load_timeout",
    "custom_reward_function.num_workers", "custom_reward_function.max_concurrency",
    "rollout.max_num_seqs", "rollout.max_num_batched_tokens", "rollout.gpu_memory_utilization",
    "rollout.free_cache_engine", "rollout.update_weights_bucket_megabytes",
    "trainer.nnodes", "trainer.n_gpus_per_node", "trainer.worker_timeout", "trainer.worker_timeouts",
)  # fmt: skip
"""Keys whose values may change before a run resumes, because they affect only speed and memory."""

logger = logging.getLogger(__name__)


class GenerateRun(contextlib.AbstractContextManager["GenerateRun"]):
    """A generation run with its prompts and output file. The rollout exists inside the `with` block."""

    def __init__(self, config: GenerateConfig):
        self.config, data, custom = config, config.data, config.custom_reward_function
        self.tokenizer: Any = load_tokenizer(
            config.tokenizer_path(), config.model.trust_remote_code, data.chat_template
        )
        num_tool_tokens = 0
        self.environments = None
        """Environments, and the columns that they read; None for single responses."""
        reward_columns: tuple[str, ...] | None = None if any(function.path for function in custom.selected()) else ()
        if config.plays_episodes():
            section = config.rollout.multi_turn
            self.environments = open_environments(section, (), has_other_rewards=custom.is_named())
            schemas = self.environments[1].schemas
            num_tool_tokens = report_template(self.tokenizer, data.chat_template_kwargs, schemas, section.format)
            reward_columns = join_columns(reward_columns, data_columns(*self.environments))
        options = PromptOptions(
            max_prompt_length=config.rollout.prompt_length,
            truncation=data.truncation,
            filter_overlong=data.filter_overlong_prompts,
            prompt_key=data.prompt_key,
            chat=data if self.environments is None else episode_chat(data),
            reward_fn_key=data.reward_fn_key if custom.is_named() else None,
            reward_columns=reward_columns,
            return_raw_chat=self.environments is not None,
            length_key="rollout.prompt_length",
        )
        max_rows = None if data.max_samples == -1 else data.max_samples
        self.sources = data_files(data.path)
        self.prompts = load_prompts(self.sources, self.tokenizer, options, max_rows).batch
        self.config = fit_prompts(config, [self.prompts], num_tool_tokens)
        if custom.is_named():
            check_scorable(self.prompts, custom)
        if self.environments is not None:
            check_environment_rows(*self.environments, self.prompts)
        self.file = ResponseFile(Path(data.output_path), data.response_key, collect_settings(self.config, self.prompts))
        self.file.check_columns(self.sources)
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        config = self.config
        with self._exit as stack:  # closes what was already opened if a later line raises
            self.parts = stack.enter_context(self.file.parts())
            if self.parts.num_done:
                logger.info("resuming: %d of %d prompts have responses", self.parts.num_done, len(self.prompts))
            self.rewards: RewardManager | EnvironmentRewards | None = None
            if config.custom_reward_function.is_named() and self._is_incomplete():
                self.rewards = stack.enter_context(
                    build_answer_rewards(config.custom_reward_function, config.plays_episodes())
                )
                self.rewards.check_rows(self.prompts)
            if self.environments is not None:
                raises = config.custom_reward_function.on_error == "raise"
                self.rewards = EnvironmentRewards(self.rewards, raises)
            self.generator: GenerateWorker | None = None
            if self._is_incomplete():
                specs = [global_pool(config.trainer, "generate")]
                pools = stack.enter_context(run_pools(config.trainer, specs, config.ray_kwargs.ray_init, None))
                self.generator = spawn(GenerateWorker, config, pool=pools[GLOBAL_POOL], name="generate")
                self.generator.init_model()
                if self.environments is not None:
                    functions = None if self.rewards is None else self.rewards.environment_functions
                    self.generator.set_environments(with_rewards(self.environments[0], functions))
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def info(self) -> RunInfo:
        """Describe the run for trackers. A step is one part."""
        num_remaining = -(-(len(self.prompts) - self.parts.num_done) // self.config.data.batch_size)
        return RunInfo(
            project="generate",
            experiment=self.file.path.name,
            folder=self.parts.folder,
            total_steps=len(self.parts) + num_remaining,
            resumed_step=len(self.parts) or None,
        )

    def generate(self, tracking: Tracking) -> None:
        """Generate and save the parts that do not exist yet."""
        seeds = sampling_seeds(self.config.trainer.seed, VALIDATION, len(self.prompts) * self.config.rollout.n)
        while self._is_incomplete():
            start, n = self.parts.num_done, self.config.rollout.n
            prompts = self.prompts.reorder(slice(start, start + self.config.data.batch_size))
            rows = slice(start * n, (start + len(prompts)) * n)
            columns, metrics = self._generate_part(prompts.repeat(n).with_columns(sampling_seed=seeds[rows]))
            grouped = {name: [values[i : i + n] for i in range(0, len(values), n)] for name, values in columns.items()}
            self.parts.add(len(prompts), grouped)
            tracking.log(metrics, step=len(self.parts))

    def write(self) -> None:
        """Merge the parts into the output file."""
        self.file.write(self.sources, [int(uid) for uid in self.prompts["uid"]], self.parts)

    def metrics(self) -> dict[str, float]:
        """Return the validation metrics of the scores in the output file, or {} if nothing gives scores."""
        if not self.config.custom_reward_function.is_named() and self.environments is None:
            return {}
        scores, answers = (self.file.read(f"{self.file.name}{suffix}") for suffix in ("_score", "_pred"))
        columns = self.prompts["data_source"], self.prompts["uid"], scores, answers
        rows = [
            ScoredResponse(source, uid, score, answer)
            for source, uid, *values in zip(*columns, strict=True)
            for score, answer in zip(*values, strict=True)
            if score is not None
        ]
        return at_n_metrics(rows, self.config.rollout.n)

    def _is_incomplete(self) -> bool:
        return self.parts.num_done < len(self.prompts)

    def _generate_part(self, batch: DataProto) -> tuple[dict[str, list[Any]], dict[str, float]]:
        """Generate one part. Return its columns by suffix, with a value per row, and metrics for the progress line."""
        assert self.generator is not None
        start = time.perf_counter()
        world_size = self.config.trainer.world_size
        if self.environments is None:
            padded, num_padding_rows = batch.select("prompts", "sampling_seed").pad_to_divisor(world_size)
        else:
            padded, num_padding_rows = episode_inputs(batch, world_size)
        generated = self.generator.generate_sequences(padded).unpad(num_padding_rows)
        seconds = time.perf_counter() - start
        lengths = generated["responses"].lengths
        ids = [row.tolist() for row in generated["responses"].rows()]
        texts: list[str] = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        if self.environments is not None:
            return self._episode_columns(batch.with_columns(**generated.columns), seconds)
        columns: dict[str, list[Any]] = {
            "": texts,
            "_tokens": lengths.tolist(),
            "_finished": generated["finished"].tolist(),
            "_log_prob": generated["rollout_log_probs"].sum().tolist(),
        }
        metrics = {"perf/throughput": float(lengths.sum()) / seconds, "timing_s/gen": seconds}
        if isinstance(self.rewards, RewardManager):
            result = self.rewards.score_texts(batch, texts)
            columns |= {"_score": result.scores.tolist(), "_pred": list(result.answers)}
            metrics["reward/mean"] = float(result.scores.mean())
        return columns, metrics

    def _episode_columns(self, batch: DataProto, seconds: float) -> tuple[dict[str, list[Any]], dict[str, float]]:
        """Return the columns of a part of episodes, whose response is the last answer, and metrics.

        An episode whose environment has failed has no score.
        """
        assert isinstance(self.rewards, EnvironmentRewards)
        result = self.rewards.score(batch, self.tokenizer.batch_decode)
        scores = [None if row in result.unplayed else score for row, score in enumerate(result.scores.tolist())]
        columns: dict[str, list[Any]] = {
            "": [last_answer(messages) for messages in batch["transcript"]],
            "_tokens": batch["responses"].lengths.tolist(),
            "_finished": batch["finished"].tolist(),
            "_log_prob": batch["rollout_log_probs"].sum().tolist(),
            "_score": scores,
            "_pred": list(result.answers),
            "_messages": [json.dumps(messages, ensure_ascii=False, default=str) for messages in batch["transcript"]],
            "_stop_reason": list(batch["stop_reason"]),
        }
        metrics = {"perf/throughput": float(batch["response_mask"].values.sum()) / seconds, "timing_s/gen": seconds}
        if kept := [score for score in scores if score is not None]:
            metrics["reward/mean"] = fmean(kept)
        return columns, metrics


def collect_settings(config: GenerateConfig, prompts: DataProto) -> dict[str, Any]:
    """Return all values that affect the responses: config values, and checksums of prompts, model and other files."""
    custom, sections = config.custom_reward_function, without_secrets(config)
    unread = unread_keys(config.rollout.name, config.rollout.engine_kwargs)
    ignored = {*PATH_KEYS, *SPEED_KEYS, *(f"rollout.{key}" for key in unread)}
    values = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    values = {key: value for key, value in values.items() if key not in ignored}
    ids = prompts["prompts"]
    values["the prompts"] = _checksum(ids.values.numpy().tobytes() + ids.lengths.numpy().tobytes())
    values["the model"] = _folder_checksum(model_folder(config.model.source()))
    if config.data.tokenizer is not None:
        values["the tokenizer"] = _folder_checksum(local_folder(config.tokenizer_path(), weights=False))
    if custom.is_named():
        columns = [list(prompts[name]) for name in ("data_source", "ground_truth", "extra_info")]
        values["the reward inputs"] = _checksum(repr(columns).encode())
        for function in custom.selected():
            noun = f"the reward function {function.label}".rstrip()
            path = None if function.path is None else Path(function.path)
            values[noun] = _checksum(path.read_bytes()) if path and path.is_file() else function.path
    return values


def _folder_checksum(folder: Path) -> str:
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    return _checksum(json.dumps(fingerprints(folder, paths)).encode())


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
