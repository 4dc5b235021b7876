"""A transformers model that shares its weights with the training engine.

    model = SharedModel(config, attention=PACKED)
    model.load(engine.named_weights())
    model.require_model().forward(...)
    model.sleep()                          # releases the weights

The model is built without weights from the config in its folder. A loaded tensor that already has the right dtype and
device becomes the parameter itself, so an in-place optimizer update is visible without another `load`. Any other tensor
is copied; with `copy=True`, every tensor is. The rollouts that run a transformers model (`torch` and `hf`) use this
module.
"""

import functools
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.digest import QUEUE_BYTES, Digests
from camshaft.errors import RolloutError
from camshaft.models.loader import has_tokenizer, load_generation_eos, load_tokenizer, model_folder
from camshaft.ragged import Ragged
from camshaft.rollout.base import BaseRollout, SamplingParams, check_can_generate, check_can_load, check_finite
from camshaft.rollout.scoring import CALL_LOGITS, PromptScores, score_tokens
from camshaft.rollout.weights.checks import ExpectedWeight, ExpectedWeights, empty_model

ALIGNMENT = 256
"""Weights, or groups of them, start at multiples of this number of elements of their allocation. Matrix multiplications
are faster on aligned data."""


LARGE_BYTES = 2**24
"""Weights whose source has at least this size are copied one by one. On an H200, a copy of one tensor moves 4.0 TB/s,
and a copy of many tensors 3.5 TB/s. A launch takes the host about as long as the GPU takes to copy this many bytes."""


class SharedModel:
    """A transformers model, its loaded weights, its tokenizer and its end-of-sequence tokens."""

    def __init__(self, config: RolloutEngineConfig, attention: str):
        if config.engine_kwargs:
            raise RolloutError(
                f"the 'torch' and 'hf' rollouts accept no engine_kwargs, got {dict(config.engine_kwargs)}; remove them"
            )
        self.device = torch.device(config.device)
        self.hf: PreTrainedModel = empty_model(config, attention)
        for buffer in self.hf.buffers():
            buffer.data = buffer.data.to(self.device)
        self._folder, self._trust = model_folder(config.model_path), config.trust_remote_code
        self.stop_ids = load_stop_ids(self._folder, self.hf.config, self._trust)
        self.expected = ExpectedWeights.from_model(self.hf)
        self._loaded_names: set[str] | None = None
        self._memory: dict[str, Tensor] = {}
        """Copied weights, by name."""
        self._groups: dict[str, _Group] = {}
        """The group of each weight, by the weight's first name; empty before `join`. Most groups have one weight."""
        self._joined: dict[str, Tensor] = {}
        """Tensors of groups, by the first name of the group."""
        self._parts: dict[_Group, Tensor] = {}
        """Allocated memory of groups whose weights are still to be copied."""
        self._asleep = False

    @property
    def num_embeddings(self) -> int:
        """Number of rows of the embedding. All token ids are below it."""
        embeddings: Any = self.hf.get_input_embeddings()
        return embeddings.weight.shape[0]

    @property
    def num_bytes(self) -> int:
        """Size of the weights in bytes. Weights that the training engine shares are included."""
        return sum(parameter.nbytes for parameter in self.hf.parameters())

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model folder, loaded on first use."""
        return load_tokenizer(str(self._folder), self._trust)

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]], copy: bool = False) -> None:
        """Load all weights. If this raises, the model has no weights.

        With `copy`, the model copies them into memory of its own, which later calls reuse. CUDA graphs then stay valid.
        """
        check_can_load(self._asleep)
        self._loaded_names = None
        names: set[str] = set()
        copies = _Copies()
        for name, tensor in self.expected.validate(weights):
            weight = self.expected.weights[name]
            if names.isdisjoint(weight.names):
                if copy:
                    memory = self._own_memory(weight)
                    copies.add(memory, tensor)
                else:
                    memory = tensor.detach().to(self.device, weight.meta.dtype)
                self._set(weight, memory)
            names.add(name)
        copies.flush()
        self._loaded_names = names

    def _own_memory(self, weight: ExpectedWeight) -> Tensor:
        """Return the memory into which a weight is copied."""
        name = weight.names[0]
        if name not in self._memory:
            group = self._groups.get(name)
            if group is None:
                self._memory[name] = torch.empty(weight.meta.shape, dtype=weight.meta.dtype, device=self.device)
            else:
                if group not in self._parts:
                    self._allocate()
                self._place(group, self._parts.pop(group))
        return self._memory[name]

    def _allocate(self) -> None:
        """Allocate one tensor per dtype for the copies of all weights, and divide it among the groups."""
        self._parts.clear()  # an earlier call may have failed after the first dtype
        by_dtype: dict[torch.dtype, list[_Group]] = {}
        for group in dict.fromkeys(self._groups.values()):
            by_dtype.setdefault(group.dtype, []).append(group)
        for dtype, groups in by_dtype.items():
            sizes = [math.ceil(group.size / ALIGNMENT) * ALIGNMENT for group in groups]
            memory = torch.empty(sum(sizes), dtype=dtype, device=self.device)
            for group, part in zip(groups, memory.split(sizes), strict=True):
                self._parts[group] = part[: group.size]

    def _place(self, group: "_Group", memory: Tensor) -> None:
        """Place the weights of a group next to each other in a vector."""
        tensor = memory.view(group.shape)
        if len(group.names) == 1:
            self._memory[group.names[0]] = tensor
        else:
            self._joined[group.names[0]] = tensor
            self._memory.update(zip(group.names, tensor.split(group.rows), strict=True))

    @torch.inference_mode(False)  # because later loads write to this memory outside of inference mode
    @torch.no_grad()
    def join(self, groups: Sequence[list[str]]) -> None:
        """Store the copied weights of each group in one tensor, which `joined` returns."""
        weights = self.expected.weights
        if not self._groups:
            self._groups = {name: _Group.of([weights[name]]) for name in self.expected.canonical_names.values()}
        for names in groups:
            group = _Group.of([weights[name] for name in names])
            if self._groups[group.names[0]].names == group.names:
                continue
            self._place(group, torch.cat([self._memory[name].view(-1) for name in group.names]))
            for name in group.names:
                self._set(weights[name], self._memory[name])
            self._groups.update(dict.fromkeys(group.names, group))

    def joined(self, group: Sequence[str]) -> Tensor:
        """Return the tensor that contains the weights of a group, concatenated along the first dimension."""
        return self._joined[self.expected.weights[group[0]].names[0]]

    def digests(self) -> Mapping[str, int]:
        """Return the digest of each of the model's current weights, under the names that were passed to `load`."""
        self.require_model()
        assert self._loaded_names is not None
        digests = Digests(live=True)
        for name in self._loaded_names:
            members, attribute = self._members[name]
            digests.add(name, members[attribute])
        return digests.numbers()

    def require_model(self) -> PreTrainedModel:
        """Return the model; raise `RolloutError` if the rollout is asleep or has no weights."""
        check_can_generate(self._asleep, self._loaded_names is not None)
        return self.hf

    def sleep(self, keep_copies: bool = False) -> None:
        """Release the weights. With `keep_copies`, the memory of copied weights stays allocated."""
        self._asleep, self._loaded_names = True, None
        if not keep_copies:
            self._memory.clear()
            self._joined.clear()
            self._parts.clear()
        for weight in set(self.expected.weights.values()):
            self._set(weight, weight.meta)

    def wake_up(self) -> None:
        """Allow `load` again. This has no effect if the model is awake."""
        self._asleep = False

    def _set(self, weight: ExpectedWeight, tensor: Tensor) -> None:
        """Register `tensor` under all names of `weight` without copying it."""
        value = nn.Parameter(tensor, requires_grad=False) if weight.is_parameter else tensor
        for name in weight.names:
            members, attribute = self._members[name]
            members[attribute] = value

    @functools.cached_property
    def _members(self) -> dict[str, tuple[dict[str, Any], str]]:
        """For each name of a weight, the dict of its module that contains it, and its key in this dict."""
        modules = dict(self.hf.named_modules(remove_duplicate=False))
        members: dict[str, tuple[dict[str, Any], str]] = {}
        for name, weight in self.expected.weights.items():
            owner, _, attribute = name.rpartition(".")
            module = modules[owner]
            members[name] = (module._parameters if weight.is_parameter else module._buffers), attribute
        return members


@dataclass(frozen=True, eq=False)
class _Group:
    """Weights that are stored in one tensor, concatenated along the first dimension."""

    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the tensor."""
    size: int
    """Number of elements."""
    rows: tuple[int, ...]
    """Size of the first dimension of each weight."""

    @classmethod
    def of(cls, weights: Sequence[ExpectedWeight]) -> Self:
        shapes = [tuple(weight.meta.shape) for weight in weights]
        rows = tuple(shape[0] if shape else 1 for shape in shapes)
        shape = shapes[0] if len(weights) == 1 else (sum(rows), *shapes[0][1:])
        names = tuple(weight.names[0] for weight in weights)
        return cls(names, weights[0].meta.dtype, shape, math.prod(shape), rows)


class _Copies:
    """Copies of weights. Copies of small weights are queued, because a GPU executes many of them in one launch, which
    takes the host less time than a launch per copy."""

    def __init__(self) -> None:
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._num_bytes = 0

    def add(self, target: Tensor, source: Tensor) -> None:
        if source.nbytes >= LARGE_BYTES:
            target.copy_(source)
            return
        self._targets.append(target)
        self._sources.append(source)
        self._num_bytes += source.nbytes
        if self._num_bytes >= QUEUE_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)  # pyright: ignore[reportPrivateImportUsage]
        self._targets, self._sources, self._num_bytes = [], [], 0


class SharedModelRollout(BaseRollout):
    """Base class of rollouts that run a `SharedModel`."""

    model: SharedModel

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        self.model.load(weights, copy=self.casts_weights)
        self.version = version

    def weight_digests(self) -> Mapping[str, int]:
        return self.model.digests()

    @torch.inference_mode()
    def score(
        self,
        prompts: Ragged,
        top_k: int = 0,
        candidates: Ragged | None = None,
        sampling: SamplingParams | None = None,
    ) -> PromptScores:
        hf, vocabulary = self.model.require_model(), self.model.num_embeddings
        self.check_scoring(prompts, top_k, candidates, sampling, vocabulary)
        restrict = (SamplingParams(1) if sampling is None else sampling).restrict
        if not len(prompts):
            return score_tokens(prompts, torch.empty(0, vocabulary), restrict, top_k, candidates)
        limit = min(self.config.max_num_batched_tokens, max(1, CALL_LOGITS // vocabulary))
        plan, parts = list(self.plan_batches(prompts.lengths.tolist(), limit)), list[PromptScores]()
        for batch in plan:
            index = torch.tensor(batch)
            rows = prompts.select(index).to(self.model.device)
            ids = None if candidates is None else candidates.select(index).to(self.model.device)
            scores = score_tokens(rows, self.compute_logits(hf, rows), restrict, top_k, ids)
            has_score = rows.positions() > 0
            check_finite(scores.log_probs.map(lambda x, has=has_score: x.where(has & ~x.isneginf(), 0.0)))
            parts.append(scores.to(prompts.values.device))
        order = torch.tensor([row for batch in plan for row in batch]).argsort()
        return PromptScores.concat(parts).select(order)

    @abstractmethod
    def plan_batches(self, lengths: list[int], max_tokens: int) -> Iterator[list[int]]:
        """Yield the rows of each model call. A call on several rows has at most `max_tokens` tokens."""

    @abstractmethod
    def compute_logits(self, hf: PreTrainedModel, rows: Ragged) -> Tensor:
        """Compute the logits (N, V) after each token of packed rows, with one model call."""

    def sync_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        return self.model.expected.dtype_of(name) or super().sync_dtype(name, tensor)

    def sleep(self) -> None:
        self.model.sleep()

    def wake_up(self) -> None:
        self.model.wake_up()


def load_stop_ids(folder: Path, config: PretrainedConfig, trust_remote_code: bool) -> tuple[int, ...]:
    """Return all end-of-sequence token ids of a model folder: from its generation config, config and tokenizer."""
    configs = (config, config.get_text_config())  # a composite config may have no id of its own
    sources = [getattr(part, "eos_token_id", None) for part in configs]
    sources.append(load_generation_eos(folder))
    if has_tokenizer(folder):
        sources.append(load_tokenizer(str(folder), trust_remote_code).eos_token_id)
    ids: set[int] = set()
    for source in sources:
        ids.update([] if source is None else [source] if isinstance(source, int) else source)
    return tuple(sorted(ids))
