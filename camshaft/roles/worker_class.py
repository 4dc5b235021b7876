"""Load the role classes that the config names, for example with `critic.worker_cls`.

    critic_class = load_worker_class("critic.worker_cls", config.critic.worker_cls, CriticWorker)
    critic = spawn(critic_class, config, topology, total_steps, pool=pool)

A custom class derives from the built-in class or is any `Worker` that registers the methods that a run calls. To
replace only the actor or the reference, derive from `ActorRolloutRefWorker` and set its class attributes:

    class MyActor(ActorWorker): ...

    class MyPolicy(ActorRolloutRefWorker):
        actor_class = MyActor
"""

from typing import TypeVar, cast

from camshaft.controller import Worker
from camshaft.controller.worker import registered_methods
from camshaft.errors import ConfigError
from camshaft.plugins import load

R = TypeVar("R", bound=Worker)


def load_worker_class(
    key: str, name: str | None, built_in: type[R], group: str = "camshaft.roles", methods: tuple[str, ...] = ()
) -> type[R]:
    """Load the role class `name`, the value of config key `key`. Return the built-in class if `name` is None.

    `group` is the entry-point group for such classes. The class must register `methods`, by default all registered
    methods of the built-in class.
    """
    if name is None:
        return built_in
    role_class, required = load(name, {}, group, Worker), registered_methods(built_in)
    missing = [method for method in methods or required if method not in registered_methods(role_class)]
    if missing:
        decorators = "; ".join(f"@register(dispatch_mode={required[method]}) {method}" for method in missing)
        raise ConfigError(
            f"{key}={name}: the class does not register {', '.join(missing)}; derive it from "
            f"camshaft.roles.{built_in.__name__}, or write {decorators}"
        )
    return cast(type[R], role_class)
