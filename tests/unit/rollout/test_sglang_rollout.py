"""Errors of the SGLang rollout that need no SGLang; tests/sglang_rollout has the tests with SGLang."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
from support.tiny import tiny_folder

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import RolloutError
from camshaft.rollout import build_rollout
from camshaft.rollout.sglang.engine import SGLangEngine
from camshaft.rollout.sglang.installed import TESTED, check_installed

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is not None, reason="requires an environment without SGLang"
)


def test_missing_sglang_error_names_the_package() -> None:
    with pytest.raises(RolloutError, match=r"pip install --no-deps sglang==0\.5\.23.*rollout.name=torch"):
        build_rollout("sglang", RolloutEngineConfig(model_path="models/none"))


def test_the_error_of_a_weight_update_precedes_that_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    worker: Any = ModuleType("worker")
    worker.BEGIN = worker.LOAD = worker.FINISH = ""
    monkeypatch.setitem(sys.modules, "camshaft.rollout.sglang.worker", worker)
    engine: Any = SGLangEngine.__new__(SGLangEngine)
    engine._config, engine._engine, engine._hint = RolloutEngineConfig(model_path=str(tiny_folder())), Mock(), ""
    engine._engine.begin_weight_update.return_value = True, ""
    engine._engine.update_weights_from_tensor.return_value = False, "no weight 'sideways'"
    engine._engine.end_weight_update.return_value = False, "the scheduler has ended"
    with pytest.raises(RolloutError, match="no weight 'sideways'") as exc_info:
        engine.load([])
    assert exc_info.value.__notes__[0].endswith("the scheduler has ended")


def test_untested_version_is_warned_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    metadata = tmp_path / "sglang-9.9.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert check_installed() == check_installed() == "9.9.9"
    assert len(caplog.messages) == 1
    assert "SGLang 9.9.9" in caplog.messages[0]
    assert ", ".join(TESTED) in caplog.messages[0]
