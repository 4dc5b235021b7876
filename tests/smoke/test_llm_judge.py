"""The example of an LLM judge grades responses at a real HTTP server, with retries of slow and invalid answers."""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from camshaft.dataproto import DataProto, Ragged
from camshaft.rewards.manager import RewardManager, Scores

JUDGE = Path(__file__).parents[2] / "examples" / "llm_judge" / "judge.py"

pytestmark = pytest.mark.alone


class Handler(BaseHTTPRequestHandler):
    """Behaves as the graded response says."""

    server: "Server"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = request["messages"][0]["content"]
        behavior = text.rpartition("Answer: ")[2]
        self.server.requests.append((self.path, request["model"], self.headers["Authorization"], text))
        self.server.counts[behavior] += 1
        is_first = self.server.counts[behavior] == 1
        if behavior == "slow" or (behavior == "slow once" and is_first):
            time.sleep(3.0)
        if behavior == "fails" or (behavior == "fails once" and is_first):
            self.send_error(503)
        elif behavior == "unauthorized":
            self.send_error(401)
        elif behavior == "garbage":
            self._send(b"<html>")
        else:
            answer = "I cannot say." if behavior == "no grade" else "The grade must be below 10.\n**Grade: 7.5**"
            self._send(json.dumps({"choices": [{"message": {"content": answer}}]}).encode())

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has given up
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    requests: list[tuple[str, str, str, str]]
    counts: Counter[str]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    server.requests, server.counts = [], Counter()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


BEHAVIORS = ("right", "fails once", "slow once", "slow", "fails", "no grade", "garbage", "unauthorized")


@pytest.fixture(scope="module")
def result(server: Server) -> Iterator[Scores]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1/")
        patch.setenv("JUDGE_MODEL", "judge-8b")
        patch.setenv("JUDGE_API_KEY", "sk-secret-key")
        patch.setenv("JUDGE_TIMEOUT", "1.5")
        patch.setenv("no_proxy", "127.0.0.1")
        with RewardManager(str(JUDGE), num_workers=1, timeout=20.0) as rewards:
            rows = {
                "data_source": ["test"] * len(BEHAVIORS),
                "ground_truth": ["Paris"] * len(BEHAVIORS),
                "data_row": [{"prompt": [{"role": "user", "content": "Capital of France?"}]} for _ in BEHAVIORS],
                "responses": Ragged.from_rows([[0]] * len(BEHAVIORS)),
            }
            yield rewards.score_texts(DataProto.from_dict(rows), BEHAVIORS)


def test_grades_are_scores_between_zero_and_one(result: Scores) -> None:
    assert result.scores.tolist() == [0.75, 0.75, 0.75, 0, 0, 0, 0, 0]


def test_failed_requests_are_retried_a_bounded_number_of_times(result: Scores, server: Server) -> None:
    assert [parts.get("attempts") for parts in result.parts[:3]] == [1.0, 2.0, 2.0]
    assert [server.counts[name] for name in BEHAVIORS] == [1, 2, 2, 3, 3, 3, 3, 1]


def test_answers_without_a_grade_are_counted_as_failures(result: Scores) -> None:
    messages = {failure.row: failure.message for failure in result.failures if failure.kind == "error"}
    assert list(messages) == [3, 4, 5, 6, 7]
    assert (result.metrics["reward/errors"], result.metrics["reward/timeouts"]) == (5.0, 0.0)
    assert "timed out" in messages[3]
    assert "HTTP Error 503" in messages[4]
    assert "no grade from 0 to 10 in the answer of the judge: 'I cannot say.'" in messages[5]
    assert "JSONDecodeError" in messages[6]
    assert "HTTP Error 401" in messages[7]


def test_request_contains_model_key_question_and_reference(result: Scores, server: Server) -> None:
    path, model, key, text = server.requests[0]
    assert (path, model, key) == ("/v1/chat/completions", "judge-8b", "Bearer sk-secret-key")
    assert "Question: Capital of France?\nReference: Paris\n" in text
