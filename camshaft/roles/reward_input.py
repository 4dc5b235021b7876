"""What a reward model reads: the policy's own token ids, or the conversation in its own chat template.

    reads = SameTokens(longest, pad)                       # reward_model.model.input_tokenizer=null
    reads = OtherTemplate(longest, pad, policys, own)      # the policy's tokenizer, the reward model's
    found = reads(batch)                                   # found.ids, found.truncated

The score is read off the last token, and which one that is follows `AutoModelForSequenceClassification`: the last
that is not the pad token of the model's config. Nothing is padded here, so such tokens are at the end only where the
text itself has them, as with models that pad with the token that ends a turn; no token before them sees them, and they
are cut off. Everything else that a template writes behind the response is read, a newline too: the model was trained
with it.

A sequence that is too long loses its beginning, never its end, where the response is and the score is read; a
beginning-of-sequence token stays. `truncated` says of which rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from camshaft.data.chat import Message, encode, keep_end, render, without_padding
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError, EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Read:
    """The rows of a batch as the reward model reads them."""

    ids: Ragged
    truncated: Tensor
    """(B,) bool: the row was too long, and its beginning is left out."""


class RewardInput(ABC):
    """Rows of prompt and response to rows of the reward model."""

    def __init__(self, longest: int, pad: int | None, bos: int | None = None):
        self.longest, self.pad, self.bos = longest, pad, bos

    def __call__(self, data: DataProto) -> Read:
        rows = [without_padding(row, self.pad) for row in self.rows(data)]
        truncated = torch.tensor([len(ids) > self.longest for ids in rows], dtype=torch.bool)
        return Read(Ragged.from_rows([keep_end(ids, self.longest, self.bos) for ids in rows], torch.int64), truncated)

    @abstractmethod
    def rows(self, data: DataProto) -> list[list[int]]:
        """Token ids of each row, whole."""


class SameTokens(RewardInput):
    """The model reads the ids that the policy wrote."""

    def rows(self, data: DataProto) -> list[list[int]]:
        return [row.tolist() for row in Ragged.join(data.ragged("prompts"), data.ragged("responses")).rows()]


class OtherTemplate(RewardInput):
    """The responses become text, and the conversation goes through the model's template and tokenizer.

    Of a response the special tokens are left out: the template writes those that the model knows. The prompt's
    messages are those of the data (`raw_prompt`), or one message of the user (`raw_input_ids`, or a prompt that is
    plain text).
    """

    def __init__(self, longest: int, pad: int | None, policys: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase):
        super().__init__(longest, pad, begins_with(own))
        self.policys, self.own = policys, own
        if not own.chat_template:
            raise EngineError(
                f"the reward model's tokenizer ({own.name_or_path or 'unnamed'}) has no chat template to put "
                "conversations through; give its folder one, or, if it reads the policy's token ids, type "
                "reward_model.model.input_tokenizer=null"
            )

    def rows(self, data: DataProto) -> list[list[int]]:
        responses = self._texts(data.ragged("responses"))
        texts = [
            render([*messages, {"role": "assistant", "content": response}], self.own, f"row {row}", False)
            for row, (messages, response) in enumerate(zip(self._prompts(data), responses, strict=True))
        ]
        ids = encode(texts, self.own, special_tokens=False)
        empty = next((row for row, found in enumerate(ids) if not found), None)
        if empty is not None:
            raise BatchError(f"row {empty}: the reward model's chat template makes no tokens of it: {texts[empty]!r}")
        return ids

    def _prompts(self, data: DataProto) -> list[list[Message]]:
        if "raw_prompt" in data:
            return [_as_messages(prompt) for prompt in data["raw_prompt"]]
        data.require("raw_input_ids")
        return [_as_messages(text) for text in self._texts(data.ragged("raw_input_ids"))]

    def _texts(self, ids: Ragged) -> list[str]:
        texts: Any = self.policys.batch_decode([row.tolist() for row in ids.rows()], skip_special_tokens=True)
        return texts


def begins_with(tokenizer: Any) -> int | None:
    """The token that it puts before a text, if it knows one."""
    return tokenizer.bos_token_id


def _as_messages(prompt: str | list[Message]) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
