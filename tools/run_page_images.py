"""Write the pictures of the run page in the documentation, from the folder of the run in the README.

    PYTHONPATH=.:.venv-page python tools/run_page_images.py runs/digits

Requires Chromium and the packages of `make test-page`.
"""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path

from playwright.sync_api import sync_playwright

from camshaft.view.server import PageServer

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SIZE = {"width": 1240, "height": 860}


def main(folders: list[str]) -> None:
    """Write `run-page.png` with curves and `run-page-responses.png` with the responses of an early step."""
    with PageServer(folders) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport=SIZE)  # pyright: ignore[reportArgumentType]
        tab.goto(server.url)
        tab.wait_for_selector(".chart canvas")
        tab.screenshot(path=IMAGES / "run-page.png")
        tab.click("#tabs button:text-is('Responses')")
        tab.wait_for_selector(".response span")
        steps = tab.locator("select[aria-label=step] option")
        tab.select_option("select[aria-label=step]", index=steps.count() // 3)
        tab.wait_for_selector(".response span")
        tab.screenshot(path=IMAGES / "run-page-responses.png")
        browser.close()
        server.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
