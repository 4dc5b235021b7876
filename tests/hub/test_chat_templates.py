"""Prompts and loss masks with chat templates of published models, which the packages trl and vllm contain.

The oracle is transformers: `apply_chat_template` with the same arguments, and its mask of the generation blocks.
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
from camshaft.data.sft import SFTOptions, load_sft
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
MASKS = (
    *("qwen2_5", "qwen3", "qwen3_5_think", "qwen3_6", "qwen3_8", "glm4moe", "nemotron_3_nano", "gptoss", "lfm2_v2"),
    *("llama3", "phi3", "gemma3", "deepseekv3", "cohere2"),
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


@pytest.mark.parametrize("name", MASKS)
def test_trained_tokens_are_those_of_the_generation_blocks(name: str, tmp_path: Path) -> None:
    template = read_template(f"trl/{name}_training")
    tokenizer = tokenizer_with(template)
    conversations = [[USER, ANSWER], [SYSTEM, USER, ANSWER, USER, ANSWER]]
    if "tool_calls" in template:
        conversations += [[USER, CALL, RESULT, ANSWER], [USER, CALL, RESULT, CALL, RESULT, ANSWER, USER, ANSWER]]
    rows = [{"messages": messages, "tools": [ADD]} for messages in conversations]
    batch = load_sft(write_parquet(tmp_path / "rows.parquet", rows), tokenizer, SFTOptions(max_length=10_000)).batch
    loaded = zip(batch["input_ids"].rows(), batch["loss_mask"].rows(), strict=True)
    for row, (ids, mask) in zip(rows, loaded, strict=True):
        whole = tokenizer.apply_chat_template(
            row["messages"], tools=row["tools"], return_dict=True, return_assistant_tokens_mask=True
        )
        trained = [bool(value) for value in whole["assistant_masks"]]
        assert ids.tolist() == whole["input_ids"][: len(ids)]
        assert mask.tolist() == trained[: len(ids)]
        assert mask[-1]
        assert not any(trained[len(ids) :])


# Published templates have no generation blocks: the text that the model generates, up to the end of a turn.
GENERATED = {
    "qwen2_5": ("{call}<|im_end|>", "7<|im_end|>"),
    "qwen3": ("<think>\n\n</think>\n\n{call}<|im_end|>", "<think>\n\n</think>\n\n7<|im_end|>"),
    "lfm2_v2": (None, "7<|im_end|>"),
    "llama3_1": ('{"name": "add", "parameters": {"a": 3, "b": 4}}<|eot_id|>', "7<|eot_id|>"),
}
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


@pytest.mark.parametrize("name", GENERATED)
def test_turns_with_tools_train_what_the_model_generates(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(read_template(f"trl/{name}"))
    call, answer = GENERATED[name]
    rows = [{"messages": [USER, CALL, RESULT, ANSWER] if call else [USER, ANSWER], "tools": [ADD]}]
    batch = load_sft(write_parquet(tmp_path / "rows.parquet", rows), tokenizer, SFTOptions(max_length=10_000)).batch
    trained = [
        tokenizer.decode(ids[mask])
        for ids, mask in zip(*(batch[c].rows() for c in ("input_ids", "loss_mask")), strict=True)
    ]
    assert "".join(trained) == (call or "").replace("{call}", QWEN_CALL) + answer
