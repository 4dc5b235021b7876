"""The builders of tiny models write the same folder every time."""

from pathlib import Path

import pytest
import torch
from support.tiny import tiny_batch, tiny_folder, tiny_tokenizer_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from camshaft.errors import EngineError
from camshaft.models.tiny import VOCABULARY_ROWS, make_tiny_model, make_tiny_tokenizer

SUM = [{"role": "user", "content": "12+30="}]


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "mistral", "gemma3_text"])
def test_a_folder_of_any_family_reloads_the_same_tokenizer(family: str, tmp_path: Path):
    # transformers picks the tokenizer class by the model next to it.
    tokenizer = make_tiny_tokenizer(tmp_path)
    read = AutoTokenizer.from_pretrained(tiny_folder(family))
    assert read.get_vocab() == tokenizer.get_vocab()
    assert (read.pad_token_id, read.eos_token_id, len(read)) == (
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
        len(tokenizer),
    )
    text = "Add 12 + 30 = (42)\n*/-?<|im_end|>"
    assert read.encode(text) == tokenizer.encode(text)
    assert read.decode(read.encode(text)) == text
    assert len(read.encode(text)) == len(text) - len("<|im_end|>") + 1
    assert read.apply_chat_template(SUM, tokenize=False) == tokenizer.apply_chat_template(SUM, tokenize=False)


def test_the_vocabulary_fits_the_rows_of_the_embedding():
    assert len(AutoTokenizer.from_pretrained(tiny_tokenizer_folder())) <= VOCABULARY_ROWS


def test_a_chat_message_adds_three_tokens_to_its_text():
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder())
    prompt = tokenizer.apply_chat_template(SUM, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>u12+30=<|im_end|><|im_start|>a"
    assert len(tokenizer.encode(prompt)) == len("12+30=") + 3 + 2
    turn = tokenizer.apply_chat_template([*SUM, {"role": "assistant", "content": "42"}], tokenize=False)
    assert turn == prompt + "42<|im_end|>"


def test_sizes_and_token_ids_reach_the_model(tmp_path: Path):
    folder = make_tiny_model(
        tmp_path,
        "llama",
        hidden=48,
        layers=3,
        heads=6,
        kv_heads=3,
        intermediate=40,
        tie_embeddings=False,
        max_position_embeddings=77,
    )
    config = AutoModelForCausalLM.from_pretrained(folder).config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (48, 3, 6)
    assert (config.num_key_value_heads, config.intermediate_size, config.head_dim) == (3, 40, 8)
    assert (config.tie_word_embeddings, config.max_position_embeddings) == (False, 77)
    assert (config.pad_token_id, config.eos_token_id) == (0, 2)


def test_weights_depend_only_on_the_seed(tmp_path: Path):
    before = torch.get_rng_state()
    models = []
    for number, seed in enumerate((0, 0, 1)):
        torch.manual_seed(number)
        models.append(AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / str(number), seed=seed)))
    first, same, other = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    torch.set_rng_state(before)
    make_tiny_model(tmp_path / "last")
    assert torch.equal(torch.get_rng_state(), before)


def test_an_unknown_family_is_an_error(tmp_path: Path):
    with pytest.raises(EngineError, match="no model type 'qwen22'"):
        make_tiny_model(tmp_path, family="qwen22")


def test_equal_arguments_share_one_folder():
    assert tiny_folder("llama", hidden=32) == tiny_folder("llama", hidden=32) != tiny_folder("llama", hidden=48)


def test_a_tiny_batch_excludes_first_tokens():
    batch = tiny_batch([3, 1, 2])
    assert batch["loss_mask"].values.tolist() == [False, False, True, False, False, False]
    assert len(batch["input_ids"].values) == 6
