"""Check which version of SGLang is installed.

version = check_installed()            # raises a RolloutError with install instructions if missing; imports nothing
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging

from camshaft.errors import RolloutError

logger = logging.getLogger(__name__)

TESTED = ("0.5.23",)
"""Versions covered by the tests, on a CPU. Other versions work if the API used in this folder is unchanged."""

_warned: set[str] = set()


def check_installed() -> str:
    """Return the version; raise an error if SGLang is missing, warn once about an untested version."""
    if importlib.util.find_spec("sglang") is None:
        raise RolloutError(
            f"rollout.name=sglang needs SGLang {TESTED[-1]}: run pip install --no-deps sglang=={TESTED[-1]} and "
            "install its dependencies without replacing torch (it requires a newer one); requirements-sglang.txt lists "
            "the versions of the tests. Or set rollout.name=torch for the built-in generator, or rollout.name=vllm"
        )
    version = importlib.metadata.version("sglang")
    if version not in TESTED and version not in _warned:
        _warned.add(version)
        logger.warning("%s", untested_warning(version))
    return version


def untested_warning(version: str) -> str:
    """Return the warning about an untested version."""
    return (
        f"SGLang {version} is untested with this rollout, which is tested with {', '.join(TESTED)}. "
        "If you see errors, install a tested version"
    )


def hint(version: str) -> str:
    """Return a suffix for error messages that reports an untested version; empty for a tested one."""
    return "" if version in TESTED else f"\n{untested_warning(version)}"
