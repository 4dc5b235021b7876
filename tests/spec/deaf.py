"""Do the tests of a row really prove it? Each key is made to do nothing, and its tests must fail.

    python tests/spec/deaf.py                       # every key and every field: an hour
    python tests/spec/deaf.py critic. engine:optim. # those that begin so

Prints what survives: a key whose tests all pass although nothing reads it. Each try is a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from spec.keys import noticed_by  # noqa: E402
from spec.told import ACTS, TOLD  # noqa: E402


def tries() -> dict[str, tuple[str, ...]]:
    """What to forget -> the tests of it."""
    from camshaft.config import PPOConfig
    from camshaft.config.tree import leaf_fields

    found = {key: noticed_by(key)[:1] if key in TOLD else noticed_by(key) for key in leaf_fields(PPOConfig)}
    fields = {f"{part}:{field}": tests for part, fields in ACTS.items() for field, tests in fields.items()}
    del fields["engine:model.path"]  # has no default to fall back to
    del fields["engine:options.pipeline_stages"]  # of an engine in the tests, not of FSDP
    found |= fields
    return {what: tests for what, tests in found.items() if tests}


def survives(what: str, tests: tuple[str, ...]) -> bool:
    """Whether all tests pass in a process that has forgotten `what`."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            import pytest

            from spec.forget import forget

            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            forget(what)
            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])
            os._exit(0 if code == 0 else 1 if code == 1 else 3)
        os._exit(3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1), f"{what}: {tests} could not be run"
    return code == 0


def main(begins: list[str]) -> int:
    import torch  # noqa: F401  (once, for all tries)
    import transformers  # noqa: F401

    os.chdir(ROOT)
    alive = 0
    for what, tests in tries().items():
        if not begins or what.startswith(tuple(begins)):
            alive += (survived := survives(what, tests))
            sys.stdout.write(f"{'SURVIVES' if survived else 'noticed '} {what} {' '.join(tests) if survived else ''}\n")
            sys.stdout.flush()
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
