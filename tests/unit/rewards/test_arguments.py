"""Reward functions receive the response and the columns of the data file by the names of their parameters."""

import pytest

from camshaft.dataproto import DataProto
from camshaft.errors import RewardError
from camshaft.rewards.manager import RewardManager

ROWS = [{"prompt": "1+1=", "answer": "2", "level": 3}, {"prompt": "2+2=", "answer": "4", "level": 5}]


def rows(data_rows: list[dict]) -> DataProto:
    columns = {"data_source": ["unknown"] * len(data_rows), "ground_truth": [row.get("answer") for row in data_rows]}
    return DataProto.from_dict(columns | {"data_row": data_rows})


def scores(rewards: RewardManager, texts: list[str], data_rows: list[dict] = ROWS) -> list[float]:
    batch = rows(data_rows)
    rewards.check_rows(batch)
    result = rewards.score_texts(batch, texts)
    assert result.failures == ()
    return result.scores.tolist()


@pytest.mark.parametrize(
    ("function", "columns"),
    [
        ("def f(response, answer): return response == answer", ("answer",)),
        ("def f(completion, *, answer, level=0): return (completion == answer) * (level > 0)", ("answer", "level")),
        ("def f(solution_str, prompt): return str(eval(prompt[:-1])) == solution_str", ("prompt",)),
        ("def f(solution_str, **row): return row['answer'] == solution_str and 'level' in row", None),
        ("def f(solution_str, extra_info, **kwargs): return not kwargs.keys() & {'answer'}", ()),
        ("def f(**kwargs): return kwargs.keys() == {'data_source', 'solution_str', 'ground_truth', 'extra_info'}", ()),
        ("async def f(response, ground_truth): return response == ground_truth", ()),
        ("def f(completions, answer, **kwargs): return [a == b for a, b in zip(completions, answer)]", None),
        (
            "def f(prompts, completions): return [str(eval(p[:-1])) == c for p, c in zip(prompts, completions)]",
            ("prompt",),
        ),
        ("def f(solution_strs, level): return [n > 0 for n in level]", ("level",)),
    ],
)
def test_parameters_select_arguments(function: str, columns: tuple[str, ...] | None, file) -> None:
    with RewardManager(file(function)) as rewards:
        assert rewards.columns == columns
        assert scores(rewards, ["2", "4"]) == [1.0, 1.0]


def test_completions_of_messages_are_messages(file) -> None:
    """As in TRL, the content of the first message of each completion is the response."""
    prompts = [{"prompt": [{"role": "user", "content": "?"}]}] * 2
    with RewardManager(
        file("def f(completions, **kwargs): return [len(c[0]['content']) for c in completions]")
    ) as rewards:
        assert scores(rewards, ["a", "bcd"], prompts) == [1.0, 3.0]


def test_keyword_arguments_replace_columns(file) -> None:
    with RewardManager(file("def f(response, level): return level"), reward_kwargs={"level": 7}) as rewards:
        assert scores(rewards, ["a", "b"]) == [7.0, 7.0]


def test_a_parameter_without_a_column_is_an_error(file) -> None:
    message = "has a parameter 'levl', but the data has no column 'levl'"
    with RewardManager(file("def f(response, levl): return 1.0")) as rewards, pytest.raises(RewardError, match=message):
        rewards.check_rows(rows(ROWS))


def test_the_only_function_of_a_file_needs_no_name(file) -> None:
    source = "from math import sqrt\ndef _half(x): return x / 2\ndef score(response): return _half(sqrt(4))"
    with RewardManager(file(source)) as rewards:
        assert scores(rewards, ["a", "b"]) == [1.0, 1.0]


def test_positional_only_parameters_are_an_error(file) -> None:
    with pytest.raises(RewardError, match="arguments are passed by name"):
        RewardManager(file("def compute_score(response, /): return 1.0"))
