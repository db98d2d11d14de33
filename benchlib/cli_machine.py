"""The commands about the machine: `topology`, `place`, `nccl`, `doctor`, `tune`. All read; none changes anything."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchlib.errors import SpecError

__all__ = ["BusyOption", "JsonOption", "app", "find_campaign", "named_busy"]

app = typer.Typer()

GATE_FAILED = 3
RESULTS = Path("results")
PYTHON_VARIABLE = "BENCHLIB_SGLANG_PYTHON"
BusyOption = Annotated[str, typer.Option("--busy", help="GPUs to leave out, such as 0,3")]
FromOption = Annotated[Path | None, typer.Option("--from", help="a saved `nvidia-smi topo -m`; empty: this machine")]
LinksOption = Annotated[Path | None, typer.Option("--links", help="measured links that the choice is to prefer")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]


def find_campaign(name: str, results: Path) -> Path:
    """A campaign's folder, given as such or by its name under `results`. SpecError where it is neither."""
    for folder in (Path(name), results / name):
        if folder.is_dir():
            return folder
    raise SpecError(f"no campaign {name!r}: neither a folder nor a name under {results}")


def named_busy(text: str) -> dict[int, str]:
    """`0,3` -> {0: ..., 3: ...}: GPUs that the user keeps out. SpecError for anything but numbers."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if wrong := [part for part in parts if not part.isdecimal()]:
        raise SpecError(f"--busy {text!r} holds {wrong[0]!r}: give GPU numbers with commas, such as 0,3")
    return {int(part): "named busy" for part in parts}


@app.command()
def topology(
    source: FromOption = None,
    measure: Annotated[bool, typer.Option("--measure", help="time peer copies and a decode-sized all-reduce")] = False,
    python: Annotated[str, typer.Option(help="interpreter that has torch, for --measure; empty: this one")] = "",
    out: Annotated[Path, typer.Option(help="where --measure stores what it found")] = RESULTS / "links.json",
    as_json: JsonOption = False,
) -> None:
    """Show the GPUs, the links between them and their NUMA nodes; with --measure, time the links."""
    from benchlib.links import format_links, links_disagree, measure_links, save_links
    from benchlib.topology import format_topology, load_topology, read_topology, topology_json

    found = load_topology(source) if source else read_topology()
    if not measure:
        typer.echo(json.dumps(topology_json(found), indent=1) if as_json else format_topology(found))
        return
    if source:
        raise SpecError("--measure times this machine's links: leave out --from")
    links = measure_links(python)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_links(links, out)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(links), indent=1))
        return
    typer.echo(f"{format_links(links)}\nstored in {out}")
    for text in links_disagree(found, links):
        typer.echo(f"warning: {text}")


@app.command()
def place(
    tp_size: Annotated[int, typer.Argument(help="GPUs wanted", min=1)],
    source: FromOption = None,
    busy: BusyOption = "",
    numa_policy: Annotated[str, typer.Option(help="pack, allow-cross or spread")] = "pack",
    links: LinksOption = None,
    as_json: JsonOption = False,
) -> None:
    """Choose GPUs for a tensor-parallel size, and say why; exit 1 with the reason where that is impossible."""
    from typing import get_args

    from benchlib.host import read_gpu_states
    from benchlib.links import load_links
    from benchlib.machine import busy_here
    from benchlib.placement import NumaPolicy, place_gpus
    from benchlib.topology import load_topology, read_topology

    if numa_policy not in (allowed := get_args(NumaPolicy)):
        raise SpecError(f"--numa-policy {numa_policy!r} is none of {', '.join(allowed)}")
    found = load_topology(source) if source else read_topology()
    held = ({} if source else busy_here(found, read_gpu_states())) | named_busy(busy)
    measured = load_links(links) if links else None
    chosen = place_gpus(found, tp_size, numa_policy=numa_policy, busy=held, measured=measured)  # type: ignore[arg-type]
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(chosen), indent=1))
        return
    typer.echo(chosen.reason)


@app.command()
def bandwidth(
    campaign: Annotated[str, typer.Argument(help="name of the campaign whose rates are to stand beside the ceiling")],
    python: Annotated[str, typer.Option(help=f"interpreter that has torch; empty: ${PYTHON_VARIABLE}")] = "",
    results: Annotated[Path, typer.Option("--results", help="folder of the campaigns")] = RESULTS,
    as_json: JsonOption = False,
) -> None:
    """Measure the memory bandwidth of each visible, idle GPU: the ceiling of autoregressive decoding."""
    import os
    import sys

    from benchlib.ceilings import probe_devices, save_bandwidth

    found = probe_devices(python or os.environ.get(PYTHON_VARIABLE, "") or sys.executable)
    save_bandwidth(results / campaign, found)
    rows = [dataclasses.asdict(device) for device in found]
    text = "\n".join(f"{d.device}: copy {d.copy_gb_s:.0f}, read {d.read_gb_s:.0f} GB/s (n={d.n})" for d in found)
    typer.echo(json.dumps(rows, indent=1) if as_json else text)


@app.command()
def nccl(
    profile: Annotated[str, typer.Argument(help="none, production, pcie or your own; empty: all")] = "",
    log: Annotated[
        Path | None, typer.Option(help="a server's log of NCCL_DEBUG=INFO, also gzip'd: what NCCL did")
    ] = None,
    profiles: Annotated[Path | None, typer.Option(help="TOML file of your own profiles")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print an NCCL profile as export lines, each with its reason and risk; or read back what NCCL did from a log.

    With both, also what NCCL read otherwise than the profile asks.
    """
    from benchlib.nccl import format_nccl_log, format_profile, load_nccl_log, load_profiles, variables_differ

    known = load_profiles(profiles)
    if profile and profile not in known:
        raise SpecError(f"no NCCL profile {profile!r}; there are {', '.join(sorted(known))}")
    if log is not None:
        told = load_nccl_log(log)
        differ = variables_differ(known[profile].variables, told) if profile else ()
        found = dataclasses.asdict(told) | ({"differs": differ} if profile else {})
        text = "\n".join([format_nccl_log(told), *(f"differs: {line}" for line in differ)])
        typer.echo(json.dumps(found, indent=1) if as_json else text)
        return
    chosen = [known[profile]] if profile else list(known.values())
    if as_json:
        typer.echo(json.dumps({p.name: dict(p.variables) for p in chosen}, indent=1))
        return
    typer.echo("\n".join(map(format_profile, chosen)), nl=False)


@app.command()
def doctor(
    sweep: Annotated[Path | None, typer.Argument(help="a sweep file: its models and sizes are checked too")] = None,
    engine: Annotated[str, typer.Option(help="reference or sglang; with a sweep, the sweep's")] = "",
    tp_size: Annotated[int | None, typer.Option(help="GPUs wanted, without a sweep; by default 1")] = None,
    model_path: Annotated[str, typer.Option(help="model to check, without a sweep")] = "",
    as_json: JsonOption = False,
) -> None:
    """Check whether a launch would work here: what was seen, why it matters, what to do. Exit 3 if it would fail."""
    from benchlib.host import format_checks, would_fail
    from benchlib.machine import examine
    from benchlib.record import boot_of
    from benchlib.spec import RunSpec, load_sweep

    if sweep is not None:
        if tp_size is not None or model_path:
            raise SpecError("--tp-size and --model-path describe a run without a sweep: the sweep file has its own")
        given = {"engine": engine} if engine else {}
        specs: Sequence[RunSpec] = load_sweep(sweep, **given).runs()
    else:
        flags = {"engine": engine or "sglang", "tp_size": 1 if tp_size is None else tp_size, "model_path": model_path}
        specs = [RunSpec.from_parameters(flags)]
    checks = examine(specs, since_boot=boot_of(RESULTS / specs[0].campaign))
    if as_json:
        rows: list[dict[str, Any]] = [dataclasses.asdict(check) for check in checks]
        typer.echo(json.dumps({"ok": not would_fail(checks), "checks": rows}, indent=1))
    else:
        typer.echo(format_checks(checks))
    raise typer.Exit(GATE_FAILED if would_fail(checks) else 0)


@app.command()
def tune(
    devctl: Annotated[str, typer.Option(help="a PCIe Device Control value to decode, such as 0x2937")] = "",
    max_read_request: Annotated[int | None, typer.Option(help="bytes wanted, with --devctl: 128 to 4096")] = None,
    against: Annotated[str, typer.Option(help="a proposed value: what else would it change?")] = "",
    as_json: JsonOption = False,
) -> None:
    """Explain the host's tuning and print the lines that would change and restore it. Changes nothing itself."""
    from benchlib.tuning import format_devctl, format_tuning, parse_register, read_tuning

    if devctl and as_json:
        raise SpecError("--json prints the host's settings: leave out --devctl, whose answer is text")
    if not devctl:
        if against or max_read_request is not None:
            raise SpecError("--max-read-request and --against need --devctl, the register's value now")
        settings = read_tuning()
        rows = [dataclasses.asdict(setting) for setting in settings]
        typer.echo(json.dumps(rows, indent=1) if as_json else format_tuning(settings))
        return
    proposed = parse_register(against) if against else None
    typer.echo(format_devctl(parse_register(devctl), size=max_read_request, against=proposed))
