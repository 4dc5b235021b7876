"""Columns that look like tools, images or preference pairs, and are not read, are notices."""

from pathlib import Path
from typing import Any

import pytest

from camshaft.config.schema.data import ChatTemplateConfig
from camshaft.data import PromptOptions, load_preferences, load_prompts, load_sft
from camshaft.data.preferences import PreferenceOptions
from camshaft.data.sft import SFTOptions
from camshaft.data.tables import write_parquet

ROW: dict[str, Any] = {"prompt": "1+2=", "ground_truth": "3", "response": "3", "chosen": "3", "rejected": "4"}
NO_TOOLS = ChatTemplateConfig(tools_key=None)


@pytest.fixture
def notices(tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture):
    def load(kind: str, chat: ChatTemplateConfig | None = None, **columns: Any) -> list[str]:
        file = write_parquet(tmp_path / "rows.parquet", [{**ROW, **columns}])
        chat = ChatTemplateConfig() if chat is None else chat
        caplog.clear()
        if kind == "prompts":
            load_prompts(file, tokenizer, PromptOptions(chat=chat))
        elif kind == "sft":
            load_sft(file, tokenizer, SFTOptions(chat=chat))
        else:
            load_preferences(file, tokenizer, PreferenceOptions())
        return [record.getMessage() for record in caplog.records if record.name == "camshaft.data.unread"]

    return load


def test_preference_pairs_are_named_where_they_are_not_read(notices) -> None:
    for kind in ("prompts", "sft"):
        [notice] = notices(kind)
        assert notice.startswith(
            "the columns chosen, rejected are not read. Preference optimization (DPO and its variants)"
        )
        assert notice.endswith("camshaft rm trains a reward model on pairs of chosen and rejected responses.")
    assert notices("preferences") == []


@pytest.mark.parametrize("kind", ["prompts", "sft", "preferences"])
def test_images_are_named(notices, kind: str) -> None:
    assert "the column images is not read. Images are not implemented" in "".join(notices(kind, images=["a.png"]))


def test_tools_are_named_unless_a_key_selects_them(notices) -> None:
    tools = [{"name": "add"}]
    hint = "is not read. Set data.tools_key={} to pass its tools to the chat template."
    assert notices("prompts", functions=tools)[0] == f"the column functions {hint.format('functions')}"
    assert notices("sft", NO_TOOLS, tools=tools)[0] == f"the column tools {hint.format('tools')}"
    chosen = ChatTemplateConfig(tools_key="functions")
    assert not any("tools_key" in notice for notice in notices("prompts", chosen, functions=tools))
    assert notices("preferences", tools=tools) == [
        "the column tools is not read. Tools of preference pairs are not implemented."
    ]
