"""Chat templates in the style of published models, with tokenizers and a tiny model that ends its answers itself.

family = CHAT_FAMILIES["llama3"]
folder = talking_model(family, "folder")        # answers of about eight characters
tokenizer = talking_tokenizer(family)
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from camshaft.models.loader import quiet_transformers
from camshaft.models.tiny import CHARACTERS, PAD, make_tiny_model


class ChatFamily(NamedTuple):
    template: str
    end: str
    """Token that ends an answer."""
    special: tuple[str, ...]
    bos: str | None = None


ALTERNATION = (
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}" + ALTERNATION + "{% set role = 'model' if m['role'] == 'assistant' "
    "else m['role'] %}{{ '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}" + ALTERNATION + "{% if m['role'] == 'user' %}"
    "{% if tools and loop.last %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST]' + m['content'] + '[/INST]' }}{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '<|Assistant|>' + m['content'] + '<|end_of_sentence|>' }}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)

CHAT_FAMILIES = {
    "chatml": ChatFamily(CHATML, "<|im_end|>", ("<|im_start|>",)),
    "llama3": ChatFamily(LLAMA3, "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>"), bos="<|begin_of_text|>"),
    "gemma": ChatFamily(GEMMA, "<end_of_turn>", ("<start_of_turn>",), bos="<bos>"),
    "mistral": ChatFamily(MISTRAL, "</s>", ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"), bos="<s>"),
    "phi": ChatFamily(PHI, "<|end|>", ("<|user|>", "<|assistant|>", "<|system|>")),
    "deepseek": ChatFamily(DEEPSEEK, "<|end_of_sentence|>", ("<|User|>", "<|Assistant|>"), bos="<|begin_of_sentence|>"),
}


def talking_tokenizer(family: ChatFamily) -> PreTrainedTokenizerFast:
    """Return a character-level tokenizer with the special tokens and the template of a family."""
    special = [PAD, family.end, *family.special, *([family.bos] if family.bos else [])]
    vocabulary = {token: number for number, token in enumerate([*special, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names: dict[str, Any] = {"bos_token": family.bos} if family.bos else {}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=family.end,
        additional_special_tokens=list(family.special),
        **names,
    )
    fast.chat_template = family.template
    return fast


def talking_model(family: ChatFamily, folder: Path, end_bias: float = 2.0) -> Path:
    """Write a model that ends an answer after about eight characters, and samples no white space or other tokens.

    The biases of its final norm have the direction to which the output weights of these tokens add a constant logit.
    """
    tokenizer = talking_tokenizer(family)
    make_tiny_model(folder, "gpt2", tie_embeddings=False, eos_token_id=tokenizer.eos_token_id)
    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        direction = torch.randn(64, generator=torch.Generator().manual_seed(1))
        direction /= direction.norm()
        model.transformer.ln_f.bias.copy_(8 * direction)
        logits = torch.zeros(model.lm_head.weight.shape[0])
        white_space: list[int] = tokenizer("\n ", add_special_tokens=False)["input_ids"]  # pyright: ignore
        logits[[*tokenizer.added_tokens_decoder, *white_space]] = -40
        logits[len(tokenizer) :] = -40
        logits[tokenizer.convert_tokens_to_ids(family.end)] = end_bias
        model.lm_head.weight += logits[:, None] * direction / 8
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
