"""Tiny models and batches for tests. Folders are written once per session and shared, so treat them as read-only.

folder = tiny_folder("llama", sliding_window=4)
batch = tiny_batch([5, 1, 7])                # DataProto with input_ids and loss_mask
"""

import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from camshaft.dataproto import DataProto, Ragged
from camshaft.models.tiny import VOCABULARY_ROWS, make_tiny_model, make_tiny_tokenizer

LINEAR: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
"""Sizes of a model with gated linear attention."""

DECODED: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {"tie_embeddings": False},
    "qwen3": {"kv_heads": 4},
    "mistral": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 8},
    "gpt2": {},
    "qwen3_next": {**LINEAR, "num_experts": 0},
}
"""Families with different decode steps: separate and shared key heads, windows, norms, rotations, recurrent states."""

WINDOWED: dict[str, Any] = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}

CHANGED_SCORES: dict[str, dict[str, Any]] = {
    "gemma2": {**WINDOWED, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gpt_oss": {
        **WINDOWED,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}
"""Families with soft-caps and with attention sinks, and low caps."""

# Removed when the interpreter ends, or by `conftest.py`.
HOME = tempfile.TemporaryDirectory(prefix="camshaft-tiny-")


@cache
def tiny_tokenizer_folder() -> Path:
    """Return a folder with only the tokenizer."""
    folder = Path(HOME.name) / "tokenizer"
    make_tiny_tokenizer(folder)
    return folder


def tiny_folder(family: str = "qwen2", **sizes: Any) -> Path:
    """Return a model folder with the given arguments of `make_tiny_model`; equal arguments share one folder."""
    return _tiny_folder(family, json.dumps(sizes, sort_keys=True))


@cache
def _tiny_folder(family: str, sizes: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"{family}-", dir=HOME.name))
    return make_tiny_model(folder, family, **json.loads(sizes))


def tiny_rows(lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
    """Return rows of random tokens of a tiny model."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY_ROWS, (length,), generator=generator) for length in lengths]


def predicted_tokens(lengths: Sequence[int]) -> Tensor:
    """Return `at` for all tokens that follow another token of their row."""
    ids = Ragged(torch.zeros(sum(lengths)), torch.tensor(lengths))
    return ids.positions().nonzero().squeeze(-1)


def tiny_batch(lengths: Sequence[int] = (5, 3, 9, 1), seed: int = 0) -> DataProto:
    """Return random rows of these lengths; the loss counts all tokens but the first two of each row."""
    ids = Ragged.from_rows(tiny_rows(lengths, seed), dtype=torch.int64)
    return DataProto.from_dict({"input_ids": ids, "loss_mask": ids.like(ids.positions() >= 2)})
