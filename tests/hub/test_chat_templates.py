"""Prompts with chat templates of published models, which the packages trl and vllm contain.

The oracle is transformers.
"""

import copy
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from support.tiny import tiny_tokenizer_folder
from transformers import AutoTokenizer

from camshaft.config.schema.data import ChatTemplateConfig
from camshaft.data import PromptOptions, load_prompts
from camshaft.data.tables import write_parquet

pytestmark = pytest.mark.hub

ROOT = Path(__file__).parents[2]
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4?"}
ANSWER = {"role": "assistant", "content": "7"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "number", "description": "one"},
                "b": {"type": "number", "description": "two"},
            },
            "required": ["a", "b"],
        },
    },
}
ROOT_OF = {
    "type": "function",
    "function": {
        "name": "root",
        "description": "Square root",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "number", "description": "at least 0", "enum": [4, 9]}},
            "required": ["x"],
        },
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}],
}
RESULT = {"role": "tool", "name": "add", "content": "7"}

PROMPTS = (
    *("trl/qwen2_5", "trl/qwen3", "trl/qwen3_6", "trl/glm4moe", "trl/nemotron_3_nano", "trl/gptoss", "trl/lfm2_v2"),
    *("trl/llama3_1", "trl/gemma3", "vllm/template_chatml"),
)


def read_template(name: str) -> str:
    """Return a template of the package trl, or of vllm, which may be in an environment of its own."""
    package, _, stem = name.partition("/")
    spec = importlib.util.find_spec(package)
    folders = (
        [Path(str(spec.origin)).parent] if spec else ROOT.glob(f".venv-{package}/lib/python*/site-packages/{package}")
    )
    [file] = [file for folder in folders for file in folder.rglob(f"chat_templates/{stem}.jinja")]
    return file.read_text(encoding="utf-8")


def tokenizer_with(template: str) -> Any:
    """Return the tiny tokenizer with a template and its special tokens."""
    tokenizer: Any = copy.deepcopy(AutoTokenizer.from_pretrained(tiny_tokenizer_folder()))
    special = dict.fromkeys(
        re.findall(r"<\|[\w]+\|>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>|<\uff5c[^>]+\uff5c>", template)
    )
    tokenizer.add_special_tokens({"extra_special_tokens": ["<bos>", *special]})
    tokenizer.bos_token = "<bos>"
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_are_those_of_transformers(name: str, thinking: bool, tmp_path: Path) -> None:
    template = read_template(name)
    tokenizer = tokenizer_with(template)
    tools = "tools" in template
    rows: list[dict[str, Any]] = [
        {"prompt": [USER], "tools": None},
        {"prompt": [USER], "tools": [ADD]},
        {"prompt": [USER], "tools": [ADD, ROOT_OF]},
        {"prompt": [SYSTEM, USER, ANSWER, USER], "tools": [ROOT_OF]},
        *([{"prompt": [USER, CALL, RESULT], "tools": [ADD]}] if tools else []),
    ]
    chat = ChatTemplateConfig(chat_template_kwargs={"enable_thinking": thinking})
    file = write_parquet(tmp_path / "rows.parquet", rows)
    batch = load_prompts(file, tokenizer, PromptOptions(max_prompt_length=10_000, chat=chat)).batch
    prompts = [ids.tolist() for ids in batch["prompts"].rows()]
    for row, ids in zip(rows, prompts, strict=True):
        assert ids == tokenizer.apply_chat_template(
            row["prompt"], tools=row["tools"], enable_thinking=thinking, add_generation_prompt=True, return_dict=False
        )
    assert (prompts[0] != prompts[1] != prompts[2]) == tools
