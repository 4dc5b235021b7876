"""The games in examples/agents: their rules, and what a tiny model learns."""

import runpy
import statistics
from pathlib import Path
from typing import Any

import pytest
from support.pages import blocks, commands, run_here, script

import camshaft
from camshaft.agents.environment import Host, Start, Turn
from camshaft.models.tiny import make_tiny_model

EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"
HINT, HIGHER_LOWER = (runpy.run_path(str(EXAMPLES / name)) for name in ("hint.py", "higher_lower.py"))
HINT_TOOLS = runpy.run_path(str(EXAMPLES / "hint_tools.py"))
TURNS = "actor_rollout_ref.rollout.multi_turn"
TOOL_SETTINGS = {f"{TURNS}.max_assistant_turns": 2, f"{TURNS}.format": f"{EXAMPLES / 'hint_tools.py'}:parse"}


def answers(environment: Any, start: Start, *texts: str) -> list[Turn]:
    """Play a game with these answers."""
    host = Host({"": environment})
    host.reset({0: start})
    turns = [host.step({0: text})[0] for text in texts]
    return [turn._replace(seconds=0) for turn in turns if isinstance(turn, Turn)]


def test_higher_lower_answers_guesses() -> None:
    start = Start({"ground_truth": 7})
    assert answers(HIGHER_LOWER["HigherLower"], start, "5", "9", "7") == [
        Turn("higher", 0.0, False),
        Turn("lower", 0.0, False),
        Turn(None, 1.0, True),
    ]


@pytest.mark.parametrize("page", ["README.md", "docs/agents.md"])
def test_pages_show_the_game(page: str) -> None:
    code = (EXAMPLES / "higher_lower.py").read_text(encoding="utf-8")
    (shown,) = (block.text for block in blocks(page) if block.text.startswith("# higher_lower.py"))
    assert shown.partition("class")[2] == code.partition("class")[2]


def test_no_single_answer_finds_the_prize_in_more_than_a_quarter_of_the_games() -> None:
    one_turn, two_turns = HINT["best_scores"]()
    assert (one_turn, two_turns) == (0.25, 1.0)
    # The same by playing: each character as the first answer, and all pairs of a question and a second answer.
    characters = [chr(code) for code in range(33, 127)]
    starts = {HINT["random"].Random(seed).randrange(4): Start({}, seed=seed) for seed in range(40)}
    first = {text: [answers(HINT["Hint"], start, text)[0] for start in starts.values()] for text in characters}
    assert max(statistics.fmean(turn.reward for turn in turns) for turns in first.values()) == one_turn
    question = next(text for text, turns in first.items() if not turns[0].done)
    best = [max(answers(HINT["Hint"], start, question, text)[1].reward for text in "0123") for start in starts.values()]
    assert statistics.fmean(best) == two_turns


def test_no_policy_without_the_tool_finds_the_prize_in_more_than_a_quarter_of_the_games() -> None:
    parse, boxes = HINT_TOOLS["parse"], range(HINT_TOOLS["BOXES"])
    calls = [parse(chr(code)).calls[0] for code in range(33, 127)]
    opened = {call.arguments["box"] for call in calls if call.name == "open"}
    assert opened == set(boxes)  # a policy without the tool opens one of these boxes first
    assert max(sum(box == prize for prize in boxes) / len(boxes) for box in boxes) == 0.25
    assert len(set(HINT_TOOLS["HINTS"])) == len(boxes)  # so that a policy with the tool has a score of 1


@pytest.mark.parametrize(
    ("game", "seed", "steps"),
    [
        ("hint", 1, 20),
        *(pytest.param("hint", seed, steps, marks=pytest.mark.slow) for seed, steps in ((2, 40), (3, 20))),
        *(pytest.param("hint_tools", seed, 40, marks=pytest.mark.slow) for seed in (1, 2, 3)),
    ],
)
def test_asking_for_the_hint_is_learned(tmp_path: Path, game: str, seed: int, steps: int) -> None:
    one_turn, _ = HINT["best_scores"]()
    run = camshaft.train(
        model=make_tiny_model(tmp_path / "tiny", initializer_range=0.1),
        data=[{"prompt": "Box?"}] * 64,
        environment=EXAMPLES / f"{game}.py",
        algorithm="turn_return",
        n=16,
        batch=16,
        lr=5e-3,
        steps=steps,
        seed=seed,
        response_length=32,
        out=tmp_path / "run",
        **{
            f"{TURNS}.max_turn_length": 1,
            f"{TURNS}.num_workers": 1,
            **(TOOL_SETTINGS if game == "hint_tools" else {}),
            "trainer.save_freq": -1,
            "trainer.samples.enable": False,
        },
    )
    scores, turns = run.history["critic/score/mean"], run.history["agent/turns"]
    assert scores[0] < one_turn + 0.1
    assert statistics.fmean(scores[-5:]) > 0.8
    assert statistics.fmean(turns[-5:]) > 1.8


@pytest.mark.timeout(200)
def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run docs/agents.md with fewer steps and games."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shorter = {"steps=120": "steps=1", "n=32": "n=2"}
    lines = commands(tmp_path, script(tmp_path, "docs/agents.md"))
    for file in tmp_path.glob("block*.py"):
        text = file.read_text("utf-8")
        for word, other in shorter.items():
            text = text.replace(word, other)
        file.write_text(text, encoding="utf-8")
    run_here([[shorter.get(word, word) for word in line] for line in lines], monkeypatch)
    assert (tmp_path / "curves.png").stat().st_size
