"""The script in examples/engine and the notebook run as documented."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from camshaft import load_run, storage

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_an_engine_without_roles_trains_on_two_ranks(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(ROOT / "examples" / "engine" / "train.py")
    process = subprocess.run([*launch, script, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", process.stdout)]
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 5
    assert storage.verify(tmp_path / "global_step_60")["global_step"] == 60


@pytest.mark.timeout(250)
def test_the_notebook_learns(tmp_path: Path) -> None:
    """The code cells run in order as a script without a main guard, because there is no notebook kernel here."""
    cells = json.loads((ROOT / "examples" / "first_run.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    code.insert(0, "open('starts', 'a').write('x')")
    (tmp_path / "cells.py").write_text("\n\n".join(code), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "cells.py"]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr[-3000:]
    assert (tmp_path / "starts").read_text(encoding="utf-8") == "x", "the reward processes ran the script again"
    (folder,) = tmp_path.glob("checkpoints/camshaft_examples/tiny-list-*")
    history = load_run(folder).history
    assert history["step"] == list(range(1, 21))
    assert history["critic/score/mean"][-1] > 0.5 > history["critic/score/mean"][0]
    assert min(history["distinct_responses"]) > 1
    assert (tmp_path / "models" / "digits" / "config.json").is_file()
