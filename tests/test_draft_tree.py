"""One round's tree: asked where the server can tell, checked, kept and read again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchlib import draft_tree
from benchlib.draft_tree import load_draft_tree, measure_draft_tree, save_draft_tree
from benchlib.errors import RecordError, RequestError
from benchlib.prompts import Prompt

PROMPT = Prompt("fib", {"text": "def fib"})
ROOT = {"token_id": 5, "text": " fib", "parent": -1, "probability": 1.0, "accepted": True}
CHILD = {"token_id": 6, "text": "(", "parent": 0, "probability": 0.75, "accepted": True}
OTHER = {"token_id": 7, "text": "[", "parent": 0, "probability": 0.25, "accepted": False}
TREE = {"step": 2, "accept_length": 2, "nodes": [ROOT, CHILD, OTHER], "bonus": {"token_id": 8, "text": "n"}}


@pytest.fixture
def answering() -> Iterator[Callable[[Any], tuple[str, list[Any]]]]:
    """Starts a server whose meta_info holds what is given; the bodies it was asked come with its address."""
    servers = []

    def start(meta: dict[str, Any]) -> tuple[str, list[Any]]:
        asked: list[Any] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked.append(orjson.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                data = orjson.dumps({"meta_info": meta})
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_tree_is_asked_kept_and_read(tmp_path: Path, answering: Any) -> None:
    url, asked = answering({"draft_tree": TREE})
    tree = measure_draft_tree(url, PROMPT, timeout_s=5)
    assert tree is not None
    assert (tree.prompt, tree.step, [node.text for node in tree.nodes], tree.bonus.text) == (
        "fib", 2, [" fib", "(", "["], "n",
    )  # fmt: skip
    sampling = {"temperature": 0.0, "max_new_tokens": 96, "ignore_eos": True}
    assert asked == [{"text": "def fib", "sampling_params": sampling, "return_draft_tree": 2}]
    save_draft_tree(tmp_path, tree)
    assert load_draft_tree(tmp_path) == tree
    assert load_draft_tree(tmp_path / "none") is None


def test_a_request_that_ended_before_has_no_tree(answering: Any) -> None:
    assert measure_draft_tree(answering({})[0], PROMPT, timeout_s=5) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"nodes": [ROOT, {**CHILD, "parent": 1}]}, "every other one comes after its parent"),
        ({"nodes": [{**ROOT, "parent": 0}]}, "node 0 is the root"),
        ({"nodes": [{**ROOT, "probability": 1.5}]}, "less than or equal to 1"),
        ({"nodes": []}, "at least 1 item"),
        ({"accept_length": 0}, "greater than or equal to 1"),
    ],
)
def test_a_tree_that_is_none_is_refused(answering: Any, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match="makes no sense") as caught:
        measure_draft_tree(answering({"draft_tree": TREE | change})[0], PROMPT, timeout_s=5)
    assert reason in str(caught.value)


@pytest.mark.parametrize("answer", [{}, [], {"meta_info": None}, {"meta_info": {"draft_tree": 3}}])
def test_an_answer_of_another_form_is_an_error(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    monkeypatch.setattr(draft_tree, "post_json", lambda *_, **__: answer)
    with pytest.raises(RequestError, match="the draft tree of fib makes no sense"):
        measure_draft_tree("http://x", PROMPT, timeout_s=5)


def test_a_broken_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "draft_tree.json").write_text("{")
    with pytest.raises(RecordError, match="is broken"):
        load_draft_tree(tmp_path)
