"""Inputs of the reward model: token ids of the policy, or conversations formatted with its own chat template.

    to_input = RewardInput(max_length, pad, policy_tokenizer)                        # input_tokenizer=null
    to_input = RewardInput(max_length, pad, policy_tokenizer, reward_tokenizer)
    ids, truncated = to_input(batch)

As in `AutoModelForSequenceClassification`, the model reads the score at the last token that is not `pad_token_id` of
its config. Batches have no padding, so a sequence ends with pad tokens only if its text does, for example if a model
uses its end-of-turn token for padding. These pad tokens are removed; causal attention guarantees that they do not
affect the score. All other text that a template adds after the response is kept, including a newline, because the model
was trained with it.

A sequence that is too long is truncated on the left, because the response is at the end. A beginning-of-sequence token
is kept. `truncated` marks the truncated rows.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from camshaft.data.chat import Message, encode, render, strip_padding, truncate_left
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError, EngineError


class RewardInput:
    """Conversion from prompts and responses to inputs of the reward model.

    If `reward` is None, the model reads the token ids of the policy. Otherwise it reads the conversation in the chat
    template of the tokenizer `reward`. Responses are then decoded without special tokens, because the template adds
    those of the reward model. The messages of the prompt come from `raw_prompt`. If the prompt is plain text, or only
    `raw_input_ids` exists, the prompt becomes one user message.
    """

    def __init__(self, max_length: int, pad: int | None, policy: Tokenizer, reward: Tokenizer | None = None):
        self.max_length, self.pad, self.policy, self.reward = max_length, pad, policy, reward
        self.bos: Any = (policy if reward is None else reward).bos_token_id
        if reward is not None and not reward.chat_template:
            raise EngineError(
                f"the tokenizer of the reward model ({reward.name_or_path or 'unnamed'}) has no chat template; add one "
                "to its folder, or set reward_model.model.input_tokenizer=null if the model reads the token ids of the "
                "policy"
            )

    def __call__(self, data: DataProto) -> tuple[Ragged, Tensor]:
        """Return the token ids of each row, and a mask, (B,) bool, of the rows that were truncated."""
        rows = self._policy_rows(data) if self.reward is None else self._formatted_rows(data, self.reward)
        rows = [strip_padding(row, self.pad) for row in rows]
        truncated = torch.tensor([len(ids) > self.max_length for ids in rows], dtype=torch.bool)
        inputs = [truncate_left(ids, self.max_length, self.bos) for ids in rows]
        return Ragged.from_rows(inputs, torch.int64), truncated

    def _policy_rows(self, data: DataProto) -> list[list[int]]:
        return [row.tolist() for row in Ragged.join(data.ragged("prompts"), data.ragged("responses")).rows()]

    def _formatted_rows(self, data: DataProto, tokenizer: Tokenizer) -> list[list[int]]:
        responses = self._texts(data.ragged("responses"))
        texts = [
            render([*messages, {"role": "assistant", "content": response}], tokenizer, f"row {row}", False)
            for row, (messages, response) in enumerate(zip(self._prompts(data), responses, strict=True))
        ]
        ids = encode(texts, tokenizer, special_tokens=False)
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


def _as_messages(prompt: str | list[Message]) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
