"""Models in the Hugging Face cache, and downloads with the client of the hub from a local server."""

import json
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.hub_server import HubServer, write_cache

from camshaft import hub
from camshaft.errors import StorageError

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
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert hub.source("team/tiny", True) == "hf://team/tiny"
    for path in ("models/mine", "models/mien", "/models/mine", "models", "s3://bucket/tiny", "a/b/c"):
        assert hub.source(path, True) == path
    assert hub.source("team/tiny", False) == "team/tiny"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.source("team/tiny", True) == "team/tiny"
    assert hub.is_model_url("hf://team/tiny")
    assert not hub.is_model_url("hf://datasets/team/tiny")


notices: list[str] = []
"""Standard error of the processes of `fetch_in_new_process`."""

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
    notices.append(run.stderr)
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
    assert error.startswith("StorageError team/other is not completely in the Hugging Face cache")
    assert "HF_HUB_OFFLINE forbids to download it" in error
    assert notices[-1] == ""


def test_an_unknown_model_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer({}) as server:
        [error] = fetch_in_new_process(server, cache, monkeypatch, "hf://team/nothing True")
    assert error == (
        "StorageError the hub has no model 'team/nothing', or it is private; check the name, or log in with "
        "hf auth login"
    )


def test_a_notice_precedes_the_first_request(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer({"team/tiny": model(tmp_path / "tiny", "model.safetensors")}) as server:
        fetch_in_new_process(server, cache, monkeypatch, "hf://team/tiny True")
    assert notices[-1].startswith(
        f"downloading the model team/tiny from {server.url} to {cache}; download=false forbids it\n"
    )
    assert "GET /api/models/team/tiny" in server.requests


def test_a_lost_connection_is_resumed_where_it_broke(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model(tmp_path / "tiny", "model.safetensors")
    weights = random.Random(0).randbytes(5 * constants.DOWNLOAD_CHUNK_SIZE // 2)
    (folder / "model.safetensors").write_bytes(weights)
    with HubServer({"team/tiny": folder}, cut={"model.safetensors": 1}) as server:
        [files] = fetch_in_new_process(server, cache, monkeypatch, "hf://team/tiny True")
    assert files == "config.json model.safetensors tokenizer.json"
    assert server.ranges == [("model.safetensors", constants.DOWNLOAD_CHUNK_SIZE)]  # of a file of 2.5 chunks
    snapshot = hub.cached_folder("team/tiny")
    assert snapshot is not None
    assert (snapshot / "model.safetensors").read_bytes() == weights


def test_a_download_that_was_killed_is_completed(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(tmp_path / "tiny", *SHARDS)
    with HubServer({"team/tiny": folder}) as server:
        fetch_in_new_process(server, cache, monkeypatch, "hf://team/tiny True")
        snapshot = hub.cached_folder("team/tiny")
        assert snapshot is not None
        blob = (snapshot / SHARDS[1]).resolve()
        blob.rename(blob.with_name(f"{blob.name}.1234abcd.incomplete"))
        (snapshot / SHARDS[1]).unlink()
        server.downloads.clear()
        [error] = fetch_in_new_process(None, cache, monkeypatch, "hf://team/tiny True")
        assert error.startswith("StorageError team/tiny is not completely in the Hugging Face cache")
        fetch_in_new_process(server, cache, monkeypatch, "hf://team/tiny True")
    assert server.downloads == [("team/tiny", SHARDS[1])]


def test_a_gated_model_is_one_sentence(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer({"team/tiny": model(tmp_path / "tiny", "model.safetensors")}, gated=("team/tiny",)) as server:
        [error] = fetch_in_new_process(server, cache, monkeypatch, "hf://team/tiny True")
    assert error == (
        f"StorageError team/tiny is gated; accept its terms on {server.url}/team/tiny, and log in with hf auth login "
        "or HF_TOKEN"
    )


@pytest.mark.parametrize("network", ["refused", "silent"])
def test_a_missing_network_is_reported_within_ten_seconds(
    network: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts connections and never answers
        port = listener.getsockname()[1] if network == "silent" else 9
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        begin = time.monotonic()
        with pytest.raises(StorageError, match=r"cannot be downloaded from http://127\.0\.0\.1:\d+ \((Conn|no answer)"):
            hub.download("team/tiny")
    assert time.monotonic() - begin < 10


def test_a_connection_that_is_reset_is_tried_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model(tmp_path / "tiny", "model.safetensors")
    with HubServer({"team/tiny": folder}, cut={"model.safetensors": 2}, resets=True) as server:
        [files] = fetch_in_new_process(server, cache, monkeypatch, "hf://team/tiny True")
    assert files == "config.json model.safetensors tokenizer.json"
    assert "the connection to the hub was lost (ReadError); resuming the download" in notices[-1]
