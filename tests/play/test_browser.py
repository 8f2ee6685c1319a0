"""The playground in a real browser: every panel is used, axe finds nothing serious, the console stays silent.

It needs Chromium (of the system) and Playwright (of the extra dev); without one of them all of it is skipped.
"""

from __future__ import annotations

import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiny

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("browser tests are skipped: there is no Chromium", allow_module_level=True)
pytest.importorskip("starlette", reason="browser tests are skipped: the extra serve is not installed")
api = pytest.importorskip("playwright.sync_api", reason="browser tests are skipped: Playwright is not installed")

WAIT = 30_000  # milliseconds


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page, served by this process, with a tiny model that reads English and Chinese."""
    import uvicorn

    from allmask.play.server import make_app

    folder = tiny.writer(tmp_path_factory.mktemp("play") / "writer")
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app([str(folder)]), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/play/"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu", "--no-sandbox"])
        yield found
        found.close()


class Page:
    """A page of its own that notes what the console says."""

    def __init__(self, browser: Any, address: str, **how: Any):
        size = how.pop("viewport", {"width": 1200, "height": 800})
        permissions = ["clipboard-read", "clipboard-write"]
        self.context = browser.new_context(
            viewport=size, reduced_motion="reduce", permissions=permissions, **{"locale": "en-US", **how}
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT)
        self.said: list[str] = []
        self.foreign: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self._note(request.url))
        self.address = address

    def _note(self, url: str) -> None:
        if not url.startswith((self.address.removesuffix("play/"), "blob:")):
            self.foreign.append(url)

    def open(self, fragment: str = "") -> Any:
        self.page.goto(self.address + fragment)
        self.page.locator("#prover", has_text=re.compile("agrees|结论一致")).wait_for(state="attached")
        return self.page

    def close(self) -> None:
        self.context.close()
        assert self.said == [] and self.foreign == []


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Page]:
    page = Page(browser, address)
    yield page
    page.close()


def cell(page: Any, row: int, column: int) -> Any:
    return page.locator(f'[role=gridcell][data-q="{row}"][data-k="{column}"]')


def agreed(page: Any) -> None:
    """Wait until the prover in Python has judged the present board."""
    page.wait_for_timeout(300)
    page.locator("#prover", has_text=re.compile("agrees|结论一致")).wait_for()


def test_the_board(opened: Page, tmp_path: Path):
    page = opened.open()
    page.fill("#source", "北京欢")
    page.fill("#target", "你好")
    page.locator("#matrix [role=rowheader]", has_text="欢").wait_for()
    agreed(page)
    assert page.locator("#matrix .yes").count() == 5 * 5 + 6 + 7 + 8  # [CLS] 北 京 欢 [SEP] | 你 好 [SEP]
    page.get_by_role("radio", name="causal").click()
    assert page.locator("#matrix .yes").count() == 8 * 9 // 2
    assert page.locator("#verdicts .bad").count() == 0
    page.get_by_role("radio", name="turns").click()  # [CLS] 北 京 are read, 欢 [SEP] written, 你 好 read, [SEP] written
    assert page.locator("#matrix .yes").count() == 3 * 3 + 4 + 5 + 2 * 7 + 8
    assert page.locator("#verdicts .bad").count() == 0
    page.get_by_role("radio", name="causal").click()
    # a click that breaks the order: 3 reads 5, so 4, which reads 3, knows the next token after two layers
    cell(page, 3, 5).click()
    page.locator(".path-card").wait_for()
    assert page.locator("#verdicts .bad").count() >= 3
    assert [cell(page, *where).inner_text() for where in ((3, 5), (4, 3))] == ["1", "2"]
    assert page.locator(".arrow").count() == 2
    agreed(page)
    # what the address says can be opened again, and gives the same board
    shared = page.url
    page.locator("#share").click()
    page.locator("#said", has_text="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == shared
    page.locator("#python").click()
    page.wait_for_function("shared => navigator.clipboard.readText().then((text) => text !== shared)", arg=shared)
    program = page.evaluate("navigator.clipboard.readText()")
    assert "Mask.causal" in program and "visible[3, 5] ^= True" in program
    for kind in ("svg", "png"):
        with page.expect_download() as started:
            page.locator(f"#{kind}").click()
        started.value.save_as(tmp_path / f"mask.{kind}")
        assert (tmp_path / f"mask.{kind}").stat().st_size > 1000
    page.goto("about:blank")
    page = opened.open("#" + shared.partition("#")[2])
    assert page.locator("#matrix .yes").count() == 37 and page.locator("#matrix .edited").count() == 1
    page.locator("#reset").click()
    assert page.locator("#matrix .edited").count() == 0
    page.select_option("#window", "2")
    assert page.locator("#matrix .yes").count() == 8 + 7
    page.get_by_role("radio", name="Reach").click()
    page.select_option("#layers", "3")
    assert page.locator("#matrix .yes").count() == 8 + 7 + 6 + 5
    cell(page, 3, 0).hover()
    assert page.locator("#matrix .path").count() == 3
    opened.foreign = [url for url in opened.foreign if url != "about:blank"]


def test_tokens_move_by_mouse_and_keyboard(opened: Page):
    page = opened.open("#s=red+cat&t=dog&k=bidirectional")  # [CLS] red cat [SEP] dog [SEP]
    assert page.locator(".zone .chip").count() == 6
    chip = page.locator(".axis .chip", has_text="dog")
    source, gap = chip.bounding_box(), page.locator(".gap").last.bounding_box()
    page.mouse.move(source["x"] + 8, source["y"] + 8)
    page.mouse.down()
    page.mouse.move(gap["x"] + 3, gap["y"] + 12, steps=4)
    page.mouse.up()
    page.get_by_role("radio", name="your own").wait_for()
    assert page.locator("#matrix .yes").count() == 5 * 5 + 6  # dog is known last
    page.locator(".axis .chip", has_text="cat").focus()
    page.keyboard.press("ArrowDown")  # into a document of its own
    assert page.locator("#matrix .yes").count() == 4 * 4 + 5 + 1
    assert "g=0.0.1" in page.url
    cell(page, 0, 0).focus()
    for key in ("ArrowRight", "ArrowDown", "Space"):
        page.keyboard.press(key)
    assert cell(page, 1, 1).get_attribute("class").split()[:2] == ["no", "edited"]
    assert "does not read" in cell(page, 1, 1).get_attribute("aria-label")
    agreed(page)


def test_the_weights_under_the_mask(opened: Page):
    page = opened.open("#s=red+cat+sleeps&t=blue&k=prefix")
    page.get_by_role("radio", name="Attention").click()
    page.locator(".thumbnail").first.wait_for()
    assert page.locator(".thumbnail").count() == 4 and page.locator("#matrix .weight").count() == 25 + 6 + 7
    page.locator(".thumbnail").nth(2).click()
    assert "layer 1, head 0" in page.locator("#lens-help").inner_text()
    page.get_by_role("radio", name="Measured").click()
    page.locator("#lens-help", has_text="exactly what the order promises").wait_for()
    cell(page, 0, 6).click()  # the source reads the last token of the target
    page.locator("#lens-help.bad", has_text="leak").wait_for()
    assert page.locator("#matrix .leak").count() >= 6
    for number, name in enumerate(("fill", "continue", "write"), 1):
        page.locator(f"#{name}").click()
        page.locator(".run").nth(number - 1).wait_for()
    assert page.locator(".run .problem").count() == 0 and page.locator(".run .share").count() == 5


def test_watching_it_write(opened: Page):
    page = opened.open()
    page.get_by_role("tab", name="Writing").click()
    page.fill("#write-text", "red cat sleeps 北京")
    page.locator("#write-go").click()
    page.locator(".lane").nth(1).wait_for()
    written = page.locator(".lane").first.locator("button.written").count()
    assert written >= 1 and "Cache" in page.locator(".lane").first.inner_text()
    page.locator("#step").fill("0")
    assert page.locator(".lane").first.locator("button.written").count() == 1
    other = page.locator(".lane").first.locator(".alternatives button:not(.right)").first
    name = other.locator(".share-token").inner_text()
    other.click()
    page.locator(".lane").first.locator("button.written", has_text=name).first.wait_for()
    page.locator("#beam-go").click()
    page.locator(".tree svg").nth(1).wait_for()
    assert page.locator(".tree .node.best").count() >= 2 and page.locator(".tree li").count() == 6


def test_titles_and_claims(opened: Page):
    page = opened.open("#s=red&t=&p=titles")
    page.locator("#title-zh").click()
    page.locator("#title-list li").nth(2).wait_for()
    page.get_by_role("tab", name="Titles").focus()
    page.keyboard.press("ArrowRight")
    page.locator("[data-claim=C14] button").click()
    page.locator("[data-claim=C14].holds img").wait_for()


def test_claims_and_errors_in_chinese(browser: Any, address: str):
    opened = Page(browser, address, locale="zh-CN")
    page = opened.open()
    page.fill("#source", "北" * 80)
    page.locator("#text-problem", has_text="个词元：棋盘最多 64 个，请缩短。").wait_for()
    assert opened.said.pop().startswith("Failed to load resource")  # the browser notes each answer of 422
    page.locator("#tab-claims").click()
    page.locator("[data-claim=C14] h3", has_text="C14 · 正弦位置的平移是旋转").wait_for()
    opened.close()


def test_text_is_never_taken_for_html(opened: Page):
    page = opened.open()
    page.fill("#source", "<img src=x onerror=alert(1)>")
    page.locator("#matrix [role=rowheader]").nth(3).wait_for()
    agreed(page)
    assert page.locator("main img").count() == 0


@pytest.mark.parametrize(("scheme", "locale", "width"), [("light", "en-US", 390), ("dark", "zh-CN", 1200)])
def test_accessible_in_every_panel(browser: Any, address: str, scheme: str, locale: str, width: int):
    run = pytest.importorskip("axe_playwright_python.sync_playwright", reason="browser tests without axe")
    opened = Page(browser, address, color_scheme=scheme, locale=locale, viewport={"width": width, "height": 800})
    page = opened.open("#s=red+cat&t=dog&k=causal&x=1,4&l=2")
    assert page.locator("html").get_attribute("lang") == ("en" if locale == "en-US" else "zh-Hans")
    for number in range(4):
        page.locator("[role=tab]").nth(number).click()
        if number == 1:
            page.fill("#write-text", "red cat")
            page.locator("#write-go").click()
            page.locator(".lane").nth(1).wait_for()
        found = run.Axe().run(page).response
        serious = [
            (one["id"], [node["html"][:120] for node in one["nodes"][:3]], one["nodes"][0]["failureSummary"])
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
        ]
        assert serious == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("#language").click()
    page.locator("#theme").click()
    assert page.locator("html").get_attribute("data-theme") == "light"
    opened.close()
