"""Creates models that train on a laptop in seconds, with a character-level tokenizer, for tests and examples.

    folder = make_tiny_model("models/tiny")                      # qwen2, hidden size 64, 2 layers, random weights
    folder = make_tiny_model("models/moe", family="mixtral", num_local_experts=4)

The folder has the Hugging Face layout: config, safetensors, and a tokenizer with a chat template. Each printable ASCII
character is one token, so "12+30=" has six tokens. Other characters are dropped. The chat template adds three tokens to
the text of each message.
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
PAD_ID = 0
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + "\u0120\u010a"
"""Characters of the vocabulary; the last two represent space and newline in the byte-level alphabet.

`AutoTokenizer` loads the tokenizer of a qwen2 folder with a class that assumes this alphabet and the text of PAD. With
another alphabet or PAD token, it would return different token ids.
"""

VOCABULARY_ROWS = 112
"""Number of rows of the embedding: the number of tokens, rounded up to a multiple of 16."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'][0] }}{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a{% endif %}"
)
"""Chat template that writes the first letter of a message's role (u, a or s) before its text."""
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
"""Files by which another model in a folder is recognized."""


def make_tiny_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Write a character-level tokenizer to `folder` and return it. The end-of-sequence token is <|im_end|>.

    Raise EngineError if the folder contains another model or tokenizer.
    """
    template = Path(folder, "chat_template.jinja")
    is_own = template.is_file() and template.read_text(encoding="utf-8") == CHAT_TEMPLATE
    if existing := [name for name in _FILES if Path(folder, name).exists() and not is_own]:
        raise EngineError(f"{folder} contains another model ({existing[0]}); use another folder")
    vocabulary = {token: number for number, token in enumerate([PAD, START, END, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
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
    """Write a causal language model with random weights and its tokenizer to `folder`, and return the folder.

    `family` is a model type of transformers ("llama", "qwen3", "gemma3_text", ...), and other keyword arguments are
    passed to its config. The weights depend only on `seed`. The global random state does not change.
    """
    if family not in CONFIG_MAPPING:
        raise EngineError(
            f"transformers has no model type '{family}'; set family to qwen2, llama or qwen3, for example"
        )
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
        del sizes["head_dim"]  # this config derives it from hidden_size
    model_config: PreTrainedConfig = CONFIG_MAPPING[family](**{**sizes, **ids, **config})
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        AutoModelForCausalLM.from_config(model_config, dtype=torch.float32).save_pretrained(folder)
    return folder
