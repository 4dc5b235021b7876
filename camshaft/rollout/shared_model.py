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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.digest import QUEUE_BYTES, Digests
from camshaft.errors import RolloutError
from camshaft.models.loader import has_tokenizer, load_tokenizer, model_folder
from camshaft.rollout.base import BaseRollout, check_can_generate, check_can_load
from camshaft.rollout.weights.checks import ExpectedWeight, ExpectedWeights, empty_model

ALIGNMENT = 256
"""Weights, or groups of them, start at multiples of this number of elements of their allocation. Matrix multiplications
are faster on aligned data."""


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
        self._groups: dict[str, list[str]] = {}
        """For each weight in a group, the names of all weights of the group in order."""
        self._joined: dict[str, Tensor] = {}
        """Tensors of groups, by the first name of the group."""
        self._pools: dict[torch.dtype, Tensor] = {}
        """Memory for further copies, by dtype."""
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

    def load(self, weights: Iterable[tuple[str, Tensor]], copy: bool = False) -> None:
        """Load all weights. If this raises, the model has no weights.

        With `copy`, the model copies them into memory of its own, which later calls reuse. CUDA graphs then stay valid.
        """
        check_can_load(self._asleep)
        self._loaded_names = None
        names: set[str] = set()
        modules, copies = self._modules(), _Copies()
        for name, tensor in self.expected.validate(weights):
            weight = self.expected.weights[name]
            if names.isdisjoint(weight.names):
                if copy:
                    memory = self._own_memory(weight)
                    copies.add(memory, tensor.detach())
                else:
                    memory = tensor.detach().to(self.device, weight.meta.dtype)
                _set_tensor(modules, weight, memory)
            names.add(name)
        copies.flush()
        self._loaded_names = names

    def _own_memory(self, weight: ExpectedWeight) -> Tensor:
        """Return the memory into which a weight is copied."""
        name = weight.names[0]
        if name not in self._memory:
            group = self._groups.get(name, [name])
            size = sum(self._meta(member).numel() for member in group)
            self._place(group, self._allocate(weight.meta.dtype, size))
        return self._memory[name]

    def _allocate(self, dtype: torch.dtype, size: int) -> Tensor:
        """Return a new vector. After `join` has formed groups, vectors are parts of one allocation for all weights of a
        dtype."""
        if not self._groups:
            return torch.empty(size, dtype=dtype, device=self.device)
        if dtype not in self._pools:
            metas = [weight.meta for weight in set(self.expected.weights.values())]
            total = sum(meta.numel() + ALIGNMENT for meta in metas if meta.dtype == dtype)
            self._pools[dtype] = torch.empty(total, dtype=dtype, device=self.device)
        pool = self._pools[dtype]
        self._pools[dtype] = pool[math.ceil(size / ALIGNMENT) * ALIGNMENT :]
        return pool[:size]

    def _place(self, group: list[str], memory: Tensor) -> None:
        """Place the weights of a group next to each other in a vector."""
        shapes = [self._meta(name).shape for name in group]
        if len(group) == 1:
            self._memory[group[0]] = memory.view(shapes[0])
            return
        joined = memory.view(-1, *shapes[0][1:])
        self._joined[group[0]] = joined
        self._memory.update(zip(group, joined.split([shape[0] for shape in shapes]), strict=True))

    def _meta(self, name: str) -> Tensor:
        return self.expected.weights[name].meta

    @torch.inference_mode(False)  # because later loads write to this memory outside of inference mode
    @torch.no_grad()
    def join(self, groups: Sequence[list[str]]) -> None:
        """Store the copied weights of each group in one tensor, which `joined` returns."""
        modules = self._modules()
        for group in groups:
            names = [self.expected.weights[name].names[0] for name in group]
            if self._groups.get(names[0]) == names:
                continue
            before = [self._memory[name] for name in names]
            self._place(names, torch.cat([tensor.view(-1) for tensor in before]))
            for name in names:
                _set_tensor(modules, self.expected.weights[name], self._memory[name])
            self._groups.update(dict.fromkeys(names, names))

    def joined(self, group: Sequence[str]) -> Tensor:
        """Return the tensor that contains the weights of a group, concatenated along the first dimension."""
        return self._joined[self.expected.weights[group[0]].names[0]]

    def digests(self) -> Mapping[str, int]:
        """Return the digest of each of the model's current weights, under the names that were passed to `load`."""
        self.require_model()
        assert self._loaded_names is not None
        modules, digests = self._modules(), Digests(live=True)
        for name in self._loaded_names:
            module, _, attribute = name.rpartition(".")
            digests.add(name, getattr(modules[module], attribute))
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
            self._pools.clear()
        modules = self._modules()
        for weight in self.expected.weights.values():
            _set_tensor(modules, weight, weight.meta)

    def wake_up(self) -> None:
        """Allow `load` again. This has no effect if the model is awake."""
        self._asleep = False

    def _modules(self) -> dict[str, nn.Module]:
        """Return the modules by name; those of shared modules by each of their names."""
        return dict(self.hf.named_modules(remove_duplicate=False))


class _Copies:
    """Queued copies. A GPU executes many of them in one launch, which takes the host less time than a launch per
    copy."""

    def __init__(self) -> None:
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._num_bytes = 0

    def add(self, target: Tensor, source: Tensor) -> None:
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

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.model.load(weights, copy=self.casts_weights)

    def weight_digests(self) -> Mapping[str, int]:
        return self.model.digests()

    def sync_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        return self.model.expected.dtype_of(name) or super().sync_dtype(name, tensor)

    def sleep(self) -> None:
        self.model.sleep()

    def wake_up(self) -> None:
        self.model.wake_up()


def _set_tensor(modules: Mapping[str, nn.Module], weight: ExpectedWeight, tensor: Tensor) -> None:
    """Register `tensor` under all names of `weight` without copying it."""
    parameter = nn.Parameter(tensor, requires_grad=False) if weight.is_parameter else None
    for name in weight.names:
        module, _, attribute = name.rpartition(".")
        if parameter is None:
            modules[module]._buffers[attribute] = tensor
        else:
            modules[module]._parameters[attribute] = parameter


def load_stop_ids(folder: Path, config: PretrainedConfig, trust_remote_code: bool) -> tuple[int, ...]:
    """Return all end-of-sequence token ids of a model folder: from its generation config, config and tokenizer."""
    configs = (config, config.get_text_config())  # a composite config may have no id of its own
    sources = [getattr(part, "eos_token_id", None) for part in configs]
    if (folder / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)
    if has_tokenizer(folder):
        sources.append(load_tokenizer(str(folder), trust_remote_code).eos_token_id)
    ids: set[int] = set()
    for source in sources:
        ids.update([] if source is None else [source] if isinstance(source, int) else source)
    return tuple(sorted(ids))
