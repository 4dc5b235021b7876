"""Versions of weights, samplers, and batches of requests for samples.

    version = versions.of_base("models/tiny")          # or of_saved, or of_model
    sampler = Sampler("s:sample:3", version, "models/tiny", limits, server_seed)
    queue.put(sampler.job(future, request))

A version never changes, so a sampler keeps its weights while its model is trained. Requests with the same version and
the same options are one batch, from all samplers. The random numbers of a sample depend only on its seed; the rest of
its batch changes log-probs by rounding errors.

The processes that train have the weights of a version in memory or in a file. If they have lost them, they are read
from the model folder or from a checkpoint, or the model that has published them is restored. If samples have a pool of
their own, its processes read the same memory and files. A batch whose weights are missing is postponed until the
processes that train have published them, and other batches run meanwhile.
"""

import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from camshaft.config.engine import LoRAConfig
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import RolloutError
from camshaft.rollout import SamplingParams
from camshaft.service import codec
from camshaft.service.checkpoints import Saved, SavedPath, lora_of
from camshaft.service.commands import MAX_ROWS, Job, JobQueue, Postponed, Repetitions, failed_job
from camshaft.service.errors import CommandError, WeightsLost
from camshaft.service.futures import Future, Result
from camshaft.service.process import PerRank, Roles
from camshaft.service.scoring import Wanted, Widths, read_wanted
from camshaft.wire.schemas import Sample, SampleSettings

MAX_SEED = 2**62
MIN_TEMPERATURE = 1e-6
"""Minimum temperature but 0. Scores that are divided by a smaller one may overflow."""


@dataclass(frozen=True)
class Source:
    """Origin of the weights of a version: a model folder, a saved path, or a command of a model."""

    base_folder: str
    """Folder of the base model."""
    path: str | None = None
    saved_folder: str | None = None
    lora: LoRAConfig | None = None
    """Adapter of the saved weights."""
    model_id: str | None = None
    number: int = 0

    def to_json(self) -> str:
        lora = None if self.lora is None else self.lora.model_dump(mode="json")
        return json.dumps(vars(self) | {"lora": lora})

    @staticmethod
    def from_json(text: str) -> "Source":
        values = json.loads(text)
        lora = values.pop("lora")
        return Source(lora=None if lora is None else LoRAConfig(**lora), **values)

    @property
    def identifier(self) -> str:
        """Name of the weights in the worker process and of their file."""
        values = (self.base_folder, self.saved_folder) if self.model_id is None else (self.model_id, self.number)
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


class Version:
    """Weights that samplers use, in the role."""

    def __init__(self, roles: Roles, queue: JobQueue, source: Source, rebuild: Callable[[str], None]):
        """`queue` is that of the processes that train. `rebuild` restores a model, which then publishes again."""
        self.roles, self.queue, self.source, self.rebuild = roles, queue, source, rebuild
        self.identifier, self.folder = source.identifier, source.base_folder
        self.publisher = source.model_id
        """Model that has published the weights."""
        self.used_at = time.time()
        """Time of the last request for samples (`time.time`)."""
        self._generation: int | None = None
        """Generation of the worker processes that have the weights."""
        self._snapshots: Sequence[Any] = ()
        """Memory that contains the weights, for processes that only sample."""
        self._known: tuple[Any, int] | None = None
        """Snapshots that the processes that only sample know, and the generation of these processes."""
        self._is_lost = False
        """True if they have not found the weights, which have then been published again."""
        self.is_forgotten = False
        """True if the weights are freed, because no open session uses them."""

    def publish(self) -> None:
        """Publish the weights, unless they are. The thread that trains calls this."""
        trainer, source = self.roles.trainer, self.source
        if self._generation == trainer.generation or self.is_forgotten:
            return
        self.roles.set_dtypes()
        if not trainer.call("has_version", self.identifier):
            if source.model_id is not None:
                self.rebuild(source.model_id)
            elif source.saved_folder is not None:
                trainer.call("publish_checkpoint", self.folder, source.lora, source.saved_folder, self.identifier)
            else:
                trainer.call("publish_base", self.folder, self.identifier)
        self.was_published()

    def was_published(self) -> None:
        self._snapshots = self.roles.share(self.identifier)
        self._generation = self.roles.trainer.generation

    def call_ranks(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the ranks that sample, which uses the weights."""
        if self.is_forgotten:
            raise CommandError("the sampler or its session has ended")
        if not self.roles.are_separate:
            self.publish()
            return self.roles.trainer.call_ranks(method, self.folder, self.identifier, *arguments)
        if self._generation is None:
            raise Postponed(self.queue, self.publish)
        self._inform_samplers()
        try:
            results = self.roles.sampler.call_ranks(method, self.folder, self.identifier, *arguments)
        except WeightsLost as error:
            if self._is_lost:
                raise
            self._is_lost, self._generation = True, None
            raise Postponed(self.queue, self.publish) from error
        self._is_lost = False
        return results

    def _inform_samplers(self) -> None:
        """Let the processes that only sample know where the weights are."""
        self.roles.locate_samplers()
        snapshots, generation = self._snapshots, self.roles.sampler.generation
        if self._known is None or self._known[0] is not snapshots or self._known[1] != generation:
            self.roles.sampler.call("set_version", self.identifier, snapshots)
            self._known = snapshots, generation

    def end_sampling(self) -> None:
        """Let the processes that only sample forget the weights. The thread that samples calls this."""
        if self._known is not None and self._known[1] == self.roles.sampler.generation:
            self.roles.sampler.call("remove_version", self.identifier)
        self._known = None


class Versions:
    """The versions of a server. Methods are called from several threads."""

    def __init__(self, roles: Roles, queue: JobQueue, rebuild: Callable[[str], None]):
        self.roles, self.queue, self.rebuild = roles, queue, rebuild
        self._versions: dict[str, Version] = {}
        self.lock = threading.RLock()
        """Held while a version is looked up and gets a sampler, so that it is not freed in between."""

    def of_base(self, folder: str) -> Version:
        """Return the weights of a model folder."""
        return self.restore(Source(folder))

    def of_saved(self, path: SavedPath, saved: Saved, base_folder: str, publisher: str | None = None) -> Version:
        """Return the weights of a checkpoint, which are read when they are sampled unless a model publishes them."""
        version = self.restore(Source(base_folder, str(path), str(saved.folder), lora_of(saved.record)))
        version.publisher = version.publisher or publisher
        return version

    def of_model(self, model_id: str, number: int, base_folder: str) -> Version:
        """Return the weights that a command of a model publishes."""
        return self.restore(Source(base_folder, model_id=model_id, number=number))

    def restore(self, source: Source) -> Version:
        """Return the weights of a source."""
        with self.lock:
            if source.identifier not in self._versions:
                self._versions[source.identifier] = Version(self.roles, self.queue, source, self.rebuild)
            return self._versions[source.identifier]

    def find(self, model_id: str, number: int) -> Version | None:
        return self._versions.get(Source("", model_id=model_id, number=number).identifier)

    def published_by(self, model_id: str) -> list[Version]:
        with self.lock:
            return [version for version in self._versions.values() if version.publisher == model_id]

    def identifiers(self) -> list[str]:
        with self.lock:
            return list(self._versions)

    def forget(self, find_unused: Callable[[], set[Version]]) -> None:
        """Free the weights of the versions that are not used any more. The thread that trains calls this."""
        with self.lock:
            unused = [version for version in find_unused() if self._versions.get(version.identifier) is version]
            for version in unused:
                del self._versions[version.identifier]
                version.is_forgotten = True
        for version in unused:
            self.roles.trainer.call("forget_version", version.identifier)


@dataclass(frozen=True)
class SampleRequest:
    """One prompt, the seeds of its samples, and the log-probs that are requested beside them."""

    tokens: list[int]
    seeds: list[int]
    wanted: Wanted


class Sampler:
    """Weights that a client samples from."""

    def __init__(self, identifier: str, version: Version, base_model: str, limits: codec.Limits, server_seed: str):
        self.identifier, self.version, self.base_model, self.limits = identifier, version, base_model, limits
        self.server_seed = server_seed
        """Text from which the seeds of requests without a seed are derived, with their number."""
        self.repetitions = Repetitions("sample")

    def with_seed(self, request: Sample) -> Sample:
        """Return a request with the seed that the server derives if it has none."""
        settings = request.sampling_params
        if settings.seed is not None:
            return request
        digest = hashlib.sha256(f"{self.server_seed}/{request.seq_id}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little") % (MAX_SEED // 2)
        return replace(request, sampling_params=replace(settings, seed=seed))

    def job(self, future: Future, request: Sample) -> Job:
        """Return the job of a request with a seed. An invalid request is a job that fails."""
        try:
            argument, sampling = self._read(request)
        except Exception as error:
            return failed_job(future, error)
        widths = argument.wanted.widths
        key = (self.version.identifier, sampling, widths)
        return Job(future, lambda jobs: self._execute(jobs, sampling, widths), argument, key, len(argument.seeds))

    def _read(self, request: Sample) -> tuple[SampleRequest, SamplingParams]:
        chunks = request.prompt.chunks
        if kinds := [chunk.type for chunk in chunks if chunk.type != "encoded_text"]:
            raise CommandError(f"prompt: a chunk has the type {kinds[0]}, and this server samples from text only")
        tokens = [token for chunk in chunks for token in chunk.tokens]
        if not 0 < len(tokens) < self.limits.context:
            raise CommandError(
                f"prompt: it has {len(tokens)} tokens; this server accepts 1 to {self.limits.context - 1} "
                "(max_model_len)"
            )
        if invalid := [token for token in tokens if not 0 <= token < self.limits.vocabulary]:
            raise CommandError(
                f"prompt[{tokens.index(invalid[0])}] is {invalid[0]}, but the token ids of the model are "
                f"0..{self.limits.vocabulary - 1}; use the tokenizer of this model"
            )
        if not 1 <= request.num_samples <= MAX_ROWS:
            raise CommandError(f"num_samples={request.num_samples} is not from 1 to {MAX_ROWS}; send several requests")
        settings, seed = request.sampling_params, request.sampling_params.seed
        if seed is None or not 0 <= seed < MAX_SEED:
            raise CommandError(f"sampling_params.seed={seed} is not from 0 to {MAX_SEED - 1}")
        seeds, wanted = [seed + row for row in range(request.num_samples)], read_wanted(request, tokens, self.limits)
        return SampleRequest(tokens, seeds, wanted), self._options(settings)

    def _options(self, settings: SampleSettings) -> SamplingParams:
        """Return the options of the rollout. With `stop`, exactly these tokens and strings end a sample."""
        stop = settings.stop
        entries = [stop] if isinstance(stop, str) else stop or []
        stop_ids = tuple(entry for entry in entries if isinstance(entry, int))
        if invalid := [token for token in stop_ids if not 0 <= token < self.limits.vocabulary]:
            raise CommandError(
                f"sampling_params.stop contains the token id {invalid[0]}, but those of the model are "
                f"0..{self.limits.vocabulary - 1}; use the tokenizer of this model"
            )
        if 0 < settings.temperature < MIN_TEMPERATURE:
            raise CommandError(
                f"sampling_params.temperature={settings.temperature} is above 0 and below {MIN_TEMPERATURE:g}; set it "
                "to 0 to sample greedily"
            )
        try:
            return SamplingParams(
                max_tokens=self.limits.context if settings.max_tokens is None else settings.max_tokens,
                temperature=settings.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
                ignore_eos=stop is not None,
                stop=tuple(entry for entry in entries if isinstance(entry, str)),
                stop_token_ids=stop_ids,
            )
        except RolloutError as error:
            raise CommandError(f"sampling_params: {error}") from error

    def _execute(self, jobs: Sequence[Job], sampling: SamplingParams, widths: Widths) -> list[Result]:
        """Sample all rows of a batch, and return the answer to each request."""
        requests: list[SampleRequest] = [job.argument for job in jobs]
        scores = self._score_prompts(requests, widths) if widths.scores_prompts else None
        prompts = Ragged.from_rows([torch.tensor(r.tokens) for r in requests for _ in r.seeds])
        seeds = torch.tensor([seed for request in requests for seed in request.seeds])
        slices = self._slices(len(seeds))
        parts = PerRank(map(prompts.select, slices)), sampling, PerRank(map(seeds.__getitem__, slices))
        out = DataProto.concat(self.version.call_ranks("sample", *parts))
        columns = (out.ragged("responses").rows(), out.ragged("rollout_log_probs").rows(), out["finished"].tolist())
        rows = zip(*columns, strict=True)
        answers = [codec.write_samples([next(rows) for _ in request.seeds]) for request in requests]
        if scores is not None:
            for number, (request, answer) in enumerate(zip(requests, answers, strict=True)):
                request.wanted.add_prompt(answer, scores.reorder([number]))
        if widths.sample_top_k:
            texts = Ragged.join(prompts, out.ragged("responses"))
            tops, start = self._score(texts, widths.sample_top_k, None, sampling), 0
            for request, answer in zip(requests, answers, strict=True):
                stop = start + len(request.seeds)
                request.wanted.add_samples(answer, tops.reorder(slice(start, stop)))
                start = stop
        return [Result.of_message(answer) for answer in answers]

    def _score_prompts(self, requests: Sequence[SampleRequest], widths: Widths) -> DataProto:
        """Return the log-probs of each prompt, which all of its samples share."""
        prompts = Ragged.from_rows([torch.tensor(request.tokens) for request in requests])
        tables = [request.wanted.candidates for request in requests]
        candidates = Ragged.from_rows([t.of_prompt() for t in tables if t is not None]) if widths.candidates else None
        return self._score(prompts, widths.top_k, candidates, None)

    def _score(self, rows: Ragged, top_k: int, candidates: Ragged | None, sampling: SamplingParams | None) -> DataProto:
        slices = self._slices(len(rows))
        columns = None if candidates is None else PerRank(map(candidates.select, slices))
        parts = PerRank(map(rows.select, slices)), top_k, columns, sampling
        return DataProto.concat(self.version.call_ranks("score", *parts))

    def _slices(self, num_rows: int) -> list[slice]:
        """Return the rows of each rank."""
        ranks = self.version.roles.sampler.spec.world_size
        bounds = [num_rows * rank // ranks for rank in range(ranks + 1)]
        return [slice(first, end) for first, end in itertools.pairwise(bounds)]
