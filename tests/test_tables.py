"""Tables as LaTeX and HTML: golden text, escaping, reasons, bold only with significance; macros and the headline."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from benchlib import compare, frames, headline, tables
from benchlib.typeset import PREAMBLE, Cell, Column, Table, escape_tex, redact
from tests import synthetic

SMALL = Table(
    "small",
    "Rates & ratios of a_b",
    (Column("Method_x", kind="text"), Column("Rate", "tok/s", "All"), Column("Share", "%", "All", decimals=1)),
    (
        "TP 1",
        (Cell(text="auto"), Cell(158.23, 3.06, bold=True), Cell(text="—")),
        (Cell(text="<b16>"), Cell(9.5, 0.4), Cell(12.34)),
        (Cell(text="b32"), Cell(text="failed"), Cell(5.0)),
    ),
    ("n = 3; 50% of #1",),
)
GOLDEN = r"""\begin{table}[htbp]
\centering\footnotesize\setlength{\tabcolsep}{4pt}
\begin{threeparttable}
\caption{Rates \& ratios of a\_b}\label{tab:small}
\begin{tabular}{@{}lS[table-format=3.1(2)]S[table-format=2.1]@{}}
\toprule
\multicolumn{1}{c}{} & \multicolumn{2}{c}{All} \\
\cmidrule(lr){2-3}
{Method\_x} & {Rate} & {Share} \\
{} & {tok/s} & {\%} \\
\midrule
\addlinespace[2pt]\multicolumn{3}{@{}l}{\textit{TP 1}} \\
auto & \bfseries 158.2(31) & {---} \\
\textless{}b16\textgreater{} & 9.5(4) & 12.3 \\
b32 & {failed} & 5.0 \\
\bottomrule
\end{tabular}
\begin{tablenotes}[flushleft]\footnotesize
\item n = 3; 50\% of \#1
\end{tablenotes}
\end{threeparttable}
\end{table}
"""


@cache
def build(*paths: Path) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, Table]]:
    loaded = frames.load_campaigns(paths)
    results = compare.build_results(loaded)
    scaling = compare.build_scaling(results)
    source = headline.source_note(frames.build_provenance(loaded))
    return results, scaling, tables.build_tables(results, scaling, compare.build_ab(results), source)


def row_of(table: Table, label: str, *, group: int = 0) -> tuple[Cell, ...]:
    seen = -1
    for row in table.rows:
        seen += isinstance(row, str)
        if not isinstance(row, str) and seen == group and row[0].text == label:
            return row
    raise AssertionError(f"{table.name} has no {label} in group {group}")


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.save_campaign(tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three starts, little noise: some differences are significant."""
    sweep = synthetic.build_sweep(starts=3, tree_budgets=(16, 64), tp_size=(1,))
    return synthetic.save_campaign(tmp_path_factory.mktemp("several"), sweep, noise=0.002)


def test_latex_is_as_expected() -> None:
    assert SMALL.to_latex() == GOLDEN


def test_html_escapes_and_keeps_the_uncertainty() -> None:
    page = SMALL.to_html()
    assert "<b>158.2 <small>± 3.1</small></b>" in page
    assert "&lt;b16&gt;" in page
    assert "Rates &amp; ratios" in page
    assert '<td class="number empty">failed</td>' in page
    assert page == SMALL._repr_html_()


def test_uncertainty_is_rounded_up_and_decides_the_decimals() -> None:
    columns = (Column("m", kind="text"), Column("v"))
    table = Table("t", "", columns, ((Cell(text="a"), Cell(68.1449, 0.0041)), (Cell(text="b"), Cell(68.1, 0.0))))
    # 0.0041 has two digits at four decimals, but three are the most that are printed: 5 thousandths cover it.
    assert "68.145(5)" in table.to_latex()
    # No spread at all is not printed as certainty.
    assert "68.100(1)" in table.to_latex()


def test_text_is_escaped_for_tex() -> None:
    assert escape_tex(r"50% of a_b & \x{y} ^~#$") == (
        r"50\% of a\_b \& \textbackslash{}x\{y\} \textasciicircum{}\textasciitilde{}\#\$"
    )
    assert escape_tex("é × 漢") == r"é \texttimes{} ?"


def test_texts_lose_addresses_and_paths() -> None:
    text = "http://127.0.0.1:30000/generate gave 500. Full log: /home/someone/x/server.log or ~/bench/a.log"
    assert redact(text) == "(address) gave 500. Full log: server.log or a.log"
    assert redact("tok/s and 3/4 stay") == "tok/s and 3/4 stay"
    assert len(redact("x" * 500)) == 240


def test_main_table_has_every_condition_and_prompt(campaign: Path) -> None:
    results, _, made = build(campaign)
    main = made["main"]
    assert [r for r in main.rows if isinstance(r, str)] == [
        "TP 1 · 96 new tokens · 1 request at once",
        "TP 2 · 96 new tokens · 1 request at once",
    ]
    assert len(main.rows) == 2 + 12
    row = row_of(main, "DDTree b16", group=1)
    expected = next(r for r in frames.rows_of(results) if r["run"] == "tp2-b16" and r["prompt"] == "all")
    values = [expected[k] for k in ("verify_tokens", "decode_tok_s", "speedup", "accept_length", "step_ms")]
    assert [cell.value for cell in row[1:6]] == values
    assert row[3].error == max(
        expected["speedup_high"] - expected["speedup"], expected["speedup"] - expected["speedup_low"]
    )
    assert row_of(main, "autoregressive")[3].text == "baseline"


def test_one_start_makes_nothing_bold_and_says_so(campaign: Path) -> None:
    _, _, made = build(campaign)
    assert all(r"\bfseries" not in table.to_latex() for table in made.values())
    assert any("1 start: no verdict" in note for note in made["main"].notes)


def test_bold_marks_what_beats_every_other_significantly(several: Path) -> None:
    results, _, made = build(several)
    best = max((r for r in frames.rows_of(results) if r["prompt"] == "all"), key=lambda r: float(r["decode_tok_s"]))
    for row in made["main"].rows:
        if not isinstance(row, str):
            assert row[2].bold == (row[0].text == best["label"])
    assert "over server starts" in made["main"].notes[0]


def test_accept_table_shows_whole_blocks_as_percent(campaign: Path) -> None:
    results, _, made = build(campaign)
    share = next(
        r["full_block_share"] for r in frames.rows_of(results) if r["run"] == "tp1-linear" and r["prompt"] == "fib"
    )
    row = row_of(made["accept"], "DFlash linear")
    assert row[3].value == pytest.approx(100 * share)
    assert all(row[0].text != "autoregressive" for row in made["accept"].rows if not isinstance(row, str))


def test_scaling_table_compares_with_the_ideal(campaign: Path, several: Path) -> None:
    row = row_of(build(campaign)[2]["scaling"], "autoregressive")
    assert row[1].text == "TP 1 to 2"
    assert row[3].value == pytest.approx(50 * (row[2].value or 0))
    assert build(several)[2]["scaling"].rows == ("No method was measured at two TP sizes under one set-up.",)


def test_cited_figures_are_marked_and_kept_apart(campaign: Path, tmp_path: Path) -> None:
    cited = build(campaign)[2]["cited"]
    assert "not ours" in cited.notes[0]
    first = cited.rows[0]
    assert not isinstance(first, str)
    assert (first[1].text, first[2].text) == ("about 26 tok/s", "—")  # another model, and 96 tokens
    ours = synthetic.build_sweep(
        engine="sglang", tp_size=(1,), tree_budgets=(15,), workload=synthetic.Workload(max_new_tokens=(256,)),
        engines={"sglang": {"model_path": "Qwen/Qwen3.6-27B"}},
    )  # fmt: skip
    rows = build(synthetic.save_campaign(tmp_path, ours))[2]["cited"].rows
    shown = {row[0].text: row[2].text for row in rows if not isinstance(row, str)}
    assert shown["TP 1, autoregressive"].endswith("tok/s")
    assert shown["TP 1, DDTree b15 over autoregressive, 256 tokens"].endswith("×")
    assert shown["TP 1, DDTree b15 over autoregressive, 1024 tokens"] == "—"


def test_failed_cells_say_why(tmp_path: Path) -> None:
    changes = {"tp1-b16": synthetic.fail_run, "tp1-linear": synthetic.fail_request}
    path = synthetic.save_campaign(tmp_path, synthetic.build_sweep(tp_size=(1,)), changes=changes)
    (path / "tp1-b64" / "record.json").unlink()
    results, scaling, made = build(path)
    main = made["main"]
    assert {c.text for c in row_of(main, "DDTree b16 (tp1-b16)")[1:]} == {"failed"}
    notes = "\n".join(main.notes)
    assert "tp1-b16: sglang exited with code 1" in notes
    assert "/home/someone" not in notes
    assert "tp1-linear fib: the stream broke off" in notes
    assert "tp1-b64" in notes
    macros = headline.build_macros(results, scaling, frames.build_provenance(frames.load_campaigns([path])))
    assert (macros["Conditions"], macros["ConditionsFailed"]) == ("6", "2")


@pytest.mark.parametrize(
    ("options", "word"),
    [({"weights": "random"}, "random weights"), ({"server_env": {"SIMULATE_ACC_LEN": "4"}}, "simulated acceptance")],
)
def test_unreal_speeds_are_labelled_in_every_table(tmp_path: Path, options: dict[str, object], word: str) -> None:
    sweep = synthetic.build_sweep(engines={"reference": options}, tree_budgets=(16,))
    results, _, made = build(synthetic.save_campaign(tmp_path, sweep))
    for name in ("main", "speedup", "steps", "accept", "scaling"):
        assert all(word in row for row in made[name].rows if isinstance(row, str)), name
    assert row_of(made["main"], "DDTree b16")[3].text == word.split()[0]
    assert headline.build_headline(results) == f"No speedup can be stated: {word}."


def test_headline_has_interval_n_verdict_and_oracle(campaign: Path, several: Path) -> None:
    text = headline.build_headline(build(campaign)[0])
    assert re.match(
        r"DDTree b16 decodes \d\.\d\d times as fast as autoregressive decoding at TP 2 \(95% interval "
        r"\d\.\d\d to \d\.\d\d; n = 3 \+ 3 rounds inside 1 server start; 1 start: no verdict; ",
        text,
    )
    assert text.endswith("the best of 4 tree budgets, chosen on these same prompts.")
    assert "n = 3 + 3 server starts; faster;" in headline.build_headline(build(several)[0])


def test_headline_is_the_fastest_and_not_the_largest_ratio(campaign: Path) -> None:
    results = build(campaign)[0].copy()
    pooled = results[(results["prompt"] == "all") & results["speedup"].notna()]
    slow = pooled["tp_size"] == 1
    results.loc[pooled.index[slow], "speedup"] *= 9
    assert "at TP 2 (" in headline.build_headline(results)


def test_macros_hold_the_quoted_numbers(campaign: Path, tmp_path: Path) -> None:
    results, scaling, _ = build(campaign)
    macros = headline.build_macros(results, scaling, frames.build_provenance(frames.load_campaigns([campaign])))
    text = headline.save_macros(macros, tmp_path).read_text()
    names = re.findall(r"\\newcommand\{\\bench([A-Za-z]+)\}", text)
    assert names == list(macros)
    assert rf"\newcommand{{\benchBestSpeedup}}{{{macros['BestSpeedup']}}}" in text
    used = set(re.findall(r"\\bench([A-Za-z]+)", Path("report/main.tex").read_text()))
    assert used <= set(macros)
    assert "Example CPU 9000" in macros["Source"]


@pytest.mark.parametrize("cut", [True, False])
def test_a_campaign_of_failures_alone_has_tables_too(tmp_path: Path, cut: bool) -> None:
    sweep = synthetic.build_sweep(tp_size=(1,), methods=("auto",), tree_budgets=())
    path = synthetic.save_campaign(tmp_path, sweep, changes={"tp1-auto": synthetic.fail_run})
    if cut:
        (path / "tp1-auto" / "record.json").write_text("{")
    results, scaling, made = build(path)
    label, word = ("tp1-auto", "unreadable") if cut else ("autoregressive (tp1-auto)", "failed")
    assert {cell.text for cell in row_of(made["main"], label)[1:6]} == {word}
    assert made["main"].notes[0] == "No cell was measured."
    macros = headline.build_macros(results, scaling, frames.build_provenance(frames.load_campaigns([path])))
    assert (macros["ConditionsFailed"], macros["BestMethod"]) == ("1", "none")


def test_two_campaigns_are_told_apart(campaign: Path, several: Path, tmp_path: Path) -> None:
    other = shutil.copytree(several, tmp_path / "other")
    groups = [row for row in build(campaign, other)[2]["main"].rows if isinstance(row, str)]
    assert [g.split(" · ")[0] for g in groups] == ["synthetic", "synthetic", "other"]


def test_plain_frames_become_tables_and_empty_ones_say_so() -> None:
    frame = pd.DataFrame([{"run": "a", "reason": "see /home/x/log.txt"}])
    table = tables.frame_table("failed", "Failed", frame, "None.")
    assert table.rows == ((Cell(text="a"), Cell(text="see log.txt")),)
    empty = tables.frame_table("failed", "Failed", frame.iloc[:0], "None.")
    assert empty.rows == ("None.",)
    assert "None." in empty.to_latex()


def test_the_ab_table_names_what_differs_and_what_is_shared(tmp_path: Path) -> None:
    sweep = synthetic.build_ab_sweep(
        nccl_profiles=("none", "pcie"), starts=3,
        variants={"slow": {"server_args": ("--disable-custom-all-reduce",)}},
    )  # fmt: skip
    table = build(synthetic.save_campaign(tmp_path, sweep, noise=0.002))[2]["ab"]
    heading, *rows = table.rows
    assert heading == "TP 4 · 48 new tokens · 1 request at once"
    texts = {(r[0].text, r[1].text): (r[3].text, r[4].text) for r in rows if not isinstance(r, str)}
    assert texts == {
        ("NCCL pcie against none", "autoregressive"): ("faster", "custom"),
        ("NCCL pcie against none", "autoregressive, slow"): ("faster", "nccl"),
        ("variant slow against without", "autoregressive"): ("slower", "custom / nccl"),
        ("variant slow against without", "autoregressive, pcie"): ("slower", "custom / nccl"),
    }
    first = next(r for r in rows if not isinstance(r, str))
    assert first[2].value == pytest.approx(100 * (1 / 0.9 - 1), abs=1)  # percent
    assert first[2].error is not None
    assert "past NCCL" in table.notes[-1]


def test_the_ab_table_says_when_there_is_nothing_to_compare(campaign: Path) -> None:
    table = build(campaign)[2]["ab"]
    assert table.rows == ("No two conditions differ in an NCCL profile, a NUMA policy or a variant alone.",)
    assert "No two conditions" in table.to_latex()


def test_cells_without_room_say_so(tmp_path: Path) -> None:
    work = synthetic.Workload(prompts=("fib", "json"), max_new_tokens=(48,), concurrency=(1, 8))
    sweep = synthetic.build_ab_sweep(tree_budgets=(64,), workload=work)
    main = build(synthetic.save_campaign(tmp_path, sweep, changes={"tp4-b64": synthetic.cap}))[2]["main"]
    assert {c.text for c in row_of(main, "DDTree b64 (tp4-b64)", group=1)[1:]} == {"capped"}
    assert row_of(main, "DDTree b64")[2].value is not None
    assert any("tp4-b64: requests-capped: not measured: the server runs 1" in note for note in main.notes)


@pytest.mark.latex
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_every_fragment_compiles_alone(tmp_path: Path) -> None:
    changes = {"tp1-b16": synthetic.fail_run}
    made = build(synthetic.save_campaign(tmp_path, changes=changes))[2]
    made["small"] = SMALL
    for table in made.values():
        text = f"\\documentclass{{article}}\n{PREAMBLE}\\begin{{document}}\n{table.to_latex()}\\end{{document}}\n"
        (tmp_path / f"{table.name}.tex").write_text(text, encoding="utf-8")
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", f"{table.name}.tex"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", check=False)
        assert done.returncode == 0, f"{table.name}: {done.stdout[-1500:]}"


def test_the_best_budget_is_predicted_and_held_against_the_measured(campaign: Path, tmp_path: Path) -> None:
    table = build(campaign)[2]["optimum"]
    assert [row[0].text.split(" · ")[0] for row in table.rows if not isinstance(row, str)] == ["TP 1", "TP 2"]
    first = table.rows[0]
    assert not isinstance(first, str)
    assert first[1].text.startswith("b")
    assert first[4].text.endswith("(oracle)")
    few = synthetic.save_campaign(tmp_path, synthetic.build_sweep(tp_size=(1,), tree_budgets=(16, 32)))
    (sentence,) = build(few)[2]["optimum"].rows
    assert isinstance(sentence, str)


def test_drift_is_told_where_starts_allow_it(campaign: Path, tmp_path: Path) -> None:
    assert "cannot be told" in str(build(campaign)[2]["drift"].rows[0])
    sweep = synthetic.build_sweep(tp_size=(1,), tree_budgets=(16,), starts=3)
    row = build(synthetic.save_campaign(tmp_path, sweep))[2]["drift"].rows[0]
    assert not isinstance(row, str)
    assert "95% interval" in (row[2].text or "")
    assert "9 starts" in (row[2].text or "")


def test_a_wrong_output_loses_its_speedup(campaign: Path) -> None:
    (loaded,) = frames.load_campaigns([campaign])
    reason = "fib parts at token 3, auto's gap there is 8.2 nats"
    struck = dataclasses.replace(loaded, not_lossless={"tp1-b16": reason, "tp1-auto": "x"})
    results = compare.build_results([struck])
    rows = {r["run"]: r for r in frames.rows_of(results) if r["prompt"] == frames.ALL}
    assert (rows["tp1-b16"]["speedup"], rows["tp1-b16"]["note"]) == (None, "wrong output")
    assert rows["tp1-b32"]["speedup"] is not None
    made = tables.build_tables(results, compare.build_scaling(results), compare.build_ab(results), "source")
    cell = row_of(made["main"], "DDTree b16")[3]
    assert cell.text == "wrong output"
    assert any(reason in note for note in made["main"].notes)


def test_starts_needed_come_from_the_campaigns_own_spread(campaign: Path, tmp_path: Path) -> None:
    assert compare.start_spreads(campaign) == {}
    sweep = synthetic.build_sweep(tp_size=(1,), tree_budgets=(), starts=3)
    ((name, (sd, df)),) = compare.start_spreads(synthetic.save_campaign(tmp_path, sweep)).items()
    assert (name.endswith("1 at once"), 0 < sd < 0.2, df) == (True, True, 4)


def test_the_optimum_of_each_setting_is_its_own(tmp_path: Path) -> None:
    """Two NCCL profiles are two machines: no curve runs through the points of both."""
    sweep = synthetic.build_sweep(
        engine="sglang", tp_size=(4,), tree_budgets=(15, 16, 32, 64), nccl_profiles=("none", "pcie"),
        engines={"sglang": {"model_path": "m"}},
    )  # fmt: skip
    rows = build(synthetic.save_campaign(tmp_path, sweep))[2]["optimum"].rows
    assert [row[0].text for row in rows if not isinstance(row, str)] == [
        "TP 4 · 96 new tokens · 1 request at once", "TP 4 · 96 new tokens · 1 request at once · pcie",
    ]  # fmt: skip


def test_a_narrow_table_with_long_notes_is_stretched() -> None:
    columns = (Column("Method", kind="text"), Column("Step", "ms"))
    rows = ((Cell(text="a"), Cell(1.0)),)
    note = "A sentence that is much longer than the table is wide, so that it would stand below it as a tower of words."
    assert (
        r"\begin{tabular*}{0.62\linewidth}{@{\extracolsep{\fill}}l"
        in Table("t", "C", columns, rows, (note,)).to_latex()
    )
    assert r"\end{tabular*}" in Table("t", "C", columns, rows, (note,)).to_latex()
    assert "tabular*" not in Table("t", "C", columns, rows, ("Short.",)).to_latex()
    wide = ((Cell(text="a" * 80), Cell(1.0)),)
    assert "tabular*" not in Table("t", "C", columns, wide, (note,)).to_latex()


def test_only_long_texts_are_broken() -> None:
    columns = (Column("Run", kind="text"), Column("Reason", kind="text"))
    for text, broken in (("short", False), ("a reason of very many words " * 4, True)):
        table = Table("t", "C", columns, ((Cell(text="a"), Cell(text=text)),), wrap=True)
        assert ("p{9cm}" in table.to_latex()) is broken
