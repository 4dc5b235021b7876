"""Arguments of `camshaft serve`, its keys, and what a PPO run does not import."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import camshaft
from support.tiny import tiny_folder

from camshaft.config.serve import read_serve_config
from camshaft.errors import ConfigError
from camshaft.service.keys import Keys, add_key, digest

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
