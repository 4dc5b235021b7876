"""For any behavior of a reward function, each sample has one outcome and other samples are unaffected.

`CAMSHAFT_REWARD_CASES=10000 pytest tests/unit/rewards/test_anything.py` tries as many batches; the default is 60.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.processes import none_left_behind

from camshaft.dataproto import DataProto, Ragged
from camshaft.rewards.manager import COUNTS, RewardManager

pytestmark = pytest.mark.alone

CASES = int(os.environ.get("CAMSHAFT_REWARD_CASES", "30"))

REWARD = """
import os, signal, sys, time
import numpy

class Unprintable(Exception):
    def __str__(self): raise RuntimeError("no text either")

class Final(BaseException): pass

def act(action):
    noise, do, value = action
    if noise == "print": print("words", flush=True); os.write(1, b"bytes"); sys.stderr.write("more")
    if noise == "fork": os.fork()  # both come back
    if noise == "memory": bytearray(30_000_000)
    if noise == "alarm": signal.signal(signal.SIGALRM, signal.SIG_IGN); signal.alarm(1)
    if noise == "child" and not os.fork(): time.sleep(0.01); os._exit(3)
    if noise == "stdin": sys.stdin.read(); os.read(0, 10)
    if do == "raise": raise {**vars(__import__("builtins")), **globals()}[value]("why")
    if do == "exit": sys.exit(value)
    if do == "die": os._exit(value)
    if do == "kill": os.kill(os.getpid(), value)
    while do == "hang":
        try: time.sleep(60)
        except BaseException: pass
    return value

def one(data_source, solution_str, ground_truth, extra_info): return act(ground_truth)

async def later(data_source, solution_str, ground_truth, extra_info): return act(ground_truth)

def many(data_sources, solution_strs, ground_truths, extra_infos): return [act(action) for action in ground_truths]
"""

# -- behaviors of a function, and the outcome of the sample --------------------------------------------

NUMBERS = st.one_of(
    st.floats(-1e6, 1e6, width=32),
    st.integers(-(10**6), 10**6),
    st.booleans(),
    st.floats(-1e6, 1e6).map(numpy.float64),
    st.integers(-99, 99).map(numpy.int8),
    st.floats(-1e6, 1e6).map(numpy.array),
    st.fractions(-9, 9),
)
TEXTS = st.text(st.characters(), max_size=5)
NO_NUMBERS = st.one_of(
    st.sampled_from([float("nan"), float("inf"), 1e39, -(10**400), None, 1j, b"1", [], [1.0], {}, numpy.zeros(3)]),
    st.sampled_from([1000001, -1e7, 2**120, numpy.float32(3e38)]),  # above max_abs_score
    TEXTS,
)
OTHERS = st.dictionaries(
    TEXTS.filter(lambda name: name not in ("score", "pred")), st.one_of(NUMBERS, NO_NUMBERS), max_size=3
)
PREDS = st.one_of(st.none(), TEXTS, NUMBERS)


def results(scores: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Wrap values as plain results or in a dict."""
    inside = st.builds(lambda score, others, pred: {**others, "score": score, "pred": pred}, scores, OTHERS, PREDS)
    return st.one_of(scores, inside)


HUGE = {"score": 1.0, **{f"part {i}": 1.0 for i in range(5000)}}
RAISED = ("ValueError", "KeyboardInterrupt", "GeneratorExit", "MemoryError", "StopIteration", "Unprintable", "Final")
NOISE = st.sampled_from(["", "", "", "print", "fork", "memory", "alarm", "child", "stdin"])
OUTCOMES: dict[str, st.SearchStrategy[Any]] = {
    "ok": st.tuples(NOISE, st.just("return"), results(NUMBERS)),
    "invalid": st.tuples(NOISE, st.just("return"), st.one_of(results(NO_NUMBERS), st.just(HUGE))),
    "error": st.tuples(NOISE, st.just("raise"), st.sampled_from(RAISED))
    | st.tuples(NOISE, st.just("exit"), st.integers(0, 3)),
    "crash": st.tuples(st.just(""), st.just("die"), st.integers(0, 255)) | st.just(("", "kill", 9)),
    "timeout": st.just(("", "hang", None)),
}
FREQUENT = ["ok"] * 150 + ["invalid"] * 70 + ["error"] * 70 + ["crash"] * 4 + ["timeout"]
ALL_CHECKS: Any = list(HealthCheck)
ACTIONS = st.sampled_from(FREQUENT).flatmap(lambda kind: OUTCOMES[kind].map(lambda action: (kind, action)))


def score_of(action: Any) -> float:
    value = action[2]["score"] if isinstance(action[2], dict) else action[2]
    return float(numpy.float32(float(value)))


@pytest.fixture(scope="module", params=["one", "later", "many"])
def rewards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardManager]:
    path = Path(tmp_path_factory.mktemp("anything")) / "reward.py"
    path.write_text(REWARD)
    with none_left_behind(), RewardManager(str(path), request.param, timeout=1.0, num_workers=2) as manager:
        yield manager


@pytest.fixture(autouse=True)
def mark() -> None:
    """Do not check for leftover workers: the module's workers outlive a test."""


@settings(
    max_examples=CASES // 3,
    deadline=None,
    derandomize="CAMSHAFT_REWARD_CASES" not in os.environ,
    suppress_health_check=ALL_CHECKS,
    database=None,
)
@example(
    [
        ("ok", ("", "return", 1)),
        ("timeout", ("", "hang", None)),
        ("crash", ("", "kill", 9)),
        ("ok", ("fork", "return", 2)),
    ]
)
@given(st.lists(ACTIONS, max_size=6))
def test_every_sample_has_the_outcome_that_it_earned(rewards: RewardManager, actions: list[tuple[str, Any]]) -> None:
    kinds = [kind for kind, _ in actions]
    columns = {
        "responses": Ragged.from_rows([[row] for row in range(len(actions))]),
        "data_source": ["any"] * len(actions),
        "ground_truth": numpy.fromiter((action for _, action in actions), dtype=object, count=len(actions)),
    }
    result = rewards.score(DataProto.from_dict(columns), lambda ids: [str(row) for row in ids])
    expected = [score_of(action) if kind == "ok" else 0.0 for kind, action in actions]
    assert result.scores.tolist() == pytest.approx(expected)
    assert result.token_level_scores.values.tolist() == pytest.approx(expected)
    failed = {one.row: one.kind for one in result.failures if one.kind != "slow"}
    assert failed == {row: kind for row, kind in enumerate(kinds) if kind != "ok"}
    assert {kind: result.metrics[f"reward/{name}"] for kind, name in COUNTS.items()} == {
        kind: kinds.count(kind) for kind in COUNTS
    }
    for one in result.failures:
        str(one).encode()  # terminals and files can encode it
    for answer, parts in zip(result.answers, result.parts, strict=True):
        (answer or "").encode()
        "".join(parts).encode()
