"""Tool calls in answers: formats, malformed calls, and parsing by a tokenizer's template."""

import json
import pickle
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import CHAT_FAMILIES, talking_tokenizer

import camshaft.plugins
from camshaft.agents.calls import Call, Parsed
from camshaft.agents.parsers import ToolParser, detect_format, parse_hermes, parse_json
from camshaft.errors import ConfigError

ADD = Call("add", {"a": 3, "b": 4})
OBJECT = '{"name": "add", "arguments": {"a": 3, "b": 4}}'
PARAMETERS = OBJECT.replace("arguments", "parameters")
NESTED = "[" * 10_000
BOTTOMLESS = '{"a": ' + "[" * 100 + "]" * 100 + "}"
CALL = f"<tool_call>\n{OBJECT}\n</tool_call>"
CHATML_CALLS = CHAT_FAMILIES["chatml"].template.replace(
    "m['content'] +", "m['content'] + ('OPEN' + (m.tool_calls[0].function | tojson) if m.tool_calls else '') +"
)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("It is 7.", Parsed("It is 7.")),
        (CALL, Parsed("", (ADD,))),
        (f"I add.\n{CALL}\n{CALL}", Parsed("I add.", (ADD, ADD))),
        (f"<tool_call>{json.dumps({'name': 'now'})}</tool_call>", Parsed("", (Call("now", {}),))),
    ],
)
def test_hermes_calls_are_found(text: str, parsed: Parsed) -> None:
    assert parse_hermes(text) == parsed


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (PARAMETERS, Parsed("", (ADD,))),
        (f"{OBJECT}; {PARAMETERS}", Parsed("", (ADD, ADD))),
        (f"[{OBJECT}, {OBJECT}]", Parsed("", (ADD, ADD))),
        ('{"answer": 7}', Parsed('{"answer": 7}')),
        ("{x: 7}", Parsed("{x: 7}")),
        ('{"a": ' + NESTED, Parsed('{"a": ' + NESTED)),
        ("7 {}", Parsed("7 {}")),
    ],
)
def test_json_calls_are_found(text: str, parsed: Parsed) -> None:
    assert parse_json(text) == parsed


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"<tool_call>{OBJECT[:-1]}</tool_call>", "cannot be read"),
        (f"<tool_call>{OBJECT}", "</tool_call> is missing"),
        ("<tool_call>3</tool_call>", "not an object with name"),
        ('<tool_call>{"name": "add", "arguments": [3]}</tool_call>', "arguments of add are not an object"),
        ('<tool_call>{"name": "add", "arguments": "{3"}</tool_call>', "arguments of add are not JSON"),
        (f"<tool_call>{NESTED}</tool_call>", "maximum recursion depth"),
        (f'<tool_call>{{"name": "add", "arguments": "{NESTED}"}}</tool_call>', "arguments of add are not JSON"),
        (
            f'<tool_call>{{"name": "add", "arguments": {BOTTOMLESS}}}</tool_call>',
            "arguments of add are nested more than",
        ),
        (
            f'<tool_call>{{"name": "add", "arguments": {json.dumps(BOTTOMLESS)}}}</tool_call>',
            "arguments of add are nested more than 100 levels deep",
        ),
        (f"<tool_call>{BOTTOMLESS}</tool_call>", "a deeply nested value is not an object with name"),
    ],
)
def test_malformed_calls_keep_their_place(text: str, reason: str) -> None:
    parsed = parse_hermes(f"{CALL}{text}" if text.endswith(OBJECT) else f"{CALL}{text}{CALL}")
    assert parsed.calls[0] == ADD
    assert reason in str(parsed.calls[1].error)
    assert parsed.errors == (parsed.calls[1].error,)
    assert parsed.calls[2:] in ((), (ADD,))


@pytest.mark.parametrize(("depth", "is_read"), [(100, True), (101, False), (900, False)])
def test_arguments_have_a_hundred_levels(depth: int, is_read: bool) -> None:
    arguments = '{"a": ' * depth + "1" + "}" * depth
    for parse, key in ((parse_hermes, "arguments"), (parse_json, "parameters")):
        text = f'{{"name": "add", "{key}": {arguments}}}'
        (call,) = parse(f"<tool_call>{text}</tool_call>" if parse is parse_hermes else text).calls
        assert (call.error is None, call.arguments) == (is_read, json.loads(arguments) if is_read else {})
        pickle.dumps(call)


def test_a_malformed_json_call_is_an_error() -> None:
    (call,) = parse_json(OBJECT[:-1]).calls
    assert "cannot be read" in str(call.error)


def tokenizer_of(template: str) -> Any:
    tokenizer = talking_tokenizer(CHAT_FAMILIES["chatml"])
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (CHATML_CALLS.replace("OPEN", ""), "json"),
        (CHATML_CALLS.replace("OPEN", "<tool_call>"), "hermes"),
        (CHAT_FAMILIES["chatml"].template, "hermes"),
    ],
)
def test_auto_is_the_format_of_the_template(template: str, name: str) -> None:
    assert detect_format(tokenizer_of(template)) == name


def test_special_tokens_are_no_content() -> None:
    tokenizer = talking_tokenizer(CHAT_FAMILIES["chatml"])
    ids = tokenizer.encode(f"Add.{CALL}<|im_end|>")
    assert ToolParser(tokenizer, "hermes").parse(ids) == Parsed("Add.", (ADD,))
    assert ToolParser(tokenizer, "json").parse(tokenizer.encode("7<|im_start|><|im_end|>")) == Parsed("7")


RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {"close_pattern": r"(?=<tool_call>)|<\|im_end\|>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def test_a_response_template_parses_answers() -> None:
    tokenizer = talking_tokenizer(CHAT_FAMILIES["chatml"])
    tokenizer.response_template = RESPONSE_TEMPLATE
    parser = ToolParser(tokenizer)
    prefix = tokenizer.encode("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(f"<think>3 and 4</think>I add.{CALL}{CALL}<|im_end|>")
    assert parser.parse(ids, prefix) == Parsed("I add.", (ADD, ADD), "3 and 4")
    (call,) = parser.parse(tokenizer.encode("<tool_call>{3}</tool_call><|im_end|>"), prefix).calls
    assert "cannot be read" in str(call.error)


def test_a_package_adds_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("shout", "unit_agents_shout:parse", "camshaft.tool_parsers")
    monkeypatch.setattr(camshaft.plugins, "_entry_points", lambda group: [point] if group == point.group else [])
    module = type(camshaft.plugins)("unit_agents_shout")
    vars(module)["parse"] = lambda text: Parsed(text.lower(), (Call(text, {}),))
    monkeypatch.setitem(__import__("sys").modules, "unit_agents_shout", module)
    assert ToolParser(talking_tokenizer(CHAT_FAMILIES["chatml"]), "shout").parse("ADD") == Parsed(
        "add", (Call("ADD", {}),)
    )


def test_a_format_is_a_function(tmp_path: Path) -> None:
    file = tmp_path / "format.py"
    file.write_text("import json\n\n\ndef read(text): ...")
    with pytest.raises(ConfigError, match=r"format=.*format.py:json has type module; a tool parser is a function"):
        ToolParser(talking_tokenizer(CHAT_FAMILIES["chatml"]), f"{file}:json")
    ToolParser(talking_tokenizer(CHAT_FAMILIES["chatml"]), f"{file}:read")


@pytest.mark.parametrize(("depth", "is_read"), [(100, True), (101, False)])
def test_calls_of_a_format_of_yours_have_the_same_limit(tmp_path: Path, depth: int, is_read: bool) -> None:
    file = tmp_path / "format.py"
    file.write_text(
        "import json\nfrom camshaft.agents.calls import Call, Parsed\n\n\n"
        "def read(text):\n    return Parsed('', (Call('add', json.loads(text)), Call('sub', {'a': 1})))\n"
    )
    parser = ToolParser(talking_tokenizer(CHAT_FAMILIES["chatml"]), f"{file}:read")
    deep, flat = parser.parse('{"a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}").calls
    assert (deep.error is None) == is_read
    assert is_read or "arguments of add are nested more than 100 levels deep" in str(deep.error)
    assert flat == Call("sub", {"a": 1})
