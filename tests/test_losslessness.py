"""Verdicts on outputs written by hand: equal, near ties, clear gaps, floors, and what cannot be told."""

from __future__ import annotations

import http.server
import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchlib import cli_validate
from benchlib import gaps as gaps_module
from benchlib.errors import LosslessnessError, RecordError, RequestError, SpecError
from benchlib.gaps import PromptGaps, load_gaps, measure_gaps, save_gaps
from benchlib.losslessness import (
    Check,
    first_divergence,
    not_lossless,
    validate_campaign,
    validate_loaded,
)
from benchlib.metrics import repetition_share
from benchlib.prompts import Prompt
from benchlib.record import CellRecord, RequestRecord, RunRecord, ServerRecord, load_record, load_requests, save_run
from benchlib.sampling import compare_samples, measure_sampling
from benchlib.spec import RunSpec

PROMPTS = ("fib", "qsort", "arith", "json")
LENGTH = 20
RIGHT = {name: tuple(100 * i + j for j in range(LENGTH)) for i, name in enumerate(PROMPTS)}
SECOND, THIRD = 7, 6
Outputs = dict[str, tuple[int, ...]]


def digest(prompt: str) -> str:
    return f"{prompt}-digest"


def leaving(at: int, *prompts: str, token: int = SECOND) -> Outputs:
    """Auto's outputs, but for these prompts, which take another token at one place: by default its second."""
    return {n: (*ids[:at], token, *ids[at + 1 :]) if n in prompts else ids for n, ids in RIGHT.items()}


def gaps(near: float, *, at: int = 9, clear: float = 2.0) -> dict[str, PromptGaps]:
    """Auto's: its second choice `near` nats behind at one token, `clear` at all others; its third a nat behind that."""
    every = tuple((0.0, gap, gap + 1.0) for gap in (near if i == at else clear for i in range(LENGTH)))
    return {
        digest(n): PromptGaps(output_ids=ids, best_ids=tuple((i, SECOND, THIRD) for i in ids), gaps=every)
        for n, ids in RIGHT.items()
    }


def save(
    campaign: Path,
    outputs: Outputs,
    *,
    asked: dict[str, PromptGaps] | None = None,
    info: dict[str, Any] | None = None,
    status: Any = "ok",
    env: dict[str, str] | None = None,
    **parameters: Any,
) -> None:
    """One run, each prompt's output twice over, a warm-up and a failed request that must not count."""
    spec = RunSpec.from_parameters({"campaign": "c", "max_new_tokens": [LENGTH], **parameters})
    place = {"max_new_tokens": LENGTH, "concurrency": 1, "sent_s": 0.0, "ticks": (), "end_s": 1.0}
    requests = []
    for prompt, ids in outputs.items():
        requests += [RequestRecord(prompt=prompt, round=n, output_ids=ids or None, **place) for n in (0, 1)]
        wrong = {"prompt": prompt, "round": 0, "output_ids": (1, 2)}
        requests += [RequestRecord(**wrong, warmup=True, **place), RequestRecord(**wrong, error="cut", **place)]
    cells = [
        CellRecord(prompt=n, max_new_tokens=LENGTH, concurrency=1, rounds=2, prompt_sha256=digest(n)) for n in outputs
    ]
    record = RunRecord(
        status=status,
        spec=spec,
        identity="",
        started_at="2026-11-29T12:00:00+00:00",
        duration_s=1.0,
        environment={},
        server=ServerRecord(
            url="http://127.0.0.1:1", env=env or {}, info={"dtype": "float32"} if info is None else info
        ),
        cells=tuple(cells),
    )
    save_run(campaign / spec.run_name, record, requests)
    if asked:
        save_gaps(campaign / spec.run_name, asked)


def tree(campaign: Path, outputs: Outputs, budget: int = 16, **parameters: Any) -> None:
    save(campaign, outputs, method="ddtree", tree_budget=budget, **parameters)


def chain(campaign: Path, outputs: Outputs, **parameters: Any) -> None:
    save(campaign, outputs, method="linear", **parameters)


def verdicts(campaign: Path) -> dict[str, str]:
    return {check.condition: check.verdict for check in validate_campaign(campaign).methods}


def check_of(campaign: Path, condition: str = "tp1-b16") -> Check:
    (found,) = [check for check in validate_campaign(campaign).methods if check.condition == condition]
    return found


# --- parts


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [((1, 2, 3), (1, 2, 3), None), ((1, 2, 3), (1, 5, 3), 1), ((1, 2), (1, 2, 3), 2), ((), (1,), 0), ((), (), None)],
)
def test_first_divergence(a: Sequence[int], b: Sequence[int], expected: int | None) -> None:
    assert first_divergence(a, b) == first_divergence(b, a) == expected


def test_repetition_share() -> None:
    assert repetition_share(range(100)) == 0
    # 93 runs of eight, three distinct ones in a loop of three tokens.
    assert repetition_share([1, 2, 3] * 33 + [1]) == 1 - 3 / 93
    # Ten tokens, then the same ten: runs 10, 11 and 12 of 13 were there before.
    assert repetition_share([*range(10), *range(10)]) == pytest.approx(3 / 13)
    assert repetition_share(range(15)) is None


# --- verdicts


def test_equal_outputs_are_lossless(tmp_path: Path) -> None:
    save(tmp_path, RIGHT)
    chain(tmp_path, RIGHT)
    tree(tmp_path, RIGHT)
    found = validate_campaign(tmp_path)
    assert found.verdict == "lossless"
    assert [c.outputs for c in found.methods] == [8, 8]
    assert found.methods[1].row()["share_identical"] == 1
    assert [c.condition for c in found.floors] == ["tp1-linear"]
    assert not_lossless(validate_campaign(tmp_path)) == {}


def test_a_clear_gap_is_a_fault(tmp_path: Path) -> None:
    save(tmp_path, RIGHT, asked=gaps(1e-5))
    tree(tmp_path, leaving(5, "json"))
    tree(tmp_path, RIGHT, start=2)
    tree(tmp_path, leaving(9, "fib"), budget=32)
    found = check_of(tmp_path)
    assert found.verdict == "NOT lossless"
    reason = "2 of 16 outputs differ from auto's: tp1-b16 left it at token 5 of json for one 2 nats behind"
    assert found.reason.startswith(reason)
    assert found.row()["first_divergence"] == 5
    assert verdicts(tmp_path)["tp1-b32"] == "within numeric noise"
    assert validate_campaign(tmp_path).verdict == "NOT lossless"
    # Every start of the condition loses its speedup, and no other.
    assert not_lossless(validate_campaign(tmp_path)) == {"tp1-b16": found.reason, "tp1-b16.2": found.reason}


def test_a_near_tie_is_numerics(tmp_path: Path) -> None:
    save(tmp_path, RIGHT, asked=gaps(1e-5))
    chain(tmp_path, RIGHT)
    tree(tmp_path, leaving(9, "fib"))
    found = check_of(tmp_path)
    assert found.verdict == "within numeric noise"
    assert "all at near ties (up to 0.001 nats); of the chain's 0 of 8" in found.reason
    (first, second) = found.divergences
    assert (first.position, first.expected, first.got, first.gap, first.beyond) == (9, 9, SECOND, 1e-5, False)
    assert second.prompt == "fib"


@pytest.mark.parametrize(
    ("token", "reason"), [(THIRD, "for one 1 nats behind auto's (a tie"), (8, "for one at least 1 nats behind auto's")]
)
def test_a_clear_third_token_is_no_tie(tmp_path: Path, token: int, reason: str) -> None:
    save(tmp_path, RIGHT, asked=gaps(1e-5))
    tree(tmp_path, leaving(9, "fib", token=token))
    assert check_of(tmp_path).verdict == "NOT lossless"
    assert reason in check_of(tmp_path).reason


def test_three_tokens_may_tie(tmp_path: Path) -> None:
    """Half precision ties them; of a fourth that was not asked for, nothing is known."""
    tied = {k: v.model_copy(update={"gaps": tuple((0.0, 0.0, 0.125) for _ in v.gaps)}) for k, v in gaps(0.0).items()}
    save(tmp_path, RIGHT, asked=tied, info={"dtype": "bfloat16"})
    tree(tmp_path, leaving(9, "fib", token=THIRD))
    tree(tmp_path, leaving(9, "fib", token=8), budget=32)
    assert verdicts(tmp_path) == {"tp1-b16": "within numeric noise", "tp1-b32": "cannot tell"}


def test_of_two_equal_tokens_auto_may_take_the_second(tmp_path: Path) -> None:
    swapped = {
        k: v.model_copy(update={"best_ids": tuple((SECOND, i, THIRD) for i in v.output_ids)})
        for k, v in gaps(0.0).items()
    }
    save(tmp_path, RIGHT, asked=swapped)
    tree(tmp_path, leaving(9, "fib"))
    assert check_of(tmp_path).verdict == "within numeric noise"


def test_an_early_end_is_a_fault(tmp_path: Path) -> None:
    save(tmp_path, RIGHT, asked=gaps(1e-5))
    tree(tmp_path, {**RIGHT, "fib": RIGHT["fib"][:9]})
    assert check_of(tmp_path).verdict == "NOT lossless"
    assert check_of(tmp_path).reason.endswith("left it at token 9 of fib, where it ended and auto went on")


def test_an_end_elsewhere_needs_no_gap_to_be_a_fault(tmp_path: Path) -> None:
    """Without EOS in common, one output is the other's beginning: nothing to do with the choice of a token."""
    save(tmp_path, {**RIGHT, "json": RIGHT["json"][:12]})
    tree(tmp_path, {**RIGHT, "fib": RIGHT["fib"][:9]})
    tree(tmp_path, RIGHT, budget=32)
    assert verdicts(tmp_path) == {"tp1-b16": "NOT lossless", "tp1-b32": "NOT lossless"}
    assert check_of(tmp_path, "tp1-b32").reason.endswith("token 12 of json, where it went on and auto had ended")


def test_the_clearest_fault_is_told_and_a_tie_at_the_limit_is_none(tmp_path: Path) -> None:
    asked = {
        k: v.model_copy(update={"gaps": ((0.0, 1e-3, 1.0), (0.0, 2.0, 3.0), *[(0.0, 5.0, 6.0)] * (LENGTH - 2))})
        for k, v in gaps(0).items()
    }
    save(tmp_path, RIGHT, asked=asked)
    tree(tmp_path, leaving(0, "fib"))
    assert check_of(tmp_path).verdict == "within numeric noise"
    both = {"fib": leaving(1, "fib")["fib"], "qsort": leaving(7, "qsort")["qsort"]}
    tree(tmp_path, RIGHT | both, budget=32)
    assert "token 7 of qsort for one 5 nats behind" in check_of(tmp_path, "tp1-b32").reason


@pytest.mark.parametrize(("dtype", "verdict"), [("float32", "NOT lossless"), ("bfloat16", "within numeric noise")])
def test_what_is_near_depends_on_the_arithmetic(tmp_path: Path, dtype: str, verdict: str) -> None:
    save(tmp_path, RIGHT, asked=gaps(0.2), info={"dtype": dtype})
    tree(tmp_path, leaving(9, "fib"))
    assert check_of(tmp_path).verdict == verdict


def test_an_unknown_gap_cannot_tell(tmp_path: Path) -> None:
    save(tmp_path, RIGHT)
    tree(tmp_path, leaving(9, "fib"))
    assert check_of(tmp_path).verdict == "cannot tell"
    assert "how far the token lay behind auto's is not known at 2 of these" in check_of(tmp_path).reason


def test_a_gap_after_other_tokens_is_unknown(tmp_path: Path) -> None:
    """The asked output had itself parted before: its gap there is another text's."""
    asked = {k: v.model_copy(update={"output_ids": (1, *v.output_ids[1:])}) for k, v in gaps(1e-5).items()}
    save(tmp_path, RIGHT, asked=asked)
    tree(tmp_path, leaving(9, "fib"))
    assert check_of(tmp_path).verdict == "cannot tell"


def test_a_tree_must_not_part_more_often_than_the_chain(tmp_path: Path) -> None:
    save(tmp_path, RIGHT, asked=gaps(1e-5))
    chain(tmp_path, RIGHT)
    tree(tmp_path, leaving(9, *PROMPTS))
    tree(tmp_path, leaving(9, *PROMPTS[:2]), budget=32)
    assert check_of(tmp_path).verdict == "NOT lossless"
    # 1 of the 70 ways to part eight prompts into two fours.
    assert "more often or earlier (p = 0.01" in check_of(tmp_path).reason
    assert verdicts(tmp_path)["tp1-b32"] == "within numeric noise"


def test_a_tree_must_not_part_earlier_than_the_chain(tmp_path: Path) -> None:
    early = {k: v.model_copy(update={"gaps": ((0.0, 1e-5, 1.0),) * LENGTH}) for k, v in gaps(0).items()}
    save(tmp_path, RIGHT, asked=early)
    chain(tmp_path, leaving(15, *PROMPTS))
    tree(tmp_path, leaving(2, *PROMPTS))
    tree(tmp_path, leaving(16, *PROMPTS), budget=32)
    assert verdicts(tmp_path) == {
        "tp1-linear": "within numeric noise", "tp1-b16": "NOT lossless", "tp1-b32": "within numeric noise",
    }  # fmt: skip


def test_starts_of_one_prompt_are_no_further_evidence(tmp_path: Path) -> None:
    save(tmp_path, RIGHT, asked=gaps(1e-5))
    for start in range(1, 11):
        chain(tmp_path, RIGHT, start=start)
        tree(tmp_path, leaving(9, "fib"), start=start)
    assert check_of(tmp_path).outputs == 80
    assert check_of(tmp_path).verdict == "within numeric noise"


def test_floors_widen_what_is_near(tmp_path: Path) -> None:
    save(tmp_path, RIGHT, asked=gaps(0.2), info={"dtype": "bfloat16"})
    chain(tmp_path, leaving(9, "fib"), start=1)
    every = {
        k: v.model_copy(update={"gaps": ((0.0, 0.2, 1.0),) * 9 + ((0.0, 0.35, 1.0),) * 11}) for k, v in gaps(0).items()
    }
    tree(tmp_path, leaving(10, "fib"))
    assert check_of(tmp_path).verdict == "NOT lossless"
    save_gaps(tmp_path / "tp1-auto", every)
    chain(tmp_path, leaving(8, "fib"))
    assert (check_of(tmp_path).verdict, check_of(tmp_path).near_tie) == ("within numeric noise", 0.4)


def test_a_faulty_chain_is_no_yardstick(tmp_path: Path) -> None:
    save(tmp_path, RIGHT, asked=gaps(0.9, at=9, clear=2.0))
    chain(tmp_path, leaving(5, "fib"))
    tree(tmp_path, leaving(9, "fib"))
    assert verdicts(tmp_path) == {"tp1-linear": "NOT lossless", "tp1-b16": "NOT lossless"}
    assert check_of(tmp_path).near_tie == 1e-3


def test_auto_over_restarts_is_a_floor(tmp_path: Path) -> None:
    half = {"dtype": "bfloat16"}
    save(tmp_path, leaving(9, "qsort"), info=half)
    save(tmp_path, RIGHT, asked=gaps(0.3), start=2, info=half)
    tree(tmp_path, leaving(9, "fib"))
    found = validate_campaign(tmp_path)
    (floor,) = found.floors
    # The start that was asked for its gaps is the one to be held against.
    assert (floor.condition, floor.outputs, floor.identical) == ("tp1-auto", 8, 6)
    assert floor.row()["largest_gap"] == 0.3
    assert found.methods[0].verdict == "within numeric noise"
    assert found.methods[0].near_tie == 0.6


@pytest.mark.parametrize(
    ("restart", "how"),
    [
        (leaving(5, "fib"), "at token 5 of fib, for a token 2 nats behind"),
        (leaving(5, "fib", token=8), "at token 5 of fib, for a token 3 nats behind"),
        ({**RIGHT, "fib": RIGHT["fib"][:10]}, "at token 10 of fib, its output ended elsewhere"),
    ],
)
def test_an_auto_that_is_not_its_own_excuses_nothing(tmp_path: Path, restart: Outputs, how: str) -> None:
    """A bad restart must not widen what counts as a tie: nothing that differs is judged then."""
    save(tmp_path, RIGHT, asked=gaps(1e-5))
    save(tmp_path, restart, start=2)
    tree(tmp_path, leaving(5, "qsort"))
    tree(tmp_path, RIGHT, budget=32)
    assert verdicts(tmp_path) == {"tp1-b16": "cannot tell", "tp1-b32": "lossless"}
    assert check_of(tmp_path).reason == f"auto is not its own: tp1-auto.2 left auto's first output {how}"
    assert check_of(tmp_path).near_tie == 1e-3


def test_a_lower_bound_does_not_widen_what_is_near(tmp_path: Path) -> None:
    """Of a token that was not asked for it is not known how far it lay behind."""
    asked = {k: v.model_copy(update={"gaps": ((0.0, 1e-4, 4e-4),) * LENGTH}) for k, v in gaps(0).items()}
    save(tmp_path, RIGHT, asked=asked)
    save(tmp_path, leaving(9, "json", token=8), start=2)
    tree(tmp_path, leaving(9, "fib"))
    assert (check_of(tmp_path).verdict, check_of(tmp_path).near_tie) == ("within numeric noise", 1e-3)


def test_budgets_are_held_against_one_another(tmp_path: Path) -> None:
    for budget, outputs in ((16, RIGHT), (32, RIGHT), (64, leaving(3, "json"))):
        tree(tmp_path, outputs, budget)
    found = {(c.condition, c.against): c.identical for c in validate_campaign(tmp_path).budgets}
    assert found == {("tp1-b32", "tp1-b16"): 8, ("tp1-b64", "tp1-b16"): 6, ("tp1-b64", "tp1-b32"): 6}


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"tp_size": 2}, "no auto run of the same model at TP 2"),
        ({"temperature": 1.0}, "outputs are sampled"),
        ({"server_env": {"SGLANG_SIMULATE_ACC_LEN": "4"}}, "acceptance was forced"),
        ({"server_args": ["--simulate-acc-len", "4"]}, "acceptance was forced"),
        ({"max_new_tokens": [5]}, ""),
    ],
)
def test_what_cannot_be_told(tmp_path: Path, parameters: dict[str, Any], reason: str) -> None:
    save(tmp_path, RIGHT)
    tree(tmp_path, RIGHT, **parameters)
    found = validate_campaign(tmp_path).methods[0]
    assert found.reason.startswith(reason)
    assert found.verdict == ("cannot tell" if reason else "lossless")


def test_outputs_without_ids_cannot_tell(tmp_path: Path) -> None:
    save(tmp_path, RIGHT)
    tree(tmp_path, dict.fromkeys(PROMPTS, ()))
    assert check_of(tmp_path).verdict == "cannot tell"
    assert check_of(tmp_path).row()["share_identical"] is None


def test_the_most_alike_auto_is_taken(tmp_path: Path) -> None:
    save(tmp_path, leaving(3, *PROMPTS))
    save(tmp_path, RIGHT, variant="other")
    tree(tmp_path, RIGHT, variant="other")
    assert check_of(tmp_path, "tp1-b16-other").against == "tp1-auto-other"
    assert check_of(tmp_path, "tp1-b16-other").verdict == "lossless"


def test_failed_and_unreadable_runs_are_left_out(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no finished run"):
        validate_campaign(tmp_path)
    assert not_lossless(validate_loaded(tmp_path, [])) == {}
    save(tmp_path, RIGHT)
    tree(tmp_path, leaving(1, *PROMPTS), status="failed")
    (tmp_path / "tp1-linear").mkdir()
    (tmp_path / "tp1-linear" / "record.json").write_text("{")
    found = validate_campaign(tmp_path)
    assert (found.methods, found.verdict) == ((), "cannot tell")


def test_loops_are_seen(tmp_path: Path) -> None:
    loop = dict.fromkeys(PROMPTS, (1, 2) * (LENGTH // 2))
    save(tmp_path, loop)
    tree(tmp_path, loop)
    assert check_of(tmp_path).repetition == 1 - 2 / 13


# --- the command


def test_validate_exits_with_3_for_a_fault(tmp_path: Path) -> None:
    save(tmp_path, RIGHT, asked=gaps(1e-5))
    tree(tmp_path, leaving(5, "json"))
    tree(tmp_path, RIGHT, budget=32)
    shown = CliRunner().invoke(cli_validate.app, [str(tmp_path)])
    assert shown.exit_code == 3
    for text in ("tp1-b16: NOT lossless: 2 of 8 outputs differ", "budgets that differ", "tp1-b32    lossless"):
        assert text in shown.output
    said = CliRunner().invoke(cli_validate.app, [str(tmp_path), "--json"])
    assert said.exit_code == 3
    found = json.loads(said.output)
    assert found["verdict"] == "NOT lossless"
    assert found["methods"][0]["divergences"][0]["gap"] == 2.0
    assert found["budgets"][0]["identical"] == 6


def test_validate_exits_with_0_without_a_fault(tmp_path: Path) -> None:
    save(tmp_path / "mine", RIGHT)
    tree(tmp_path / "mine", RIGHT)
    assert CliRunner().invoke(cli_validate.app, ["mine", "--results", str(tmp_path)]).exit_code == 0
    missing = CliRunner().invoke(cli_validate.app, ["other", "--results", str(tmp_path)])
    assert isinstance(missing.exception, SpecError)


# --- gaps


@pytest.fixture
def answering() -> Iterator[Callable[..., str]]:
    """A server that answers every POST: `answering(function of the body, status)` gives its address."""
    servers: list[http.server.HTTPServer] = []

    def start(answer: Callable[[Any], Any], status: int = 200) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                data = json.dumps(answer(body)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                """Tests are quiet."""

        servers.append(http.server.HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


PROMPT = Prompt("fib", {"text": "def fib"})


def test_gaps_are_asked_and_kept(tmp_path: Path, answering: Callable[..., str]) -> None:
    asked = []

    def answer(body: Any) -> Any:
        asked.append(body)
        top = [[[-0.25 - i, token + i, None] for i in range(5)] for token in (5, 8)]
        return {"output_ids": [5, 8], "meta_info": {"output_top_logprobs": top}}

    found = measure_gaps(answering(answer), [PROMPT], 2)
    assert found == {
        PROMPT.sha256: PromptGaps(
            output_ids=(5, 8),
            best_ids=((5, 6, 7, 8, 9), (8, 9, 10, 11, 12)),
            gaps=((0.0, 1.0, 2.0, 3.0, 4.0),) * 2,
        )
    }
    (body,) = asked
    assert (body["text"], body["return_logprob"], body["top_logprobs_num"]) == ("def fib", True, 5)
    assert body["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True}
    save_gaps(tmp_path, found)
    assert load_gaps(tmp_path) == found
    assert load_gaps(tmp_path / "none") == {}


def test_gaps_that_do_not_come_are_an_error(answering: Callable[..., str]) -> None:
    for answer, status, text in (
        ({"output_ids": [5], "meta_info": {}}, 200, "5 output_top_logprobs a token"),
        ({"error": {"message": "DFLASH does not support return_logprob"}}, 400, "HTTP 400: DFLASH does not support"),
    ):
        with pytest.raises(RequestError, match=text):
            measure_gaps(answering(lambda _, a=answer: a, status), [PROMPT], 2)
    with pytest.raises(RequestError, match="no answer"):
        measure_gaps("http://127.0.0.1:9", [PROMPT], 2)


@pytest.mark.parametrize(
    "answer",
    [[], {"meta_info": None}, {"meta_info": {"output_top_logprobs": [None]}}, {"meta_info": {}},
     {"meta_info": {"output_top_logprobs": [[[-0.1]] * 5]}}, {"meta_info": {"output_top_logprobs": [[3] * 5]}}],
)  # fmt: skip
def test_an_answer_of_another_form_is_an_error(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """And not a traceback that would take the timed rounds along."""
    monkeypatch.setattr(gaps_module, "post_json", lambda *_, **__: answer)
    with pytest.raises(RequestError, match=r"http://x: "):
        measure_gaps("http://x", [PROMPT], 2)


def test_gaps_of_schema_1_are_read(tmp_path: Path) -> None:
    one = {"output_ids": [5, 8], "second_ids": [6, 9], "gaps": [1.25, 0.0]}
    (tmp_path / "gaps.json").write_text(json.dumps({"schema_version": 1, "prompts": {"x": one}}))
    found = load_gaps(tmp_path)["x"]
    assert found == PromptGaps(output_ids=(5, 8), best_ids=((5, 6), (8, 9)), gaps=((0.0, 1.25), (0.0, 0.0)))
    assert [found.behind(0, token) for token in (5, 6, 7)] == [(0.0, True), (1.25, True), (1.25, False)]


@pytest.mark.parametrize("text", ["{", "[]", '{"prompts": {"x": {"gaps": []}}}', '{"prompts": 3}'])
def test_broken_gaps_are_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "gaps.json").write_text(text)
    with pytest.raises(RecordError, match="is broken"):
        load_gaps(tmp_path)
    save(tmp_path, RIGHT)
    (tmp_path / "gaps.json").rename(tmp_path / "tp1-auto" / "gaps.json")
    with pytest.raises(RecordError, match="is broken"):
        validate_campaign(tmp_path)


# --- sampled


def draw(rng: random.Random, n: int, shift: float = 0.0) -> list[tuple[int, ...]]:
    """Two tokens each; `shift` moves the second where the first is 0, as a leak between branches would."""
    out = []
    for _ in range(n):
        first = rng.choices(range(4), (5, 3, 2, 1))[0]
        chance = 0.5 + shift * (first == 0)
        out.append((first, int(rng.random() < chance)))
    return out


def test_equal_distributions_raise_no_more_alarms_than_stated() -> None:
    rng = random.Random(5)
    p = [compare_samples(draw(rng, 60), draw(rng, 60), rounds=99, seed=i).p_value for i in range(300)]
    # At a level of 5 %: 15 of 300 on average, 24 or more once in a hundred.
    assert 5 <= sum(value <= 0.05 for value in p) <= 24


def test_a_moved_conditional_is_found() -> None:
    rng = random.Random(6)
    found = compare_samples(draw(rng, 400), draw(rng, 400, shift=0.3))
    assert found.differ
    assert found.n == (400, 400)
    assert found.outcomes == 12  # four first tokens, eight pairs
    assert not compare_samples(draw(rng, 400), draw(rng, 400)).differ


def test_both_servers_are_sampled_with_seeds_of_their_own(answering: Callable[..., str]) -> None:
    seeds: list[int] = []

    def answer(body: Any) -> Any:
        assert body["text"] == ["def fib"] * 50
        own = [p["sampling_seed"] for p in body["sampling_params"]]
        seeds.extend(own)
        return [{"output_ids": [seed % 2, 1]} for seed in own]

    url = answering(answer)
    found = measure_sampling(url, url, PROMPT, count=50, new_tokens=2)
    assert len(set(seeds)) == 100
    assert not found.differ


def test_the_gate_stops_what_is_not_lossless(tmp_path: Path) -> None:
    save(tmp_path, RIGHT, asked=gaps(1e-5))
    tree(tmp_path, RIGHT)
    validate_campaign(tmp_path).require()
    with pytest.raises(LosslessnessError, match=r"1 runs of .* were not judged: tp1-b64: failed: x$"):
        validate_campaign(tmp_path).require({"tp1-b64": "failed: x"})
    tree(tmp_path, leaving(5, "fib"), budget=32)
    with pytest.raises(LosslessnessError, match=r"is NOT lossless, its speedups are struck: tp1-b32: 2 of 8") as caught:
        validate_campaign(tmp_path).require()
    assert caught.value.exit_code == 3


def test_figures_stand_without_gaps_that_cannot_be_read(tmp_path: Path) -> None:
    save(tmp_path, RIGHT, asked=gaps(1e-5))
    tree(tmp_path, leaving(5, "fib"))
    assert not_lossless(validate_campaign(tmp_path))
    (tmp_path / "tp1-auto" / "gaps.json").write_text("{")
    loaded = [(name, load_record(tmp_path / name), load_requests(tmp_path / name)) for name in ("tp1-auto", "tp1-b16")]
    assert not_lossless(validate_loaded(tmp_path, loaded)) == {}
