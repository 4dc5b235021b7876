"""Role classes that the config names: `actor_rollout_ref.worker_cls`, `critic.worker_cls`, `reward_model.worker_cls`.

    critic = spawn(worker_class("critic.worker_cls", config.critic.worker_cls, CriticWorker), config, topology, steps)

A class of your own derives from the built-in one, or is any `Worker` with the methods that a run calls. To replace the
actor or the reference only, set the class attributes of `ActorRolloutRefWorker`:

    class MyActor(ActorWorker): ...

    class MyPolicy(ActorRolloutRefWorker):
        actor_class = MyActor
"""

from __future__ import annotations

from typing import TypeVar, cast

from camshaft.controller import Worker
from camshaft.controller.worker import registered
from camshaft.errors import ConfigError
from camshaft.plugins import load

R = TypeVar("R", bound=Worker)


def worker_class(
    key: str, name: str | None, built_in: type[R], group: str = "camshaft.roles", methods: tuple[str, ...] = ()
) -> type[R]:
    """Return the class `name` of the config key `key`; None is the built-in class.

    `group` holds entry points with such classes. The class must register `methods`, by default all of the built-in one.
    """
    if name is None:
        return built_in
    loaded, required = load(name, {}, group, Worker), registered(built_in)
    missing = [method for method in methods or required if method not in registered(loaded)]
    if missing:
        decorators = "; ".join(f"@register(dispatch_mode={required[method]}) {method}" for method in missing)
        raise ConfigError(
            f"{key}={name}: the class has no registered method {', '.join(missing)}; derive it from "
            f"camshaft.roles.{built_in.__name__}, or write {decorators}"
        )
    return cast(type[R], loaded)
