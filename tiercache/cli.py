"""The command line. Each command imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="tiercache",
    help="A tiered cache for the KV cache of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="About configurations.", no_args_is_help=True)
app.add_typer(config_app, name="config")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _version(wanted: bool) -> None:
    if wanted:
        from tiercache import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


@app.command()
def doctor(
    path: Annotated[Path | None, typer.Option(help="A directory for chunks: its mount, O_DIRECT, GDS, locks.")] = None,
    as_json: AsJson = False,
) -> None:
    """What this machine offers, and what to do about what it does not."""
    from tiercache.commands.doctor import doctor_command

    raise typer.Exit(doctor_command(path, as_json))


@config_app.command("explain")
def config_explain(
    file: Annotated[
        Path | None, typer.Argument(help="A tiercache or LMCache YAML file; none: the environment's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The effective configuration, where each value came from, and which tiers it makes."""
    from tiercache.config.command import explain_command

    raise typer.Exit(explain_command(file, as_json))


@app.command()
def stat(
    directory: Annotated[Path, typer.Argument(help="A directory of the disk tier.")], as_json: AsJson = False
) -> None:
    """What a directory of the disk tier holds."""
    from tiercache.commands.stat import stat_command

    raise typer.Exit(stat_command(directory, as_json))


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(help="A directory of the disk tier.")], as_json: AsJson = False
) -> None:
    """Check every chunk; the bad are moved to quarantine, and the exit status is 1."""
    from tiercache.commands.verify import verify_command

    raise typer.Exit(verify_command(directory, as_json))


@app.command()
def bench(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    directory: Annotated[Path, typer.Option(help="Where the disk is measured.")] = Path("bench-data"),
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of ceiling and ours.")] = 5,
    only: Annotated[str, typer.Option(help="Comma list of: core, cpu, disk, loop, restart; hf3fs only when named.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: shows that it works, measures nothing.")] = False,
    peer: Annotated[str, typer.Option(help="Also measure this peer (lmcache).")] = "",
    peer_python: Annotated[Path | None, typer.Option(help="A Python that has the peer installed.")] = None,
) -> None:
    """Ceilings of this machine and ours, interleaved in one run."""
    from tiercache.bench.command import bench_command

    raise typer.Exit(bench_command(json_file, directory, pairs, only, quick, peer, peer_python))


@app.command("serve-control")
def serve_control(
    socket: Annotated[list[Path], typer.Option(help="The control_socket of a cache; all its ranks. May be repeated.")],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: any free one.")] = 8300,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the bearer token; by default $TIERCACHE_CONTROL_TOKEN has it.")
    ] = None,
    no_token: Annotated[bool, typer.Option("--no-token", help="Ask for none. On loopback only.")] = False,
) -> None:
    """HTTP for gateways, in front of caches' control sockets; and /metrics for Prometheus."""
    from tiercache.control.command import serve_control_command

    raise typer.Exit(serve_control_command(socket, host, port, token_file, no_token))


def main() -> None:
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
