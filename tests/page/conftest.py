"""A browser, and pages that are served by `elche page`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from tests.harness import leaks
from tests.harness.waiting import until

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run"),
    *("disable-background-networking", "disable-component-update", "disable-sync"),
    *("hide-scrollbars", "disable-dev-shm-usage"),
)
DRIVERS: set[int] = set()
"""Processes whose browsers may outlast a test."""


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = leaks.snapshot(DRIVERS)
    yield
    left = leaks.leaks_since(before, 60.0, lambda: DRIVERS)
    assert not left, "the test left behind:\n" + "\n".join(left)


class Browser:
    """Chromium, with what the page's own scripts know."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        self.driver.get(address)
        self.wait_loaded()

    def wait_loaded(self) -> None:
        script = "return !!(window.Bokeh?.documents[0]?.is_idle)"
        until(lambda: self.driver.execute_script(script), poll_s=0.1)

    def column(self, source: str, name: str) -> list[Any]:
        """A column of a chart's data; [] before there is one."""
        # While charts are replaced, two models have the name.
        script = """
            try {
                const source = Bokeh.documents[0].get_model_by_name(arguments[0])
                return source ? Array.from(source.data[arguments[1]]) : []
            } catch { return [] }
        """
        return list(self.driver.execute_script(script, source, name))

    def text(self, name: str) -> str:
        """Visible text of a block of the page."""
        script = (
            "const model = Bokeh.documents[0].get_model_by_name(arguments[0])\n"
            "return Bokeh.index.get_one(model)?.el.shadowRoot.textContent"
        )
        return str(self.driver.execute_script(script, name))

    def resize(self, width: int, height: int = 2400) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        command = "Emulation.setDeviceMetricsOverride"
        self.driver.execute_cdp_cmd(command, {**size, "mobile": width < 500})

    def prefer(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [feature]}
        )

    def save(self, name: str) -> Path:
        path = ROOT / "build" / "page" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        assert self.driver.save_screenshot(str(path))
        return path

    def complaints(self) -> list[str]:
        log = self.driver.get_log("browser")
        bad = ("SEVERE", "WARNING")
        return [each["message"] for each in log if each["level"] in bad]


def chromium_at(profile: Path) -> Any:
    """A headless Chromium with an empty profile."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in FLAGS:
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = Service(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_script_timeout(120)
    return driver


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    driver = chromium_at(tmp_path_factory.mktemp("profile"))
    DRIVERS.add(driver.service.process.pid)
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Browser]:
    browser = Browser(chromium)
    browser.resize(1280)
    yield browser
    chromium.get("about:blank")
    assert browser.complaints() == []


@pytest.fixture
def served() -> Iterator[Callable[[Path], str]]:
    """Serves a folder's page, and returns its address."""
    started = []

    def serve(folder: Path) -> str:
        command = [sys.executable, "-m", "elche", "page", str(folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        return process.stdout.readline().strip()

    yield serve
    for process in started:
        process.terminate()
        process.communicate(timeout=30)
