"""Arguments of `camshaft serve`, its keys, and what a PPO run does not import."""

import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import camshaft
from support.tinker_clients import running_server
from support.tiny import tiny_folder

from camshaft.cli.serve import SPARE_FILES, allow_connections
from camshaft.config.serve import read_serve_config
from camshaft.controller import Options
from camshaft.errors import ConfigError
from camshaft.roles.served import ServedWorker
from camshaft.service import process
from camshaft.service.keys import Keys, add_key, digest
from camshaft.service.store import LOG

MODEL = f"model={tiny_folder()}"


def test_models_have_their_folder_as_name_or_another_one() -> None:
    folder = str(tiny_folder())
    assert read_serve_config([MODEL]).base_models() == {folder: folder}
    config = read_serve_config([f"model=[Qwen/Qwen3-8B={folder},{folder}]"])
    assert config.base_models() == {"Qwen/Qwen3-8B": folder, folder: folder}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "model is missing. Write model=FOLDER"),
        ([MODEL, "prot=1"], "'prot=1' is not an argument of camshaft serve. Did you mean port"),
        ([MODEL, "port=x"], "port='x': Input should be a valid integer"),
        ([MODEL, "host=0.0.0.0"], "Set keys=FILE with the keys of its users"),
        ([MODEL, "engine=megatron"], "engine=megatron does not support hyperparameters of a step"),
        ([MODEL, "engine=none"], "unknown name 'none'"),
        ([MODEL, "param_dtype=int8"], "param_dtype=int8 is unknown"),
        (["model=/none"], "/none contains no config.json"),
        ([MODEL, "new_key=alice"], "new_key=alice has no file"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("/", "/")):
        read_serve_config(arguments)
    run = camshaft("serve", *arguments)
    assert run.status == 2
    assert run.out == ""


def test_the_limit_of_a_call_of_the_workers_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    options = list[Options]()
    monkeypatch.setattr(process, "process_pool", lambda spec, found, *_: options.append(found))
    monkeypatch.setattr(process, "spawn", lambda *args, **kwargs: None)
    role = process.RoleProcess(read_serve_config([MODEL, "worker_timeout=7200", "device=cpu"]))
    role._start()
    assert options[0].limit("save") == (7200.0, "worker_timeout=7200")


def test_the_log_may_be_on_another_disk(tmp_path: Path) -> None:
    with running_server(tmp_path, worker=ServedWorker, log=tmp_path / "local.sqlite3") as server:
        server.client()
        assert (tmp_path / "local.sqlite3").exists()
        assert not (tmp_path / "served" / LOG).exists()


def test_as_many_connections_are_allowed_as_the_system_permits() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        count = allow_connections(1000)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= count + SPARE_FILES
        assert count == (1000 if hard < 0 else min(1000, hard - SPARE_FILES))
        assert hard < 0 or allow_connections(hard) == hard - SPARE_FILES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_own_key_is_kept_in_a_file_that_others_cannot_read(tmp_path: Path) -> None:
    key = Keys.load(tmp_path, None).own_key
    assert key is not None
    assert key.startswith("tml-")
    assert stat.S_IMODE((tmp_path / "api-key").stat().st_mode) == 0o600
    keys = Keys.load(tmp_path, None)
    assert keys.own_key == key
    assert (keys.owner_of(key), keys.owner_of("tml-other"), keys.owner_of("")) == ("local", None, None)
    (tmp_path / "api-key").chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by other users"):
        Keys.load(tmp_path, None)


def test_keys_of_users_are_stored_as_digests(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    run = camshaft("serve", MODEL, f"keys={file}", "new_key=alice")
    key = run.out.splitlines()[0]
    assert add_key(file, "bob") != key
    assert key not in file.read_text()
    assert file.read_text().splitlines()[0] == f"alice {digest(key)}"
    assert Keys.load(tmp_path, file).owner_of(key) == "alice"
    with pytest.raises(ConfigError, match="has a key with the name alice"):
        add_key(file, "alice")
    file.write_text("something else\n")
    with pytest.raises(ConfigError, match="line 1: expected the name of a key"):
        add_key(file, "carol")
    assert file.read_text() == "something else\n"


def test_a_ppo_run_imports_neither_wire_nor_service() -> None:
    code = """
import sys
import camshaft.cli.ppo, camshaft.trainer.ppo, camshaft.trainer.build, camshaft.roles, camshaft.controller.local
loaded = [name for name in sys.modules if name.startswith(("camshaft.wire", "camshaft.service", "google.protobuf"))]
print(loaded + [name for name in sys.modules if name == "camshaft.roles.served"])
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert process.stdout == "[]\n"
