"""Engines of a run on CUDA devices, for a forecast on a machine without one.

    config = simulated(config)              # the actor's engine is now "camshaft.planning.engines:SimulatedFSDPEngine"

They take the decisions of a run on CUDA: dtypes, kernels, offloading. Their tensors are in host memory, because a build
of torch without CUDA cannot run autograd on tensors of a device that it lacks. `TensorMemory` keeps track of the
tensors that a run would hold in host memory.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from camshaft.config import EngineConfig, PPOConfig, SupervisedConfig
from camshaft.engine.fsdp import FSDPEngine
from camshaft.engine.fsdp.weights import allocate
from camshaft.engine.offload import Part, Parts
from camshaft.engine.single import SingleDeviceEngine
from camshaft.engine.torch_engine import TorchEngine
from camshaft.models.packed import PackedModel
from camshaft.planning.tensor_memory import TensorMemory, active_memory

DEVICE = torch.device("cuda")
Config = TypeVar("Config", bound=PPOConfig | SupervisedConfig)


class SimulatedParts(Parts):
    """Keeps account of the parts that a run moves between host memory and the device."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        offloaded: tuple[Part, ...],
        memory: TensorMemory,
    ):
        self._memory = memory
        self._places: dict[Part, torch.device] = {}
        super().__init__(module, optimizer, DEVICE, offloaded)

    def device_of(self, part: Part) -> torch.device | None:
        return None if super().device_of(part) is None else self._places.get(part, DEVICE)

    def move(self, parts: Iterable[Part], device: torch.device) -> None:
        for part in parts:
            self._places[part] = device
            self._memory.place(self._tensors(part), on_host=device.type == "cpu")

    def _tensors(self, part: Part) -> Iterator[Tensor]:
        if part == "optimizer":
            states = self._optimizer.state.values() if self._optimizer is not None else ()
            yield from (value for state in states for name, value in state.items() if name != "step")
            return
        for parameter in self._module.parameters():
            if part == "model":
                yield parameter.detach()
            if parameter.grad is not None:  # moves with its parameter
                yield parameter.grad


class _SimulatedEngine(TorchEngine):
    def __init__(self, config: EngineConfig):
        # Compiled layers cannot be traced.
        options = {name: value for name, value in config.options.items() if name != "use_torch_compile"}
        super().__init__(config.model_copy(update={"options": options}))

    def init_model(self) -> None:
        super().init_model()
        if self._holds_parts_on_device:
            self.parts = SimulatedParts(self.module, self._optimizer, self.offloaded_parts, active_memory())

    @property
    def _holds_parts_on_device(self) -> bool:
        return True


class SimulatedSingleDeviceEngine(_SimulatedEngine, SingleDeviceEngine):
    """The `reference` engine on a simulated device."""

    def build_model(self) -> PackedModel:
        return allocate(self.config, self.device, lambda _: None)


class SimulatedFSDPEngine(_SimulatedEngine, FSDPEngine):
    """The `fsdp` engine on simulated devices."""

    def _build_sharded(self, group: dist.ProcessGroup) -> PackedModel:
        """Allocate the shards. In a run, rank 0 also sends one weight at a time over its device."""
        with self._home():
            packed = allocate(self.config, self.home_device, self._parallelize)
        largest = max(packed.hf.parameters(), key=Tensor.numel)
        torch.empty(largest.shape, dtype=largest.dtype)
        return packed

    @property
    def _holds_parts_on_device(self) -> bool:
        return not self.options.offload_policy

    def backward(self, loss: Tensor) -> None:
        active_memory().gradients_on_host = self.options.offload_policy
        super().backward(loss)
        active_memory().gradients_on_host = False

    def clip_and_step(self) -> tuple[float, bool]:
        with self._home():
            return super().clip_and_step()

    def _home(self) -> AbstractContextManager[None]:
        """Return the context for tensors that the offload policy keeps in host memory."""
        return active_memory().on_host() if self.options.offload_policy else nullcontext()


SIMULATED = {"reference": SimulatedSingleDeviceEngine, "fsdp": SimulatedFSDPEngine, "fsdp2": SimulatedFSDPEngine}
"""Simulated engines by the name of the engine."""


def simulated(config: Config) -> Config:
    """Return the config of the run with simulated engines."""

    def target(strategy: str) -> str:
        engine = SIMULATED.get(strategy)
        return f"{__name__}:{engine.__name__}" if engine else strategy

    trainer = config.trainer.model_copy(update={"device": "cpu"})
    if isinstance(config, SupervisedConfig):
        return config.model_copy(update={"strategy": target(config.strategy), "trainer": trainer})
    policy, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    actor = policy.actor.model_copy(update={"strategy": target(policy.actor.strategy)})
    return config.model_copy(
        update={
            "actor_rollout_ref": policy.model_copy(update={"actor": actor}),
            "critic": critic.model_copy(update={"strategy": target(critic.strategy)}),
            "reward_model": reward.model_copy(update={"strategy": target(reward.strategy)}),
            "trainer": trainer,
        }
    )
