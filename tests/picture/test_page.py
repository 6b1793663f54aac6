"""The HTML page: what it says, and that it works in a browser without a network."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from jaxwafer import planner
from jaxwafer.picture.page import page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def result():
    return planner.plan(
        "kimi-linear-48b-a3b-instruct", "wse-3t", strategy="uniform,minmax,first-fit", wafers=3, context=32768
    )


@pytest.fixture(scope="module")
def text(result):
    return page(result, result.plans[1])


def test_the_page_is_whole_html_and_refers_to_nothing_outside(text, result):
    opened = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag, attributes):
            given = dict(attributes)
            if tag not in ("meta", "br", "path", "use", "rect", "line") and not self.get_starttag_text().endswith("/>"):
                opened.append(tag)
            assert not given.get("src") and not (given.get("href") or "#").startswith(("http", "//"))

        def handle_endtag(self, tag):
            if opened and opened[-1] == tag:
                opened.pop()

    Parser().feed(text)
    assert not opened
    assert text.count('<tr data-plan="') == text.count("<section") == len(result.plans)
    assert "default-src 'none'" in text


def test_the_page_has_the_numbers_of_the_plans(text, result):
    plan = result.plans[1]
    assert f"{plan.speed.estimate:,.1f}" in text and f"<td>{plan.requests}</td>" in text
    titles = re.findall(r'title="(wafer \d+: [^"]*)"', text)
    assert len(titles) == sum(p.partition.wafers for p in result.plans)
    assert any("layers 0-" in title and "state" in title for title in titles)
    for source in plan.problem.device.sources.values():
        assert source.replace("'", "&#39;") in text


def test_names_are_escaped():
    result = planner.plan("qwen3-0.6b", "h200", strategy="minmax")
    name = "<script>alert(1)</script>"
    object.__setattr__(result.problem.model, "name", name)
    assert name not in page(result, result.best)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_shows_the_plan_that_is_clicked(text, result, tmp_path):
    """Chromium runs the page from a file, with no network, clicks the third row, and what it shows is read back."""
    script = """<script>
    const errors = [];
    addEventListener("error", e => errors.push(e.message));
    addEventListener("load", () => {
      const shown = () => [...document.querySelectorAll("section")].filter(s => s.offsetHeight > 0).map(s => s.id);
      const before = shown();
      rows[2].click();
      const after = shown();
      rows[0].dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}));
      const wafers = document.querySelectorAll("#plan-0 .wafer").length;
      const high = Math.max(...[...document.querySelectorAll("#plan-0 .wafer")].map(w => w.offsetHeight));
      const drawn = [...document.querySelectorAll("#plan-0 svg")].filter(s => s.getBoundingClientRect().height > 50);
      document.title = JSON.stringify([before, after, shown(), wafers, high, drawn.length, errors]);
    });
    </script></body>"""
    path = tmp_path / "page.html"
    path.write_text(text.replace("</body>", script))
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND",
               f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", done.stdout).group(1)
    wafers = result.plans[0].partition.wafers
    assert title == f'[["plan-1"],["plan-2"],["plan-0"],{wafers},220,3,[]]'
