"""The whole report: notebook executed, HTML self-contained, PDF or the reason why there is none."""

from __future__ import annotations

import getpass
import html.parser
import json
import re
import shutil
import socket
import subprocess
from pathlib import Path

import nbformat
import pytest

from benchlib import frames, report, tables
from benchlib.errors import RecordError, ReportError
from benchlib.record import RequestRecord, RunRecord
from tests import synthetic

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--enable-logging=stderr",
]
# papermill leaves the event loop of its thread to the garbage collector, which may come at any test.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Outline(html.parser.HTMLParser):
    """Headings, images without alt text and addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> report.ReportResult:
    folder = tmp_path_factory.mktemp("report")
    sweep = synthetic.build_sweep(tree_budgets=(16,))
    path = synthetic.save_campaign(folder, sweep, changes={"tp2-b16": synthetic.fail_run})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report.shutil, "which", lambda name: None)
        return report.build_report([path], folder / "out")


def test_report_names_every_file_it_made(made: report.ReportResult) -> None:
    names = {p.name for p in made.tables}
    assert {"main.tex", "speedup.tex", "accept.tex", "scaling.tex", "cited.tex", "macros.tex", "preamble.tex"} <= names
    assert {"speedup.pdf", "speedup-1col.pdf", "speedup.png"} <= {p.name for p in made.figures}
    main = (made.html.parent / "main.tex").read_text()
    for kind, name in re.findall(r"\\(input|plot)\{([^}#]+)\}", main):
        file = f"{name}.tex" if kind == "input" else f"figures/{name}.pdf"
        assert (made.html.parent / file).is_file(), name


def test_without_latex_there_is_a_reason(made: report.ReportResult) -> None:
    assert made.pdf is None
    assert made.pdf_reason is not None
    assert "latexmk is not installed" in made.pdf_reason


def test_page_is_self_contained_and_starts_with_the_result(made: report.ReportResult) -> None:
    text = made.html.read_text()
    assert made.html.stat().st_size < 3e6
    outline = Outline(text)
    assert not {tag for tag, _ in outline.tags} & {"script", "link", "iframe", "object"}
    sources = [v for _, a in outline.tags for k, v in a.items() if k in {"src", "href", "srcset"}]
    assert all(v is not None and v.startswith(("#", "data:image/png")) for v in sources)
    images = [a for tag, a in outline.tags if tag == "img"]
    assert len(images) == 11
    assert all(len(a.get("alt") or "") > 40 for a in images)
    order = [text.index(mark) for mark in ('class="headline"', 'id="fig-speedup"', 'id="tab-main"', 'id="fig-decode"')]
    assert order == sorted(order)
    # Getting ready comes after the results.
    assert text.index("Parameters</h2>") > text.index('id="tab-cited"')


def test_contents_lead_to_every_section(made: report.ReportResult) -> None:
    outline = Outline(made.html.read_text())
    anchors = {a["id"] for tag, a in outline.tags if tag == "h2"}
    links = [a["href"] for tag, a in outline.tags if tag == "a"]
    assert links
    assert {f"#{a}" for a in anchors} == set(links)


def test_page_names_no_person_machine_or_path(made: report.ReportResult) -> None:
    text = re.sub(r"base64,[A-Za-z0-9+/=]+", "", made.html.read_text())
    for private in (str(report.ROOT), str(Path.home()) + "/", str(made.html.parent), "/home/", "127.0.0.1"):
        assert private not in text, private
    for name in (socket.gethostname(), getpass.getuser()):
        # Shorter ones (root, vm) are words of their own.
        assert len(name) < 5 or name not in text, name
    assert "campaigns = [" in re.sub(r"<[^>]+>", "", text)


def test_failed_run_is_named_with_its_reason(made: report.ReportResult) -> None:
    text = made.html.read_text()
    assert "tp2-b16" in text
    assert "sglang exited with code 1 after 41 s" in text


def test_executed_notebook_is_kept(made: report.ReportResult) -> None:
    cells = json.loads((made.html.parent / "report.ipynb").read_text())["cells"]
    assert any(cell.get("outputs") for cell in cells)


def test_notebook_follows_the_rules() -> None:
    notebook = nbformat.read(str(report.NOTEBOOK), as_version=4)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert notebook.cells[0].cell_type == "markdown"
    assert all(word in notebook.cells[0].source for word in ("Question", "Writes", "Takes"))
    assert len(code) <= 10
    assert all(len(c.source.splitlines()) <= 12 and not c.outputs for c in code)
    assert [c for c in code if "parameters" in c.metadata.get("tags", [])] == code[:1]
    before = [notebook.cells[i - 1].cell_type for i, c in enumerate(notebook.cells) if c.cell_type == "code"]
    assert set(before) == {"markdown"}


def write_notebook(folder: Path, text: str, *, kind: str = "text/plain") -> Path:
    output = nbformat.v4.new_output("display_data", {kind: text})
    cells = [nbformat.v4.new_markdown_cell("# Title"), nbformat.v4.new_code_cell("x", outputs=[output])]
    path = folder / "n.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def test_model_output_is_escaped_in_the_page(tmp_path: Path) -> None:
    text = report.build_page(write_notebook(tmp_path, "<script>alert(1)</script>"), ["c"])
    assert "&lt;script&gt;" in text


def test_an_external_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="self-contained"):
        report.build_page(write_notebook(tmp_path, "see https://example.org/x.js"), ["c"])


def test_with_full_provenance_an_address_may_be_shown_but_nothing_loaded(tmp_path: Path) -> None:
    text = report.build_page(write_notebook(tmp_path, "--proxy https://example.org/x"), ["c"], full=True)
    assert "https://example.org/x" in text
    path = write_notebook(tmp_path, '<img src="https://example.org/x.png">', kind="text/html")
    with pytest.raises(ReportError, match="self-contained"):
        report.build_page(path, ["c"], full=True)


def test_people_and_machines_are_named_only_when_asked(tmp_path: Path) -> None:
    private = ("/home/someone/models/m", "example-host-7", "GPU-11111111-2222-3333-4444-555555555555", "SECRET_SAUCE")
    path, host, uuid, variable = private

    def named(record: RunRecord, requests: list[RequestRecord]) -> tuple[RunRecord, list[RequestRecord]]:
        server = record.server.model_copy(
            update={"argv": ("python", "--model-path", path, "--host", host), "env": {variable: uuid}}
        )
        spec = record.spec.model_copy(update={"model_path": path})
        return record.model_copy(update={"server": server, "spec": spec}), requests

    sweep = synthetic.build_sweep(tp_size=(1,), tree_budgets=())
    campaign = synthetic.save_campaign(tmp_path, sweep, changes={run.run_name: named for run in sweep.runs()})
    loaded = frames.load_campaigns([campaign])
    shared, whole = (frames.build_provenance(loaded, full=full).to_string() for full in (False, True))
    assert not [text for text in private if text in shared]
    assert [text for text in private if text in whole] == list(private)
    table = tables.frame_table("p", "P", frames.build_provenance(loaded, full=True), "-", full=True)
    assert path in table.to_html()


def test_pages_are_small_enough_to_send(made: report.ReportResult) -> None:
    sample = Path(__file__).parents[1] / "results" / "laptop-sample" / "report.html"
    assert max(page.stat().st_size for page in (made.html, sample)) < 3_000_000


def test_the_gate_s_findings_are_in_the_appendix(made: report.ReportResult) -> None:
    trials = frames.rows_of(frames.build_detection())
    planted = [t for t in trials if t["planted"] != "nothing"]
    assert len(planted) == 9
    assert {t["verdict"] for t in planted} == {"NOT lossless"}
    assert not [t for t in trials if t["planted"] == "nothing" and "NOT" in t["verdict"]]
    table = (made.html.parent / "tables" / "detection.tex").read_text()
    assert table.count("NOT lossless") == 9


def test_a_broken_detection_table_is_an_error(tmp_path: Path) -> None:
    assert frames.build_detection(tmp_path / "none").empty
    (tmp_path / "detection.json").write_text('{"trials": [{"planted": "x"}]}')
    with pytest.raises(RecordError, match=r"is no detection table: KeyError\('method'\)"):
        frames.build_detection(tmp_path / "detection.json")


def test_failing_notebook_and_missing_parts_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = synthetic.save_campaign(tmp_path, synthetic.build_sweep(tp_size=(1,), tree_budgets=()))
    with pytest.raises(RecordError, match="not a folder"):
        report.build_report([tmp_path / "none"], tmp_path / "out")
    monkeypatch.setattr(report, "execute_notebook", lambda *_: "NameError: x")
    with pytest.raises(ReportError, match="NameError: x"):
        report.build_report([path], tmp_path / "out")
    monkeypatch.setattr(report, "NOTEBOOK", tmp_path / "none.ipynb")
    with pytest.raises(ReportError, match="clone"):
        report.build_report([path], tmp_path / "out")


def test_notebooks_write_below_the_repository_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert report.out_folder("report") == report.ROOT / "report"
    (tmp_path / "mine").mkdir()
    assert report.out_folder("mine") == Path("mine")
    assert report.out_folder(str(tmp_path)) == tmp_path


def test_broken_latex_is_told_by_its_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tables").mkdir()
    fake = tmp_path / "latexmk"
    fake.write_text("#!/bin/sh\necho hello; echo '! Missing $ inserted.'; exit 12\n")
    fake.chmod(0o755)
    monkeypatch.setattr(report.shutil, "which", lambda name: str(fake))
    assert report.build_pdf(tmp_path) == (None, "latexmk exited with code 12: ! Missing $ inserted.")
    fake.write_text("#!/bin/sh\nexec sleep 5\n")
    monkeypatch.setattr(report, "LATEX_TIMEOUT_S", 0.2)
    assert report.build_pdf(tmp_path) == (None, "latexmk did not finish in 0.2 s")


@pytest.mark.latex
@pytest.mark.skipif(shutil.which("latexmk") is None, reason="needs latexmk")
def test_main_tex_compiles_without_overfull_boxes(made: report.ReportResult, tmp_path: Path) -> None:
    out = made.html.parent
    pdf, reason = report.build_pdf(out)
    assert reason is None
    assert pdf is not None
    assert pdf.read_bytes().startswith(b"%PDF")
    command = ["pdflatex", "-interaction=nonstopmode", f"-output-directory={tmp_path}", "main.tex"]
    log = subprocess.run(command, cwd=out, capture_output=True, text=True, errors="replace", check=True).stdout
    assert "Overfull \\hbox" not in log


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_page_fits_its_window(made: report.ReportResult, tmp_path: Path, width: int) -> None:
    # The page has no script; a copy with one reports its layout to a frame around it, as narrow as no window can be.
    probe = (
        "<script>parent.postMessage(document.documentElement.scrollWidth+' '+innerWidth+' '"
        "+[...document.images].every(i=>i.complete&&i.naturalWidth>0),'*')</script></body>"
    )
    (tmp_path / "probe.html").write_text(made.html.read_text().replace("</body>", probe))
    frame = tmp_path / "frame.html"
    frame.write_text(
        "<script>onmessage=e=>{document.title=e.data}</script>"
        f'<iframe src="probe.html" style="border:0;width:{width}px;height:900px"></iframe>'
    )
    size = f"--window-size={width + 40},960"
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", size, "--virtual-time-budget=5000"]
    done = subprocess.run(
        [*command, "--dump-dom", frame.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    title = re.search(r"<title>(\d+) (\d+) (\w+)</title>", done.stdout)
    assert title is not None
    assert (int(title[2]), title[3]) == (width, "true")
    assert int(title[1]) <= width
    assert "CONSOLE" not in done.stderr
