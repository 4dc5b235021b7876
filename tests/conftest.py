"""One thread per process: the tests are many small programs on few cores, and sums keep their order."""

import os
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "CAMSHAFT_CACHE" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="camshaft-cache-")
    os.environ["CAMSHAFT_CACHE"] = _CACHE.name  # what a test caches is gone when it ends

settings.register_profile("busy machine", deadline=None)  # by default an example that takes 0.2 s fails
settings.load_profile("busy machine")


@pytest.fixture(autouse=True, scope="session")
def _ranks_find_their_modules_imported() -> None:
    """All ranks of this process come from one fork server, which the first of them starts."""
    if local := sys.modules.get("camshaft.controller.local"):
        local.PRELOAD += ["camshaft.roles", "camshaft.engine.fsdp", "transformers.models.qwen2.modeling_qwen2", "peft"]


@pytest.fixture(autouse=True, scope="module")
def _no_group_outlives_its_module() -> Iterator[None]:
    """A sharded engine in this process joins a group of one; the next module starts without."""
    yield
    # A vLLM engine has groups inside that one, and stays for the life of the process.
    if "vllm" not in sys.modules and (device := sys.modules.get("camshaft.device")):
        device.leave_group()
