"""Fixtures: a headless Chromium, and a function that opens report pages in the browser without network access."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from rltrain.batch.data_proto import DataProto
from rltrain.monitoring.report.page import write_report
from tests.made_runs import batch, made_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def pytest_terminal_summary(terminalreporter) -> None:
    """Print the figures that browser tests recorded. They depend on the machine, so no test asserts them."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")


def missing(what: str) -> None:
    """Skip the browser test that asks for the missing part `what`, or fail if `make browser-test` was run."""
    text = f"{what}: run `make browser-test`, which installs the missing part or prints instructions"
    if os.environ.get("RLTRAIN_BROWSER_TEST") == "required":
        pytest.fail(text)
    pytest.skip(text)


@pytest.fixture(scope="session")
def browser():
    """Start the system's Chromium or, if none is installed, Playwright's Chromium."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        missing("playwright is not installed")
    own = next(filter(None, map(shutil.which, BROWSERS)), None)
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox does not work for the root user.
    with sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=own, args=flags)
        except Error as error:
            missing(f"Chromium does not start ({str(error).splitlines()[0]})")
        yield opened
        opened.close()


@pytest.fixture
def opened(browser):
    """Return a function that opens a page of a run's report.

    The test fails if the opened page raises a JavaScript error or makes a network request.
    """
    contexts, problems = [], []

    def open_page(path: Path, **options):
        context = browser.new_context(**{"viewport": {"width": 1400, "height": 900}, "offline": True} | options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
        page.on("request", lambda request: None if request.url == path.as_uri() else problems.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-ready=yes]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def with_entropies(batch: DataProto) -> DataProto:
    """Return the batch with an entropy for each response token: 0.5, 0.75, 1, and so on."""
    return batch.with_values("responses", entropies=torch.arange(2, len(batch.values("responses")) + 2) / 4)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Write the report of a two-step run with entropies, a failed reward, an observation, and text like HTML."""
    folder = tmp_path_factory.mktemp("runs") / "made"
    first = batch(["12", "</script><b>x</b>", "a\nb"], uids=[7, 7, 8], scores=[1.0, 0.0, 0.5], observed=[(0, 1)])
    second = batch(["56", "78"], uids=[9, 9], scores=[0.25, 0.0], errors=["", "it broke"])
    made_run(folder, [with_entropies(first), with_entropies(second)])
    write_report([folder], folder / "report.html")
    return folder / "report.html"
