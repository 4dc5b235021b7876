"""Worker groups of one rank in this process; tests/contracts covers several ranks."""

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from camshaft.contracts.controller.roles import LateToy, Toy
from camshaft.controller import Worker, shutdown, spawn, workers
from camshaft.dataproto import DataProto
from camshaft.errors import BatchError, ConfigError, WorkerError

BATCH = DataProto.from_dict({"x": torch.arange(4.0)})


def test_one_local_rank_needs_no_process_group_and_copies_nothing():
    with workers(Toy) as toy:
        assert toy.same(BATCH) is BATCH
        assert not torch.distributed.is_initialized()


def test_exceptions_of_one_local_rank_propagate_unchanged():
    with workers(Toy) as toy, pytest.raises(KeyError, match="weights of layer 3") as exc_info:
        toy.fail(0)
    assert exc_info.traceback[-1].name == "fail"


def test_exceptions_of_construction_propagate_unchanged():
    with pytest.raises(ValueError, match="no such model"):
        spawn(Toy, fail_on=0)


def test_results_are_checked_on_one_rank_too():
    with workers(Toy) as toy, pytest.raises(BatchError, match="returned float on rank 0"):
        toy.mean(BATCH)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("set_facotr", "Toy has no method 'set_facotr'; did you mean 'set_factor'?"),
        ("zzz", "Toy has no method 'zzz'; registered methods: scale"),
        ("helper", "Toy.helper is not decorated with @register(dispatch_mode=...), so the driver cannot call it; "),
        ("rank", "Toy.rank is not decorated with @register(dispatch_mode=...), so the driver cannot call it; "),
    ],
)
def test_unregistered_names_are_attribute_errors(name: str, message: str):
    with workers(Toy) as toy, pytest.raises(AttributeError) as exc_info:
        getattr(toy, name)
    assert str(exc_info.value).startswith(message)
    assert "\n" not in str(exc_info.value)


def test_a_group_cannot_be_assigned_to_copied_or_sent():
    with workers(Toy) as toy:
        with pytest.raises(AttributeError):
            toy.factor = 3.0
        with pytest.raises(TypeError, match="use it only in the driver"):
            copy.copy(toy)
        with pytest.raises(TypeError, match="use it only in the driver"):
            pickle.dumps(toy)


def test_a_group_shows_its_name_role_and_methods():
    with workers(Toy, name="critic") as toy:
        assert repr(toy) == "<critic: Toy on 1 rank(s)>"
        assert "scale" in dir(toy)
        assert "helper" not in dir(toy)


def test_seats_are_read_only_to_split_a_batch():
    with workers(LateToy) as toy:
        with pytest.raises(RuntimeError, match="call init_model first"):
            toy.same(BATCH)
        toy.init_model()
        assert toy.same(BATCH) is BATCH


def test_calls_after_shutdown_are_errors():
    toy = spawn(Toy)
    shutdown(toy)
    shutdown(toy)
    with pytest.raises(WorkerError, match="Toy was shut down; spawn it again"):
        toy.set_factor(1.0)


def test_workers_ends_the_role_after_an_error():
    block = workers(Toy)
    toy = block.__enter__()
    error = ZeroDivisionError()
    assert not block.__exit__(ZeroDivisionError, error, None)
    with pytest.raises(WorkerError, match="shut down"):
        toy.set_factor(1.0)


def test_shutdown_takes_only_spawned_roles():
    with pytest.raises(TypeError, match=r"shutdown\(\) got Toy; pass roles returned by spawn"):
        shutdown(Toy())


def test_invalid_arguments_of_spawn_are_named():
    with pytest.raises(ConfigError, match="world_size=0"):
        spawn(Toy, world_size=0)
    with pytest.raises(ConfigError, match="unknown controller backend 'lokal'; use one of: local, ray"):
        spawn(Toy, backend="lokal")


def test_a_role_without_registered_methods_is_reported():
    with workers(Worker) as bare, pytest.raises(AttributeError, match="no method 'run'; registered methods: none"):
        bare.run()  # pyright: ignore[reportAttributeAccessIssue]


SNIPPET = """\
from camshaft.controller import spawn
from camshaft.contracts.controller.roles import Toy

toy = spawn(Toy, world_size=2)
reveal_type(toy)
reveal_type(toy.calls_of_rank_zero())
toy.set_facotr(1.0)
toy.set_factor("two")
"""


def test_a_type_checker_sees_the_role_and_a_misspelt_method(tmp_path: Path):
    root = Path(__file__).parents[3]
    (tmp_path / "snippet.py").write_text(SNIPPET)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(root), str(root / "tests")]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    diagnostics = [
        (d["range"]["start"]["line"] + 1, d["message"].split("\n")[0])
        for d in json.loads(process.stdout)["generalDiagnostics"]
    ]
    assert diagnostics[:3] == [
        (5, 'Type of "toy" is "Toy"'),
        (6, 'Type of "toy.calls_of_rank_zero()" is "int"'),
        (7, 'Cannot access attribute "set_facotr" for class "Toy"'),
    ]
    assert diagnostics[3][0] == 8
