"""Reports and exit status of `camshaft check-data` for valid and invalid data."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from camshaft.cli import main
from camshaft.data.tables import write_parquet
from camshaft.models.tiny import make_tiny_model

REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    "

Check = Callable[..., tuple[int, str]]


def row(prompt: str, truth: str | None = "7", source: str = "sums") -> dict:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}],
        "reward_model": None if truth is None else {"ground_truth": truth},
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def check(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Write rows and a function, and run the command; return the exit status and the output."""

    def check(train: list[dict], *args: str, val: list[dict] | None = None, reward: str = "") -> tuple[int, str]:
        (tmp_path / "reward.py").write_text(REWARD + (reward or "return float(solution_str == ground_truth)") + "\n")
        status = main(
            [
                "check-data",
                f"data.train_files={write_parquet(tmp_path / 'train.parquet', train)}",
                f"data.val_files={write_parquet(tmp_path / 'val.parquet', val or [row('30+4=', '34')])}",
                f"actor_rollout_ref.model.path={model}",
                f"critic.model.path={model}",
                f"custom_reward_function.path={tmp_path / 'reward.py'}",
                "custom_reward_function.num_workers=1",
                "actor_rollout_ref.actor.strategy=reference",
                "actor_rollout_ref.actor.ppo_mini_batch_size=2",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
                "critic.ppo_micro_batch_size_per_gpu=1",
                "actor_rollout_ref.rollout.name=torch",
                "data.train_batch_size=2",
                "trainer.device=cpu",
                "trainer.n_gpus_per_node=1",
                f"trainer.default_local_dir={tmp_path / 'out'}",
                *args,
            ]
        )
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return check


def test_valid_data_are_described_and_accepted(check: Check, tmp_path: Path) -> None:
    train = [row("1+2=", "3"), row("3+4=", "7"), row("1+2=", "3"), row("30+4=", "34")]
    status, output = check(train, val=[row("30+4=", "34"), row("9+9=", "18")])
    assert status == 0
    assert output.rstrip().endswith("OK: a run would start with this data")
    assert f"{tmp_path}/train.parquet: 4 rows" in output
    assert "prompt               0 missing    list<element: struct<role: string, content: string>>" in output
    assert "<|im_start|>u1+2=<|im_end|><|im_start|>a" in output
    # The template adds 5 tokens: 9, 9, 9 and 10.
    assert "tokens of a prompt: p50 9, p90 10, p99 10, max 10" in output
    assert "     9-9  ######################################## 3" in output
    assert re.search(r"longer than data.max_prompt_length=\d{3,}: 0 of 4 \(0.0%\)", output)
    assert "data.max_prompt_length=10, the longest prompt of the data" in output
    assert "duplicate training prompts: 1 of 4" in output
    assert "validation prompts that are also training prompts: 1 of 2" in output
    assert "             1            0   sums, '3'" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "status", "does"),
    [
        (["data.truncation=left"], 0, "truncated by data.truncation=left"),
        (["data.filter_overlong_prompts=true"], 0, "dropped by data.filter_overlong_prompts=true"),
        ([], 1, "rejected by data.truncation=error"),
    ],
)
def test_long_prompts_are_counted_with_their_treatment(check: Check, args, status, does) -> None:
    actual_status, output = check([row("1"), row("22"), row("x" * 20)], "data.max_prompt_length=10", *args)
    assert actual_status == status
    assert f"longer than data.max_prompt_length=10: 1 of 3 (33.3%); {does}" in output
    if status:
        assert "FAILED: " in output.splitlines()[-1]
        assert "row 2: the prompt has 25 tokens, but data.max_prompt_length=10" in output.splitlines()[-1]


BAD = {
    "a blank prompt": ([row("1"), {**row("2"), "prompt": None}], "row 1: 'prompt' is empty", {}),
    "a missing column": ([{"data_source": "s"}], "has no column 'prompt'", {}),
    "too few rows": ([row("1")], "the data has 1 rows, but one batch needs 2", {}),
    "a function that raises": ([row("1")] * 2, r"failed in 4 of 4 calls.*division by zero", {"reward": "return 1 / 0"}),
    "a function that returns text": ([row("1")] * 2, "failed in 4 of 4 calls", {"reward": "return 'good'"}),
    "a function that does not parse": ([row("1")] * 2, "could not be loaded", {"reward": "return ("}),
}


@pytest.mark.parametrize("what", BAD)
def test_invalid_data_and_functions_fail_with_one_line(check: Check, what: str) -> None:
    train, args, more = BAD[what]
    status, output = check(train, **more)
    assert status == 1
    verdict = output.rstrip().splitlines()[-1]
    assert verdict.startswith("FAILED: ")
    assert args.split(".*")[0] in verdict
    assert all(part in output for part in args.split(".*"))


def test_all_that_is_wrong_is_said_at_once(check: Check) -> None:
    status, output = check([row("1")], reward="return 1 / 0")
    assert status == 1
    assert "(and 1 more above)" in output.splitlines()[-1]
    assert output.count("\n! ") == 2


def test_a_column_question_holds_the_prompts(check: Check) -> None:
    rows = [{"question": text, "data_source": "s", "answer": "3"} for text in ("1+2=", "2+1=")]
    status, output = check(rows, val=rows, reward="return 1.0")
    assert status == 0
    assert "question             0 missing    string" in output
    assert "  first prompt:\n1+2=\n" in output


def test_prompts_that_end_with_an_answer_are_reported(check: Check) -> None:
    answered = row("1+2=", "3")
    answered["prompt"].append({"role": "assistant", "content": "3"})
    status, output = check([answered, row("3+4=")])
    assert status == 0
    assert "has the role assistant in 1 of 2 rows" in output


def test_parameters_with_defaults_are_not_columns(check: Check) -> None:
    _, output = check([row("1+2=", "3")] * 2, "custom_reward_function.path=null", "custom_reward_function.name=math")
    assert "data_source, ground truth\n" in output


def test_the_scores_name_the_function(check: Check) -> None:
    _, output = check([row("1+2=", "3")] * 2, reward="return 1.0\n\n\ncompute_score.__name__ = 'equal'")
    assert "scores of the first 2 training prompts (reward: " in output
    assert "reward.py:equal)" in output
    _, output = check(
        [row("1+2=", "3")] * 2, "custom_reward_function.path=null", "custom_reward_function.name=exact_match"
    )
    assert "training prompts (reward: exact_match)" in output


@pytest.mark.alone
def test_slow_calls_are_not_failures(check: Check) -> None:
    status, output = check(
        [row("1")] * 2, "custom_reward_function.timeout=1.5", reward="import time\n    time.sleep(0.8)\n    return 0.5"
    )
    assert status == 0, output
    assert "           0.5          0.5   sums, '7'" in output


def test_a_generation_batch_must_fit_the_data(check: Check) -> None:
    groups = ("algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=true", "data.gen_batch_size=4")
    status, output = check([row("1")] * 3, *groups, "actor_rollout_ref.rollout.n=2")
    assert status == 1, output
    assert "the data has 3 rows, but one batch needs 4" in output.splitlines()[-1]


def test_a_function_for_another_answer_format_is_reported(check: Check) -> None:
    status, output = check([row("1")] * 2, reward="return float(solution_str.startswith('answer: '))")
    assert status == 0
    assert "note: no ground truth scores higher than an empty response" in output


def test_columns_for_the_reward_are_read_and_a_missing_ground_truth_is_not_scored(check: Check) -> None:
    train = [{"prompt": "a", "level": 1, "note": ""}, {"prompt": "b", "level": None, "note": ""}]
    function = "return 0.0\n\n\ndef by_level(response, level):\n    return 0.0"
    status, output = check(train, "custom_reward_function.name=by_level", val=train, reward=function)
    assert status == 0, output
    assert "level                1 missing" in output
    assert "note                 not read" in output
    scores = ("         empty   data_source, level", "             0   unknown, 1", "             0   unknown, None")
    assert "\n".join(scores) in output
    assert "the column 'level' has no value in 1 of 2 rows" in output
    assert "note: no ground truth" not in output
    status, output = check(train, "custom_reward_function.name=by_level", val=[{"prompt": "c"}], reward=function)
    assert status == 1
    assert "reward.py:by_level has a parameter 'level', but the data has no column 'level'" in output
    status, output = check([{"prompt": "c"}] * 2, "custom_reward_function.name=by_level", val=train, reward=function)
    assert (status, output.count("\n! ")) == (1, 1), output


def test_built_in_functions_are_checked_against_the_data(check: Check) -> None:
    status, output = check([row("1", source="nobodys")] * 2, "custom_reward_function.path=null")
    assert status == 1
    assert "no reward is set, and data_source nobodys has no built-in reward function" in output
    status, output = check(
        [row("1", None)] * 2, "custom_reward_function.path=null", "custom_reward_function.name=exact_match"
    )
    assert status == 1
    assert "2 of 2 rows have no ground truth" in output


def test_an_invalid_config_is_reported_as_in_a_run(check: Check) -> None:
    status, output = check([row("1")] * 2, "data.max_promt_length=3")
    assert status == 2
    assert "max_prompt_length" in output


def test_help_describes_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-data", "--help"]) == 0
    assert "Accepts the same arguments as camshaft ppo" in capsys.readouterr().out
