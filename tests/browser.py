"""A real browser for tests of the page: headless Chromium, driven by Selenium, where both are installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def why_no_browser() -> str:
    """Return why there is no browser here; empty: there is one."""
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        return "no chromium and chromedriver (Debian's packages chromium, chromium-driver)"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "no selenium (pip install selenium)"
    return ""


@contextlib.contextmanager
def browsing(folder: Path, width: int = 1280, height: int = 1600, is_dark: bool = False) -> Iterator[Any]:
    """Yield a driver of a new browser whose profile is in ``folder``."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={folder}")
    options.add_argument(f"--window-size={width},{height}")
    if is_dark:
        options.add_argument("--blink-settings=preferredColorScheme=0")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.binary_location = shutil.which("chromium") or ""
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"), env={**os.environ, "NO_PROXY": "*"})
    driver = webdriver.Chrome(options=options, service=service)
    try:
        if is_dark:
            features = [{"name": "prefers-color-scheme", "value": "dark"}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        yield driver
    finally:
        driver.quit()


def text_of(driver: Any, name: str) -> str:
    """Return the text of one of the page's parts, as it is now."""
    return str(driver.execute_script("return document.getElementById(arguments[0]).textContent", name))


def until(is_so: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """Wait for something to become true and return it."""
    deadline = time.monotonic() + limit_s
    while not (found := is_so()):
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.05)
    return found
