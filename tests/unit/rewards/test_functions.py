import pytest

from camshaft.plugins import import_attribute
from camshaft.rewards import REWARDS, arithmetic, auto, exact_match, gsm8k


@pytest.mark.parametrize("name", REWARDS)
def test_every_built_in_can_be_loaded(name):
    assert callable(import_attribute(REWARDS[name]))


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [("42", "42", 1), (" 42\n", "42", 1), ("so\n 42 \n", "42", 1), ("so 42", "42", 0), ("42\nor so", "42", 0),
     ("", "42", 0), ("a\nb", "a\nb", 1), ("7", 7, 1)],
)  # fmt: skip
def test_exact_match_takes_the_whole_answer_or_its_last_line(text, truth, score):
    assert exact_match.compute_score("x", text, truth)["score"] == score


@pytest.mark.parametrize(
    ("text", "truth", "strict", "flexible"),
    [
        ("6*7=42\n#### 42", "42", 1, 1),
        ("#### 42", "so it is\n#### 42", 1, 1),  # the data set's own answers are whole texts
        ("it is 42.", "42", 0, 1),
        ("#### 41, no: #### 42", "42", 1, 1),
        ("#### 42 or 43", "42", 1, 0.25),
        ("#### 1,000", "1000", 1, 1),
        ("#### $1000.00", "1000", 1, 1),
        ("#### -3", "-3", 1, 1),
        ("#### 3", "-3", 0.25, 0.25),
        ("#### 0.5", ".5", 1, 1),
        ("#### none", "42", 0, 0),
        ("", "42", 0, 0),
        ("#### 42" + " " * 2000, "42", 0, 0),  # only the end is searched
    ],
)
def test_gsm8k_compares_numbers(text, truth, strict, flexible):
    assert gsm8k.compute_score("x", text, truth, format_score=0.25)["score"] == strict
    assert gsm8k.compute_score("x", text, truth, method="flexible", format_score=0.25)["score"] == flexible


@pytest.mark.parametrize(
    ("function", "text", "pred"),
    [
        (gsm8k, "#### $1,000.50", "1000.5"),
        (gsm8k, "#### 1000.500", "1000.5"),
        (gsm8k, "#### 1,000", "1000"),
        (gsm8k, "#### -0.0", "0"),
        (gsm8k, "#### " + "1" * 40, "1" * 40),
        (gsm8k, "it is 42", None),
        (exact_match, "so\n 42 \n", "42"),
        (exact_match, " \n", None),
        (arithmetic, " 47\n", "47"),
        (arithmetic, "47!", None),
    ],
)
def test_the_answer_that_was_found_is_told_in_one_form(function, text, pred):
    assert function.compute_score("x", text, "1")["pred"] == pred


def test_gsm8k_refuses_what_it_cannot_use():
    with pytest.raises(ValueError, match="no number"):
        gsm8k.compute_score("x", "#### 1", "none")
    with pytest.raises(ValueError, match="choose strict or flexible"):
        gsm8k.compute_score("x", "#### 1", "1", method="loose")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("text", "score", "correct", "form"),
    [("47", 1, 1, 1), (" 47\n", 1, 1, 1), ("46", 0.1, 0, 1), ("-46", 0.1, 0, 1), ("47!", 0, 0, 0), ("", 0, 0, 0),
     ("047", 0.1, 0, 1), ("\u0664", 0, 0, 0)],
)  # fmt: skip
def test_arithmetic_rewards_the_right_text_and_a_little_the_form(text, score, correct, form):
    found = arithmetic.compute_score("x", text, "47")
    assert found == {"score": score, "correct": correct, "format": form, "pred": text.strip() if form else None}


def test_auto_goes_by_the_data_source():
    assert auto.compute_score("openai/gsm8k", "#### 1", "1") == {"score": 1.0, "pred": "1"}
    assert auto.compute_score("camshaft/arithmetic", "1", "1") == arithmetic.compute_score("x", "1", "1")
    with pytest.raises(ValueError, match="data_source='mine'"):
        auto.compute_score("mine", "1", "1")
