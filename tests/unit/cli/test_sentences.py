"""Damaged files and full disks end a command with a sentence, and not with a traceback."""

import errno
import json
import pickle
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.command_line import Run, camshaft, sft_args
from support.shared_folders import shared_folder

from camshaft import cli, storage
from camshaft.checkpoint.manager import BEST, TRAINER
from camshaft.data.chat import render
from camshaft.errors import BatchError
from camshaft.models.loader import load_tokenizer
from camshaft.models.tiny import make_tiny_model
from camshaft.tracking.jsonl import read_metrics

STEPS = {"trainer.total_training_steps": 2, "trainer.save_freq": 1}


def train(folder: Path) -> None:
    """Run two steps, with a checkpoint of each."""
    assert camshaft("sft", *sft_args(folder, STEPS)).status == 0


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a copy of the home folder of a finished run, which a test may damage."""
    return Path(shutil.copytree(shared_folder("sft-every-step", train), tmp_path / "home"))


def resume(home: Path, *more: str) -> Run:
    """Run one more step."""
    return camshaft("sft", *sft_args(home, {**STEPS, "trainer.total_training_steps": 3}), *more)


def rewrite_manifest(folder: Path, change: Callable[[dict], object]) -> None:
    """Change the facts of a manifest together with its checksum, so that only its content is wrong."""
    rewrite_contents(folder, lambda contents: change(contents["facts"]))


def rewrite_contents(folder: Path, change: Callable[[dict], object]) -> None:
    contents = json.loads((folder / storage.MANIFEST).read_text())
    del contents["sha256"]
    change(contents)
    contents["sha256"] = storage._digest_of(contents)
    (folder / storage.MANIFEST).write_text(json.dumps(contents))


# -- checkpoints and outputs of a run ---------------------------------------------------------------


@pytest.mark.parametrize("content", ["[]", "{}", "null", "\0\0", '{"facts": [], "files": {}, "sha256": ""}'])
def test_a_damaged_manifest_falls_back_to_the_step_before(home: Path, content: str) -> None:
    (home / "sft" / "global_step_2" / TRAINER / storage.MANIFEST).write_text(content)
    run = resume(home)
    assert (run.status, run.err) == (0, "")
    assert "skipped a checkpoint" in run.out
    assert [line["step"] for line in read_metrics(home / "sft" / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("key", ["roles", "global_step"])
def test_a_manifest_without_facts_falls_back_to_the_step_before(home: Path, key: str) -> None:
    newest = home / "sft" / "global_step_2"
    rewrite_manifest(newest / TRAINER, lambda facts: facts.pop(key))
    run = resume(home)
    assert (run.status, run.err) == (0, "")
    assert "skipped a checkpoint" in run.out
    run = camshaft("export", str(newest), str(home / "out"))
    assert run.status == 0 or "is damaged: trainer/manifest.json does not list the roles and the step" in run.err


def test_export_names_a_manifest_without_roles(home: Path) -> None:
    newest = home / "sft" / "global_step_2"
    rewrite_manifest(newest / TRAINER, lambda facts: facts.pop("roles"))
    run = camshaft("export", str(newest), str(home / "out"))
    assert run.status == 1
    assert f"{newest} is damaged: trainer/manifest.json does not list the roles and the step; restore" in run.err


@pytest.mark.parametrize("part", ["model", TRAINER])
def test_a_run_does_not_resume_from_parts_of_two_steps(home: Path, part: str) -> None:
    first, second = (home / "sft" / f"global_step_{step}" for step in (1, 2))
    shutil.rmtree(second / part)
    shutil.copytree(first / part, second / part)
    listed = camshaft("checkpoints", str(home / "sft"), "--verify").out.splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [["1", "intact"], ["2", "broken"]]
    message = f"'model' belongs to the checkpoint of step {1 if part == 'model' else 2}, and 'trainer' to that of step"
    assert message in listed[2]
    assert "broken" in camshaft("checkpoints", str(home / "sft")).out
    for path in (second, second / "model"):
        run = camshaft("export", str(path), str(home / "out"))
        assert (run.status, message in run.err) == (1, True)
    run = resume(home)
    assert (run.status, run.err) == (0, "")
    assert run.out.count("skipped a checkpoint") == run.out.count(message) == 1
    assert "step 2 of 3 is next" in run.out


@pytest.mark.parametrize("part", ["model", TRAINER])
def test_a_newer_checkpoint_ends_the_run_with_a_sentence(home: Path, part: str) -> None:
    newest = home / "sft" / "global_step_2"
    rewrite_contents(newest / part, lambda contents: contents.update(format=99))
    message = f"{newest / part} was written by a newer version of camshaft: its format is 99"
    for run in (resume(home), camshaft("export", str(newest), str(home / "out"))):
        assert run.status == 1
        assert run.err.startswith(
            f"camshaft: FormatError: {message}, and this version reads formats up to 1; update camshaft"
        )
    assert message in camshaft("checkpoints", str(home / "sft")).out
    assert not (home / "sft" / "global_step_3").exists()


def test_a_checkpoint_of_version_0_1_0_resumes_with_one_notice(home: Path, tmp_path: Path) -> None:
    same = Path(shutil.copytree(home, tmp_path / "same"))
    newest = home / "sft" / "global_step_2"
    for part in ("model", TRAINER):
        rewrite_contents(newest / part, lambda contents: contents.pop("format"))
    rewrite_manifest(newest / TRAINER, lambda facts: facts.pop("manifests"))
    state = json.loads((newest / TRAINER / "state.json").read_text())
    del state["recorded"]
    (newest / TRAINER / "state.json").write_text(json.dumps(state))
    entries = storage.fingerprints(newest / TRAINER, [newest / TRAINER / "state.json"])
    rewrite_contents(newest / TRAINER, lambda contents: contents.update(files=entries))
    runs = [resume(folder) for folder in (home, same)]
    assert [(run.status, run.err) for run in runs] == [(0, ""), (0, "")]
    assert [run.out.count("saved by an earlier version") for run in runs] == [1, 0]
    models = [folder / "sft" / "global_step_3" / "model" for folder in (home, same)]
    assert [*models[0].rglob("*.safetensors")]
    for file in models[0].rglob("*.safetensors"):
        assert file.read_bytes() == (models[1] / file.relative_to(models[0])).read_bytes()


def test_a_marker_with_other_text_is_named(home: Path) -> None:
    (home / "sft" / BEST).write_text("the best one")
    run = camshaft("checkpoints", str(home / "sft"))
    assert run.status == 1
    assert re.search(rf"{BEST} does not contain a step number, but 'the best one'; delete the file", run.err)


def test_damaged_metrics_are_moved_aside(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = home / "sft" / "metrics.jsonl"
    first, second = file.read_bytes().splitlines()
    damaged = [b"\0\0\0\0", b'{"step": ', b"[]", b"\xff\xfe", b'{"step": "one"}']
    file.write_bytes(b"\n".join([first, *damaged, second, b'{"step": 3, "los']))
    run = resume(home)
    assert (run.status, run.err) == (0, "")
    assert f"moved damaged lines of {file} to {file}.damaged: 5" in caplog.text
    assert [line["step"] for line in read_metrics(file)] == [1, 2, 3]
    assert file.read_bytes().startswith(first + b"\n" + second + b"\n")
    assert (home / "sft" / "metrics.jsonl.damaged").read_bytes().splitlines() == damaged


# -- writing ------------------------------------------------------------------------------------------


@pytest.fixture
def file_limit() -> Iterator[Callable[[int], None]]:
    """Limit the size of files, which fails like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda count: resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("count", [100, 20_000])
def test_an_export_to_a_full_disk_leaves_nothing(home: Path, count: int, file_limit: Callable[[int], None]) -> None:
    file_limit(count)
    run = camshaft("export", str(home / "sft"), str(home / "out" / "model"))
    assert run.status == 1
    assert re.match(r"camshaft: .*(cannot be written|File too large).*; (free space|raise the limit)", run.err)
    assert list((home / "out").iterdir()) == []


def test_an_export_into_a_file_is_a_sentence(home: Path) -> None:
    (home / "out").write_text("")
    run = camshaft("export", str(home / "sft"), str(home / "out" / "model"))
    assert run.status == 1
    assert re.match(r"camshaft: .*/out.*; rename or delete", run.err)


def test_a_file_in_the_place_of_an_output_folder_is_a_sentence(home: Path) -> None:
    shutil.rmtree(home / "sft")
    (home / "sft").write_text("")
    run = resume(home)
    assert run.status in (1, 2)
    assert f"{home / 'sft'}" in run.err


ERRNOS = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOENT, errno.EEXIST, errno.EIO]


@pytest.mark.parametrize("number", ERRNOS, ids=lambda number: errno.errorcode[number])
def test_errors_of_file_systems_are_sentences(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only or full file system, and a folder that is deleted while a run saves."""

    def fail(argv: list[str]) -> int:
        raise OSError(number, "the reason", "from", None, "checkpoints/run")

    monkeypatch.setattr(cli, "import_attribute", lambda target: fail)
    run = camshaft("export")
    assert run.status == 1
    assert re.fullmatch(r"camshaft: checkpoints/run: the reason; .+\n", run.err)


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: list[str]) -> int:
        raise ConnectionResetError(errno.ECONNRESET, "a bug")

    monkeypatch.setattr(cli, "import_attribute", lambda target: fail)
    with pytest.raises(ConnectionResetError):
        camshaft("export")


# -- models -------------------------------------------------------------------------------------------


class Planted:
    """An object whose pickle writes a file when it is loaded."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> tuple:
        return Path.touch, (self.file,)


def replace_weights(folder: Path) -> Path:
    """Replace the safetensors file by a pickle, and return its path."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    torch.save({**weights, "planted": Planted(folder / "RAN")}, file)
    return file


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_a_planted_pickle_is_not_loaded(home: Path) -> None:
    replace_weights(home / "actor")
    run = resume(home, "trainer.resume_mode=disable")
    assert run.status == 1
    assert "contain objects other than tensors, which run code when they are loaded" in run.err
    assert "weights_only" not in run.err
    assert not (home / "actor" / "RAN").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
def test_weights_that_are_a_plain_pickle_are_not_loaded(home: Path) -> None:
    replace_weights(home / "actor").write_bytes(pickle.dumps(Planted(home / "actor" / "RAN")))
    run = resume(home, "trainer.resume_mode=disable")
    assert run.status == 1
    assert "Traceback" not in run.err
    assert not (home / "actor" / "RAN").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_file_cut_off_is_named(home: Path, name: str) -> None:
    cut(home / "actor" / name)
    run = resume(home, "trainer.resume_mode=disable")
    assert run.status == 1
    assert f"{home / 'actor' / name} is not valid JSON" in run.err


@pytest.mark.parametrize("template", ["{% for i in range(10**12) %}x{% endfor %}", "{{ 1 / 0 }}", "{{ messages.a.b }}"])
def test_a_chat_template_that_fails_is_named(template: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    tokenizer.chat_template = template
    with pytest.raises(BatchError, match=r"data.parquet, row 3: the chat template rejects .*; change the messages or"):
        render([{"role": "user", "content": "1+1="}], tokenizer, "data.parquet, row 3", True)
