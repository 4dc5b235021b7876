"""Every block of bash or Python on a documentation page runs.

Pages of `HERE` run in copies of one workspace, which has a model, data, a reward function and a finished run. The other
pages have tests of their own.
"""

import shutil
from pathlib import Path

import pytest
from support.command_line import camshaft
from support.pages import ROOT, commands, pages, run_here, script
from support.ppo_runs import ppo_args

from camshaft.data import write_arithmetic
from camshaft.models.tiny import make_tiny_model

HERE = (
    "docs/add-a-metric.md",
    "docs/async.md",
    "docs/check-model.md",
    "docs/checkpoints.md",
    "docs/cluster.md",
    "docs/data.md",
    "docs/doctor.md",
    "docs/endpoint.md",
    "docs/export.md",
    "docs/generate.md",
    "docs/install.md",
    "docs/lora.md",
    "docs/mismatch.md",
    "docs/plan.md",
    "docs/python.md",
    "docs/reward_model.md",
    "docs/rewards.md",
    "docs/tutorials/change-the-algorithm.md",
    "docs/tutorials/debug-a-run.md",
    "docs/tutorials/own-task.md",
    "docs/tutorials/write-a-reward.md",
)

ELSEWHERE = {
    "README.md": "tests/smoke/test_readme.py",
    "docs/agents.md": "tests/unit/trainer/test_agent_examples.py",
    "docs/algorithms.md": "tests/unit/trainer/test_own_algorithms.py",
    "docs/engines.md": "tests/contracts/test_third_party_engine.py",
}

SHORTER = {"rollout.response_length=1000": "rollout.response_length=8", "steps=40": "steps=2", "steps=20": "steps=2"}
"""Arguments on pages, and shorter ones that the tests replace them by."""

REWARD = "def my_reward(response, ground_truth):\n    return float(response == ground_truth)\n"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages of `HERE` expect of a reader."""
    folder = tmp_path_factory.mktemp("workspace")
    make_tiny_model(folder / "models" / "tiny")
    (folder / "models" / "mine").symlink_to("tiny")
    paths = write_arithmetic(folder / "data" / "sums", num_train=64, num_heldout=16)
    shutil.copy(paths.heldout, folder / "data" / "test.parquet")
    (folder / "my_reward.py").write_text(REWARD, encoding="utf-8")
    runs = {"demo": "tiny", "example_sums": "tiny"}
    settings = {"trainer.total_training_steps": 1, "trainer.save_freq": 1, "trainer.test_freq": -1}
    first, *others = [folder / "checkpoints" / project / name for project, name in runs.items()]
    run = camshaft("ppo", *ppo_args(folder, {**settings, "trainer.default_local_dir": first}))
    assert run.status == 0, run.err
    for other in others:
        shutil.copytree(first, other)
    return folder


@pytest.mark.timeout(200)
@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("page", HERE)
def test_the_code_of_a_page_runs(page: str, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(workspace, folder, symlinks=True)
    monkeypatch.chdir(folder)
    lines = commands(folder, script(folder, page))
    run_here([[SHORTER.get(word, word) for word in line] for line in lines], monkeypatch)


def test_every_page_with_code_has_a_test(tmp_path: Path) -> None:
    with_code = set()
    for number, page in enumerate(map(str, pages())):
        (tmp_path / str(number)).mkdir()
        if script(tmp_path / str(number), page):
            with_code.add(page)
    assert with_code == {*HERE, *ELSEWHERE}
    for page, test in ELSEWHERE.items():
        assert Path(page).stem.lower() in (ROOT / test).read_text(encoding="utf-8").lower(), page
