"""Open the deployment's pages in a real browser: Debian's Chromium, controlled by Playwright."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from playwright.sync_api import Locator, Page, WebSocket, expect, sync_playwright

from tests.e2e.graphql import TIMEOUT_SECONDS
from tests.e2e.topology import CODE_REPOSITORY, LOCATION, Topology

#: Size of the window and of screenshots, in pixels.
WIDTH, HEIGHT = 1280, 900

# Chromium has no sandbox when it runs as root. The flags prevent requests to hosts other than the deployment.
_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
_RUN_PAGE = re.compile(r"/runs/(?P<run_id>[0-9a-f-]{36})")
# Polled by a script in the page, because the page's content security policy blocks Playwright's `wait_for_function`.
_WAIT_FOR_PLOTS = """timeout_ms => new Promise((resolve, reject) => {
    const isDrawn = canvas =>
        canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(byte => byte);
    const end_ms = performance.now() + timeout_ms;
    const check = () => {
        if ([...document.querySelectorAll('canvas')].every(isDrawn)) resolve();
        else if (performance.now() > end_ms) reject(new Error('a plot remained empty'));
        else requestAnimationFrame(check);
    };
    check();
})"""


class Pages:
    """A browser page, by default of the operator's webserver.

    ``visited_texts`` contains the URL and content of all visited pages, and the messages that the server sent to them.
    """

    def __init__(self, page: Page, topology: Topology, folder: Path):
        self.page = page
        self.topology = topology
        self.folder = folder
        self.visited_texts: list[tuple[str, str]] = []
        page.on("websocket", self._listen)

    def _listen(self, socket: WebSocket) -> None:
        socket.on("framereceived", lambda data: self.visited_texts.append((socket.url, str(data))))

    def read(self) -> str:
        """Return the text of the page, and record its content in ``visited_texts``."""
        self.visited_texts.append((self.page.url, self.page.content()))
        return self.page.inner_text("body")

    def open(self, path: str, *, viewer: bool = False) -> None:
        """Open a path below a webserver."""
        self.read()
        self.page.goto(f"{self.topology.viewer_url if viewer else self.topology.url}{path}")

    def screenshot(self, name: str) -> None:
        """Save a screenshot as ``NAME.png`` after all events of a run are loaded."""
        expect(self.page.get_by_text("Loading run logs")).to_have_count(0)
        self.read()
        self.page.screenshot(path=self.folder / f"{name}.png", animations="disabled")

    def save_failure(self, name: str) -> str:
        """Save a screenshot and the text of the page of a failed test. Return a message with their paths."""
        text = self.folder / f"failed-{name}.txt"
        text.write_text(self.read())
        self.screenshot(f"failed-{name}")
        return f"{self.page.url} was saved as {text} and {text.with_suffix('.png')}"

    # Launchpad and runs

    @property
    def launch_button(self) -> Locator:
        """The button that launches the run configured in the launchpad."""
        return self.page.get_by_role("button", name=re.compile("Launch Run$", re.IGNORECASE))

    def edit(self, job: str, config: Mapping[str, Any]) -> None:
        """Open the launchpad of a job, which shows its defaults, and replace its configuration."""
        self.open(launchpad(job))
        expect(self.page.locator(".CodeMirror-code")).to_contain_text(":")
        self.write(config)

    def write(self, config: Mapping[str, Any]) -> None:
        """Replace the configuration in the launchpad."""
        editor = self.page.locator(".CodeMirror").first
        editor.evaluate("(editor, text) => editor.CodeMirror.setValue(text)", yaml.safe_dump(dict(config)))

    def launch(
        self, job: str, config: Mapping[str, Any], status: str = "Success", *, screenshot: str | None = None
    ) -> str:
        """Launch a job with a configuration, and open the page of the finished run. Return the run's ID.

        With ``screenshot``, save a screenshot of the launchpad with this name.
        """
        self.edit(job, config)
        if screenshot is not None:
            self.screenshot(screenshot)
        self.launch_button.click()
        self.page.wait_for_url(_RUN_PAGE)
        match = _RUN_PAGE.search(run_page := self.page.url)
        assert match is not None
        self.read()
        self.page.goto("about:blank")  # the page of a run in progress is redrawn continuously
        run_status = self.topology.wait_for_run(match["run_id"])
        assert run_status == status.upper(), self.topology.messages(match["run_id"])
        self.page.goto(run_page)
        expect(self.page.get_by_text(status, exact=True).first).to_be_visible()
        return match["run_id"]

    # Metadata

    def full_message(self) -> Locator:
        """Open the complete message that is truncated on the run's page."""
        self.page.get_by_text("View full message").last.click()
        return self.page.get_by_role("dialog")

    def metadata_row(self, label: str, within: Locator | None = None) -> Locator:
        """Return the last row with this metadata label."""
        scope = self.page.locator("body") if within is None else within
        cell = self.page.get_by_role("cell", name=label, exact=True)
        return scope.get_by_role("row").filter(has=cell).last

    def metadata_height(self, first: str, last: str) -> float:
        """Return the height in pixels from one metadata row to the last row with another label."""
        rows = self.page.get_by_role("row").filter(
            has=self.page.get_by_role("cell", name=re.compile(f"^{last}(_\\d+)?$"))
        )
        first_box, last_box = self.metadata_row(first).bounding_box(), rows.last.bounding_box()
        assert first_box is not None and last_box is not None
        return last_box["y"] + last_box["height"] - first_box["y"]

    def metadata_text(self, label: str, within: Locator | None = None) -> str:
        """Return the displayed text of a metadata value."""
        row = self.metadata_row(label, within).inner_text()
        return row.removeprefix(label).strip()

    @contextmanager
    def markdown(self, label: str, within: Locator | None = None) -> Iterator[Locator]:
        """Show a Markdown metadata value during the block. A table without links is visible without a click."""
        expect(self.metadata_row(label, within)).to_be_visible()
        button = self.metadata_row(label, within).get_by_text("[Show Markdown]")
        if not button.count():
            yield self.metadata_row(label, within)
            return
        dialogs = self.page.get_by_role("dialog")
        n_open = dialogs.count()
        button.click()
        expect(dialogs).to_have_count(n_open + 1)
        dialog = dialogs.last
        expect(dialog.get_by_text(label, exact=True)).to_be_visible()
        yield dialog
        self.read()
        dialog.get_by_role("button", name="Close").click()
        expect(dialogs).to_have_count(n_open)

    def wait_for_plots(self) -> None:
        """Wait until the page has plots and all of them are drawn."""
        expect(self.page.locator("canvas").first).to_be_visible()
        self.page.evaluate(_WAIT_FOR_PLOTS, TIMEOUT_SECONDS * 1000)


def launchpad(job: str) -> str:
    """Return the path of a job's launchpad."""
    return f"/locations/{CODE_REPOSITORY}@{LOCATION}/jobs/{job}/playground"


def table(element: Locator) -> list[list[str]]:
    """Return the rows of a table with its header, after it is rendered."""
    expect(element.get_by_role("row").first).to_be_visible()
    return [row.inner_text().split("\t") for row in element.get_by_role("row").all()]


@contextmanager
def opened_page() -> Iterator[Page]:
    """Start the browser with an empty profile, and close it after the block."""
    program = shutil.which("chromium")
    assert program is not None, "chromium is not installed"
    timeout_ms = TIMEOUT_SECONDS * 1000
    expect.set_options(timeout=timeout_ms)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=_FLAGS, timeout=timeout_ms)
        try:
            context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
            context.set_default_timeout(timeout_ms)
            context.add_init_script("localStorage.setItem('dagster-nav-collapsed', 'true')")  # more space for the page
            yield context.new_page()
        finally:
            browser.close()


@contextmanager
def opened_pages(topology: Topology, folder: Path) -> Iterator[Pages]:
    """Start the browser for the pages of the deployment."""
    with opened_page() as page:
        yield Pages(page, topology, folder)
