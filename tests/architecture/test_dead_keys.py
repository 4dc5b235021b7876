"""Every config key is read by the code. The test follows types through the source to find the reads.

A read is an attribute access on an expression whose type is a section: a parameter with that annotation, a name or
an attribute of `self` that was assigned from one, or a field of another section. A type variable stands for its bound.
A key counts as read if its last name is read from its section and each section above it is read from its parent. A read
of the actor's `optim.lr` therefore does not count for `critic.optim.lr`. If the type of an expression is unknown (an
item of a list, say), a read counts for a key whose name is unique among all sections.

Config checks, including the method `problems` of a section, do not act on a key, so their reads count only for the keys
of `ONLY_CHECKED`.
"""

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pydantic import BaseModel, Field

import camshaft.config
from camshaft.config import EvalConfig, GenerateConfig, PPOConfig, RMConfig, SFTConfig
from camshaft.config.engine import EngineConfig, EngineModel, OptimConfig
from camshaft.config.load import NOT_IMPLEMENTED
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.config.schema.fields import Section
from camshaft.config.schema.roles import CriticModelConfig
from camshaft.config.schema.trainer import TrainerConfig
from camshaft.config.tree import fields, leaf_fields, section_class

ROOT = Path(camshaft.config.__file__).parents[1]
TOPICS = ("__init__", "algorithm", "backends", "batches", "ineffective", "placement", "rewards", "run")
CHECKS = {ROOT / "config" / name for name in ("files.py", *(f"checks/{topic}.py" for topic in TOPICS))}
SCHEMA = (ROOT / "config" / "layout.py", *(ROOT / "config" / "schema").glob("*.py"))
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py")) if path not in CHECKS}


def methods(source: str, of_checks: bool) -> str:
    """Return a file of the schema with or without the methods that yield problems, which are checks."""
    tree = ast.parse(source)
    for section in ast.walk(tree):
        if isinstance(section, ast.ClassDef):
            kept = [item for item in section.body if of_checks == getattr(item, "name", "").endswith("problems")]
            section.body = kept or [ast.Pass()]
    return ast.unparse(tree)


ONLY_CHECKED = {
    "trainer.use_legacy_worker_impl": "there is one implementation; what asks for another is refused",
    "critic.model.tokenizer_path": "a statement, which is held against the actor's tokenizer",
}
"""Keys that do not change a run, with the reason why they exist."""
NOTICED = frozenset(f"{prefix}model.use_remove_padding" for prefix in ("", "actor_rollout_ref.", "critic."))
"""Keys that no run reads. Setting them to a value that asks for another behavior is a notice."""

Kinds = frozenset[type[BaseModel]]
NOTHING: Kinds = frozenset()


def classes() -> dict[str, type[BaseModel]]:
    """Map the name of every section and engine config to its class."""
    by_name: dict[str, type[BaseModel]] = {}
    for module in pkgutil.walk_packages(camshaft.config.__path__, "camshaft.config."):
        for name, member in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(member, BaseModel) and member.__module__.startswith("camshaft.config"):
                by_name[name] = member
    return by_name


def owner(kind: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Return the class that declares the field first; subclasses inherit the field or narrow its type."""
    declaring = [base for base in kind.__mro__ if name in vars(base).get("__annotations__", {})]
    return declaring[-1] if declaring else None


@dataclass
class Reader:
    """Walk source files and record which fields of which classes are read."""

    classes: dict[str, type[BaseModel]]
    reads: set[tuple[type[BaseModel], str]] = field(default_factory=set)
    loose: set[str] = field(default_factory=set)
    """Names read from expressions of unknown type."""
    attributes: dict[str, dict[str, Kinds]] = field(default_factory=dict)
    """Class -> attribute of self -> its types."""
    bases: dict[str, list[str]] = field(default_factory=dict)
    bounds: dict[str, Kinds] = field(default_factory=dict)
    """Type variable of the current file -> the types of its bound."""

    def read(self, sources: Iterable[str]) -> None:
        trees = [ast.parse(source) for source in sources]
        for _ in range(3):  # a class may store a value that a later class or file passes on
            self.reads.clear()
            self.loose.clear()
            for tree in trees:
                self.bounds = {}
                self._body(tree, {}, None)

    # -- statements -------------------------------------------------------------------------------

    def _body(self, node: ast.AST, names: dict[str, Kinds], inside: str | None) -> None:
        if isinstance(node, ast.ClassDef):
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            self.bases[node.name] = [base.id for base in bases if isinstance(base, ast.Name)]
            for child in node.body:
                self._body(child, {}, node.name)
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            names = names | self._parameters(node.args, inside)
        for child in ast.iter_child_nodes(node):
            narrowed = self._narrowed(node, child)  # a copy would lose the names that the child assigns
            self._body(child, names | narrowed if narrowed else names, inside)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value, names, inside)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            self._note(node, names, inside)

    def _parameters(self, arguments: ast.arguments, inside: str | None) -> dict[str, Kinds]:
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        kinds = {argument.arg: self._annotated(argument.annotation) for argument in every}
        if inside in self.classes and "self" in kinds:
            kinds["self"] = frozenset({self.classes[inside]})
        return kinds

    def _narrowed(self, node: ast.AST, child: ast.AST) -> dict[str, Kinds]:
        """Return the type of a name in the first branch of `... if isinstance(name, Section) else ...`."""
        match node:
            case ast.IfExp(ast.Call(ast.Name("isinstance"), [ast.Name(name), kind]), body) if child is body:
                return {name: self._annotated(kind)}
        return {}

    def _annotated(self, annotation: ast.expr | None) -> Kinds:
        if annotation is None:
            return NOTHING
        parts = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)]
        named = frozenset(self.classes[part] for part in parts if part in self.classes)
        return named.union(*(self.bounds.get(part, NOTHING) for part in parts))

    def _assign(self, target: ast.expr, value: ast.expr, names: dict[str, Kinds], inside: str | None) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for left, right in zip(target.elts, value.elts, strict=True):
                self._assign(left, right, names, inside)
        elif isinstance(target, ast.Name):
            names[target.id] = self._kinds(value, names, inside)
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "TypeVar":
                bound = next((keyword.value for keyword in value.keywords if keyword.arg == "bound"), None)
                self.bounds[target.id] = self._annotated(bound)
        elif _of_self(target) and inside is not None:
            assert isinstance(target, ast.Attribute)
            attributes = self.attributes.setdefault(inside, {})
            attributes[target.attr] = attributes.get(target.attr, NOTHING) | self._kinds(value, names, inside)

    # -- expressions ------------------------------------------------------------------------------

    def _kinds(self, node: ast.expr, names: dict[str, Kinds], inside: str | None) -> Kinds:
        """Return the sections that an expression can be."""
        if isinstance(node, ast.Name):
            return names.get(node.id, NOTHING)
        if isinstance(node, ast.IfExp):
            return self._kinds(node.body, names, inside) | self._kinds(node.orelse, names, inside)
        if not isinstance(node, ast.Attribute):
            return NOTHING
        kinds = set(self._held(inside, node.attr)) if _of_self(node) else set()
        for kind in self._kinds(node.value, names, inside):
            model_field = kind.model_fields.get(node.attr)
            inner = None if model_field is None else model_field.annotation
            options = {inner, *getattr(inner, "__args__", ())}
            kinds |= {option for option in options if isinstance(option, type) and issubclass(option, BaseModel)}
        return frozenset(kinds)

    def _held(self, inside: str | None, name: str) -> Kinds:
        if inside is None:
            return NOTHING
        return (
            self.attributes.get(inside, {})
            .get(name, NOTHING)
            .union(*(self._held(base, name) for base in self.bases.get(inside, [])))
        )

    def _note(self, node: ast.Attribute, names: dict[str, Kinds], inside: str | None) -> None:
        kinds = self._kinds(node.value, names, inside)
        for kind in kinds:
            owner_class = owner(kind, node.attr)
            if owner_class is not None:
                self.reads.add((owner_class, node.attr))
        if not kinds and not _of_self(node):
            self.loose.add(node.attr)


def _of_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def is_read(reader: Reader, kind: type[BaseModel], name: str) -> bool:
    declared = owner(kind, name)
    assert declared is not None
    alone = sum(name in vars(other).get("__annotations__", {}) for other in set(reader.classes.values())) == 1
    return (declared, name) in reader.reads or (alone and name in reader.loose)


def dead_keys(reader: Reader, schema: type[Section]) -> list[str]:
    """Return the config keys that no code reads."""
    excused = {*ONLY_CHECKED, *NOTICED, *(key for entry in NOT_IMPLEMENTED for key in entry.keys)}
    dead = []
    for key in leaf_fields(schema):
        kind: type[Section] = schema
        for name in key.split("."):
            if not is_read(reader, kind, name) and key not in excused and key not in dead:
                dead.append(key)
            kind = section_class(kind.model_fields[name]) or kind
    return dead


@pytest.fixture(scope="module")
def reader() -> Reader:
    reader = Reader(classes())
    reader.read(methods(text, of_checks=False) if path in SCHEMA else text for path, text in SOURCES.items())
    return reader


@pytest.mark.parametrize("schema", [PPOConfig, SFTConfig, RMConfig, GenerateConfig, EvalConfig])
def test_every_key_is_read_by_something(schema: type[Section], reader: Reader) -> None:
    assert dead_keys(reader, schema) == []


@pytest.mark.parametrize("kind", [EngineConfig, EngineModel, OptimConfig, RolloutEngineConfig])
def test_every_engine_field_is_read_by_an_engine(kind: type[BaseModel], reader: Reader) -> None:
    unread = [name for name in kind.model_fields if not is_read(reader, kind, name)]
    assert unread == []


def test_exempted_keys_are_read_by_checks() -> None:
    checks = Reader(classes())
    sources = [path.read_text(encoding="utf-8") for path in CHECKS]
    checks.read([*sources, *(methods(SOURCES[path], of_checks=True) for path in SCHEMA)])
    kinds = {"trainer": TrainerConfig, "critic.model": CriticModelConfig}
    for key in ONLY_CHECKED:
        section, _, name = key.rpartition(".")
        assert is_read(checks, kinds[section], name), key


def test_exemptions_exist() -> None:
    assert [key for key in ONLY_CHECKED if key not in leaf_fields(PPOConfig)] == []


# -- tests of this test ---------------------------------------------------------------------------


class Optim(Section):
    lr: float = Field(description="")
    forgotten: float = Field(description="")


class Actor(Section):
    optim: Optim = Field(description="")
    epochs: int = Field(description="")
    clip: float = Field(description="")

    def doubled(self) -> float:
        return 2 * self.clip


class Critic(Section):
    optim: Optim = Field(description="")
    epochs: int = Field(description="")
    alone: int = Field(description="")


class Root(Section):
    actor: Actor = Field(description="")
    critic: Critic = Field(description="")


MADE_UP = {"Optim": Optim, "Actor": Actor, "Critic": Critic, "Root": Root}

CODE = """
class Holder:
    def __init__(self, config: Root):
        self.config, self.count = config, 0

class Role(Holder):
    def use(self, flag):
        part = self.config.actor if flag else None
        rate = rate_of(part.optim)
        self.forgotten = part.epochs
        return [item.alone for item in self.items]

def rate_of(optim: Optim) -> float:
    optim.forgotten = 3
    return optim.lr
"""


def made_up(code: str) -> list[str]:
    reader = Reader(dict(MADE_UP))
    reader.read([code, textwrap.dedent(inspect.getsource(Actor))])
    return dead_keys(reader, Root)


def test_unread_keys_are_detected() -> None:
    # The source reads actor.optim.lr, actor.epochs, actor.clip (in a method), and critic.alone by its unique name. It
    # never reads `critic`, and it only writes `forgotten`.
    dead = made_up(CODE)
    assert set(dead) == {
        "actor.optim.forgotten",
        "critic.optim.lr",
        "critic.optim.forgotten",
        "critic.epochs",
        "critic.alone",
    }


def test_a_key_is_dead_if_only_its_namesake_is_read() -> None:
    more = CODE + "\ndef also(config: Root):\n    critic = config.critic\n    return rate_of(critic.optim)\n"
    assert set(made_up(more)) == {"actor.optim.forgotten", "critic.optim.forgotten", "critic.epochs"}
    more += "\ndef last(critic: Critic, optim: Optim):\n    return critic.epochs, optim.forgotten\n"
    assert made_up(more) == []


def test_every_key_of_the_schema_would_be_found() -> None:
    nothing = Reader(classes())
    nothing.read(["x = 1"])
    excused = {*ONLY_CHECKED, *NOTICED, *(key for entry in NOT_IMPLEMENTED for key in entry.keys)}
    assert set(dead_keys(nothing, PPOConfig)) == set(leaf_fields(PPOConfig)) - excused
    assert fields(PPOConfig).keys() > leaf_fields(PPOConfig).keys()
