"""Inputs of the reward model: token ids of the policy, or conversations formatted with its own chat template.

    to_input = SameTokens(max_length, pad)                                           # input_tokenizer=null
    to_input = OtherTemplate(max_length, pad, policy_tokenizer, reward_tokenizer)
    inputs = to_input(batch)                                                         # inputs.ids, inputs.truncated

As in `AutoModelForSequenceClassification`, the model reads the score at the last token that is not `pad_token_id` of
its config. Batches have no padding, so a sequence ends with pad tokens only if its text does, for example if a model
uses its end-of-turn token for padding. These pad tokens are removed; causal attention guarantees that they do not
affect the score. All other text that a template adds after the response is kept, including a newline, because the model
was trained with it.

A sequence that is too long is truncated on the left, because the response is at the end. A beginning-of-sequence token
is kept. `truncated` marks the truncated rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from camshaft.data.chat import Message, encode, render, strip_padding, truncate_left
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError, EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RewardInputs:
    """Input sequences of the reward model for the rows of a batch."""

    ids: Ragged
    truncated: Tensor
    """(B,) bool: True for rows that were truncated."""


class RewardInput(ABC):
    """Base class of conversions from prompts and responses to inputs of the reward model."""

    def __init__(self, max_length: int, pad: int | None, bos: int | None = None):
        self.max_length, self.pad, self.bos = max_length, pad, bos

    def __call__(self, data: DataProto) -> RewardInputs:
        rows = [strip_padding(row, self.pad) for row in self.rows(data)]
        truncated = torch.tensor([len(ids) > self.max_length for ids in rows], dtype=torch.bool)
        inputs = [truncate_left(ids, self.max_length, self.bos) for ids in rows]
        return RewardInputs(Ragged.from_rows(inputs, torch.int64), truncated)

    @abstractmethod
    def rows(self, data: DataProto) -> list[list[int]]:
        """Return the token ids of each row before truncation."""


class SameTokens(RewardInput):
    """Input for a reward model with the tokenizer and chat template of the policy: the token ids of the policy."""

    def rows(self, data: DataProto) -> list[list[int]]:
        return [row.tolist() for row in Ragged.join(data.ragged("prompts"), data.ragged("responses")).rows()]


class OtherTemplate(RewardInput):
    """Input for a reward model with a different tokenizer or chat template: the conversation in its own template.

    Responses are decoded without special tokens, because the template adds those of the reward model. The messages of
    the prompt come from `raw_prompt`. If the prompt is plain text, or only `raw_input_ids` exists, the prompt becomes
    one user message.
    """

    def __init__(
        self, max_length: int, pad: int | None, policy: PreTrainedTokenizerBase, reward: PreTrainedTokenizerBase
    ):
        super().__init__(max_length, pad, get_bos_token_id(reward))
        self.policy, self.reward = policy, reward
        if not reward.chat_template:
            raise EngineError(
                f"the tokenizer of the reward model ({reward.name_or_path or 'unnamed'}) has no chat template; add one "
                "to its folder, or set reward_model.model.input_tokenizer=null if the model reads the token ids of the "
                "policy"
            )

    def rows(self, data: DataProto) -> list[list[int]]:
        responses = self._texts(data.ragged("responses"))
        texts = [
            render([*messages, {"role": "assistant", "content": response}], self.reward, f"row {row}", False)
            for row, (messages, response) in enumerate(zip(self._prompts(data), responses, strict=True))
        ]
        ids = encode(texts, self.reward, special_tokens=False)
        empty = next((row for row, tokens in enumerate(ids) if not tokens), None)
        if empty is not None:
            raise BatchError(
                f"row {empty}: the chat template of the reward model formats the conversation as {texts[empty]!r}, "
                "which has no tokens"
            )
        return ids

    def _prompts(self, data: DataProto) -> list[list[Message]]:
        if "raw_prompt" in data:
            return [_as_messages(prompt) for prompt in data["raw_prompt"]]
        data.require("raw_input_ids")
        return [_as_messages(text) for text in self._texts(data.ragged("raw_input_ids"))]

    def _texts(self, ids: Ragged) -> list[str]:
        texts: Any = self.policy.batch_decode([row.tolist() for row in ids.rows()], skip_special_tokens=True)
        return texts


def get_bos_token_id(tokenizer: Any) -> int | None:
    """Return the beginning-of-sequence token of a tokenizer, or None."""
    return tokenizer.bos_token_id


def _as_messages(prompt: str | list[Message]) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
