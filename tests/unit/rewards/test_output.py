"""What reward functions print is written with secrets masked, however the output is split into chunks."""

import random
from pathlib import Path

import pytest

from camshaft.masking import remember_secrets
from camshaft.rewards import output
from camshaft.rewards.output import Output, OutputStream

SECRET = "sk-0123456789-t\u00e4uschung"
URL = "https://me:pass-in-url@host/v1?sig=in-query"


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", SECRET)
    remember_secrets()


def written(path: Path, chunks: list[bytes]) -> bytes:
    stream = OutputStream(Output(path))
    for chunk in chunks:
        stream.write(chunk)
    stream.write(b"")
    return path.read_bytes()


def test_a_secret_in_two_chunks_is_masked(tmp_path: Path) -> None:
    data = f"a {SECRET} b\nURL {URL}\n\xff ends with {SECRET}".encode()
    expected = b"a *** b\nURL https://me:***@host/v1?sig=***\n\xc3\xbf ends with ***"
    for middle in range(len(data) + 1):
        path = tmp_path / f"{middle}.log"
        assert written(path, [data[:middle], data[middle:]]) == expected


def test_a_long_line_is_masked_and_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_LINE_BYTES", 200)
    monkeypatch.setattr(output, "MAX_SECRET_BYTES", 100)
    draws = random.Random(3)
    data = "".join(f"{draws.random()}{SECRET}\u20ac" for _ in range(200)).encode()
    ends = sorted(draws.sample(range(len(data)), 300))
    chunks = [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]
    path = tmp_path / "output.log"
    stream = OutputStream(Output(path))
    for chunk in chunks[:200]:
        stream.write(chunk)
    assert path.stat().st_size > 1000, "an endless line is not kept in memory"
    for chunk in chunks[200:]:
        stream.write(chunk)
    stream.write(b"")
    assert path.read_bytes() == data.replace(SECRET.encode(), b"***")


def test_bytes_without_secrets_are_unchanged(tmp_path: Path) -> None:
    data = bytes(range(256)) * 3
    assert written(tmp_path / "output.log", [data[:100], data[100:]]) == data


def test_chunks_of_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    destination = Output(path)
    first, second = OutputStream(destination), OutputStream(destination)
    first.write(SECRET[:5].encode())
    second.write(b"whole line\nstart")
    first.write(SECRET[5:].encode() + b"\n")
    second.write(b"")
    assert path.read_bytes() == b"whole line\n***\nstart"
