import copy

import pytest

from camshaft.data import encode_prompts
from camshaft.data.chat import check_prompt
from camshaft.data.prompts import PromptOptions, load_prompts
from camshaft.data.tables import write_parquet
from camshaft.errors import BatchError


def user(text):
    return [{"role": "user", "content": text}]


def row(prompt, truth="7", **more):
    return {"data_source": "sums", "prompt": prompt, "reward_model": {"ground_truth": truth}, **more}


@pytest.fixture
def load(tmp_path, tokenizer):
    def load(rows, max_samples=None, tokenizer=tokenizer, **options):
        return load_prompts(
            write_parquet(tmp_path / "train.parquet", rows), tokenizer, PromptOptions(**options), max_samples
        )

    return load


def test_messages_match_apply_chat_template(load, tokenizer):
    chats = [user("1+2="), [{"role": "system", "content": "be brief"}, *user("3+4=")]]
    batch = load([row(chat) for chat in chats]).batch
    for ids, chat in zip(batch["prompts"].rows(), chats, strict=True):
        assert ids.tolist() == tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def test_prompts_that_end_with_an_answer_are_counted_in_a_warning(load, caplog):
    answered = [*user("1+2="), {"role": "assistant", "content": "3"}]
    load([row(answered), row(user("3+4=")), row(answered)])
    [message] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "the last message of 'prompt' has the role assistant in 2 of 3 rows" in message
    caplog.clear()
    load([row(user("3+4="))])
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_plain_text_matches_the_tokenizer(load, tokenizer):
    batch = load([row("1+2="), row("10+20=")]).batch
    assert [ids.tolist() for ids in batch["prompts"].rows()] == [
        tokenizer("1+2=").input_ids,
        tokenizer("10+20=").input_ids,
    ]


def test_nothing_is_padded(load):
    prompts = load([row("1"), row("1+2=")]).batch["prompts"]
    assert (prompts.lengths.tolist(), len(prompts.values)) == ([1, 4], 5)


def test_rows_have_ground_truth_source_and_extra_info(load):
    batch = load([row("1+2=", "3", extra_info={"index": 5})]).batch
    assert batch["ground_truth"].tolist() == ["3"]
    assert batch["data_source"].tolist() == ["sums"]
    assert batch["extra_info"].tolist() == [{"index": 5}]


def test_the_ground_truth_may_be_a_separate_column(load):
    assert load([{"data_source": "s", "prompt": "x", "ground_truth": "3"}]).batch["ground_truth"].tolist() == ["3"]


def test_without_extra_info_the_dict_is_empty(load):
    assert load([row("x")]).batch["extra_info"].tolist() == [{}]


def test_other_columns_can_be_named(load):
    batch = load([{"set": "s", "q": "x"}], prompt_key="q", reward_fn_key="set").batch
    assert (batch["data_source"].tolist(), batch["ground_truth"].tolist()) == (["s"], [None])


def test_fields_of_other_messages_do_not_reach_the_template(load, tokenizer):
    # Parquet gives every message the union of all fields, so name=None in the second row.
    named = [{"role": "user", "content": "a", "name": "bob"}]
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{% for m in messages %}{{ m.content }}{{ 'N' if 'name' in m }}{% endfor %}"
    batch = load([row(named), row(user("b"))], tokenizer=strict).batch
    assert [strict.decode(ids) for ids in batch["prompts"].rows()] == ["aN", "b"]


def test_uids_differ_by_row(load):
    assert load([row("x"), row("x")]).batch["uid"].tolist() == ["0", "1"]


def test_max_samples_takes_the_first_rows(load):
    assert len(load([row(c) for c in "abcd"], max_samples=2).batch) == 2


# -- overlong prompts -------------------------------------------------------------------------------


def test_a_long_prompt_error_names_row_length_limit_and_fix(load):
    with pytest.raises(BatchError) as exc_info:
        load([row("ab"), row("abcdefg"), row("abcdefghi")], max_prompt_length=4)
    text = str(exc_info.value)
    assert "train.parquet, row 1: the prompt has 7 tokens, but data.max_prompt_length=4" in text
    assert "2 of 3 prompts are too long; the longest has 9 tokens" in text
    assert "data.filter_overlong_prompts=true" in text


# Truncated to 4 tokens of "abcdefg", or to 5, where middle keeps the first 2 and the last 3.
@pytest.mark.parametrize(
    ("truncation", "limit", "kept"),
    [("left", 4, "defg"), ("right", 4, "abcd"), ("middle", 4, "abfg"), ("middle", 5, "abefg"), ("middle", 1, "g")],
)
def test_long_prompts_are_truncated_at_the_given_side(load, tokenizer, truncation, limit, kept):
    data = load([row("abcdefg"), row("x")], max_prompt_length=limit, truncation=truncation)
    assert [tokenizer.decode(ids) for ids in data.batch["prompts"].rows()] == [kept, "x"]
    assert data.num_truncated == 1


def test_a_prompt_of_exactly_the_limit_is_not_truncated(load):
    assert load([row("abcd")], max_prompt_length=4).batch["prompts"].lengths.tolist() == [4]


def test_filtered_prompts_are_logged_and_others_keep_their_uid(load, caplog):
    caplog.set_level("INFO")
    data = load([row("a"), row("abcdefg"), row("b")], max_prompt_length=4, filter_overlong=True)
    assert data.batch["uid"].tolist() == ["0", "2"]
    assert (data.num_read, data.num_dropped, data.num_truncated) == (3, 1, 0)
    assert "2 prompts, 1 of 3 rows dropped as too long from " in caplog.text


def test_filtering_everything_is_an_error(load):
    with pytest.raises(BatchError, match=r"drops all rows: all 2 prompts .*=1\. Increase it; the shortest .* 3 tokens"):
        load([row("abc"), row("abcd")], max_prompt_length=1, filter_overlong=True)


@pytest.mark.parametrize("of", [user, str], ids=["chat", "text"])
@pytest.mark.parametrize("truncation", ["left", "right", "middle"])
@pytest.mark.parametrize("limit", [1, 2, 5, 8])
def test_truncation_matches_slicing_of_the_ids(load, tokenizer, of, truncation, limit):
    texts = ["1+2=3", "x", "10+20=30+40=70", "ab"]
    batch = load([row(of(text)) for text in texts], max_prompt_length=limit, truncation=truncation).batch
    for prompt, text in zip(batch["prompts"].rows(), texts, strict=True):
        ids = tokenizer(text).input_ids
        if of is user:
            ids = tokenizer.apply_chat_template(user(text), add_generation_prompt=True, return_dict=False)
        half = limit // 2
        slices = {"left": ids[-limit:], "right": ids[:limit], "middle": ids[:half] + ids[len(ids) - limit + half :]}
        assert prompt.tolist() == (slices[truncation] if len(ids) > limit else ids)


def test_a_long_conversation_is_an_error_too(load):
    with pytest.raises(BatchError, match=r"row 0: the prompt has \d+ tokens, but data\.max_prompt_length=4"):
        load([row(user("abcdefg"))], max_prompt_length=4)


# -- ids of prompts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [["a7", "b12"], [7, 12]], ids=["text", "numbers"])
def test_prompt_ids_are_kept_as_tokens_and_original_value(load, tokenizer, ids):
    rows = [row("x", index=ids[0], extra_info={"split": "train"}), row("1+2=3+4", index=9), row("y", index=ids[1])]
    if ids[0] == "a7":
        rows[1]["index"] = "nine"
    batch = load(rows, prompt_id_key="index", max_prompt_length=4, filter_overlong=True).batch
    assert [row_ids.tolist() for row_ids in batch["prompt_id"].rows()] == [tokenizer(str(i)).input_ids for i in ids]
    assert [extra["prompt_id"] for extra in batch["extra_info"]] == ids
    assert batch["extra_info"][0]["split"] == "train"
    assert "prompt_id" not in load(rows).batch


def test_an_overlong_id_is_an_error_with_its_length(load):
    rows = [row("x", index="a"), row("y", index="abcde")]
    assert load(rows, prompt_id_key="index", max_prompt_id_length=5).batch["prompt_id"].lengths.tolist() == [1, 5]
    with pytest.raises(
        BatchError, match=r"row 1: the id 'abcde' of 'index' has 5 tokens, but data\.max_prompt_id_length=4"
    ):
        load(rows, prompt_id_key="index", max_prompt_id_length=4)


@pytest.mark.parametrize("bad", [None, "", 1.5, True, ["a"]])
def test_an_invalid_id_is_an_error_that_names_the_row(load, bad):
    with pytest.raises(BatchError, match=r"row 0: 'index' is .*an id must be a string or an integer"):
        load([row("x", index=bad)], prompt_id_key="index")


def test_an_id_must_not_conflict_with_extra_info(load):
    assert load([row("x", index="a", extra_info={"prompt_id": "a"})], prompt_id_key="index").batch
    with pytest.raises(BatchError, match="row 0: the id 'a' of 'index' conflicts with extra_info"):
        load([row("x", index="a", extra_info={"prompt_id": "b"})], prompt_id_key="index")


# -- for a reward model with another template -------------------------------------------------------


@pytest.mark.parametrize(
    "prompts", [[user("1+2="), [{"role": "system", "content": "be brief"}, *user("30+4=")]], ["11+2=", "30+40="]]
)
def test_return_raw_chat_keeps_the_original_prompt(load, prompts):
    batch = load([row(p) for p in prompts], return_raw_chat=True, max_prompt_length=4, truncation="left").batch
    assert batch["raw_prompt"].tolist() == prompts  # complete, although their ids are truncated
    assert batch["prompts"].lengths.tolist() == [4, 4]
    assert not {"raw_prompt", "raw_input_ids"} & set(load([row("1+2=")]).batch.columns)


@pytest.mark.parametrize("of", [user, str], ids=["one message", "text"])
def test_raw_input_ids_are_tokens_of_the_text(load, tokenizer, of):
    texts = ["1+2=", "x" * 30, "10+20="]
    options = {"return_raw_input_ids": True, "max_prompt_length": 20, "filter_overlong": True}
    batch = load([row(of(text)) for text in texts], **options).batch
    expected = [tokenizer("1+2=").input_ids, tokenizer("10+20=").input_ids]
    assert [ids.tolist() for ids in batch["raw_input_ids"].rows()] == expected


def test_raw_input_ids_require_single_message_prompts(load):
    with pytest.raises(BatchError, match=r"row 1: .*has 2\. Use .*data\.return_raw_chat=true"):
        load([row(user("x")), row([*user("a"), *user("b")])], return_raw_input_ids=True)


# -- invalid rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, "", "  \n"])
def test_an_empty_prompt_is_an_error_that_names_the_row(load, bad):
    with pytest.raises(BatchError, match=r"train\.parquet, row 1: 'prompt' is empty"):
        load([row("x"), row(bad)])


def test_an_empty_conversation_is_an_error_that_names_the_row(load):
    with pytest.raises(BatchError, match=r"train\.parquet, row 1: 'prompt' is empty"):
        load([row(user("x")), row([])])


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"content": "x"}, "has no 'role', only"),
        ({"role": "user"}, "has no 'content'"),
        ({"role": "user", "content": None, "x": 1}, "has content=None"),
    ],
)
def test_a_message_without_role_or_content_names_the_row(load, message, problem):
    with pytest.raises(BatchError, match=rf"row 0: message 0 of 'prompt' {problem}"):
        load([row([message])])


def test_images_in_a_message_are_answered_with_their_topic() -> None:
    message = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]}
    with pytest.raises(BatchError, match=r"it must be a string\. Images are not implemented.*not-here\.md#images"):
        check_prompt([message], "row 0")


def test_a_prompt_that_is_a_number_is_an_error(load):
    with pytest.raises(BatchError, match="'prompt' has type int; it must be a string or a list of messages"):
        load([row(5)])


def test_messages_that_are_not_messages_are_an_error(load):
    with pytest.raises(
        BatchError, match="message 0 of 'prompt' has type str; it must be a mapping with role and content"
    ):
        load([row(["hello"])])


def test_a_prompt_without_tokens_is_an_error(load, tokenizer):
    # The tiny tokenizer drops non-ASCII characters.
    with pytest.raises(BatchError, match=r"row 0: the prompt '.*' has no tokens"):
        load([row("\u00e9")])


def test_prompts_are_encoded_without_a_file(tokenizer):
    chat, text = user("1+2="), "1+2="
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert encode_prompts([chat, text], tokenizer) == [expected, tokenizer(text)["input_ids"]]
    with pytest.raises(BatchError, match=r"prompt 1: the prompt '.*' has no tokens"):
        encode_prompts([chat, "\u00e9"], tokenizer)


def test_template_errors_name_the_row(load, tokenizer):
    picky = copy.deepcopy(tokenizer)
    picky.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        BatchError, match=r"row 0: the chat template rejects messages with the roles \['user'\]: roles must alternate"
    ):
        load([row(user("x"))], tokenizer=picky)


def test_messages_need_a_chat_template(load, tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(BatchError, match="no chat template"):
        load([row(user("x"))], tokenizer=bare)


def test_a_missing_column_is_an_error(load):
    with pytest.raises(BatchError, match="no column 'prompt'"):
        load([{"data_source": "s", "text": "x"}])
    with pytest.raises(BatchError, match="no column 'source'"):
        load([{"prompt": "x"}], reward_fn_key="source")


@pytest.mark.parametrize("prompt_key", ["question", "problem", "messages"])
@pytest.mark.parametrize("truth_key", ["answer", "solution", "label"])
def test_columns_may_have_other_usual_names(load, prompt_key, truth_key):
    batch = load([{prompt_key: "1+2=", truth_key: "3"}]).batch
    usual = load([row("1+2=", "3")]).batch
    assert batch["prompts"].values.tolist() == usual["prompts"].values.tolist()
    assert batch["ground_truth"].tolist() == usual["ground_truth"].tolist()
    assert batch["data_source"].tolist() == ["unknown"]


def test_rows_for_the_reward_function_have_the_selected_columns(load):
    rows = [{"question": user("x"), "level": 3, "text": "long"}]
    assert "data_row" not in load(rows).batch
    named = load(rows, reward_columns=("level", "prompt")).batch["data_row"][0]
    assert (named["level"], named["prompt"], "text" in named) == (3, user("x"), False)
    assert load(rows, reward_columns=None).batch["data_row"][0]["text"] == "long"
