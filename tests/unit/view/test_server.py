"""The page answers only its user on this machine, and shows what the folders contain."""

import http.client
import json
import math
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import camshaft
from support.run_folders import make_run, sample_rows

from camshaft.errors import ConfigError
from camshaft.view import data
from camshaft.view.export import spread
from camshaft.view.panels import PHASES
from camshaft.view.server import FILES, Page, PageServer

EVIL = "</script><script>window.injected = 1</script><img src=x onerror='window.injected = 1'>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "first", steps=20, responses={20: sample_rows(text=EVIL)})
    make_run(folder / "second", steps=30, changes={"actor_rollout_ref.actor.optim.lr": 1e-3}, ending="failed")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[PageServer]:
    with PageServer([folder]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request(method, path, headers=headers)
    reply = connection.getresponse()
    result = reply.status, dict(reply.getheaders()), reply.read()
    connection.close()
    return result


def value(server: PageServer, path: str) -> Any:
    status, _, body = ask(server, path, Cookie=f"{server.cookie}={server.token}")
    assert status == 200, body
    return json.loads(body)


QUERIES = {
    "/runs": "", "/curves": "?run=0", "/phases": "?run=0", "/config": "?run=0", "/responses": "?run=0&step=20",
    "/ranked": "?run=0&order=worst", "/lanes": "?run=0",
}  # fmt: skip
VIEWS = [path + query for path, query in QUERIES.items()]
PATHS = (*FILES, *VIEWS, "/missing")


def test_every_view_answers(server: PageServer) -> None:
    assert all(value(server, path) for path in VIEWS)


@pytest.mark.parametrize("path", PATHS)
def test_every_path_needs_the_token(path: str, server: PageServer) -> None:
    separator = "&" if "?" in path else "?"
    assert ask(server, path)[0] == 403
    assert ask(server, f"{path}{separator}token=wrong")[0] == 403
    assert ask(server, f"{path}{separator}token=")[0] == 403
    assert ask(server, path, Cookie=f"{server.cookie}=wrong")[0] == 403
    assert ask(server, path, Cookie="other=x; =;")[0] == 403
    good = 403 if path == "/missing" else 200
    assert ask(server, f"{path}{separator}token={server.token}")[0] == good


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", "10.0.0.1"]
)
def test_a_foreign_host_is_rejected(host: str, path: str, server: PageServer) -> None:
    assert ask(server, path, Cookie=f"{server.cookie}={server.token}", Host=host)[0] == 403


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_other_methods_are_rejected(method: str, path: str, server: PageServer) -> None:
    assert ask(server, path, method, Cookie=f"{server.cookie}={server.token}")[0] == 403


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", ["/..{}", "/x/..{}", "{}/..", "{}/../run.json", "/%2e%2e{}", "/..%2f..{}", "//etc{}"])
def test_two_dots_are_rejected_in_every_path(form: str, path: str, server: PageServer) -> None:
    name, _, query = path.partition("?")
    wrong = form.format(name) + (f"?{query}" if query else "")
    assert ask(server, wrong, Cookie=f"{server.cookie}={server.token}")[0] == 403


@pytest.mark.parametrize(
    "path",
    [
        *("/../pyproject.toml", "/static/page.js", "/..%2f..%2frun.json", "/page.js/../../server.py", "//etc/passwd"),
        *("/responses?run=..&step=1", "/responses?run=0&step=../1", "/responses?run=99&step=1", "/config?run=-1"),
        *("/ranked?run=..&order=worst", "/ranked?run=0&order=../worst", "/ranked?run=99&order=worst", "/ranked?run=0"),
    ],
)
def test_no_path_leads_out_of_the_list(path: str, server: PageServer) -> None:
    assert ask(server, path, Cookie=f"{server.cookie}={server.token}")[0] == 403


def test_replies_forbid_scripts_and_frames_of_others(server: PageServer) -> None:
    status, headers, body = ask(server, f"/?token={server.token}")
    assert (status, b"uPlot.js" in body) == (200, True)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'; script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["Set-Cookie"] == f"{server.cookie}={server.token}; HttpOnly; SameSite=Strict; Path=/"
    assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")
    assert len(server.token) >= 32


def test_only_the_loopback_interface_is_open(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    with PageServer([]) as other:
        assert other.token != server.token


def test_a_socket_belongs_to_its_user(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "view.sock"
    with PageServer([folder], socket_path=path) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        for token, status in ((server.token, b"200"), ("wrong", b"403")):
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(20)
                client.connect(str(path))
                client.sendall(f"GET /runs?token={token} HTTP/1.1\r\nHost: any\r\nConnection: close\r\n\r\n".encode())
                assert client.recv(12).endswith(status)
        server.shutdown()
        thread.join()
    assert not path.exists()


def test_a_socket_of_a_killed_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "view.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with PageServer([], socket_path=path), pytest.raises(ConfigError, match=r"view\.sock is the socket of another"):
        PageServer([], socket_path=path)


def test_runs_are_listed_with_their_state(server: PageServer) -> None:
    first, second = value(server, "/runs")["runs"]
    assert (first["name"], first["state"], first["step"], first["total"]) == ("first", "finished", 20, 20)
    assert (second["name"], second["state"], second["samples"]) == ("second", "failed", [30])
    assert first["reward"] == pytest.approx(1 - 0.9**20, rel=1e-5)
    assert first["advice"] == second["advice"] == []


def test_curves_are_those_of_the_selected_runs(server: PageServer) -> None:
    reply = value(server, "/curves?run=1")
    assert len(reply["runs"]) == 1
    assert reply["runs"][0]["actor/entropy"]["steps"] == list(range(1, 31))
    assert [row["title"] for row in reply["layout"]] == [
        *("Learning", "Stability", "Trainer against generator", "Time", "Failures"),
    ]
    assert reply["descriptions"]["actor/entropy"].startswith("Mean entropy")


def test_responses_and_missing_steps(server: PageServer) -> None:
    reply = value(server, "/responses?run=0&step=20")
    assert [row["response"] for row in reply["rows"]] == [EVIL] * 12
    status, _, body = ask(server, f"/responses?run=0&step=7&token={server.token}")
    assert (status, "no responses of step 7" in json.loads(body)["error"]) == (404, True)


def test_two_configs_are_compared(server: PageServer) -> None:
    reply = value(server, "/config?run=0&run=1")
    assert reply["differences"] == {"actor_rollout_ref.actor.optim.lr": ["1e-05", "0.001"]}
    assert reply["names"] == ["first", "second"]
    reply = value(server, "/config?run=0&run=1&run=0")
    assert reply["differences"] == {"actor_rollout_ref.actor.optim.lr": ["1e-05", "0.001", "1e-05"]}
    assert reply["names"] == ["first", "second", "first"]


def test_times_are_exact_since_the_first_step(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3, curves={"timing/at": lambda step: 1_764_000_000 + 0.25 * step})
    page = Page([folder])
    page.answer("/runs", {})
    assert page.curves(page.runs)["runs"][0]["timing/at"]["values"] == [0.0, 0.25, 0.5]
    assert page.curves(page.runs, first=2)["runs"][0]["timing/at"]["values"] == [0.25, 0.5]


def test_a_new_line_and_a_deleted_folder_appear(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    with PageServer([tmp_path]) as server:
        assert server.page.answer("/runs", {})["runs"][0]["step"] == 3
        with open(run / "metrics.jsonl", "a") as file:
            file.write('{"step": 4, "critic/score/mean": 0.5}\n{"step": 5, "critic')
        assert server.page.answer("/runs", {})["runs"][0]["step"] == 4
        for path in sorted(run.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        run.rmdir()
        gone = server.page.answer("/runs", {})["runs"][0]
        assert (gone["step"], gone["state"], gone["samples"]) == (0, "unknown", [])


def test_reduced_curves_keep_ends_and_extremes() -> None:
    values = np.random.default_rng(0).random(100_000)
    values[61_803], values[31_415], values[12_345], values[99_998] = 50.0, -50.0, math.nan, math.inf
    for points in (600, 100, 10):
        kept = data.reduce_points(values, points).tolist()
        assert len(kept) <= points
        assert {61_803, 31_415} < set(kept)
        assert kept == sorted(set(kept))
        assert (kept[0], kept[-1]) == (0, 99_999)
        assert not {12_345, 99_998} & set(kept)
    assert data.reduce_points(values[:50], 100).tolist() == list(range(50))


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of 20,000 steps, whose only large entropy is that of step 12,345."""
    folder = tmp_path_factory.mktemp("long")
    curves = {"actor/entropy": lambda step: 99.0 if step == 12_345 else 1 / step}
    make_run(folder / "run", steps=20_000, curves=curves)
    return folder


@pytest.mark.parametrize("width", [40_000, 20_000, 7_000, 1_000, 300, 1])
def test_a_spike_of_one_step_is_visible_at_every_zoom(width: int, long_run: Path) -> None:
    page = Page([long_run])
    for offset in (0, width // 2, width - 1):
        first = max(0, 12_345 - offset)
        zoom = {"run": ["0"], "first": [str(first)], "last": [str(first + width)]}
        curve = page.answer("/curves", zoom)["runs"][0]["actor/entropy"]
        assert curve["values"][curve["steps"].index(12_345)] == 99.0
        assert len(curve["steps"]) <= data.POINTS
        assert first <= curve["steps"][0] <= curve["steps"][-1] <= first + width
        if width <= 300:
            assert curve["steps"] == list(range(first, first + width + 1))


def test_later_answers_on_a_long_run_are_fast(long_run: Path) -> None:
    page, seconds = Page([long_run]), []
    for _ in range(6):
        start_time = time.process_time()
        page.answer("/runs", {})
        seconds.append(time.process_time() - start_time)
    assert min(seconds[1:]) < seconds[0] / 4  # reading the file again would take as long as the first time


def test_numbers_are_rounded_to_six_digits() -> None:
    values = [0.1234567890, -98765.4321, 1.0, 0.0, 1e-300, 123456789012.0, math.nan, math.inf]
    rounded = data._numbers(np.array(values))
    assert rounded[-2:] == [None, None]
    assert rounded[:-2] == pytest.approx([float(f"{number:.6g}") for number in values[:-2]], rel=1e-15)


def test_phases_are_means_of_the_last_steps(tmp_path: Path) -> None:
    curves = {"timing_s/gen": lambda step: 100.0 if step <= 20 else 2.0 + step % 2}
    page = Page([make_run(tmp_path / "run", steps=70, curves=curves)])
    (means,) = page.answer("/phases", {"run": ["0"]})
    assert means == {"step": 0.9, "gen": 2.5, "update_actor": 0.3}
    assert set(means) <= {"step", *PHASES}


def test_an_export_has_no_markup_of_responses(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "runs.html"
    assert camshaft("view", str(folder), "--export", str(target)).out == f"wrote {target}: 2 runs\n"
    text = target.read_text()
    assert "window.injected" in text
    assert "<script>window.injected" not in text
    assert "<img src=x" not in text
    assert 'href="' not in text.replace('href="data:,"', "")
    assert "default-src 'none'" in text
    assert len(text) < 2_000_000
    assert spread(range(10), 4) == [0, 3, 6, 9]


def test_the_terminal_shows_the_table_and_advice(folder: Path, tmp_path: Path) -> None:
    shown = camshaft("view", str(folder), "--text")
    assert (shown.status, len(shown.out.splitlines())) == (0, 3)
    assert camshaft("view", str(tmp_path)).status == 2


def test_the_page_leaves_torch_out() -> None:
    code = (
        "import sys, camshaft.view.server, camshaft.view.export, camshaft.cli.view; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
