"""The check of environments: each mistake has a finding, and correct environments have none."""

import json
import random
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import CHAT_FAMILIES, talking_tokenizer
from support.command_line import camshaft
from support.tiny import tiny_tokenizer_folder

from camshaft.agents.bridge import Bridge
from camshaft.agents.check.findings import Report, check_environment
from camshaft.agents.check.inputs import check_template, mask_parts
from camshaft.agents.check.scripted import random_value
from camshaft.cli import main
from camshaft.config.schema.agents import MultiTurnConfig

EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"

GAME = """
import itertools, math, os, pathlib, random, time

COUNTER = itertools.count()


class Game:
    total = 0

    def reset(self, row_seed):
        self.number, self.turn = row_seed, 0
        return f"Begin {random.random()}"

    def step(self, answer):
        self.turn += 1
        STEP
        return f"{self.turn} {answer}", 0.5, self.turn == 2
"""

MISTAKES = {
    "a random observation": ("return str(os.urandom(4)), 0.0, self.turn == 2", "not deterministic.*observation is"),
    "a random reward": ("return 'x', random.Random().random(), self.turn == 2", "not deterministic.*reward is"),
    "a random end": ("return 'x', 0.0, self.turn == 9 or os.urandom(1) < b'\\x80'", "not deterministic.*(done|ends)"),
    "a counter of the module": ("return str(next(COUNTER)), 0.0, self.turn == 2", "no state outside of the object"),
    "an attribute that is not reset": (
        "self.total += 1; return str(self.total), 0.0, self.turn == 2",
        "reset does not clear.*answer 1 of episode \\d differs: the observation is '1' and then '3'.*in reset",
    ),
    "no end": ("return 'x', 0.0, False", "has not ended after 50 answers .10 of 10.*max_turns"),
    "a reward that is NaN": ("return 'x', math.nan, True", "answer 1 .* fails, in 10 of 10 .* is nan; return a finite"),
    "a reward that is a text": ("return 'x', '1', True", "the reward of step .* is '1'; return a finite number"),
    "an observation that is a number": ("return 5, 1.0, True", "step of the environment says 5; it must be a text"),
    "an observation that is nothing": ("return None, 1.0, False", "says nothing .None., but the episode is not done"),
    "two values": ("return 'x', 1.0", "return .text, reward, done."),
    "an exception": (
        "return 'x', 1 / 0, True",
        "ZeroDivisionError: division by zero .*game.py, line 16, in step.*Hand",
    ),
    "an exit": ("os._exit(3)", "the process exited with code 3; see the output"),
    "a call that hangs in one episode": (
        "time.sleep(600 * (self.number == 3)); return 'x', 0.0, True",
        "answer 1 .* of episode 3 fails: no result within 1 s.*increase multi_turn.timeout",
    ),
    "a failure at first": (
        "mark = pathlib.Path(__file__).with_suffix('.mark')\n"
        "        if not mark.exists(): mark.touch(); raise ValueError('once')\n"
        "        return 'x', 0.0, True",
        "1 calls failed at first and succeeded when their episodes were repeated",
    ),
}

Check = Callable[..., Report]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Return a function that checks the class `Game` of a program."""

    def run(program: str, rows: list[dict[str, Any]] | None = None, **settings: Any) -> Report:
        file = tmp_path / "game.py"
        file.write_text(textwrap.dedent(program), encoding="utf-8")
        return check_environment(MultiTurnConfig(environment=(f"{file}:Game",), **settings), rows=rows)

    return run


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_step_has_one_finding(mistake: str, check: Check) -> None:
    step, expected = MISTAKES[mistake]
    limits = {"timeout": 1.0} if "hangs" in mistake else {}
    (finding,) = check(GAME.replace("STEP", step), **limits).findings
    assert matches(expected, finding), finding


def matches(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.DOTALL) is not None


@pytest.mark.parametrize("example", ["higher_lower.py", "hint.py", "hint_tools.py"])
def test_examples_have_no_findings(example: str) -> None:
    section = MultiTurnConfig(environment=(str(EXAMPLES / example),))
    report = check_environment(section, rows=[{"prompt": [{"role": "user", "content": "Play. "}], "ground_truth": 7}])
    assert report.findings == []
    assert len(report.episodes) == 10
    assert all(played.answers for played in report.episodes.values())


def test_a_correct_game_with_random_numbers_and_coroutines_has_no_findings(check: Check) -> None:
    step = "return str(random.random()), random.random(), self.turn == 2"
    program = GAME.replace("STEP", step).replace("def step", "async def step")
    report = check(program)
    assert report.findings == []
    assert report.num_calls == 3 * 10 * 3  # three times ten episodes of reset and two answers


@pytest.mark.parametrize(("limit", "count"), [(3, 3), (60, 50)])
def test_an_endless_game_is_allowed_if_the_run_ends_it(limit: int, count: int, check: Check) -> None:
    report = check(GAME.replace("STEP", "return 'x', 0.0, False"), max_assistant_turns=limit)
    assert report.findings == []
    assert {len(played.answers) for played in report.episodes.values()} == {count}


def test_a_counter_of_episodes_is_found(check: Check) -> None:
    program = GAME.replace("random.random()", "next(COUNTER)").replace("STEP", "return None, 0.0, True")
    (finding,) = check(program).findings
    assert matches("reset of episode 0 differs: the observation is 'Begin 0'.*no state outside of the object", finding)


def test_a_slow_call_is_compared_with_its_limit(check: Check) -> None:
    program = GAME.replace("STEP", "time.sleep(1.1 * (self.number == 0)); return None, 0.0, True")
    (finding,) = check(program, timeout=2.0).findings
    assert matches("a call took 1\\.[1-9]\\d s, and multi_turn.timeout=2 s ends it", finding), finding


def test_missing_columns_are_named(check: Check) -> None:
    program = GAME.replace("self, row_seed", "self, level, row_seed").replace("STEP", "return None, 0.0, True")
    (finding,) = check(program).findings
    assert matches("requires the column 'level'; set data=FILE", finding)
    rows = [{"prompt": [], "ground_truth": 1}]
    (finding,) = check(program, rows).findings
    assert matches("'level', but the data has only prompt, ground_truth; add the column", finding)
    assert check(program, [{"prompt": [], "level": 1}]).findings == []


def test_a_row_has_to_select_one_of_several_environments() -> None:
    section = MultiTurnConfig(environment=(str(EXAMPLES / "hint.py"), str(EXAMPLES / "higher_lower.py")))
    rows = [{"prompt": [], "ground_truth": 1, "environment": name} for name in ("hint", "chess")]
    (finding,) = check_environment(section, rows=rows).findings
    assert finding == "row 1: the column 'environment' is 'chess'; it must be one of hint, higher_lower"


TOOLS = """
class Game:
    def reset(self):
        self.reward = 0.0

    def add(self, a: int, b: list[int], kind: str | None = None) -> int:
        \"\"\"
        Add numbers.

        Args:
            a: A number.
            b: Other numbers.
            kind: A kind.
        \"\"\"
        assert type(a) is int and all(type(each) is int for each in b)
        return a + sum(b)
"""


def test_tools_get_arguments_that_fit_and_a_malformed_call(check: Check) -> None:
    report = check(TOOLS)
    assert report.findings == []
    (note,) = [note for note in report.notes if "tool calls" in note]
    assert matches("tool calls: 0 raised an exception, .* and 10 were malformed", note)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("a: int", "a", "Game.add cannot be a tool: .* Write a type hint for each argument"),
        ("            a: A number.\n", "", "Game.add cannot be a tool: .* a docstring with a description"),
        ("self.reward = 0.0", "pass", "fails, in 10 of 10 episodes: the environment Game has no score; define get_rew"),
        ("def reset", "def begin", "the environment Game has no method 'reset'"),
    ],
)
def test_a_mistake_in_tools_has_one_finding(old: str, new: str, expected: str, check: Check) -> None:
    (finding,) = check(TOOLS.replace(old, new)).findings
    assert matches(expected, finding), finding


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "enum": ["a", "b"]},
        {"type": ["integer", "null"]},
        {"anyOf": [{"type": "boolean"}, {"type": "number"}]},
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]},
        {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
    ],
)
def test_random_values_fit_their_schema(schema: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    values = [random_value(schema, random.Random(seed)) for seed in range(30)]
    for value in values:
        jsonschema.validate(value, schema)
    assert len({json.dumps(value) for value in values}) > 1


def test_a_class_from_python_that_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()

    class Locked:
        def reset(self) -> None:
            lock.acquire()

        def step(self, answer: str) -> tuple[None, float, bool]:
            return None, 1.0, True

    (finding,) = check_environment(MultiTurnConfig(), Locked).findings
    assert matches("'Locked' cannot be sent to its processes: .*lock", finding)


# -- with a chat template -------------------------------------------------------------------------


def template_report(check: Check, program: str, template: str | None = None, **settings: Any) -> tuple[Report, Any]:
    tokenizer = talking_tokenizer(CHAT_FAMILIES["chatml"])
    tokenizer.chat_template = template or tokenizer.chat_template
    report = check(program, **settings)
    episode = check_template(report, Bridge(tokenizer), MultiTurnConfig(**settings))
    return report, None if episode is None else list(mask_parts(episode, tokenizer))


def test_a_row_is_the_conversation_with_the_answers_as_sampled(check: Check) -> None:
    report, parts = template_report(check, GAME.replace("STEP", "pass"))
    assert report.findings == []
    assert "the chat template appends to the history" in report.notes
    assert [kind for kind, _ in parts] == ["prompt", "sampled", "observation", "sampled"]
    first, second = report.episodes[0].answers
    end = "<|im_end|>"
    assert [text for kind, text in parts if kind == "sampled"] == [f"{first}{end}", f"{second}{end}"]
    whole = "".join(text for _, text in parts)
    tokenizer = talking_tokenizer(CHAT_FAMILIES["chatml"])
    said = [turn.said for turn in report.episodes[0].replies]
    messages = [("user", said[0]), ("assistant", first), ("user", said[1]), ("assistant", second)]
    expected = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages], tokenize=False
    )
    assert whole == str(expected)[: len(whole)]


def test_a_template_that_rewrites_the_history_is_noted(check: Check) -> None:
    template = str(talking_tokenizer(CHAT_FAMILIES["chatml"]).chat_template)
    stripped = template.replace("m['content']", "m['content'].split('</think>')[-1]")
    report, _ = template_report(check, GAME.replace("STEP", "pass"), stripped)
    assert report.findings == []
    assert any("rewrites the history" in note for note in report.notes)


def test_truncated_observations_are_found(check: Check) -> None:
    program = GAME.replace("STEP", "return 'x' * 30 * self.turn, 0.0, self.turn == 2")
    report, _ = template_report(check, program, max_tool_response_length=40)
    (finding,) = report.findings
    assert matches("10 of 20 observations are truncated: the longest has 60 tokens, and .* is 40", finding)
    report, _ = template_report(check, program, max_tool_response_length=60)
    assert report.findings == []


def test_a_template_without_tools_is_found(check: Check) -> None:
    report, _ = template_report(
        check, TOOLS, "{% for m in messages %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}"
    )
    assert any("does not describe the tools add" in finding for finding in report.findings)


# -- the command ----------------------------------------------------------------------------------


def test_the_exit_status_says_whether_there_are_findings(tmp_path: Path) -> None:
    rows = tmp_path / "game.jsonl"
    rows.write_text(json.dumps({"prompt": "Play. ", "ground_truth": 7}) + "\n", encoding="utf-8")
    target = f"{EXAMPLES / 'higher_lower.py'}:HigherLower"
    run = camshaft("check-environment", target, f"data={rows}", f"model={tiny_tokenizer_folder()}")
    assert run.status == 0, run.out
    assert matches(r"prompt \| .*Play. Guess a number.*sampled \| .*observation \| .*OK: no findings \(10 ep", run.out)
    run = camshaft("check-environment", target)
    assert run.status == 1
    assert matches("! reset of .* requires the column 'ground_truth'.*FAILED: 1 finding ", run.out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no environment is given; write camshaft check-environment file.py:Class"),
        (["agent=a.py:solve"], "agent is a program"),
        (["game.py:Game", "actor_rollout_ref.rollout.multi_turn.timeout=0"], "multi_turn.timeout"),
        (["game.py:Game", "dta=x"], "dta"),
    ],
)
def test_invalid_arguments_exit_with_status_2(arguments: list[str], message: str) -> None:
    run = camshaft("check-environment", *arguments)
    assert run.status == 2
    assert message in run.err


def play(monkeypatch: pytest.MonkeyPatch, answers: list[str | BaseException], *arguments: str) -> int:
    """Play with scripted answers, and return the exit status."""
    left = iter(answers)

    def answer(prompt: str) -> str:
        text = next(left)
        if isinstance(text, BaseException):
            raise text
        return text

    monkeypatch.setattr("builtins.input", answer)
    return main(["check-environment", *arguments, "--play"])


def test_a_person_plays_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    rows = tmp_path / "game.jsonl"
    rows.write_text(json.dumps({"prompt": "Play. ", "ground_truth": 7}) + "\n", encoding="utf-8")
    target = f"{EXAMPLES / 'higher_lower.py'}:HigherLower"
    assert play(monkeypatch, ["5", "7"], target, f"data={rows}") == 0
    expected = "Play. .*Guess a number.*user: higher\nreward: 1\ndone after 2 answers, score 1"
    assert matches(expected, capsys.readouterr().out)


@pytest.mark.parametrize("end", [EOFError(), KeyboardInterrupt()])
def test_a_person_stops_early(end: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "game.py"
    file.write_text(GAME.replace("STEP", "pass"), encoding="utf-8")
    assert play(monkeypatch, ["5", end], f"{file}:Game") == 0
    assert "stopped after 1 answers, score 0.5" in capsys.readouterr().out


def test_a_person_calls_tools(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "game.py"
    file.write_text(TOOLS, encoding="utf-8")
    answers: list[str | BaseException] = ['add {"a": 1, "b": [2, 3]}', "add {1", "add 3 and 4"]
    assert play(monkeypatch, answers, f"{file}:Game") == 0
    out = capsys.readouterr().out
    assert "tool add(a, b, kind): Add numbers." in out
    assert matches("tool: 6\ntool: error: the arguments of add are not JSON.*done after 3 answers, score 0", out)


def test_a_failure_ends_the_play(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "game.py"
    file.write_text(GAME.replace("STEP", "1 / 0"), encoding="utf-8")
    assert play(monkeypatch, ["5"], f"{file}:Game") == 1
    assert matches("failed: ZeroDivisionError.*game.py, line 16", capsys.readouterr().out)


def test_a_check_without_a_model_imports_no_torch() -> None:
    code = (
        "import sys; from camshaft.cli import main; status = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "check-environment", str(EXAMPLES / "hint.py")]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
