"""The package's own training: its forward passes, its optimiser, its batches, and a tiny pair from end to end."""

from __future__ import annotations

import json
import math
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchlib.reference_engine import card, optim, train, train_model
from benchlib.reference_engine.decode import Decoder, Request
from benchlib.reference_engine.loading import ModelPlan, load_decoder
from benchlib.reference_engine.model import Cache, Target, TargetConfig, load_weights
from benchlib.reference_engine.tokenizer import Tokenizer
from tests.engine import (
    TOLERANCE,
    WEIGHTS,
    Job,
    Pair,
    Reference,
    check_lossless,
    feed,
    generate,
    make_jobs,
    packaged_folder,
    random_prompt,
    random_weights,
    small_config,
)


class TestDeltaRule:
    @pytest.mark.parametrize("length", [64, 192])
    def test_chunks_are_the_recurrence(self, length: int) -> None:
        torch.manual_seed(length)
        q, k = (torch.nn.functional.normalize(torch.randn(2, 3, length, 8), dim=-1) for _ in "qk")
        v, beta = torch.randn(2, 3, length, 12), torch.rand(2, 3, length)
        g = -torch.rand(2, 3, length) * torch.tensor([0.01, 0.5, 4.0])[:, None]  # slow to violent decay
        state, expected = torch.zeros(2, 3, 8, 12), []
        for t in range(length):
            state = state * g[:, :, t, None, None].exp()
            delta = (v[:, :, t] - (state * k[:, :, t, :, None]).sum(2)) * beta[:, :, t, None]
            state = state + k[:, :, t, :, None] * delta[:, :, None]
            expected.append((state * q[:, :, t, :, None]).sum(2))
        out = train_model.delta_rule(q, k, v, g, beta)
        assert (out - torch.stack(expected, 2)).abs().max() < 1e-5

    def test_gradients_are_finite_under_violent_decay(self) -> None:
        """e^(G_i - G_j) above the diagonal would overflow, and 0 * inf would poison the gradient."""
        torch.manual_seed(0)
        shape = (1, 1, 64, 4)
        q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
        g = torch.full(shape[:3], -30.0, requires_grad=True)
        train_model.delta_rule(q, k, v, g, torch.full(shape[:3], 0.5)).sum().backward()
        for x in (q, k, v, g):
            assert x.grad is not None
            assert torch.isfinite(x.grad).all()


class TestForward:
    def test_is_the_targets(self) -> None:
        config = small_config(layers=8)
        weights = random_weights(config, 3)
        tokens = random_prompt(config, 130, 0)
        target = Target(config, weights)
        logits = target.logits(feed(target, Cache(target, 1, 130), 0, tokens))
        assert (Reference(config, weights).logits(tokens) - logits).abs().max() < TOLERANCE

    def test_is_causal(self) -> None:
        config = small_config()
        reference = Reference(config, random_weights(config, 3))
        tokens = list(random_prompt(config, 128, 1))
        changed = [*tokens[:70], *random_prompt(config, 58, 2)]
        a, b = (reference.logits(t) for t in (tokens, changed))
        assert (a[:70] - b[:70]).abs().max() < 1e-5
        assert (a[70:] - b[70:]).abs().max() > 0.1

    def test_a_block_sees_neither_its_answers_nor_other_blocks(self) -> None:
        """The loss must not leak: a block reads features before its anchor and the anchor itself."""
        pair = Pair.random(2)
        assert pair.drafter is not None
        drafter = train.TrainDrafter(pair.drafter.config)
        embedding = pair.reference.embedding.detach()
        tokens = torch.tensor([random_prompt(pair.config, 128, 5)])
        taps = torch.randn(1, 128, 3 * pair.config.hidden_size)
        anchors = torch.tensor([[20, 50, 51, 100]])
        with torch.no_grad():
            before = drafter(taps, tokens, anchors, embedding)
            taps[:, 50:] = torch.randn_like(taps[:, 50:])
            tokens[:, 51:] = 9
            after = drafter(taps, tokens, anchors, embedding)
            alone = drafter(taps, tokens, anchors[:, :1], embedding)
        assert (before[:, :2] - after[:, :2]).abs().max() < 1e-5
        assert (before[:, 2] - after[:, 2]).abs().max() > 1e-3
        assert (alone[:, 0] - after[:, 0]).abs().max() < 1e-5

    def test_labels_are_the_tokens_of_the_blocks_own_places(self) -> None:
        tokens = torch.arange(100)[None]
        labels = train.block_labels(tokens, torch.tensor([[3, 60]]), 16)
        assert labels.tolist() == [[list(range(4, 19)), list(range(61, 76))]]


class TestOptimiser:
    @pytest.mark.parametrize("shape", [(24, 24), (48, 24), (24, 96)])
    def test_updates_are_nearly_orthogonal(self, shape: tuple[int, int]) -> None:
        torch.manual_seed(1)
        update = optim._orthogonal(torch.randn(3, *shape))
        singular = torch.linalg.svdvals(update)
        assert singular.min() > 0.3
        assert singular.max() < 1.3

    def test_a_step_goes_down_the_gradient_by_its_rate(self) -> None:
        torch.manual_seed(2)
        weights = [nn.Parameter(torch.randn(32, 64)) for _ in range(2)]
        before = [w.detach().clone() for w in weights]
        muon = optim.Muon(weights, lr=0.01, decay=0.0)
        for w in weights:
            w.grad = torch.randn_like(w)
        muon.step()
        for w, old in zip(weights, before, strict=True):
            assert w.grad is not None
            moved = w.detach() - old
            assert (moved * w.grad).sum() < 0
            rms = moved.square().mean().sqrt()  # 0.2 * lr, as AdamW's steps are of about that size
            assert 0.05 * 0.01 < rms < 0.4 * 0.01

    def test_weights_decay(self) -> None:
        weight = nn.Parameter(torch.ones(20, 20))
        muon = optim.Muon([weight], lr=0.1, decay=0.5)
        weight.grad = torch.zeros(20, 20)
        muon.step()
        assert torch.allclose(weight.detach(), torch.full((20, 20), 0.95))

    def test_every_parameter_is_trained_once(self) -> None:
        model = train.TrainTarget(small_config(), (0, 1, 2))
        trainer = optim.Trainer(model, 1e-3, 1.0)
        held = [p for o in trainer.optimisers for g in o.param_groups for p in g["params"]]
        assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))
        assert not any(p is model.model.embed_tokens.weight for p in
                       (p for g in trainer.optimisers[0].param_groups for p in g["params"]))  # fmt: skip

    def test_a_few_steps_learn(self) -> None:
        """Loss on a text of one repeated phrase falls."""
        torch.manual_seed(3)
        config = small_config(vocab_size=64)
        model = train.TrainTarget(config, (0, 1, 2))
        trainer = optim.Trainer(model, 1e-2, 5.0)
        window = torch.tensor(random_prompt(config, 16, 0)).repeat(5)[:65].expand(2, -1)
        losses = []
        for _ in range(25):
            hidden, _ = model(window[:, :-1])
            embedding = model.model.embed_tokens.weight
            loss = train.token_loss(hidden.flatten(0, 1), embedding, window[:, 1:].flatten()).mean()
            trainer.update(loss)
            losses.append(loss.item())
        assert losses[0] == pytest.approx(math.log(64), abs=1.0)
        assert losses[-1] < losses[0] - 0.5
        assert trainer.step_count == 25

    def test_no_machine_is_too_slow_for_the_least_steps(self) -> None:
        model = nn.Linear(32, 32)
        trainer = optim.Trainer(model, 1e-3, 1e-9, least_steps=3)
        while trainer.progress < 1:
            trainer.update(model(torch.ones(1, 32)).sum())
        assert trainer.step_count == 3


def test_the_head_is_exact_on_a_processor() -> None:
    torch.manual_seed(4)
    hidden, embedding, labels = torch.randn(6, 32), torch.randn(50, 32), torch.arange(6)
    exact = nn.functional.cross_entropy(hidden.double() @ embedding.double().T, labels, reduction="none")
    assert (train.token_loss(hidden, embedding, labels) - exact).abs().max() < 1e-4


def test_windows_lie_inside_and_half_begin_documents() -> None:
    tokens = torch.arange(1000, dtype=torch.int16)
    starts = torch.tensor([5, 300, 990])
    generator = torch.Generator().manual_seed(0)
    windows = train.sample_windows(tokens, starts, 64, 65, generator)
    assert windows.shape == (64, 65)
    assert (windows.diff(dim=1) == 1).all()
    assert windows.max() < 1000
    assert set(windows[:32, 0].tolist()) <= {5, 300, 1000 - 65}
    assert len(set(windows[32:, 0].tolist())) > 16


def test_saved_weights_are_small_and_read_back(tmp_path: Path) -> None:
    config = small_config()
    state = train.TrainTarget(config, (0,)).state_dict()
    train.save_model(tmp_path, state, config.to_json())
    again = load_weights(tmp_path)
    assert set(again) == set(state)
    for name, value in again.items():
        exact = name.endswith(("A_log", "dt_bias"))
        assert value.dtype == (torch.float32 if exact else torch.bfloat16)
        assert torch.allclose(value.float(), state[name], rtol=0 if exact else 1e-2, atol=0)
    assert TargetConfig.load(tmp_path) == config


@torch.no_grad()
def test_rollouts_go_on_from_their_prompts() -> None:
    pair = Pair.random(4)
    prompts = torch.tensor([random_prompt(pair.config, 64, s) for s in range(8)])
    with torch.inference_mode():
        out = train.continue_prompts(pair.target, prompts, 80, torch.Generator().manual_seed(0))
    assert out.shape == (8, 80)
    assert torch.equal(out[:, :64], prompts)
    decoder = Decoder(pair.target, slots=1)
    for row in out[:6]:  # the last quarter is sampled
        (g,) = generate(decoder, [Job(Request(tuple(row[:64].tolist()), 16, ignore_eos=True))])
        assert g.output_ids == row[64:].tolist()


# --- end to end ----------------------------------------------------------------------------------------------------

SHORT = {
    "tokens": 40_000, "target_minutes": 0.02, "rollouts": 16, "drafter_minutes": 0.02, "least_steps": 1,
    "held_documents": 2, "held_windows": 8,
}  # fmt: skip


def run_training(out: Path, **changes: Any) -> Path:
    flags = [part for name, value in changes.items() for part in ("--set", f"{name}={value}")]
    train.main(["--tiny", "--device", "cpu", "--workers", "1", "--out", str(out), *flags])
    return out


def check_trained(folder: Path) -> Pair:
    """What a training leaves: files that this engine and transformers load, and notes."""
    for name in ("target/tokenizer.json", "target/tokenizer_config.json", "training.json", "MODEL_CARD.md"):
        assert (folder / name).is_file(), name
    notes = json.loads((folder / "training.json").read_text())
    assert notes["target"]["steps"] > 0
    assert notes["drafter"]["steps"] > 0
    assert notes["drafter"]["held_out_accept_length"] >= 1
    pair = Pair.load(folder)
    tokenizer = Tokenizer.load(folder / "target")
    assert tokenizer.vocab_size == pair.config.vocab_size
    assert tokenizer.eos_token_id == pair.config.eos_token_id
    assert pair.drafter is not None
    assert tokenizer.mask_token_id == pair.drafter.config.mask_token_id
    jobs = make_jobs(pair, [30, 5], [24, 20])
    check_lossless(pair, pair.drafter, "ddtree", 16, jobs)
    rollouts = np.load(folder / "work" / "rollouts.npy")
    assert rollouts.shape[1] == 128
    assert 0 <= rollouts.min() <= rollouts.max() < pair.config.vocab_size
    return pair


def check_loads_in_transformers(folder: Path, pair: Pair) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        model, info = transformers.Qwen3_5ForCausalLM.from_pretrained(
            folder / "target", dtype=torch.float32, output_loading_info=True
        )
        assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "target")
        text = "def f(x):\n    return x + 1\n"
        ids = tokenizer(text).input_ids
        assert ids == Tokenizer.load(folder / "target").encode(text)
        assert tokenizer.decode(ids) == text
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0]
    assert (logits - pair.reference.logits(ids)).abs().max() < TOLERANCE


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seconds of training, and of measuring."""
    return run_training(tmp_path_factory.mktemp("short"), **SHORT)


class TestShort:
    def test_leaves_a_pair(self, short_run: Path) -> None:
        check_trained(short_run)

    def test_loads_in_transformers(self, short_run: Path) -> None:
        check_loads_in_transformers(short_run, Pair.load(short_run))

    def test_a_stage_can_be_run_again(self, short_run: Path) -> None:
        """On the files and settings of the stages before it; the other stages' facts stay."""
        before = (short_run / "target" / "model.safetensors").read_bytes()
        old = json.loads((short_run / "training.json").read_text())
        flags = ["--stages", "rollouts", "--set", "rollouts=8"]
        train.main(["--device", "cpu", "--out", str(short_run), *flags])
        assert np.load(short_run / "work" / "rollouts.npy").shape == (8, 128)
        assert (short_run / "target" / "model.safetensors").read_bytes() == before
        new = json.loads((short_run / "training.json").read_text())
        assert new["settings"] == old["settings"] | {"rollouts": 8}
        assert (new["tokens"], new["target"]) == (old["tokens"], old["target"])
        assert new["rollouts"]["command"].endswith("--out DIR --stages rollouts --set rollouts=8")

    def test_weights_can_be_read_by_all(self, short_run: Path) -> None:
        for name in ("target", "drafter"):
            assert (short_run / name / "model.safetensors").stat().st_mode & 0o777 == 0o644

    def test_card_tells_what_was_made(self, short_run: Path, tmp_path: Path) -> None:
        train.main(["--device", "cpu", "--out", str(short_run), "--stages", "card"])
        text = " ".join((short_run / "MODEL_CARD.md").read_text().split())  # lines may end anywhere
        facts = json.loads((short_run / "training.json").read_text())
        for expected in (
            f"{facts['target']['parameters']:,} parameters", f"{facts['drafter']['steps']:,} steps of 4 rollouts",
            "40,000 training tokens", f"| json | {facts['target']['held_out_loss']['json']:.3f} |",
            "byte-level BPE of 512 tokens", "generated text alone", facts["target"]["command"],
        ):  # fmt: skip
            assert expected in text, expected
        assert "## Accept lengths" not in text
        rows = [
            {"method": "auto", "prompt": "fib", "accept_length": None, "full_block_share": None},
            {"method": "b16", "prompt": "fib", "accept_length": 6.738, "full_block_share": 0.0789},
        ]
        bench = tmp_path / "bench.json"
        bench.write_text(json.dumps({"new_tokens": 256, "methods": rows}))
        train.main(["--device", "cpu", "--out", str(short_run), "--stages", "card", "--bench", str(bench)])
        assert "| Opening | b16 |\n| --- | --- |\n| fib | 6.74 (8%) |" in (short_run / "MODEL_CARD.md").read_text()


class TestCommandLine:
    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--set", "nonsense=1"], "no such setting; settings are anchors, batch"),
            (["--set", "taps=1"], "no such setting"),
            (["--set", "parse=1"], "no such setting"),
            (["--set", "layers=four"], "'four' is not a whole number"),
            (["--set", "tokens=1.5"], "'1.5' is not a whole number"),
            (["--set", "gamma="], "'' is not a number"),
            (["--set", "real_text=maybe"], "'maybe' is not true or false"),
            (["--stages", "target,tokens_"], "unknown stage 'tokens_'"),
            (["--stages", "target"], "stage target needs a file that an earlier stage leaves"),
            (["--stages", "card"], "stage card needs a file that an earlier stage leaves"),
            (["--device", "abacus"], "abacus"),
        ],
    )
    def test_what_it_does_not_know_is_refused(
        self, tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as exit_:
            train.main(["--tiny", "--out", str(tmp_path / "out"), *flags])
        assert exit_.value.code == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()

    def test_settings_are_read_by_their_types(self) -> None:
        items = ["real_text=False", "tokens=120_000", "gamma=4", "target_minutes=0.5"]
        s = train.parse_settings(train.Settings(), items)
        assert (s.real_text, s.tokens, s.gamma, s.target_minutes) == (False, 120_000, 4.0, 0.5)
        assert isinstance(s.gamma, float)
        assert train.parse_settings(s, ["real_text=true"]).real_text is True


class TestShipped:
    def test_weights_are_small(self) -> None:
        """They go into every wheel."""
        assert sum(p.stat().st_size for p in packaged_folder().rglob("*") if p.is_file()) < 16 * 1024 * 1024

    def test_load_quickly(self) -> None:
        """Under two seconds, by the best of three on a machine that has other work."""
        plan = ModelPlan(packaged_folder() / "target", WEIGHTS / "drafter", method="ddtree", budget=64)
        seconds = []
        for _ in range(3):
            begun = time.perf_counter()
            load_decoder(plan)
            seconds.append(time.perf_counter() - begun)
        assert min(seconds) < 2, seconds

    def test_card_is_written_from_the_facts(self, tmp_path: Path) -> None:
        (tmp_path / "training.json").write_bytes((packaged_folder() / "training.json").read_bytes())
        assert card.write_card(tmp_path).read_text() == (WEIGHTS / "MODEL_CARD.md").read_text()

    def test_card_names_every_source_and_licence(self) -> None:
        text = (packaged_folder() / "MODEL_CARD.md").read_text()
        facts = json.loads((WEIGHTS / "training.json").read_text())
        for name, source in facts["tokens"]["sources"].items():
            assert f"| {name} | {source['version']} | {source['licence']} |" in text
        for stage in card.STAGES:
            assert facts[stage]["command"] in text
        assert all(f"| {name} |" in text for name in ("fib", "qsort", "arith", "json", "all"))

    def test_facts_are_of_these_weights(self) -> None:
        facts = json.loads((packaged_folder() / "training.json").read_text())
        for name in ("target", "drafter"):
            weights = load_weights(WEIGHTS / name)
            assert sum(w.numel() for w in weights.values()) == facts[name]["parameters"]


@pytest.mark.slow
def test_tiny_end_to_end(tmp_path: Path) -> None:
    """As `--tiny` is: about a minute, and it has learned something."""
    folder = run_training(tmp_path / "out")
    check_loads_in_transformers(folder, check_trained(folder))
    notes = json.loads((folder / "training.json").read_text())
    assert notes["target"]["steps"] >= 30
    assert max(notes["target"]["held_out_loss"].values()) < 0.9 * math.log(512)
    assert notes["drafter"]["train_loss"] < 0.9 * math.log(512)
