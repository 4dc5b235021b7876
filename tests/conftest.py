"""Use one thread per process: the tests are many small programs on few cores, and sums keep their order."""

import atexit
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for variable in ("CAMSHAFT_CACHE", "CAMSHAFT_TEST_FOLDERS"):
    if variable not in os.environ:  # processes of pytest-xdist share the folders
        folder = tempfile.TemporaryDirectory(prefix="camshaft-test-")
        atexit.register(folder.cleanup)
        os.environ[variable] = folder.name

# Without a deadline: hypothesis fails an example that takes 0.2 s by default. `make test-slow` tries more examples.
settings.register_profile("camshaft", deadline=None, max_examples=int(os.environ.get("CAMSHAFT_EXAMPLES", "20")))
settings.load_profile("camshaft")


def pytest_collection_finish() -> None:
    """Exclude the imported modules from garbage collection, which would traverse their objects again and again."""
    gc.freeze()


def pytest_runtest_teardown() -> None:
    if ranks := sys.modules.get("support.ranks"):
        ranks.WARM_RANKS.end_idle()


@pytest.fixture(autouse=True, scope="session")
def _preload_fork_server() -> Iterator[None]:
    """Start all ranks of this process from one fork server, which has the modules imported."""
    if local := sys.modules.get("camshaft.controller.local"):
        models = ("transformers.models.qwen2.modeling_qwen2", "peft")
        local.PRELOAD.extend(["camshaft.roles", "camshaft.engine.fsdp", *models])
    yield
    if ranks := sys.modules.get("support.ranks"):
        ranks.WARM_RANKS.__exit__()
    for name in ("support.tiny", "support.ppo_runs"):  # processes of pytest-xdist end without finalizers
        if module := sys.modules.get(name):
            module.HOME.cleanup()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the files and runs that the tests of a module share; a module may fill it."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True, scope="module")
def _freeze_again() -> Iterator[None]:
    """Exclude the modules from garbage collection again if a run in this process has included them."""
    yield
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _destroy_process_group() -> Iterator[None]:
    """Destroy the process group of size one that a sharded engine in this process creates."""
    yield
    # A vLLM engine has groups inside that group and lives until the process exits.
    if "vllm" not in sys.modules and (device := sys.modules.get("camshaft.device")):
        device.leave_group()
