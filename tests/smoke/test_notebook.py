"""Runs in a Jupyter kernel: the example notebook learns, and the stop button leaves a usable run."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from camshaft import load_run

ROOT = Path(__file__).parents[2]
TRAIN = """
import camshaft
from camshaft.models.tiny import make_tiny_model

run = camshaft.train(
    model=make_tiny_model("models/tiny"),
    data=[{"prompt": f"Write digits. Seed: {seed}"} for seed in range(64)],
    reward=lambda response: sum(c.isdigit() for c in response) / 16,
    algorithm="grpo",
    steps=1000,
    batch=4,
    response_length=8,
    out="run",
)
print("status", run.status, run.history["step"][-1])
"""
RESUME = """
steps = run.history["step"][-1] + 2
run = run.resume(steps=steps)
print("status", run.status, run.history["step"] == list(range(1, steps + 1)))
"""


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels import the package of this repository."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)


def test_the_notebook_is_stored_with_its_outputs() -> None:
    notebook = nbformat.read(ROOT / "examples" / "first_run.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = "".join(output.get("text", "") for output in outputs)
    assert "step 20/20  reward 0.8946" in text
    assert str(Path.home()) not in text
    assert "site-packages" not in text


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.mark.timeout(250)
@pytest.mark.parametrize("steps", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_the_notebook_runs(steps: int, tmp_path: Path) -> None:
    """Execute all cells. The short form trains for fewer steps, and does not expect that the reward rises."""
    notebook = nbformat.read(ROOT / "examples" / "first_run.ipynb", as_version=4)
    assert sum("steps=20" in cell.source for cell in notebook.cells) == 1
    for cell in notebook.cells:
        cell.source = cell.source.replace("steps=20", f"steps={steps}").replace("(1, 20)", f"(1, {steps})")
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=200, coalesce_streams=True, resources=place).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs), "run.plot() shows a figure"
    (lines,) = [output.text for output in outputs if f"step {steps}/{steps}" in output.get("text", "")]
    assert f"step 1/{steps}  reward" in lines, "the lines of a run are one block of plain text"
    folder = tmp_path / "checkpoints" / "camshaft_examples" / "tiny-1"
    history = load_run(folder).history
    assert history["step"] == list(range(1, steps + 1))
    assert min(history["distinct_responses"]) > 1
    assert (tmp_path / "models" / "digits" / "config.json").is_file()
    if steps == 20:
        assert history["critic/score/mean"][-1] > 0.5 > history["critic/score/mean"][0]


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_the_stop_button_leaves_a_run_that_resumes(
    kernel: tuple[KernelManager, BlockingKernelClient], tmp_path: Path
) -> None:
    manager, client = kernel
    button = threading.Thread(target=press_after_two_steps, args=(manager, tmp_path / "run" / "metrics.jsonl"))
    button.start()
    text = execute(client, TRAIN)
    button.join()
    assert "SIGINT: stopped after step" in text
    assert text.splitlines()[-1].startswith("status stopped")
    assert execute(client, RESUME).splitlines()[-1] == "status finished True"


def press_after_two_steps(manager: KernelManager, metrics: Path) -> None:
    """Interrupt the kernel as the stop button does: SIGINT to the processes of its group."""
    while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < 2:
        time.sleep(0.1)
    manager.interrupt_kernel()


def execute(client: BlockingKernelClient, code: str) -> str:
    """Run a cell, and return what it prints to standard output."""
    lines: list[str] = []

    def collect(message: dict[str, dict[str, str]]) -> None:
        if message["content"].get("name") == "stdout":
            lines.append(message["content"]["text"])

    reply = client.execute_interactive(code, timeout=200, output_hook=collect)
    assert reply["content"]["status"] == "ok", reply["content"]
    return "".join(lines)
