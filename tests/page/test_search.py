"""Questions of readers, typed into the search box of the documentation site in Chromium."""

# pyright: reportMissingImports=false
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.pages import ROOT

pytestmark = [pytest.mark.page, pytest.mark.timeout(200)]

QUESTIONS = {
    "judge model": "rewards.html#an-llm-as-judge",
    "train on 8 GPUs": "eight-gpus.html",
    "what memory do I need": "what-fits.html",
    "memory": "what-fits.html",
    "add a metric": "add-a-metric.html",
    "own metric": "add-a-metric.html",
    "why does the reward not rise": "tutorials/debug-a-run.html",
    "install": "install.html",
    "LoRA": "lora.html",
    "Docker": "install.html#docker",
    "Qwen3": "models.html#qwen3",
    "which models": "models.html",
}
"""Sections that answer a question."""
HITS = """
    () => {
        const links = [], search = (root) => root.querySelectorAll("*").forEach((node) => {
            if (node.shadowRoot) search(node.shadowRoot);
            if (node.tagName === "A" && node.href.includes("?h=")) links.push(node.href);
        });
        search(document);
        return links;
    }
"""
"""The links of the results, which are in a shadow root."""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Open the first page of the site."""
    from playwright.sync_api import sync_playwright

    out = tmp_path_factory.mktemp("build") / "docs"
    tool = [sys.executable, ROOT / "tools" / "docs_site.py", "--out", out]
    subprocess.run(tool, check=True, capture_output=True, timeout=150)
    chromium = shutil.which("chromium")
    assert chromium, "Chromium is missing: apt-get install chromium"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=out / "site")) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            tab = browser.new_page()
            tab.goto(f"http://127.0.0.1:{server.server_port}/index.html")
            yield tab
            browser.close()
        server.shutdown()


def hits(tab: Any, question: str) -> list[str]:
    """Return the pages and sections that the search finds, in order."""
    tab.reload()
    tab.wait_for_load_state("networkidle")
    tab.keyboard.press("/")
    tab.wait_for_timeout(300)
    tab.keyboard.type(question)
    for _ in range(100):
        tab.wait_for_timeout(100)
        if links := tab.evaluate(HITS):
            tab.wait_for_timeout(300)  # until the results of the last letter have replaced those of earlier ones
            links = tab.evaluate(HITS)
            return [
                Path(link.partition("?")[0].partition("//")[2])
                .relative_to(Path(tab.url.partition("//")[2]).parent)
                .as_posix()
                + (f"#{link.partition('#')[2]}" if "#" in link else "")
                for link in links
            ]
    return []


@pytest.mark.parametrize(("question", "section"), QUESTIONS.items())
def test_a_question_is_answered_in_the_first_three_hits(tab: Any, question: str, section: str) -> None:
    found = hits(tab, question)[:3]
    assert any(hit == section or hit.partition("#")[0] == section for hit in found), found
