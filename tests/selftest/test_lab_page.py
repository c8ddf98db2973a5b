"""The report of the lab in a real browser: the system's Chromium, where one is installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="not checked: selenium is missing")
pytest.importorskip("matplotlib", reason="the lab draws with matplotlib")

from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

from selftest.test_lab import folder  # noqa: E402, F401

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="not checked: no Chromium here"),
]


@pytest.fixture(scope="module", params=["light", "dark"])
def browser(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    profile = tmp_path_factory.mktemp("chromium")
    words = ["headless", "disable-gpu", "no-first-run", "disable-background-networking"]
    words += ["disable-component-update", "disable-sync", f"user-data-dir={profile}"]
    words += ["no-sandbox"] if os.geteuid() == 0 else []
    words += ["force-dark-mode"] if request.param == "dark" else []
    for word in words:
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # The path of the driver, or selenium would look for one in the network.
    service = webdriver.ChromeService(executable_path=DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    media = [{"name": "prefers-color-scheme", "value": request.param}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    yield driver
    driver.quit()


@pytest.mark.parametrize("width", [380, 1200])
def test_it_shows_every_plot_asks_for_nothing_and_fits(browser, folder, width):  # noqa: F811
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get((folder / "index.html").as_uri())
    assert [line for line in browser.get_log("browser") if line["level"] == "SEVERE"] == []
    asked = browser.execute_script("return performance.getEntriesByType('resource').length")
    assert asked == 0
    plots = browser.find_elements(By.CSS_SELECTOR, "figure svg")
    assert len(plots) == 2
    assert all(100 < plot.size["width"] <= width and plot.size["height"] > 50 for plot in plots)
    # nothing but a table, which scrolls by itself, is wider than the screen
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def test_light_and_dark_differ_and_text_can_be_read(browser, folder):  # noqa: F811
    browser.get((folder / "index.html").as_uri())
    style = "return getComputedStyle(document.body)"
    dark = browser.execute_script("return matchMedia('(prefers-color-scheme: dark)').matches")
    ink, paper = (browser.execute_script(f"{style}.{key}") for key in ("color", "backgroundColor"))
    light, ground = (_light(colour) for colour in (ink, paper))
    assert (light > ground) == dark
    assert (max(light, ground) + 0.05) / (min(light, ground) + 0.05) > 7  # WCAG AAA


def _light(colour: str) -> float:
    """The relative luminance of rgb(r, g, b), from 0 to 1, as WCAG 2 has it."""
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_it_can_be_used_by_keyboard(browser, folder):  # noqa: F811
    browser.get((folder / "index.html").as_uri())
    seen = []
    for _ in range(8):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        here = browser.switch_to.active_element
        seen.append(here.get_attribute("href") or here.get_attribute("class"))
    assert seen[0].endswith("#content")  # first of all, a way past the list
    assert any(word.endswith("#tiny") for word in seen)
    assert any(word.endswith("#claims") for word in seen)
    assert "table" in seen
