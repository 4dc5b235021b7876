import errno
import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from camshaft import storage
from camshaft.checkpoint import CheckpointManager
from camshaft.checkpoint.manager import BEST, LATEST, Write, _write_marker, find_problem
from camshaft.errors import CheckpointError, FormatError

BOTH = ("actor", "critic")


def role(text: str = "weights", **facts: Any) -> Write:
    def write(local: str, second: str | None) -> None:
        with storage.new_folder(local, **facts) as work:
            (work / "weights.txt").write_text(text)
        if second is not None:
            storage.copy_folder(local, second)

    return write


def fails(local: str, second: str | None) -> None:
    raise OSError("no space left on device")


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """Limit the size of each file, which fails as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


STATES: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "values": ({"at": list(range(1000))}, OSError),
    "tensors": ({"at": torch.arange(1000)}, CheckpointError),
}


@pytest.mark.parametrize("kind", STATES)
def test_a_full_disk_is_an_error_with_the_folder(kind: str, tmp_path: Path) -> None:
    state, error = STATES[kind]
    manager = save(CheckpointManager(tmp_path), 1)
    with limited_files(2000), pytest.raises(error, match=r"global_step_2/trainer") as caught:
        manager.save(2, {"actor": role()}, state, {})
    assert error is OSError or "check the free space of its disk" in str(caught.value)
    latest = manager.latest()
    assert latest is not None
    assert latest.step == 1


def test_a_full_disk_is_an_error_with_the_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = save(CheckpointManager(tmp_path), 1)

    def fill(path: Path, text: str, **options: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")  # as of a write, without a path

    monkeypatch.setattr("camshaft.storage.Path.write_text", fill)
    with pytest.raises(OSError, match=LATEST):
        _write_marker(tmp_path, LATEST, 2)
    assert (tmp_path / LATEST).read_text() == "1"
    assert manager.latest() is not None


def save(
    manager: CheckpointManager, step: int, *names: str, text: str = "weights", **keep: int | None
) -> CheckpointManager:
    manager.save(step, {name: role(text) for name in names or BOTH}, {"at": step}, keep)
    return manager


def contents(root: Path) -> dict[int, list[str]]:
    return {step: sorted(path.name for path in folder.iterdir()) for step, folder in storage.step_folders(root)}


def test_the_latest_step_has_its_state_and_all_roles(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run")
    assert manager.latest() is None
    for step in (9, 10):
        saved = save(manager, step).latest()
        assert saved is not None
        assert (saved.step, saved.state) == (step, {"at": step})
        assert Path(saved.role("actor"), "weights.txt").read_text() == "weights"
        assert (tmp_path / "run" / LATEST).read_text() == str(step)
    assert contents(tmp_path / "run") == {9: ["actor", "critic", "trainer"], 10: ["actor", "critic", "trainer"]}


@pytest.mark.parametrize("lost", ["actor", "critic", "trainer", "actor/manifest.json", "trainer/state.json"])
def test_a_step_that_lost_a_part_is_passed_over(lost: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = save(save(CheckpointManager(tmp_path), 1), 2)
    path = tmp_path / "global_step_2" / lost
    if path.is_dir():
        storage.remove(path)
    else:
        path.unlink()
    latest = manager.latest()
    assert latest is not None
    assert latest.step == 1
    assert "skipped" in caplog.text
    assert "global_step_2" in caplog.text


def test_a_failed_save_keeps_the_older_step(tmp_path: Path) -> None:
    manager = save(CheckpointManager(tmp_path), 1)
    with pytest.raises(OSError, match="no space"):
        manager.save(2, {"actor": role(), "critic": fails}, {}, {"actor": 1, "critic": 1})
    latest = manager.latest()
    assert latest is not None
    assert latest.step == 1
    assert (tmp_path / LATEST).read_text() == "1"


def test_a_rewritten_step_never_mixes_old_and_new_parts(tmp_path: Path) -> None:
    manager = save(save(CheckpointManager(tmp_path), 1), 2, text="old")
    with pytest.raises(OSError, match="no space"):
        manager.save(2, {"actor": role("new"), "critic": fails}, {}, {})
    latest = manager.latest()
    assert latest is not None
    assert latest.step == 1


def test_each_role_keeps_its_configured_number(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3, 10):
        save(manager, step, actor=3, critic=1)
    assert contents(tmp_path) == {
        2: ["actor", "trainer"],
        3: ["actor", "trainer"],
        10: ["actor", "critic", "trainer"],
    }


def test_without_a_number_all_are_kept(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        save(manager, step, actor=None)
    assert list(contents(tmp_path)) == [1, 2, 3]


def test_incomplete_steps_do_not_count_for_retention(tmp_path: Path) -> None:
    manager = save(save(CheckpointManager(tmp_path), 1), 2)
    storage.remove(tmp_path / "global_step_2" / "trainer")
    save(manager, 3, actor=2, critic=2)
    assert list(contents(tmp_path)) == [1, 2, 3]
    save(manager, 4, actor=2, critic=2)
    assert list(contents(tmp_path)) == [3, 4]


def test_the_next_step_removes_leftovers_of_a_killed_write(tmp_path: Path) -> None:
    manager = save(CheckpointManager(tmp_path), 1)
    (tmp_path / "global_step_2" / "actor.unfinished").mkdir(parents=True)
    save(manager, 3)
    assert list(contents(tmp_path)) == [1, 3]


def test_steps_of_an_earlier_run_are_moved_aside(tmp_path: Path) -> None:
    manager = save(save(save(CheckpointManager(tmp_path), 2), 4), 6)
    manager.move_aside(after=2)
    assert list(contents(tmp_path)) == [2]
    assert list(contents(tmp_path / "aside.1")) == [4, 6]
    assert not (tmp_path / LATEST).exists()
    manager.move_aside(after=2)
    assert not (tmp_path / "aside.2").exists()
    manager.move_aside(after=0)
    assert list(contents(tmp_path / "aside.2")) == [2]
    assert manager.latest() is None


def test_opening_a_step_by_folder_lists_alternatives_on_error(tmp_path: Path) -> None:
    manager = save(save(CheckpointManager(tmp_path / "run"), 2), 4)
    assert CheckpointManager(tmp_path / "other").open(tmp_path / "run" / "global_step_2").step == 2
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        manager.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"contains several checkpoints.*global_step_4"):
        manager.open(tmp_path / "run")
    storage.remove(tmp_path / "run" / "global_step_2" / "critic")
    with pytest.raises(CheckpointError, match="'critic' is missing or incomplete"):
        manager.open(tmp_path / "run" / "global_step_2")
    file = tmp_path / "run" / "global_step_4" / "trainer" / "state.json"
    file.write_text(json.dumps({"at": 5}))
    with pytest.raises(CheckpointError, match=r"state\.json.*checksum"):
        manager.open(tmp_path / "run" / "global_step_4")


def test_the_second_folder_has_complete_steps(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", mirror=str(tmp_path / "second"))
    save(save(manager, 1), 2, actor=1, critic=1)
    assert list(contents(tmp_path / "run")) == [2]
    assert list(contents(tmp_path / "second")) == [1, 2]
    latest = CheckpointManager(tmp_path / "second").latest()
    assert latest is not None
    assert (latest.step, latest.state) == (2, {"at": 2})
    with pytest.raises(OSError, match="no space"):
        manager.save(2, {"actor": role("new"), "critic": fails}, {}, {})
    latest = CheckpointManager(tmp_path / "second").latest()
    assert latest is not None
    assert latest.step == 1


def test_a_remote_copy_may_be_a_url_and_is_restored(tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    manager = CheckpointManager(tmp_path / "run", mirror="memory://steps/run/")
    try:
        save(save(manager, 1), 2, actor=1, critic=1)
        assert files.exists("/steps/run/global_step_1/actor/weights.txt")
        for role_name in ("actor", "critic", "trainer"):
            url = f"memory://steps/run/global_step_2/{role_name}"
            storage.copy_folder(url, str(tmp_path / "back" / "global_step_2" / role_name))
        latest = CheckpointManager(tmp_path / "back").latest()
        assert latest is not None
        assert (latest.step, latest.state) == (2, {"at": 2})
        # A step that is written again and interrupted has no trainer folder that confirms it.
        with pytest.raises(OSError, match="no space"):
            manager.save(2, {"actor": role("new"), "critic": fails}, {}, {})
        assert not storage.exists("memory://steps/run/global_step_2/trainer")
        assert storage.exists("memory://steps/run/global_step_1/trainer")
    finally:
        files.rm("/steps", recursive=True)


# -- the best step --------------------------------------------------------------------------------


def with_best(manager: CheckpointManager, step: int, best: int | None, keep: int = 1) -> None:
    manager.save(step, {name: role() for name in BOTH}, {}, dict.fromkeys(BOTH, keep), best=best)


def test_the_best_step_is_kept_until_a_better_one_exists(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    history = []
    for step, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 5), (6, 5)):
        with_best(manager, step, best)
        history.append(list(contents(tmp_path)))
    assert history == [[1], [2], [2, 3], [2, 4], [5], [5, 6]]
    assert contents(tmp_path)[5] == ["actor", "critic", "trainer"]
    assert (tmp_path / BEST).read_text() == "5"


def test_the_previous_best_step_stays_until_replaced(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    with_best(manager, 1, best=1)
    behind: list[str] = []
    late = {"actor": role(), "critic": lambda local, _: behind.append(local)}
    manager.save(2, late, {}, {"actor": 1, "critic": 1}, best=2)
    assert contents(tmp_path) == {1: ["actor", "critic", "trainer"], 2: ["actor", "trainer"]}
    role()(behind[0], None)
    with_best(manager, 3, best=2)
    assert list(contents(tmp_path)) == [2, 3]


def test_a_best_step_of_another_folder_is_not_marked_here(tmp_path: Path) -> None:
    with_best(CheckpointManager(tmp_path), 7, best=3)
    assert not (tmp_path / BEST).exists()


# -- restoring from remote storage ----------------------------------------------------------------


@pytest.fixture(params=["folder", "url"])
def second(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "second")
        return
    yield f"memory://{tmp_path.name}/run"
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def lost(second: str, part: str) -> None:
    storage.remove(f"{second}/{part}")


def test_a_run_without_local_steps_fetches_the_newest_complete_one(second: str, tmp_path: Path) -> None:
    first = CheckpointManager(tmp_path / "a", second)
    for step in (1, 2, 10, 11):
        save(first, step, text=f"weights of {step}")
    lost(second, "global_step_11/critic")
    manager = CheckpointManager(tmp_path / "b", second)
    latest = manager.latest()
    assert latest is not None
    assert (latest.step, latest.state, latest.roles) == (10, {"at": 10}, BOTH)
    assert contents(tmp_path / "b") == {10: ["actor", "critic", "trainer"]}
    assert Path(latest.role("critic"), "weights.txt").read_text() == "weights of 10"


def test_a_local_step_precedes_a_newer_remote_step(second: str, tmp_path: Path) -> None:
    save(save(CheckpointManager(tmp_path / "a", second), 1), 2)
    save(CheckpointManager(tmp_path / "b"), 1)
    latest = CheckpointManager(tmp_path / "b", second).latest()
    assert latest is not None
    assert latest.step == 1


def test_a_new_run_ignores_steps_of_an_earlier_run(second: str, tmp_path: Path) -> None:
    save(CheckpointManager(tmp_path / "a", second), 30)
    save(CheckpointManager(tmp_path / "b", second), 5)
    latest = CheckpointManager(tmp_path / "c", second).latest()
    assert latest is not None
    assert latest.step == 5


def test_an_empty_remote_copy_starts_a_new_run(second: str, tmp_path: Path) -> None:
    assert CheckpointManager(tmp_path / "a", second).latest() is None
    save(CheckpointManager(tmp_path / "b", second), 5)  # the fixture has a step to delete


def test_a_damaged_copy_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    second = tmp_path / "second"
    save(save(CheckpointManager(tmp_path / "a", str(second)), 1), 2)
    (second / "global_step_2" / "actor" / "weights.txt").write_text("other")
    latest = CheckpointManager(tmp_path / "b", str(second)).latest()
    assert latest is not None
    assert latest.step == 1
    assert "skipped" in caplog.text


def test_a_step_rewritten_after_a_background_save_is_clean(tmp_path: Path) -> None:
    manager = save(CheckpointManager(tmp_path), 1, text="old")
    manager.save(1, {"actor": role("new"), "critic": lambda *_: None}, {}, {})
    assert contents(tmp_path) == {1: ["actor", "trainer"]}
    assert manager.latest() is None


# -- model folders --------------------------------------------------------------------------------


def with_export(manager: CheckpointManager, step: int, export: Write | None = None, **keep: int | None) -> None:
    manager.save(step, {name: role() for name in BOTH}, {}, keep, {"actor": export or role("export")})


def test_a_model_folder_is_copied_before_the_step_counts(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", str(tmp_path / "second"))
    with_export(manager, 1)
    for root in ("run", "second"):
        assert contents(tmp_path / root) == {1: ["actor", "actor_huggingface", "critic", "trainer"]}
        assert (tmp_path / root / "global_step_1" / "actor_huggingface" / "weights.txt").read_text() == "export"
    with pytest.raises(OSError, match="no space"):
        with_export(manager, 2, fails)
    latest = manager.latest()
    assert latest is not None
    assert latest.step == 1


def test_a_model_folder_is_removed_with_its_role(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        with_export(manager, step, actor=2)
    save(manager, 3, actor=2)
    assert contents(tmp_path) == {
        1: ["critic", "trainer"],
        2: ["actor", "actor_huggingface", "critic", "trainer"],
        3: ["actor", "critic", "trainer"],
    }
    save(manager, 4, actor=1, critic=1)
    assert contents(tmp_path) == {4: ["actor", "critic", "trainer"]}


def test_no_run_resumes_from_a_model_folder(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run")
    with_export(manager, 1)
    (tmp_path / "run" / "global_step_1" / "actor_huggingface").rename(tmp_path / "mine")
    latest = manager.latest()
    assert latest is not None
    assert latest.step == 1


def test_a_rewritten_step_has_no_old_model_folder(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", str(tmp_path / "second"))
    with_export(manager, 1)
    save(manager, 1)
    for root in ("run", "second"):
        assert contents(tmp_path / root) == {1: ["actor", "critic", "trainer"]}


# -- background writes ----------------------------------------------------------------------------


def test_an_older_step_stays_until_the_newer_is_complete(tmp_path: Path) -> None:
    written: list[str] = []  # saves requested from the background thread and not yet done

    def later(local: str, second: str | None) -> None:
        if written:
            role()(written.pop(), None)
        written.append(local)

    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        manager.save(step, {"actor": later, "critic": role()}, {}, {"actor": 1, "critic": 1})
        assert contents(tmp_path).get(step) == ["critic", "trainer"]
        latest = manager.latest()
        assert (latest and latest.step) == (step - 1 or None)
    assert list(contents(tmp_path)) == [2, 3]


def test_an_old_step_that_cannot_be_removed_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(folder: Path) -> None:
        raise OSError(39, "Directory not empty")

    manager = save(CheckpointManager(tmp_path), 1)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "remove", busy)
        save(manager, 2, actor=1, critic=1)
    assert "global_step_1/actor cannot be removed: [Errno 39] Directory not empty" in caplog.text
    save(manager, 3, actor=1, critic=1)
    assert list(contents(tmp_path)) == [3]


# -- one checkpoint -------------------------------------------------------------------------------


def three_steps(root: Path, mirror: str | None = None) -> CheckpointManager:
    """Save three steps, whose roles differ and record their step as engines do."""
    manager = CheckpointManager(root, mirror)
    for step in (1, 2, 3):
        manager.save(step, {name: role(f"{name} {step}", global_step=step) for name in BOTH}, {"at": step}, {})
    return manager


def mix(root: Path, *parts: str) -> None:
    """Replace parts of step 3 by those of step 2."""
    for part in parts:
        shutil.rmtree(root / "global_step_3" / part)
        shutil.copytree(root / "global_step_2" / part, root / "global_step_3" / part)


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest together with its checksum, as another version would have written it."""
    contents = json.loads((folder / storage.MANIFEST).read_text())
    del contents["sha256"]
    change(contents)
    contents["sha256"] = storage._digest_of(contents)
    (folder / storage.MANIFEST).write_text(json.dumps(contents))


def as_version_0_1_0(step: Path) -> None:
    for part in (*BOTH, "trainer"):
        change_manifest(step / part, lambda contents: contents.pop("format"))
    change_manifest(step / "trainer", lambda contents: contents["facts"].pop("manifests"))


MIXED = {
    "actor": "'actor' belongs to the checkpoint of step 2, and 'trainer' to that of step 3",
    "critic": "'critic' belongs to the checkpoint of step 2, and 'trainer' to that of step 3",
    "trainer": "'actor' belongs to the checkpoint of step 3, and 'trainer' to that of step 2",
}


@pytest.mark.parametrize("version", ["this", "0.1.0"])
@pytest.mark.parametrize("part", MIXED)
def test_parts_of_two_steps_are_no_checkpoint(
    part: str, version: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = three_steps(tmp_path)
    if version == "0.1.0":
        as_version_0_1_0(tmp_path / "global_step_2")
        as_version_0_1_0(tmp_path / "global_step_3")
    mix(tmp_path, part)
    latest = manager.latest()
    assert latest is not None
    assert latest.step == 2
    assert caplog.text.count("skipped a checkpoint") == 1
    assert MIXED[part] in caplog.text
    for verify in (False, True):
        assert MIXED[part] in (find_problem(tmp_path / "global_step_3", verify) or "")
        assert find_problem(tmp_path / "global_step_2", verify) is None
    with pytest.raises(CheckpointError, match=MIXED[part]):
        manager.open(tmp_path / "global_step_3")


def test_a_role_of_another_run_at_the_same_step_is_detected(tmp_path: Path) -> None:
    for run in ("a", "b"):
        CheckpointManager(tmp_path / run).save(3, {"actor": role(run, global_step=3)}, {}, {})
    step = tmp_path / "a" / "global_step_3"
    shutil.rmtree(step / "actor")
    shutil.copytree(tmp_path / "b" / "global_step_3" / "actor", step / "actor")
    assert find_problem(step) == "'actor' belongs to another checkpoint, and 'trainer' to that of step 3"


def test_mixed_steps_do_not_count_for_retention_or_the_best(tmp_path: Path) -> None:
    manager = three_steps(tmp_path)
    mix(tmp_path, "actor", "critic")
    with_best(manager, 4, best=2, keep=2)
    assert list(contents(tmp_path)) == [2, 3, 4], "step 3 does not replace step 2"
    with_best(manager, 5, best=3, keep=1)
    assert list(contents(tmp_path)) == [2, 3, 5], "step 2 is the best until step 3 is intact"


def test_a_mixed_copy_is_not_fetched(second: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    three_steps(tmp_path / "a", second)
    for part in ("actor", "critic"):
        storage.copy_folder(str(tmp_path / "a" / "global_step_2" / part), f"{second}/global_step_3/{part}")
    latest = CheckpointManager(tmp_path / "b", second).latest()
    assert latest is not None
    assert (latest.step, latest.is_fetched) == (2, True)
    assert f"{second}/global_step_3 is damaged: {MIXED['actor']}" in caplog.text
    assert list(contents(tmp_path / "b")) == [2]


def test_a_mixed_step_is_fetched_again(second: str, tmp_path: Path) -> None:
    manager = three_steps(tmp_path / "a", second)
    for step in (1, 2):
        shutil.rmtree(tmp_path / "a" / f"global_step_{step}")
    (tmp_path / "a" / "global_step_3" / "actor" / storage.MANIFEST).write_bytes(
        (tmp_path / "a" / "global_step_3" / "critic" / storage.MANIFEST).read_bytes()
    )
    latest = manager.latest()
    assert latest is not None
    assert (latest.step, find_problem(latest.folder, verify=True)) == (3, None)


def test_roles_written_in_the_background_are_listed_afterwards(second: str, tmp_path: Path) -> None:
    behind: dict[int, list[tuple[str, str | None]]] = {}

    def later(step: int) -> Write:
        def write(local: str, mirror: str | None) -> None:
            for path in behind.pop(step - 1, []):
                role(f"step {step - 1}", global_step=step - 1)(*path)
            behind[step] = [(local, mirror)]

        return write

    manager = CheckpointManager(tmp_path / "run", second)
    for step in (1, 2):
        manager.save(step, {"actor": later(step)}, {}, {})
    for location in (tmp_path / "run", second):
        listed = [storage.read_manifest(f"{location}/global_step_{step}/trainer")["facts"] for step in (1, 2)]
        assert [list(facts["manifests"]) for facts in listed] == [["actor"], []]
    role("step 2", global_step=2)(*behind[2][0])
    assert find_problem(tmp_path / "run" / "global_step_2", verify=True) is None, "also before it is listed"
    manager.bind()
    for location in (tmp_path / "run", second):
        facts = storage.read_manifest(f"{location}/global_step_2/trainer")["facts"]
        actor = storage.read_manifest(f"{location}/global_step_2/actor")
        assert facts["manifests"] == {"actor": actor["sha256"]}
    latest = CheckpointManager(tmp_path / "elsewhere", second).latest()
    assert latest is not None
    assert latest.step == 2


def test_a_role_that_is_not_listed_yet_is_recognized_by_its_step(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(2, {"actor": role("two", global_step=2)}, {}, {})
    manager.save(3, {"actor": lambda *_: None}, {}, {})
    shutil.copytree(tmp_path / "global_step_2" / "actor", tmp_path / "global_step_3" / "actor")
    assert find_problem(tmp_path / "global_step_3") == MIXED["actor"]


def test_a_checkpoint_removed_while_its_roles_are_written_costs_nothing(second: str, tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", second)
    manager.save(2, {"actor": lambda *_: None}, {}, {})
    for location in (str(tmp_path / "run"), second):
        storage.remove(f"{location}/global_step_2/trainer")
    manager.bind()
    assert not storage.exists(f"{second}/global_step_2/trainer")
    assert contents(tmp_path / "run") == {2: []}


# -- other versions -------------------------------------------------------------------------------


def test_a_checkpoint_of_version_0_1_0_is_opened_with_one_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = three_steps(tmp_path)
    as_version_0_1_0(tmp_path / "global_step_3")
    with caplog.at_level("INFO", "camshaft"):
        latest = manager.latest()
    assert latest is not None
    assert (latest.step, latest.state) == (3, {"at": 3})
    (message,) = caplog.messages
    assert "was saved by an earlier version, which did not record the checksums of its roles" in message


@pytest.mark.parametrize("part", ["trainer", "actor"])
def test_a_newer_format_is_refused_and_not_passed_over(part: str, tmp_path: Path) -> None:
    manager = three_steps(tmp_path)
    folder = tmp_path / "global_step_3" / part
    change_manifest(folder, lambda contents: contents.update(format=99))
    newer = (
        rf"{folder} was written by a newer version of camshaft: its format is 99, and this version reads formats up "
        rf"to {storage.FORMAT}; update camshaft"
    )
    for call in (manager.latest, lambda: manager.open(folder.parent), lambda: storage.verify(folder)):
        with pytest.raises(FormatError, match=newer):
            call()
    assert "format is 99" in (find_problem(folder.parent) or "")
    save(manager, 4, actor=1, critic=1)  # retention may meet it, too


def test_a_copy_of_a_newer_format_is_refused(second: str, tmp_path: Path) -> None:
    three_steps(tmp_path / "a", None)
    change_manifest(tmp_path / "a" / "global_step_3" / "trainer", lambda contents: contents.update(format=99))
    for part in (*BOTH, "trainer"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(storage, "FORMAT", 99)
            storage.copy_folder(str(tmp_path / "a" / "global_step_3" / part), f"{second}/global_step_3/{part}")
    if not storage.is_url(second):
        change_manifest(Path(second) / "global_step_3" / "trainer", lambda contents: contents.update(format=99))
    with pytest.raises(FormatError, match=r"global_step_3/trainer was written by a newer version"):
        CheckpointManager(tmp_path / "b", second).latest()
    assert not contents(tmp_path / "b")


@pytest.mark.parametrize("number", ["1", None, 1.5, [1]])
def test_a_format_that_is_no_number_is_damage(number: Any, tmp_path: Path) -> None:
    manager = three_steps(tmp_path)
    change_manifest(tmp_path / "global_step_3" / "trainer", lambda contents: contents.update(format=number))
    latest = manager.latest()
    assert latest is not None
    assert latest.step == 2
