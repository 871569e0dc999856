"""The browser of the tests of pages."""

import os
import shutil

import pytest


@pytest.fixture
def page():
    """Return a page of a Chromium of this machine, which is never missing where the workflow runs."""
    found = [*filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))]
    if not found:
        end = pytest.fail if "GITHUB_ACTIONS" in os.environ else pytest.skip
        end("no Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found[0], args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": 800, "height": 600})
        browser.close()
