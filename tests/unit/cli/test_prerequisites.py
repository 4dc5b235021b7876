"""A missing library, client or reward is reported before torch is imported."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from camshaft.cli.prerequisites import check_prerequisites
from camshaft.config import load_ppo
from camshaft.errors import ConfigError, RewardError, StorageError

ROW = {"prompt": "1 + 1", "data_source": "my/sums"}


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "score.py").write_text("def score(response): return 1.0\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    parquet.write_table(pyarrow.Table.from_pylist([ROW]), tmp_path / "rows.parquet")
    return [f"model={tmp_path}/model", "algorithm=grpo", "device=cpu", "trainer.experiment_name=x"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_missing_reward_is_found_in_the_first_row(words: list[str], tmp_path: Path, suffix: str) -> None:
    data = f"data={tmp_path}/rows.{suffix}"
    with pytest.raises(RewardError, match="no reward is set, and data_source my/sums has no built-in reward function"):
        check_prerequisites(load_ppo([*words, data]))
    check_prerequisites(load_ppo([*words, data, f"reward={tmp_path}/score.py"]))


def test_other_data_is_left_to_the_loader(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "damaged.jsonl").write_text("{")
    (tmp_path / "plain.jsonl").write_text('{"prompt": "a"}\n')
    for name in ("damaged", "plain"):
        check_prerequisites(load_ppo([*words, f"data={tmp_path}/{name}.jsonl"]))


@pytest.mark.skipif(find_spec("sglang") is not None, reason="requires an environment without SGLang")
def test_a_missing_library_is_named(words: list[str], tmp_path: Path) -> None:
    config = load_ppo([*words, f"data={tmp_path}/rows.jsonl", "rollout=sglang"])
    with pytest.raises(ConfigError, match=r"rollout\.name=sglang requires 'sglang', which is not installed"):
        check_prerequisites(config)


def test_a_missing_client_is_named(words: list[str], tmp_path: Path) -> None:
    config = load_ppo([*words, "data=zzz://bucket/rows.parquet", f"reward={tmp_path}/score.py"])
    with pytest.raises(StorageError, match=r"zzz://bucket/rows\.parquet"):
        check_prerequisites(config)


def test_torch_is_not_imported_before(words: list[str], tmp_path: Path) -> None:
    argv = ["ppo", *words, f"data={tmp_path}/rows.jsonl"]
    code = "import sys; from camshaft.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=120)
    assert "no reward is set" in result.stderr
    assert result.stdout.splitlines()[-1] == "False"
