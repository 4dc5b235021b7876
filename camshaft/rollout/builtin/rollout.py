"""The built-in generator, which runs the transformers model itself on the training weights with continuous batching.

    rollout = TorchRollout(RolloutEngineConfig(model_path="models/tiny"))
    rollout.load_weights(engine.named_weights())
    rollout.generate_sequences(prompts, SamplingParams(max_tokens=64))

This module contains no code for particular model families. The model's forward runs with the "packed" attention on the
KV cache of `kv_cache.py`. Weights that have the right dtype and device are shared with the engine, not copied.
`scheduler.py` schedules the rows of a call. `cpu/traced_decoder.py` computes decode steps; on a GPU with
`enforce_eager=false`, `cuda/graphs.py` computes them.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from camshaft.config.backends import TORCH
from camshaft.config.families.support import RESETS_STATE, rope_limit, unsupported
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.device import memory_info
from camshaft.errors import RolloutError
from camshaft.models.attention import PACKED, config_values, packed_kwargs
from camshaft.models.loader import import_external, load_config, model_folder
from camshaft.models.packing import Packing
from camshaft.models.recurrent import pack_recurrent_layers
from camshaft.models.routing import Routers, find_routers, supported_models
from camshaft.ragged import Ragged
from camshaft.rollout.base import Generation, OpenRows, SamplingParams, check_finite
from camshaft.rollout.builtin.cpu.linears import has_packed, use_packable_linears
from camshaft.rollout.builtin.cpu.traced_decoder import Decoder
from camshaft.rollout.builtin.cuda.graphs import build_graph_decoder
from camshaft.rollout.builtin.kept_rows import KeptRows
from camshaft.rollout.builtin.kv_cache import KVCache
from camshaft.rollout.builtin.routed_experts import RoutingRecorder
from camshaft.rollout.builtin.scheduler import GenerationOptions, Scheduler
from camshaft.rollout.builtin.steps import PrefillStep
from camshaft.rollout.builtin.stream import TorchStream
from camshaft.rollout.shared_model import SharedModel, SharedModelRollout
from camshaft.rollout.stop_strings import StopStrings, has_stop
from camshaft.rollout.stream import Stream, WaveStream

FREE_SHARE = 0.9
"""Share of the free device memory that the KV cache and sampling may use. The rest is for activations."""

SAMPLING_BYTES = 40
"""Bytes per row and vocabulary entry for logits and sampling. Sampling with `top_p` allocates 33 bytes, counted."""


class TorchRollout(SharedModelRollout):
    """Generate with continuous batching. A row's samples depend on its seed and prompt, not on other rows."""

    capabilities = TORCH

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        _reject_unpackable(config)
        self.model = SharedModel(config, attention=PACKED)
        _reject_own_attention(self.model.hf)
        _reject_dynamic_rope(self.model.hf.config, config.max_model_len)
        pack_recurrent_layers(self.model.hf)
        if self.model.device.type == "cpu":
            use_packable_linears(self.model.hf)
        self.decoder = Decoder(self.model.hf)
        self.cache = KVCache(self.model.hf.config, config.max_model_len)
        self.kept = KeptRows()
        self.graphs = build_graph_decoder(self.decoder, self.cache, config, self.model)
        self.routers = self._find_routers() if config.enable_return_routed_experts else None
        if self.routers is not None:  # the choices of kept tokens are not recorded
            self.capabilities = replace(TORCH, keeps_rows=False)

    @property
    def casts_weights(self) -> bool:
        # Fused decode steps read joined copies of the weights. Graphs that outlive `sleep` read the memory that
        # they have captured. Otherwise, weights are shared.
        return self.graphs is not None and (self.graphs.fused is not None or not self.config.free_cache_engine)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        self.kept.clear()
        self.decoder.copies = {}
        super().load_weights(weights, version)

    def close_rows(self, row_ids: Iterable[Hashable]) -> None:
        self.kept.close(row_ids)
        if not self.kept.num_bytes and not has_packed(self.model.hf):  # others may be generated in a stream
            self.decoder.copies = {}

    def generate_sequences(
        self,
        prompts: Ragged,
        sampling: SamplingParams,
        seeds: Tensor | None = None,
        generated: Ragged | None = None,
        row_ids: Sequence[Hashable] | None = None,
    ) -> Generation:
        rows = self._open_call(prompts, sampling, seeds, generated)
        if not len(rows.prompts):
            return rows.complete(Generation.empty(prompts))
        ids = None if row_ids is None else self._open_ids(row_ids, rows)
        recorder = None if self.routers is None else RoutingRecorder(self.routers, len(rows.prompts))
        with self._scheduler(sampling, rows.contexts.lengths + rows.limits, ids is not None, recorder) as scheduler:
            scheduler.add(rows, ids)
            generation = scheduler.generate()
            check_finite(generation.log_probs)
        generation = generation.to(prompts.values.device)
        if ids is not None:
            for row_id, *parts in zip(ids, rows.contexts.rows(), generation.responses.rows(), strict=True):
                self.kept.set_tokens(row_id, torch.cat(parts)[:-1])  # the last token has not been computed
        return rows.complete(generation)

    def plan_batches(self, lengths: list[int], max_tokens: int) -> Iterator[list[int]]:
        batch, total = list[int](), 0
        for row, length in enumerate(lengths):
            if batch and total + length > max_tokens:
                yield batch
                batch, total = [], 0
            batch.append(row)
            total += length
        yield batch

    def compute_logits(self, hf: PreTrainedModel, rows: Ragged) -> Tensor:
        kwargs = packed_kwargs(Packing(rows.lengths.tolist()), rows.values.device)
        return hf(input_ids=rows.values[None], **kwargs).logits[0]

    def open_stream(self) -> Stream:
        if self.routers is not None:
            return WaveStream(self)
        lengths = torch.full([self.config.max_num_seqs], self.config.max_model_len)
        return TorchStream(self, self._open_call, partial(self._scheduler, lengths=lengths, keeps=True))

    def _open_call(
        self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None, generated: Ragged | None
    ) -> OpenRows:
        """Validate the arguments of a call, and return its rows that have not ended."""
        self.model.require_model()
        ends = partial(has_stop, stop_ids=self._stop_ids(sampling), stops=self._stop_strings(sampling))
        return self.open_rows(prompts, sampling, seeds, generated, self.model.num_embeddings, ends)

    @contextmanager
    def _scheduler(
        self, sampling: SamplingParams, lengths: Tensor, keeps: bool, recorder: RoutingRecorder | None = None
    ) -> Iterator[Scheduler]:
        """Yield a scheduler without rows, given the maximum lengths of the rows that may be live at once."""
        num_slots = self._allocate_slots(lengths, keeps and recorder is None)
        options = GenerationOptions(sampling, self._stop_ids(sampling), num_slots, self._stop_strings(sampling), keeps)
        kept = None if recorder is not None else self.kept
        try:
            yield Scheduler(self.graphs or self.decoder, self.cache, options, self.config, recorder, kept)
        except BaseException:
            self.cache.clear()  # masked positions must not contain NaN
            self.kept.clear()
            self.decoder.copies = {}
            raise
        if not self.kept.num_bytes:
            self.decoder.copies = {}

    def _stop_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        return (() if sampling.ignore_eos else self.model.stop_ids) + sampling.stop_token_ids

    def _stop_strings(self, sampling: SamplingParams) -> StopStrings | None:
        return StopStrings(self.model.tokenizer, sampling.stop) if sampling.stop else None

    def _open_ids(self, row_ids: Sequence[Hashable], rows: OpenRows) -> list[Hashable]:
        """Return the ids of the rows that have not ended."""
        if len(row_ids) != len(rows.is_open) or len(set(row_ids)) != len(row_ids):
            raise RolloutError(
                f"row_ids has {len(set(row_ids))} different ids for {len(rows.is_open)} prompts; pass one id per prompt"
            )
        return [row_id for row_id, is_open in zip(row_ids, rows.is_open.tolist(), strict=True) if is_open]

    def cache_budget(self) -> int | None:
        """Return the bytes that the KV cache and sampling may use, or None if they are not limited."""
        memory = memory_info(self.model.device)
        if memory is None:
            return None
        free, total = memory
        free += self.cache.num_bytes + self.kept.num_bytes
        return cache_budget(free, total, self.config.gpu_memory_utilization, self.model.num_bytes)

    def _allocate_slots(self, lengths: Tensor, keeps: bool) -> int:
        """Return the number of rows that are decoded at once, given their maximum lengths. Other rows wait."""
        num_rows = min(self.config.max_num_seqs, len(lengths))
        budget = self.cache_budget()
        if budget is None:
            return num_rows
        if keeps:
            budget = self.kept.limit(budget)
        else:
            self.kept.clear()  # the budget includes their memory
        if not self.cache.position_bytes:
            self._measure_cache()
        longest = int(lengths.max()) - 1
        row_bytes, keep = SAMPLING_BYTES * self.model.num_embeddings, not self.config.free_cache_engine
        return self.cache.allocate(num_rows, longest, budget, row_bytes, keep)

    @torch.inference_mode()
    def _measure_cache(self) -> None:
        """Compute one token, so that the sizes of the keys and values of each layer are known."""
        self.cache.reserve(1, 1)
        step = PrefillStep(self.cache, [1], [0], [0], self.model.device)
        self.model.hf(
            input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self.model.device), slots=step, **step.kwargs
        )
        self.cache.clear()

    def _find_routers(self) -> Routers:
        """Return the routers whose choices are recorded. The recording hooks prevent traced decode steps."""
        routers, key = find_routers(self.model.hf), "enable_return_routed_experts=true"
        if routers is None:
            raise RolloutError(
                f"{key} requires a mixture of experts with supported routers ({supported_models()}), which "
                f"{self.config.model_path} is not; set it to false and router_replay.mode to disabled"
            )
        if self.graphs is not None:
            raise RolloutError(f"{key} is not supported with CUDA graphs; set enforce_eager=true")
        return routers

    def sleep(self) -> None:
        self.kept.clear()
        self.decoder.copies = {}
        self.model.sleep(keep_copies=not self.config.free_cache_engine)
        if self.config.free_cache_engine:
            self.cache.clear()
            if self.graphs is not None:
                self.graphs.release()


def cache_budget(free: int, total: int, utilization: float, model_bytes: int) -> int:
    """Return the bytes of device memory that the KV cache and sampling may use.

    The model and the KV cache use at most the share `utilization` of the memory, and the KV cache at most a share of
    the memory that is free.
    """
    return min(int(utilization * total) - model_bytes, int(FREE_SHARE * free))


def _reject_unpackable(config: RolloutEngineConfig) -> None:
    """Reject a model that does not support packed rows, before it is built."""
    import_external(config.external_lib)
    hf_config = load_config(model_folder(config.model_path), config.trust_remote_code, config.override_config)
    values = config_values(hf_config)
    if reasons := unsupported("packed rows", values):
        raise RolloutError(
            f"{values['model_type']} models have {' and '.join(reasons)}, which rollout.name=torch does not support; "
            "set rollout.name=hf"
        )


def _reject_own_attention(hf: PreTrainedModel) -> None:
    """Reject a model that does not read earlier tokens from the KV cache."""
    if hf.config.get_text_config().model_type in RESETS_STATE:
        return
    if hf._is_stateful or not hf.is_backend_compatible():
        raise RolloutError(
            f"{type(hf).__name__} has a recurrent state or its own attention code, which rollout.name=torch does not "
            "support; set rollout.name=hf"
        )


def _reject_dynamic_rope(config: PretrainedConfig, max_model_len: int) -> None:
    """Reject rotary frequencies that depend on the longest row of a batch if rows may become long enough."""
    limit = rope_limit(config_values(config))
    if limit is not None and max_model_len > limit.tokens:
        raise RolloutError(
            f"max_model_len={max_model_len} is unsupported: {config.get_text_config().model_type} has "
            f"'{limit.rope_type}' rotary frequencies, which change for all rows when one row exceeds {limit.tokens} "
            f"tokens ({limit.key}); set max_model_len={limit.tokens} or less"
        )
