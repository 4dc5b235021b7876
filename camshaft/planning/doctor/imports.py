"""Checks of Python, of the versions of packages, and of files that shadow installed packages.

Versions are read from the metadata of the packages, and nothing is imported.
"""

import importlib.metadata
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path

from camshaft.planning.doctor.findings import Finding, fail, ok, warn

OPTIONAL = ("vllm", "sglang", "ray", "megatron-core", "torchtitan", "triton", "peft")
"""Optional packages that provide engines, rollouts, the controller, kernels and adapters."""
MODULES = {"hydra-core": "hydra", "pyyaml": "yaml", "omegaconf": "omegaconf", "huggingface-hub": "huggingface_hub"}
"""Modules of packages that are named differently, and of packages that dependencies require."""

_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^\]]*\])?([^;]*)(?:;\s*(.*))?")
_CLAUSE = re.compile(r"(>=|<=|==|!=|~=|<|>)\s*([\d.]+)")


def check_python() -> Iterator[Finding]:
    """Compare the version of Python with the supported range."""
    version, where = platform.python_version(), sys.executable
    required = ",".join(_metadata().get_all("Requires-Python") or ())
    if satisfies(version, required):
        yield ok("python", f"Python {version} ({where})")
    else:
        message = f"Python {version} is outside the supported range {required}"
        yield fail("python", message, "python3.12 -m venv .venv && .venv/bin/pip install .")


def check_packages() -> Iterator[Finding]:
    """Compare the versions of all required packages with the supported ranges."""
    requirements = [requirement for requirement in _requirements() if not requirement.extra]
    if not requirements:
        yield warn("packages", "camshaft is not installed, so the supported versions are unknown", "pip install .")
        return
    problems = [problem for requirement in requirements for problem in requirement.problems("packages", optional=False)]
    yield from problems
    if not problems:
        versions = ", ".join(f"{requirement.name} {package_version(requirement.name)}" for requirement in requirements)
        yield ok("packages", versions)


def check_optional_packages() -> Iterator[Finding]:
    """Report the optional packages that are installed, and those with an unsupported version."""
    extras = {requirement.name: requirement for requirement in _requirements() if requirement.name in OPTIONAL}
    for requirement in extras.values():
        yield from requirement.problems("optional", optional=True)
    installed = [f"{name} {package_version(name)}" for name in OPTIONAL if package_version(name) is not None]
    missing = [name for name in OPTIONAL if package_version(name) is None]
    parts = {"installed": installed, "not installed": missing}
    yield ok("optional", "; ".join(f"{label}: {', '.join(names)}" for label, names in parts.items() if names))


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, of camshaft, and of its required and optional packages that are installed."""
    names = ["camshaft", *(requirement.name for requirement in _requirements() if not requirement.extra), *OPTIONAL]
    versions = {name: package_version(name) for name in names}
    return {"python": platform.python_version(), **{name: text for name, text in versions.items() if text is not None}}


def check_shadowing() -> Sequence[Finding]:
    """Find files on the import path that have the name of an installed package or of the standard library."""
    entries = [Path(entry or os.getcwd()) for entry in sys.path]
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    names = _protected_modules()
    last = max((index for index, entry in enumerate(entries) if entry.resolve() in installed), default=len(entries))
    problems = [
        _shadowing_finding(file, names[file.name.removesuffix(".py")], is_ignored=index > last)
        for index, entry in enumerate(entries)
        if entry.resolve() not in installed and entry.suffix != ".zip" and entry.is_dir()
        for file in _shadowing_files(entry, names)
    ]
    return problems or [ok("imports", "no file on the import path shadows an installed package")]


def _shadowing_finding(file: Path, package: str, is_ignored: bool) -> Finding:
    fix = f"mv {file} {file.with_name('my_' + file.name)}"
    if is_ignored:
        message = (
            f"{file} has the name of a module of {package}: camshaft ignores the file, but other scripts import it"
        )
        return warn("imports", message, fix)
    return fail("imports", f"{file} is imported instead of the module of {package}", fix)


def _protected_modules() -> dict[str, str]:
    """Map names of modules to the package that provides them."""
    packages = [requirement.name for requirement in _requirements() if package_version(requirement.name) is not None]
    modules = {MODULES.get(package, package).replace("-", "_"): package for package in (*packages, *MODULES)}
    return dict.fromkeys(sys.stdlib_module_names, "the standard library") | modules


def _shadowing_files(folder: Path, names: dict[str, str]) -> Iterator[Path]:
    """Yield the modules of a folder with one of the names that no package has installed there."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry.path)
        name = entry.name.removesuffix(".py")
        is_module = path.is_file() if entry.name.endswith(".py") else (path / "__init__.py").is_file()
        # Folders of `pip install --target` also have the metadata of the package.
        if is_module and name in names and not any(distributions(name=names[name], path=[str(folder)])):
            yield path


# -- versions -------------------------------------------------------------------------------------


class Requirement:
    """A requirement of camshaft: the name of a package, its version range, and the extra that requires it."""

    def __init__(self, line: str):
        match = _REQUIREMENT.match(line)
        assert match is not None, line
        self.name, self.range = match[1].lower(), match[2].strip()
        extra = re.search(r"extra\s*==\s*[\"']([\w-]+)", match[3] or "")
        self.extra = extra[1] if extra else ""

    def problems(self, check: str, optional: bool) -> Iterator[Finding]:
        """Yield a finding if the package is missing or has an unsupported version."""
        version = package_version(self.name)
        fix = f"pip install '{self.name}{self.range}'"
        if version is None:
            if not optional:
                yield fail(check, f"{self.name} is not installed", fix)
        elif not satisfies(version, self.range):
            message = f"{self.name} {version} is outside the supported range {self.range}"
            yield warn(check, message, fix) if optional else fail(check, message, fix)


def satisfies(version: str, specifier: str) -> bool:
    """Return True if the version is in the range, such as `>=2.11,<2.14`. Suffixes such as `+cpu` are ignored."""
    number = _numbers(version)
    for operator, text in _CLAUSE.findall(specifier):
        bound = _numbers(text)
        width = max(len(number), len(bound))
        left, right = (values + (0,) * (width - len(values)) for values in (number, bound))
        holds = {
            ">=": left >= right, "<=": left <= right, "==": left == right, "!=": left != right, "<": left < right,
            ">": left > right, "~=": left >= right and left[: len(bound) - 1] == bound[:-1],
        }[operator]  # fmt: skip
        if not holds:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _requirements() -> Sequence[Requirement]:
    return [Requirement(line) for line in _metadata().get_all("Requires-Dist") or ()]


def _metadata() -> importlib.metadata.PackageMetadata:
    """Return the metadata of camshaft, which is empty if it is not installed."""
    import email.message

    try:
        return importlib.metadata.metadata("camshaft")
    except importlib.metadata.PackageNotFoundError:
        return email.message.Message()  # pyright: ignore[reportReturnType]


def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
