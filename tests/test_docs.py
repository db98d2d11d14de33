"""README and GUIDE: their commands work, what they link and name is there, and SCHEMA.md is what the models say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from benchlib import cli
from benchlib.schema import SCHEMA_FILE, build_schema
from benchlib.sweep import select_runs

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *(ROOT / "report").glob("*.md"), *(ROOT / "results").glob("*.md")]
SHOWN = [ROOT / "README.md", ROOT / "GUIDE.md"]
TOPOLOGY = "tests/data/topology/seed_8x_pcie_two_sockets.txt"
ENDS = {"|", ">", "2>&1", "&", "&&", ";"}  # of a command's own words
Words = list[str]


def shell_lines(path: Path) -> list[str]:
    """What stands in fences of shell text, without comments."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    text = "\n".join(body for language, body in fences if language in ("", "sh", "bash"))
    return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines()) if line]


def words_of(line: str) -> Words:
    """A line's words from the command's name to a pipe; `[--json]`, which may be left out, is taken as given."""
    words = shlex.split(line)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    own = words[: next((i for i, word in enumerate(words) if word in ENDS), len(words))]
    bare = [word[1:] if word.startswith("[-") else word for word in own]
    return [word if "[" in word else word.removesuffix("]") for word in bare]


LINES = [words for path in SHOWN for line in shell_lines(path) if (words := words_of(line))]
OURS = [words[1:] for words in LINES if words[0] == "benchlib"]
SWEEPS = [words for words in OURS if words[0] in ("plan", "sweep")]


def parsed(words: Words) -> dict[str, Any]:
    """The parameters that a command would be called with; a click usage error where it cannot be."""
    group: Any = typer.main.get_command(cli.app)
    context = group.make_context("benchlib", [*words])
    command = group.get_command(context, words[0])
    assert command is not None, f"no command {words[0]}"
    found: dict[str, Any] = command.make_context(words[0], words[1:], parent=context).params
    return found


def test_there_are_commands() -> None:
    assert {words[0] for words in OURS} >= {"plan", "sweep", "doctor", "topology", "validate", "compare", "report"}
    assert len(OURS) > 30
    assert words_of("A=1 benchlib topology [--from topo.txt] [--measure] 2>&1 | tee x") == [
        "benchlib", "topology", "--from", "topo.txt", "--measure",
    ]  # fmt: skip
    assert words_of("benchlib plan x --set workload.max_new_tokens='[256]'")[-1] == "workload.max_new_tokens=[256]"


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_a_command_of_ours_parses(words: Words) -> None:
    parsed(words)


def test_a_command_that_is_none_does_not_parse() -> None:
    for wrong in (["plan"], ["plan", "x.toml", "--nonsense"], ["place", "four"]):
        with pytest.raises(Exception, match=r"(?i)missing|no such option|valid integer|not a valid"):
            parsed(wrong)


@pytest.mark.parametrize("words", SWEEPS, ids=" ".join)
def test_sweeps_settings_and_runs_that_are_named_exist(words: Words) -> None:
    given = parsed(words)
    assert select_runs(cli._load(ROOT / given["sweep"], given["settings"]), given["only"] or ())


@pytest.mark.parametrize("words", [w for w in SWEEPS if w[0] == "plan" and "--topology" in w], ids=" ".join)
def test_plans_for_another_machine_are_made(
    words: Words, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    code, out, err = run(*(TOPOLOGY if word == "topo.txt" else word for word in words), "--results", tmp_path)
    assert (code, err) == (0, "")
    assert re.match(r"\d+ runs, \d+ to do, about", out)
    assert ("cannot start" in out) == ("--busy" in words)  # TP 8 needs all of them


@pytest.mark.parametrize("words", [w for w in OURS if w[0] == "topology" and TOPOLOGY in w], ids=" ".join)
def test_saved_topologies_are_shown(words: Words, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    assert out.count("GPU7") == 2


@pytest.mark.parametrize("path", SHOWN, ids=lambda p: p.name)
def test_make_targets_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", text, re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named
    assert named <= targets


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif not target.startswith("http"):
            assert (path.parent / target.partition("#")[0]).exists(), target


def test_the_guide_names_what_is_there() -> None:
    """Rows of its tables link files and name what to change in them."""
    rows = [line for line in (ROOT / "GUIDE.md").read_text().splitlines() if line.startswith("| [")]
    assert len(rows) >= 6
    for row in rows:
        files = [ROOT / target for target in re.findall(r"\]\(([^)]+)\)", row)]
        paths = [path for file in files for path in ([file] if file.is_file() else file.rglob("*.py"))]
        known = {word for path in paths for word in re.findall(r"\w+", f"{path.read_text()} {path.name}")}
        for name in re.findall(r"`([\w.]+)`", row.rpartition("](")[2]):
            assert set(name.split(".")) <= known, name


def test_the_schema_is_what_make_docs_would_write() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == build_schema(), "run `make docs`"


def test_the_schema_tells_its_history_and_every_field() -> None:
    text = build_schema()
    assert "- **1** first version.\n- **2** `server` gains placement" in text
    assert "- **2** output_ids, best_ids, gaps: `BEST` of each token." in text
    assert "| `tree_budget` | int or None | `null` | nodes beside the root; of `ddtree` alone |" in text
    assert "| `cells` | tuple[[CellRecord](#cellrecord), ...] | `[]` |" in text
    assert "| `memory_node` | int or None |  | None: unknown, or more than one |" in text
    assert "| `power_w` | float or None |  | W |" in text
