"""Rules for imports between packages, checked on the source."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "camshaft"

LEVELS = [
    {
        "errors",
        "config",
        "seat",
        "progress",
        "stop",
        "storage",
        "hub",
        "fetch",
        "plugins",
        "subprocesses",
        "http",
        "garbage",
        "stacks",
        "machine",
        "masking",
        "temporary",
        "version",
        "wire",
    },
    {"ragged", "columns", "dataproto", "algorithms", "device", "digest"},
    {"models", "workers"},
    {"controller", "engine", "rollout", "data", "rewards", "checkpoint", "tracking"},
    {"reshard", "contracts", "agents"},
    {"roles"},
    {"trainer", "parity", "planning", "view", "service"},
    {"runs"},
    {"cli", "__main__"},
]
"""From low to high. A lower level never imports a higher one; packages of one level do not import each other."""

ALLOWED_ON_ONE_LEVEL = {
    ("dataproto", "ragged"), ("dataproto", "columns"), ("plugins", "errors"), ("storage", "errors"),
    ("config", "errors"), ("config", "plugins"), ("config", "stop"), ("config", "storage"), ("config", "hub"),
    ("config", "machine"), ("config", "masking"), ("temporary", "errors"), ("stop", "subprocesses"),
    ("progress", "subprocesses"), ("errors", "masking"), ("http", "errors"), ("wire", "errors"), ("wire", "plugins"),
    ("fetch", "storage"), ("fetch", "errors"), ("fetch", "hub"), ("hub", "errors"), ("__main__", "cli"),
    ("ragged", "columns"), ("ragged", "device"), ("dataproto", "device"), ("digest", "device"),
    ("config", "fetch"), ("config", "subprocesses"), ("storage", "subprocesses"), ("storage", "temporary"),
    ("hub", "storage"), ("hub", "subprocesses"), ("storage", "plugins"),
    ("planning", "trainer"),  # checks and plans what a trainer would start
}  # fmt: skip
"""Allowed imports within a level; `python -m camshaft` is the command line."""

ENTRY_POINTS = {"trainer/main_ppo.py", "trainer/main_sft.py"}
"""Modules of the specification for `python -m`, which call the command line."""

HOMES = {
    "ray": ["controller/ray.py"],
    "vllm": ["rollout/vllm"],
    "sglang": ["rollout/sglang"],
    "torchtitan": ["engine/torchtitan"],
    "megatron": ["engine/megatron"],
    "wandb": ["tracking/wandb.py"],
    "tensorboard": ["tracking/tensorboard.py"],
    "mlflow": ["tracking/mlflow.py"],
    "trackio": ["tracking/trackio.py"],
    "peft": ["models/lora.py"],
    "triton": ["digest/kernel.py", "models/triton/linear_logprob.py", "rollout/builtin/cuda"],
    "math_verify": ["rewards/math_answer.py"],
    "reasoning_gym": ["rewards/reasoning_gym.py", "data/reasoning_gym.py"],
    "fsspec": ["storage/urls.py"],
    "datasets": ["data/hub_datasets.py"],
    "hydra": ["config"],
    "omegaconf": ["config"],
    "pydantic": ["config"],
    "pyarrow": ["data", "tracking/run_folder.py", "tracking/samples.py", "cli/prerequisites.py"],
    "cloudpickle": ["rewards/callables.py"],
    "matplotlib": ["view/plot.py"],
    "google": ["wire/messages.py"],
}
"""Third-party libraries that only one package may import."""


def level_of(part: str) -> int:
    return next(i for i, parts in enumerate(LEVELS) if part in parts)


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


@functools.cache
def imports(path: Path) -> list[tuple[str, int]]:
    """Return (dotted name, line) of every import in a file, including imports in functions."""
    names: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; write the whole name"
            module = node.module or ""
            names += [
                (f"{module}.{alias.name}" if module == "camshaft" else module, node.lineno) for alias in node.names
            ]
    return names


def test_every_part_of_the_package_has_its_level() -> None:
    all_parts = set().union(*LEVELS)
    assert {part_of(path) for path in modules()} - {"__init__"} <= all_parts


def test_packages_import_lower_layers_only() -> None:
    wrong = []
    for path in modules():
        part = part_of(path)
        if part == "__init__" or str(path.relative_to(ROOT)) in ENTRY_POINTS:
            continue
        for name, line in imports(path):
            if not name.startswith("camshaft."):
                continue
            imported = name.split(".")[1]
            if imported == part or (part, imported) in ALLOWED_ON_ONE_LEVEL:
                continue
            if level_of(imported) >= level_of(part):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_in_its_home_only(library: str) -> None:
    strangers = []
    for path in modules():
        relative = str(path.relative_to(ROOT))
        at_home = any(relative == home or relative.startswith(home + "/") for home in HOMES[library])
        if not at_home:
            strangers += [f"{relative}:{line}" for name, line in imports(path) if name.split(".")[0] == library]
    assert not strangers, f"{library} is imported outside {HOMES[library]}: {strangers}"


def test_roles_and_reshard_import_only_engine_and_rollout_interfaces() -> None:
    facades = {"camshaft.engine", "camshaft.engine.base", "camshaft.rollout", "camshaft.rollout.base"}
    wrong = []
    for path in modules():
        if part_of(path) in ("roles", "reshard", "trainer"):
            wrong += [
                f"{path.relative_to(ROOT)}:{line} imports {name}"
                for name, line in imports(path)
                if name.startswith(("camshaft.engine.", "camshaft.rollout.")) and name not in facades
            ]
    assert not wrong, "\n".join(wrong)


def test_no_backend_name_is_compared_outside_the_registry() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules()
        for line in backend_comparisons(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not wrong, wrong


def backend_comparisons(tree: ast.AST) -> Iterator[int]:
    """Return the lines that compare a strategy or a rollout name with a literal or a constant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            parts = list(ast.walk(node))
            backend = any(
                (isinstance(part, ast.Name) and part.id == "strategy")
                or (
                    isinstance(part, ast.Attribute) and (part.attr == "strategy" or ast.unparse(part) == "rollout.name")
                )
                for part in parts
            )
            literal = any(
                (isinstance(part, ast.Constant) and isinstance(part.value, str))
                or (isinstance(part, ast.Name) and part.id.isupper())
                for part in parts
            )
            if backend and literal:
                yield node.lineno


@pytest.mark.parametrize(
    "source",
    ["actor.strategy == 'fsdp'", "strategy in ('fsdp', 'fsdp2')", "rollout.name == 'vllm'", "part.strategy == PLAIN"],
)
def test_comparison_with_a_backend_name_is_found(source: str) -> None:
    assert list(backend_comparisons(ast.parse(source)))


def test_algorithms_import_nothing_of_the_package() -> None:
    for path in (ROOT / "algorithms").glob("*.py"):
        names = [name for name, _ in imports(path) if name.startswith("camshaft") and "camshaft.algorithms" not in name]
        assert not names, f"{path.name}: {names}"


@pytest.mark.parametrize(
    "module",
    [
        "camshaft",
        "camshaft.config",
        "camshaft.cli",
        "camshaft.columns",
        "camshaft.rewards.worker",
        "camshaft.runs.run",
        "camshaft.subprocesses",
    ],
)
def test_light_modules_leave_torch_out(module: str) -> None:
    run(f"import sys, {module}; heavy = {{'torch', 'transformers', 'pyarrow'}} & set(sys.modules); assert not heavy")


def test_the_command_line_answers_without_torch() -> None:
    code = """
import sys
from camshaft.cli import main
try:
    main(["--help"])
except SystemExit:
    assert "torch" not in sys.modules
"""
    assert "check-engine" in run(code)


def run(code: str) -> str:
    """Run `code` in a new Python process that must succeed, and return its output."""
    process = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    return process.stdout


def test_no_device_type_is_hard_coded() -> None:
    """The code gets a device module by its configured name, `torch.get_device_module(device)`, not by `torch.cuda`."""
    named = re.compile(r"\btorch\.(cuda|xpu|mps|npu)\b")
    files = [str(path.relative_to(ROOT)) for path in modules() if named.search(path.read_text(encoding="utf-8"))]
    assert not files, files
