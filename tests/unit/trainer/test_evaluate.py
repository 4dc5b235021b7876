"""`camshaft eval`: hand-worked numbers, input and output files, and errors."""

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from support.command_line import Run, camshaft, generate_args

from camshaft.data.tables import write_parquet

HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"


def rows(path: Path) -> list[dict[str, Any]]:
    return parquet.ParquetFile(path).read().to_pylist()


def row(source: str, responses: Any, truth: str, **more: Any) -> dict[str, Any]:
    return {"data_source": source, "responses": responses, "reward_model": {"ground_truth": truth}, **more}


def evaluate(path: Path, **overrides: Any) -> Run:
    """Score by comparison unless a function is given; keyword arguments have two underscores in place of the dot."""
    keys = {"data.path": path, "custom_reward_function.name": "exact_match", "custom_reward_function.num_workers": 1}
    keys |= {key.replace("__", "."): value for key, value in overrides.items()}
    return camshaft("eval", *(f"{key}={value}" for key, value in keys.items()))


def numbers(tmp_path: Path, path: Path, **overrides: Any) -> dict[str, float]:
    run = evaluate(path, data__metrics_path=tmp_path / "metrics.json", **overrides)
    assert run.status == 0, run.err
    return json.loads((tmp_path / "metrics.json").read_text())


def test_numbers_match_hand_work_for_each_data_set(tmp_path: Path) -> None:
    path = write_parquet(
        tmp_path / "responses.parquet",
        [row("a", ["1", "1", "2", "3"], "1"), row("a", ["5", "6", "6", "6"], "5"), row("b", ["x"], "x")],
    )
    actual = numbers(tmp_path, path)
    expected = {
        "test_score/a": 3 / 8,  # 2 of 4 and 1 of 4
        "val-core/a/reward/mean@4": 3 / 8,
        "val-core/a/reward/pass@1/mean": 3 / 8,
        # 2 of 4 are wrong: a draw of two has only wrong ones with 1 in 6; 3 of 4 are: with 3 in 6
        "val-aux/a/reward/pass@2/mean": (5 / 6 + 3 / 6) / 2,
        "val-core/a/reward/pass@4/mean": 1,
        "val-core/a/reward/best@4/mean": 1,
        "val-core/a/reward/maj@4/mean": 1 / 2,  # "1" is right, "6" is not
        "test_score/b": 1,
        "val-core/b/reward/mean@1": 1,
        "val-core/b/reward/pass@1/mean": 1,
        "reward/errors": 0,
    }
    assert {name: actual[name] for name in expected} == pytest.approx(expected)


def test_files_are_a_folder_or_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for name, response in (("a", "1"), ("b", "2")):
        write_parquet(tmp_path / "parts" / f"{name}.parquet", [row("s", [response], "1")])
    for name, path in (("folder", tmp_path / "parts"), ("pattern", tmp_path / "parts" / "*.parquet")):
        (tmp_path / name).mkdir()
        assert numbers(tmp_path / name, path)["test_score/s"] == 0.5


def test_a_failure_counts_as_zero_even_with_drop(tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text(HEAD + "    return 1 / len(solution_str)\n")
    path = write_parquet(tmp_path / "r.parquet", [row("a", ["x"], ""), row("a", [""], "")])
    function = {"custom_reward_function__path": tmp_path / "raises.py", "custom_reward_function__on_error": "drop"}
    run = evaluate(path, **function, custom_reward_function__name="compute_score")
    assert run.status == 0
    assert "1 of 2 samples could not be scored and count as 0" in run.out + run.err
    assert "0.5" in run.out


def test_a_response_passes_from_a_score_on(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(HEAD + "    return len(solution_str) / 4\n")
    path = write_parquet(tmp_path / "r.parquet", [row("a", ["w", "ww", "www", "wwww"], "")])
    function = {"custom_reward_function__path": tmp_path / "half.py", "custom_reward_function__name": "compute_score"}
    result = numbers(tmp_path, path, data__pass_score=0.75, **function)
    assert result["val-core/a/reward/pass@1/mean"] == 0.5
    assert result["val-aux/a/reward/pass@2/mean"] == pytest.approx(5 / 6)
    assert result["val-core/a/reward/mean@4"] == 0.625
    assert result["val-core/a/reward/best@4/mean"] == 1


def test_rows_with_equal_prompts_are_one_question(tmp_path: Path) -> None:
    prompts = [[{"role": "user", "content": text}] for text in ("p", "q")]
    responses = [
        ("a", prompts[0], "1"),
        ("a", prompts[1], "2"),
        ("a", prompts[0], "3"),
        ("b", prompts[0], "1"),
        ("a", prompts[1], "1"),
    ]
    table = [row(source, text, "1", prompt=prompt) for source, prompt, text in responses]
    out = tmp_path / "scored.parquet"
    result = numbers(tmp_path, write_parquet(tmp_path / "r.parquet", table), data__output_path=out)
    assert result["val-core/a/reward/mean@2"] == 0.5
    assert result["val-core/a/reward/best@2/mean"] == 1
    assert result["val-core/b/reward/mean@1"] == 1
    assert [(r["score"], r["score_pred"]) for r in rows(out)] == [
        (1, "1"),
        (0, "2"),
        (0, "3"),
        (1, "1"),
        (1, "1"),
    ]


def test_eval_reproduces_the_scores_of_generate(tmp_path: Path) -> None:
    responses, out = tmp_path / "out.parquet", tmp_path / "scored.parquet"
    overrides = {"custom_reward_function.name": "arithmetic", "rollout.n": 4}
    generated = camshaft("generate", *generate_args(tmp_path, overrides))
    assert generated.status == 0, generated.err
    run = evaluate(responses, custom_reward_function__name="arithmetic", data__output_path=out)
    assert run.status == 0, run.err
    before, after = rows(responses), rows(out)
    assert [{key: scored[key] for key in made_row} for made_row, scored in zip(before, after, strict=True)] == before
    assert [scored["score"] for scored in after] == [scored["responses_score"] for scored in before]
    assert [scored["score_pred"] for scored in after] == [scored["responses_pred"] for scored in before]
    table = [line for line in generated.out.splitlines() if "@" in line]
    assert table
    assert [line for line in table if line not in run.out] == []
    assert "pass@4" in run.out
    # A later `generate` must not treat the scored file as its output.
    responses.unlink()
    out.rename(responses)
    assert "the file already exists" in camshaft("generate", *generate_args(tmp_path, overrides)).err


def test_an_unscored_response_counts_as_zero_and_is_logged(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HEAD + "    return float(solution_str)\n")
    path = write_parquet(tmp_path / "r.parquet", [row("a", ["1", "one"], "")])
    function = {"custom_reward_function__path": tmp_path / "mine.py", "custom_reward_function__name": "compute_score"}
    result = numbers(tmp_path, path, **function)
    assert (result["reward/errors"], result["test_score/a"]) == (1, 0.5)


@pytest.mark.parametrize(
    ("table", "more", "says"),
    [
        ([row("a", ["1"], "1"), row("a", ["1", "2"], "1")], {}, "row 0 has 1 responses, but row 1 has 2"),
        ([row("a", [], "1")], {}, "column 'responses' contains an empty list"),
        ([row("a", "1", "1")], {}, "column 'prompt' is missing"),
        ([row("a", ["1"], "1")], {"data__response_key": "response"}, "Did you mean 'responses'?"),
        ([row("a", ["1"], "1", score=3.0)], {"data__output_path": "OUT"}, "already has a column 'score'"),
        (
            [row("a", ["1"], "1")],
            {"custom_reward_function__name": "auto"},
            "data_source a has no built-in reward function",
        ),
        ([row("a", ["1"], "1")], {"data__output_path": __file__}, "data.output_path"),
        ([row("a", ["1"], "1")], {"data__metrics_path": "nowhere/m.json"}, "nowhere does not exist"),
        ([row("a", ["1"], "1")], {"custom_reward_function__name": "gsm9k"}, "gsm8k"),
        ([{"data_source": "a", "responses": ["1"]}], {}, "rows have no ground truth"),
    ],
)
def test_unscorable_responses_are_rejected(table: Any, more: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "r.parquet", table)
    more = {key: tmp_path / "out.parquet" if value == "OUT" else value for key, value in more.items()}
    run = evaluate(path, **more)
    assert run.status in (1, 2)
    assert says in run.err
    assert "Traceback" not in run.err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["r.parquet"]
