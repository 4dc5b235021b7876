"""User errors at the command line: each gives one clear error and an exit status, or a counted outcome.

An invalid config exits with status 2, every other camshaft error with status 1, always with a single message and no
traceback. A faulty reward function loses its samples but never ends the run. `conftest.py` checks that no process is
left.
"""

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet
from support.command_line import Run, camshaft, finished, sft_args, start
from support.ppo_runs import ppo_args

from camshaft import subprocesses
from camshaft.data.tables import write_parquet
from camshaft.tracking.jsonl import read_metrics

pytestmark = pytest.mark.timeout(120)

MODEL, CRITIC, REWARD = "actor_rollout_ref.model.path", "critic.model.path", "custom_reward_function.path"
HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
ROW = {
    "data_source": "camshaft/arithmetic",
    "prompt": [{"role": "user", "content": "1+1="}],
    "reward_model": {"ground_truth": "2"},
}
ANSWERED = {"data_source": "x", "prompt": [{"role": "user", "content": "1+1="}], "response": "2"}


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """Return a folder with valid models and data."""
    ppo_args(home)
    return home


def check(run: Run, status: int, phrases: Sequence[str]) -> None:
    """Check that the output has a single error that contains all of these strings."""
    assert run.status == status, f"{run.out}\n{run.err}"
    assert [phrase for phrase in phrases if phrase not in run.err] == [], run.err
    assert "Traceback" not in run.err
    assert run.err.count("camshaft: ") + run.err.count(" in the config:") == 1


# -- invalid configs ------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown key": ({"trainer.sede": 1}, ["trainer.sede = 1", "Did you mean trainer.seed?"]),
    "unknown section": ({"trainr.seed": 1}, ["trainr.seed", "Did you mean trainer.seed"]),
    "wrong type": ({"trainer.seed": "abc"}, ["trainer.seed = abc", "an integer"]),
    "too large a seed": ({"trainer.seed": 2**40}, ["trainer.seed", "< 4294967296"]),
    "several at once": (
        {"trainer.sede": 1, "trainer.seed": "abc", "data.train_batch_size": 10, "data.train_files": "no.parquet"},
        ["4 errors", "trainer.sede = 1", "trainer.seed = abc", "ppo_mini_batch_size = 4", "no.parquet"],
    ),
    "mini-batches that do not divide": (
        {"data.train_batch_size": 10, "actor_rollout_ref.rollout.n": 2},
        ["10 prompts x rollout.n=2 = 20 sequences", "4 x 2 = 8 per mini-batch", "20 = 2 x 8 + 4"],
    ),
    "mini-batch above the batch": (
        {"data.train_batch_size": 2},
        [
            "ppo_mini_batch_size = 4",
            "exceeds data.train_batch_size=2",
            "Set actor_rollout_ref.actor.ppo_mini_batch_size=2",
        ],
    ),
    "no such train file": (
        {"data.train_files": "/nowhere/train.parquet"},
        ["data.train_files = /nowhere", "file not found"],
    ),
    "no such model folder": ({MODEL: "/nowhere/model"}, [f"{MODEL} = /nowhere/model", "folder not found"]),
    "a model on the hub": (
        {MODEL: "Qwen/Qwen2.5-0.5B", "actor_rollout_ref.model.download": False},
        ["not completely in the Hugging Face cache", "actor_rollout_ref.model.download=True"],
    ),
    "no such reward file": ({REWARD: "/nowhere/reward.py"}, [f"{REWARD} = /nowhere/reward.py", "file not found"]),
    "no such engine": ({"actor_rollout_ref.actor.strategy": "referense"}, ["strategy", "Did you mean reference?"]),
    "a rollout in the pool of the actor": (
        {"actor_rollout_ref.hybrid_engine": False, "actor_rollout_ref.rollout.resource_pool": "global_pool"},
        ["rollout.resource_pool = global_pool", "Set actor_rollout_ref.hybrid_engine=true"],
    ),
    "two ranks of one process": ({"trainer.n_gpus_per_node": 2}, ["trainer.n_gpus_per_node = 2", "strategy=fsdp"]),
    "no such tracker": ({"trainer.logger": "[consol]"}, ["trainer.logger", "Did you mean console?"]),
    "resume from nothing": (
        {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "/nowhere/global_step_2"},
        ["trainer.resume_from_path", "folder not found"],
    ),
    "two values for one thing": (
        {"actor_rollout_ref.actor.grad_clip": 2.0, "+actor_rollout_ref.actor.optim.clip_grad": 3.0},
        ["alias of actor_rollout_ref.actor.grad_clip", "Set only one"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_invalid_config_is_one_error_with_a_fix(case: str, home: Path) -> None:
    overrides, phrases = WRONG[case]
    check(camshaft("ppo", *ppo_args(home, overrides)), 2, phrases)


@pytest.mark.parametrize(
    ("strategy", "library", "package"),
    [
        ("megatron", "megatron", "megatron-core==0.16.1 psutil"),
        ("torchtitan", "torchtitan", "--no-deps torchtitan==0.3.0"),
    ],
)
def test_a_missing_library_of_an_engine_is_an_error_with_the_install_command(
    strategy: str, library: str, package: str, home: Path
) -> None:
    if importlib.util.find_spec(library) is not None:
        pytest.skip(f"{library} is installed")
    run = camshaft("ppo", *ppo_args(home, {"actor_rollout_ref.actor.strategy": strategy}))
    assert (run.status, run.err.count("\n")) == (2, 1)
    assert f"requires '{library}', which is not installed: pip install {package}, or" in run.err


def test_an_invalid_supervised_config_is_one_error(home: Path) -> None:
    args = sft_args(home, {"trainer.sede": 1, "data.max_length": "long", "model.path": "/nowhere"})
    phrases = ["3 errors", "trainer.sede = 1", "data.max_length = long", "integer >= 2", "model.path"]
    check(camshaft("sft", *args), 2, phrases)


@pytest.mark.parametrize("word", ["trainer.seed={", "trainer.seed", "--no-such-option"])
def test_arguments_that_are_no_overrides_are_one_error(
    word: str, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        run = camshaft("ppo", *ppo_args(home), word)
        status, err = run.status, run.err
    except SystemExit as end:  # the last line of an argparse error
        status, err = end.code, capfd.readouterr().err or word
    assert status == 2
    assert word.strip("-") in err or "{" in err
    assert "Traceback" not in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="requires a machine without CUDA")
@pytest.mark.parametrize(("command", "make_args"), [("ppo", ppo_args), ("sft", sft_args)])
def test_a_missing_device_is_an_error_before_loading(
    command: str, make_args: Callable[..., list[str]], home: Path
) -> None:
    run = camshaft(command, *make_args(home, {"trainer.device": "cuda"}))
    assert (run.status, run.out) == (2, "")
    assert "trainer.device=cpu" in run.err


@pytest.mark.parametrize(("command", "make_args"), [("ppo", ppo_args), ("sft", sft_args)])
def test_an_unwritable_folder_is_an_error_before_loading(
    command: str, make_args: Callable[..., list[str]], home: Path
) -> None:
    run = camshaft(command, *make_args(home, {"trainer.default_local_dir": home / "actor" / "config.json" / "run"}))
    assert (run.status, run.out) == (2, "")
    assert "trainer.default_local_dir" in run.err


# -- data and models ------------------------------------------------------------------------------


def rows(*changes: dict[str, Any], base: dict[str, Any] = ROW) -> Callable[[Path], Path]:
    """Write three valid rows, then one with each of `changes`, then five valid rows."""
    return lambda path: write_parquet(path, [base] * 3 + [base | change for change in changes] + [base] * 5)


def without(name: str, base: dict[str, Any] = ROW) -> Callable[[Path], Path]:
    return lambda path: write_parquet(path, [{key: base[key] for key in base if key != name}] * 9)


def empty(path: Path) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist([ROW]).slice(0, 0), path)
    return path


def text(path: Path) -> Path:
    path.write_text("What is 1+1?\n")
    return path


FILES: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "no rows": (empty, ["rows.parquet has no rows"]),
    "other text": (text, ["rows.parquet, line 1: invalid JSON", "supported formats are parquet, JSON lines"]),
    "no prompt column": (without("prompt"), ["no column 'prompt'", "data_source, reward_model"]),
    "prompt column misspelt": (
        lambda path: write_parquet(path, [{**ROW, "promt": ROW["prompt"], "prompt": None}] * 9),
        ["row 0", "'prompt' is empty (None)"],
    ),
    "a row without prompt": (rows({"prompt": None}), ["rows.parquet, row 3", "'prompt' is empty (None)"]),
    "a prompt without messages": (rows({"prompt": []}), ["rows.parquet, row 3", "'prompt' is empty ([])"]),
    "a message without content": (
        rows({"prompt": [{"role": "user", "content": None}]}),
        ["rows.parquet, row 3", "content=None", "must be a string"],
    ),
    "a prompt too long": (
        rows({"prompt": [{"role": "user", "content": "1" * 40}]}),
        ["row 3", "45 tokens", "max_prompt_length=16", "data.truncation=left"],
    ),
    "fewer rows than a batch": (
        lambda path: write_parquet(path, [ROW] * 5),
        ["5 rows, but one batch needs 8. Lower data.train_batch_size to at most 5", "add at least 3 rows"],
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_bad_data_is_one_error_that_names_file_and_row(case: str, home: Path, tmp_path: Path) -> None:
    write, phrases = FILES[case]
    args = ppo_args(home, {"data.train_files": write(tmp_path / "rows.parquet")})
    check(camshaft("ppo", *args), 1, phrases)


def test_bad_validation_data_is_an_error_before_training(home: Path, tmp_path: Path) -> None:
    args = ppo_args(home, {"data.val_files": rows({"prompt": None})(tmp_path / "val.parquet")})
    check(camshaft("ppo", *args), 1, ["val.parquet, row 3"])


SFT_FILES: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "no response column": (without("response", ANSWERED), ["no column 'response'", "data_source, prompt"]),
    "a row without response": (rows({"response": None}, base=ANSWERED), ["row 3", "'response' is empty (None)"]),
    "an empty response": (rows({"response": ""}, base=ANSWERED), ["row 3", "'response' is empty ('')"]),
    "a sequence too long": (
        rows({"response": "1" * 40}, base=ANSWERED),
        ["row 3", "50 tokens", "max_length=32", "truncation=left"],
    ),
    "a conversation without answer": (
        lambda path: write_parquet(path, [{"messages": [{"role": "user", "content": "1"}]}] * 9),
        ["row 0", "has the roles ['user']; it must contain an assistant message"],
    ),
    "fewer rows than a batch": (
        lambda path: write_parquet(path, [ANSWERED] * 5),
        ["5 rows, but one batch needs 8", "data.train_batch_size to at most 5"],
    ),
    "no rows": (empty, ["rows.parquet has no rows"]),
}


@pytest.mark.parametrize("case", SFT_FILES)
def test_bad_data_of_a_supervised_run_is_an_error(case: str, home: Path, tmp_path: Path) -> None:
    write, phrases = SFT_FILES[case]
    check(camshaft("sft", *sft_args(home, {"data.train_files": write(tmp_path / "rows.parquet")})), 1, phrases)


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def half_the_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def bad_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


MODELS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "no weights": (no_weights, ["cannot read the weights in", "broken", "random_init=True"]),
    "half the weights": (half_the_weights, ["cannot read the weights in", "broken"]),
    "no tokenizer": (no_tokenizer, ["broken has no tokenizer", "tokenizer.json"]),
    "config.json cut off": (bad_config, ["config.json", "not valid JSON"]),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_broken_model_folder_is_one_error(case: str, home: Path, tmp_path: Path) -> None:
    spoil, phrases = MODELS[case]
    folder = tmp_path / "broken"
    shutil.copytree(home / "actor", folder)
    spoil(folder)
    check(camshaft("ppo", *ppo_args(home, {MODEL: folder, "data.tokenizer": "null"})), 1, phrases)
    check(camshaft("sft", *sft_args(home, {"model.path": folder})), 1, phrases)


# -- reward functions -----------------------------------------------------------------------------

UNLOADABLE: dict[str, tuple[str, list[str]]] = {
    "syntax error": ("def compute_score(:\n    pass\n", ["my_reward.py", "line 1", "SyntaxError"]),
    "no such function": (
        "def score_it(a):\n    return 1.0\n\n\ndef f(a):\n    return 1.0\n",
        ["no function 'compute_score'", "score_it"],
    ),
    "wrong parameters": (
        "def compute_score(text):\n    return 1.0\n",
        ["cannot be called", "no parameter for the"],
    ),
    "ends its process": ("import os\nos._exit(3)\n", ["exited with code 3"]),
    "takes for ever": (
        "import time\ntime.sleep(1000)\n",
        ["my_reward.py", "did not load it within 3 s; increase custom_reward_function.load_timeout=3"],
    ),
}


@pytest.mark.parametrize("case", UNLOADABLE)
def test_an_unloadable_reward_is_an_error_before_the_run(
    case: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body, phrases = UNLOADABLE[case]
    monkeypatch.setattr(subprocesses, "REPORT_SECONDS", 0.5)
    monkeypatch.setattr(subprocesses.Wait, "longest", {})
    (tmp_path / "my_reward.py").write_text(body)
    limit = {"custom_reward_function.load_timeout": 3 if case == "takes for ever" else 60}
    check(camshaft("ppo", *ppo_args(home, {REWARD: tmp_path / "my_reward.py"} | limit)), 1, phrases)
    if case == "takes for ever":
        (first, second, *_) = (record.getMessage() for record in caplog.records if "loading" in record.getMessage())
        assert f"which imports the reward function {tmp_path}/my_reward.py 'compute_score'" in first
        assert 'my_reward.py", line 2 in <module>' in second


def test_a_reward_import_error_shows_the_users_lines(home: Path, tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text("import there_is_no_such_module\n")
    run = camshaft("ppo", *ppo_args(home, {REWARD: tmp_path / "my_reward.py"}))
    assert run.status == 1
    assert "my_reward.py" in run.err
    assert "No module named 'there_is_no_such_module'" in run.err
    assert "worker.py" not in run.err
    assert "importlib" not in run.err


BAD_CALLS = {
    "errors": "raise KeyError('my table')",
    "timeouts": "import subprocess; subprocess.run(['sleep', '1000'])",
    "invalid": "return float('nan')",
    "crashes": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
}


def test_misbehaving_reward_calls_cost_only_their_samples(home: Path, tmp_path: Path) -> None:
    # Rows arrive in order: in each batch of 8, rows 1 to 5 fail in different ways and the remaining ones score 1.
    code = HEAD + "    row = extra_info['index'] % 8\n"
    for row, body in enumerate([*BAD_CALLS.values(), "return 'very good'"], start=1):
        code += f"    if row == {row}:\n        {body}\n"
    (tmp_path / "my_reward.py").write_text(f"{code}    return {{'score': 1.0, 'mine': 3.0}}\n")
    overrides = {
        REWARD: tmp_path / "my_reward.py",
        "custom_reward_function.timeout": 0.3,
        "custom_reward_function.num_workers": 2,
        "custom_reward_function.on_error": "zero",
        "data.shuffle": False,
        "trainer.total_training_steps": 2,
        "trainer.default_local_dir": tmp_path / "run",
        "trainer.logger": "[jsonl]",
    }
    run = camshaft("ppo", *ppo_args(home, overrides))
    assert run.status == 0, run.err
    assert "5 of 8 samples could not be scored" in " ".join(run.out.split())
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2]
    for metrics in steps:
        counted = {name: metrics[f"reward/{name}"] for name in BAD_CALLS}
        assert counted == {"errors": 1.0, "timeouts": 1.0, "invalid": 2.0, "crashes": 1.0}
        assert metrics["critic/score/mean"] == 3 / 8
        assert metrics["reward/mine/mean"] == 3.0


def test_on_error_raise_raises_the_first_error(home: Path, tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text(f"{HEAD}    raise KeyError('my table')\n")
    run = camshaft("ppo", *ppo_args(home, {REWARD: tmp_path / "my_reward.py"}))
    assert run.status == 1
    assert "row 0" in run.err
    assert "KeyError: 'my table'" in run.err
    assert 'my_reward.py", line 2' in run.err
    assert "worker.py" not in run.err


# -- existing output folders ----------------------------------------------------------------------


def test_an_export_never_replaces_other_folders(home: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    check(camshaft("sft", *sft_args(home, {"trainer.export_path": tmp_path})), 1, [str(tmp_path), "already exists"])
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


# -- errors in a separate process -----------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    ["camshaft", *(pytest.param(c, marks=pytest.mark.slow) for c in ("main_ppo", "main_sft", "data", "reward"))],
)
def test_each_separate_entry_point_reports_one_error(case: str, home: Path, tmp_path: Path) -> None:
    bad = without("prompt")(tmp_path / "rows.parquet")
    (tmp_path / "my_reward.py").write_text("def compute_score(:\n")
    misspelt = {"trainer.sede": 1}
    arguments, status, phrases = {
        "camshaft": (["camshaft", "ppo", *ppo_args(home, misspelt)], 2, "Did you mean trainer.seed?"),
        "main_ppo": (["camshaft.trainer.main_ppo", *ppo_args(home, misspelt)], 2, "Did you mean trainer.seed?"),
        "main_sft": (["camshaft.trainer.main_sft", *sft_args(home, misspelt)], 2, "Did you mean trainer.seed?"),
        "data": (["camshaft.trainer.main_ppo", *ppo_args(home, {"data.train_files": bad})], 1, "no column"),
        "reward": (["camshaft", "ppo", *ppo_args(home, {REWARD: tmp_path / "my_reward.py"})], 1, "SyntaxError"),
    }[case]
    check(finished(start("-m", *arguments)), status, [phrases])
