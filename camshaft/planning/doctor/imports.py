"""Checks of Python, of the versions of packages, and of files that shadow installed packages.

Versions are read from the metadata of the packages, and nothing is imported.
"""

import importlib.metadata
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from camshaft.planning.doctor.findings import Finding, fail, ok, warn
from camshaft.plugins import TESTED_SDK

OPTIONAL = ("vllm", "sglang", "ray", "megatron-core", "torchtitan", "triton", "peft")
"""Optional packages that provide engines, rollouts, the controller, kernels and adapters."""
MODULES = {"hydra-core": "hydra", "pyyaml": "yaml", "omegaconf": "omegaconf", "huggingface-hub": "huggingface_hub"}
"""Modules of packages that are named differently, and of packages that dependencies require."""


def check_python() -> Iterator[Finding]:
    """Compare the version of Python with the supported range."""
    version, where = platform.python_version(), sys.executable
    required = ",".join(_metadata().get_all("Requires-Python") or ())
    if SpecifierSet(required).contains(".".join(map(str, sys.version_info[:3]))):
        yield ok("python", f"Python {version} ({where})")
    else:
        message = f"Python {version} is outside the supported range {required}"
        yield fail("python", message, "python3.12 -m venv .venv && .venv/bin/pip install .")


def check_packages() -> Iterator[Finding]:
    """Compare the versions of all required packages with the supported ranges."""
    requirements = _required()
    if not requirements:
        yield warn("packages", "camshaft is not installed, so the supported versions are unknown", "pip install .")
        return
    problems = [
        problem for requirement in requirements for problem in _problems(requirement, "packages", optional=False)
    ]
    yield from problems
    if not problems:
        versions = ", ".join(f"{requirement.name} {package_version(requirement.name)}" for requirement in requirements)
        yield ok("packages", versions)


def check_optional_packages() -> Iterator[Finding]:
    """Report the optional packages that are installed, and those with an unsupported version."""
    extras = {requirement.name: requirement for requirement in _requirements() if requirement.name in OPTIONAL}
    for requirement in extras.values():
        yield from _problems(requirement, "optional", optional=True)
    installed = [f"{name} {package_version(name)}" for name in OPTIONAL if package_version(name) is not None]
    missing = [name for name in OPTIONAL if package_version(name) is None]
    parts = {"installed": installed, "not installed": missing}
    yield ok("optional", "; ".join(f"{label}: {', '.join(names)}" for label, names in parts.items() if names))


def check_tinker_sdk() -> Iterator[Finding]:
    """Report the versions of the Tinker SDK with which `camshaft serve` is tested. Its clients have the SDK."""
    version = package_version("tinker")
    tested = f"camshaft serve is tested with tinker{TESTED_SDK}"
    if version is not None and not SpecifierSet(TESTED_SDK).contains(version):
        yield warn("tinker sdk", f"{tested}, and tinker {version} is installed", f"pip install 'tinker{TESTED_SDK}'")
    else:
        yield ok("tinker sdk", f"{tested}; {'not installed here' if version is None else f'installed: {version}'}")


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, of camshaft, and of its required and optional packages that are installed."""
    names = ["camshaft", *(requirement.name for requirement in _required()), *OPTIONAL]
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


def _problems(requirement: Requirement, check: str, optional: bool) -> Iterator[Finding]:
    """Yield a finding if a package is missing or has an unsupported version."""
    name, supported = requirement.name, requirement.specifier
    version, fix = package_version(name), f"pip install '{name}{supported}'"
    if version is None:
        if not optional:
            yield fail(check, f"{name} is not installed", fix)
    elif not supported.contains(version, prereleases=True):
        message = f"{name} {version} is outside the supported range {supported}"
        yield warn(check, message, fix) if optional else fail(check, message, fix)


def _required() -> Sequence[Requirement]:
    """Return the requirements of camshaft without its extras."""
    return [each for each in _requirements() if each.marker is None or each.marker.evaluate({"extra": ""})]


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
