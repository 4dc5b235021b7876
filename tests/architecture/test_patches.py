"""The package does not change libraries or the objects of others. An exception is listed with its reason."""

import pytest
from architecture.patches import patches
from architecture.source import package, parse

ALLOWED = {
    "cli: sys.excepthook": "Python calls this hook for an unexpected error; it is set for the rest of the process",
    "contracts.engine.checkpoints: torch.load": "a rule counts the unsafe calls of the engine under test; restored",
    "controller.local: sys.modules['__main__']": "multiprocessing would run the user's program again; restored",
    "controller.local: tempfile.tempdir": "multiprocessing creates the socket of its fork server there; restored",
    "controller.ray_environment: constants.ENABLE_RAY_CLUSTER": "Ray reads its variable only when it is imported",
    "engine.megatron.cpu: mock.patch.multiple(torch.get_device_module('cuda'))": "Megatron assumes CUDA; restored",
    "engine.megatron.cpu: mock.patch.multiple(random)": "Megatron assumes CUDA; restored",
    "engine.megatron.cpu: mock.patch.object(token_dispatcher)": "Megatron assumes CUDA; restored",
    "engine.megatron.cpu: mock.patch.object(logging.getLogger(random.__name__))": "a wrong warning on a CPU; restored",
    "engine.torchtitan.mesh: parallel_dims.device_type": "torchtitan assumes CUDA; restored",
    "plugins: sys.modules[name]": "imports a file, whose classes dataclasses and pickle look up there",
    "rollout.builtin.tracer: exec(code.src)": "runs the code that torch.fx generates for a graph",
    "rollout.vllm.environment: torch.set_num_threads": "restores the function that vLLM has replaced",
    "subprocesses: sys.stdout": "Python sets it to None if the stream is closed at start",
    "subprocesses: sys.stderr": "Python sets it to None if the stream is closed at start",
}
"""Accepted patches. A restoration counts as the same patch."""

MAX_STATEMENTS = 19


def test_nothing_but_the_listed_objects_is_patched() -> None:
    found = patches(package())
    assert found.keys() == ALLOWED.keys(), {
        "new": sorted(found.keys() - ALLOWED.keys()),
        "gone": sorted(ALLOWED.keys() - found.keys()),
    }
    assert found.total() <= MAX_STATEMENTS


@pytest.mark.parametrize(
    ("source", "patch"),
    [
        ("import torch\ntorch.UntypedStorage.resize_ = f", "torch.UntypedStorage.resize_"),
        ("import torch\ndel torch.UntypedStorage.resize_", "torch.UntypedStorage.resize_"),
        ("import sys\nold, sys.argv = sys.argv, []", "sys.argv"),
        ("from ray import constants as facts\nfacts.PORT += 1", "facts.PORT"),
        ("constants = sys.modules.get('ray')\nconstants.PORT = 1", "constants.PORT"),
        ("import sys\nsys.modules['__main__'] = module", "sys.modules['__main__']"),
        ("with open(path) as unit.forward: ...", "unit.forward"),
        ("self.model.forward = f", "self.model.forward"),
        ("model.__class__ = Packed", "model.__class__"),
        ("model.__dict__['forward'] = f", "model.__dict__['forward']"),
        ("setattr(model, 'forward', f)", "setattr(model)"),
        ("object.__setattr__(config, 'lr', 1)", "object.__setattr__(config)"),
        ("with mock.patch.object(random, 'seed'): ...", "mock.patch.object(random)"),
        ("exec(source)", "exec(source)"),
    ],
)
def test_a_patch_is_found(source: str, patch: str) -> None:
    assert patches(parse(module=source)) == {f"module: {patch}": 1}


@pytest.mark.parametrize(
    "source",
    [
        "self.forward = f",
        "object.__setattr__(self, 'lengths', lengths)",
        "import torch\nx = torch.zeros(2)\nx.grad = None\nx.data[0] = 1",
        "counts['forward'] = 1",
        "model.register_module('norm', norm)",
    ],
)
def test_changes_of_own_objects_are_no_patches(source: str) -> None:
    assert not patches(parse(module=source))
