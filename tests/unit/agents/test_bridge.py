"""What a chat template writes behind an answer: messages of all roles, in the style of published templates.

The oracle is the template itself, which formats the whole conversation.
"""

from typing import Any

import pytest
from support.chat_templates import CHAT_FAMILIES, ChatFamily, talking_tokenizer

from camshaft.agents.bridge import Bridge, TemplateRewrites
from camshaft.errors import BatchError

USER = {"role": "user", "content": "3+4?"}
TOOL = {"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 3}}}],
}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "7"}

CALL_LOOP = "{% for c in m.tool_calls or [] %}CALL{% endfor %}"
LAST_USER = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
QWEN = (
    "{% if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
    + LAST_USER
    + "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}{% else %}"
    "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' and loop.last and loop.index0 > ns.last %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ m.content }}"
    + CALL_LOOP.replace("CALL", "{{ '<tool_call>\\n' + c.function | tojson + '\\n</tool_call>' }}")
    + "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GPT_OSS = (
    "{% if tools %}{{ '<|start|>developer<|message|>' + tools | tojson + '<|end|>' }}{% endif %}"
    "{% set ns = namespace(name='') %}{% for m in messages %}{% if m.role == 'tool' %}{% if not ns.name %}"
    "{{ raise_exception('no call') }}{% endif %}"
    "{{ '<|start|>functions.' + ns.name + '<|message|>' + m.content | tojson + '<|end|>' }}"
    "{% elif m.tool_calls %}{% set f = m.tool_calls[-1].function %}{% set ns.name = f.name %}"
    "{{ '<|start|>assistant to=' + f.name + '<|message|>' + f.arguments | tojson + '<|call|>' }}{% else %}"
    "{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GEMMA = (
    "{% set ns = namespace(open=false) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|response>' + m.content + '<response|>' }}{% else %}{{ '<|turn>' + m.role + '\\n' + m.content }}"
    + CALL_LOOP.replace("CALL", "{{ '<|call>' + c.function.name + '{a:<|q|>' + c.function.arguments.a | string "
    "+ '<|q|>}<call|>' }}")
    + "{% if not m.tool_calls %}{{ '<turn|>\\n' }}{% elif loop.last %}{{ '<|response>' }}{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|turn>assistant\\n' }}{% endif %}"
)  # fmt: skip
MISTRAL = LAST_USER + (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.index0 == ns.last %}"
    "{{ '[TOOLS]' + tools | tojson }}{% endif %}{{ '[INST]' + m.content + '[/INST]' }}{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    "{{ '[RESULT]' + m.content + '[/RESULT]' }}{% elif m.tool_calls %}{{ '[CALLS]' + m.tool_calls | tojson + '</s>' }}"
    "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
)
FAMILIES = {
    "qwen": ChatFamily(QWEN, "<|im_end|>", ("<|im_start|>",)),
    "gpt-oss": ChatFamily(GPT_OSS, "<|end|>", ("<|start|>", "<|message|>", "<|call|>")),
    "gemma": ChatFamily(GEMMA, "<turn|>", ("<|turn>", "<|call>", "<call|>", "<|response>", "<response|>", "<|q|>")),
    "mistral": ChatFamily(MISTRAL, "</s>", ("[INST]", "[/INST]", "[TOOLS]", "[CALLS]", "[RESULT]", "[/RESULT]")),
}
ENDS = {"qwen": "<|im_end|>", "gpt-oss": "<|call|>", "gemma": "<|response>", "mistral": "</s>"}
SAMPLED = {
    "qwen": '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>',
    "gpt-oss": ' to=add<|message|>{"a": 3}',
    "gemma": "<|call>add{a:<|q|>3<|q|>}<call|>",
    "mistral": '[CALLS][{"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 3}}}]',
}


def text_of(tokenizer: Any, messages: list[Any]) -> str:
    return tokenizer.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True, tokenize=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_results_of_tools_follow_the_sampled_call(name: str) -> None:
    tokenizer = talking_tokenizer(FAMILIES[name])
    bridge = Bridge(tokenizer)
    prompt = str(tokenizer.decode(bridge.start([USER], [TOOL])))
    assert prompt == text_of(tokenizer, [USER])
    for stopped, sampled in ((False, SAMPLED[name]), (True, SAMPLED[name] + ENDS[name])):
        told = bridge.after([RESULT], stopped, [TOOL], CALLED["tool_calls"])
        assert prompt + sampled + str(tokenizer.decode(told)) == text_of(tokenizer, [USER, CALLED, RESULT])


@pytest.mark.parametrize("name", FAMILIES)
def test_text_answers_of_tool_users_are_continued(name: str) -> None:
    tokenizer = talking_tokenizer(FAMILIES[name])
    told = str(tokenizer.decode(Bridge(tokenizer).after([USER], False, [TOOL])))
    assert "add" not in told  # the prompt describes the tools already, and is not changed
    end = "</s>" if name == "mistral" else FAMILIES[name].end
    assert told.startswith(end)
    assert "3+4?" in told


def test_thinking_before_a_last_answer_is_no_error() -> None:
    tokenizer = talking_tokenizer(FAMILIES["qwen"])
    told = Bridge(tokenizer).after([USER], stopped=True)
    assert tokenizer.decode(told) == "\n<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n"


def test_the_messages_of_clients_are_understood() -> None:
    tokenizer = talking_tokenizer(FAMILIES["mistral"])
    bridge = Bridge(tokenizer)
    call = CALLED["tool_calls"][0]
    as_text = {**call, "function": {"name": "add", "arguments": '{"a": 3}'}}
    parts = [{"type": "text", "text": "3"}, {"type": "text", "text": "+4?"}]
    assert bridge.start([{**USER, "content": parts}]) == bridge.start([{**USER, "content": "3\n+4?"}])
    client = [USER, {"role": "assistant", "content": None, "tool_calls": [as_text]}, RESULT, USER]
    assert bridge.start(client) == bridge.start([USER, CALLED, RESULT, USER])


def test_a_template_that_drops_results_is_an_error() -> None:
    tokenizer = talking_tokenizer(FAMILIES["qwen"])
    tokenizer.chat_template = QWEN.replace("+ m.content + '\\n</tool", "+ '\\n</tool")
    with pytest.raises(TemplateRewrites, match="does not write messages with the role 'tool'"):
        Bridge(tokenizer).after([RESULT], True, [TOOL], CALLED["tool_calls"])


def test_a_template_without_tools_is_an_error() -> None:
    tokenizer = talking_tokenizer(CHAT_FAMILIES["gemma"])
    with pytest.raises(BatchError, match="must alternate"):
        Bridge(tokenizer).after([RESULT], True, [TOOL], CALLED["tool_calls"])


def test_a_template_that_drops_answers_is_an_error() -> None:
    tokenizer = talking_tokenizer(CHAT_FAMILIES["chatml"])
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(TemplateRewrites, match="writes answers as they are"):
        Bridge(tokenizer).after([USER], stopped=True)


def test_a_changed_beginning_is_reported() -> None:
    tokenizer = talking_tokenizer(CHAT_FAMILIES["chatml"])
    tokenizer.chat_template = "{{ messages | length }}" + CHAT_FAMILIES["chatml"].template
    rewritten = Bridge(tokenizer).rewrites()
    assert rewritten is not None
    assert rewritten.startswith("'1")


def test_thinking_that_is_removed_before_calls_is_reported() -> None:
    tokenizer = talking_tokenizer(FAMILIES["qwen"])
    template = QWEN.replace("{{ '<think>\\n\\n</think>\\n\\n' }}", "")
    tokenizer.chat_template = template
    assert Bridge(tokenizer).rewrites() is None
    removed = "(m.content.split('</think>')[-1] if m.tool_calls and not loop.last else m.content)"
    tokenizer.chat_template = template.replace("m.content", removed)
    assert "in the history of tool calls with thinking" in str(Bridge(tokenizer).rewrites())


def test_another_date_changes_no_result() -> None:
    tokenizer = talking_tokenizer(FAMILIES["qwen"])
    name = "(loop.previtem.tool_calls[0].function.name if loop.previtem.tool_calls else '')"
    template = QWEN.replace("<tool_response>", f"<tool_response name=' + {name} + '>")
    call = "'<tool_call>\\n' + c.function | tojson + '\\n</tool_call>'"
    assert call in template
    tokenizer.chat_template = "{{ date }}" + template.replace(call, "c.function.arguments.a")
    arguments = {"date": "1 May"}
    bridge = Bridge(tokenizer, arguments)
    told = [bridge.after([RESULT], True, [TOOL], CALLED["tool_calls"])]
    arguments["date"] = "2 May"
    told.append(bridge.after([RESULT], True, [TOOL], CALLED["tool_calls"]))
    assert told[0] == told[1]
    assert "<tool_response name=add>" in str(tokenizer.decode(told[0]))
