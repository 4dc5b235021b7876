"""Inputs of the reward model: the policy's token ids, or the conversation in the reward model's chat template.

    to_input = SameTokens(max_length, pad)                                           # input_tokenizer=null
    to_input = OtherTemplate(max_length, pad, policy_tokenizer, reward_tokenizer)
    inputs = to_input(batch)                                                         # inputs.ids, inputs.truncated

The score belongs to the last token that is not the pad token of the model's config, as in
`AutoModelForSequenceClassification`. Batches have no padding, so pad tokens occur at the end only if the text has them,
for example if a model pads with its end-of-turn token. Causal attention hides them from all tokens before, and they are
removed. All other text that a template writes after the response is kept, including a newline: the model was trained
with it.

A sequence that is too long loses its first tokens, because the response and the score are at its end. A
beginning-of-sequence token is kept. `truncated` marks these rows.
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
    """The rows of a batch as inputs of the reward model."""

    ids: Ragged
    truncated: Tensor
    """(B,) bool: the row was too long and lost its first tokens."""


class RewardInput(ABC):
    """Converts rows of prompt and response to rows of the reward model."""

    def __init__(self, max_length: int, pad: int | None, bos: int | None = None):
        self.max_length, self.pad, self.bos = max_length, pad, bos

    def __call__(self, data: DataProto) -> RewardInputs:
        rows = [strip_padding(row, self.pad) for row in self.rows(data)]
        truncated = torch.tensor([len(ids) > self.max_length for ids in rows], dtype=torch.bool)
        kept = [truncate_left(ids, self.max_length, self.bos) for ids in rows]
        return RewardInputs(Ragged.from_rows(kept, torch.int64), truncated)

    @abstractmethod
    def rows(self, data: DataProto) -> list[list[int]]:
        """Return the token ids of each row, not truncated."""


class SameTokens(RewardInput):
    """The model reads the token ids of the policy."""

    def rows(self, data: DataProto) -> list[list[int]]:
        return [row.tolist() for row in Ragged.join(data.ragged("prompts"), data.ragged("responses")).rows()]


class OtherTemplate(RewardInput):
    """The model reads the conversation in its own chat template and tokens.

    Responses are decoded without special tokens; the template writes those of the reward model. The messages of the
    prompt are those of the data (`raw_prompt`), or one user message (`raw_input_ids`, or a prompt of plain text).
    """

    def __init__(
        self, max_length: int, pad: int | None, policy: PreTrainedTokenizerBase, reward: PreTrainedTokenizerBase
    ):
        super().__init__(max_length, pad, begins_with(reward))
        self.policy, self.reward = policy, reward
        if not reward.chat_template:
            raise EngineError(
                f"the tokenizer of the reward model ({reward.name_or_path or 'unnamed'}) has no chat template; add one "
                "to its folder, or, if the model reads the policy's token ids, set "
                "reward_model.model.input_tokenizer=null"
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
            raise BatchError(f"row {empty}: the reward model's chat template gives no tokens for {texts[empty]!r}")
        return ids

    def _prompts(self, data: DataProto) -> list[list[Message]]:
        if "raw_prompt" in data:
            return [_as_messages(prompt) for prompt in data["raw_prompt"]]
        data.require("raw_input_ids")
        return [_as_messages(text) for text in self._texts(data.ragged("raw_input_ids"))]

    def _texts(self, ids: Ragged) -> list[str]:
        texts: Any = self.policy.batch_decode([row.tolist() for row in ids.rows()], skip_special_tokens=True)
        return texts


def begins_with(tokenizer: Any) -> int | None:
    """Return the beginning-of-sequence token of a tokenizer, or None."""
    return tokenizer.bos_token_id


def _as_messages(prompt: str | list[Message]) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
