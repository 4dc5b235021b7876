"""Models in the Hugging Face cache, and downloads with the client of the hub from a local server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.hub_server import HubServer, write_cache

from camshaft import hub

SMALL = {"config.json": "{}", "tokenizer.json": "[]"}


def model(folder: Path, *weights: str, index: dict[str, str] | None = None) -> Path:
    folder.mkdir()
    for name, text in SMALL.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name in weights:
        (folder / name).write_bytes(name.encode() * 100)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_cached_model_is_its_snapshot_folder(cache: Path, tmp_path: Path) -> None:
    snapshot = write_cache(cache, "team/tiny", model(tmp_path / "tiny", "model.safetensors"))
    assert hub.cached_folder("team/tiny") == snapshot
    assert hub.cached_folder("team/other") is None
    assert hub.cached_folder("/no/such/folder") is None


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
MISSING = {
    "no weights": ((), None),
    "a shard by its number": (SHARDS[:1], None),
    "a shard of the index": (SHARDS[:1], {"a": SHARDS[0], "b": SHARDS[1]}),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_cache_without_all_weights_has_only_the_tokenizer(case: str, cache: Path, tmp_path: Path) -> None:
    weights, index = MISSING[case]
    snapshot = write_cache(cache, "team/tiny", model(tmp_path / "tiny", *weights, index=index))
    assert hub.cached_folder("team/tiny") is None
    assert hub.cached_folder("team/tiny", weights=False) == snapshot


@pytest.mark.parametrize("files", [("model.safetensors",), ("pytorch_model.bin",), SHARDS])
def test_a_cache_with_all_weights_is_complete(files: tuple[str, ...], cache: Path, tmp_path: Path) -> None:
    write_cache(cache, "team/tiny", model(tmp_path / "tiny", *files))
    assert hub.cached_folder("team/tiny") is not None


def test_only_model_names_become_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert hub.source("team/tiny", True) == "hf://team/tiny"
    for path in ("models/mine", "/models/mine", "models", "s3://bucket/tiny", "a/b/c"):
        assert hub.source(path, True) == path
    assert hub.source("team/tiny", False) == "team/tiny"
    assert hub.is_model_url("hf://team/tiny")
    assert not hub.is_model_url("hf://datasets/team/tiny")


DOWNLOAD = """
import os, sys
from camshaft.errors import CamshaftError
from camshaft.fetch import fetch
try:
    for url, weights in [line.split() for line in sys.argv[1:]]:
        print(*sorted(os.listdir(fetch(url, weights == "True"))))
except CamshaftError as error:
    print(type(error).__name__, error)
"""


def fetch_in_new_process(
    server: HubServer | None, cache: Path, monkeypatch: pytest.MonkeyPatch, *urls: str
) -> list[str]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0" if server else "1")
    monkeypatch.setenv("HF_ENDPOINT", server.url if server else "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    run = subprocess.run([sys.executable, "-c", DOWNLOAD, *urls], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_models_are_downloaded_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, only_bin = ("model.safetensors", "pytorch_model.bin", "model.gguf"), ("pytorch_model.bin",)
    models = {"team/both": model(tmp_path / "both", *both), "team/bin": model(tmp_path / "bin", *only_bin)}
    with HubServer(models) as server:
        urls = ["hf://team/both False", "hf://team/both True", "hf://team/bin True"]
        folders = fetch_in_new_process(server, cache, monkeypatch, *urls)
        assert folders == [
            "config.json tokenizer.json",
            "config.json model.safetensors tokenizer.json",
            "config.json pytorch_model.bin tokenizer.json",
        ]
        assert len(server.downloads) == len(set(server.downloads)) == 6
    assert fetch_in_new_process(None, cache, monkeypatch, *urls[1:]) == folders[1:]
    [error] = fetch_in_new_process(None, cache, monkeypatch, "hf://team/other True")
    assert error.startswith("StorageError team/other is not in the Hugging Face cache")


def test_an_unknown_model_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer({}) as server:
        [error] = fetch_in_new_process(server, cache, monkeypatch, "hf://team/nothing True")
    assert error == (
        "StorageError the hub has no model 'team/nothing', or it is private; check the name, or log in with "
        "hf auth login"
    )
