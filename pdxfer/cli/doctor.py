"""`pdxfer doctor`: runs all checks and says what to do. Exit 1 if something keeps the configuration from running.

With `--live` it asks the controller about the cluster that runs, and nothing about this host.
"""

import os
from typing import Annotated

import typer

from pdxfer.cli.cluster import TokenFile, Url, connect
from pdxfer.cli.options import AsJson, ConfigFiles, Sets, load_settings, new_app, print_json

app = new_app()
_MARKS = {"ok": "ok     ", "warning": "WARNING", "blocks": "BLOCKS "}


@app.command()
def doctor(
    config: ConfigFiles = None,
    set_: Sets = None,
    model: Annotated[str, typer.Option(help="Model directory or demo.", show_default=False)] = "",
    live: Annotated[bool, typer.Option("--live", help="Check the cluster that runs, for faults and leaks.")] = False,
    settle: Annotated[float, typer.Option(help="--live: seconds in which it may become clean.", min=0.0)] = 5.0,
    url: Url = "",
    token_file: TokenFile = "",
    as_json: AsJson = False,
) -> None:
    """Find out what would keep pdxfer from running here, and what to do. Exit 1 if something does.

    With --live: is the running cluster whole, and has it lost blocks, credits or leases? Exit 0 clean, 1 not, 3 no
    controller.

    Example: pdxfer doctor --config cpu-1p1d
    """
    if live:
        from pdxfer.cli.doctor_live import examine, show

        report = examine(connect(url, token_file, config, set_), settle)
        show(report, as_json)
        raise typer.Exit(0 if report.clean else 1)
    from pdxfer.cli.checks.all import run_checks
    from pdxfer.launcher.machine import this_machine

    flags = {"--model": ("model.path", model)} if model else {}
    findings = run_checks(load_settings(config, set_, flags).config, this_machine(), os.environ)
    is_blocked = any(finding.status == "blocks" for finding in findings)
    if as_json:
        print_json({"ok": not is_blocked, "findings": findings})
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(f"{_MARKS[finding.status]}  {finding.name.ljust(width)}  {finding.text}")
            if finding.fix:
                print(f"{' ' * (width + 11)}→ {finding.fix}")
    raise typer.Exit(1 if is_blocked else 0)
