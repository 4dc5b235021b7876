"""Pairs of answers: conversion of each row format, truncation, and rejected rows."""

import copy

import pytest

from camshaft.data.preferences import PreferenceOptions, load_preferences
from camshaft.data.tables import write_parquet
from camshaft.errors import BatchError

# The tokenizer's template, with a line break after each turn.
LINES = "{% for m in messages %}<|im_start|>{{ m.role[0] }}{{ m.content }}<|im_end|>\n{% endfor %}"


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def load(tmp_path, tokenizer):
    def load(rows, template=None, bos=None, **options):
        chosen = copy.deepcopy(tokenizer)
        chosen.chat_template = template or tokenizer.chat_template
        chosen.bos_token = bos
        return load_preferences(write_parquet(tmp_path / "pairs.parquet", rows), chosen, PreferenceOptions(**options))

    return load


def shown(data, tokenizer):
    """Return (chosen, rejected) of each row as text."""
    columns = [[tokenizer.decode(row) for row in data.batch[name].rows()] for name in ("chosen", "rejected")]
    texts = [[text.replace("<|im_start|>", "(").replace("<|im_end|>", ")") for text in column] for column in columns]
    return list(zip(*texts, strict=True))


PROMPT = {"prompt": [user("1+2=")]}


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({**PROMPT, "chosen": "3", "rejected": "4"}, {}),
        ({**PROMPT, "chosen": [bot("3")], "rejected": [bot("4")]}, {}),
        ({**PROMPT, "chosen": [user("1+2="), bot("3")], "rejected": [user("1+2="), bot("4")]}, {}),
        ({"prompt": "1+2=", "chosen": [user("1+2="), bot("3")], "rejected": [user("1+2="), bot("4")]}, {}),
        ({"chosen": [user("1+2="), bot("3")], "rejected": [user("1+2="), bot("4")]}, {"prompt_key": None}),
    ],
    ids=["text after messages", "turns after messages", "whole beside messages", "whole beside text", "whole"],
)
def test_all_conversation_formats_use_the_chat_template(load, tokenizer, row, options):
    assert shown(load([row], **options), tokenizer) == [("(u1+2=)(a3)", "(u1+2=)(a4)")]


def test_sequences_match_transformers(load, tokenizer):
    turns = [user("1+2="), bot("3"), user("sure?"), bot("yes")]
    data = load([{"prompt": turns[:3], "chosen": "yes", "rejected": "no"}])
    assert data.batch["chosen"].rows()[0].tolist() == tokenizer.apply_chat_template(turns, return_dict=False)


def test_plain_text_gets_an_end_token(load, tokenizer):
    assert shown(load([{"prompt": "1+2=", "chosen": "3", "rejected": "4"}]), tokenizer) == [("1+2=3)", "1+2=4)")]
    row = {"chosen": "Human: 1+2? Assistant: 3", "rejected": "Human: 1+2? Assistant: 4<|im_end|>"}
    texts = shown(load([row], prompt_key=None), tokenizer)
    assert texts == [("Human: 1+2? Assistant: 3)", "Human: 1+2? Assistant: 4)")]


def test_columns_may_have_other_names(load, tokenizer):
    row = {"question": [user("a")], "better": "b", "worse": "c", "lead": 2}
    keys = {"prompt_key": "question", "chosen_key": "better", "rejected_key": "worse", "margin_key": "lead"}
    data = load([row], **keys)
    assert shown(data, tokenizer) == [("(ua)(ab)", "(ua)(ac)")]
    assert data.batch["margin"].tolist() == [2]
    assert load([{**PROMPT, "chosen": "3", "rejected": "4"}]).batch["margin"].tolist() == [0]


def test_template_suffix_is_kept_and_trailing_padding_dropped(load, tokenizer):
    row = {**PROMPT, "chosen": "3", "rejected": "4"}
    assert shown(load([row], LINES), tokenizer)[0][0] == "(u1+2=)\n(a3)\n"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert shown(load([row], pad=end), tokenizer)[0][0] == "(u1+2=)(a3"


# (u1+2=)(a3) is 11 tokens.
@pytest.mark.parametrize(
    ("truncation", "kept"),
    [("left", ("2=)(a3)", "2=)(a4)")), ("middle", ("(u1(a3)", "(u1(a4)"))],
)
def test_long_sequences_are_truncated_and_counted(load, tokenizer, truncation, kept):
    rows = [{**PROMPT, "chosen": "3", "rejected": "4"}, {"prompt": [user("")], "chosen": "3", "rejected": "4"}]
    data = load(rows, max_length=7, truncation=truncation)
    assert shown(data, tokenizer) == [kept, ("(u)(a3)", "(u)(a4)")]
    assert data.num_truncated == 1
    assert "2 pairs, 28 tokens, 1 truncated" in str(data)


def test_the_left_keeps_a_beginning_of_sequence_token(load, tokenizer):
    rows = [{**PROMPT, "chosen": "3", "rejected": "4"}]
    data = load(rows, bos="<|im_start|>", max_length=7, truncation="left")
    assert shown(data, tokenizer) == [("(=)(a3)", "(=)(a4)")]


def test_pairs_of_equal_sequences_are_dropped_and_counted(load, tokenizer):
    rows = [{**PROMPT, "chosen": "3", "rejected": "3"}, {**PROMPT, "chosen": "3", "rejected": "4"}]
    data = load(rows)
    assert (len(data.batch), data.num_read, data.num_equal) == (1, 2, 1)
    assert "1 pairs of identical sequences dropped" in str(data)
    # Truncation on the right can remove every difference.
    with pytest.raises(
        BatchError, match=r"'chosen' and 'rejected' contain identical tokens in all 1 rows.*truncation=right.* row 0;"
    ):
        load(rows[1:], max_length=7, truncation="right")


def test_a_long_sequence_error_names_row_length_and_fix(load):
    rows = [{**PROMPT, "chosen": "3", "rejected": "4"}, {**PROMPT, "chosen": "3", "rejected": "four"}]
    message = (
        r"pairs\.parquet, row 1: the sequence with 'rejected' has 14 tokens, but data\.max_length=11 \(1 of 2 pairs"
    )
    with pytest.raises(BatchError, match=message) as exc_info:
        load(rows, max_length=11)
    assert "data.truncation=left" in str(exc_info.value)


GOOD = {**PROMPT, "chosen": "3", "rejected": "4"}


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({**GOOD, "rejected": None}, {}, r"row 1: 'rejected' is empty \(None\)"),
        ({**GOOD, "chosen": " "}, {}, "row 1: 'chosen' is empty"),
        ({**GOOD, "prompt": []}, {}, "row 1: 'prompt' is empty"),
        ({**GOOD, "lead": None}, {"margin_key": "lead"}, "row 1: 'lead' is None, not a finite number"),
        ({**GOOD, "lead": float("nan")}, {"margin_key": "lead"}, "row 1: 'lead' is nan"),
    ],
)
def test_a_bad_row_is_named(load, row, options, message):
    with pytest.raises(BatchError, match=rf"pairs\.parquet, {message}"):
        load([{**GOOD, "lead": 1.0}, row], **options)


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([user("other"), bot("3")], "starts with a message of role 'user' but not with the prompt"),
        ([user("1+2=")], "ends with a message of role 'user'"),
        (
            [{"role": "assistant", "content": "3", "name": None}, {"role": "user", "content": "x"}],
            "ends with a message",
        ),
    ],
)
def test_invalid_response_conversations_are_errors(load, turns, message):
    with pytest.raises(BatchError, match=rf"row 0: 'chosen' {message}"):
        load([{**PROMPT, "chosen": turns, "rejected": [bot("4")]}])


def test_a_missing_prompt_column_error_suggests_prompt_key_null(load):
    with pytest.raises(BatchError, match=r"pairs\.parquet: column 'prompt' does not exist.*use data\.prompt_key=null"):
        load([{"chosen": "a", "rejected": "b"}])
    with pytest.raises(BatchError, match=r"no column 'rejected'"):
        load([{"prompt": "a", "chosen": "b"}])


def test_text_needs_an_end_and_messages_a_template(load, tokenizer):
    tokenizer.eos_token = None
    with pytest.raises(BatchError, match="row 0: the tokenizer has no end-of-sequence token"):
        load([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    tokenizer.chat_template = None
    with pytest.raises(BatchError, match="row 0: the row contains chat messages, but the tokenizer"):
        load([GOOD])
