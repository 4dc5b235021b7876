"""Models small enough to train on a laptop in seconds, with a tokenizer of single characters.

    folder = make_tiny_model("models/tiny")                      # qwen2, 64 wide, 2 layers, random weights
    folder = make_tiny_model("models/moe", family="mixtral", num_local_experts=4)

The folder has the Hugging Face layout: config, safetensors, tokenizer with a chat template. Tests and examples use it.
Each printable ASCII character is a token, so "12+30=" is six tokens, and a chat message adds three tokens to its text;
other characters are dropped.
"""

import dataclasses
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from camshaft.errors import EngineError
from camshaft.models.loader import quiet_transformers

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + "\u0120\u010a"
"""The last two are space and newline in the byte-level alphabet.

`AutoTokenizer` loads the tokenizer of a qwen2 folder with a class that assumes this alphabet and the name of PAD; with
others it would return different token ids.
"""

VOCABULARY_ROWS = 112
"""Rows of the embedding: the number of tokens, rounded up to a multiple of 16."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'][0] }}{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a{% endif %}"
)
"""One letter marks the role of a message: u(ser), a(ssistant), s(ystem)."""


def make_tiny_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Write a tokenizer of single characters to `folder`; a sequence ends with <|im_end|>."""
    vocabulary = {token: number for number, token in enumerate([PAD, START, END, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, additional_special_tokens=[START]
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast


def make_tiny_model(
    folder: str | Path,
    family: str = "qwen2",
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int | None = None,
    tie_embeddings: bool = True,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a random causal language model and its tokenizer to `folder`, and return the folder.

    `family` is a model type of transformers ("llama", "qwen3", "gemma3_text", ...); further keywords go to its
    config. The weights depend only on the seed, and the global random state does not change.
    """
    if family not in CONFIG_MAPPING:
        raise EngineError(f"transformers has no model type '{family}'; use for example qwen2, llama or qwen3")
    folder = Path(folder)
    sizes = {
        "vocab_size": VOCABULARY_ROWS,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden if intermediate is None else intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tie_embeddings,
    }
    tokenizer = make_tiny_tokenizer(folder)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    if "head_dim" not in {field.name for field in dataclasses.fields(CONFIG_MAPPING[family])}:
        del sizes["head_dim"]  # derived there
    built: PreTrainedConfig = CONFIG_MAPPING[family](**{**sizes, **ids, **config})
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        AutoModelForCausalLM.from_config(built, dtype=torch.float32).save_pretrained(folder)
    return folder
