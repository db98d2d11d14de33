"""What is to be run: `Workload`, `RunSpec` and `Sweep`, frozen and validated, all errors at once.

A *condition* is what is compared; a *run* is one server start of one condition. A sweep file crosses axes into
conditions and repeats each over `starts`. Everything a notebook is given as a parameter comes from here, so a name
that is not a field of `RunSpec` or `Workload` is refused before anything starts.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import os
import random
import tomllib
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from benchlib.errors import SpecError
from benchlib.nccl import load_profiles

__all__ = [
    "Assumed", "Engine", "EngineOptions", "Frozen", "Method", "NumaPolicy", "RunSpec", "Sweep", "Variant", "Workload",
    "content_hash", "load_sweep",
]  # fmt: skip


def _unique(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) != len(values):
        raise ValueError(f"names a value twice: {list(values)}")
    return values


Engine = Literal["reference", "sglang"]
Method = Literal["auto", "linear", "ddtree"]
NumaPolicy = Literal["pack", "allow-cross", "spread"]
PromptSet = Literal["openings", "instructions", "random-ids"]
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
NAME_OR_EMPTY = rf"^({NAME})?$"
FolderName = Annotated[str, Field(pattern=rf"^{NAME}$")]
Whole = Annotated[int, Field(strict=True)]  # `true` is no 1
Positive = Annotated[Whole, Field(ge=1)]
TreeBudget = Annotated[Whole, Field(ge=1, le=1024, description="nodes beside the root")]
Unique = AfterValidator(_unique)
M = TypeVar("M", bound=BaseModel)


class Frozen(BaseModel):
    """Base of every model that crosses a file or a notebook parameter."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


def content_hash(value: object) -> str:
    """Hash of a JSON-able value, independent of key order: 16 hex digits of SHA-256."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Workload(Frozen):
    """The cells measured inside one server start: prompts x max_new_tokens x concurrency."""

    prompts: Annotated[
        tuple[str, ...], Field(min_length=1, description="names in the prompt set; of `random-ids`, any"), Unique
    ] = ("fib", "qsort", "arith", "json")
    prompt_set: PromptSet = Field("openings", description="a file in benchlib/prompts/, or ids drawn by the seed")
    max_new_tokens: Annotated[
        tuple[Positive, ...], Field(min_length=1, description="tokens asked for in a timed request"), Unique
    ] = (256,)
    concurrency: Annotated[
        tuple[Positive, ...], Field(min_length=1, description="requests sent at once in a round"), Unique
    ] = (1,)
    warmups: Whole = Field(1, ge=0, description="untimed rounds of each cell, of 32 tokens at most, kept apart")
    repeats: Whole = Field(3, ge=1, description="timed rounds of each cell; a round is `concurrency` requests at once")
    max_repeats: Whole = Field(0, ge=0, description="0: `repeats` it is; else cells go on up to so many, until precise")
    precision: float = Field(0.01, gt=0, lt=1, description="half-width of a cell's 95% interval that ends its rounds")
    temperature: float = Field(0.0, ge=0.0, description="0: greedy, which alone can be validated")
    ignore_eos: bool = Field(True, description="generate the tokens asked for, whatever the model would end with")


class EngineSettings(Frozen):
    """How an engine is started; its own defaults where a value is empty."""

    model_path: str = Field("", description="the target; empty: the engine's own")
    draft_model_path: str = Field("", description="the drafter; empty: the engine's own")
    weights: Literal["real", "random"] = Field("real", description="random ones never become a speedup")
    server_python: str = Field("", description="interpreter that has the engine; empty: this one")
    server_args: tuple[str, ...] = Field((), description="further flags; they win over what benchlib would set")
    server_env: dict[str, str] = Field(default_factory=dict, description="further variables of the server")


class Conditions(Frozen):
    """What a sweep holds equal in all of its runs."""

    engine: Engine = "reference"
    block_size: Whole = Field(16, ge=2, le=64, description="DFlash block: anchor + block_size - 1 drafts")
    seed: Whole = Field(0, description="of the server, and of `random-ids` prompts")
    nccl_file: str = Field("", description="TOML file of own NCCL profiles, beside the ones that come with benchlib")
    measured_links: str = Field("", description="file of `benchlib topology --measure` that placement is to prefer")
    max_running_requests: Positive = Field(8, description="the server's limit of requests at once")
    attach: str = Field("", description="URL of a server to measure and never stop; empty: start one")
    startup_timeout_s: float = Field(600.0, gt=0, allow_inf_nan=False, description="until the server must be ready")
    request_timeout_s: float = Field(600.0, gt=0, allow_inf_nan=False, description="until a request must have ended")
    stall_timeout_s: float = Field(
        120.0, gt=0, allow_inf_nan=False, description="without a byte of a request, after which it is given up"
    )
    workload: Workload = Field(Workload(), description="what is sent to it")


class RunSpec(Conditions, EngineSettings):
    """One server start of one condition, fully resolved."""

    campaign: FolderName = Field("adhoc", description="the folder of its runs, beside other campaigns")
    tp_size: Positive = Field(1, description="tensor-parallel ranks")
    method: Method = Field("auto", description="autoregressive, a DFlash chain or a DDTree")
    tree_budget: TreeBudget | None = Field(None, description="nodes beside the root; of `ddtree` alone")
    nccl_profile: str = Field("none", description="named NCCL variables, from benchlib/nccl_profiles.toml or nccl_file")
    numa_policy: NumaPolicy = Field("pack", description="which GPUs may be taken: see `benchlib place`")
    variant: Annotated[str, Field(pattern=NAME_OR_EMPTY, description="the sweep's name for further flags")] = ""
    start: Positive = Field(1, description="which server start of its condition")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        if self.method == "ddtree" and self.tree_budget is None:
            problems.append('method "ddtree" needs tree_budget (1 to 1024)')
        if self.method != "ddtree" and self.tree_budget is not None:
            problems.append(f'tree_budget={self.tree_budget} means nothing for method "{self.method}": leave it out')
        problems += self._meaningless()
        if self.nccl_profile not in (profiles := load_profiles(Path(self.nccl_file) if self.nccl_file else None)):
            problems.append(f'nccl_profile "{self.nccl_profile}" is unknown; there are {sorted(profiles)}')
        if "CUDA_VISIBLE_DEVICES" in self.server_env:
            problems.append(
                "CUDA_VISIBLE_DEVICES in server_env: placement chooses the GPUs. To restrict it, set the "
                "variable for benchlib itself"
            )
        if max(self.workload.concurrency) > self.max_running_requests:
            problems.append(
                f"concurrency {max(self.workload.concurrency)} exceeds max_running_requests={self.max_running_requests}"
                ": requests would queue and the figure would measure the queue"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _meaningless(self) -> list[str]:
        """What is refused rather than ignored: a field that changes nothing would still name a condition."""
        why = "engine reference has no GPU" if self.engine == "reference" else "one rank has no collective"
        if self.attach:
            why = "an attached server is started and placed by somebody else"
        elif self.engine == "sglang" and self.tp_size > 1:
            return []
        given = {"nccl_profile": self.nccl_profile, "numa_policy": self.numa_policy}
        default = {"nccl_profile": "none", "numa_policy": "pack"}
        return [
            f'{name} "{value}" would change nothing, {why}: leave it out'
            for name, value in given.items()
            if value != default[name] and value != "allow-cross"
        ]

    @property
    def condition_name(self) -> str:
        """`tp4-auto`, `tp4-linear`, `tp4-b15`, `tp4-auto-pcie-spread`: the campaign's short names."""
        parts = [f"tp{self.tp_size}", self.method if self.tree_budget is None else f"b{self.tree_budget}"]
        parts += [self.nccl_profile] * (self.nccl_profile != "none") + [self.numa_policy] * (self.numa_policy != "pack")
        return "-".join([*parts, *[self.variant] * bool(self.variant)])

    @property
    def run_name(self) -> str:
        """The condition's name, with `.2` for a second start: the run's folder."""
        return self.condition_name if self.start == 1 else f"{self.condition_name}.{self.start}"

    @property
    def hash(self) -> str:
        """Content hash of the whole spec."""
        return content_hash(self.model_dump(mode="json"))

    @classmethod
    def parameter_names(cls) -> tuple[str, ...]:
        """Names of the flat form: what a notebook's parameters cell holds."""
        return tuple(cls().to_parameters())

    @classmethod
    def from_parameters(cls, parameters: dict[str, Any]) -> Self:
        """Build from flat notebook parameters; raises SpecError with every problem found."""
        workload = {name: parameters[name] for name in Workload.model_fields if name in parameters}
        rest = {name: value for name, value in parameters.items() if name not in workload}
        return _checked(cls, {**rest, "workload": workload}, "run")

    def to_parameters(self) -> dict[str, Any]:
        """The flat form, of JSON types: what papermill is given."""
        data = self.model_dump(mode="json")
        workload = data.pop("workload")
        return {**data, **workload}


class EngineOptions(EngineSettings):
    """What a sweep says of one engine, applied when `engine` selects it."""

    prompt_set: PromptSet | None = Field(None, description="replaces the workload's, where the engine needs another")


class Axes(Frozen):
    """What a sweep crosses into conditions."""

    tp_size: Annotated[tuple[Positive, ...], Unique] = (1,)
    methods: Annotated[tuple[Literal["auto", "linear"], ...], Unique] = ("auto", "linear")
    tree_budgets: Annotated[tuple[TreeBudget, ...], Unique] = ()
    nccl_profiles: Annotated[tuple[str, ...], Field(min_length=1), Unique] = ("none",)
    numa_policies: Annotated[tuple[NumaPolicy, ...], Field(min_length=1), Unique] = ("pack",)
    starts: Positive = 1


class Variant(Axes):
    """Further conditions of a sweep under a name of their own; an axis that it leaves out is the sweep's."""

    block_size: Whole | None = None
    server_args: tuple[str, ...] = Field((), description="added to the engine's")
    server_env: dict[str, str] = Field(default_factory=dict, description="added to the engine's")


class Assumed(Frozen):
    """What `plan` reckons with until the campaign has a record of its own; measured by nobody here."""

    start_s: float = Field(80.0, gt=0, description="seconds of one server start and stop")
    decode_tok_s: float = Field(gt=0, description="of one request, tokens/s")


class Sweep(Conditions, Axes):
    """A sweep file: axes crossed into conditions, each measured in `starts` server starts, order randomised."""

    name: FolderName
    description: str = ""
    order_seed: Whole = 0
    engines: dict[Engine, EngineOptions] = Field(default_factory=dict)
    variants: dict[FolderName, Variant] = Field(default_factory=dict)
    assumed: Assumed | None = None

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("variants"), dict):
            return data
        own = {name: data[name] for name in Axes.model_fields if name in data}
        # Methods and budgets name the methods together: a variant that gives one gives both.
        none = {"methods": (), "tree_budgets": ()}
        variants = {
            name: {**own, **(none if none.keys() & given.keys() else {}), **given} if isinstance(given, dict) else given
            for name, given in data["variants"].items()
        }
        return {**data, "variants": variants}

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        blocks: dict[str, Axes] = {"a sweep": self, **self.variants}
        for name, axes in blocks.items():
            if not axes.methods and not axes.tree_budgets:
                raise ValueError(f"{name} needs at least one of methods or tree_budgets")
        own = {name: getattr(self, name) for name in Axes.model_fields if name != "starts"}
        for name, variant in self.variants.items():
            same = all(getattr(variant, field) == value for field, value in own.items())
            if same and not (variant.block_size or variant.server_args or variant.server_env):
                raise ValueError(f"variant {name} changes nothing: give it server_args, server_env, or an axis")
        return self

    def runs(self) -> list[RunSpec]:
        """Every run in measuring order: start 1 of all conditions shuffled, then start 2 of all, and so on."""
        options = self.engines.get(self.engine, EngineOptions())
        shared = self.model_dump(include=set(Conditions.model_fields)) | options.model_dump(exclude={"prompt_set"})
        shared["campaign"] = self.name
        shared["workload"]["prompt_set"] = options.prompt_set or self.workload.prompt_set
        blocks = [*_conditions(self), *(c for name, v in self.variants.items() for c in _conditions(v, name, shared))]
        ordering = random.Random(self.order_seed)
        runs = []
        for start in range(1, max(starts for starts, _ in blocks) + 1):
            block = [_checked(RunSpec, {**shared, **own, "start": start}, "run") for n, own in blocks if start <= n]
            ordering.shuffle(block)
            runs += block
        # One folder holds one run: a variant may be named like another axis' value.
        if twice := sorted(name for name, n in Counter(run.run_name for run in runs).items() if n > 1):
            raise SpecError(f"sweep {self.name} gives two conditions one name, {', '.join(twice)}: rename the variant")
        return runs


def _conditions(
    axes: Axes, variant: str = "", shared: dict[str, Any] | None = None
) -> list[tuple[int, dict[str, Any]]]:
    """(starts, fields) of each condition, once: one rank has neither a collective nor a second node."""
    own: dict[str, Any] = {}
    if isinstance(axes, Variant) and shared is not None:
        own = {"variant": variant, "block_size": axes.block_size or shared["block_size"]}
        own["server_args"] = (*shared["server_args"], *axes.server_args)
        own["server_env"] = {**shared["server_env"], **axes.server_env}
    methods = [(method, None) for method in axes.methods] + [("ddtree", budget) for budget in axes.tree_budgets]
    return [
        (axes.starts, own | {"tp_size": tp, "method": m, "tree_budget": b, "nccl_profile": nccl, "numa_policy": numa})
        for tp, (m, b) in itertools.product(axes.tp_size, methods)
        for nccl in (axes.nccl_profiles if tp > 1 else ("none",))
        for numa in (axes.numa_policies if tp > 1 else ("pack",))
    ]


def load_sweep(path: Path | str, **overrides: object) -> Sweep:
    """Read a sweep file; `overrides` replace its keys, tables merged. Raises SpecError naming every problem."""
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"cannot read the sweep file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is not valid TOML: {error}") from error
    data = _merged(data, overrides)
    files = ("engines", "variants", "nccl_file", "measured_links")
    return _checked(Sweep, data | _beside(path.resolve().parent, {k: data[k] for k in files if k in data}), str(path))


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    tables = {key: _merged(base[key], value) for key, value in over.items() if isinstance(value, dict) and key in base}
    return {**base, **over, **tables}


def _beside(folder: Path, value: Any) -> Any:
    """Values that begin with `./` or `../` name files beside the sweep file, wherever it is run from."""
    if isinstance(value, dict):
        return {key: _beside(folder, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_beside(folder, inner) for inner in value]
    if isinstance(value, str) and value.startswith(("./", "../")):
        # Not through symbolic links: an interpreter's link tells its environment.
        return os.path.normpath(folder / value)
    return value


def _checked(model: type[M], data: dict[str, Any], where: str) -> M:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [
            _problem(e["loc"], _in_words(e["type"], e["msg"], e["loc"], model), e["input"]) for e in error.errors()
        ]
        allowed = ", ".join(sorted(model.model_fields))
        raise SpecError(
            f"{where} has {len(lines)} problem(s):\n" + "\n".join(lines) + f"\nallowed keys: {allowed}"
        ) from None


def _in_words(kind: str, message: str, place: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """pydantic's message, in the words of a sweep file where it has none of those."""
    if kind == "extra_forbidden":
        known = [*model.model_fields, *(f"workload.{name}" for name in Workload.model_fields)]
        near = difflib.get_close_matches(str(place[-1]), known, n=1)
        return "is no key here" + (f"; did you mean {near[0]}?" if near else "")
    if kind == "tuple_type":
        return "should be a list, such as [16]"
    return message.removeprefix("Value error, ")


def _problem(place: tuple[int | str, ...], message: str, value: object) -> str:
    """One line: where, what, and the value seen, unless that is a whole table."""
    seen = "" if isinstance(value, dict | BaseModel) else f" (got {value!r:.80})"
    return f"  {'.'.join(map(str, place))}{': ' if place else ''}{message}{seen}"
