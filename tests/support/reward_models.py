"""Tiny reward models, their scores in transformers, and custom reward workers.

make_tiny_reward_model(folder)                            # reads the tokens of the other tiny models
make_tiny_reward_model(folder, template=NEWLINE, turned=True)     # other token ids and another template
scored(folder)                                            # config keys of a run with a new reward model
hf_scores(folder, [[3, 4, 5], [6]])
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from camshaft.controller import Dispatch, Worker, register
from camshaft.dataproto import DataProto
from camshaft.models.loader import quiet_transformers
from camshaft.models.tiny import CHARACTERS, make_tiny_model
from camshaft.ragged import on_last_token
from camshaft.roles import RewardModelWorker

SPREAD = 0.1

NEWLINE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}: {{ message['content'] }}<|im_end|>\n{% endfor %}"
)
"""Full role names and a newline after each turn, so the last token is not an end-of-turn token."""


def make_tiny_reward_model(
    folder: Path, template: str | None = None, turned: bool = False, seed: int = 5, **config: Any
) -> Path:
    """Write a sequence classifier with one label; `turned` reverses the token ids of the characters."""
    make_tiny_model(folder, "llama", hidden=32, seed=seed, initializer_range=SPREAD, **config)
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(folder)
    if turned:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        numbers = [vocabulary[character] for character in CHARACTERS]
        vocabulary.update(zip(CHARACTERS, reversed(numbers), strict=True))
        path.write_text(json.dumps(content), encoding="utf-8")
    if template is not None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
    return folder


def scored(folder: Path) -> dict[str, Any]:
    """Write a tiny reward model, and return the overrides of a run that adds its scores to the rewards."""
    path = make_tiny_reward_model(folder)
    return {"reward_model.enable": True, "reward_model.model.path": path, "reward_model.micro_batch_size_per_gpu": 4}


def hf_scores(folder: Path, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return (B,) logits of transformers, one row at a time."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return torch.stack([model(torch.tensor([list(row)])).logits[0, 0] for row in rows])


class LengthReward(Worker):
    """A worker without engine and model, which scores a response by its number of tokens."""

    def __init__(self, config: Any, topology: Any):
        self.scale = 0.0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.scale = 1.0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        lengths = data.ragged("responses").lengths.float()
        return DataProto.from_dict({"rm_scores": on_last_token(self.scale * lengths, data.ragged("response_mask"))})


class Negated(RewardModelWorker):
    """The reward model of the package with negated scores."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        scores = super().compute_rm_score(data)
        return scores.with_columns(rm_scores=scores.ragged("rm_scores").map(Tensor.neg))


class IncompleteReward(Worker):
    """A worker without the scoring method."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None: ...
