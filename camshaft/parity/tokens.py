"""Test prompts, and a comparison of two tokenizers.

prompts = random_prompts(tokenizer, count=8, longest=64, seed=0)
prompts = file_prompts("data/gsm8k/test.parquet", tokenizer, count=8, longest=64)
differences(tokenizer_of_the_model, tokenizer_of_the_data)     # ["eos_token_id: 2 and 0", ...]
"""

from __future__ import annotations

from typing import Any

import torch

from camshaft.data import PromptOptions, load_prompts
from camshaft.dataproto import Ragged

TEXTS = ("What is 12 + 30? Answer with a number.", "def f(x):\n    return x * 2\n", "a  b\t1,000.5 'quoted' [END]")
CHAT = ({"role": "user", "content": TEXTS[0]},)
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")


def random_prompts(tokenizer: Any, count: int, longest: int, seed: int) -> Ragged:
    """Return rows of 2 to `longest` random tokens without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    special = set(tokenizer.all_special_ids)
    vocabulary = torch.tensor([number for number in sorted(tokenizer.get_vocab().values()) if number not in special])
    lengths = torch.randint(2, longest + 1, (count,), generator=generator).tolist()
    return Ragged.from_rows([vocabulary[torch.randint(len(vocabulary), (n,), generator=generator)] for n in lengths])


def file_prompts(path: str, tokenizer: Any, count: int, longest: int) -> Ragged:
    """Return the first prompts of a parquet file, truncated on the left to `longest` tokens."""
    options = PromptOptions(max_prompt_length=longest, truncation="left")
    return load_prompts([path], tokenizer, options, count).batch.ragged("prompts")


def differences(one: Any, other: Any) -> list[str]:
    """Describe the differences of two tokenizers that affect prompts."""
    different = [
        f"{name}: {getattr(one, name)} and {getattr(other, name)}"
        for name in SPECIAL
        if getattr(one, name) != getattr(other, name)
    ]
    if len(one) != len(other):
        different.append(f"number of tokens: {len(one)} and {len(other)}")
    for text in TEXTS:
        ids = [tokenizer(text)["input_ids"] for tokenizer in (one, other)]
        if ids[0] != ids[1]:
            different.append(f"ids of {text!r}: {ids[0][:8]}... and {ids[1][:8]}...")
            break
    if bool(one.chat_template) != bool(other.chat_template):
        different.append("only one of them has a chat template")
    elif one.chat_template:
        texts = [t.apply_chat_template(list(CHAT), tokenize=False, add_generation_prompt=True) for t in (one, other)]
        if texts[0] != texts[1]:
            different.append(f"the chat template makes {texts[0]!r} and {texts[1]!r}")
    return different


def special_ids(tokenizer: Any) -> dict[int, str]:
    """Map token id to text for at most `MAX_SPECIAL` special tokens that may surround a prompt."""
    numbers = dict.fromkeys([getattr(tokenizer, name) for name in SPECIAL] + list(tokenizer.all_special_ids))
    token_ids = [number for number in numbers if number is not None]
    return {number: tokenizer.convert_ids_to_tokens(number) for number in token_ids[:MAX_SPECIAL]}


MAX_SPECIAL = 16
