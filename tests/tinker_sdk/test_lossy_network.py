"""The SDK trains through a proxy that loses and repeats requests and loses answers; no weight changes.

make test-tinker
"""

from pathlib import Path

import pytest
import torch
from support.counting_worker import CountingWorker
from support.ppo_runs import saved_weights
from support.tinker_clients import RunningServer, running_server
from support.tinker_sdk import TRAINING, run_python
from support.tiny import tiny_folder
from torch import Tensor

from camshaft.contracts.tinker.proxy import Fault, FaultProxy, random_faults
from camshaft.service.checkpoints import Checkpoints, SavedPath

pytestmark = [pytest.mark.tinker, pytest.mark.timeout(600)]
STEPS, CHUNKS = 15, 3
RATES = {Fault.LOSE_ANSWER: 0.1, Fault.LOSE_REQUEST: 0.05, Fault.REPEAT: 0.05}


def train(server: RunningServer, url: str) -> tuple[list[str], str]:
    """Return the results that the script prints, and the path of its weights."""
    variables = {"TINKER_BASE_URL": url, "TINKER_API_KEY": server.key}
    *results, path = run_python(TRAINING, str(STEPS), environment=variables, seconds=400).splitlines()
    return results, path


def weights(server: RunningServer, path: str) -> dict[str, Tensor]:
    folder = Checkpoints(Path(server.config.folder)).get(SavedPath.parse(path)).folder
    return saved_weights(folder) | saved_weights(folder, "optimizer")


def test_sixty_commands_of_the_sdk_run_once_through_a_lossy_network(tmp_path: Path) -> None:
    model = f"models/tiny={tiny_folder(tie_embeddings=False)}"
    with running_server(tmp_path, worker=CountingWorker, model=model, max_data=3, max_models=2) as server:
        results, path = train(server, server.url)
        with FaultProxy(server.url, random_faults(seed=3, rates=RATES)) as proxy:
            others, other_path = train(server, proxy.url)
        assert others == results
        assert len(results) == STEPS + 1
        assert proxy.num_faults > 0.2 * STEPS * (CHUNKS + 1)  # of at least two requests for each command
        expected = {"forward_backward": STEPS * CHUNKS, "optimizer_step": STEPS}
        assert list(server.role.call("counts").values()) == [expected, expected]
        first, second = weights(server, path), weights(server, other_path)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
