"""Every error benchlib raises on purpose.

BenchlibError
├── SpecError
├── UnavailableError
├── PlacementError
├── ServerError
├── RequestError
├── RecordError
├── ComparisonError
├── LosslessnessError
└── ReportError

A text says what failed, the value seen, what was allowed and what to do. The command line prints it without a
traceback and exits with `exit_code`.
"""

from __future__ import annotations

__all__ = [
    "BenchlibError", "ComparisonError", "LosslessnessError", "PlacementError", "RecordError", "ReportError",
    "RequestError", "ServerError", "SpecError", "UnavailableError",
]  # fmt: skip


class BenchlibError(Exception):
    """Root of the tree; catch this to catch them all."""

    exit_code = 1


class SpecError(BenchlibError):
    """A sweep, run or workload that cannot be run as written."""

    exit_code = 2


class UnavailableError(BenchlibError):
    """The engine lacks what the run asks for (a method, a flag, a package): recorded as failed, never filled in."""


class PlacementError(BenchlibError):
    """The machine cannot host the run as asked."""


class ServerError(BenchlibError):
    """The server did not start, died, hung, or is not the one planned."""


class RequestError(BenchlibError):
    """A request could not be measured."""


class RecordError(BenchlibError):
    """A record is missing, partial, of another schema, or inconsistent."""


class ComparisonError(BenchlibError):
    """Runs that may not be compared with one another."""


class LosslessnessError(BenchlibError):
    """A method's outputs are not the target's own: a gate failed."""

    exit_code = 3


class ReportError(BenchlibError):
    """A table, figure or document could not be made."""
