"""A transformers model whose weights belong to somebody else.

    model = SharedModel(config, attention=PACKED)
    model.load(engine.named_weights())
    model.ready().forward(...)
    model.sleep()                          # lets go of the weights

The model is built from the config of its folder, without weights. Those that come are adopted: a tensor of the
right dtype on the right device becomes the parameter itself, so that an optimizer's update in place is seen
without another `load`; any other is copied. Used by the generators that run a transformers model.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.digest import digest
from camshaft.errors import RolloutError
from camshaft.models.loader import has_tokenizer, load_tokenizer, model_folder
from camshaft.rollout.base import refuse_load, refuse_use
from camshaft.rollout.weights.checks import ExpectedWeight, ExpectedWeights, empty_model


class SharedModel:
    """The model, its weights if it has any, and the tokens that end a sequence."""

    def __init__(self, config: RolloutEngineConfig, attention: str):
        if config.engine_kwargs:
            raise RolloutError(f"the 'torch' and 'hf' rollouts take no engine_kwargs, got {dict(config.engine_kwargs)}")
        self.device = torch.device(config.device)
        self.hf: PreTrainedModel = empty_model(config, attention)
        for buffer in self.hf.buffers():
            buffer.data = buffer.data.to(self.device)
        self._folder, self._trust = model_folder(config.model_path), config.trust_remote_code
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self.stop_ids = stop_ids_of(self._folder, self.hf.config, self._trust)
        self.expected = ExpectedWeights.of_model(self.hf)
        self._came: set[str] | None = None
        self._asleep = False

    @property
    def num_embeddings(self) -> int:
        """Token ids are below this number."""
        embeddings: Any = self.hf.get_input_embeddings()
        return embeddings.weight.shape[0]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The folder's, read when it is first asked for."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(str(self._folder), self._trust)
        return self._tokenizer

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Adopt all weights; until the last one has come without an error, the model has none."""
        refuse_load(self._asleep)
        self._came = None
        came: set[str] = set()
        for name, tensor in self.expected.validate(weights):
            weight = self.expected.weights[name]
            if not came & set(weight.names):
                _put(self.hf, weight, tensor.detach().to(self.device, weight.meta.dtype))
            came.add(name)
        self._came = came

    def digests(self) -> Mapping[str, int]:
        """Of the weights where the model has them, each under the names that it came under."""
        held = self.ready().state_dict()
        assert self._came is not None
        return {name: digest(held[name]) for name in self._came}

    def ready(self) -> PreTrainedModel:
        """The model, if it can generate."""
        refuse_use(self._asleep, self._came is not None)
        return self.hf

    def sleep(self) -> None:
        """Let go of the weights; what was copied is freed."""
        self._asleep, self._came = True, None
        for weight in self.expected.weights.values():
            _put(self.hf, weight, weight.meta)

    def wake_up(self) -> None:
        """Be ready to take weights; nothing happens to a model that is awake."""
        self._asleep = False


def _put(hf: nn.Module, weight: ExpectedWeight, tensor: Tensor) -> None:
    """Let all places of `weight` hold `tensor` itself."""
    held = nn.Parameter(tensor, requires_grad=False) if weight.is_parameter else tensor
    for name in weight.names:
        owner, _, leaf = name.rpartition(".")
        if isinstance(held, nn.Parameter):
            hf.get_submodule(owner).register_parameter(leaf, held)
        else:
            hf.get_submodule(owner).register_buffer(leaf, held)


def stop_ids_of(folder: Path, config: PretrainedConfig, trust_remote_code: bool) -> tuple[int, ...]:
    """All that the folder calls an end of sequence: its generation config, its config and its tokenizer."""
    sources = [config.eos_token_id, config.get_text_config().eos_token_id]
    if (folder / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)
    if has_tokenizer(folder):
        sources.append(load_tokenizer(str(folder), trust_remote_code).eos_token_id)
    ids: set[int] = set()
    for source in sources:
        ids.update([] if source is None else [source] if isinstance(source, int) else source)
    return tuple(sorted(ids))
