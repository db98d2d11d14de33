"""Preflight on saved machines: what it sees, whether a launch would fail, and what it tells to do."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchlib import probe
from benchlib.errors import PlacementError
from benchlib.host import Check, GpuState, Machine, busy_gpus, format_checks, read_gpu_states, run_checks, would_fail
from benchlib.probe import Device, decode_throttle
from benchlib.spec import RunSpec
from tests.test_model_files import HYBRID, model

HOSTS = Path(__file__).parent / "data" / "hosts"
GIB = 2**30
Edit = Callable[..., Machine]


def saved(name: str, **changes: Any) -> Machine:
    """A saved machine with some of what it shows replaced; `gpus` maps an index to the changed fields."""
    machine = Machine.saved(HOSTS / name)
    gpus = changes.pop("gpus", {})
    states = tuple(dataclasses.replace(g, **gpus.get(g.index, {})) for g in (machine.gpu_states() if gpus else ()))
    return dataclasses.replace(machine, **({"gpu_states": lambda: states} if gpus else {}), **changes)


@pytest.fixture
def copied(tmp_path: Path) -> Callable[..., Machine]:
    """A saved machine with some of its texts replaced: `copied("healthy_8", {"proc/cmdline": "quiet"})`."""

    def copy(name: str, texts: dict[str, str], **changes: Any) -> Machine:
        root = tmp_path / "root"
        shutil.copytree(HOSTS / name, root)
        for path, text in texts.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        return dataclasses.replace(saved(name, **changes), root=root)

    return copy


def sglang(**parameters: Any) -> RunSpec:
    return RunSpec.from_parameters({"engine": "sglang", "server_python": "python", **parameters})


def checked(machine: Machine, spec: RunSpec | None = None, **options: Any) -> dict[str, Check]:
    found = run_checks(spec or sglang(), machine=machine, **options)
    assert all(check.saw and check.why for check in found)
    assert all(check.remedy for check in found if check.status in ("warn", "fail"))
    names = [check.name for check in found]
    assert len(set(names)) == len(names)
    return dict(zip(names, found, strict=True))


def states_of(found: dict[str, Check], *statuses: str) -> dict[str, str]:
    return {name: check.status for name, check in found.items() if check.status in statuses}


# ---- the four saved machines


def test_a_healthy_machine_passes() -> None:
    found = checked(saved("healthy_8"), sglang(tp_size=8), gpus=range(8))
    assert states_of(found, "warn", "fail", "skip") == {}
    assert found["device nodes"].saw == "nvidiactl, nvidia-uvm and 8 GPUs open"
    assert found["GPUs"].saw == "8 x NVIDIA RTX PRO 6000 Blackwell Server Edition, driver 580.95.05, CUDA 13.0"
    assert not would_fail(found.values())


def test_a_container_that_may_not_open_uvm() -> None:
    found = checked(saved("seed_container"), sglang(tp_size=4))
    assert states_of(found, "warn", "fail") == {"device nodes": "fail", "cuInit": "fail"}
    nodes, cuda = found["device nodes"], found["cuInit"]
    assert nodes.saw.startswith("/dev/nvidia-uvm: EPERM on open, by the container's device policy")
    assert "cannot be read from inside" in nodes.saw
    assert "lxc.cgroup2.devices.allow: c 511:* rwm" in (nodes.remedy or "").splitlines()
    assert cuda.saw == "cuInit(0) returns 999 (CUDA_ERROR_UNKNOWN)"
    assert would_fail(found.values())


def test_a_wedged_gpu_fails_the_run_that_gets_it() -> None:
    machine = saved("wedged_gpu")
    hit = checked(machine, sglang(tp_size=2), gpus=(2, 3))
    assert hit["GPUs idle"].status == "fail"
    assert hit["GPUs idle"].saw == "GPU 2: 100% busy, no process"
    assert "--gpu-reset" in (hit["GPUs idle"].remedy or "")
    assert hit["GPUs free"].status == "warn"  # GPU 5 is another's
    assert hit["GPUs free"].saw == "GPU 5: PID 4242 python holds 48.0 GiB"
    beside = checked(machine, sglang(tp_size=2), gpus=(0, 1))
    assert states_of(beside, "warn", "fail") == {"GPUs free": "warn", "GPUs idle": "warn"}
    assert checked(machine, sglang(tp_size=2), gpus=(4, 5))["GPUs free"].status == "fail"
    # Not placed yet: what counts is whether enough are left.
    assert checked(machine, sglang(tp_size=4))["GPUs idle"].status == "warn"
    assert states_of(checked(machine, sglang(tp_size=8)), "fail") == {"GPUs free": "fail", "GPUs idle": "fail"}


def test_a_machine_without_gpus() -> None:
    found = checked(saved("no_gpu"))
    assert states_of(found, "fail") == {"device nodes": "fail", "packages": "fail"}
    assert found["device nodes"].saw.startswith("no NVIDIA GPU is visible")
    assert 'engine "reference"' in (found["device nodes"].remedy or "")
    assert "cuInit" not in found  # it would say the same again
    without = checked(saved("no_gpu"), RunSpec(), engine="reference")
    assert states_of(without, "warn", "fail", "skip") == {}
    assert "device nodes" not in without
    on_cpu = checked(saved("no_gpu"), sglang(server_args=["--device", "cpu"]))
    assert set(states_of(on_cpu, "fail")) == {"packages"}
    assert "lacks sglang" in on_cpu["packages"].saw


def test_this_machine_can_run_the_embedded_engine() -> None:
    found = run_checks(None, engine="reference", machine=Machine.here())
    assert not [check for check in found if check.status == "fail"]
    assert {"packages", "ports", "/dev/shm", "limits"} <= {check.name for check in found if check.status != "skip"}
    # Whatever GPUs it has or lacks, asking is no error.
    assert run_checks(None, engine="sglang", machine=Machine.here())[0].name == "device nodes"


# ---- device nodes


def nodes(**changed: Device | None) -> Callable[[], dict[str, Device]]:
    """The healthy machine's nodes, some replaced or (None) removed; `uvm=` stands for /dev/nvidia-uvm."""
    names = {f"/dev/nvidia{'-uvm' if name == 'uvm' else name}": node for name, node in changed.items()}
    found = {**Machine.saved(HOSTS / "healthy_8").devices(), **names}
    return lambda: {path: node for path, node in found.items() if node is not None}


@pytest.mark.parametrize(
    ("uvm", "saw", "remedy"),
    [
        (None, "/dev/nvidia-uvm is missing, while its driver has major 508", "nvidia-modprobe -u -c=0"),
        (Device(511, 0, errno.EPERM), "has major 511, its driver now 508", "make it anew"),
        (Device(508, 0, errno.EACCES), "EACCES on open", "owner and mode"),
        (Device(508, 0, 9999), "9999 on open", "dmesg"),
    ],
)
def test_what_is_wrong_with_a_node(uvm: Device | None, saw: str, remedy: str) -> None:
    check = checked(saved("healthy_8", devices=nodes(uvm=uvm)))["device nodes"]
    assert check.status == "fail"
    assert saw in check.saw
    assert remedy in (check.remedy or "")


def test_a_module_that_is_not_loaded(copied: Edit) -> None:
    check = checked(copied("healthy_8", {"proc/devices": "Character devices:\n195 nvidia\n"}, devices=nodes(uvm=None)))
    assert "/proc/devices has no nvidia-uvm, so its kernel module is not loaded" in check["device nodes"].saw
    assert "modprobe nvidia-uvm" in (check["device nodes"].remedy or "")


@pytest.mark.parametrize(("listed", "word"), [("c 195:* rwm\nc 1:3 rwm", "lacks"), ("c 511:* rwm", "has")])
def test_the_older_cgroup_lists_its_devices(copied: Edit, listed: str, word: str) -> None:
    check = checked(copied("seed_container", {"sys/fs/cgroup/devices/devices.list": listed}))["device nodes"]
    assert f"(cgroup v1) {word} it" in check.saw
    assert "lxc.cgroup.devices.allow: c 511:* rwm" in (check.remedy or "")


def test_gpus_that_a_scheduler_shuts_off_are_no_fault() -> None:
    shut = {str(n): Device(195, n, errno.EPERM) for n in range(1, 8)}
    machine = saved("healthy_8", devices=nodes(**shut))
    assert checked(machine)["device nodes"].saw.endswith(
        "1 GPUs open; shut to this process: " + ", ".join(f"/dev/nvidia{n}" for n in range(1, 8))
    )
    check = checked(machine, sglang(tp_size=2))["device nodes"]
    assert check.status == "fail"
    assert check.saw.count("EPERM") == 7
    assert (check.remedy or "").count("c 195:* rwm") == 1


def test_mig_needs_its_capability_nodes() -> None:
    check = checked(saved("healthy_8", gpus={0: {"mig": True}}))["device nodes"]
    assert check.saw.startswith("/dev/nvidia-caps/nvidia-cap1 is missing, while its driver has major 509")


def test_nodes_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "DEVICES", ("/dev/nul*", "/dev/shm"))
    assert Machine.here().devices() == {"/dev/null": Device(1, 3)}

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(probe.os, "open", refuse)
    assert Machine.here().devices() == {"/dev/null": Device(1, 3, errno.EPERM)}


# ---- CUDA and the driver


@pytest.mark.parametrize(
    ("code", "saw", "remedy"),
    [
        (802, "802 (CUDA_ERROR_SYSTEM_NOT_READY)", "fabricmanager"),
        (803, "803 (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)", "reboot"),
        (100, "100 (CUDA_ERROR_NO_DEVICE)", "CUDA_VISIBLE_DEVICES"), (3, "3 (CUDA_ERROR_NOT_INITIALIZED)", "dmesg"),
        (12345, "12345 (CUDA_ERROR_unknown here)", "CUresult"), (probe.CUDA_NO_ANSWER, "gives no answer", "Xid"),
        (None, "there is no libcuda.so.1", "Install"),
    ],
)  # fmt: skip
def test_cuda_errors_are_named(code: int | None, saw: str, remedy: str) -> None:
    check = checked(saved("healthy_8", cuda_init=lambda: code))["cuInit"]
    assert check.status == "fail"
    assert saw in check.saw
    assert remedy in (check.remedy or "")


def test_the_first_cuda_call_is_made_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def probed(code: str) -> int | None:
        monkeypatch.setattr(probe, "CUDA_PROBE", code)
        return Machine.here().cuda_init()

    assert probed("print(0)") == 0
    assert probed("print(999)") == 999
    assert probed("print('none')") is None
    assert probed("import os; os.abort()") == probe.CUDA_NO_ANSWER
    monkeypatch.setattr(probe, "CUDA_TIMEOUT_S", 0.1)
    assert probed("import time; time.sleep(60)") == probe.CUDA_NO_ANSWER


def test_the_drivers_own_words_are_kept() -> None:
    def refuse() -> tuple[GpuState, ...]:
        raise PlacementError("NVML says: Driver/library version mismatch")

    found = checked(saved("healthy_8", gpu_states=refuse))
    assert (found["GPUs"].status, found["GPUs"].saw) == ("fail", "NVML says: Driver/library version mismatch")
    assert found["CUDA version"].status == "skip"
    assert "GPUs free" not in found


def test_too_few_gpus() -> None:
    check = checked(saved("healthy_8"), sglang(tp_size=16))["GPUs"]
    assert (check.status, check.saw) == ("fail", "8 GPUs, the run needs 16")


@pytest.mark.parametrize(
    ("torch", "status"), [("12.8", "ok"), ("13.0", "ok"), ("13.1", "ok"), ("14.0", "fail"), (None, "skip")]
)
def test_torch_may_not_need_a_newer_cuda(torch: str | None, status: str) -> None:
    facts = {"packages": ["sglang", "torch"], "torch_cuda": torch}
    assert checked(saved("healthy_8", python=lambda *_: facts))["CUDA version"].status == status


def test_an_interpreter_is_asked_without_importing_torch(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "torch" / "version.py").write_text("from typing import Optional\ncuda: Optional[str] = '12.8'\n")
    env = (("PYTHONPATH", str(tmp_path)),)
    ask = Machine.here().python
    assert ask(sys.executable, ("torch", "nonsense"), env) == {"packages": ["torch"], "torch_cuda": "12.8"}
    assert ask(str(tmp_path / "none"), ("torch",), ()) == {}
    odd = tmp_path / "python"
    odd.write_text("#!/bin/sh\necho 0.0.1\n")
    odd.chmod(0o755)
    assert ask(str(odd), ("torch",), ()) == {}
    assert checked(saved("healthy_8", python=lambda *_: {}))["packages"].status == "skip"


# ---- the GPUs themselves


@pytest.mark.parametrize(
    ("fields", "name", "saw"),
    [
        ({"throttle_reasons": ("sw-power-cap", "hw-thermal"), "pcie_gen": 5}, "throttling", "GPU 1: hw-thermal"),
        ({"power_limit_w": 450.0}, "power limit", "GPU 1: 450 of 600 W"),
        ({"ecc": False}, "ECC", "GPU 1: off"),
        ({"ecc_uncorrected": 2}, "ECC", "GPU 1: 2 uncorrected errors"),
        ({"persistence": False}, "persistence", "GPU 1: off"),
        ({"compute_mode": "prohibited"}, "compute mode", "GPU 1: prohibited"),
        ({"pcie_width": 8}, "PCIe link", "GPU 1: gen 1 x8 of gen 5 x16"),
        ({"pcie_gen": 4, "throttle_reasons": ()}, "PCIe link", "GPU 1: gen 4 x16 of gen 5 x16"),
    ],
)
def test_a_setting_that_spoils_figures_is_a_warning(fields: dict[str, Any], name: str, saw: str) -> None:
    machine = saved("healthy_8", gpus={1: fields})
    found = checked(machine, sglang(tp_size=2), gpus=(0, 1))
    assert states_of(found, "warn", "fail", "skip") == {name: "warn"}
    assert found[name].saw == saw
    assert states_of(checked(machine, sglang(tp_size=2), gpus=(2, 3)), "warn", "fail", "skip") == {}


def test_what_the_driver_does_not_tell_is_skipped_and_not_ok() -> None:
    unknown = dict.fromkeys(("throttle_reasons", "power_limit_w", "ecc", "persistence", "utilization_percent"))
    found = checked(saved("healthy_8", gpus={0: unknown}))
    assert set(states_of(found, "skip")) == {"throttling", "power limit", "ECC", "persistence", "GPUs idle"}


def test_the_same_finding_is_told_once() -> None:
    off = {index: {"persistence": False} for index in range(7)} | {7: {"persistence": None}}
    assert checked(saved("healthy_8", gpus=off))["persistence"].saw == "GPU 0, 1, 2, 3, 4, 5, 6: off"


def test_peer_access_and_the_iommu(copied: Edit) -> None:
    off = {
        0: {"p2p_off": ((1, "chipset not supported"), (4, "disabled"))},
        1: {"p2p_off": ((0, "chipset not supported"),)},
    }
    machine = copied("healthy_8", {"sys/class/iommu/dmar0": ""}, gpus=off)
    check = checked(machine, sglang(tp_size=2), gpus=(0, 1))["peer access"]
    assert check.saw == "off between GPUs 0-1 (chipset not supported)"
    assert (check.remedy or "").startswith("An IOMMU translates here: boot with iommu=pt")
    (machine.root / "proc/cmdline").write_text("ro iommu=pt quiet")
    assert (checked(machine)["peer access"].remedy or "").startswith("ACS")
    assert checked(machine, sglang(tp_size=2), gpus=(1, 4))["peer access"].status == "ok"


def test_who_holds_a_gpu() -> None:
    states = (
        GpuState(0, "a", memory_used_bytes=500 * 2**20),
        GpuState(1, "b", memory_used_bytes=600 * 2**20),
        GpuState(2, "c", memory_used_bytes=0, processes=((4242, "python", 48 * GIB), (7, None, None))),
        GpuState(3, "d", memory_used_bytes=48 * GIB, processes=((11, "python", 48 * GIB),)),
        GpuState(4),
        GpuState(5, "e"),  # unified memory: the driver tells none
    )
    assert busy_gpus(states, own=frozenset({11})) == {
        1: "600 MiB in use by no visible process",
        2: "PID 4242 python holds 48.0 GiB, PID 7 (name hidden)",
        4: "does not answer the driver",
    }
    assert set(busy_gpus(states, threshold_mib=700)) == {2, 3, 4}


class FakeNvml:
    """As much of pynvml as is read; GPU 1 answers nothing, GPU 0 lacks ECC and power limits."""

    class NVMLError(Exception):
        pass

    nvmlMemory_v2 = 2
    nvmlDeviceGetCount = staticmethod(lambda: 3)
    nvmlSystemGetDriverVersion = staticmethod(lambda: "580.1")
    nvmlSystemGetCudaDriverVersion = staticmethod(lambda: 12080)
    nvmlSystemGetProcessName = staticmethod(lambda pid: "/usr/bin/python3 -m sglang.launch_server")
    nvmlDeviceGetP2PStatus = staticmethod(lambda a, b, kind: 3)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 1:
            raise self.NVMLError("lost")
        return 10 + index

    def __getattr__(self, name: str) -> Callable[..., Any]:
        told: dict[str, Any] = {
            "UUID": "GPU-x", "Name": "H", "PciInfo": SimpleNamespace(busId="0:1"), "Temperature": 40,
            "MemoryInfo": SimpleNamespace(used=5, free=90, total=100), "UtilizationRates": SimpleNamespace(gpu=0),
            "ComputeRunningProcesses": [SimpleNamespace(pid=9, usedGpuMemory=None)], "PowerUsage": 70500,
            "CurrentClocksThrottleReasons": 0x44, "PersistenceMode": 0, "ComputeMode": 3, "CurrPcieLinkGeneration": 4,
        }  # fmt: skip

        def call(handle: int, *_: Any) -> Any:
            if (key := name.removeprefix("nvmlDeviceGet")) not in told:
                raise self.NVMLError("not supported")
            return told[key]

        return call


def test_states_are_read_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def session() -> Iterator[FakeNvml]:
        yield FakeNvml()

    monkeypatch.setattr(probe, "nvml_session", session)
    first, lost, third = read_gpu_states()
    assert first == GpuState(
        0, "GPU-x", "H", "0:1", 5, 90, 100, 0, ((9, "python3", None),), ("sw-power-cap", "hw-thermal"), power_w=70.5,
        temperature_c=40, persistence=False, compute_mode="exclusive-process", pcie_gen=4, driver="580.1",
        cuda_driver="12.8", p2p_off=((2, "topology not supported"),),
    )  # fmt: skip
    assert (lost.index, lost.uuid, lost.memory_used_bytes) == (1, None, None)
    assert third.index == 2
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetCount", lambda self: FakeNvml().nvmlDeviceGetEccMode(0))
    assert read_gpu_states() == ()
    with pytest.raises(PlacementError, match="cannot list the GPUs: not supported"):
        Machine.here().gpu_states()


def test_throttle_words() -> None:
    assert decode_throttle(0) == ()
    assert decode_throttle(0x1 | 0x80 | 0x10000) == ("idle", "hw-power-brake")


# ---- the model


def test_a_model_copied_half(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    (folder / "model-00002-of-00003.safetensors").unlink()
    check = checked(saved("healthy_8"), sglang(model_path=str(folder)))["model files"]
    assert check.status == "fail"
    assert "is not whole: model-00002-of-00003.safetensors: No such file" in check.saw
    assert f"`hf download ORG/NAME --revision COMMIT --local-dir {folder}`" in (check.remedy or "")
    dummy = sglang(model_path=str(folder), server_args=["--load-format=dummy"])
    assert checked(saved("healthy_8"), dummy)["model files"].status == "ok"


def test_models_that_are_not_there(tmp_path: Path) -> None:
    machine = saved("healthy_8", env={"HF_HUB_CACHE": str(tmp_path)})
    spec = sglang(model_path=str(tmp_path / "gone"), draft_model_path="z-lab/Draft", method="linear")
    found = checked(machine, spec)
    assert (found["model files"].status, found["draft model files"].status) == ("fail", "warn")
    assert found["draft model files"].remedy == "`hf download z-lab/Draft --revision main`"
    assert "GPU memory" not in found
    offline = dataclasses.replace(machine, env={**machine.env, "HF_HUB_OFFLINE": "1"})
    assert checked(offline, spec)["draft model files"].status == "fail"
    assert "draft model files" not in checked(machine, sglang(model_path="m", draft_model_path="d"))  # method auto


def test_a_snapshot_names_its_revision(tmp_path: Path) -> None:
    snapshot = model(tmp_path / "models--Org--Name" / "snapshots" / "abc")
    (snapshot / "config.json.part").write_text("x")
    spec = sglang(model_path="Org/Name", server_args=["--revision", "abc"])
    check = checked(saved("healthy_8", env={"HF_HUB_CACHE": str(tmp_path)}), spec)["model files"]
    assert check.status == "warn"
    assert check.saw.endswith("whole, revision abc; left over from a copy: config.json.part")


def test_a_model_in_memory_is_a_warning(copied: Edit, tmp_path: Path) -> None:
    folder = model(tmp_path / "in memory" / "m")
    point = str(folder.parent).replace(" ", "\\040")
    mounts = f"/dev/vda / ext4 rw 0 0\nnone {point} xfs rw 0 0\ntmpfs {point} tmpfs rw 0 0\nproc /proc proc rw 0 0\n"
    machine = copied("healthy_8", {"proc/mounts": mounts})
    check = checked(machine, sglang(model_path=str(folder)))["model storage"]
    assert (check.status, check.saw) == ("warn", f"on tmpfs, mounted at {folder.parent}")
    other = checked(machine, sglang(model_path=str(model(tmp_path / "m"))))["model storage"]
    assert (other.status, other.saw) == ("ok", "on ext4, mounted at /")
    (machine.root / "proc/mounts").unlink()
    assert checked(machine, sglang(model_path=str(folder)))["model storage"].status == "skip"


def hybrid(tmp_path: Path, weights: float) -> str:
    """A folder of the hybrid's config, and a hole as large as `weights` GiB of tensors."""
    folder = tmp_path / f"{weights}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HYBRID))
    size = int(weights * GIB)
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    return str(folder)


def test_a_tree_that_does_not_fit(tmp_path: Path) -> None:
    path = hybrid(tmp_path, 51.05)
    tree = {"method": "ddtree", "model_path": path, "max_running_requests": 8}
    found = checked(saved("healthy_8"), sglang(tree_budget=64, **tree))["GPU memory"]
    assert found.status == "fail"
    # 9 slots x 65 x (a state of 144 MiB, and 48 convolution windows of 3 x 10240 bf16) = 82.27 + 1.61 GiB.
    assert "tp1-b64 needs 136.9 GiB a GPU (weights 51.0, kv cache 0.7, states 1.3, verify states 83.9)" in found.saw
    assert "95.0 GiB may be used" in found.saw
    assert checked(saved("healthy_8"), sglang(tree_budget=64, tp_size=4, **tree))["GPU memory"].status == "ok"
    halved = sglang(tree_budget=16, server_args=["--mamba-ssm-dtype=bfloat16", "--kv-cache-dtype", "fp8_e5m2"], **tree)
    assert "kv cache 0.3, states 0.7, verify states 11.2" in checked(saved("healthy_8"), halved)["GPU memory"].saw


def test_a_model_that_cannot_be_split_or_is_too_short(tmp_path: Path) -> None:
    path = hybrid(tmp_path, 51.05)
    assert checked(saved("healthy_8"), sglang(model_path=path, tp_size=4))["model shape"].status == "ok"
    found = checked(saved("healthy_8"), sglang(model_path=path, tp_size=3))["model shape"]
    assert (found.status, found.saw.partition(":")[0]) == ("fail", "tp3-auto")
    short = sglang(model_path=path, server_args=["--context-length", "256"])  # 256 new tokens, and a prompt
    assert "the context is 256 tokens" in checked(saved("healthy_8"), short)["model shape"].saw


@pytest.mark.parametrize(("prompts", "fits"), [("random-ids", 320), ("instructions", 257)])
def test_a_prompts_tokens_are_counted_only_where_they_are_known(tmp_path: Path, prompts: str, fits: int) -> None:
    path = hybrid(tmp_path, 51.05)

    def shape(length: int) -> Check:
        args = ["--context-length", str(length)]
        spec = sglang(model_path=path, server_args=args, prompt_set=prompts)
        return checked(saved("healthy_8"), spec)["model shape"]

    least = "" if prompts == "random-ids" else "at least "
    assert (shape(fits).status, shape(fits).saw) == ("ok", f"TP 1 and {least}{fits} tokens fit")
    assert shape(fits - 1).status == "fail"
    assert shape(fits - 1).saw.endswith(f"needs at least {fits}")


def test_a_drafters_heads_need_not_be_divided(tmp_path: Path) -> None:
    draft = str(model(tmp_path / "draft", {"num_attention_heads": 3, "max_position_embeddings": 8}))
    spec = sglang(method="linear", tp_size=4, model_path=hybrid(tmp_path, 51.05), draft_model_path=draft)
    found = checked(saved("healthy_8"), spec)
    assert found["draft model files"].status == "ok"
    assert "draft model shape" not in found
    assert found["model shape"].status == "ok"


def test_what_may_be_used_of_the_memory(tmp_path: Path) -> None:
    auto = {"model_path": hybrid(tmp_path, 51.05)}
    share = ["--mem-fraction-static", "0.58"]
    assert checked(saved("healthy_8"), sglang(**auto))["GPU memory"].status == "ok"
    assert checked(saved("healthy_8"), sglang(server_args=share, **auto))["GPU memory"].status == "warn"  # 53.1 of 55.1
    assert checked(saved("healthy_8"), sglang(server_args=[*share[:1], "0.5"], **auto))["GPU memory"].status == "fail"
    # The fullest of the GPUs that it gets; not placed yet, the emptiest ones of the machine.
    full = saved("healthy_8", gpus={1: {"memory_free_bytes": GIB}})
    assert checked(full, sglang(tp_size=2, **auto), gpus=(0, 1))["GPU memory"].status == "fail"
    assert checked(full, sglang(tp_size=2, **auto))["GPU memory"].status == "ok"
    unknown = saved("healthy_8", gpus={1: {"memory_free_bytes": None}})
    assert checked(unknown, sglang(tp_size=2, **auto), gpus=(0, 1))["GPU memory"].saw == "free memory is not known"


def test_the_drafter_counts_and_random_weights_do_not(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(
        json.dumps({"num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128})
    )
    models = {"model_path": hybrid(tmp_path, 1), "draft_model_path": str(draft), "method": "linear"}
    spec = sglang(server_args=["--load-format", "dummy"], max_new_tokens=[1008], **models)
    # 8 requests of 1024 + 1008 + 16 tokens: 64 KiB a token in the target, 20 KiB in the drafter.
    assert (
        "(kv cache 1.3, states 1.3, verify states 20.4, random weights"
        in checked(saved("healthy_8"), spec)["GPU memory"].saw
    )
    (draft / "config.json").write_text("{}")
    told = checked(saved("healthy_8"), spec)["GPU memory"]
    assert (told.status, told.saw) == ("skip", "the memory of this architecture is not known")


# ---- the rest of the machine


def test_limits_shared_memory_and_tools() -> None:
    poor = saved("healthy_8", limits={"nofile": 1024, "memlock": 65536}, shm_bytes=(2**26, 2**26), which=lambda _: None)
    found = checked(poor)
    assert states_of(found, "warn", "fail") == {"/dev/shm": "warn", "limits": "warn", "tools": "warn"}
    assert found["/dev/shm"].saw == "0.1 of 0.1 GiB free"
    assert found["limits"].saw == "1024 open files, 65536 bytes of locked memory"
    assert found["tools"].saw.startswith("numactl, nvidia-smi not found; NUMA balancing is off")
    assert checked(saved("healthy_8"))["limits"].saw == "1048576 open files, unlimited bytes of locked memory"
    assert checked(saved("healthy_8", shm_bytes=None))["/dev/shm"].status == "skip"


def test_ports(copied: Edit) -> None:
    machine = copied("healthy_8", {})
    assert (
        checked(machine, sglang(server_args=["--port", "30000"]))["ports"].saw
        == "something listens on port 30000 already"
    )
    assert checked(machine, sglang(server_args=["--port=30001"]))["ports"].status == "ok"  # connected, not listening
    ports = machine.root / "proc/sys/net/ipv4/ip_local_port_range"
    ports.write_text("60000 60099\n")
    assert checked(machine)["ports"].status == "warn"
    ports.write_text("?")
    assert checked(machine)["ports"].status == "skip"


def test_a_reboot_since_the_campaign_began(copied: Edit) -> None:
    machine = copied("healthy_8", {"proc/sys/kernel/random/boot_id": "one\n"})
    assert checked(machine, since_boot="one")["boot"].status == "ok"
    assert checked(machine, since_boot="two")["boot"].status == "warn"
    (machine.root / "proc/sys/kernel/random/boot_id").unlink()
    assert checked(machine, since_boot="two")["boot"].status == "skip"
    assert "boot" not in checked(machine)


def test_nothing_is_raised_where_nothing_can_be_read(tmp_path: Path) -> None:
    machine = saved("healthy_8", root=tmp_path / "nothing", limits={}, shm_bytes=None, python=lambda *_: {})
    found = checked(machine, sglang(model_path=str(model(tmp_path / "m"))), since_boot="x")
    assert set(states_of(found, "skip")) >= {"model storage", "ports", "/dev/shm", "limits", "boot", "packages"}


def test_an_attached_server_is_not_launched() -> None:
    found = checked(saved("no_gpu"), sglang(attach="http://127.0.0.1:1", model_path="/gone"))
    assert set(found) == {"limits"}


def test_the_text() -> None:
    checks = (
        Check("a", "ok", "fine", "because"),
        Check("b", "fail", "broken", "it hurts", "do this\nand that"),
        Check("c", "skip", "unknown", "so"),
        Check("d", "warn", "odd", "perhaps", "look"),
    )
    assert format_checks(checks).splitlines() == [
        "ok    a: fine",
        "FAIL  b: broken",
        "      why: it hurts",
        "      do:  do this",
        "           and that",
        "skip  c: unknown",
        "warn  d: odd",
        "      why: perhaps",
        "      do:  look",
    ]
    assert would_fail(checks)
    assert not would_fail(checks[:1] + checks[2:])
