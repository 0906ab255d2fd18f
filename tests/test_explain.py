"""The page of tools/explain.py, as a browser shows it."""

import json
import os
import re
import shutil
import subprocess

import pytest
from ir import program_of, randn

from eyas.passes.pipeline import run_pipeline
from eyas.passes.program import Program
from eyas.passes.registry import parse_pipeline
from eyas.tools import explain

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--virtual-time-budget=8000",
)  # fmt: skip
TINY = ("tiny_gemma3", "--quant", "int4", "--max-seq-len", "64", "--max-prefill", "8")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "passes.html"
    assert explain.main([*TINY, "-o", str(out)]) == 0
    return out


def data_of(page) -> dict:
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text(), re.S)[1])


def shown(page, tmp_path, script: str = "") -> str:
    """The document as a browser leaves it after the page's own script and ``script``."""
    if CHROMIUM is None and not os.environ.get("EYAS_REQUIRE_BROWSER"):
        pytest.skip("no Chromium is installed")
    copy = tmp_path / "page.html"
    copy.write_text(page.read_text().replace("document.body.dataset.ready", f"{script}\ndocument.body.dataset.ready"))
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", copy.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert 'data-ready="yes"' in done.stdout, done.stderr[-2000:]
    return done.stdout


def text_of(html: str, section: str) -> str:
    part = re.search(rf'<(section|nav|aside) id="{section}".*?</\1>', html, re.S)[0]
    return re.sub(r"<[^>]+>", " ", part).replace("&gt;", ">").replace("&lt;", "<")


def test_every_pass_is_in_the_strip(page, tmp_path):
    strip = text_of(shown(page, tmp_path), "strip")
    for stage in data_of(page)["stages"][1:]:
        assert stage["spec"] in strip and f"{stage['rewrites']} rewrites" in strip


def test_the_diff_of_a_pass_shows_the_nodes_that_changed(page, tmp_path):
    names = [stage["spec"] for stage in data_of(page)["stages"]]
    script = f'stage = {names.index("midm_sdpa")}; method = "target_verify"; show();'
    html = shown(page, tmp_path, script)
    rows = re.findall(r'<tr class="(\w+)">(.*?)</tr>', html, re.S)
    removed = [re.sub(r"<[^>]+>", "", row) for kind, row in rows if kind == "removed"]
    added = [re.sub(r"<[^>]+>", "", row) for kind, row in rows if kind == "added"]
    assert any("aten.scaled_dot_product_attention.default" in row for row in removed)
    assert any("eyas.sdpa_midm.default" in row for row in added)
    assert re.search(r"eyas.sdpa_midm.default\s+0\s+1\s+\+1", text_of(html, "counts"))
    assert "its cache is a ring" in text_of(html, "refusals")
    assert "eyas.sdpa_midm.default" in text_of(html, "costs")


def test_a_node_shows_where_it_comes_from_and_where_it_goes(page, tmp_path):
    names = [stage["spec"] for stage in data_of(page)["stages"]]
    script = f'stage = {names.index("midm_sdpa")}; method = "target_verify"; show(); cone("sdpa_midm_default");'
    cone = text_of(shown(page, tmp_path, script), "cone")
    assert "%sdpa_midm_default" in cone and "input_pos" in cone and "cache_k" in cone and "o_proj_qweight" in cone
    assert "layers_0_mlp" not in cone


def test_search_and_buffers(page, tmp_path):
    html = shown(page, tmp_path, 'method = "prefill"; $("search").value = "argmax"; show();')
    assert "aten.argmax.default" in text_of(html, "hits") and "1 lines" in html
    buffers = text_of(html, "buffers")
    assert re.search(
        r"target\.layers\.0\.self_attn\.cache\.k\s+f32\[1,2,16,16\]\s+\S+\s+prefill, target_verify", buffers
    )


def test_the_page_asks_for_nothing_from_outside(page):
    assert not re.search(r"""(src|href)\s*=|https?://|@import|url\(""", page.read_text())


def test_text_of_a_graph_cannot_end_the_script():
    html = explain.render({"source": "</script><b>", "lines": ["</script><script>bad()"]})
    assert "bad()" in html and "</script><script>bad" not in html and "<b>" not in html.split("<style>")[0]


def test_a_graph_of_5000_nodes_stays_usable(tmp_path):
    """The whole page is there within the browser's budget, and shows a part of the long text at first."""

    def deep(module, x):
        for i in range(3200):
            x = x + i if i % 5 else x.chunk(2, dim=-1)[0].repeat(1, 1, 2)
        return x

    program = program_of(deep, randn(1, 5, 8))
    assert len(program.methods["forward"].graph.nodes) > 5000
    record = explain.Recording(1, 1)
    record.start(program)
    run_pipeline(program, parse_pipeline("split_copy_to_slice"), observers=[record])
    args = explain.parser().parse_args(["deep", "-o", "x.html"])
    out = tmp_path / "deep.html"
    out.write_text(explain.render(record.page(Program.of(program), args)))
    html = shown(out, tmp_path)
    assert "640 rewrites" in text_of(html, "strip")
    assert html.count("<tr") < 2000 and "show more" in html


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/page.html"], "no folder nowhere"),
        (["page.html", "--rows", "0"], "--rows must be positive"),
        (["page.html", "-p", "mid_sdpa"], "did you mean: midm_sdpa"),
    ],
)
def test_bad_requests(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert explain.main([*TINY, "-o", *arguments]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())
