"""`camshaft generate` on the command line: its output file, its errors, and resuming after a kill."""

import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from support import even_digits, holding
from support.command_line import Forked, Run, camshaft, finished, generate_args, start
from support.ppo_runs import ppo_args, ppo_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from camshaft import storage
from camshaft.data.tables import write_parquet
from camshaft.trainer.build import PPOParts
from camshaft.trainer.validate import validate

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("fork_server")]

PATIENCE = 60.0
"""Time limit in seconds for a command to reach a given point, far below the limit of a test with several commands."""

PROMPT = [{"role": "user", "content": "1+1="}]
COLUMNS = ["responses", "responses_tokens", "responses_finished", "responses_log_prob"]
HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """Return a folder with a model and prompts."""
    ppo_args(home)
    return home


def generate(home: Path, out: Path, **overrides: Any) -> Run:
    """Run `camshaft generate`; keyword arguments have two underscores in place of the dot."""
    named = {key.replace("__", "."): value for key, value in overrides.items()}
    return camshaft("generate", *generate_args(home, {"data.output_path": out, **named}))


def rows(path: Path) -> list[dict[str, Any]]:
    return parquet.ParquetFile(path).read().to_pylist()


def refused(run: Run, *phrases: str, status: int = 2) -> None:
    assert run.status == status, f"{run.out}\n{run.err}"
    assert [phrase for phrase in phrases if phrase not in run.err] == [], run.err
    assert "Traceback" not in run.err


# -- output file ----------------------------------------------------------------------------------


def test_every_row_is_kept_with_n_responses(home: Path, tmp_path: Path) -> None:
    run = generate(home, tmp_path / "new" / "out.parquet", data__batch_size=5)
    assert run.status == 0, run.err
    assert "step 4/4" in run.out  # 16 prompts, five at a time
    before, after = rows(home / "data" / "heldout.parquet"), rows(tmp_path / "new" / "out.parquet")
    assert [list(row) for row in after] == [[*before[0], *COLUMNS]] * 16
    assert [{key: row[key] for key in before[0]} for row in after] == before
    assert all(len(row[name]) == 2 for row in after for name in COLUMNS)
    assert all(1 <= tokens <= 8 for row in after for tokens in row["responses_tokens"])
    assert all(value < 0 for row in after for value in row["responses_log_prob"])
    assert len({text for row in after for text in row["responses"]}) > 20  # responses are sampled
    assert os.listdir(tmp_path / "new") == ["out.parquet"]


@pytest.mark.parametrize("name", ["torch", "hf"])
def test_greedy_responses_match_transformers(name: str, home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    run = generate(home, out, rollout__name=name, rollout__n=1, rollout__do_sample=False, data__max_samples=5)
    assert run.status == 0, run.err
    model: Any = AutoModelForCausalLM.from_pretrained(home / "actor")
    tokenizer: Any = AutoTokenizer.from_pretrained(home / "actor")
    outputs = rows(out)
    assert len(outputs) == 5
    for row in outputs:
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_tensors="pt")["input_ids"]
        tokens = model.generate(ids, do_sample=False, max_new_tokens=8, pad_token_id=0)[0, ids.shape[1] :]
        assert row["responses"] == [tokenizer.decode(tokens, skip_special_tokens=True)]
        assert row["responses_tokens"] == [len(tokens)]
        assert row["responses_finished"] == [int(tokens[-1]) == tokenizer.eos_token_id]
        logits = model(torch.cat([ids[0], tokens])[None]).logits[0, ids.shape[1] - 1 : -1]
        total = logits.log_softmax(-1).gather(-1, tokens[:, None]).sum()
        assert row["responses_log_prob"] == [pytest.approx(total.item(), abs=1e-3)]


def test_responses_match_a_validation_with_the_same_seed(home: Path, tmp_path: Path) -> None:
    assert generate(home, tmp_path / "out.parquet", trainer__seed=7, rollout__temperature=0.5).status == 0
    val = "actor_rollout_ref.rollout.val_kwargs"
    same = {"trainer.seed": 7, f"{val}.n": 2, f"{val}.do_sample": True, f"{val}.temperature": 0.5}
    config = ppo_config(home, {**same, "trainer.log_val_generations": 32})
    with PPOParts(config) as parts:
        parts.actor.init_model()
        _, samples = validate(parts, config, 0)
    assert [sample.response for sample in samples] == [
        text for row in rows(tmp_path / "out.parquet") for text in row["responses"]
    ]


@pytest.mark.parametrize("settings", [{"data__batch_size": 16}, {"trainer__n_gpus_per_node": 2}], ids=str)
def test_responses_do_not_depend_on_batching(settings: dict[str, Any], home: Path, tmp_path: Path) -> None:
    # Batches of five prompts are ten rows, and the last batch of one prompt is two: not multiples of a batch size.
    assert generate(home, tmp_path / "a.parquet", data__batch_size=5).status == 0
    run = generate(home, tmp_path / "b.parquet", **{"data__batch_size": 5, **settings})
    assert run.status == 0, run.err
    assert [row["responses"] for row in rows(tmp_path / "a.parquet")] == [
        row["responses"] for row in rows(tmp_path / "b.parquet")
    ]


def test_filtered_overlong_prompts_lose_all_columns(home: Path, tmp_path: Path) -> None:
    texts = ["1+1=", "1+1" * 20, "2+2="]
    path = write_parquet(tmp_path / "in.parquet", [{"prompt": text, "id": i} for i, text in enumerate(texts)])
    refused(generate(home, tmp_path / "out.parquet", data__path=path), "row 1", "rollout.prompt_length=16", status=1)
    run = generate(home, tmp_path / "out.parquet", data__path=path, data__filter_overlong_prompts=True)
    assert run.status == 0, run.err
    assert [row["id"] for row in rows(tmp_path / "out.parquet")] == [0, 2]


@pytest.mark.slow
def test_a_second_model_adds_its_columns_to_the_first_ones(home: Path, tmp_path: Path) -> None:
    assert generate(home, tmp_path / "a.parquet").status == 0
    again = {"data__path": tmp_path / "a.parquet", "trainer__seed": 2}
    refused(
        generate(home, tmp_path / "b.parquet", **again),
        "already has a column 'responses'",
        "data.response_key=responses_2",
    )
    assert generate(home, tmp_path / "b.parquet", **again, data__response_key="other").status == 0
    assert all(row["responses"] != row["other"] for row in rows(tmp_path / "b.parquet"))


# -- scores ---------------------------------------------------------------------------------------


def shown(run: Run) -> dict[str, str]:
    """Return the table of scores of one data set."""
    cells = [re.findall(r"[^\s\u2500-\u257f]+", line) for line in run.out.splitlines()]
    return {row[0]: row[1] for row in cells if len(row) == 2 and "@" in row[0]}


def test_scores_come_from_the_function_with_their_means(home: Path, tmp_path: Path) -> None:
    run = generate(home, tmp_path / "out.parquet", custom_reward_function__path=even_digits.__file__)
    assert run.status == 0, run.err
    outputs = rows(tmp_path / "out.parquet")
    every = []
    for row in outputs:
        truth = row["reward_model"]["ground_truth"]
        scores = [even_digits.compute_score("", text, truth, None) for text in row["responses"]]
        assert row["responses_score"] == pytest.approx(scores)
        every.append(scores)
    mean, best = sum(map(sum, every)) / 32, sum(map(max, every)) / 16
    assert 0 < mean < best
    assert shown(run) == {"mean@2": f"{mean:.4g}", "best@2": f"{best:.4g}"} | {
        name: value for name, value in shown(run).items() if name in ("std@2", "worst@2")
    }  # no maj@2: this function returns no answers


def test_answers_are_kept_and_voted_on(home: Path, tmp_path: Path) -> None:
    body = "    return {'score': len(solution_str) > 4, 'pred': str(len(solution_str) > 4)}\n"
    (tmp_path / "reward.py").write_text(HEAD + body)
    run = generate(home, tmp_path / "out.parquet", custom_reward_function__path=tmp_path / "reward.py", rollout__n=3)
    assert run.status == 0, run.err
    long = [[len(text) > 4 for text in row["responses"]] for row in rows(tmp_path / "out.parquet")]
    assert [row["responses_pred"] for row in rows(tmp_path / "out.parquet")] == [[str(x) for x in row] for row in long]
    majority = sum(sum(row) >= 2 for row in long) / 16
    names = ["mean@3", "std@3", "best@2", "best@3", "maj@2", "maj@3", "worst@2", "worst@3"]
    assert list(shown(run)) == names
    assert shown(run)["maj@3"] == f"{majority:.4g}"


def test_a_score_by_data_source_needs_a_supported_one(home: Path, tmp_path: Path) -> None:
    row = {"prompt": PROMPT, "data_source": "mine", "ground_truth": "2"}
    path = write_parquet(tmp_path / "in.parquet", [row])
    auto = {"data__path": path, "custom_reward_function__name": "auto"}
    refused(
        generate(home, tmp_path / "out.parquet", **auto), "data_source mine", "must be one of openai/gsm8k", status=1
    )
    path = write_parquet(tmp_path / "in.parquet", [{"prompt": PROMPT}])
    refused(
        generate(home, tmp_path / "out.parquet", **auto),
        "data_source unknown has no built-in reward function",
        status=1,
    )
    assert generate(home, tmp_path / "out.parquet", data__path=path).status == 0


# -- resuming -------------------------------------------------------------------------------------


def killed_in_call(call: int, args: list[str], hold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the command in a separate process, and kill it while it generates the batch of this number."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv(holding.HOLD, str(hold))
    hold.write_text(str(call))
    process, reached = Forked("generate", *args), hold.with_name(f"{hold.name}.reached")
    try:
        deadline = time.monotonic() + PATIENCE
        while not reached.exists():
            assert process.poll() is None, finished(process)
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        assert finished(process).status == -signal.SIGKILL
    hold.unlink()
    reached.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("call", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_run_resumes_with_the_same_output_file(
    call: int, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = {"rollout.name": holding.NAME, "custom_reward_function.path": even_digits.__file__}
    uninterrupted, killed = tmp_path / "whole.parquet", tmp_path / "killed.parquet"
    killed_in_call(call, generate_args(home, {**scored, "data.output_path": killed}), tmp_path / "hold", monkeypatch)
    assert not killed.exists()
    again = camshaft("generate", *generate_args(home, {**scored, "data.output_path": killed}))
    assert again.status == 0, again.err
    num_done = 4 * (call - 1)
    assert (f"resuming: {num_done} of 16 prompts have responses" in again.out) == (num_done > 0)
    assert again.out.count("step ") == 5 - call
    assert camshaft("generate", *generate_args(home, {**scored, "data.output_path": uninterrupted})).status == 0
    assert parquet.ParquetFile(killed).read().equals(parquet.ParquetFile(uninterrupted).read(), check_metadata=True)
    assert killed.read_bytes() == uninterrupted.read_bytes()
    assert not list(tmp_path.glob("*.parts"))


@pytest.fixture
def partial(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the output file of a run that was killed after two of four parts."""
    out = tmp_path / "out.parquet"
    args = generate_args(home, {"rollout.name": holding.NAME, "data.output_path": out})
    killed_in_call(3, args, tmp_path / "hold", monkeypatch)
    assert sorted(path.name for path in parts_of(out).glob("from_*")) == ["from_000000000", "from_000000004"]
    return out


def parts_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.parts")


@pytest.mark.slow
def test_changed_settings_do_not_resume_existing_parts(partial: Path, home: Path) -> None:
    run = generate(home, partial, rollout__name=holding.NAME, rollout__temperature=0.5)
    refused(run, "rollout.temperature: 1.0 before, 0.5 now", f"delete {parts_of(partial)} to start again")
    assert parts_of(partial).is_dir()


@pytest.mark.slow
def test_changed_models_or_prompts_do_not_resume_existing_parts(partial: Path, home: Path, tmp_path: Path) -> None:
    other = shutil.copytree(home / "actor", tmp_path / "model")
    same = {"rollout__name": holding.NAME, "model__path": other}
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    refused(generate(home, partial, **same), "the model")
    path = write_parquet(tmp_path / "in.parquet", [{"prompt": PROMPT}])
    refused(generate(home, partial, rollout__name=holding.NAME, data__path=path), "the prompts")
    # A copy of the model in another folder counts as the same model.
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    assert generate(home, partial, **same).status == 0


def test_a_damaged_part_and_all_after_it_are_made_again(partial: Path, home: Path) -> None:
    part = parts_of(partial) / "from_000000000" / "responses.parquet"
    content = bytearray(part.read_bytes())
    content[100] ^= 1
    part.write_bytes(content)
    run = generate(home, partial, rollout__name=holding.NAME)
    assert run.status == 0, run.err
    assert "does not match its checksum" in " ".join(run.out.split())
    assert run.out.count("step ") == 4
    assert generate(home, partial.with_name("whole.parquet"), rollout__name=holding.NAME).status == 0
    assert partial.read_bytes() == partial.with_name("whole.parquet").read_bytes()


@pytest.mark.slow
def test_a_kill_during_a_write_leaves_no_valid_part(partial: Path, home: Path) -> None:
    # A kill leaves a part and a file in their temporary folders.
    for target in (parts_of(partial) / "from_000000008", partial):
        (storage.begin(target) / "responses.parquet").write_bytes(b"PAR1")
    assert generate(home, partial, rollout__name=holding.NAME).status == 0
    assert generate(home, partial.with_name("whole.parquet"), rollout__name=holding.NAME).status == 0
    assert partial.read_bytes() == partial.with_name("whole.parquet").read_bytes()
    assert not list(partial.parent.glob("out.parquet.*"))


def test_restarting_a_finished_run_changes_nothing(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    assert generate(home, out).status == 0
    before = out.stat().st_mtime_ns
    parts_of(out).mkdir()  # killed between writing the file and deleting its parts
    run = generate(home, out)
    assert (run.status, "already written by this command" in run.out) == (0, True)
    assert out.stat().st_mtime_ns == before
    assert not parts_of(out).exists()


def test_an_existing_file_is_not_replaced(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    out.write_text("mine")
    refused(generate(home, out), "the file already exists")
    assert out.read_text() == "mine"
    out.unlink()
    assert generate(home, out).status == 0
    before = out.read_bytes()
    refused(generate(home, out, trainer__seed=2), "already exists", "trainer.seed: 1 before, 2 now")
    assert out.read_bytes() == before


@pytest.mark.slow
def test_two_concurrent_runs_do_not_share_a_file(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, hold = tmp_path / "out.parquet", tmp_path / "hold"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv(holding.HOLD, str(hold))
    hold.write_text("1")
    args = generate_args(home, {"rollout.name": holding.NAME, "data.output_path": out})
    process = start("-m", "camshaft", "generate", *args)
    try:
        deadline = time.monotonic() + PATIENCE
        while not (tmp_path / "hold.reached").exists():
            assert process.poll() is None, finished(process)
            assert time.monotonic() < deadline
            time.sleep(0.01)
        refused(camshaft("generate", *args), "another run is writing this file")
    finally:
        hold.unlink()
        result = finished(process)
    assert result.status == 0, result.err
    assert len(rows(out)) == 16


# -- errors ---------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown keys": (
        {"data.pth": 1, "rollout.temprature": 2},
        ["2 errors", "Did you mean data.path?", "Did you mean rollout.temperature?"],
    ),
    "a key of training": ({"trainer.total_epochs": 3}, ["trainer.total_epochs", "unknown key"]),
    "no responses": ({"rollout.n": 0}, ["rollout.n = 0", "integer >= 1"]),
    "equal responses": (
        {"rollout.do_sample": False},
        ["generates 2 identical responses", "Set rollout.do_sample=true"],
    ),
    "no such file": ({"data.path": "/nowhere/in.parquet"}, ["data.path = /nowhere/in.parquet", "file not found"]),
    "no such model": ({"model.path": "/nowhere/model"}, ["model.path = /nowhere/model", "folder not found"]),
    "a model on the hub": ({"model.path": "Qwen/Qwen2.5-0.5B"}, ["Hugging Face cache", "Unset HF_HUB_OFFLINE"]),
    "a folder to write to": (
        {"data.output_path": "/tmp"},
        ["data.output_path = /tmp", "is a folder", "/tmp/responses"],
    ),
    "no such generator": ({"rollout.name": "tocrh"}, ["rollout.name = tocrh", "Did you mean torch?"]),
    "no such reward": (
        {"custom_reward_function.path": "/nowhere/r.py"},
        ["custom_reward_function.path", "file not found"],
    ),
    "an unwritable file": ({"data.output_path": "/proc/out.parquet"}, ["data.output_path", "is not writable"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_unknown_command_is_one_error_with_a_fix(case: str, home: Path) -> None:
    overrides, phrases = WRONG[case]
    refused(camshaft("generate", *generate_args(home, overrides)), *phrases)
    assert not (home / "out.parquet").exists()


def test_a_missing_prompt_column_is_named_with_the_nearest(home: Path, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "in.parquet", [{"prompts": PROMPT}])
    run = generate(home, tmp_path / "out.parquet", data__path=path)
    refused(run, "no column 'prompt'", "Did you mean 'prompts'?", status=1)
    assert generate(home, tmp_path / "out.parquet", data__path=path, data__prompt_key="prompts").status == 0


def test_files_with_incompatible_columns_are_an_error(home: Path, tmp_path: Path) -> None:
    a = write_parquet(tmp_path / "a.parquet", [{"prompt": PROMPT, "id": 1}])
    b = write_parquet(tmp_path / "b.parquet", [{"prompt": PROMPT, "id": "x"}])
    refused(generate(home, tmp_path / "out.parquet", data__path=f"[{a},{b}]"), "incompatible schemas", status=1)
    assert not parts_of(tmp_path / "out.parquet").exists()  # the error comes before any generation
    c = write_parquet(tmp_path / "c.parquet", [{"prompt": PROMPT, "id": 2, "more": 3.0}])
    assert generate(home, tmp_path / "out.parquet", data__path=f"[{a},{c}]").status == 0
    assert [(row["id"], row["more"]) for row in rows(tmp_path / "out.parquet")] == [(1, None), (2, 3.0)]
