"""The pages in a real browser, without a network: they draw, say nothing to the console, and their sliders work."""

import shutil
import subprocess
import sys
from pathlib import Path

import made_up_runs
import pytest
from tiny import ROOT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt install chromium")
SIZES = {"desktop": {"width": 1200, "height": 900}, "phone": {"width": 390, "height": 844}}


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@pytest.fixture(params=SIZES)
def visit(request, chromium):
    """Opens a file at the size of a desktop and of a phone; afterwards nothing was fetched and nothing complained."""
    context = chromium.new_context(offline=True, viewport=SIZES[request.param])
    page, complaints, requests = context.new_page(), [], []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda asked: requests.append(asked.url))

    def open_file(path: Path):
        page.goto(path.as_uri())
        return page

    yield open_file
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # nothing is wider than the screen
    context.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    made_up_runs.write_frontier(folder / "runs", 131072)
    made_up_runs.write(folder / "runs" / "long", made_up_runs.record_of("naive", 64, peak_allocated_gib=3.0), 30)
    (folder / "runs" / "half").mkdir()
    (folder / "runs" / "half" / "record.jsonl").write_text('{"status": "o')
    command = [sys.executable, ROOT / "scripts" / "report.py", "runs", "--out", "out"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return folder / "out" / "index.html"


def widths(page) -> list[float]:
    """Of the bars, in pixels, from naive by the textbook to vocabulary slabs."""
    return page.eval_on_selector_all(
        ".bar", "bars => bars.map(bar => [...bar.querySelectorAll('.segment')].reduce((w, s) => w + s.clientWidth, 0))"
    )


def test_the_report_draws_its_figures_and_holds_the_calculator(visit, report):
    page = visit(report)
    for name in ("training_loss", "peak_memory", "speed", "frontier"):
        page.wait_for_selector(f"#{name} svg.marks", timeout=20_000)
        assert page.locator(f"#{name} svg path").count() > 5
    assert page.locator("#peak_memory svg").text_content().count("limit 24 GiB") >= 1
    assert page.locator("tbody tr").count() == len(list((report.parent.parent / "runs").iterdir()))
    assert page.locator(".bar").count() == 5
    assert report.stat().st_size < 2_000_000


@pytest.mark.parametrize("name", ["vocab", "tokens", "width", "chunk"])
def test_a_slider_moves_the_bars_by_keyboard(visit, name):
    page = visit(ROOT / "docs" / "calculator.html")
    page.locator("#dtype").select_option("bf16,bf16")
    before = widths(page)
    slider = page.locator(f"#{name}-slider")
    spoken = slider.get_attribute("aria-valuetext")
    slider.focus()
    for _ in range(12):
        page.keyboard.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") != spoken
    assert slider.get_attribute("aria-valuetext") == page.locator(f"#{name}-words").inner_text()
    assert widths(page) != before


def test_a_chunk_of_all_tokens_is_as_large_as_inplace_and_the_sentence_says_so(visit):
    page = visit(ROOT / "docs" / "calculator.html")
    page.locator("#dtype").select_option("bf16,bf16")
    for number, name in ((512, "tokens"), (511, "chunk")):
        page.locator(f"#{name}").fill(str(number))
    cut = widths(page)
    assert cut[3] > cut[1]  # the fp32 sum of a large weight is more than eager's logits of few tokens
    assert (
        "more than naive; the fp32 sum of the weight's gradient is 100% of it. A chunk of all tokens"
        in page.locator("#sentence").inner_text()
    )
    page.locator("#chunk").fill("512")
    whole = widths(page)
    assert whole[2] <= whole[3] < 1.2 * whole[2]
    assert page.locator("#sentence").inner_text().startswith("The chunk holds all 512 tokens")
    page.locator("#chunk").fill("")  # while one types
    assert all(width >= 0 for width in widths(page))
