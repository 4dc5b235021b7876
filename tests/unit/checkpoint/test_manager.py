import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from camshaft import storage
from camshaft.checkpoint import CheckpointManager
from camshaft.checkpoint.manager import BEST, LATEST, Write
from camshaft.errors import CheckpointError

BOTH = ("actor", "critic")


def role(text: str = "weights") -> Write:
    def write(local: str, second: str | None) -> None:
        with storage.new_folder(local) as work:
            (work / "weights.txt").write_text(text)
        if second is not None:
            storage.copy_folder(local, second)

    return write


def fails(local: str, second: str | None) -> None:
    raise OSError("no space left on device")


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
