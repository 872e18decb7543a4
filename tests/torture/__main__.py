"""`python -m tests.torture`: tests of whole caches, by seed; `make torture` runs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tests.torture.campaign.__main__ import campaign_command
from tests.torture.simulation.command import Torture, torture_command
from tests.torture.simulation.seeds import Own
from tiercache.signals import ended_by_signals

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def torture(
    seeds: Annotated[int | None, typer.Option(min=1, help="So many seeds; without --minutes: 1000.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="For so long at most.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Only this one, with all that happens in it.")] = None,
    first: Annotated[int, typer.Option("--from", min=0, help="The first seed.")] = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: one for each core.")] = 0,
    tier: Annotated[str, typer.Option(help="module:Class of a tier of your own, which takes part in every seed.")] = "",
    option: Annotated[
        list[str] | None, typer.Option(help="name=value for it; {place} is a simulated directory.")
    ] = None,
    real: Annotated[
        Path | None, typer.Option(metavar="DIR", help="True processes, files and servers instead, in DIR; one minute.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Test whole caches on simulated clocks, threads and devices, by seed."""
    if real is not None:
        raise typer.Exit(campaign_command(real, 1.0 if minutes is None else minutes, seed))
    for each in option or []:
        if "=" not in each:
            raise typer.BadParameter(f"--option: expected name=value, found {each!r}")
    own = Own(tier, dict(each.split("=", 1) for each in option or []))
    if problem := own.problem():
        raise typer.BadParameter(f"--tier: {problem}")
    raise typer.Exit(torture_command(Torture(seeds, minutes, seed, first, jobs, own, as_json)))


def main() -> None:
    try:
        with ended_by_signals():
            app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
