"""The fixes that tests/reverted takes out, with the seeds of the simulation that find each defect again. docs/record.md names the same ones."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fix:
    # Its file here, named after the commits of the fix.
    patch: str
    seeds: tuple
    # What the output of a seed that finds the defect says.
    says: str


# Those that change the protocol's crate come last, and beside each other: more is built for them.
FIXES = (
    Fix("237cd30", (12,), "the connection was just lost"),
    Fix("4663957", (12,), "cannot reach"),
    Fix("c156ba8", (12,), "cannot reach"),
    Fix("31c7354", (1,), "losses_total"),
    Fix("17b6edb-once", (5,), "runs twice"),
    Fix("17b6edb-goes-on", (8, 12), "may have run"),
    Fix("b006a5a-42972b7", (17,), "losses_total"),
    Fix("42972b7", (387,), "losses_total"),
)
