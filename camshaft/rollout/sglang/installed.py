"""Check the installed version of SGLang without importing it.

version = check_installed()            # raises a RolloutError with install instructions if SGLang is missing
"""

import importlib.metadata
import importlib.util
import logging

from camshaft.errors import RolloutError

logger = logging.getLogger(__name__)

TESTED = ("0.5.23",)
"""Versions that the tests cover, on a CPU. Other versions work if they do not change the API used in this folder."""

_warned: set[str] = set()


def check_installed() -> str:
    """Return the installed version. Raise an error if SGLang is missing; warn once about an untested version."""
    if importlib.util.find_spec("sglang") is None:
        raise RolloutError(
            f"rollout.name=sglang requires SGLang {TESTED[-1]}, which is not installed. Run pip install --no-deps "
            f"sglang=={TESTED[-1]}, and install its dependencies except torch (SGLang requires a newer one); "
            "requirements-sglang.txt lists the versions used in the tests. Or set rollout.name=torch for the built-in "
            "generator, or rollout.name=vllm"
        )
    version = importlib.metadata.version("sglang")
    if version not in TESTED and version not in _warned:
        _warned.add(version)
        logger.warning("%s", hint(version).strip())
    return version


def hint(version: str) -> str:
    """Return a suffix for error messages that warns about an untested version, or "" for a tested version."""
    if version in TESTED:
        return ""
    return (
        f"\nSGLang {version} is not a tested version; this rollout is tested with {', '.join(TESTED)}. "
        "If you see errors, install a tested version"
    )
