"""Creates test prompts for `camshaft parity`, and compares tokenizers.

prompts = random_prompts(tokenizer, count=8, max_length=64, seed=0)
prompts = file_prompts("data/gsm8k/test.parquet", tokenizer, count=8, max_length=64)
compare_tokenizers(model_tokenizer, data_tokenizer)     # ["eos_token_id: 2 and 0", ...]
"""

from typing import Any

import torch

from camshaft.data import PromptOptions, load_prompts
from camshaft.dataproto import Ragged

TEXTS = ("What is 12 + 30? Answer with a number.", "def f(x):\n    return x * 2\n", "a  b\t1,000.5 'quoted' [END]")
CHAT = ({"role": "user", "content": TEXTS[0]},)
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")

MAX_SPECIAL_TOKENS = 16
"""Maximum number of special tokens that experiments add to prompts."""


def random_prompts(tokenizer: Any, count: int, max_length: int, seed: int) -> Ragged:
    """Return `count` prompts of 2 to `max_length` random tokens, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    excluded = set(tokenizer.all_special_ids)
    vocabulary = torch.tensor([number for number in sorted(tokenizer.get_vocab().values()) if number not in excluded])
    lengths = torch.randint(2, max_length + 1, (count,), generator=generator).tolist()
    return Ragged.from_rows([vocabulary[torch.randint(len(vocabulary), (n,), generator=generator)] for n in lengths])


def file_prompts(path: str, tokenizer: Any, count: int, max_length: int) -> Ragged:
    """Return the first `count` prompts of a data file, truncated on the left to `max_length` tokens."""
    options = PromptOptions(max_prompt_length=max_length, truncation="left")
    return load_prompts([path], tokenizer, options, count).batch.ragged("prompts")


def compare_tokenizers(first: Any, second: Any) -> list[str]:
    """Describe the differences between two tokenizers that affect prompts; return an empty list without differences."""
    differences = [
        f"{name}: {getattr(first, name)} and {getattr(second, name)}"
        for name in SPECIAL_TOKENS
        if getattr(first, name) != getattr(second, name)
    ]
    if len(first) != len(second):
        differences.append(f"number of tokens: {len(first)} and {len(second)}")
    for text in TEXTS:
        ids = [tokenizer(text)["input_ids"] for tokenizer in (first, second)]
        if ids[0] != ids[1]:
            differences.append(f"token ids of {text!r}: {ids[0][:8]}... and {ids[1][:8]}...")
            break
    if bool(first.chat_template) != bool(second.chat_template):
        differences.append("only one of them has a chat template")
    elif first.chat_template:
        tokenizers = (first, second)
        texts = [t.apply_chat_template(list(CHAT), tokenize=False, add_generation_prompt=True) for t in tokenizers]
        if texts[0] != texts[1]:
            differences.append(f"the chat templates render a message as {texts[0]!r} and {texts[1]!r}")
    return differences


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return token ids and texts of at most `MAX_SPECIAL_TOKENS` special tokens that may surround a prompt."""
    numbers = dict.fromkeys([getattr(tokenizer, name) for name in SPECIAL_TOKENS] + list(tokenizer.all_special_ids))
    token_ids = [number for number in numbers if number is not None]
    return {number: tokenizer.convert_ids_to_tokens(number) for number in token_ids[:MAX_SPECIAL_TOKENS]}
