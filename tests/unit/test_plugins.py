"""Loading classes by name, with real modules and a real installed distribution."""

import decimal
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from camshaft import plugins
from camshaft.config.backends import ENGINES, Backend, list_backends
from camshaft.config.engine import EngineCapabilities
from camshaft.errors import ConfigError

GROUP = "camshaft.test_things"
CHECKOUT = plugins.checkout
KNOWN = {"decoder": "json:JSONDecoder", "encoder": "json:JSONEncoder"}


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Import camshaft as if it were installed."""
    monkeypatch.setattr(plugins, "checkout", lambda: None)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write modules into a folder on sys.path, and return that folder."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_built_in_names_load():
    assert plugins.load("decoder", KNOWN, GROUP, json.JSONDecoder) is json.JSONDecoder


def test_module_and_class_of_anybody():
    assert plugins.load("json.decoder:JSONDecoder", KNOWN, GROUP, json.JSONDecoder) is json.JSONDecoder


def test_an_entry_point_of_an_installed_package(package):
    (package / "their_things.py").write_text("import json\nclass Theirs(json.JSONDecoder): pass\n")
    info = package / "their_things-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-things\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\ntheirs = their_things:Theirs\n")
    assert plugins.list_names(KNOWN, GROUP) == ["decoder", "encoder", "theirs"]
    assert plugins.load("theirs", KNOWN, GROUP, json.JSONDecoder).__name__ == "Theirs"


def test_list_contains_built_in_backends_and_installed_packages(package):
    info = package / "their_things-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\nSummary: An engine of theirs\n")
    points = "[camshaft.engines]\nmine = nowhere:Mine\nfsdp = nowhere:Nothing\n"
    (info / "entry_points.txt").write_text(points)
    absent = Backend("nowhere:Absent", EngineCapabilities(library="torchtitan_absent"), "absent")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(plugins.PROVIDED_BY, "torchtitan_absent", "absent")
        lines = list_backends({**ENGINES, "absent": absent}, "camshaft.engines").splitlines()
    rows = {line.split()[0]: line for line in lines}
    assert len(rows) == len(lines)
    assert re.fullmatch(r"mine +yes +nowhere:Mine +An engine of theirs \(theirs\)", rows["mine"])
    assert re.fullmatch(r"absent +no +nowhere:Absent +absent \(pip install absent\)", rows["absent"])
    assert "camshaft.engine.fsdp:FSDPEngine" in rows["fsdp"]


def test_built_in_names_precede_entry_points(package):
    info = package / "their_things-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-things\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\ndecoder = nowhere:Nothing\n")
    assert plugins.find_target("decoder", KNOWN, GROUP) == "json:JSONDecoder"


def test_an_unknown_name_gives_the_nearest_and_all():
    message = r"unknown name 'decodr' in camshaft.test_things\. Did you mean 'decoder'\?"
    with pytest.raises(ConfigError, match=message) as error:
        plugins.load("decodr", KNOWN, GROUP, json.JSONDecoder)
    assert "Use decoder, encoder, or package.module:Class" in str(error.value)


def test_load_function_takes_built_in_and_external_functions(package):
    (package / "their_functions.py").write_text("def add(a, b): return a + b\nNAME = 'no function'\n")
    assert plugins.load_function("length", {"length": len}, GROUP) is len
    add: Any = plugins.load_function("their_functions:add", {"length": len}, GROUP)
    assert add(1, 2) == 3
    message = r"unknown name 'lenght' in .* Did you mean 'length'\? .* or package.module:function"
    with pytest.raises(ConfigError, match=message):
        plugins.load_function("lenght", {"length": len}, GROUP)
    with pytest.raises(ConfigError, match="their_functions:NAME must be callable, got str"):
        plugins.load_function("their_functions:NAME", {}, GROUP)


def test_no_suggestion_without_a_near_match():
    with pytest.raises(ConfigError) as error:
        plugins.load("xyz", KNOWN, GROUP, json.JSONDecoder)
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize("target", ["json:JSONEncoder", "json:loads"])
def test_other_types_are_rejected(target):
    with pytest.raises(ConfigError, match="is not a subclass of JSONDecoder"):
        plugins.load(target, KNOWN, GROUP, json.JSONDecoder)


@pytest.mark.parametrize("target", [":Class", "json:", "json"])
def test_a_target_has_two_parts(target):
    with pytest.raises(ConfigError, match=r"package\.module:Class"):
        plugins.import_attribute(target)


def test_a_missing_module_is_named():
    with pytest.raises(ConfigError, match="the module 'no_such_thing' does not exist"):
        plugins.import_attribute("no_such_thing.engine:Engine")


def test_a_missing_class_is_named():
    with pytest.raises(ConfigError, match="module json has no attribute 'Nothing'"):
        plugins.import_attribute("json:Nothing")


def test_a_missing_library_error_has_the_install_command(package, monkeypatch):
    (package / "needs_it.py").write_text("import wandb\n")
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    message = "requires 'wandb', which is not installed: pip install 'camshaft[wandb]'"
    with pytest.raises(ConfigError, match=re.escape(message)):
        plugins.import_attribute("needs_it:Tracker")


def test_an_outdated_library_error_has_the_upgrade_command(package):
    (package / "needs_new.py").write_text("import transformers.no_such_module, peft.no_such_module\n")
    with pytest.raises(ConfigError, match=r"the module 'transformers\.no_such_module' does not exist"):
        plugins.import_attribute("needs_new:Engine")
    (package / "needs_newer.py").write_text("import peft.no_such_module\n")
    message = (
        "requires the module 'peft.no_such_module', which the installed version of 'peft' lacks: "
        "pip install --upgrade 'camshaft[lora]'"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        plugins.import_attribute("needs_newer:Engine")


def test_a_checkout_is_named_in_the_install_command(monkeypatch):
    monkeypatch.setattr(plugins, "checkout", lambda: Path("/home/me/camshaft"))
    assert plugins.install_command("vllm") == "pip install -e '/home/me/camshaft[vllm]'"
    assert plugins.install_command("torchtitan") == "pip install --no-deps torchtitan==0.3.0"


def test_the_checkout_is_found_from_its_project_file():
    assert CHECKOUT() == Path(__file__).parents[2]


def test_a_wrong_class_gives_the_nearest_or_all_that_the_module_defines(package):
    (package / "their_engines.py").write_text("import json\nclass Mine: pass\ndef helper(): pass\n")
    with pytest.raises(ConfigError, match=r"no attribute 'Min'; did you mean 'Mine'\?"):
        plugins.import_attribute("their_engines:Min")
    with pytest.raises(ConfigError, match=r"no attribute 'Wrong'; it defines Mine, helper"):
        plugins.import_attribute("their_engines:Wrong")


def test_an_attribute_of_a_class_can_be_imported():
    assert plugins.import_attribute("decimal:Decimal.from_float") == decimal.Decimal.from_float
    with pytest.raises(ConfigError, match=r"module decimal has no attribute 'Decimal\.nothing'"):
        plugins.import_attribute("decimal:Decimal.nothing")


def test_an_error_inside_the_module_travels_unchanged(package):
    (package / "broken_thing.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        plugins.import_attribute("broken_thing:Engine")


def test_every_extra_that_is_named_exists():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    named = {match[1] for what in plugins.PROVIDED_BY.values() if (match := re.fullmatch(r"camshaft\[(\w+)\]", what))}
    assert named <= set(project["optional-dependencies"])
