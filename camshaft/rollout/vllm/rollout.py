"""The vLLM rollout, which runs in the ranks of the trainer.

    rollout = VLLMRollout(RolloutEngineConfig(model_path="models/tiny", device="cuda"))
    rollout.load_weights(engine.named_weights())
    rollout.generate_sequences(prompts, SamplingParams(max_tokens=64))

`VLLMRollout` implements the rollout interface; `engine.py` calls vLLM. If `tensor_model_parallel_size` is above 1, that
many consecutive ranks share one engine. They gather the prompts of all these ranks and generate them in one call, and
each rank keeps the responses to its own prompts. If `config.lora` is set, `load_weights` loads the base model once and
`load_adapter` loads an adapter in each weight sync.
"""

import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from camshaft.config.backends import VLLM
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.device import with_device_index, world_size
from camshaft.digest import record_digests
from camshaft.errors import RolloutError
from camshaft.models.loader import file_layout
from camshaft.ragged import Ragged
from camshaft.rollout.base import Generation, OpenRows, SamplingParams, UnsupportedSampling, check_finite
from camshaft.rollout.external import RowRequest
from camshaft.rollout.scoring import PromptScores
from camshaft.rollout.vllm.base import BaseVLLMRollout
from camshaft.rollout.vllm.engine import VLLMEngine
from camshaft.rollout.weights.checks import ExpectedWeights, drop_tied_duplicates, split_stacked


class VLLMRollout(BaseVLLMRollout):
    """Generate with a vLLM engine in this process. A row's samples depend only on its seed and its prompt."""

    capabilities = VLLM

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        _check_ranks(config.tensor_model_parallel_size)
        _check_device(config.device)
        self._loaded_digests: dict[str, int] | None = None
        self._layout = file_layout(self.hf_config, config.trust_remote_code, folder=self.folder)
        self._adapter = None if config.lora is None else ExpectedWeights.adapter_from_config(config, config.lora)
        self._adapter_loaded = False
        self.engine = VLLMEngine.acquire(config)
        self.engine.wake_up()
        weakref.finalize(self, self.engine.release).atexit = False

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        self.check_ready_to_load()
        self._loaded_digests, self._adapter_loaded = None, False
        digests: dict[str, int] = {}
        validated = record_digests(self.expected.validate(weights), digests)
        untied = drop_tied_duplicates(validated, self.expected.canonical_names, set())
        self.engine.load(split_stacked(untied, self._layout))
        self._loaded_digests, self.version = digests, version

    def load_adapter(self, weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        if self._adapter is None:
            raise RolloutError(
                "load_adapter: this rollout was built without config.lora; call load_weights() with merged weights"
            )
        self.check_ready_to_load()
        if self._loaded_digests is None:
            raise RolloutError("load_adapter: the base weights are not loaded; call load_weights() first")
        self._adapter_loaded = False
        self.engine.load_adapter(self._adapter.validate(weights))
        self._adapter_loaded, self.version = True, version

    def weight_digests(self) -> Mapping[str, int]:
        """Return the checksums of the weights in vLLM.

        For a weight that vLLM fuses, shards or packs, this is the checksum of the tensor passed to vLLM's loader. The
        checksums of an adapter are always computed from the buffers that vLLM's kernels read.
        """
        self.check_ready()
        assert self._loaded_digests is not None
        weights = self.expected.weights
        stored_digests = self.engine.digests({name: weight.meta for name, weight in weights.items()})
        digests = {
            name: stored_digests.get(weights[name].names[0], value) for name, value in self._loaded_digests.items()
        }
        if self._adapter is not None:
            digests |= self.engine.adapter_digests({name: w.meta for name, w in self._adapter.weights.items()})
        return digests

    def check_ready(self) -> None:
        if self._loaded_digests is not None and not self._asleep and not self.has_weights():
            raise RolloutError("the rollout has base weights but no adapter; call load_adapter() first")
        super().check_ready()

    def has_weights(self) -> bool:
        return self._loaded_digests is not None and (self._adapter is None or self._adapter_loaded)

    def sleep(self) -> None:
        keep = self._adapter is not None and self._loaded_digests is not None
        self.engine.sleep(keep_weights=keep)
        self._asleep, self._loaded_digests, self._adapter_loaded = True, self._loaded_digests if keep else None, False

    def wake_up(self) -> None:
        self.engine.wake_up()
        self._asleep = False

    def generate_sequences(
        self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None, generated: Ragged | None = None
    ) -> Generation:
        start = time.perf_counter()
        rows: OpenRows | None = None
        requests: list[RowRequest] = []
        error: RolloutError | None = None
        try:
            rows = self.start_rows(prompts, sampling, seeds, generated)
            requests = self.build_requests(rows)
        except RolloutError as caught:  # all ranks must learn about an error before it is raised
            error = caught
        all_requests, local_rows = self._gather(requests, error)
        stop_ids = self.all_stop_ids(sampling)
        responses = self.engine.generate(all_requests, sampling, stop_ids)[local_rows] if all_requests else []
        assert rows is not None
        return rows.complete(self.build_generation(rows, responses, time.perf_counter() - start))

    @property
    def max_scored_tokens(self) -> int:
        return self.config.max_model_len - 1  # vLLM generates at least one token

    def score(
        self,
        prompts: Ragged,
        top_k: int = 0,
        candidates: Ragged | None = None,
        sampling: SamplingParams | None = None,
    ) -> PromptScores:
        requests: list[RowRequest] = []
        error: RolloutError | None = None
        try:
            self.check_ready()
            self.check_scoring(prompts, top_k, candidates, sampling, self.hf_config.get_text_config().vocab_size)
            if sampling is not None and not sampling.is_plain:
                raise UnsupportedSampling(
                    f"vLLM returns the log-probs of given tokens at temperature 1 only, got {sampling}; leave sampling "
                    "out, or use rollout.name=torch"
                )
            requests = [RowRequest(row.tolist(), 1, 0) for row in prompts.rows()]
        except RolloutError as caught:
            error = caught
        all_requests, local_rows = self._gather(requests, error)
        rows = self.engine.score([request.prompt for request in all_requests], top_k)[local_rows]
        return _to_scores(rows, top_k, prompts.values.device)

    def _gather(self, requests: list[RowRequest], error: RolloutError | None) -> tuple[list[RowRequest], slice]:
        """Return the rows of all ranks that share this engine, and the slice with the rows of this rank.

        If one rank has an error, all ranks raise an error.
        """
        group = self.engine.group
        if group is None:
            if error is not None:
                raise error
            return requests, slice(0, len(requests))
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (requests, None if error is None else str(error)), group=group)
        if error is not None:
            raise error
        for rank, (_, message) in enumerate(gathered):
            if message is not None:
                raise RolloutError(f"rank {rank} of this vLLM engine cannot generate: {message}")
        counts = [len(rows) for rows, _ in gathered]
        start = sum(counts[: dist.get_rank(group)])
        return [row for rows, _ in gathered for row in rows], slice(start, start + len(requests))


def _to_scores(rows: Sequence[tuple[Tensor, Tensor]], top_k: int, device: torch.device) -> PromptScores:
    """Return the scores of rows, given token ids and log-probs (T, 1 + k): those of the token, and the best ones."""
    log_probs = Ragged.from_rows([values[:, 0] for _, values in rows], torch.float32)
    check_finite(Ragged.from_rows([values[1:, 0] for _, values in rows], torch.float32))
    if not top_k:
        return PromptScores(log_probs).to(device)
    ids, values = (Ragged.from_rows([pair[column][:, 1:] for pair in rows]) for column in (0, 1))
    return PromptScores(log_probs, ids, values).to(device)


def _check_ranks(tensor_parallel_size: int) -> None:
    world = world_size()
    if world % tensor_parallel_size:
        raise RolloutError(
            f"the number of ranks ({world}) is not divisible by tensor_model_parallel_size={tensor_parallel_size}; set "
            f"actor_rollout_ref.rollout.tensor_model_parallel_size to a divisor of {world}"
        )


def _check_device(device: str) -> None:
    """Reject a single process on a device other than the first one, because vLLM ignores the current device."""
    torch_device = torch.device(device)
    if torch_device.type == "cpu" or world_size() > 1 or not torch.accelerator.is_available():
        return
    index = with_device_index(device).index
    if index != 0:
        raise RolloutError(
            f"the rollout's device is {torch_device.type}:{index}, but vLLM in a single process always uses "
            f"{torch_device.type}:0; set CUDA_VISIBLE_DEVICES={index} and device={torch_device.type}"
        )
