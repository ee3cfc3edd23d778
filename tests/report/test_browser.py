"""The page of an audited run in a real browser: no hostile text runs, and the map works."""

import shutil

import pytest
import torch
from PIL import Image

from nearsay.batch import Files
from nearsay.report import audit_page
from report.making import PAYLOADS, make_findings, render_with

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Open a page; it must end without having asked, fetched or complained."""
    troubles = []

    def open_page(html, **choices):
        (tmp_path / "report.html").write_text(html, "utf-8")
        page = browser.new_context(**choices).new_page()
        page.on("dialog", lambda dialog: (troubles.append(dialog.message), dialog.dismiss()))
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on(
            "request",
            lambda request: (
                request.url.startswith(("file:", "data:")) or troubles.append(request.url)
            ),
        )
        page.goto((tmp_path / "report.html").as_uri())
        return page

    yield open_page
    assert troubles == []


@pytest.fixture
def pictures(tmp_path):
    for number in range(15):
        Image.new("RGB", (60, 50), (0, 16 * number, 200)).save(tmp_path / f"{number}.png")
    return Files(tmp_path, tuple(f"{number}.png" for number in range(15)))


def test_hostile_texts_do_nothing_in_a_browser(opened, tmp_path, monkeypatch):
    page = opened(render_with(PAYLOADS, tmp_path, monkeypatch))
    assert page.locator("script").count() == 2
    page.focus("#atlas-canvas")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert "given: " in page.locator("#atlas-tip").inner_text()
    assert page.locator("#atlas-class option").all_inner_texts()[1] == PAYLOADS[0]
    assert page.locator("#atlas-tip *").evaluate_all(
        "all => [...new Set(all.map(e => e.tagName))].sort()"
    ) == ["P"]


def test_the_map_tells_of_a_point_by_key_by_pointer_and_by_touch(opened, pictures):
    page = opened(
        audit_page.render(make_findings(["cat", "dog", "emu"], inputs=pictures)), has_touch=True
    )
    canvas, tip = page.locator("#atlas-canvas"), page.locator("#atlas-tip")
    canvas.focus()
    page.check("#atlas-only")
    canvas.focus()
    page.keyboard.press("ArrowUp")
    told = tip.inner_text()
    assert "seems: " in told
    assert "suspicious" in told
    assert tip.locator("canvas").count() == 1
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    page.uncheck("#atlas-only")
    x, y = page.evaluate(WHERE)
    page.mouse.move(x, y)
    assert "example" in tip.inner_text() or ".png" in tip.inner_text()
    page.mouse.move(2, 2)
    assert tip.is_hidden()
    page.touchscreen.tap(x, y)
    assert tip.is_visible()


WHERE = """() => {
  const canvas = document.getElementById("atlas-canvas"), box = canvas.getBoundingClientRect();
  const { width, height } = canvas;
  const pixels = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  for (let at = 3; at < pixels.length; at += 4)
    if (pixels[at] > 200) {
      const place = (at - 3) / 4, row = Math.floor(place / width);
      const left = box.left + 1 + (place % width) * box.width / width;
      return [left, box.top + 3 + row * box.height / height];
    }
}"""


@pytest.mark.parametrize("width", [1400, 390])
def test_nothing_is_wider_than_the_window(opened, pictures, width):
    names = [name * 12 for name in ("cat ", "dog", "emu-")]
    page = opened(
        audit_page.render(make_findings(names, inputs=pictures)),
        viewport={"width": width, "height": 800},
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_tensors_of_images_are_shown_too(opened):
    images = torch.arange(15).to(torch.uint8)[:, None, None, None].repeat(1, 3, 8, 8)
    page = opened(audit_page.render(make_findings(["cat", "dog", "emu"], inputs=images)))
    widths = page.locator("img").evaluate_all("all => all.map(each => each.naturalWidth)")
    assert len(widths) >= 3
    assert set(widths) == {8}
