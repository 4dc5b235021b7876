import re

import pytest

from camshaft.errors import RewardError
from camshaft.plugins import install_command
from camshaft.rewards.manager import RewardManager


def test_a_missing_file_is_an_error_at_construction():
    with pytest.raises(RewardError, match=r"the reward file /nowhere/x\.py does not exist"):
        RewardManager("/nowhere/x.py")


def test_a_missing_name_is_an_error_that_lists_functions(file):
    with pytest.raises(RewardError, match="has no function 'compute_score'; its functions are score_it, other"):
        RewardManager(file("def score_it(): pass\ndef other(): pass\nx = 1"))


def test_a_name_that_is_no_function_is_an_error(file):
    with pytest.raises(RewardError, match="has type int; it must be callable"):
        RewardManager(file("compute_score = 1"))


def test_a_syntax_error_is_shown(file):
    with pytest.raises(RewardError, match=r"(?s)my_reward\.py.*SyntaxError"):
        RewardManager(file("def compute_score(:\n"))


def test_an_error_while_importing_is_shown(file):
    with pytest.raises(RewardError, match="No module named 'not_installed_anywhere'"):
        RewardManager(file("import not_installed_anywhere"))


def test_a_file_that_ends_the_process_is_an_error(file):
    with pytest.raises(RewardError, match="exited with code 5"):
        RewardManager(file("import sys; sys.exit(5)"))


def test_a_function_with_other_parameters_is_an_error_at_construction(file):
    with pytest.raises(RewardError, match=r"my_reward.py\(text\) cannot be called: .* name it solution_str, response"):
        RewardManager(file("def compute_score(text): pass"))


def test_unknown_reward_kwargs_are_an_error(file):
    path = file("def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0")
    with pytest.raises(RewardError, match="no parameter 'scale' of reward_kwargs"):
        RewardManager(path, reward_kwargs={"scale": 1})
    with pytest.raises(RewardError, match=r"contains ground_truth, already passed from the dataset"):
        RewardManager(path, reward_kwargs={"ground_truth": 1})


def test_an_unknown_built_in_is_an_error_that_lists_them():
    with pytest.raises(
        RewardError, match="no reward function 'gsm9k'; use one of arithmetic, auto, exact_match, format, gsm8k, math"
    ):
        RewardManager(name="gsm9k")


@pytest.mark.parametrize(("name", "library"), [("math", "math_verify"), ("reasoning_gym", "reasoning_gym")])
def test_a_missing_library_is_reported_with_its_install_command(file, monkeypatch, tmp_path, name, library):
    file(f"raise ModuleNotFoundError('not here', name='{library}')", name=f"{library}.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    message = f"requires '{library}', which is not installed: {re.escape(install_command(library))}"
    with pytest.raises(RewardError, match=message):
        RewardManager(name=name)


def test_a_file_can_import_its_neighbours(file, score):
    file("VALUE = 4.0", name="neighbour.py")
    path = file(
        """
        import neighbour
        def compute_score(data_source, solution_str, ground_truth, extra_info): return neighbour.VALUE
        """
    )
    with RewardManager(path) as rewards:
        assert score(rewards, ["a"]).scores.tolist() == [4.0]


def test_modules_are_found_on_the_drivers_search_path(file, score, monkeypatch, tmp_path):
    file("async def f(data_source, solution_str, ground_truth, extra_info): return 5.0", name="a_module.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardManager("a_module", "f") as rewards:
        assert score(rewards, ["a"]).scores.tolist() == [5.0]
    with RewardManager(name="a_module:f") as rewards:
        assert score(rewards, ["a"]).scores.tolist() == [5.0]


def test_built_in_rewards_have_names_and_data_sources(score):
    with RewardManager(name="exact_match") as rewards:
        assert score(rewards, ["4", "5"], truths=["4", "4"]).scores.tolist() == [1.0, 0.0]
    with RewardManager() as rewards:
        result = score(rewards, ["4"], truths=["4"])
        assert "no built-in scoring function for data_source='test'" in result.failures[0].message


def test_a_worker_does_not_import_torch(manager, score):
    assert score(manager("import sys\nreturn float('torch' in sys.modules)"), ["a"]).scores.tolist() == [0.0]


# -- names ------------------------------------------------------------------------------------------

REGISTERED = """
from camshaft.rewards import register_reward

@register_reward("length")
def f(data_source, solution_str, ground_truth, extra_info): return len(solution_str)

@register_reward("two")
def g(data_sources, solution_strs, ground_truths, extra_infos): return [2.0] * len(solution_strs)
"""


def test_registered_names_are_found_in_files_and_modules(file, score, monkeypatch, tmp_path):
    path = file(REGISTERED, name="registered.py")
    with RewardManager(path, "length") as rewards:
        assert score(rewards, ["a", "bcd"]).scores.tolist() == [1.0, 3.0]
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardManager("registered", "two") as rewards:
        assert score(rewards, ["a", "bcd"]).scores.tolist() == [2.0, 2.0]


def test_an_unregistered_name_is_an_error_that_lists_names(file):
    with pytest.raises(RewardError, match="has no function 'lenght'; its functions are f, g, length, two"):
        RewardManager(file(REGISTERED), "lenght")


def test_two_functions_of_one_name_are_an_error(file):
    with pytest.raises(RewardError, match=r"two functions are registered as 'two': g in .* and h in"):
        RewardManager(file(REGISTERED + "\n@register_reward('two')\ndef h(): pass\n"), "two")


@pytest.mark.parametrize(("name", "scores"), [("theirs", [5.0, 5.0]), ("in_batches", [0.0, 1.0])])
def test_an_entry_point_of_an_installed_package(file, score, monkeypatch, tmp_path, name, scores):
    file(
        """
        def one(data_source, solution_str, ground_truth, extra_info): return 5.0
        def many(data_sources, solution_strs, ground_truths, extra_infos): return range(len(solution_strs))
        """,
        name="their_rewards.py",
    )
    info = tmp_path / "their_rewards-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-rewards\nVersion: 1.0\n")
    points = "theirs = their_rewards:one\nin_batches = their_rewards:many\n"
    (info / "entry_points.txt").write_text(f"[camshaft.rewards]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardManager(name=name) as rewards:
        assert score(rewards, ["a", "b"]).scores.tolist() == scores


@pytest.mark.parametrize("text", ["f'HTTP 401 for {key}'", "'x' * 480 + key", "f'{key} ' * 200"])
def test_messages_of_a_function_contain_no_secrets(file, score, monkeypatch, text):
    """A message is masked before it is shortened, so no part of a secret is left."""
    monkeypatch.setenv("JUDGE_API_KEY", "sk-environment")
    path = file(
        f"""
        import os
        def compute_score(data_source, solution_str, ground_truth, extra_info, api_key):
            key = api_key + os.environ["JUDGE_API_KEY"] + " https://me:geheim@host"
            if solution_str == "invalid": return key
            raise ValueError({text})
        """
    )
    with RewardManager(path, reward_kwargs={"api_key": "hunter2-hunter2"}) as rewards:
        failures = score(rewards, ["a", "invalid"]).failures
    assert len(failures) == 2
    for failure in failures:
        assert "***" in failure.message
        assert not any(part in failure.message + failure.trace for part in ("hunter", "sk-env", "geheim"))


def test_a_loading_error_contains_no_secrets(file, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "sk-environment")
    with pytest.raises(RewardError, match=r"no access with \*\*\*") as raised:
        RewardManager(file("import os; raise ValueError('no access with ' + os.environ['JUDGE_API_KEY'])"))
    assert "sk-environment" not in str(raised.value)
