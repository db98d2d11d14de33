"""The embedded engine's server: SGLang's surface, the decoder's own tokens, and how it ends."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchlib.client import generate_round, run_async
from benchlib.reference_engine import server as engine_server
from benchlib.reference_engine import tokenizer as bpe
from benchlib.reference_engine.decode import Decoder, Request
from benchlib.reference_engine.drafter import DrafterConfig
from benchlib.reference_engine.loading import (
    ModelPlan,
    drafter_shapes,
    load_decoder,
    read_configs,
    target_shapes,
)
from benchlib.reference_engine.model import TargetConfig
from benchlib.reference_engine.train import TrainDrafter, TrainTarget, save_model
from benchlib.stream import request_record

PROMPT = list(range(20, 60))
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
METHODS = ("auto", "linear", "ddtree")
FLAGS = {
    "auto": ["--enable-metrics"],
    "linear": ["--speculative-algorithm", "DFLASH", "--enable-metrics"],
    "ddtree": ["--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "24"],
}
PLANS = {"auto": {}, "linear": {"method": "linear"}, "ddtree": {"method": "ddtree", "budget": 24}}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random pair in a folder with target/ and drafter/."""
    root: Path = tmp_path_factory.mktemp("pair")
    tokenizer = bpe.train(["def add(a, b):\n    return a + b\n" * 3], 300)
    tokenizer.save(root / "target")
    target = TargetConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention"),
        eos_token_id=tokenizer.eos_token_id,
        max_position_embeddings=2048,
        partial_rotary_factor=0.5,
    )
    drafter = DrafterConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=tokenizer.vocab_size,
        num_target_layers=4,
        mask_token_id=tokenizer.mask_token_id,
        target_layer_ids=(0, 2),
        block_size=8,
    )
    save_model(root / "target", _random_state(target_shapes(target)), target.to_json())
    save_model(root / "drafter", _random_state(drafter_shapes(drafter)), drafter.to_json())
    return root


def _random_state(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(11)
    return {
        name: torch.randn(shape, generator=generator) * (0.4 if len(shape) > 1 else 0.2)
        for name, shape in shapes.items()
    }


class Running:
    """A server in a thread of this process."""

    def __init__(self, *argv: str) -> None:
        options = engine_server.build_parser().parse_args([*argv, "--port", "0"])
        self._prepared = engine_server.prepare(options)
        self.port: int = self._prepared.listener.getsockname()[1]
        self._started: queue.Queue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()
        self.result: int | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._loop, self._stopped = self._started.get(timeout=20)
        wait_until(lambda: self.get("/ready")[0] == 200)

    async def _serve(self) -> None:
        stopped = asyncio.Event()
        self._started.put((asyncio.get_running_loop(), stopped))
        self.result = await engine_server.serve(self._prepared, stopped)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(10)
        assert self.result == 0

    def get(self, path: str) -> tuple[int, bytes]:
        return call(self.port, "GET", path)

    def json(self, path: str) -> Any:
        status, body = self.get(path)
        assert status == 200, body
        return json.loads(body)

    def generate(self, prompt: Any = PROMPT, **parameters: Any) -> Any:
        name = "text" if isinstance(prompt, str) else "input_ids"
        return generate(self.port, {name: prompt, "sampling_params": GREEDY | parameters})


def call(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, path, body=body)
        response = connection.getresponse()
        return response.status, response.read()


def generate(port: int, body: dict[str, Any]) -> Any:
    status, data = call(port, "POST", "/generate", json.dumps(body).encode())
    assert status == 200, data
    if not body.get("stream"):
        return json.loads(data)
    *events, last = [line[6:] for line in data.split(b"\n") if line]
    assert last == b"[DONE]"
    return [json.loads(event) for event in events]


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[dict[str, Running]]:
    running = {m: Running("--model-path", str(folder), *FLAGS[m]) for m in METHODS}
    yield running
    for server in running.values():
        server.stop()


@pytest.fixture(scope="module")
def auto(servers: dict[str, Running]) -> Running:
    return servers["auto"]


@pytest.fixture(scope="module")
def decoders(folder: Path) -> dict[str, Decoder]:
    base = ModelPlan(folder / "target", folder / "drafter")
    return {m: load_decoder(replace(base, **PLANS[m])) for m in METHODS}  # type: ignore[arg-type]


def decode(decoder: Decoder, ids: list[int], count: int = 24, **fields: Any) -> list[int]:
    request = Request(tuple(ids), count, ignore_eos=True, **fields)
    with torch.inference_mode():
        sequence = decoder.prefill(request, 0)
        while sequence.finish_reason is None:
            decoder.step([sequence])
    return sequence.output_ids


# --- tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_the_decoders_own(
    servers: dict[str, Running], decoders: dict[str, Decoder], folder: Path, method: str
) -> None:
    expected = decode(decoders[method], PROMPT)
    whole = servers[method].generate()
    assert whole["output_ids"] == expected == decode(decoders["auto"], PROMPT)
    assert whole["text"] == bpe.Tokenizer.load(folder / "target").decode(expected)
    body = {"input_ids": PROMPT, "sampling_params": GREEDY, "stream": True}
    events = generate(servers[method].port, body)
    assert events[-1]["output_ids"] == expected
    assert events[-1]["text"] == whole["text"]
    for event in events:  # cumulative
        count = event["meta_info"]["completion_tokens"]
        assert event["output_ids"] == expected[:count]
        assert whole["text"].startswith(event["text"].rstrip("�"))
        assert (event["meta_info"]["finish_reason"] is None) == (event is not events[-1])


@pytest.mark.parametrize("method", METHODS)
def test_eight_streams_at_once_give_what_each_gives_alone(
    servers: dict[str, Running], decoders: dict[str, Decoder], method: str
) -> None:
    prompts = [PROMPT[i : i + 12 + i] for i in range(8)]
    bodies = [{"input_ids": p, "sampling_params": GREEDY, "stream": True} for p in prompts]
    url = f"http://127.0.0.1:{servers[method].port}"
    exchanges = run_async(generate_round(url, bodies, timeout_s=30))
    place = {"prompt": "p", "max_new_tokens": 24, "concurrency": 8, "round": 0}
    records = [request_record(e, epoch=e.sent, ignore_eos=True, **place) for e in exchanges]
    assert [r.error for r in records] == [None] * 8
    assert [list(r.output_ids or ()) for r in records] == [decode(decoders["auto"], p) for p in prompts]


@pytest.mark.parametrize("method", ["linear", "ddtree"])
def test_counters_add_up(servers: dict[str, Running], method: str) -> None:
    for count in (1, 2, 24, 40):
        answer = servers[method].generate(max_new_tokens=count)
        meta = answer["meta_info"]
        assert meta["completion_tokens"] == len(answer["output_ids"]) == count
        assert meta["finish_reason"] == {"type": "length", "length": count}
        if count == 1:
            assert "spec_verify_ct" not in meta
            continue
        steps, correct = meta["spec_verify_ct"], meta["spec_num_correct_drafts"]
        histogram = meta["spec_correct_drafts_histogram"]
        # Each step brings its correct drafts and a bonus; the last one's bonus may have been too many.
        assert count - 1 <= steps + correct <= count
        assert sum(histogram) == steps
        assert sum(i * n for i, n in enumerate(histogram)) == correct
        assert meta["spec_num_proposed_drafts"] == steps * {"linear": 7, "ddtree": 24}[method]
        assert meta["spec_accept_length"] == pytest.approx(count / steps)


@pytest.mark.parametrize("method", ["linear", "ddtree"])
def test_the_forecast_is_the_mean_of_the_steps_own_trees(servers: dict[str, Running], method: str) -> None:
    body = {"input_ids": PROMPT, "sampling_params": GREEDY}
    whole = generate(servers[method].port, body)
    steps = whole["meta_info"]["spec_verify_ct"]
    trees = []
    for step in range(steps):
        answer = generate(servers[method].port, body | {"return_draft_tree": step})
        assert answer["output_ids"] == whole["output_ids"]
        trees.append(answer["meta_info"]["draft_tree"])
    promised = [sum(node["probability"] for node in tree["nodes"]) for tree in trees]
    assert whole["meta_info"]["spec_forecast_length"] == pytest.approx(sum(promised) / steps)
    assert "draft_tree" not in generate(servers[method].port, body | {"return_draft_tree": steps})["meta_info"]


def test_a_step_s_tree_tells_the_tokens_that_follow(servers: dict[str, Running], folder: Path) -> None:
    body = {"input_ids": PROMPT, "sampling_params": GREEDY, "return_draft_tree": 1}
    answer = generate(servers["ddtree"].port, body)
    tree, ids = answer["meta_info"]["draft_tree"], answer["output_ids"]
    path = [node["token_id"] for node in tree["nodes"] if node["accepted"]]
    assert len(tree["nodes"]) == 25
    assert (tree["nodes"][0]["parent"], tree["nodes"][0]["probability"]) == (-1, 1.0)
    assert tree["accept_length"] == len(path)
    gained = [*path, tree["bonus"]["token_id"]]
    assert any(ids[at : at + len(gained)] == gained for at in range(len(ids)))
    tokenizer = bpe.Tokenizer.load(folder / "target")
    assert all(node["text"] == tokenizer.decode([node["token_id"]]) for node in tree["nodes"])
    for node in tree["nodes"][1:]:
        assert node["probability"] <= tree["nodes"][node["parent"]]["probability"]


@pytest.mark.parametrize(
    ("method", "more", "reason"),
    [
        ("auto", {"return_draft_tree": 0}, "autoregressive decoding drafts nothing"),
        ("ddtree", {"return_draft_tree": -1}, "an integer of 0 to"),
        ("ddtree", {"return_draft_tree": 0, "stream": True}, "not supported in a stream"),
    ],
)
def test_trees_that_cannot_be_had_are_refused(
    servers: dict[str, Running], method: str, more: dict[str, Any], reason: str
) -> None:
    body = {"input_ids": PROMPT, "sampling_params": GREEDY, **more}
    status, answer = call(servers[method].port, "POST", "/generate", json.dumps(body).encode())
    assert status == 400
    assert reason in json.loads(answer)["error"]["message"]


def test_autoregressive_answers_have_no_speculative_fields(auto: Running) -> None:
    meta = auto.generate()["meta_info"]
    assert not [key for key in meta if key.startswith("spec_")]
    assert meta["cached_tokens"] == 0
    assert meta["prompt_tokens"] == len(PROMPT)
    assert meta["e2e_latency"] > 0
    assert meta["decode_throughput"] > 0
    names = "request_received_ts", "prefill_finished_time", "request_finished_ts"
    stamps = [meta[name] for name in names]
    assert stamps == sorted(stamps)
    assert abs(stamps[0] - time.time()) < 60


def test_stop_token_ends_and_is_not_text(servers: dict[str, Running], folder: Path) -> None:
    ids = servers["auto"].generate()["output_ids"]
    stop = ids[5]
    kept = ids[: ids.index(stop) + 1]
    for server in servers.values():
        answer = server.generate(stop_token_ids=[stop])
        assert answer["output_ids"] == kept
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert answer["text"] == bpe.Tokenizer.load(folder / "target").decode(kept[:-1])


def test_almost_no_temperature_is_greedy(auto: Running) -> None:
    assert auto.generate(temperature=1e-300)["output_ids"] == auto.generate()["output_ids"]


def test_sampling_follows_its_seed(auto: Running, decoders: dict[str, Decoder]) -> None:
    for name in ("seed", "sampling_seed"):
        answer = auto.generate(temperature=1.5, **{name: 7})
        expected = decode(decoders["auto"], PROMPT, temperature=1.5, seed=7)
        assert answer["output_ids"] == expected
    unseeded = [tuple(auto.generate(temperature=1.5)["output_ids"]) for _ in range(2)]
    assert len(set(unseeded)) == 2


def test_batch_and_text(auto: Running, folder: Path) -> None:
    texts = ["def add(", "return a"]
    tokenizer = bpe.Tokenizer.load(folder / "target")
    answers = generate(auto.port, {"text": texts, "sampling_params": GREEDY})
    alone = [auto.generate(tokenizer.encode(text)) for text in texts]
    assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in alone]
    assert [a["text"] for a in answers] == [a["text"] for a in alone]
    own = [GREEDY, GREEDY | {"max_new_tokens": 3}]
    mixed = {"input_ids": [PROMPT, PROMPT[:9]], "sampling_params": own}
    assert [len(a["output_ids"]) for a in generate(auto.port, mixed)] == [24, 3]


def test_logprobs_are_the_models(auto: Running, decoders: dict[str, Decoder]) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": GREEDY | {"max_new_tokens": 5},
        "return_logprob": True,
        "top_logprobs_num": 3,
    }
    answer = generate(auto.port, body)
    ids, meta = answer["output_ids"], answer["meta_info"]
    seen: list[torch.Tensor] = []
    decoder = decoders["auto"]
    decoder.record_logits = lambda _, logits, __: seen.append(logits[0].log_softmax(-1))
    decode(decoder, PROMPT, 5)
    decoder.record_logits = None
    assert [token for _, token, _ in meta["output_token_logprobs"]] == ids
    for entry, top, expected in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], seen, strict=True):
        assert entry[0] == pytest.approx(float(expected.max()), abs=1e-5)
        assert top[0] == entry
        assert [x[0] for x in top] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-5)


def test_deltas_interval_and_a_queue_beyond_the_slots(folder: Path, decoders: dict[str, Decoder]) -> None:
    server = Running(
        *("--model-path", str(folder / "target"), "--max-running-requests", "2"),
        *("--incremental-streaming-output", "--stream-interval", "5", "--skip-server-warmup"),
        *("--context-length", "256", "--served-model-name", "mini", "--linear-backend", "plain"),
    )
    try:
        body = {"input_ids": PROMPT, "sampling_params": GREEDY, "stream": True}
        events: list[list[Any]] = []
        threads = [threading.Thread(target=lambda: events.append(generate(server.port, body))) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(events) == 5
        expected = decode(decoders["auto"], PROMPT)
        for stream in events:
            assert [t for event in stream for t in event["output_ids"]] == expected
            assert len(stream) <= 6
            assert stream[-1]["meta_info"]["completion_tokens"] == 24
        info = server.json("/server_info")
        assert (info["context_length"], info["linear_backend"]) == (256, "plain")
        assert info["internal_states"][0]["effective_max_running_requests_per_dp"] == 2
        assert server.json("/v1/models")["data"][0]["id"] == "mini"
        assert server.get("/metrics")[0] == 404
    finally:
        server.stop()


# --- refusals -----------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, str]] = {
    "broken JSON": (b"{", "not JSON"),
    "no object": ([], "object"),
    "no prompt": ({"sampling_params": {}}, "Either text or input_ids"),
    "two prompts": ({"text": "a", "input_ids": [1]}, "both"),
    "empty prompt": ({"text": ""}, "empty"),
    "empty ids": ({"input_ids": []}, "non-empty"),
    "text of numbers": ({"text": 5}, "string"),
    "ids of text": ({"input_ids": ["a"]}, "integers"),
    "ids of floats": ({"input_ids": [1.0]}, "integers"),
    "id too large": ({"input_ids": [999]}, "vocabulary"),
    "id negative": ({"input_ids": [-1]}, "vocabulary"),
    "prompt too long": ({"input_ids": [9] * 3000}, "longer than"),
    "too many tokens": ({"input_ids": [9], "sampling_params": {"max_new_tokens": 2048}}, "exceeds"),
    "no tokens": ({"input_ids": [9], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
    "count is text": ({"input_ids": [9], "sampling_params": {"max_new_tokens": "9"}}, "max_new"),
    "negative temperature": ({"input_ids": [9], "sampling_params": {"temperature": -1}}, "temper"),
    "temperature is text": ({"input_ids": [9], "sampling_params": {"temperature": "0"}}, "temper"),
    "top_p": ({"input_ids": [9], "sampling_params": {"top_p": 0.9}}, "not supported"),
    "top_k": ({"input_ids": [9], "sampling_params": {"top_k": 20}}, "not supported"),
    "n": ({"input_ids": [9], "sampling_params": {"n": 2}}, "not supported"),
    "stop": ({"input_ids": [9], "sampling_params": {"stop": ["x"]}}, "not supported"),
    "stop ids": ({"input_ids": [9], "sampling_params": {"stop_token_ids": [999]}}, "stop_token"),
    "seed": ({"input_ids": [9], "sampling_params": {"seed": -1}}, "seed"),
    "batch too large": ({"input_ids": [[9]] * 2000}, "at most"),
    "unknown field": ({"input_ids": [9], "lora_path": "x"}, "lora_path"),
    "unknown parameter": ({"input_ids": [9], "sampling_params": {"regex": "x"}}, "regex"),
    "parameters are a list": ({"input_ids": [9], "sampling_params": [{}, {}]}, "sampling_params"),
    "stream is a number": ({"input_ids": [9], "stream": 1}, "stream"),
    "streamed batch": ({"input_ids": [[9], [9]], "stream": True}, "batch"),
    "input logprobs": ({"input_ids": [9], "logprob_start_len": 0}, "logprob_start_len"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_requests_get_400_with_the_reason(auto: Running, case: str) -> None:
    body, reason = REFUSED[case]
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, answer = call(auto.port, "POST", "/generate", data)
    assert status == 400, answer
    assert reason in json.loads(answer)["error"]["message"]
    assert auto.get("/ready")[0] == 200


def test_other_refusals(servers: dict[str, Running]) -> None:
    body = json.dumps({"input_ids": [9], "return_logprob": True}).encode()
    status, answer = call(servers["linear"].port, "POST", "/generate", body)
    message = "DFLASH speculative decoding does not support return_logprob yet."
    assert (status, json.loads(answer)) == (400, {"error": {"message": message}})
    huge = b'{"text": "' + b"x" * (5 << 20) + b'"}'
    with suppress(ConnectionError):  # it may hang up before all is sent
        assert call(servers["auto"].port, "POST", "/generate", huge)[0] == 400
    assert servers["auto"].get("/get_load")[0] == 404
    assert call(servers["auto"].port, "GET", "/generate")[0] == 405


# --- state --------------------------------------------------------------------------------------------------------


def test_server_info_tells_what_runs(servers: dict[str, Running], folder: Path) -> None:
    wanted = {
        "auto": (None, None, None, 1),
        "linear": ("DFLASH", 8, None, 8),
        "ddtree": ("DDTREE", 8, 24, 25),
    }
    for method, expected in wanted.items():
        info = servers[method].json("/server_info")
        names = "algorithm", "num_draft_tokens", "ddtree_budget"
        found = [info[f"speculative_{name}"] for name in names]
        assert (*found, info["verify_tokens"]) == expected
        assert info["model_path"] == str(folder)
        assert (info["tp_size"], info["threads"], info["load_format"]) == (1, 1, "auto")
        assert info["torch_version"] == torch.__version__
        assert info["vocab_size"] == servers[method].json("/model_info")["vocab_size"]
        state = info["internal_states"][0]
        assert state["effective_max_running_requests_per_dp"] == 8
        assert ("avg_spec_accept_length" in state) == (method != "auto")


def test_metrics_count_and_averages_flush(servers: dict[str, Running]) -> None:
    linear = servers["linear"]
    before = _metrics(linear)
    meta = linear.generate()["meta_info"]
    wait_until(lambda: _metrics(linear)["num_running_reqs"] == 0)
    after = _metrics(linear)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["prompt_tokens_total"] == len(PROMPT)
    assert grown["generation_tokens_total"] == 24
    assert grown["spec_verify_calls_total"] == meta["spec_verify_ct"]
    assert after["spec_accept_length"] >= 1
    wait_until(lambda: linear.get("/flush_cache")[0] == 200)
    assert "spec_accept_length" not in _metrics(linear)
    assert _metrics(linear)["generation_tokens_total"] == after["generation_tokens_total"]


def _metrics(server: Running) -> dict[str, float]:
    status, body = server.get("/metrics")
    assert status == 200
    lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
    return {line.partition("{")[0].removeprefix("sglang:"): float(line.split()[-1]) for line in lines}


def test_health(auto: Running) -> None:
    assert [auto.get(p)[0] for p in ("/health", "/health_generate", "/ready")] == [200] * 3
    assert auto.json("/get_model_info")["is_generation"] is True
    assert auto.json("/get_server_info")["version"]


def _open_stream(port: int, count: int = 1900) -> socket.socket:
    body = json.dumps(
        {
            "input_ids": PROMPT,
            "stream": True,
            "rid": "long",
            "sampling_params": GREEDY | {"max_new_tokens": count},
        }
    ).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    received = b""
    while b"data: " not in received:
        received += connection.recv(4096)
    return connection


def _rest(connection: socket.socket) -> bytes:
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received


def test_disconnect_frees_the_slot_and_a_busy_server_does_not_flush(auto: Running) -> None:
    connection = _open_stream(auto.port)
    assert call(auto.port, "POST", "/flush_cache")[0] == 400
    connection.close()
    wait_until(lambda: auto.get("/flush_cache")[0] == 200, seconds=2)
    assert _metrics(auto)["num_running_reqs"] == 0
    assert len(auto.generate()["output_ids"]) == 24


def test_abort_request(auto: Running) -> None:
    with closing(_open_stream(auto.port)) as connection:
        assert call(auto.port, "POST", "/abort_request", b'{"rid": "long"}')[0] == 200
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(65536)
    assert b'"type":"abort"' in received
    assert call(auto.port, "POST", "/abort_request", b"{}")[0] == 400


def test_dummy_weights_have_the_checkpoints_names_and_are_the_seeds(folder: Path) -> None:
    plan = ModelPlan(folder / "target", folder / "drafter", method="linear", dummy=True)
    target, drafter = read_configs(plan)
    assert drafter is not None
    for module, shapes in (
        (TrainTarget(target, ()), target_shapes(target)),
        (TrainDrafter(drafter), drafter_shapes(drafter)),
    ):
        assert {k: tuple(v.shape) for k, v in module.state_dict().items()} == shapes
    tokens = [decode(load_decoder(replace(plan, seed=seed)), PROMPT) for seed in (1, 1, 2)]
    assert tokens[0] == tokens[1] != tokens[2]


# --- start and end ------------------------------------------------------------------------------------------------


def test_unknown_flags_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--quantization", "fp8"], ["--max-running-requests", "9"]):
        with pytest.raises(SystemExit) as caught:
            engine_server.main(argv)
        assert caught.value.code == 2
    assert "--quantization" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--model-path", "/nowhere"], "no target at /nowhere"),
        (["--tp-size", "4"], "tp size 4 does not divide the target's num_key_value_heads"),
        (["--tp-size", "0"], "--tp-size must be at least 1"),
        (["--context-length", "4096"], "outside 1..2048"),
        (["--speculative-ddtree-budget", "8"], "needs --speculative-algorithm DDTREE"),
        (["--speculative-num-draft-tokens", "8"], "needs --speculative-algorithm"),
        (
            [*FLAGS["linear"], "--speculative-num-draft-tokens", "16"],
            "differs from the drafter's block size 8",
        ),
        (
            [*FLAGS["linear"], "--speculative-draft-model-path", "/nowhere"],
            "no drafter at /nowhere",
        ),
        (["--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "0"], "1..1024"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    folder: Path, caplog: pytest.LogCaptureFixture, argv: list[str], reason: str
) -> None:
    assert engine_server.main(["--model-path", str(folder), "--port", "0", *argv]) == 1
    assert len(caplog.messages) == 1
    assert reason in caplog.messages[0]
    assert "\n" not in caplog.messages[0]


def test_port_in_use(folder: Path, auto: Running, caplog: pytest.LogCaptureFixture) -> None:
    assert engine_server.main(["--model-path", str(folder), "--port", str(auto.port)]) == 1
    assert caplog.messages == [f"error: cannot listen on 127.0.0.1:{auto.port}: the port is in use"]


def test_wrong_weights_end_the_start(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = json.loads((folder / "target" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / "target" / name).read_bytes())
    argv = ["--model-path", str(tmp_path), "--port", "0"]
    assert engine_server.main(argv) == 1
    assert "mlp.gate_proj.weight has shape (48, 32); config.json makes it (64, 32)" in caplog.text
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    assert engine_server.main(argv) == 1
    assert "cannot read" in caplog.messages[-1]


class Process:
    """A server in a process of its own."""

    def __init__(self, log: Path, *argv: str) -> None:
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.log = log
        command = [sys.executable, "-m", "benchlib.reference_engine.server", *argv]
        with log.open("wb") as output:
            self.popen = subprocess.Popen(
                [*command, "--port", str(self.port)],
                stderr=output,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.popen.poll() is None, self.log.read_text()
            with suppress(OSError):
                return call(self.port, "GET", "/ready")[0] == 200
            return False

        wait_until(ready, 60)

    def workers(self) -> list[psutil.Process]:
        """Ranks beyond 0, forked (the server's own command line) or spawned; not multiprocessing's resource tracker."""
        children = psutil.Process(self.popen.pid).children()
        return [c for c in children if "resource_tracker" not in " ".join(c.cmdline())]

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(10)


@pytest.fixture(scope="module")
def start_two_ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Process]]:
    """A factory of servers with two ranks; the first two start side by side, as starting is what takes time."""
    argv = ["--model-path", str(folder), "--tp-size", "2", *FLAGS["ddtree"]]
    logs = tmp_path_factory.mktemp("logs")
    started = [Process(logs / f"{i}.log", *argv) for i in range(2)]
    spare = list(started)

    def start() -> Process:
        if not spare:
            spare.append(Process(logs / f"{len(started)}.log", *argv))
            started.extend(spare)
        process = spare.pop(0)
        process.wait_ready()
        return process

    yield start
    for process in started:
        process.end()


@pytest.fixture
def tp2(start_two_ranks: Callable[[], Process]) -> Process:
    return start_two_ranks()


def test_two_ranks_give_one_ranks_tokens_and_a_dead_rank_ends_the_server(
    tp2: Process, decoders: dict[str, Decoder]
) -> None:
    bodies = [{"input_ids": PROMPT[i:], "sampling_params": GREEDY} for i in range(3)]
    answers = [generate(tp2.port, body) for body in bodies]
    assert [a["output_ids"] for a in answers] == [decode(decoders["ddtree"], PROMPT[i:]) for i in range(3)]
    sampled = GREEDY | {"temperature": 1.0, "seed": 3}
    answer = generate(tp2.port, {"input_ids": PROMPT, "sampling_params": sampled})
    assert answer["output_ids"] == decode(decoders["ddtree"], PROMPT, temperature=1.0, seed=3)
    assert json.loads(call(tp2.port, "GET", "/server_info")[1])["tp_size"] == 2
    with closing(_open_stream(tp2.port)) as connection:
        (worker,) = tp2.workers()
        worker.kill()
        assert tp2.popen.wait(15) == 1
        assert b"tensor-parallel rank 1" in _rest(connection)
    lines = tp2.log.read_text().splitlines()
    assert "error: tensor-parallel rank 1" in lines[-1]
    assert "ended with exit code -9" in lines[-1]


def test_sigterm_ends_all_ranks_in_order(tp2: Process) -> None:
    workers = tp2.workers()
    with closing(_open_stream(tp2.port)) as connection:
        begun = time.monotonic()
        tp2.popen.send_signal(signal.SIGTERM)
        assert tp2.popen.wait(10) == 0
        assert time.monotonic() - begun < 4  # 2 s where nothing else runs
        assert b"shutting down" in _rest(connection)
    assert "fired up and ready to roll!" in tp2.log.read_text()
    _, alive = psutil.wait_procs(workers, timeout=2)
    assert not alive


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_no_rank_outlives_a_killed_server(tp2: Process) -> None:
    workers = tp2.workers()
    tp2.popen.kill()
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive
