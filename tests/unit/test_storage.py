from pathlib import Path

import pytest

from camshaft import storage
from camshaft.errors import CheckpointError


def write(folder: Path, text: str = "hello", **facts: object) -> None:
    with storage.new_folder(folder, **facts) as work:
        (work / "sub").mkdir()
        (work / "a.txt").write_text(text)
        (work / "sub" / "b.txt").write_text("b")


def test_a_folder_appears_with_its_facts_only_when_the_block_ends(tmp_path: Path) -> None:
    with storage.new_folder(tmp_path / "x", step=3) as work:
        (work / "a").write_text("1")
        assert not (tmp_path / "x").exists()
    assert storage.verify(tmp_path / "x") == {"step": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_an_error_in_the_block_leaves_what_was_there(tmp_path: Path) -> None:
    write(tmp_path / "x", "old")

    def fail() -> None:
        with storage.new_folder(tmp_path / "x") as work:
            (work / "a.txt").write_text("new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    storage.verify(tmp_path / "x")
    assert (tmp_path / "x" / "a.txt").read_text() == "old"
    write(tmp_path / "x", "newer")
    assert (tmp_path / "x" / "a.txt").read_text() == "newer"


@pytest.mark.parametrize("name", ["a.txt", "sub/b.txt"])
def test_a_missing_or_changed_file_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path / "x")
    (tmp_path / "x" / name).write_text("other")
    with pytest.raises(CheckpointError, match=name):
        storage.verify(tmp_path / "x")
    (tmp_path / "x" / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}' is missing"):
        storage.verify(tmp_path / "x")


def test_a_folder_without_manifest_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    assert not storage.is_complete(tmp_path / "x")
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        storage.verify(tmp_path / "x")


def test_a_folder_is_complete_while_every_file_has_its_length(tmp_path: Path) -> None:
    write(tmp_path / "x")
    assert storage.is_complete(tmp_path / "x")
    (tmp_path / "x" / "more.txt").write_text("not of ours")
    assert storage.is_complete(tmp_path / "x")
    (tmp_path / "x" / "a.txt").write_text("hell")
    assert not storage.is_complete(tmp_path / "x")
    (tmp_path / "x" / "a.txt").unlink()
    assert not storage.is_complete(tmp_path / "x")


def test_a_manifest_that_was_cut_off_is_damage_and_no_other_error(tmp_path: Path) -> None:
    write(tmp_path / "x")
    manifest = tmp_path / "x" / storage.MANIFEST
    manifest.write_text(manifest.read_text()[:10])
    assert not storage.is_complete(tmp_path / "x")
    with pytest.raises(CheckpointError, match="damaged"):
        storage.verify(tmp_path / "x")


def test_only_a_folder_of_the_same_kind_may_be_replaced(tmp_path: Path) -> None:
    write(tmp_path / "ours", kind="huggingface")
    write(tmp_path / "engine", kind="engine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("ours", "empty", "nothing"):
        storage.check_replaceable(tmp_path / name, "huggingface")
    for path in (tmp_path / "engine", tmp_path / "file", tmp_path):
        with pytest.raises(CheckpointError, match="is there already"):
            storage.check_replaceable(path, "huggingface")


def test_prune_keeps_the_newest_and_touches_no_other_role(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        write(tmp_path / f"global_step_{step}" / "actor")
    write(tmp_path / "global_step_1" / "critic")
    removed = storage.prune(tmp_path / "global_step_10" / "actor", 2)
    assert removed == [tmp_path / "global_step_1" / "actor"]
    assert (tmp_path / "global_step_1" / "critic").exists()
    assert [step for step, _ in storage.step_folders(tmp_path)] == [1, 2, 10]


def test_prune_removes_a_step_that_became_empty(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path / f"global_step_{step}" / "actor")
    storage.prune(tmp_path / "global_step_2" / "actor", 1)
    assert [step for step, _ in storage.step_folders(tmp_path)] == [2]


def test_prune_needs_a_numbered_step(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="global_step_<n>"):
        storage.prune(tmp_path / "actor", 1)


def test_copies_are_verified_and_whole(tmp_path: Path) -> None:
    write(tmp_path / "x", step=7)
    storage.copy_folder(str(tmp_path / "x"), f"file://{tmp_path / 'y'}")
    assert storage.verify(tmp_path / "y") == {"step": 7}
    (tmp_path / "x" / "a.txt").write_text("damaged")
    with pytest.raises(CheckpointError, match=r"a\.txt"):
        storage.copy_folder(str(tmp_path / "x"), str(tmp_path / "z"))


def test_schemes_that_are_not_there_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="hdfs://"):
        storage.plain_path("hdfs://host/x")
