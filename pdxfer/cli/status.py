"""`pdxfer status`."""

from dataclasses import replace

import typer

from pdxfer.cli.cluster import NODE_COLUMNS, TokenFile, Url, connect, node_row
from pdxfer.cli.options import AsJson, ConfigFiles, Sets, new_app, print_json, print_table

app = new_app()

_MAX_ROWS = 16
"""More engines than this: only those that are not ready are listed."""


@app.command()
def status(
    url: Url = "", token_file: TokenFile = "", config: ConfigFiles = None, set_: Sets = None, as_json: AsJson = False
) -> None:
    """Is the cluster ready, and if not, why. Exit 0 ready, 1 not ready, 3 no controller.

    Example: pdxfer status --url http://127.0.0.1:5580
    """
    client = connect(url, token_file, config, set_)
    ready = client.ready()
    # A summary is up to a second old; whether the cluster is ready, and its engines, are as of now.
    summary = replace(client.summary(), ready=ready.ready, reasons=ready.reasons, nodes=client.nodes())
    if as_json:
        print_json(summary)
        raise typer.Exit(0 if summary.ready else 1)
    from pdxfer.cli.screen import ms, percent, rate, size

    print("ready" if summary.ready else "not ready")
    for reason in summary.reasons:
        print(f"  {reason}")
    print(
        f"{len(summary.nodes)} engines, {summary.num_pairs} pairs, {summary.num_proxies} proxies; "
        f"{summary.num_leases} transfers in flight, {summary.num_queued} queued, {rate(summary.bytes_per_s)} moved"
    )
    if summary.ttft_p50_ms is not None:
        print(
            f"TTFT of the last minute: p50 {ms(summary.ttft_p50_ms)}, p99 {ms(summary.ttft_p99_ms)}, "
            f"{summary.requests_per_s:.1f} requests/s"
        )
    for tier in summary.tiers:
        room = f" of {size(tier.capacity_bytes)}" if tier.capacity_bytes else ""
        away = f", {tier.num_unreachable} away" if tier.num_unreachable else ""
        print(f"tier {tier.kind}: {size(tier.used_bytes)}{room}, hits {percent(tier.hit_rate)}{away}")
    shown = summary.nodes
    if len(shown) > _MAX_ROWS:
        shown = [node for node in summary.nodes if node.state != "ready"]
        print(f"{len(summary.nodes) - len(shown)} engines are ready (pdxfer nodes lists them)")
    if shown:
        print_table(NODE_COLUMNS, [node_row(node) for node in shown])
    raise typer.Exit(0 if summary.ready else 1)
