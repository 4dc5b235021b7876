import pytest

from camshaft.plugins import REWARDS, import_attribute
from camshaft.rewards import arithmetic, auto, exact_match, gsm8k, math_answer
from camshaft.rewards import format as form


@pytest.mark.parametrize("name", REWARDS)
def test_every_built_in_can_be_loaded(name):
    assert callable(import_attribute(REWARDS[name]))


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [("42", "42", 1), (" 42\n", "42", 1), ("so\n 42 \n", "42", 1), ("so 42", "42", 0), ("42\nor so", "42", 0),
     ("", "42", 0), ("a\nb", "a\nb", 1), ("7", 7, 1)],
)  # fmt: skip
def test_exact_match_compares_the_response_or_its_last_line(text, truth, score):
    assert exact_match.compute_score("x", text, truth)["score"] == score


@pytest.mark.parametrize(
    ("text", "truth", "strict", "flexible"),
    [
        ("6*7=42\n#### 42", "42", 1, 1),
        ("#### 42", "so it is\n#### 42", 1, 1),  # the answers of the data set are full texts
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
        ("#### 42" + " " * 2000, "42", 0, 0),  # the search covers only the end
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
def test_extracted_answers_are_normalized(function, text, pred):
    assert function.compute_score("x", text, "1")["pred"] == pred


def test_gsm8k_rejects_unusable_rows():
    with pytest.raises(ValueError, match="no number"):
        gsm8k.compute_score("x", "#### 1", "none")
    with pytest.raises(ValueError, match="use strict or flexible"):
        gsm8k.compute_score("x", "#### 1", "1", method="loose")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("text", "score", "correct", "form"),
    [("47", 1, 1, 1), (" 47\n", 1, 1, 1), ("46", 0.1, 0, 1), ("-46", 0.1, 0, 1), ("47!", 0, 0, 0), ("", 0, 0, 0),
     ("047", 0.1, 0, 1), ("\u0664", 0, 0, 0)],
)  # fmt: skip
def test_arithmetic_rewards_correctness_and_partly_format(text, score, correct, form):
    result = arithmetic.compute_score("x", text, "47")
    assert result == {"score": score, "correct": correct, "format": form, "pred": text.strip() if form else None}


def test_auto_selects_by_data_source():
    assert auto.compute_score("openai/gsm8k", "#### 1", "1") == {"score": 1.0, "pred": "1"}
    assert auto.compute_score("camshaft/arithmetic", "1", "1") == arithmetic.compute_score("x", "1", "1")
    assert auto.compute_score("aime_2025", "\\boxed{1}", "1") == {"score": 1.0, "pred": "1"}
    with pytest.raises(ValueError, match="data_source='mine'"):
        auto.compute_score("mine", "1", "1")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("openai/gsm8k", "gsm8k"), ("lighteval/MATH", "math"), ("DigitalLearningGmbH/MATH-lighteval", "math"),
        ("HuggingFaceH4/MATH-500", "math"), ("math_dapo", "math"), ("math_dapo_reasoning", "math"), ("aime", "math"),
        ("aime_2024", "math"), ("aime25", "math"), ("reasoning_gym/gcd", "reasoning_gym"), ("openai/gsm8k2", None),
        ("lighteval/math", None), ("reasoning_gym", None), (None, None), (7, None),
    ],
)  # fmt: skip
def test_each_data_set_has_its_reward(source, name):
    assert auto.reward_for(source) == name


# -- mathematics ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "truth", "flexible", "strict"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1, 1),
        (r"so \boxed{\frac12}.", r"\frac{1}{2}", 1, 1),
        (r"\boxed{0.33}", r"\frac{1}{3}", 0, 0),
        (r"\boxed{3}, no: $\boxed{4}$", "4", 1, 1),
        (r"\boxed{3}, no: $\boxed{4}$", "3", 0, 0),
        (r"\boxed{x=3}", "3", 1, 1),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1, 1),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1, 1),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", 1, 1),
        (r"\boxed{(1,2)}", "(2,1)", 0, 0),
        (r"\boxed{\text{east}}", r"\text{east}", 1, 1),
        (r"\boxed{7}", r"Thus $3+4=\boxed{7}$.", 1, 1),
        ("the answer is $204$", "204", 1, 0),
        ("it is 204.", "204", 1, 0),
        (r"\boxed{", "204", 0, 0),
        ("", "204", 0, 0),
        (r"\boxed{4} " + "so " * 2000, "4", 0, 0),  # the search covers only the end
    ],
)
def test_math_compares_expressions(text, truth, flexible, strict):
    assert math_answer.compute_score("x", text, truth)["score"] == flexible
    assert math_answer.compute_score("x", text, truth, method="strict")["score"] == strict


def test_math_extracts_answers_and_rejects_invalid_ground_truth():
    assert math_answer.compute_score("x", r"so \boxed{\frac12}", "0.5")["pred"] == r"\frac{1}{2}"
    assert math_answer.compute_score("x", "no idea", "0.5")["pred"] is None
    with pytest.raises(ValueError, match="cannot parse the ground truth ''"):
        math_answer.compute_score("x", "1", "")
    with pytest.raises(ValueError, match="use strict or flexible"):
        math_answer.compute_score("x", "1", "1", method="loose")  # pyright: ignore[reportArgumentType]


# -- format -----------------------------------------------------------------------------------------

THOUGHT = "<think>6 times\n7</think>\n<answer>42</answer>"


@pytest.mark.parametrize(
    ("text", "pattern", "score", "pred"),
    [
        (THOUGHT, None, 1, "42"),
        (f"  {THOUGHT}\n", None, 1, "42"),
        (f"Well. {THOUGHT}", None, 0, None),
        (f"{THOUGHT} <answer>43</answer>", None, 0, None),
        ("<think><think>a</think></think><answer>42</answer>", None, 0, None),
        ("<answer>42</answer>", None, 0, None),
        ("", None, 0, None),
        ("Answer: 42", r"Answer: (?P<pred>\d+)", 1, "42"),
        ("Answer: 42!", r"Answer: (?P<pred>\d+)", 0, None),
        ("a\nb", "a.b", 1, None),
    ],
)
def test_format_checks_only_the_form(text, pattern, score, pred):
    result = form.compute_score("x", text, None, **({"pattern": pattern} if pattern else {}))
    assert result == {"score": score, "pred": pred}
