"""Versions of weights, samplers, and batches of requests for samples.

    version = Version(role, "models/tiny")            # `is_base`, `saved` or `was_published` says where its weights are
    sampler = Sampler("s:sample:3", version, "models/tiny", limits, server_seed)
    queue.put(sampler.job(future, request))

A version never changes, so a sampler keeps its weights while its model is trained. Requests with the same version and
the same options are one batch, from all samplers. The random numbers of a sample depend only on its seed; the rest of
its batch changes log-probs by rounding errors.
"""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from camshaft.config.engine import LoRAConfig
from camshaft.dataproto import Ragged
from camshaft.errors import RolloutError, WorkerError
from camshaft.rollout import SamplingParams
from camshaft.service import codec
from camshaft.service.checkpoints import SavedPath
from camshaft.service.commands import MAX_ROWS, Job, Repetitions
from camshaft.service.errors import CommandError
from camshaft.service.futures import Future, Result
from camshaft.service.process import RoleProcess
from camshaft.wire.schemas import Sample, SampleSettings

UNSUPPORTED = ("prompt_logprobs", "topk_prompt_logprobs", "target_prompt_logprobs", "prompt_logprobs_last_n",
               "topk_sample_logprobs", "prompt_alt_tokens_k")  # fmt: skip
"""Fields of a request for samples that ask for more than samples."""
MAX_SEED = 2**62


class Version:
    """Weights that samplers use, in the role."""

    def __init__(self, role: RoleProcess, folder: str):
        self.role, self.folder = role, folder
        self.identifier = secrets.token_hex(8)
        self.path: SavedPath | None = None
        """Path under which the weights are saved."""
        self.saved: tuple[str, LoRAConfig | None] | None = None
        """Folder and adapter of a checkpoint from which the weights are read when they are needed."""
        self.is_base = False
        """True for the weights of the model folder."""
        self._generation: int | None = None
        """Generation of the worker process that has the weights."""

    def was_published(self) -> None:
        self._generation = self.role.generation

    def is_usable(self) -> bool:
        return self._generation == self.role.generation

    def prepare(self) -> None:
        """Publish the weights in the role, unless they are. Raise WorkerError if they were lost with an earlier one."""
        if self.is_usable():
            return
        if self.is_base:
            self.role.call("publish_base", self.folder, self.identifier)
        elif self.saved is not None:
            folder, lora = self.saved
            self.role.call("publish_checkpoint", self.folder, lora, folder, self.identifier)
        else:
            raise WorkerError(
                "the weights of this sampler were lost when the worker process died; save weights under a name to keep "
                "them, or create a sampler of a new model"
            )
        self.was_published()

    def forget(self) -> None:
        """Free the weights."""
        if self.is_usable():
            self.role.call("forget_version", self.identifier)
        self._generation = None


@dataclass(frozen=True)
class SampleRequest:
    """One prompt, and the seeds of its samples."""

    tokens: list[int]
    seeds: list[int]


class Sampler:
    """Weights that a client samples from."""

    def __init__(self, identifier: str, version: Version, base_model: str, limits: codec.Limits, server_seed: str):
        self.identifier, self.version, self.base_model, self.limits = identifier, version, base_model, limits
        self.server_seed = server_seed
        """Text from which the seeds of requests without a seed are derived, with their number."""
        self.repetitions = Repetitions("sample")

    def job(self, future: Future, request: Sample) -> Job:
        """Return the job of a request. An invalid request is a job that fails."""
        try:
            argument, sampling = self._read(request)
        except CommandError as error:
            message = str(error)
            return Job(future, lambda _: [Result.of_error("user", message)])
        key = (self.version.identifier, sampling)
        return Job(future, lambda jobs: self._execute(jobs, sampling), argument, key, len(argument.seeds))

    def _read(self, request: Sample) -> tuple[SampleRequest, SamplingParams]:
        for name in UNSUPPORTED:
            if getattr(request, name):
                raise CommandError(
                    f"{name} is not supported by this server; forward with loss_fn=cross_entropy returns the log-probs "
                    "of given tokens"
                )
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
        settings = request.sampling_params
        seed = self._seed(request.seq_id) if settings.seed is None else settings.seed
        if not 0 <= seed < MAX_SEED:
            raise CommandError(f"sampling_params.seed={seed} is not from 0 to {MAX_SEED - 1}")
        return SampleRequest(tokens, [seed + row for row in range(request.num_samples)]), self._options(settings)

    def _seed(self, number: int) -> int:
        digest = hashlib.sha256(f"{self.server_seed}/{number}".encode()).digest()
        return int.from_bytes(digest[:8], "little") % (MAX_SEED // 2)

    def _options(self, settings: SampleSettings) -> SamplingParams:
        """Return the options of the rollout. With `stop`, exactly these tokens and strings end a sample."""
        stop = settings.stop
        entries = [stop] if isinstance(stop, str) else stop or []
        try:
            return SamplingParams(
                max_tokens=self.limits.context if settings.max_tokens is None else settings.max_tokens,
                temperature=settings.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
                ignore_eos=stop is not None,
                stop=tuple(entry for entry in entries if isinstance(entry, str)),
                stop_token_ids=tuple(entry for entry in entries if isinstance(entry, int)),
            )
        except RolloutError as error:
            raise CommandError(f"sampling_params: {error}") from error

    def _execute(self, jobs: Sequence[Job], sampling: SamplingParams) -> list[Result]:
        """Sample all rows of a batch, and return the answer to each request."""
        self.version.prepare()
        requests: list[SampleRequest] = [job.argument for job in jobs]
        prompts = Ragged.from_rows([torch.tensor(r.tokens) for r in requests for _ in r.seeds])
        seeds = torch.tensor([seed for request in requests for seed in request.seeds])
        version, folder = self.version.identifier, self.version.folder
        out = self.version.role.call("sample", folder, version, prompts, sampling, seeds)
        columns = (out.ragged("responses").rows(), out.ragged("rollout_log_probs").rows(), out["finished"].tolist())
        rows = zip(*columns, strict=True)
        return [Result.of_message(codec.write_samples([next(rows) for _ in request.seeds])) for request in requests]
