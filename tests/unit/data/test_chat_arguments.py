"""Arguments of the chat template: those of all rows, and the tools of a row. The oracle is transformers."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from camshaft.config.schema.data import ChatTemplateConfig
from camshaft.data import PromptOptions, encode_prompts, load_prompts
from camshaft.data.sft import SFTOptions, load_sft
from camshaft.data.tables import write_parquet
from camshaft.errors import BatchError

TEMPLATE = (
    "{% if tools %}<|im_start|>s{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role[0] }}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function | tojson }}]{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a{% if enable_thinking is false %}#{% endif %}{% endif %}"
)
USER = [{"role": "user", "content": "3+4="}]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


ADD = tool("add", a={"type": "number"}, b={"type": "number"})
ROOT = tool("root", x={"type": "number", "enum": [4, 9]})
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}


@pytest.fixture
def tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    chosen = copy.deepcopy(tokenizer)
    chosen.chat_template = TEMPLATE
    return chosen


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.fixture
def prompts(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    def load(rows: list[dict[str, Any]], suffix: str = "parquet", **chat: Any) -> list[list[int]]:
        file = tmp_path / f"rows.{suffix}"
        if suffix == "parquet":
            write_parquet(file, rows)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        options = PromptOptions(max_prompt_length=2000, chat=ChatTemplateConfig(**chat))
        return [ids.tolist() for ids in load_prompts(file, tokenizer, options).batch["prompts"].rows()]

    return load


def expected(tokenizer: PreTrainedTokenizerFast, **arguments: Any) -> list[int]:
    ids: Any = tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=False, **arguments)
    return ids


@pytest.mark.parametrize("thinking", [True, False])
def test_arguments_of_all_rows_reach_the_template(prompts, tokenizer, thinking: bool) -> None:
    [ids] = prompts([{"prompt": USER}], chat_template_kwargs={"enable_thinking": thinking})
    assert ids == expected(tokenizer, enable_thinking=thinking)
    assert encode_prompts([USER], tokenizer, arguments=[{"enable_thinking": thinking}]) == [ids]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_tools_of_a_row_are_in_its_prompt(prompts, tokenizer, suffix: str) -> None:
    tools = [[ADD], [ADD, ROOT], None]  # parquet stores all fields of both tools in each
    rows = [{"prompt": USER, "tools": value} for value in tools]
    assert prompts(rows, suffix) == [expected(tokenizer, tools=value) for value in tools]
    assert len({len(ids) for ids in prompts(rows, suffix)}) == 3


@pytest.mark.parametrize("value", [json.dumps([ADD, ROOT]), [json.dumps(ADD), json.dumps(ROOT)]])
def test_tools_may_be_json_texts(prompts, tokenizer, value: Any) -> None:
    assert prompts([{"prompt": USER, "tools": value}]) == [expected(tokenizer, tools=[ADD, ROOT])]


@pytest.mark.parametrize("value", ["add", '{"name": "add"}', "[1]", [1.5], {"name": "add"}])
def test_invalid_tools_name_the_row(prompts, value: Any) -> None:
    with pytest.raises(BatchError, match=r"row 0: 'tools' is .*; it must be a list of JSON schemas, or its JSON text"):
        prompts([{"prompt": USER, "tools": value}])


def test_tools_of_another_column_are_required(prompts, tokenizer) -> None:
    rows = [{"prompt": USER, "functions": [ADD]}]
    assert prompts(rows, tools_key="functions") == [expected(tokenizer, tools=[ADD])]
    assert prompts(rows, tools_key=None) == prompts(rows) == [expected(tokenizer)]
    with pytest.raises(BatchError, match=r"has no column 'function'\. Did you mean 'functions'"):
        prompts(rows, tools_key="function")


def test_arguments_that_the_template_ignores_are_warnings(prompts, tokenizer, caplog) -> None:
    prompts([{"prompt": USER, "tools": [ADD]}], chat_template_kwargs={"enable_thinking": True})
    assert not warnings(caplog)
    prompts([{"prompt": USER}], chat_template_kwargs={"enable_thinkin": True})
    [message] = warnings(caplog)
    assert message.startswith("'enable_thinkin' of data.chat_template_kwargs is not read by the chat template;")
    caplog.clear()
    tokenizer.chat_template = "{{ messages[0].content }}"
    prompts([{"prompt": USER, "tools": [ADD]}])
    assert warnings(caplog)[0].startswith("the tools of the rows are not read by the chat template;")
    caplog.clear()
    prompts([{"prompt": "3+4=", "tools": [ADD]}])
    assert warnings(caplog)[0].startswith("the tools of the rows are not read, because no chat template formats plain")


CONVERSATION = [
    *USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "It is 7."},
]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_sft_reads_tools_and_tool_calls(tmp_path: Path, tokenizer, suffix: str) -> None:
    other = [{"role": "user", "content": "9?"}, {"role": "assistant", "content": "3", "tool_calls": None}]
    rows = [{"messages": CONVERSATION, "tools": [ADD]}, {"messages": other, "tools": [ROOT]}]
    file = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        write_parquet(file, rows)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    batch = load_sft(file, tokenizer, SFTOptions()).batch
    for row, ids, mask in zip(rows, batch["input_ids"].rows(), batch["loss_mask"].rows(), strict=True):
        whole: Any = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], return_dict=False)
        assert ids.tolist() == whole
        trained = tokenizer.decode(ids[mask])
        turns = [turn for turn in row["messages"] if turn["role"] == "assistant"]
        assert trained == "".join(
            (turn["content"] or "")
            + "".join(f"[{json.dumps(call['function'])}]" for call in turn.get("tool_calls") or [])
            + "<|im_end|>"
            for turn in turns
        )


def test_a_message_without_content_needs_tool_calls(prompts) -> None:
    with pytest.raises(BatchError, match="content=None; it must be a string"):
        prompts([{"prompt": [{"role": "user", "content": None}]}])


def test_a_prompt_template_makes_text_a_message(prompts, tokenizer, tmp_path: Path) -> None:
    [text, messages] = prompts([{"prompt": "3+4="}], prompt_template="{prompt} {a}") + prompts([{"prompt": USER}])
    message = [{"role": "user", "content": "3+4= {a}"}]
    assert text == tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert messages == expected(tokenizer)
    file = write_parquet(tmp_path / "sft.parquet", [{"prompt": "3+4=", "response": "7"}])
    [ids] = (
        load_sft(file, tokenizer, SFTOptions(chat=ChatTemplateConfig(prompt_template="{prompt} {a}")))
        .batch["input_ids"]
        .rows()
    )
    turns = [*message, {"role": "assistant", "content": "7"}]
    assert ids.tolist() == tokenizer.apply_chat_template(turns, return_dict=False)


def test_text_parts_are_the_lines_of_a_message(prompts) -> None:
    parts = [{"type": "text", "text": "3"}, {"type": "text", "text": "+4?"}]
    as_parts = prompts([{"prompt": [{"role": "user", "content": parts}]}])
    as_text = prompts([{"prompt": [{"role": "user", "content": "3\n+4?"}]}])
    assert as_parts == as_text
