"""Limits on the sizes of files and functions. An exception is listed with its reason."""

import ast
import functools
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2] / "camshaft"
FILES = sorted(ROOT.rglob("*.py"))

LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
MANY_MODULES = {
    "cli": "one file per command",
    "trainer": "the loop and its trainers, of which the asynchronous one adds its step and its ledger",
}
MANY_PARAMETERS = {
    "__init__.py:train": "the arguments of a run, all named at the call",
    "models/tiny.py:make_tiny_model": "one per size of the model, all named at the call",
    "models/linear_logprob.py:linear_logprob": "an output layer and its options, all named at the call",
    "models/linear_logprob.py:linear_full_kl": "an output layer and its options, all named at the call",
    "rewards/manager.py:__init__": "the settings of a scoring, all named at the call",
    "models/triton/linear_logprob.py:_reduce_kernel": "a kernel takes addresses and sizes one by one",
    "rollout/builtin/cuda/kernels.py:_store": "a kernel takes addresses and sizes one by one",
    "rollout/builtin/cuda/kernels.py:_attend": "a kernel takes addresses and sizes one by one",
    "rollout/builtin/cuda/fused_kernels.py:_norm_kernel": "a kernel takes addresses and sizes one by one",
    "rollout/builtin/cuda/sampling.py:_select": "a kernel takes addresses and sizes one by one",
}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    definitions = []
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                definitions.append((f"{path.relative_to(ROOT)}:{node.name}", node))
    return definitions


def test_files_hold_one_idea() -> None:
    sizes = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in FILES}
    long = {name: size for name, size in sizes.items() if size > 600 and name not in LONG_FILES}
    assert not long, f"over 600 lines: {long}"


def test_functions_fit_on_a_screen() -> None:
    sizes = [(name, (node.end_lineno or 0) - node.lineno + 1) for name, node in functions()]
    long = [(name, size) for name, size in sizes if size > 60 and name not in LONG_FUNCTIONS]
    assert not long, long


def test_functions_take_few_parameters() -> None:
    counts = [(name, len(node.args.args) + len(node.args.kwonlyargs)) for name, node in functions()]
    wide = [(name, count) for name, count in counts if count > 8 and name not in MANY_PARAMETERS]
    assert not wide, wide


def test_modules_have_docstrings() -> None:
    missing = [str(path.relative_to(ROOT)) for path in FILES if not ast.get_docstring(tree(path))]
    assert not missing, missing


def test_no_module_is_called_utils() -> None:
    assert not [path for path in FILES if path.stem in ("utils", "util", "helpers", "misc", "common")]


def test_the_source_is_plain_ascii() -> None:
    odd = [str(p.relative_to(ROOT)) for p in FILES if not p.read_text(encoding="utf-8").isascii()]
    assert not odd, odd


def test_torch_load_never_runs_code_from_a_file() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert "weights_only=False" not in text.replace("torch.load with weights_only=False", ""), path


def test_folders_hold_at_most_twenty_modules() -> None:
    folders = Counter(path.parent for path in FILES if path.name != "__init__.py")
    crowded = {str(folder.relative_to(ROOT)): count for folder, count in folders.items() if count > 20}
    assert crowded.keys() <= MANY_MODULES.keys(), crowded
