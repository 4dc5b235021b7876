"""Run programs in the environment of the Tinker SDK, which `make test-tinker` creates.

output = run_python("import tinker; print(tinker.__version__)")
"""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / os.environ.get("CAMSHAFT_TINKER", ".venv-tinker") / "bin" / "python"

TRAINING = """
import sys
import tinker
from tinker import types

data = [
    types.Datum(model_input=types.ModelInput.from_ints([5, 6, 7, 8 + row]),
                loss_fn_inputs={"target_tokens": [6, 7, 8, 9 + row], "weights": [1.0, 0.5, -0.25, 2.0]})
    for row in range(7)  # three chunks, because the server accepts three datums
]
service = tinker.ServiceClient()
trainer = service.create_lora_training_client(base_model="models/tiny", rank=4, seed=3).result()
for step in range(int(sys.argv[1])):
    passes = trainer.forward_backward(data, loss_fn="cross_entropy")
    update = trainer.optim_step(types.AdamParams(learning_rate=1e-3 * (1 + step % 3)))
    print(step, passes.result().metrics["loss:sum"], update.result().metrics, flush=True)
print([list(row["logprobs"].data) for row in trainer.forward(data, loss_fn="cross_entropy").result().loss_fn_outputs])
print(trainer.save_state("end").result().path)
"""
"""Trains on weighted cross_entropy for a number of steps; prints the result of each step, log-probs, and a path."""


def run_python(
    code: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    seconds: float = 120,
) -> str:
    """Run a program with the SDK, and return its output. It must succeed."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0", **(environment or {})}
    process = subprocess.run(
        [PYTHON, "-c", code, *arguments], capture_output=True, text=True, timeout=seconds, env=variables, cwd=folder
    )
    assert process.returncode == 0, f"{process.stdout[-2000:]}\n{process.stderr[-6000:]}"
    return process.stdout
