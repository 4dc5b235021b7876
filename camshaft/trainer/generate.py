"""Responses to the prompts of a file: `camshaft generate`, and how it goes on where it was stopped.

    with GenerateRun(config) as run, Tracking(["console"], run.info()) as tracking:
        run.generate(tracking)
        run.write()

A batch of prompts is generated, scored if that was asked for, and put down as a part; the file is made of the parts at
the end. A row's seed is a function of `trainer.seed` and the row's number, so that the responses do not depend on where
a run was stopped, and are those of a validation with the same seed and sampling.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from pathlib import Path
from typing import Any

from camshaft.config import GLOBAL_POOL, GenerateConfig, unread_by, without_secrets
from camshaft.controller import spawn
from camshaft.data import PromptOptions, ResponseFile, data_files, load_prompts
from camshaft.dataproto import DataProto
from camshaft.models.loader import load_tokenizer, local_folder, model_folder
from camshaft.roles import GenerateWorker
from camshaft.storage import fingerprints
from camshaft.tracking import RunInfo, Tracking
from camshaft.trainer.scoring import build_rewards, check_scorable
from camshaft.trainer.seeds import VALIDATION, sampling_seeds
from camshaft.trainer.session import global_pool, run_pools
from camshaft.trainer.validate import Scored, at_n_metrics

PLACES = ("data.path", "data.output_path", "data.tokenizer", "model.path", "custom_reward_function.path")
"""Keys of the config that may change between two starts of a run; what is found there counts."""

PACE = (
    "data.batch_size", "custom_reward_function.timeout", "custom_reward_function.num_workers",
    "rollout.max_num_seqs", "rollout.max_num_batched_tokens", "rollout.gpu_memory_utilization",
    "rollout.free_cache_engine", "rollout.update_weights_bucket_megabytes",
    "trainer.nnodes", "trainer.n_gpus_per_node",
)  # fmt: skip
"""So may these, which say how the work is cut and what it may take; so may those that the generator does not read."""

logger = logging.getLogger(__name__)


class GenerateRun(contextlib.AbstractContextManager["GenerateRun"]):
    """One run: its prompts, its file, and in the `with` block a generator."""

    def __init__(self, config: GenerateConfig):
        self.config, data, custom = config, config.data, config.custom_reward_function
        self.tokenizer: Any = load_tokenizer(config.tokenizer_path(), config.model.trust_remote_code)
        options = PromptOptions(
            max_prompt_length=config.rollout.prompt_length,
            truncation=data.truncation,
            filter_overlong=data.filter_overlong_prompts,
            prompt_key=data.prompt_key,
            reward_fn_key=data.reward_fn_key if custom.is_named() else None,
            length_key="rollout.prompt_length",
        )
        most = None if data.max_samples == -1 else data.max_samples
        self.sources = data_files(data.path)
        self.prompts = load_prompts(self.sources, self.tokenizer, options, most).batch
        if custom.is_named():
            check_scorable(self.prompts, custom)
        self.file = ResponseFile(Path(data.output_path), data.response_key, settings(config, self.prompts))
        self.file.check_columns(self.sources)
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> GenerateRun:
        config = self.config
        with self._exit as undo:  # if a later part fails, the earlier ones are ended
            self.parts = undo.enter_context(self.file.parts())
            if self.parts.num_done:
                logger.info("%d of %d prompts are done already", self.parts.num_done, len(self.prompts))
            self.rewards = None
            if config.custom_reward_function.is_named() and self._is_open():
                self.rewards = undo.enter_context(build_rewards(config.custom_reward_function))
            self.generator: GenerateWorker | None = None
            if self._is_open():
                specs = [global_pool(config.trainer, "generate")]
                pools = undo.enter_context(run_pools(config.trainer, specs, config.ray_kwargs.ray_init, None))
                self.generator = spawn(GenerateWorker, config, pool=pools[GLOBAL_POOL], name="generate")
                self.generator.init_model()
            self._exit = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def info(self) -> RunInfo:
        """Steps are parts: those that are there, and the batches to come."""
        rest = -(-(len(self.prompts) - self.parts.num_done) // self.config.data.batch_size)
        return RunInfo(
            project="generate",
            experiment=self.file.path.name,
            folder=self.parts.folder,
            total_steps=len(self.parts) + rest,
            resumed_step=len(self.parts) or None,
        )

    def generate(self, tracking: Tracking) -> None:
        """Make the parts that are not there."""
        seeds = sampling_seeds(self.config.trainer.seed, VALIDATION, len(self.prompts) * self.config.rollout.n)
        while self._is_open():
            start, n = self.parts.num_done, self.config.rollout.n
            prompts = self.prompts.reorder(slice(start, start + self.config.data.batch_size))
            rows = slice(start * n, (start + len(prompts)) * n)
            columns, metrics = self._part(prompts.repeat(n).with_columns(sampling_seed=seeds[rows]))
            grouped = {name: [values[i : i + n] for i in range(0, len(values), n)] for name, values in columns.items()}
            self.parts.add(len(prompts), grouped)
            tracking.log(metrics, step=len(self.parts))

    def write(self) -> None:
        """The file, made of all parts."""
        self.file.write(self.sources, [int(uid) for uid in self.prompts["uid"]], self.parts)

    def metrics(self) -> dict[str, float]:
        """Of the file that was written: what its scores come to, named as in a validation; empty without scores."""
        if not self.config.custom_reward_function.is_named():
            return {}
        scores, answers = (self.file.read(f"{self.file.name}{ending}") for ending in ("_score", "_pred"))
        rows = [
            Scored(source, uid, score, answer)
            for source, uid, *values in zip(
                self.prompts["data_source"], self.prompts["uid"], scores, answers, strict=True
            )
            for score, answer in zip(*values, strict=True)
        ]
        return at_n_metrics(rows)

    def _is_open(self) -> bool:
        return self.parts.num_done < len(self.prompts)

    def _part(self, batch: DataProto) -> tuple[dict[str, list[Any]], dict[str, float]]:
        """(column ending -> a value for each row, what the progress line shows)."""
        assert self.generator is not None
        began = time.perf_counter()
        asked, added = batch.select("prompts", "sampling_seed").pad_to_divisor(self.config.trainer.world_size)
        made = DataProto(self.generator.generate_sequences(asked).unpad(added).columns)
        seconds = time.perf_counter() - began
        lengths = made["responses"].lengths
        columns: dict[str, list[Any]] = {
            "": self._decode([row.tolist() for row in made["responses"].rows()]),
            "_tokens": lengths.tolist(),
            "_finished": made["finished"].tolist(),
            "_log_prob": made["rollout_log_probs"].sum().tolist(),
        }
        metrics = {"perf/throughput": float(lengths.sum()) / seconds, "timing_s/gen": seconds}
        if self.rewards is not None:
            result = self.rewards.score(batch.union(made), self._decode)
            columns |= {"_score": result.scores.tolist(), "_pred": list(result.answers)}
            metrics["reward/mean"] = float(result.scores.mean())
        return columns, metrics

    def _decode(self, ids: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)


def settings(config: GenerateConfig, prompts: DataProto) -> dict[str, Any]:
    """What the responses depend on: the config, and what is found in the places that it names."""
    custom, sections = config.custom_reward_function, without_secrets(config)
    free = {*PLACES, *PACE, *(f"rollout.{key}" for key in unread_by(config.rollout.name))}
    found = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    found = {key: value for key, value in found.items() if key not in free}
    ids = prompts["prompts"]
    found["the prompts"] = _checksum(ids.values.numpy().tobytes() + ids.lengths.numpy().tobytes())
    found["the model"] = _files(model_folder(config.model.path))
    if config.data.tokenizer is not None:
        found["the tokenizer"] = _files(local_folder(config.data.tokenizer))
    if custom.is_named():
        columns = [list(prompts[name]) for name in ("data_source", "ground_truth", "extra_info")]
        found["what the scores depend on"] = _checksum(repr(columns).encode())
        own = None if custom.path is None else Path(custom.path)
        found["the reward function"] = _checksum(own.read_bytes()) if own and own.is_file() else custom.path
    return found


def _files(folder: Path) -> str:
    """A checksum of the files of a folder, of every byte."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    return _checksum(json.dumps(fingerprints(folder, paths)).encode())


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
