"""`kit bench`: how exact the load generator is, what the proxy adds, and what other tools read."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kit import console
from kit.bench import MODES
from kit.cli_images import Json
from kit.errors import UnknownName, UsageError


def bench_command(
    streams: Annotated[
        list[int] | None, typer.Option(help="Concurrent streams; may be given again.")
    ] = None,
    start: Annotated[
        list[str] | None,
        typer.Option(help=f"How they start: {' or '.join(MODES)}; both unless said."),
    ] = None,
    of_proxy: Annotated[
        bool, typer.Option("--proxy", help="Measure what the kit's proxy adds instead.")
    ] = False,
    of_peers: Annotated[
        bool, typer.Option("--peers", help="Measure other load generators beside ours.")
    ] = False,
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="Put the table into docs/proxy.md (--proxy) or docs/peers.md (--peers)."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure the load generator's own error against a stub with an exact schedule."""
    if of_proxy and of_peers:
        raise UsageError("--proxy and --peers are two benches", hint="one after the other")
    if write and not (of_proxy or of_peers):
        raise UsageError(
            "--write belongs to --proxy or --peers", hint="nox -s bench -- --proxy --write"
        )
    modes = tuple(start or MODES)
    if unknown := set(modes) - set(MODES):
        raise UnknownName(f"no start `{min(unknown)}`", hint=f"known: {', '.join(MODES)}")
    if of_proxy:
        _proxy(streams, modes, write=write, as_json=as_json)
    elif of_peers:
        _peers(streams, modes, write=write, as_json=as_json)
    else:
        from kit.bench import bench, show

        results = bench(tuple(streams or (64, 256)), modes=modes)
        if not _as_data(as_json, results):
            show(results)


def _proxy(
    streams: list[int] | None, modes: tuple[str, ...], *, write: bool, as_json: bool
) -> None:
    from kit.bench_proxy import bench_proxy, show_proxy
    from kit.manifest import now_utc
    from kit.proxy_document import this_machine, write_document

    costs = bench_proxy(tuple(streams or (64,)), modes=modes)
    if write:
        write_document(costs, day=now_utc()[:10], machine=this_machine())
    if not _as_data(as_json, costs):
        show_proxy(costs)


def _peers(
    streams: list[int] | None, modes: tuple[str, ...], *, write: bool, as_json: bool
) -> None:
    from kit.bench_peers import STREAMS, bench_peers, show_peers
    from kit.manifest import now_utc
    from kit.peers_document import write_document
    from kit.proxy_document import this_machine

    results = bench_peers(console.say, tuple(streams or STREAMS), modes=modes)
    if write:
        write_document(results, day=now_utc()[:10], machine=this_machine())
    if not _as_data(as_json, results):
        show_peers(results)


def _as_data(as_json: bool, results: list[Any]) -> bool:
    if as_json:
        console.data([each.model_dump(mode="json") for each in results])
    return as_json
