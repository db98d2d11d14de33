"""NCCL profiles as checked data, and what real SGLang logs tell of NCCL."""

from __future__ import annotations

import dataclasses
import gzip
import json
import lzma
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchlib.errors import SpecError
from benchlib.nccl import (
    NcclLog,
    Profile,
    format_profile,
    known_variables,
    load_nccl_log,
    load_profiles,
    parse_nccl_log,
    profile_env,
    variables_differ,
)

DATA = Path(__file__).parent / "data" / "nccl"
# SGLang 0.5.17, NCCL 2.28.9: two GPUs with custom all-reduce, without it under the pcie set, without both; one GPU.
CUSTOM, PCIE, PLAIN, ONE = (
    (DATA / f"{name}.log").read_text() for name in ("tp2_custom", "tp2_nccl_pcie", "tp2_nccl", "tp1")
)
PRODUCTION = {"NCCL_IB_DISABLE": "1", "NCCL_P2P_LEVEL": "5", "NCCL_MIN_NCHANNELS": "8"}
TUNING = {
    "NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", "NCCL_MAX_NCHANNELS": "16",
    "NCCL_BUFFSIZE": "16777216", "NCCL_NTHREADS": "512",
}  # fmt: skip


def info(message: str, *, pid: int = 1, level: str = "NCCL INFO") -> str:
    return f"vm:{pid}:{pid} [0] {level} {message}\n"


def start(name: str, nranks: int, pid: int = 1) -> str:
    return info(
        f"ncclCommInitRank comm 0x1 rank 0 nranks {nranks} cudaDev 0 busId 60 commId {name} - Init START", pid=pid
    )


def server_args(**changed: object) -> str:
    fields = {"tp_size": 2, "disable_custom_all_reduce": False, "enable_torch_symm_mem": False} | changed
    return f"[date] server_args=ServerArgs({', '.join(f'{name}={value!r}' for name, value in fields.items())})\n"


def test_shipped_profiles() -> None:
    assert profile_env("none") == {}
    assert profile_env("production") == PRODUCTION
    assert profile_env("pcie") == PRODUCTION | TUNING


def test_every_known_variable_says_what_it_is_for() -> None:
    assert len(known_variables()) >= 35
    for name, variable in known_variables().items():
        assert name.startswith("NCCL_")
        assert variable.reason
        assert variable.reason[-1] != "."
        # Exactly one way of saying what is allowed, and words for a pattern.
        assert bool(variable.values) + bool(variable.range) + bool(variable.pattern) == 1, name
        assert bool(variable.pattern) == bool(variable.form), name
        assert not variable.allows(""), name
        assert not variable.allows("a b\nc"), name


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("NCCL_DEBUG", ["INFO", "info"], ["LOUD", "INFO "]),
        ("NCCL_DEBUG_SUBSYS", ["INIT,ENV", "^PROXY", "ALL"], ["INIT;ENV", "INIT,"]),
        ("NCCL_P2P_LEVEL", ["NVL", "SYS", "0", "5"], ["sys", "6", "-1", "NODE"]),
        ("NCCL_ALGO", ["Ring", "ring,tree", "^Tree", "allreduce:tree", "Ring;allreduce:^Tree,NVLS"],
         ["Circle", "Ring,", "Ring;Tree", "Ring Tree", "allreduce:", ";allreduce:tree"]),
        ("NCCL_PROTO", ["LL", "^LL128", "LL,Simple;allreduce:LL"], ["LL256", "LL,,Simple"]),
        ("NCCL_NTHREADS", ["64", "512"], ["100", "1024", "512.0"]),
        ("NCCL_BUFFSIZE", ["16777216", "0x1000000"], ["16M", "0", "1_000_000", "9" * 30]),
        ("NCCL_MAX_CTAS", ["1", "64"], ["0", "65", "-1", "007"]),
        ("NCCL_IB_HCA", ["mlx5", "^=mlx5_1,mlx5_4", "=mlx5_0:1"], ["mlx5 mlx6"]),
    ],
)  # fmt: skip
def test_values_are_those_of_nccl(name: str, good: list[str], bad: list[str]) -> None:
    variable = known_variables()[name]
    assert [value for value in good if not variable.allows(value)] == []
    assert [value for value in bad if variable.allows(value)] == []


def test_own_profiles_join_and_replace_the_shipped(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        '[profiles.mine]\ndescription = "two\\nlines"\nNCCL_MIN_CTAS = 8\n[profiles.pcie]\nNCCL_PROTO = "Simple"\n'
    )
    profiles = load_profiles(path)
    assert profiles["mine"] == Profile("mine", {"NCCL_MIN_CTAS": "8"}, "two lines")
    assert profile_env("pcie", profiles) == {"NCCL_PROTO": "Simple"}
    assert profile_env("production", profiles) == PRODUCTION
    assert profile_env("pcie") == PRODUCTION | TUNING


def test_unknown_variables_and_values_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        '[profiles.a]\nNCCL_PORTO = "LL"\nnccl_algo = "Ring"\nNCCL_NTHREADS = 100\n'
        "[profiles.b]\nNCCL_IB_DISABLE = true\n"
    )
    with pytest.raises(SpecError, match=r"own\.toml has 4 problem") as caught:
        load_profiles(path)
    text = str(caught.value)
    assert "a: 'NCCL_PORTO' is no NCCL variable known here; did you mean NCCL_PROTO?" in text
    assert "did you mean NCCL_ALGO?" in text
    assert "a: NCCL_NTHREADS=100 is not what NCCL takes; allowed: 64, 128, 256, 512" in text
    assert "b: NCCL_IB_DISABLE=True is not what NCCL takes; allowed: 0, 1" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[profiles.none]\nNCCL_IB_DISABLE = 1\n", 'NAME not "none"'),
        ("[profile.a]\nNCCL_IB_DISABLE = 1\n", r"may hold \[profiles.NAME\] tables alone"),
        ("profiles = 3\n", "tables alone"),
        ("[profiles]\na = 3\n", "'a': a profile is a table"),
        ('[profiles."a\\nrm"]\n', "a profile is a table named by letters"),
        ("[profiles.a]\nNCCL_MAX_CTAS = 99\n", "allowed: 1 to 64"),
        ("[profiles.a]\nNCCL_MIN_CTAS = 9\nNCCL_MAX_CTAS = 8\n", "a: NCCL_MIN_CTAS=9 is above NCCL_MAX_CTAS=8"),
        ("[profiles.a]\nNCCL_ALGO = 'Circle'\n", "allowed: a list such as Ring"),
        ("profiles = [\n", "cannot read the NCCL profiles"),
    ],
)  # fmt: skip
def test_files_of_another_form_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        load_profiles(path)


@pytest.mark.parametrize("what", ["NCHANNELS", "CTAS"])
def test_one_number_may_be_the_least_and_the_most(tmp_path: Path, what: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(f"[profiles.a]\nNCCL_MIN_{what} = 8\nNCCL_MAX_{what} = 8\n")
    assert profile_env("a", load_profiles(path)) == {f"NCCL_MIN_{what}": "8", f"NCCL_MAX_{what}": "8"}


def test_missing_files_and_profiles_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"absent\.toml"):
        load_profiles(tmp_path / "absent.toml")
    with pytest.raises(SpecError, match='no NCCL profile "pci"; there are none, pcie, production'):
        profile_env("pci")


@pytest.mark.parametrize("name", ["none", "production", "pcie"])
def test_printed_profiles_are_shell(name: str) -> None:
    text = format_profile(load_profiles()[name])
    assert max(map(len, text.splitlines())) <= 110
    assert text.count("Risk: ") == len(profile_env(name))
    assert shell(text) == profile_env(name)


@settings(max_examples=25, deadline=None)  # each starts a shell
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
def test_printed_values_are_quoted(value: str) -> None:
    assert shell(format_profile(Profile("own", {"NCCL_TOPO_FILE": value}))) == {"NCCL_TOPO_FILE": value}


def shell(text: str) -> dict[str, str]:
    """The NCCL variables that a real shell has after it ran `text`."""
    done = subprocess.run(
        ["bash", "-c", f"{text}\nexec env -0"], capture_output=True, env={"PATH": "/usr/bin:/bin"}, check=True
    )
    pairs = (entry.partition("=") for entry in done.stdout.decode().split("\0"))
    return {name: value for name, _, value in pairs if name.startswith("NCCL_")}


def test_custom_all_reduce_bypasses_nccl() -> None:
    log = parse_nccl_log(CUSTOM)
    assert log.decode_all_reduce == "custom"
    assert "All Reduce config: symmetric_memory = 80.01 MB" in str(log.decode_all_reduce_evidence)
    # NCCL is set up all the same: its own lines cannot tell.
    assert (log.version, log.nranks, log.coll_channels, log.p2p_channels) == ("2.28.9", 2, 24, 32)
    assert log.transports == {"0->1": "P2P/IPC", "1->0": "P2P/IPC"}
    assert log.variables == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    assert (log.rings_connected, log.trees_connected, log.warnings) == (True, True, ())


@pytest.mark.parametrize(("text", "channels"), [(PCIE, 16), (PLAIN, 24)])
def test_without_it_decode_goes_through_nccl(text: str, channels: int) -> None:
    log = parse_nccl_log(text)
    assert log.decode_all_reduce == "nccl"
    assert str(log.decode_all_reduce_evidence).endswith("server_args=ServerArgs( ... disable_custom_all_reduce=True")
    assert log.coll_channels == channels


def test_one_rank_has_no_all_reduce() -> None:
    log = parse_nccl_log(ONE)
    assert (log.nranks, log.version, log.rings_connected, log.decode_all_reduce) == (None, None, None, None)
    assert str(log.decode_all_reduce_evidence).startswith("one rank: ")
    assert str(log.decode_all_reduce_evidence).endswith("tp_size=1")
    assert variables_differ(profile_env("pcie"), log) == ()


def test_asked_for_variables_are_found_in_the_log() -> None:
    asked = profile_env("pcie") | {"NCCL_DEBUG": "INFO", "NCCL_NVLS_ENABLE": "0", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert parse_nccl_log(PCIE).variables["NCCL_P2P_LEVEL"] == "SYS"
    assert variables_differ(asked, parse_nccl_log(PCIE)) == ()
    assert variables_differ(asked | {"NCCL_BUFFSIZE": "0x1000000", "NCCL_ALGO": "ring"}, parse_nccl_log(PCIE)) == ()
    missing = variables_differ(asked, parse_nccl_log(PLAIN))
    assert [text.split("=")[0] for text in missing] == list(profile_env("pcie"))
    assert "NCCL's log does not name it" in missing[0]


def test_other_values_are_told() -> None:
    log = parse_nccl_log(PCIE)
    assert variables_differ({"NCCL_P2P_LEVEL": "3"}, log) == ("NCCL_P2P_LEVEL=3 was asked for, but NCCL read SYS",)
    assert variables_differ({"NCCL_P2P_LEVEL": "PHB"}, log) == ("NCCL_P2P_LEVEL=PHB was asked for, but NCCL read SYS",)
    assert variables_differ({"NCCL_NTHREADS": "256"}, log) == ("NCCL_NTHREADS=256 was asked for, but NCCL read 512",)
    differing = parse_nccl_log(
        info("NCCL_NTHREADS set by environment to 64.") + info("NCCL_NTHREADS set by environment to 512.")
    )
    assert variables_differ({"NCCL_NTHREADS": "512"}, differing) == (
        "NCCL_NTHREADS=512 was asked for, but NCCL read 64 | 512",
    )


@pytest.mark.parametrize(("level", "name"), list(enumerate(["LOC", "PIX", "PXB", "PHB", "SYS", "SYS"])))
def test_legacy_levels(level: int, name: str) -> None:
    for variable in ("NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL"):
        assert variables_differ({variable: str(level)}, NcclLog(variables={variable: name})) == ()


def test_values_that_nccl_never_echoes_are_not_missed() -> None:
    asked = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "ALL", "NCCL_NET": "Socket", "NCCL_P2P_DISABLE": "0"}
    log = parse_nccl_log(PLAIN)
    assert variables_differ(asked, log) == ()
    assert len(variables_differ({"NCCL_P2P_DISABLE": "1"}, log)) == 1
    # A log that was kept from echoing tells nothing.
    assert variables_differ(profile_env("pcie"), parse_nccl_log(start("a", 2))) == ()


PAIR = "0[0] -> 1[1]"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (f"Channel 00/0 : {PAIR} via P2P/CUMEM/read", "P2P/CUMEM/read"),
        (f"Channel 00 : {PAIR} via SHM/direct/direct", "SHM/direct/direct"),
        (f"Channel 01/0 : {PAIR} [send] via NET/Socket/0", "NET/Socket/0"),
        (f"Channel 01/0 : {PAIR} [receive] via NET/IB/0/GDRDMA", "NET/IB/0/GDRDMA"),
        ("Channel 00/0 : 0[1a000] -> 1[1b000] via P2P/indirect/2[2]", "P2P/indirect/2[2]"),
    ],
)
def test_transports(line: str, found: str) -> None:
    assert parse_nccl_log(start("a", 2) + info(line)).transports == {"0->1": found}
    twice = info(f"Channel 02/0 : {PAIR} via X/1") + info(line) * 2
    assert parse_nccl_log(start("a", 2) + twice).transports == {"0->1": f"X/1 | {found}"}


def test_the_largest_communicator_is_told_and_the_first_of_those() -> None:
    def channels(n: int, pid: int = 1) -> str:
        return info(
            f"{n} coll channels, {n} collnet channels, 0 nvls channels, {n + 1} p2p channels, 2 p2p channels per peer",
            pid=pid,
        )

    text = start("small", 2) + channels(3) + start("first", 4) + start("first", 4, pid=2) + channels(5, pid=2)
    text += start("second", 4) + channels(7) + info("Connected all trees")
    log = parse_nccl_log(text)
    assert (log.nranks, log.coll_channels, log.p2p_channels, log.trees_connected) == (4, 5, 6, False)
    split = (
        "ncclCommSplit comm 0x2 rank 0 nranks 8 cudaDev 0 busId 60 parent 0x1 childCount 1 color 7 key 0- Init START"
    )
    assert parse_nccl_log(text + info(split) + channels(9)).coll_channels == 9


def test_lines_that_run_into_one_another() -> None:
    text = (
        start("a", 2).strip()
        + info("NCCL_PROTO set by environment to LL", pid=2)
        + "50%|##  "
        + info("Connected all rings, use")
    )
    log = parse_nccl_log(f"\0\0\0{text}")
    assert (log.nranks, log.variables, log.rings_connected, log.trees_connected) == (
        2,
        {"NCCL_PROTO": "LL"},
        True,
        False,
    )


def test_warnings_are_kept_once() -> None:
    text = info("Failed to init", level="net.cc:334 (init) NCCL WARN") + "[2026-05-05 06:16:47] "
    text += info("Failed to init", level="plugin/net.cc:334 NCCL WARN") + info(
        "Invalid NCCL_NTHREADS 100 (must be a multiple of 32)"
    )
    assert parse_nccl_log(text).warnings == ("Failed to init", "Invalid NCCL_NTHREADS 100 (must be a multiple of 32)")


V2 = "[date TP0] All Reduce config: symmetric_memory = 80.01 MB, local_buffer = 2.00 MB, multicast = False\n"
LEGACY = "[date TP0] Registering 516 cuda graph addresses\n"
FAILED = (
    "[date TP0] Setup Custom allreduce failed with invalid literal for int() with base 10: 'GPU-1'. To silence this\n"
)
PCIE_ONLY = (
    "[date TP0] CustomAllreduce is disabled because it's not supported on more than two PCIe-only GPUs. "
    "To silence this warning, specify disable_custom_all_reduce=True explicitly.\n"
)
FUSED = (
    "[date TP0] FlashInfer AllReduce Fusion enabled and workspace initialized: backend=trtllm, rank=0, world_size=2\n"
)
MSCCLPP = "[date TP0] Created MSCCL++ communicator: group=tp:0 world_size=2 allreduce_configs=9 allgather_configs=0\n"
NO_SYMM = "[date TP0] TorchSymmMemCommunicator: World size 3 not supported, communicator is not available.\n"


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("", None),
        (server_args(), None),
        ("[date] Auto-enabling FlashInfer AllReduce Fusion (auto) for Model\n" + server_args(), None),
        (server_args(tp_size=16) + V2, "custom"),
        (LEGACY, "custom"),
        (LEGACY.replace("516", "0") + server_args(disable_custom_all_reduce=True), "nccl"),
        (V2.replace("False", "False, pull = False") + server_args(disable_custom_all_reduce=True), "nccl"),
        (V2.replace("False", "False, pull = True"), "custom"),
        (PCIE_ONLY, "nccl"),
        (PCIE_ONLY.replace("CustomAllreduce", "Custom allreduce"), "nccl"),
        (PCIE_ONLY.replace("CustomAllreduce", "CustomAllReduceV2") + LEGACY, "custom"),
        (FAILED, "nccl"),
        (V2 + FAILED, "nccl"),
        (FUSED + V2, "other: flashinfer fusion"),
        (FUSED + server_args(disable_custom_all_reduce=True), "other: flashinfer fusion"),
        (FUSED + "Failed. Disabling flashinfer allreduce fusion permanently.\n" + V2, "custom"),
        (V2 + MSCCLPP, "other: mscclpp"),
        (V2 + MSCCLPP.replace("=9", "=0"), "custom"),
        (PCIE_ONLY + "[date] FlashInfer PCIe-IPC workspace built (world=4)\n", "other: flashinfer pcie-ipc"),
        (server_args(enable_torch_symm_mem=True) + PCIE_ONLY, "other: torch symmetric memory"),
        (server_args(enable_torch_symm_mem=True) + PCIE_ONLY + NO_SYMM, "nccl"),
        (server_args(tp_size=1, disable_custom_all_reduce=True), None),
        ("server_args={'tp_size': 2, 'moe_dense_tp_size': 1, 'disable_custom_all_reduce': True}\n", "nccl"),
        ("server_args={'tp_size': 1, 'disable_custom_all_reduce': True}\n", None),
    ],
)  # fmt: skip
def test_who_carries_decodes_all_reduces(text: str, way: str | None) -> None:
    log = parse_nccl_log(text)
    assert log.decode_all_reduce == way
    told = log.decode_all_reduce_evidence
    assert (told is not None) == (way is not None or "(tp_size=1," in text or "{'tp_size': 1," in text)
    assert told is None or len(told) <= 200


def test_a_log_is_loaded_plain_or_packed_by_its_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    for data in (PCIE.encode(), gzip.compress(PCIE.encode()), bytes(9000) + PCIE.encode() + b"\xe2\x96"):
        path.write_bytes(data)
        assert load_nccl_log(path) == parse_nccl_log(PCIE)
    path.write_bytes(b"")
    assert load_nccl_log(path) == NcclLog()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (gzip.compress(PCIE.encode())[:200], "end-of-stream"),
        (gzip.compress(b"x", mtime=0)[:10] + b"\xff" * 20, "Error -3"),
        (b"\x1f\x8bx", "ompression method|end-of-stream|header"),
        (gzip.compress(lzma.compress(PCIE.encode())), "what gzip packed in it is no text"),
        (lzma.compress(PCIE.encode()), r"begins with b'\\xfd7zXZ.* is no text. Give a server's log"),
        (Path(sys.executable).read_bytes()[:100_000], "begins with .* is no text"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,  # a packed text holds the time of its packing
)  # fmt: skip
def test_a_log_that_is_no_text_is_refused(tmp_path: Path, data: bytes, told: str) -> None:
    (tmp_path / "server.log").write_bytes(data)
    with pytest.raises(SpecError, match=rf"cannot read the log .*server\.log: .*({told})"):
        load_nccl_log(tmp_path / "server.log")


def test_a_log_becomes_json() -> None:
    log = parse_nccl_log(PCIE)
    data = json.loads(json.dumps(dataclasses.asdict(log)))
    assert NcclLog(**data | {"warnings": tuple(data["warnings"])}) == log
    assert parse_nccl_log("nothing of the kind\n") == NcclLog()


PIECES = [
    *CUSTOM.splitlines(),
    *PCIE.splitlines(),
    FUSED,
    MSCCLPP,
    FAILED,
    "vm:1:1 [0] NCCL INFO ",
    "nranks ",
    " via ",
    "\0",
    "\r",
]


@given(st.one_of(st.text(), st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=9))).map("\n".join)))
def test_any_text_is_read(text: str) -> None:
    log = parse_nccl_log(text)
    json.dumps(dataclasses.asdict(log))
    variables_differ(profile_env("pcie"), log)


@given(st.sets(st.integers(0, PCIE.count("\n") - 1)), st.integers(1, PCIE.count("\n")))
def test_lines_dropped_make_nothing_up(dropped: set[int], length: int) -> None:
    whole = parse_nccl_log(PCIE)
    kept = [line for number, line in enumerate(PCIE.splitlines()[:length]) if number not in dropped]
    log = parse_nccl_log("\n".join(kept))
    assert log.nranks in (None, whole.nranks)
    assert log.version in (None, whole.version)
    assert log.variables.items() <= whole.variables.items()
    assert log.transports.items() <= whole.transports.items()
    assert log.decode_all_reduce in (None, whole.decode_all_reduce)
