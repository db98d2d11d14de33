"""Preflight: would a launch work on this machine as it is now, and would its figures mean anything?

Each check says what it saw, why that matters and what to do. None needs root, none changes anything, and none raises
for what it finds; what cannot be read is `skip` with the reason, never `ok`. What is tuned rather than broken is
`benchlib.tuning`'s.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchlib.engines import flag_value, needs_gpus, server_python
from benchlib.errors import PlacementError
from benchlib.model_files import ModelFiles, download_command, is_hub_id, memory_need, read_model, shape_problems
from benchlib.probe import CUDA_NO_ANSWER, LIMITS, Device, GpuState, Machine, busy_gpus, read_gpu_states
from benchlib.prompts import RANDOM_PROMPT_TOKENS
from benchlib.spec import Engine, RunSpec

__all__ = [
    "Check", "GpuState", "Machine", "busy_gpus", "format_checks", "read_gpu_states", "run_checks", "would_fail",
]  # fmt: skip

Status = Literal["ok", "warn", "fail", "skip"]
MIB, GIB = 2**20, 2**30
WHY = {
    "device nodes": "CUDA opens these nodes; one that it may not open gives error 999, or no GPU",
    "cuInit": "it is the first CUDA call of every server",
    "GPUs": "placement and the record need the driver's own list of GPUs",
    "CUDA version": "CUDA libraries of a newer major version than the driver's do not start",
    "GPUs free": "others' work on the same GPU takes memory and time: the figures would be of both",
    "GPUs idle": "a GPU that is busy with nothing to run is wedged, often since a hung collective",
    "throttling": "clocks are held down by something else than the load: figures would be too low",
    "power limit": "under a cap the clock falls as the load rises: figures hold for this cap only",
    "ECC": "uncorrected errors end processes or spoil results; with ECC off nobody notices them",
    "persistence": "without it the driver forgets its state between processes: slow starts, lost settings",
    "compute mode": "`prohibited` refuses every CUDA context, the exclusive modes all but one",
    "PCIe link": "a narrow link slows loading, and every collective that has no NVLink",
    "peer access": "without it every collective between these GPUs goes through the host's memory",
    "tools": "SGLang binds its ranks to NUMA nodes with numactl; nvidia-smi is how GPUs are repaired",
    "files": "a server that misses a file, or the end of one, says so minutes after its start",
    "storage": "what lies in memory is gone after a reboot, and takes memory from the server",
    "GPU memory": "SGLang reserves it at its start; hybrids keep a state for each request and token verified",
    "shape": "a model that cannot be split so, or holds fewer tokens, fails only after its weights were loaded",
    "packages": "the engine is started by this interpreter",
    "/dev/shm": "the ranks of a server, and NCCL, exchange data there",
    "ports": "the server takes a free port of this range unless --port names one; its ranks meet on others",
    "limits": "every request and rank opens files; locked memory matters to RDMA alone",
    "boot": "settings, clocks and files in memory do not outlive a reboot: runs before and after may differ",
}
PACKAGES = {"reference": ("torch", "aiohttp", "numpy", "safetensors", "tokenizers"), "sglang": ("sglang", "torch")}
NOTHING = "no NVIDIA GPU is visible: there is no /dev/nvidia*, and no NVIDIA driver in /proc/devices"
GIVE = "Docker: `--gpus all`; LXC: mount the node and allow its major number"
NO_GPU = (
    'Run with engine "reference", which needs none; or install the driver, until `nvidia-smi` lists the GPUs, and give '
    f"them to this container. {GIVE}"
)
# Of CUresult: what cuInit is known to return, and what mostly lies behind it.
CUDA_ERRORS = {
    CUDA_NO_ANSWER: ("no answer", "It hangs or crashes in the driver: see `dmesg` for Xid errors, then reboot"),
    3: ("NOT_INITIALIZED", "See `dmesg` for NVRM messages; load the driver anew, or reboot"),
    34: ("STUB_LIBRARY", "A toolkit's stub is found in place of the driver's libcuda.so.1: mend LD_LIBRARY_PATH"),
    46: ("DEVICE_UNAVAILABLE", "A process holds the GPU in exclusive mode: end it, or `nvidia-smi -c DEFAULT`"),
    100: ("NO_DEVICE", f"Is CUDA_VISIBLE_DEVICES empty or wrong? Were GPUs given to this container? {GIVE}"),
    802: ("SYSTEM_NOT_READY", "NVSwitch needs its fabric manager: `systemctl restart nvidia-fabricmanager`"),
    803: ("SYSTEM_DRIVER_MISMATCH", "libcuda.so.1 and the kernel module differ in version: reboot after the update; "
          "in a container, use the host's version"),
    804: ("COMPAT_NOT_SUPPORTED_ON_DEVICE", "A CUDA compat package is found first: mend LD_LIBRARY_PATH"),
    999: ("UNKNOWN", "Mostly /dev/nvidia-uvm that cannot be opened (see device nodes), or a lost GPU (`dmesg`)"),
}  # fmt: skip
# Reasons that slow a GPU beyond what its own load asks for; idle, power capping and set clocks are judged elsewhere.
HARMFUL = {"hw-slowdown", "sw-thermal", "hw-thermal", "hw-power-brake", "board-limit", "reliability"}
VOLATILE = {"tmpfs", "ramfs", "devtmpfs"}
PROMPT_TOKENS = 1024  # reckoned for a prompt
TIGHT = 0.9  # beyond this share of what is free, activations and CUDA graphs may not fit
LEAST_SHM, LEAST_FILES, LEAST_PORTS = GIB, 4096, 1000
LISTENING = "0A"  # TCP_LISTEN in /proc/net/tcp


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `remedy` is None where there is nothing to do."""

    name: str
    status: Status
    saw: str
    why: str
    remedy: str | None = None


def _told(name: str, status: Status, saw: str, remedy: str | None = None) -> Check:
    return Check(name, status, saw, WHY.get(name) or WHY[name.split()[-1]], remedy)


def _either(name: str, fault: str, fine: str, remedy: str, status: Status = "warn") -> Check:
    return _told(name, status, fault, remedy) if fault else _told(name, "ok", fine)


@dataclass(frozen=True, slots=True)
class _Run:
    """What is about to be launched, and on what."""

    spec: RunSpec
    machine: Machine
    needed: int  # GPUs; 0: none
    gpus: frozenset[int] | None  # those it was given; None: not placed yet
    states: tuple[GpuState, ...]

    def own(self) -> tuple[GpuState, ...]:
        return tuple(gpu for gpu in self.states if self.gpus is None or gpu.index in self.gpus)

    def judge(self, name: str, found: Mapping[int, str], fine: str, remedy: str) -> Check:
        """A failure where it hits the run's GPUs, or leaves too few for it; a warning where others are hit."""
        hit = len(self.states) - len(found) < self.needed if self.gpus is None else bool(self.gpus & found.keys())
        return _either(name, _by_gpu(found), fine, remedy, "fail" if hit else "warn")


def _by_gpu(found: Mapping[int, str]) -> str:
    """`GPU 0-3, 5: off; GPU 4: on`: the same finding is told once."""
    texts = dict.fromkeys(found.values())
    return "; ".join(f"GPU {', '.join(str(i) for i, t in found.items() if t == text)}: {text}" for text in texts)


def _check_devices(machine: Machine, needed: int, mig: bool) -> Check:
    nodes, majors = machine.devices(), _majors(machine)
    if not nodes and not any("nvidia" in driver for driver in majors):
        return _told("device nodes", "fail", NOTHING, NO_GPU)
    gpus = [path for path in nodes if re.fullmatch(r"/dev/nvidia\d+", path)]
    opened = [path for path in gpus if nodes[path].errno is None]
    wanted = ["/dev/nvidiactl", "/dev/nvidia-uvm", *([] if len(opened) >= needed else gpus or ["/dev/nvidia0"])]
    if mig:
        wanted += [path for path in nodes if "nvidia-cap" in path] or ["/dev/nvidia-caps/nvidia-cap1"]
    bad = [path for path in wanted if path not in nodes or nodes[path].errno is not None]
    faults = [_blocked(path, nodes.get(path), majors, machine) for path in bad]
    shut = f"; shut to this process: {', '.join(sorted({*gpus} - {*opened}))}" if len(opened) < len(gpus) else ""
    remedy = "\n".join(dict.fromkeys(remedy for _, remedy in faults))
    fine = f"nvidiactl, nvidia-uvm and {len(opened)} GPUs open{shut}"
    return _either("device nodes", "; ".join(saw for saw, _ in faults), fine, remedy, "fail")


def _majors(machine: Machine) -> dict[str, int]:
    lines = (machine.text("proc/devices") or "").partition("Block devices")[0].splitlines()
    return {words[1]: int(words[0]) for line in lines if len(words := line.split()) == 2 and words[0].isdigit()}


def _blocked(path: str, node: Device | None, majors: Mapping[str, int], machine: Machine) -> tuple[str, str]:
    """(What is wrong with a device node, what to do.)"""
    driver = next((name for name in ("nvidia-uvm", "nvidia-caps") if name in path), "nvidia")
    major = majors.get(driver, majors.get("nvidia-frontend") if driver == "nvidia" else None)
    make = "`nvidia-modprobe -u -c=0`" if driver == "nvidia-uvm" else "`nvidia-modprobe -c=0`"
    if major is None:
        saw = f"{path} cannot work: /proc/devices has no {driver}, so its kernel module is not loaded"
        return saw, f"On the host, as root: {make}, or `modprobe {driver}`"
    if node is None:
        return f"{path} is missing, while its driver has major {major}", f"On the host, as root: {make}. {GIVE}"
    code = errno.errorcode.get(node.errno or 0, str(node.errno))
    if node.major != major:
        saw = f"{path} ({code} on open) has major {node.major}, its driver now {major}: the node is older"
        return saw, f"Remove the node and make it anew, as root: {make}; a container must be started anew"
    if node.errno != errno.EPERM:
        return f"{path}: {code} on open", "See its owner and mode (`ls -l`), and `dmesg` for NVRM messages"
    listed = machine.text("sys/fs/cgroup/devices/devices.list")
    policy, key = "which under cgroup v2 is a BPF program and cannot be read from inside", "cgroup2"
    if listed is not None:
        has = re.search(rf"^(a \*:\*|c ({major}|\*):)", listed, re.M)
        policy, key = f"whose list (cgroup v1) {'has' if has else 'lacks'} it", "cgroup"
    return f"{path}: EPERM on open, by the container's device policy, {policy}; major {major} as in /proc/devices", (
        "On the host, add this line to the container's configuration (Proxmox: /etc/pve/lxc/ID.conf); restart it:\n"
        f"lxc.{key}.devices.allow: c {major}:* rwm\nThe number may change with a reboot of the host. {GIVE}"
    )


def _check_cuda(machine: Machine) -> Check:
    code = machine.cuda_init()
    if code is None:
        return _told("cuInit", "fail", "there is no libcuda.so.1", f"Install the driver's libraries. {GIVE}")
    name, remedy = CUDA_ERRORS.get(code, ("unknown here", "See CUresult for the number, `dmesg` for NVRM messages"))
    fault = f"cuInit(0) gives {name}" if code < 0 else f"cuInit(0) returns {code} (CUDA_ERROR_{name})" if code else ""
    return _either("cuInit", fault, "cuInit(0) returns 0", remedy, "fail")


def _check_driver(run: _Run, words: str) -> Check:
    gpus = run.states
    fault = "" if len(gpus) >= max(run.needed, 1) else words or f"{len(gpus)} GPUs, the run needs {run.needed}"
    names = " and ".join(sorted({str(gpu.name) for gpu in gpus}))
    fine = "" if fault else f"{len(gpus)} x {names}, driver {gpus[0].driver}, CUDA {gpus[0].cuda_driver}"
    return _either("GPUs", fault, fine, "Lower tp_size, or add GPUs" if gpus else NO_GPU, "fail")


def _check_cuda_version(run: _Run, facts: Mapping[str, Any]) -> Check:
    wants, has = facts.get("torch_cuda"), run.states[0].cuda_driver if run.states else None
    if not wants or not has:
        unknown = "the driver's" if wants else f"that of torch in {server_python(run.spec)}"
        return _told("CUDA version", "skip", f"{unknown} is not known")
    saw, (old, new) = f"torch wants {wants}, the driver gives {has}", (int(v.split(".")[0]) for v in (has, wants))
    remedy = f"Update the driver, or install a torch for CUDA {old}"
    return _either("CUDA version", saw * (new > old), saw, remedy, "fail")


def _check_free(run: _Run) -> Check:
    fine = f"at most {max(gpu.memory_used_bytes or 0 for gpu in run.states) / MIB:.0f} MiB in use, no compute process"
    remedy = "End what an earlier run left, by its PID, or wait. In a container, ask the host: it sees every process"
    return run.judge("GPUs free", busy_gpus(run.states), fine, remedy)


def _check_idle(run: _Run) -> Check:
    if any(gpu.utilization_percent is None for gpu in run.own()):
        return _told("GPUs idle", "skip", "the driver does not tell utilization")
    stuck = {g.index: "100% busy, no process" for g in run.states if g.utilization_percent == 100 and not g.processes}
    remedy = (
        "Look again in some seconds; in a container, look at the host's processes. If it stays, end those and have an "
        "administrator run `nvidia-smi --gpu-reset -i INDEX`, or reboot"
    )
    return run.judge("GPUs idle", stuck, "none is 100% busy without a process", remedy)


class _Setting(NamedTuple):
    """What is judged on each of the run's GPUs by itself. `fault`: in words, empty where all is well."""

    name: str
    fields: tuple[str, ...]  # that must be known
    fault: Callable[[Any], str]
    remedy: str


def _narrow(gpu: GpuState) -> bool:
    # An idle GPU lowers its link's generation, not its width.
    slow = gpu.pcie_gen != gpu.pcie_gen_max and "idle" not in (gpu.throttle_reasons or ())
    return slow or gpu.pcie_width != gpu.pcie_width_max


SETTINGS = (
    _Setting("throttling", ("throttle_reasons",), lambda g: ", ".join(w for w in g.throttle_reasons if w in HARMFUL),
             "See cooling and power (`nvidia-smi -q -d PERFORMANCE,TEMPERATURE`); wait until the GPU is cool"),
    _Setting("power limit", ("power_limit_w", "power_max_limit_w"), lambda g: f"{g.power_limit_w:.0f} of "
             f"{g.power_max_limit_w:.0f} W" * (g.power_limit_w < g.power_max_limit_w - 1),
             "`nvidia-smi -i INDEX -pl WATTS` by an administrator, or keep it and say so with the figures"),
    _Setting("ECC", ("ecc",), lambda g: f"{g.ecc_uncorrected} uncorrected errors" if g.ecc_uncorrected else
             "off" * (not g.ecc),
             "See `nvidia-smi -q -d ECC,ROW_REMAPPER`: reset a GPU with errors; `nvidia-smi -e 1` turns ECC on"),
    _Setting("persistence", ("persistence",), lambda g: "" if g.persistence else "off",
             "`nvidia-smi -pm 1` by an administrator, or the nvidia-persistenced service"),
    _Setting("compute mode", ("compute_mode",), lambda g: "" if g.compute_mode == "default" else g.compute_mode,
             "`nvidia-smi -i INDEX -c DEFAULT` by an administrator"),
    _Setting("PCIe link", ("pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max"),
             lambda g: f"gen {g.pcie_gen} x{g.pcie_width} of gen {g.pcie_gen_max} x{g.pcie_width_max}" * _narrow(g),
             "Reseat the card or its riser; see the slot and the BIOS"),
)  # fmt: skip


def _check_setting(setting: _Setting, gpus: tuple[GpuState, ...]) -> Check:
    known = [gpu for gpu in gpus if all(getattr(gpu, name) is not None for name in setting.fields)]
    found = {gpu.index: fault for gpu in known if (fault := setting.fault(gpu))}
    if not found and len(known) < len(gpus):
        return _told(setting.name, "skip", "the driver does not tell it")
    return _either(setting.name, _by_gpu(found), f"as it should be on {len(gpus)} GPUs", setting.remedy)


def _check_peers(run: _Run) -> Check:
    own = {gpu.index for gpu in run.own()}
    off = [f"{g.index}-{i} ({reason})" for g in run.own() for i, reason in g.p2p_off if i in own and g.index < i]
    iommu = any((run.machine.root / "sys/class/iommu").glob("*"))
    translated = iommu and "iommu=pt" not in (run.machine.text("proc/cmdline") or "")
    remedy = "An IOMMU translates here: boot with iommu=pt. " if translated else ""
    remedy += "ACS on PCIe bridges and virtual machines prevent it too; most consumer GPUs do not offer it"
    fault = f"off between GPUs {', '.join(off)}" if off else ""
    return _either("peer access", fault, "no pair of the run's GPUs is known to lack it", remedy)


def _check_tools(machine: Machine) -> Check:
    missing = ", ".join(tool for tool in ("numactl", "nvidia-smi") if not machine.which(tool))
    balancing = {"0": "off", "1": "on"}.get(machine.text("proc/sys/kernel/numa_balancing") or "", "unknown")
    told = f"; NUMA balancing is {balancing} (`benchlib tune` has the host's settings)"
    fault = f"{missing} not found{told}" if missing else ""
    return _either("tools", fault, f"numactl, nvidia-smi{told}", "Install them")


class _Model(NamedTuple):
    role: str
    path: str
    files: ModelFiles | None
    fetch: str


def _read_models(run: _Run) -> Iterator[_Model]:
    spec, env = run.spec, {**run.machine.env, **run.spec.server_env}
    named = [("model", spec.model_path, "--revision", "--load-format")]
    if spec.method != "auto":
        flags = ("--speculative-draft-model-revision", "--speculative-draft-load-format")
        named.append(("draft model", spec.draft_model_path, *flags))
    for role, path, pin, load in named:
        revision, dummy = (
            flag_value(spec, pin),
            (flag_value(spec, load) or flag_value(spec, "--load-format")) == "dummy",
        )
        if path:
            files = read_model(path, env=env, revision=revision or "main", weights=not dummy)
            yield _Model(role, path, files, f"`{download_command(path, revision or None)}`")


def _check_files(model: _Model, env: Mapping[str, str]) -> Check:
    name, files = f"{model.role} files", model.files
    if files is None:
        fetched = is_hub_id(model.path) and env.get("HF_HUB_OFFLINE") != "1"
        where = (
            "not in the hub's cache: the server would download it as it starts"
            if fetched
            else "not there, or may not be read"
        )
        return _told(name, "warn" if fetched else "fail", f"{model.path} is {where}", model.fetch)
    if files.problems:
        saw = f"{files.folder} is not whole: {'; '.join(files.problems)}"
        return _told(name, "fail", saw, f"Copy it again, or {model.fetch}, which keeps what is whole")
    size = "config.json" if files.weight_bytes is None else f"{files.weight_bytes / GIB:.2f} GiB of weights, whole"
    saw = f"{files.folder}: {size}" + (f", revision {files.revision}" if files.revision else "")
    left = f"{saw}; left over from a copy: {', '.join(files.leftovers)}" if files.leftovers else ""
    return _either(name, left, saw, "Remove what is left over")


def _check_mount(machine: Machine, role: str, files: ModelFiles) -> Check:
    name, folder, lines = f"{role} storage", files.folder.resolve(), (machine.text("proc/mounts") or "").splitlines()
    mounts = [(Path(words[1].replace("\\040", " ")), words[2]) for line in lines if len(words := line.split()) > 2]
    inside = [mount for mount in reversed(mounts) if folder.is_relative_to(mount[0])]
    if not inside:
        return _told(name, "skip", "/proc/mounts does not tell its file system")
    point, kind = max(inside, key=lambda mount: len(mount[0].parts))
    saw = f"on {kind}, mounted at {point}"
    return _either(name, saw if kind in VOLATILE else "", saw, "Keep a copy on a disk, or move it there")


def _check_shape(spec: RunSpec, role: str, files: ModelFiles) -> Check:
    length, drawn = flag_value(spec, "--context-length"), spec.workload.prompt_set == "random-ids"
    # How many tokens a text has is known to the tokenizer alone: at least one.
    tokens = (RANDOM_PROMPT_TOKENS if drawn else 1) + max(spec.workload.max_new_tokens)
    faults = shape_problems(
        files.config or {}, tp_size=spec.tp_size, tokens=tokens, context=int(length) if length.isdecimal() else None
    )
    fault = f"{spec.run_name}: {'; '.join(faults)}" if faults else ""
    fine = f"TP {spec.tp_size} and {'' if drawn else 'at least '}{tokens} tokens fit"
    remedy = "Take another tp_size, fewer max_new_tokens, or a longer --context-length"
    return _either(f"{role} shape", fault, fine, remedy, "fail")


def _check_fit(run: _Run, models: Mapping[str, ModelFiles]) -> Check:
    spec, own = run.spec, [gpu.memory_free_bytes for gpu in run.own()]
    width = {"auto": 0, "linear": spec.block_size, "ddtree": 1 + (spec.tree_budget or 0)}[spec.method]
    dtype = flag_value(spec, "--mamba-ssm-dtype") or spec.server_env.get("SGLANG_MAMBA_SSM_DTYPE")
    needs = [
        memory_need(
            files.config or {}, weight_bytes=files.weight_bytes, tp_size=spec.tp_size, state_dtype=dtype,
            requests=spec.max_running_requests, tokens=PROMPT_TOKENS + max(spec.workload.max_new_tokens) + width,
            verify_tokens=width if role == "model" else 0, tree=spec.method == "ddtree",
            kv_bytes=1 if "fp8" in flag_value(spec, "--kv-cache-dtype") else 2,
        )
        for role, files in models.items()
    ]  # fmt: skip
    known, free = [need for need in needs if need], sorted((size for size in own if size is not None), reverse=True)
    if len(known) < len(models) or len(free) < run.needed:
        what = "free memory is" if len(known) == len(models) else "the memory of this architecture is"
        return _told("GPU memory", "skip", f"{what} not known")
    share = flag_value(spec, "--mem-fraction-static")
    limit = free[run.needed - 1] * (float(share) if re.fullmatch(r"\d*\.?\d+", share) else 1.0)
    names = ("weights", "kv_cache", "states", "verify_states")
    parts = {name: sum(getattr(need, name) or 0 for need in known) for name in names}
    total, told = sum(parts.values()), ", ".join(f"{n.replace('_', ' ')} {b / GIB:.1f}" for n, b in parts.items() if b)
    random = ", random weights not counted" if any(need.weights is None for need in known) else ""
    saw = f"{spec.run_name} needs {total / GIB:.1f} GiB a GPU ({told}{random}), {limit / GIB:.1f} GiB may be used"
    remedy = "Lower max_running_requests or the tree budget, raise tp_size, or pass --mamba-ssm-dtype bfloat16"
    return _either("GPU memory", saw * (total > TIGHT * limit), saw, remedy, "fail" if total > limit else "warn")


def _check_packages(spec: RunSpec, facts: Mapping[str, Any]) -> Check:
    has, wanted, python = facts.get("packages"), PACKAGES[spec.engine], server_python(spec)
    if not isinstance(has, list):
        return _told("packages", "skip", f"{python} does not answer")
    missing = ", ".join(package for package in wanted if package not in has)
    remedy = f"`{python} -m pip install {missing.replace(', ', ' ')}`, or name another interpreter in server_python"
    return _either("packages", f"{python} lacks {missing}" if missing else "", f"{', '.join(wanted)}", remedy, "fail")


def _check_shm(machine: Machine) -> Check:
    if machine.shm_bytes is None:
        return _told("/dev/shm", "skip", "it cannot be read")
    size, free = machine.shm_bytes
    saw = f"{free / GIB:.1f} of {size / GIB:.1f} GiB free"
    remedy = "Remove what lies there, or enlarge it: `mount -o remount,size=16G /dev/shm`, `docker run --shm-size 16g`"
    return _either("/dev/shm", saw * (free < LEAST_SHM), saw, remedy)


def _check_ports(spec: RunSpec, machine: Machine) -> Check:
    tables = [machine.text(f"proc/net/{name}") or "" for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    taken = {int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == LISTENING}
    if (port := flag_value(spec, "--port")).isdigit() and int(port) in taken:
        return _told("ports", "fail", f"something listens on port {port} already", "End it, or leave --port out")
    words = (machine.text("proc/sys/net/ipv4/ip_local_port_range") or "").split()
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return _told("ports", "skip", "ip_local_port_range cannot be read")
    saw, few = f"{words[0]} to {words[1]}", int(words[1]) - int(words[0]) - len(taken) < LEAST_PORTS
    return _either("ports", saw * few, saw, "`sysctl net.ipv4.ip_local_port_range='32768 60999'`")


def _check_limits(machine: Machine) -> Check:
    if not machine.limits:
        return _told("limits", "skip", "they are not known")
    files, locked = (machine.limits[name] for name in LIMITS)
    saw = f"{files} open files, {locked} bytes of locked memory".replace("-1 ", "unlimited ")
    return _either("limits", saw * (0 <= files < LEAST_FILES), saw, "`ulimit -n 65536`")


def _check_boot(machine: Machine, since: str) -> Check:
    now = machine.text("proc/sys/kernel/random/boot_id")
    if now is None:
        return _told("boot", "skip", "boot_id cannot be read")
    fault = "" if now == since else "rebooted since the campaign began"
    return _either("boot", fault, "none since the campaign began", "See `benchlib tune`, and repeat the earlier runs")


def _check_gpus(run: _Run, words: str, facts: Mapping[str, Any]) -> Iterator[Check]:
    nodes = _check_devices(run.machine, run.needed, any(gpu.mig for gpu in run.own()))
    yield nodes
    if nodes.saw == NOTHING and not run.states:
        return  # the rest would say it again
    yield _check_cuda(run.machine)
    yield _check_driver(run, words)
    yield _check_cuda_version(run, facts)
    if run.own():
        yield _check_free(run)
        yield _check_idle(run)
        yield from (_check_setting(setting, run.own()) for setting in SETTINGS)
        yield _check_peers(run)
    yield _check_tools(run.machine)


def run_checks(
    spec: RunSpec | None, *, engine: Engine = "sglang", machine: Machine, gpus: Collection[int] | None = None,
    since_boot: str | None = None,
) -> tuple[Check, ...]:  # fmt: skip
    """Whether `spec` (without one: a plain run of `engine`) can be launched, on `gpus` where it is placed already.

    `since_boot` is the boot id under which its campaign began. About a second where GPUs are concerned.
    """
    spec = spec or RunSpec(engine=engine)
    needed, words = needs_gpus(spec), ""
    states: tuple[GpuState, ...] = ()
    try:
        states = machine.gpu_states() if needed else ()
    except PlacementError as error:
        words = str(error)
    run = _Run(spec, machine, needed, None if gpus is None else frozenset(gpus), states)
    variables, wanted = tuple(sorted(spec.server_env.items())), PACKAGES[spec.engine]
    facts = {} if spec.attach else machine.python(server_python(spec), wanted, variables)
    checks = [*_check_gpus(run, words, facts)] if needed else []
    models = [] if spec.attach else [*_read_models(run)]
    for model in models:
        checks.append(_check_files(model, machine.env))
        checks += [_check_mount(machine, model.role, model.files)] if model.files else []
        # A drafter keeps whole heads on each rank where they cannot be divided.
        checks += [_check_shape(spec, model.role, model.files)] if model.files and model.role == "model" else []
    found = {model.role: model.files for model in models if model.files}
    if needed and found and len(found) == len(models):
        checks.append(_check_fit(run, found))
    checks += [] if spec.attach else [_check_packages(spec, facts), _check_ports(spec, machine), _check_shm(machine)]
    return (*checks, _check_limits(machine), *([_check_boot(machine, since_boot)] if since_boot else []))


def would_fail(checks: Iterable[Check]) -> bool:
    """Whether any check says that the launch cannot work."""
    return any(check.status == "fail" for check in checks)


def format_checks(checks: Iterable[Check]) -> str:
    """Plain text, a line a check; below it why and what to do, where something is wrong."""
    lines = []
    for check in checks:
        lines.append(f"{'FAIL' if check.status == 'fail' else check.status:<5} {check.name}: {check.saw}")
        if check.status in ("warn", "fail"):
            remedy = (check.remedy or "nothing known").replace("\n", "\n           ")
            lines += [f"      why: {check.why}", f"      do:  {remedy}"]
    return "\n".join(lines)
