"""The report in a real browser: it draws, its console is silent, it asks for nothing outside its own file, and it fits
a phone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.loop.loop_case import MODEL
from support.loop.report_room import plant_event, plant_gap, plant_histograms, scripted_run
from support.servers.browser import Browser
from support.trainer.search_evidence import build_search

from orchestrator.report.make import make_report
from orchestrator.run_dir.search_records import SearchRecords
from rollout.tokenization.tokenizer import load_tokenizer
from rollout.types.weights import PolicyVersion

DRAWN = {"timeline", "staleness", "ratios", "attribution-0", "phases", "dispatches"}
EMPTY_FIGURES = """
Array.from(document.querySelectorAll(".figure"))
  .filter(figure => !figure.querySelector(".trace, .point, .bars path")).map(figure => figure.id)
"""
CUT_TEXT = """
Array.from(document.querySelectorAll(".figure text")).filter(text => text.textContent).filter(text => {
  const box = text.getBoundingClientRect(), figure = text.closest(".figure").getBoundingClientRect();
  return box.width && (box.left < figure.left - 1 || box.right > figure.right + 1);
}).map(text => text.textContent)
"""
HIDDEN_COLUMNS = (
    "Array.from(document.querySelectorAll('.scroll')).filter(box => box.scrollWidth > box.clientWidth).map(box => "
    "box.innerText)"
)
"""Tables that a wide screen must show whole; on a phone they scroll."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with every figure and every kind of card."""
    run = scripted_run(tmp_path_factory.mktemp("page"), "run.steps=40")
    plant_gap(run, 5, routing=0.02, precision=0.004, unknown=0.001)
    plant_event(run, "replica_failed", 7, replica=0, reason="</script><script>document.title = 'taken over'</script>")
    plant_event(run, "evaluation", 9, score=0.5, fingerprint="a")
    plant_histograms(run)
    SearchRecords(run.gradloc, lambda: load_tokenizer(MODEL)).keep(PolicyVersion(1, 7), build_search())
    return make_report(run.path).path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.mark.parametrize(("width", "phone"), [(1280, False), (390, True)])
def test_a_report_draws_everything_silently_from_its_own_file(page: Path, browser: Browser, width: int, phone: bool):
    browser.asked.clear()
    browser.open(page.as_uri(), width, phone=phone)
    assert browser.errors == []
    assert set(browser.asked) == {page.as_uri()}
    assert (
        set(
            browser.value(
                "Array.from(document.querySelectorAll('.figure')).map(figure => figure.id.replace('figure-', ''))"
            )
        )
        == DRAWN
    )
    assert browser.value(EMPTY_FIGURES) == []
    assert browser.value("document.title") == "run: report"
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value(CUT_TEXT) == []
    assert phone or browser.value(HIDDEN_COLUMNS) == []


def test_the_page_may_load_nothing_from_outside(page: Path, browser: Browser, tmp_path: Path):
    """Its policy stops a request that something in it makes all the same; the browser says so in the console."""
    tampered = tmp_path / "tampered.html"
    tampered.write_text(page.read_text().replace("</body>", '<img src="http://127.0.0.1:9/pixel.png"></body>'))
    with Browser(tmp_path) as alone:
        alone.open(tampered.as_uri(), 1280)
        assert any("Content Security Policy" in error for error in alone.errors)


def test_a_page_that_fails_is_told_apart(page: Path, tmp_path: Path):
    """The browser of these tests sees what it looks for: errors, and figures that were not drawn."""
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace("Plotly.newPlot(", "Plotly.noSuchThing("))
    with Browser(tmp_path) as alone:
        alone.open(broken.as_uri(), 1280)
        assert any("noSuchThing" in error for error in alone.errors)
        assert len(alone.value(EMPTY_FIGURES)) == len(DRAWN)
