"""Classes in the form of TRL's `environment_factory` run unchanged, and equal the trainer of TRL with the same answers.

make test-agents
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import CHAT_FAMILIES, talking_tokenizer

from camshaft.agents import play as playing
from camshaft.agents.bridge import Bridge
from camshaft.agents.environment import Host, Start
from camshaft.agents.messages import describe
from camshaft.agents.play import Limits, Question
from camshaft.models.tiny import make_tiny_model
from camshaft.plugins import import_file
from camshaft.rollout import BaseRollout, SamplingParams, WaveRow
from camshaft.rollout.stream import Answer

pytestmark = pytest.mark.agents
ROOT = Path(__file__).parents[2]
TRL = ROOT / ".venv-trl" / "bin" / "python"
TEMPLATE = ROOT / ".venv-agents" / "trl" / "chat_templates" / "qwen2_5.jinja"
FOLDER = Path(__file__).parent / "trl_classes"
LIMITS = Limits(max_prompt=4000, max_response=1500)


def calls(*arguments: tuple[str, dict[str, Any]], content: str = "") -> str:
    """Return an answer with tool calls, as the template of Qwen2.5 writes it."""
    written = [json.dumps({"name": name, "arguments": values}) for name, values in arguments]
    return content + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)


ROWS: dict[str, list[tuple[int, list[str]]]] = {
    "Counter": [
        (6, [calls(("add", {"amount": 3})), calls(("double", {})), "It is 6."]),
        (6, [calls(("add", {"amount": 1}), ("add", {"amount": 2})), "done"]),
        (6, ["I cannot count."]),
    ],
    "Notes": [
        (0, [calls(("write", {"name": "a", "text": "milk"})), calls(("read", {"name": "a"})), "milk"]),
        (0, [calls(("write", {"name": "b", "text": "x"}), ("write", {"name": "b", "text": "y"})), "written"]),
        (0, ["nothing to note"]),
    ],
    "Shop": [
        (3, [calls(("buy", {"item": "tea"}), ("buy", {"item": "bread", "price": 2})), "tea and bread"]),
        (3, [calls(("buy", {"item": "gold", "price": 9}), content="Gold!\n"), "too expensive"]),
        (3, ["no"]),
    ],
}
"""Target and answers of the rows of each class."""
END = "<|im_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model, a tokenizer with a template that TRL knows, and the rows."""
    folder = tmp_path_factory.mktemp("trl") / "model"
    tokenizer = talking_tokenizer(CHAT_FAMILIES["chatml"])
    tokenizer.chat_template = TEMPLATE.read_text()
    make_tiny_model(
        folder, vocab_size=len(tokenizer), max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id
    )
    tokenizer.save_pretrained(folder)
    rows = {
        name: [
            {
                "prompt": [{"role": "user", "content": f"Row {i}."}],
                "target": target,
                "answers": [a + END for a in answers],
            }
            for i, (target, answers) in enumerate(rows)
        ]
        for name, rows in ROWS.items()
    }
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder


def play_here(
    kind: type, rows: Sequence[dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """Play rows with scripted answers."""
    tokenizer = talking_tokenizer(CHAT_FAMILIES["chatml"])
    tokenizer.chat_template = (folder / "chat_template.jinja").read_text()

    def scripted(_rollout: Any, wave: Sequence[WaveRow]) -> list[Answer]:
        answers: list[Answer] = []
        for row in wave:
            text = str(tokenizer.decode(row.tokens))
            turn = text.count("<|im_start|>assistant") - 1
            answer = rows[int(text.split("Row ")[1].split(".")[0])]["answers"][turn]
            tokens: list[int] = tokenizer(answer, add_special_tokens=False)["input_ids"]  # pyright: ignore
            answers.append(Answer(row.row_id, tokens, [0.0] * len(tokens), [0] * len(tokens), "stop"))
        return answers

    monkeypatch.setattr(playing, "generate_wave", scripted)
    loaded = describe({"": kind}, {}, {})
    assert loaded.scored == ("",)
    questions = [
        Question(row["prompt"], Start({**row, "answers": None}), 1, loaded.schemas[""], is_scored=True) for row in rows
    ]
    rollout: BaseRollout = Unused()  # pyright: ignore[reportAssignmentType]
    episodes = playing.play(rollout, Host({"": kind}), questions, Bridge(tokenizer), LIMITS, SamplingParams(1500))
    return [
        {"messages": episode.messages, "tokens": episode.tokens, "score": sum(episode.rewards)} for episode in episodes
    ]


class Unused:
    """A rollout that is not called."""

    def close_rows(self, rows: Any) -> None: ...


def said(messages: Sequence[dict[str, Any]]) -> list[Any]:
    """Return what a conversation says, without ids and empty fields."""
    return [
        (
            message["role"],
            (message.get("content") or "").strip(),
            [(call["function"]["name"], arguments(call)) for call in message.get("tool_calls") or ()],
        )
        for message in messages
    ]


def arguments(call: dict[str, Any]) -> Any:
    value = call["function"]["arguments"]
    return json.loads(value) if isinstance(value, str) else value


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ROWS)
def test_a_class_equals_the_trainer_of_trl(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "PYTHONPATH": "", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(TRL), str(FOLDER / "play_trl.py"), str(folder), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    expected = json.loads(done.stdout.partition("PLAYED")[2])
    kind = getattr(import_file(str(FOLDER / "environments.py"), "environment"), name)
    played = play_here(kind, json.loads((folder / "rows.json").read_text())[name], folder, monkeypatch)
    assert [said(row["messages"]) for row in played] == [said(row["messages"]) for row in expected]
    assert [row["score"] for row in played] == [row["score"] for row in expected]
    assert [row["tokens"] for row in played] == [row["tokens"] for row in expected]


HARBOR = """
from trl.experimental.harbor import HarborBashEnv

class Result:
    def __init__(self, stdout):
        self.stdout, self.stderr, self.return_code = stdout, "", 0

class Box:
    files = ()

    async def exec(self, command, timeout_sec=None):
        import subprocess
        return Result(subprocess.run(command, shell=True, cwd=self.folder, capture_output=True, text=True).stdout)

    async def stop(self, delete):
        pass

class Local(HarborBashEnv):
    async def _start(self, task_dir):
        import tempfile
        await self._stop()
        self._env = Box()
        self._env.folder = tempfile.mkdtemp()
        return f"Write {task_dir} to answer.txt."

    async def _verify(self):
        from pathlib import Path
        file = Path(self._env.folder) / "answer.txt"
        return float(file.exists() and file.read_text().strip() == "42")
"""


def test_an_environment_of_harbor_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    (tmp_path / "local.py").write_text(HARBOR)
    commands = ["echo 42 > answer.txt", "echo 41 > answer.txt"]
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Row {i}. "}],
            "task_dir": "42",
            "answers": [calls(("bash", {"command": f"{command} && cat answer.txt"})) + END, "done" + END],
        }
        for i, command in enumerate(commands)
    ]
    kind = import_file(str(tmp_path / "local.py"), "environment").Local
    solved, failed = play_here(kind, rows, folder, monkeypatch)
    assert "Write 42 to answer.txt." in solved["messages"][0]["content"]
    assert [row["messages"][2]["content"].strip() for row in (solved, failed)] == ["42", "41"]
    assert (solved["score"], failed["score"]) == (1.0, 0.0)
