"""Define the command line. Each command imports its modules when it runs, so that `--help` is fast."""

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
Directory = Annotated[Path, typer.Argument(help="The directory of a tier on files.")]
Sockets = Annotated[list[Path], typer.Option(help="The control_socket of a cache; all its ranks. May be repeated.")]


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
    path: Annotated[
        str, typer.Option(metavar="PATH", help="A directory for chunks: its mount, O_DIRECT, GDS, locks.")
    ] = ".",
    as_json: AsJson = False,
) -> None:
    """Show what this machine offers, with advice for problems."""
    # A text, since typer would ask for the status of a path, and wait for ever on a mount that hangs.
    from tiercache.commands.doctor import doctor_command

    raise typer.Exit(doctor_command(Path(path), as_json))


@config_app.command("explain")
def config_explain(
    file: Annotated[
        Path | None, typer.Argument(help="A tiercache or LMCache YAML file; none: the environment's.")
    ] = None,
    as_json: AsJson = False,
    defaults: Annotated[bool, typer.Option("--all", help="Show the defaults, too.")] = False,
) -> None:
    """Show the tiers of a configuration, the values that are set, and their sources."""
    from tiercache.commands.explain import explain_command

    raise typer.Exit(explain_command(file, as_json, defaults))


@config_app.command("diff")
def config_diff(
    old: Annotated[Path, typer.Argument(help="A tiercache or LMCache YAML file.")],
    new: Annotated[Path, typer.Argument(help="Another one.")],
) -> None:
    """Show what differs, and if a running cache can change it."""
    from tiercache.commands.diff import diff_command

    raise typer.Exit(diff_command(old, new))


@app.command()
def stat(directory: Directory, as_json: AsJson = False) -> None:
    """Show the contents of a file tier's directory."""
    from tiercache.commands.stat import stat_command

    raise typer.Exit(stat_command(directory, as_json))


@app.command()
def verify(directory: Directory, as_json: AsJson = False) -> None:
    """Check every chunk. Bad chunks are deleted; the exit status is 1 if any was bad or unreadable."""
    from tiercache.commands.verify import verify_command

    raise typer.Exit(verify_command(directory, as_json))


@app.command("export")
def export_chunks(
    directory: Directory,
    output: Annotated[str, typer.Option("--output", "-o", help="A new file; -: standard output.")],
    layout: Annotated[str, typer.Option(help="The layout, as stat shows it, where the directory has several.")] = "",
    as_json: AsJson = False,
) -> None:
    """Write the chunks of one layout to a file, each verified."""
    from tiercache.commands.moving import export_command

    raise typer.Exit(export_command(directory, output, layout, as_json))


@app.command("import")
def import_chunks(
    source: Annotated[str, typer.Argument(metavar="FILE", help="A file of export; -: standard input.")],
    directory: Annotated[Path, typer.Argument(help="The directory of a tier on files, made when missing.")],
    max_size: Annotated[
        float, typer.Option(min=0, max=2**32, help="The cap of this directory in GB, as its caches have it.")
    ],
    as_json: AsJson = False,
) -> None:
    """Store exported chunks, each verified. Nothing is replaced or evicted."""
    from tiercache.commands.moving import import_command

    raise typer.Exit(import_command(source, directory, max_size, as_json))


@app.command()
def bench(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    directory: Annotated[Path, typer.Option(help="Where the disk is measured.")] = Path("bench-data"),
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of ceiling and ours.")] = 5,
    only: Annotated[str, typer.Option(help="Comma list of: core, cpu, disk, prefetch, loop, restart.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: shows that it works, measures nothing.")] = False,
) -> None:
    """Measure this machine's ceilings and tiercache, interleaved in one run."""
    from tiercache.bench.command import bench_command
    from tiercache.bench.workload import Plan

    raise typer.Exit(bench_command(Plan(pairs, quick, directory), only, json_file)[0])


@app.command()
def replay(
    traces: Annotated[list[Path], typer.Argument(help="Traces: Mooncake's, agentic, or our own JSON Lines; .gz too.")],
    sweep: Annotated[
        str,
        typer.Option("--sweep", "--ram", help="Sizes of the hot cache: 2%,10% (of unique blocks), 64GB, 5000, all."),
    ] = "10%",
    flash: Annotated[str, typer.Option(help="Sizes of the flash tier, as for the hot cache; 0: none.")] = "0",
    policy: Annotated[str, typer.Option(help="Eviction from RAM: LRU,FIFO,LFU,MRU.")] = "LRU",
    admission: Annotated[str, typer.Option(help="What flash takes: all,second_touch,live_session.")] = "all",
    prefetch: Annotated[str, typer.Option(help="none, or hints,sessions; + joins them.")] = "none",
    hint_lead_s: Annotated[float, typer.Option(min=0, help="Programs announce a turn so long before.")] = 10.0,
    hint_error: Annotated[float, typer.Option(min=0, max=1, help="By what part of that time they are wrong.")] = 0.0,
    bounds: Annotated[bool, typer.Option(help="Beside no cache, an infinite and an offline-optimal one.")] = True,
    measure_from: Annotated[float, typer.Option(help="Part of the requests that only warms up.")] = 0.5,
    bytes_per_token: Annotated[
        int, typer.Option(min=1, max=2**40, help="KV of a token; 131072: Llama-3.1-8B, bf16.")
    ] = 131072,
    prefill_tokens_per_s: Annotated[float, typer.Option(min=1, help="How fast an engine computes KV.")] = 20000.0,
    ram_gb_per_s: Annotated[float, typer.Option(min=0.001, help="From the hot cache to the GPU.")] = 50.0,
    flash_gb_per_s: Annotated[float, typer.Option(min=0.001, help="Reads of the flash tier.")] = 7.0,
    engines: Annotated[
        int, typer.Option(min=0, max=10**6, help="Each prefills one request at a time; 0: no queue.")
    ] = 0,
    session_interval_s: Annotated[float, typer.Option(min=0, help="Agentic sessions begin so far apart.")] = 0.0,
    repeat: Annotated[int, typer.Option(min=1, help="Play it so often, each time with blocks of its own.")] = 1,
    noisy: Annotated[
        float, typer.Option(min=0, max=10**6, help="Also beside a tenant that scans so many blocks for each.")
    ] = 0.0,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many requests.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at a bad line instead of skipping it.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write a picture to this file.")] = None,
    real: Annotated[Path | None, typer.Option(help="Play it through a real cache, too, with its files here.")] = None,
    real_chunk_kib: Annotated[int, typer.Option(min=4, help="Bytes of a block then, in KiB.")] = 64,
    speed_up: Annotated[float, typer.Option(min=0.01, help="Of its timed part: trace time over real time.")] = 60.0,
) -> None:
    """Simulate tiers and policies over traces, to size RAM and flash. Lists are run in all combinations."""
    from tiercache.replay.command import Options, replay_command
    from tiercache.replay.real.command import RealOptions
    from tiercache.replay.setting import Hardware, Setting

    hardware = Hardware(
        bytes_per_token,
        prefill_tokens_per_s,
        ram_bytes_per_s=ram_gb_per_s * 1e9,
        flash_read_bytes_per_s=flash_gb_per_s * 1e9,
        engines=engines,
    )
    options = Options(
        traces,
        ram=_list(sweep),
        flash=_list(flash),
        policies=_list(policy),
        admissions=_list(admission),
        prefetch=_list(prefetch),
        bounds=bounds,
        measure_from=measure_from,
        strict=strict,
        limit=limit,
        repeat=repeat,
        noisy=noisy,
        session_interval_s=session_interval_s,
        json_file=json_file,
        plot_file=plot_file,
        real=None if real is None else RealOptions(real, real_chunk_kib * 1024, speed_up),
        base=Setting(0, hint_lead_s=hint_lead_s, hint_error=hint_error, hardware=hardware),
    )
    raise typer.Exit(replay_command(options))


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@app.command("serve-control")
def serve_control(
    socket: Sockets,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: any free one.")] = 8300,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the bearer token; by default $TIERCACHE_CONTROL_TOKEN has it.")
    ] = None,
    no_token: Annotated[bool, typer.Option("--no-token", help="Ask for none. On loopback only.")] = False,
) -> None:
    """Serve HTTP for gateways and /metrics for Prometheus, in front of caches' control sockets."""
    from tiercache.control.command import serve_control_command

    raise typer.Exit(serve_control_command(socket, host, port, token_file, no_token))


@app.command()
def top(
    socket: Sockets,
    every_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two refreshes.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once and exit.")] = False,
) -> None:
    """Show live figures by tier: hits, bytes, times, queues, evictions, breakers."""
    from tiercache.control.top import top_command

    raise typer.Exit(top_command(socket, every_s, once))


@app.command()
def advise(
    socket: Sockets,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write a picture to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what more or less RAM and disk would be worth, and why chunks were missing."""
    from tiercache.replay.advise import advise_command

    raise typer.Exit(advise_command(socket, plot_file, as_json))


@app.command()
def ctl(
    socket: Sockets,
    action: Annotated[str, typer.Argument(help="set, reload, detach or attach.")],
    what: Annotated[list[str] | None, typer.Argument(help="set: KEY=VALUE ...; detach and attach: a tier.")] = None,
) -> None:
    """Change a running cache: limits, quotas, credentials, and the tiers that it uses."""
    from tiercache.control.ctl import ctl_command

    raise typer.Exit(ctl_command(socket, action, what or []))


def main() -> None:
    from tiercache.commands.findings import complain
    from tiercache.signals import ended_by_signals

    try:
        with ended_by_signals():
            app()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:  # a full device behind stdout, or a working directory that was deleted
        sys.exit(complain(str(error)))
