"""SGLang's `/generate`, spoken by the embedded engine: a body becomes requests, a sequence becomes an answer.

What SGLang knows and this engine does not is refused with a reason, never ignored.
"""

from __future__ import annotations

import itertools
import math
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchlib.reference_engine.batching import Job
from benchlib.reference_engine.decode import Request, Trace
from benchlib.reference_engine.tokenizer import StreamDecoder, Tokenizer

__all__ = ["Asked", "BadRequest", "Reader", "Stream", "answer", "error_body"]

FIELDS = {
    "text",
    "input_ids",
    "sampling_params",
    "stream",
    "return_logprob",
    "top_logprobs_num",
    "logprob_start_len",
    "rid",
    "return_draft_tree",
}
OWN_PARAMETERS = {
    "temperature",
    "max_new_tokens",
    "ignore_eos",
    "stop_token_ids",
    "sampling_seed",
    "seed",
}
# SGLang's other sampling parameters, at the one value that asks for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_p": (1,),
    "top_k": (-1,),
    "min_p": (0,),
    "min_new_tokens": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "stop": (None, [], ""),
    "skip_special_tokens": (True,),
}
# SGLang's own defaults.
TEMPERATURE = 1.0
# Below it SGLang decodes greedily; a division by less would overflow.
COLDEST = 1e-6
MAX_BATCH = 1024
MAX_NEW_TOKENS = 128
SEEDS = 1 << 63
TOP_LOGPROBS = 100


class BadRequest(ValueError):
    """The client asked for something that cannot be done; the message says what."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A body that was understood: one job a prompt."""

    jobs: list[Job]
    batch: bool
    stream: bool


def error_body(message: str) -> dict[str, Any]:
    """The JSON of a refusal."""
    return {"error": {"message": message}}


class Reader:
    """Turns bodies into jobs for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        context_length: int,
        algorithm: str | None,
        seed: int,
    ) -> None:
        self._encode: Callable[[str], list[int]] = tokenizer.encode
        self._vocab_size, self._context = vocab_size, context_length
        self._algorithm, self._seed = algorithm, seed
        self._counter = itertools.count()

    def read(self, body: Any) -> Asked:
        """BadRequest with the reason when it cannot be served."""
        if not isinstance(body, dict):
            raise BadRequest("The body must be a JSON object.")
        _refuse_unknown(body, FIELDS, "field")
        prompts, batch = self._prompts(body)
        if len(prompts) > MAX_BATCH:
            raise BadRequest(f"A batch holds at most {MAX_BATCH} prompts, got {len(prompts)}.")
        stream = _flag(body, "stream")
        if stream and batch:
            raise BadRequest("stream is not supported for a batch: send one request a prompt.")
        if stream and body.get("return_draft_tree") is not None:
            raise BadRequest("return_draft_tree is not supported in a stream: ask for the whole answer.")
        top = self._top_logprobs(body)
        traced = self._traced_step(body)
        parameters = _spread(body.get("sampling_params"), len(prompts), "sampling_params", dict)
        rids = _spread(body.get("rid"), len(prompts), "rid", str)
        jobs = [
            Job(self._request(prompt, own or {}, traced), rid or uuid.uuid4().hex, stream, top)
            for prompt, own, rid in zip(prompts, parameters, rids, strict=True)
        ]
        return Asked(jobs, batch, stream)

    def _prompts(self, body: dict[str, Any]) -> tuple[list[list[int]], bool]:
        text, ids = body.get("text"), body.get("input_ids")
        if (text is None) == (ids is None):
            raise BadRequest(
                "Either text or input_ids should be provided."
                if text is None
                else "text and input_ids cannot both be given."
            )
        if text is not None:
            batch = isinstance(text, list)
            texts = text if batch else [text]
            if not texts or not all(isinstance(t, str) for t in texts):
                raise BadRequest("text must be a string or a non-empty list of strings.")
            return [self._checked(self._encode(t)) for t in texts], batch
        if not isinstance(ids, list) or not ids:
            raise BadRequest("input_ids must be a non-empty list of token ids, or a list of such.")
        batch = isinstance(ids[0], list)
        return [self._checked(part) for part in (ids if batch else [ids])], batch

    def _checked(self, ids: Any) -> list[int]:
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise BadRequest("input_ids must be integers.")
        if not ids:
            raise BadRequest("The prompt is empty.")
        if len(ids) >= self._context:
            raise BadRequest(
                f"The input ({len(ids)} tokens) is longer than the model's context length ({self._context} tokens)."
            )
        if not 0 <= min(ids) <= max(ids) < self._vocab_size:
            raise BadRequest(f"input_ids holds ids outside the vocabulary of {self._vocab_size} tokens.")
        return ids

    def _top_logprobs(self, body: dict[str, Any]) -> int | None:
        top = _integer(body, "top_logprobs_num", 0, 0, TOP_LOGPROBS)
        if body.get("logprob_start_len") not in (None, -1):
            raise BadRequest("logprob_start_len is not supported: output tokens only (-1).")
        if not _flag(body, "return_logprob"):
            return None
        if self._algorithm:
            raise BadRequest(f"{self._algorithm} speculative decoding does not support return_logprob yet.")
        return top

    def _traced_step(self, body: dict[str, Any]) -> int | None:
        """This engine's own extension: the number of a verify step, from 0, whose draft tree is to come back."""
        if body.get("return_draft_tree") is None:
            return None
        if not self._algorithm:
            raise BadRequest("return_draft_tree needs a speculative server: autoregressive decoding drafts nothing.")
        return _integer(body, "return_draft_tree", 0, 0, self._context)

    def _request(self, ids: list[int], parameters: dict[str, Any], traced_step: int | None) -> Request:
        _refuse_unknown(parameters, OWN_PARAMETERS | NEUTRAL.keys(), "sampling parameter")
        for name, allowed in NEUTRAL.items():
            if name in parameters and parameters[name] not in allowed:
                raise BadRequest(f"{name}={parameters[name]!r} is not supported: only {allowed[0]!r}.")
        longest = _integer(parameters, "max_new_tokens", MAX_NEW_TOKENS, 1, 1 << 31)
        if len(ids) + longest > self._context:
            raise BadRequest(
                f"Requested token count exceeds the model's maximum context length of {self._context} tokens: "
                f"{len(ids)} tokens of input and {longest} of completion."
            )
        return Request(
            input_ids=tuple(ids),
            max_new_tokens=longest,
            temperature=_temperature(parameters),
            ignore_eos=_flag(parameters, "ignore_eos"),
            seed=self._request_seed(parameters),
            stop_token_ids=self._stops(parameters),
            traced_step=traced_step,
        )

    def _request_seed(self, parameters: dict[str, Any]) -> int:
        """The client's, or one that the server's seed and the request's number give."""
        name = "sampling_seed" if parameters.get("sampling_seed") is not None else "seed"
        own = (self._seed * 1_000_003 + next(self._counter)) % SEEDS
        return _integer(parameters, name, own, 0, SEEDS - 1)

    def _stops(self, parameters: dict[str, Any]) -> tuple[int, ...]:
        stops = parameters.get("stop_token_ids")
        if stops is None:
            return ()
        if not isinstance(stops, list) or not all(type(i) is int and 0 <= i < self._vocab_size for i in stops):
            raise BadRequest("stop_token_ids must be a list of ids inside the vocabulary.")
        return tuple(dict.fromkeys(stops))


def _refuse_unknown(given: dict[str, Any], known: Iterable[str], what: str) -> None:
    if unknown := sorted(set(given) - set(known)):
        raise BadRequest(f"Unknown {what}: {', '.join(unknown)}.")


def _spread(value: Any, count: int, name: str, kind: type) -> list[Any]:
    """One value for all prompts, or a list with one each."""
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count or not all(v is None or isinstance(v, kind) for v in values):
        raise BadRequest(f"{name} must be one {kind.__name__}, or a list with one for each prompt.")
    return values


def _flag(given: dict[str, Any], name: str) -> bool:
    value = given.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false.")
    return value


def _integer(given: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = given.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise BadRequest(f"{name} must be an integer of {low} to {high}, got {value!r}.")
    return value


def _temperature(given: dict[str, Any]) -> float:
    value = given.get("temperature")
    if value is None:
        return TEMPERATURE
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"temperature must be a number, got {value!r}.")
    if not math.isfinite(value) or value < 0:
        raise BadRequest(f"temperature must be a non-negative number, got {value!r}.")
    return float(value) if value >= COLDEST else 0.0


# --- answers ------------------------------------------------------------------------------------------------------


class Stream:
    """The text and events of one job, made as its tokens come; cumulative like SGLang's unless told otherwise."""

    def __init__(self, job: Job, decoder: StreamDecoder, *, incremental: bool) -> None:
        self._job, self._decoder, self._incremental = job, decoder, incremental
        self._text = ""
        self._sent = 0

    def event(self) -> dict[str, Any]:
        """All tokens so far; with `incremental`, those since the last call."""
        job = self._job
        new = job.output_ids[self._sent :]
        reason = _finish_reason(job) if job.done else None
        stopped = reason is not None and reason["type"] == "stop"
        text = self._decoder.push(new[:-1] if stopped else new)
        if job.done:
            text += self._decoder.finish()
        ids, start = (new, self._sent) if self._incremental else (job.output_ids, 0)
        self._text = text if self._incremental else self._text + text
        self._sent = len(job.output_ids)
        meta = _meta(job, reason)
        if job.top_logprobs is not None:
            meta |= _logprobs(job, start)
        return {"text": self._text, "output_ids": ids, "meta_info": meta}

    def due(self, interval: int) -> bool:
        """Whether an event should be sent: the first tokens, `interval` more, or the end."""
        fresh = len(self._job.output_ids) - self._sent
        return self._job.done or (fresh > 0 and (self._sent == 0 or fresh >= interval))


def answer(job: Job, decoder: StreamDecoder, tokenizer: Tokenizer) -> dict[str, Any]:
    """The whole answer of a job that is done."""
    found = Stream(job, decoder, incremental=False).event()
    if job.sequence is not None and (trace := job.sequence.trace) is not None:
        found["meta_info"]["draft_tree"] = _draft_tree(trace, tokenizer)
    return found


def _draft_tree(trace: Trace, tokenizer: Tokenizer) -> dict[str, Any]:
    """One verify step: each node with its parent and the product of its slots' marginals, and the bonus token."""
    tree = trace.tree
    nodes = [
        {
            "token_id": token,
            "text": tokenizer.decode([token]),
            "parent": parent,
            "probability": math.exp(log_prob),
            "accepted": node in trace.path,
        }
        for node, (token, parent, log_prob) in enumerate(zip(tree.tokens, tree.parents, tree.log_probs, strict=True))
    ]
    bonus = {"token_id": trace.bonus, "text": tokenizer.decode([trace.bonus])}
    return {"step": trace.step, "accept_length": len(trace.path), "nodes": nodes, "bonus": bonus}


def _finish_reason(job: Job) -> dict[str, Any]:
    kind = job.sequence.finish_reason if job.sequence else None
    if kind == "stop":
        return {"type": "stop", "matched": job.output_ids[-1]}
    if kind == "length":
        return {"type": "length", "length": len(job.output_ids)}
    return {"type": "abort", "message": job.aborted or "no reason given"}


def _meta(job: Job, reason: dict[str, Any] | None) -> dict[str, Any]:
    meta = {
        "id": job.rid,
        "finish_reason": reason,
        "prompt_tokens": len(job.request.input_ids),
        "weight_version": "default",
        "completion_tokens": len(job.output_ids),
        "cached_tokens": 0,
    }
    return meta if reason is None else meta | _times(job) | _speculation(job)


def _times(job: Job) -> dict[str, Any]:
    """When things happened; only what did happen is there."""
    epoch = time.time() - time.perf_counter()
    times: dict[str, Any] = {"request_received_ts": epoch + job.received}
    if job.admitted is not None:
        times["queue_time"] = job.admitted - job.received
    if job.prefilled is not None:
        times["prefill_finished_time"] = epoch + job.prefilled
        times["first_token_latency"] = job.prefilled - job.received
    if job.finished is not None:
        times["request_finished_ts"] = epoch + job.finished
        times["e2e_latency"] = job.finished - job.received
        steps = len(job.output_ids) - 1
        if job.prefilled is not None and steps > 0:
            times["decode_throughput"] = steps / (job.finished - job.prefilled)
    return times


def _speculation(job: Job) -> dict[str, Any]:
    """SGLang's counters; nothing where there was no verify step."""
    s = job.sequence
    if s is None or not s.verify_ct:
        return {}
    return {
        "spec_accept_rate": s.correct_drafts / s.proposed_drafts,
        "spec_accept_length": len(job.output_ids) / s.verify_ct,
        "spec_num_correct_drafts": s.correct_drafts,
        "spec_num_proposed_drafts": s.proposed_drafts,
        "spec_verify_ct": s.verify_ct,
        "spec_correct_drafts_histogram": list(s.histogram),
        # Not SGLang's: what the drafter's own probabilities promised, before the target was asked.
        "spec_forecast_length": s.forecast / s.verify_ct,
    }


def _logprobs(job: Job, start: int) -> dict[str, Any]:
    end = len(job.output_ids)
    found: dict[str, Any] = {
        "input_token_logprobs": [],
        "output_token_logprobs": job.chosen_logprobs[start:end],
    }
    if job.top_logprobs:
        found["input_top_logprobs"] = []
        found["output_top_logprobs"] = job.likeliest[start:end]
    return found
