"""docs/spec.md: every method and key of the specification, what it is here, and the tests that prove it.

    python tests/spec/table.py             writes the page anew
    python tests/spec/table.py --check     says what is wrong: rows without a test, tests that do not exist, an old page
    python tests/spec/table.py --strict    the same, and what is not there yet counts as wrong

The rows are in `rows.py` and `keys.py`; every key of an RL run is among them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from camshaft.config import PPOConfig  # noqa: E402
from camshaft.config.load import ALIASES as KEY_ALIASES  # noqa: E402
from camshaft.config.load import check_implemented, resolved_defaults  # noqa: E402
from camshaft.config.tree import flatten, leaf_fields, nested, overlap  # noqa: E402
from spec.keys import PROOFS, VALUES, noticed_by, proofs_of_key  # noqa: E402
from spec.rows import ALIASES, DEVIATES, KEYS, METHODS, PENDING, Pending  # noqa: E402
from spec.told import ACTS, TOLD  # noqa: E402

PAGE = ROOT / "docs" / "spec.md"
HEAD = """# The specification

Written by `python tests/spec/table.py`; a test holds this page to it, every row to a test, and every test to one that
exists. A test without a case in brackets stands for all its cases. `python tests/spec/deaf.py` makes each key do
nothing and looks whether its tests notice.
"""
BEYOND = """Keys that a run has beyond those of the specification. Their meaning is in [config.md](config.md)."""

LEAVES = leaf_fields(PPOConfig)


def newer(key: str) -> str:
    """Today's name of a key as the specification spells it."""
    return KEY_ALIASES.get(key, key)


def pending(key: str) -> list[Pending]:
    return [entry for entry in PENDING if entry.key == key]


def whole(key: str) -> bool:
    """Whether none of its values is there yet: no test could show that it does something."""
    return bool(pending(key)) and not noticed_by(key)


# -- what is wrong --------------------------------------------------------------------------------


def problems() -> Iterator[str]:
    """Everything but the page and what is not there yet."""
    for key in LEAVES:
        if not noticed_by(key) and not whole(key):
            yield f"{key}: no test; give it a line in tests/spec/keys.py, or in told.py if a part is told of it"
    for key in {
        *PROOFS,
        *VALUES,
        *TOLD,
        *DEVIATES,
        *(entry.key for entry in PENDING),
        *map(newer, KEYS),
    } - LEAVES.keys():
        yield f"{key}: there is no such key any more"
    for key in KEYS:
        if key not in LEAVES and not ALIASES.get(key):
            yield f"{key}: an older name without a test; give it a line in ALIASES"
    for title, rows in METHODS.items():
        yield from (f"{title}, {name}: no test" for name, (_, tests) in rows.items() if not tests)
    unknown = {(told.kind, told.field) for told in TOLD.values() if not ACTS[told.kind].get(told.field)}
    yield from (f"{part}:{field}: no test in ACTS" for part, field in sorted(unknown))
    yield from (
        f"{entry.key}={entry.value}: is taken now; out of PENDING with it, and name its tests" for entry in taken()
    )
    there = existing({test.partition("::")[0] for test in named()})
    yield from (f"{test}: there is no such test" for test in sorted(named()) if test not in there)


def taken() -> Iterator[Pending]:
    """What is said to be missing and is not refused."""
    defaults = flatten(resolved_defaults(PPOConfig), LEAVES)
    for entry in PENDING:
        tree = nested(defaults | {entry.key: entry.value}, LEAVES)
        if not any(
            overlap(entry.key, name)
            for problem in check_implemented(tree, PPOConfig)
            for name in (problem.key, *problem.related)
        ):
            yield entry


def named() -> set[str]:
    """Every test that some row names."""
    found = {test for key in LEAVES for test in proofs_of_key(key)} | {t for tests in ALIASES.values() for t in tests}
    found |= {test for fields in ACTS.values() for tests in fields.values() for test in tests}
    return found | {test for rows in METHODS.values() for _, tests in rows.values() for test in tests}


def existing(files: Iterable[str]) -> set[str]:
    """Node ids of these files, as pytest collects them, and of each test without its case."""
    there = [file for file in sorted(files) if (ROOT / file).is_file()]
    if not there:  # without a file pytest would collect them all
        return set()
    words = ["--collect-only", "-q", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider", *there]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    found = {line for line in done.stdout.splitlines() if "::" in line}
    return found | {line.partition("[")[0] for line in found}


# -- the page -------------------------------------------------------------------------------------


def cell(tests: Iterable[str]) -> str:
    return "<br>".join(f"`{test}`" for test in dict.fromkeys(tests)).replace("|", "\\|")


def meaning(key: str) -> str:
    """What the schema says, where we deviate, and what is not there yet."""
    told = (LEAVES[newer(key)].description or "").replace("|", "\\|")
    if key != newer(key):
        told = f"Older name of `{newer(key)}`."
    missing = "; ".join(dict.fromkeys(entry.missing for entry in pending(key)))
    parts = (told, key in DEVIATES and f"Deviates: {DEVIATES[key]}", missing and f"**Not yet**: {missing}.")
    return " ".join(part for part in parts if part)


def page() -> str:
    lines = [HEAD]
    for title, rows in METHODS.items():
        lines += [f"## {title}", "", "| | here | tests |", "|---|---|---|"]
        for name, (means, tests) in rows.items():
            shown = f"`{name}`" if name.endswith(")") else name
            lines.append(f"| {shown} | {means} | {cell(tests)} |")
        lines.append("")
    lines += ["## Keys", "", "| key | here | tests |", "|---|---|---|"]
    lines += [f"| `{key}` | {meaning(key)} | {cell(ALIASES.get(key) or proofs_of_key(key)) or '-'} |" for key in KEYS]
    lines += ["", "## Further keys", "", BEYOND, "", "| key | tests |", "|---|---|"]
    lines += [f"| `{key}` | {cell(proofs_of_key(key)) or '-'} |" for key in LEAVES if key not in map(newer, KEYS)]
    lines += ["", "## Not yet", "", "| key | value | missing |", "|---|---|---|"]
    for entry in PENDING:
        value = ", ".join(entry.value) if isinstance(entry.value, tuple) else entry.value
        lines.append(f"| `{entry.key}` | `{value}` | {entry.missing} |")
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> int:
    if not words:
        PAGE.write_text(page(), encoding="utf-8")
    wrong = list(problems())
    if PAGE.read_text(encoding="utf-8") != page():
        wrong.append("docs/spec.md is not what these rows say; run: python tests/spec/table.py")
    if "--strict" in words:
        wrong += [f"{entry.key}={entry.value}: not yet ({entry.missing})" for entry in PENDING]
    sys.stdout.writelines(f"{problem}\n" for problem in wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
