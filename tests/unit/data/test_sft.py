import copy

import pytest

from camshaft.data.sft import SFTOptions, load_sft
from camshaft.data.tables import write_parquet
from camshaft.errors import BatchError

# Ends a turn as many chat models do, with a special token and a line break.
LINES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Keeps the text before "/" only in the last message, as reasoning models do.
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m.role[0] }}"
    "{{ m.content if loop.last else m.content.split('/')[-1] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a{% endif %}"
)
ANSWERS_FIRST = "{% for m in messages|reverse %}{{ m.content }}<|im_end|>{% endfor %}"
NO_SPECIAL = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def chat(*texts):
    """Build a chat: user, assistant, user, ..."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.fixture
def load(tmp_path, tokenizer):
    def load(rows, template=None, **options):
        chosen = copy.deepcopy(tokenizer)
        chosen.chat_template = template or tokenizer.chat_template
        return load_sft(write_parquet(tmp_path / "sft.parquet", rows), chosen, SFTOptions(**options))

    return load


def shown(data, tokenizer):
    """Return each row as text with its trained tokens in brackets."""
    rows = []
    for ids, mask in zip(data.batch["input_ids"].rows(), data.batch["loss_mask"].rows(), strict=True):
        text, inside = "", False
        for token, trained in zip(ids.tolist(), mask.tolist(), strict=True):
            text += ("[" if trained else "]") * (trained != inside) + tokenizer.decode([token])
            inside = trained
        rows.append(text + "]" * inside)
    return [row.replace("<|im_start|>", "(").replace("<|im_end|>", ")") for row in rows]


def test_the_response_and_its_end_are_trained(load, tokenizer):
    data = load([{"prompt": chat("1+2="), "response": "3"}, {"prompt": chat("5+5="), "response": "10"}])
    assert shown(data, tokenizer) == ["(u1+2=)(a[3)]", "(u5+5=)(a[10)]"]


def test_a_response_may_be_a_list_of_messages(load, tokenizer):
    data = load([{"prompt": chat("1+2="), "response": chat("", "3", "and 4?", "7")[1:]}])
    assert shown(data, tokenizer) == ["(u1+2=)(a[3)](uand 4?)(a[7)]"]
    with pytest.raises(BatchError, match="'response' has no assistant message"):
        load([{"prompt": chat("1+2="), "response": chat("3")}])


def test_sequences_match_transformers(load, tokenizer):
    turns = chat("1+2=", "3", "and 4?", "7")
    ids = load([{"messages": turns}]).batch["input_ids"].rows()[0].tolist()
    assert ids == tokenizer.apply_chat_template(turns, return_dict=False)


def test_template_text_after_a_turn_is_not_trained(load, tokenizer):
    turns = chat("1+2=", "3", "more", "4")
    assert shown(load([{"messages": turns}], LINES), tokenizer) == [
        "(user\n1+2=)\n(assistant\n[3)]\n(user\nmore)\n(assistant\n[4)]"
    ]


def test_history_in_a_prompt_is_not_trained(load, tokenizer):
    data = load([{"prompt": chat("a", "b", "c"), "response": "d"}])
    assert shown(data, tokenizer) == ["(ua)(ab)(uc)(a[d)]"]


def test_plain_text_gets_the_end_of_sequence_token(load, tokenizer):
    assert shown(load([{"prompt": "1+2=", "response": "3"}]), tokenizer) == ["1+2=[3)]"]


def test_an_initial_assistant_turn_is_context(load, tokenizer):
    turns = [{"role": "assistant", "content": "hi"}, *chat("a", "b")]
    assert shown(load([{"messages": turns}]), tokenizer) == ["(ahi)(ua)(a[b)]"]


def test_a_template_that_rewrites_history_yields_one_row_per_turn(load, tokenizer):
    data = load([{"messages": chat("q", "think/3", "r", "again/4")}], FORGETS)
    assert shown(data, tokenizer) == ["(uq)(a[think/3)]", "(uq)(a3)(ur)(a[again/4)]"]


def test_a_template_that_hides_the_answer_is_an_error(load):
    with pytest.raises(
        BatchError, match=r"row 0: with this chat template, .* does not start with its formatted prompt"
    ):
        load([{"prompt": chat("a"), "response": "b"}], ANSWERS_FIRST)


def test_without_special_tokens_the_full_turn_is_trained(load, tokenizer):
    assert shown(load([{"messages": chat("a", "b", "c", "d")}], NO_SPECIAL), tokenizer) == ["u:a;a:[b;]u:c;a:[d;]"]


def test_the_first_token_of_a_row_is_never_trained(load):
    data = load([{"prompt": "abc", "response": "defg"}], max_length=4, truncation="left")
    assert data.batch["loss_mask"].rows()[0].tolist() == [False, True, True, True]


# (ua)(a[bcd)] is 10 tokens: 1 2 3 4 for the prompt, 5 6 for (a, then b c d and the end.
@pytest.mark.parametrize(("truncation", "kept"), [("left", "ua)(a[bcd)]"), ("right", "(ua)(a[bcd]")])
def test_long_sequences_are_truncated_at_the_given_side(load, tokenizer, truncation, kept):
    data = load([{"prompt": chat("a"), "response": "bcd"}], max_length=9, truncation=truncation)
    assert shown(data, tokenizer) == [kept]
    assert data.num_truncated == 1


def test_sequences_without_trained_tokens_are_dropped_and_counted(load, tokenizer):
    rows = [{"prompt": chat("abcdefgh"), "response": "x"}, {"prompt": chat("a"), "response": "x"}]
    data = load(rows, max_length=8, truncation="right")
    assert shown(data, tokenizer) == ["(ua)(a[x)]"]
    assert (data.num_read, data.num_untrained) == (2, 1)
    assert "1 dropped without trained tokens" in str(data)


def test_truncating_all_trained_tokens_is_an_error(load):
    with pytest.raises(BatchError, match="max_length=3 truncates all trained tokens"):
        load([{"prompt": chat("abcdefgh"), "response": "x"}], max_length=3, truncation="right")


def test_a_long_sequence_error_names_row_and_limit(load):
    rows = [{"prompt": chat("a"), "response": "b"}, {"prompt": chat("a"), "response": "bcd"}]
    with pytest.raises(BatchError, match=r"sft\.parquet, row 1: the sequence has 10 tokens, but max_length=9"):
        load(rows, max_length=9)


@pytest.mark.parametrize("bad", [None, "", 5])
def test_a_missing_response_is_an_error_that_names_the_row(load, bad):
    rows = [{"prompt": "a", "response": bad}]
    with pytest.raises(BatchError, match=r"sft\.parquet, row 0: 'response' (is|has)"):
        load(rows)


def test_a_conversation_without_an_answer_is_an_error(load):
    with pytest.raises(
        BatchError, match=r"row 0: 'messages' has the roles \['user'\]; it must contain an assistant message"
    ):
        load([{"messages": chat("a")}])


def test_a_missing_response_column_is_an_error(load):
    with pytest.raises(BatchError, match=r"no column 'response'.*prompt, answer"):
        load([{"prompt": "a", "answer": "b"}])


# Marks the answers and their end, as templates for training do.
MARKED = (
    "{% for m in messages %}<|im_start|>{% if m.role == 'assistant' %}a{% generation %}{{ m.content }}<|im_end|>"
    "{%- endgeneration -%}{% else %}{{ m.role[0] }}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)


def test_generation_blocks_of_a_template_select_the_trained_tokens(load, tokenizer):
    turns = chat("1+2=", "3", "and 4?", "7")
    data = load([{"messages": turns}, {"messages": chat("", "hi", "1+2=", "3")[1:]}], MARKED)
    assert shown(data, tokenizer) == ["(u1+2=)(a[3)](uand 4?)(a[7)]", "(ahi)(u1+2=)(a[3)]"]
    data = load([{"prompt": turns[:3], "response": "7"}], MARKED)
    assert shown(data, tokenizer) == ["(u1+2=)(a3)(uand 4?)(a[7)]"]
