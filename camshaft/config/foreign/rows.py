"""Kinds of rows in the tables of keys of other libraries.

    Renamed("critic.fsdp", "critic.model.fsdp_config")
    Expanded("model_engine", {"dp": {"actor_rollout_ref.actor.strategy": "fsdp"}})
    NotNeeded("trainer.balance_batch", "the ranks are balanced by tokens")
    PassedOn("actor_rollout_ref.rollout.engine_kwargs.vllm", "actor_rollout_ref.rollout.engine_kwargs", ...)
    Missing("data.image_key", IMAGES)

The name of a row is that of a key, or of a section with all its keys. A row reads the value: a value that asks for
another computation than that of camshaft is never "not needed". Null always leaves a setting to its default.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from camshaft.config.foreign.topics import Topic
from camshaft.config.guards import is_mapping
from camshaft.config.tree import flatten, format_value, get, has_key

Tree = Mapping[str, Any]
Accepts = Callable[[Any, Tree], bool]
"""Predicate on a value and the config that contains it."""


class Accepted(NamedTuple):
    """Settings that replace a key, and a notice about it. An empty notice is not printed."""

    settings: Mapping[str, Any]
    notice: str = ""


class Refused(NamedTuple):
    """Keys whose values are not accepted, and the reason."""

    values: Mapping[str, Any]
    reason: str


@dataclass(frozen=True)
class Row(ABC):
    """A key or a section of another library."""

    name: str

    @abstractmethod
    def apply(self, value: Any, tree: Tree) -> Accepted | Refused | None:
        """Return what replaces the key with this value in a config; None leaves the key as it is."""

    def leaves(self, value: Any) -> dict[str, Any]:
        """Map the keys of the section, or the key, to their values."""
        return flatten({self.name: value}, ())

    def refuse(self, value: Any, reason: Topic | str | None) -> Refused | None:
        """Return the refusal of all keys; None without a reason."""
        text = reason.message() if isinstance(reason, Topic) else reason
        return None if text is None else Refused(self.leaves(value), text)


@dataclass(frozen=True)
class Renamed(Row):
    """A key or a section with another name here."""

    key: str
    note: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    """Values with another name here. Other values are the same."""

    def apply(self, value: Any, tree: Tree) -> Accepted | Refused | None:
        settings = {
            f"{self.key}{leaf.removeprefix(self.name)}": self.values.get(part, part) if isinstance(part, str) else part
            for leaf, part in self.leaves(value).items()
        }
        if self.key != self.name:
            return Accepted(settings, f"here {self.key}")
        if settings == {self.key: value}:
            return None
        return Accepted(settings, f"{format_value(value)} is {format_value(settings[self.key])} here")


@dataclass(frozen=True)
class Expanded(Row):
    """A key whose values stand for other keys."""

    values: Mapping[Any, Mapping[str, Any]]
    note: str = ""
    otherwise: Topic | str | None = None
    """Reason why no other value is accepted. None leaves other values as they are."""
    when: Callable[[Tree], bool] | None = None
    """Condition under which the row applies."""

    def apply(self, value: Any, tree: Tree) -> Accepted | Refused | None:
        if self.when is not None and not self.when(tree):
            return None
        if value is None:
            return Accepted({})
        if not isinstance(value, str | int) or value not in self.values:
            return self.refuse(value, self.otherwise)
        settings = self.values[value]
        words = " ".join(f"{key}={format_value(setting)}" for key, setting in settings.items())
        return Accepted(settings, f"{format_value(value)} is {words} here" if words else self.note)


@dataclass(frozen=True)
class NotNeeded(Row):
    """A key that asks for nothing that camshaft does not do anyway."""

    why: str
    accepts: Accepts | tuple[Any, ...] | None = None
    """Values to which this applies. None: all values."""
    otherwise: Topic | str | None = None
    """Reason why no other value is accepted. None leaves other values as they are."""

    def apply(self, value: Any, tree: Tree) -> Accepted | Refused | None:
        if value is None or self._accepts(value, tree):
            return Accepted({}, f"not needed; {self.why}")
        return self.refuse(value, self.otherwise)

    def _accepts(self, value: Any, tree: Tree) -> bool:
        if self.accepts is None:
            return True
        return self.accepts(value, tree) if callable(self.accepts) else value in self.accepts


@dataclass(frozen=True)
class PassedOn(Row):
    """Options of a backend, which it reads under another key."""

    key: str
    is_used: Accepts
    """Whether the run uses the backend. Otherwise nothing reads the options."""
    setting: str
    """The setting that selects the backend."""
    base: str = ""
    """Key of options that apply unless these differ."""
    value: Any = None
    """Value of the option, if it is another one."""

    def apply(self, value: Any, tree: Tree) -> Accepted | Refused | None:
        if not self.is_used(value, tree):
            return Accepted({}, f"not read without {self.setting}")
        settings = {self.key: value if self.value is None else self.value}
        if is_mapping(value):
            base: Tree = get(tree, self.base) if self.base and has_key(tree, self.base) else {}
            settings = {f"{self.key}.{leaf}": part for leaf, part in flatten({**base, **value}, ()).items()}
        return Accepted(settings, f"passed on as {self.key}")


@dataclass(frozen=True)
class Missing(Row):
    """A key or a section of something that is not implemented."""

    topic: Topic
    off: tuple[Any, ...] = ()
    """Values that do not ask for it, besides null and false."""
    only: tuple[Any, ...] = ()
    """Values that ask for it, if others do not."""
    switch: str = ""
    """Key of the section that enables it. Unless it does, nothing reads the other keys."""
    when: Callable[[Tree], bool] | None = None
    """Condition under which the row applies."""

    def apply(self, value: Any, tree: Tree) -> Accepted | Refused | None:
        if (self.only and value not in self.only) or (self.when is not None and not self.when(tree)):
            return None
        if self.switch and is_mapping(value):
            if not self._is_off(value.get(self.switch)):
                return self.refuse(value, self.topic)
            notice = f"not read without {self.switch}; {self.topic.message()}"
            return Accepted({}, "" if self.switch in value else notice)
        asking = {leaf: part for leaf, part in self.leaves(value).items() if not self._is_off(part)}
        return Refused(asking, self.topic.message()) if asking else Accepted({})

    def _is_off(self, value: Any) -> bool:
        return value in (None, {}) or value is False or value in self.off
