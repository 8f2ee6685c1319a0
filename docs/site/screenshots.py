"""Take the screenshots of docs/play.md: python docs/site/screenshots.py (needs Chromium, Playwright, the weights)."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

FIGURES = Path(__file__).parents[1] / "figures"
AGREES = re.compile("agrees|结论一致")


def save(page: Any, name: str, full: bool = False) -> None:
    page.mouse.move(0, 0)
    page.wait_for_timeout(300)
    picture = Image.open(io.BytesIO(page.screenshot(full_page=full))).convert("RGB")
    small = picture.quantize(160, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    small.save(FIGURES / f"play-{name}.png", optimize=True)
    print(f"{name}: {(FIGURES / f'play-{name}.png').stat().st_size / 1000:.0f} kB")


def take(browser: Any, address: str) -> None:
    def opened(width: int, height: int, scheme: str, locale: str, fragment: str) -> Any:
        size = {"width": width, "height": height}
        context = browser.new_context(viewport=size, color_scheme=scheme, locale=locale, reduced_motion="reduce")
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.goto(address + fragment)
        page.locator("#prover", has_text=AGREES).wait_for(state="attached")
        return page

    page = opened(1240, 1010, "light", "en-US", "#s=What+would+you+like+to+eat&t=boiled+chicken&k=prefix&l=2")
    page.locator('[data-q="2"][data-k="9"]').click()
    page.locator("#prover", has_text=AGREES).wait_for()
    page.evaluate("scrollTo(0, 90)")
    save(page, "board")
    page = opened(1240, 1010, "dark", "zh-CN", "#s=你想吃啥&t=白切鸡&k=prefix&l=2&v=attention")
    page.locator(".thumbnail").nth(5).click()
    for number, button in enumerate(("write", "fill"), 1):
        page.locator(f"#{button}").click()
        page.locator(".run").nth(number - 1).wait_for()
    page.evaluate("scrollTo(0, 300)")
    save(page, "attention")
    page = opened(1240, 760, "light", "en-US", "#s=你想吃啥&t=白切鸡&k=causal&l=2&v=measured")
    page.locator('[data-q="3"][data-k="7"]').click()
    page.locator("#lens-help.bad").wait_for()
    page.evaluate("scrollTo(0, 460)")
    save(page, "measured")
    page = opened(1240, 1010, "light", "en-US", "#s=a&t=&p=writing")
    page.locator("#write-en").click()
    page.locator(".lane").nth(1).wait_for()
    page.locator("#step").fill("3")
    page.evaluate("scrollTo(0, 0)")
    save(page, "writing")
    page.locator("#write-both").uncheck()
    page.locator("#write-zh").click()
    page.locator("#beam-go").click()
    page.locator(".tree svg").wait_for()
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    save(page, "beams")
    page = opened(390, 844, "dark", "en-US", "#s=What+would+you+like+to+eat&t=boiled+chicken&k=permutation&n=4&l=2")
    page.locator("#order-title").scroll_into_view_if_needed()
    page.evaluate("scrollTo(0, 640)")
    save(page, "phone")


def main() -> None:
    command = [sys.executable, "-m", "allmask", "play", "--port", "0", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stdout is not None
        try:
            arguments = ["--disable-gpu", "--no-sandbox"]
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
            take(browser, server.stdout.readline().strip())
            browser.close()
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
