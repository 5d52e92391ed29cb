"""`pdxfer bench codec`: what each codec saves, costs in quality, and how fast it is, on real KV of a real model.

Contexts of held-out text are prefilled (--kv vllm: by an engine, out of whose store their KV is read), their KV goes
through a codec in chunks, and the tokens that follow are predicted from what came back, by transformers in float32: KL
divergence, top-1 agreement and perplexity against the KV as it was, bfloat16. The tables of klt and cachegen are learnt
first, from other texts, unless --tables has them. Rates are GB of bfloat16 KV per CPU second (of all threads together),
best of --reps; *numba* is klt without the C library.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pdxfer.bench.codec_arms import arms, chunk_spec, ratio_at, timed
from pdxfer.bench.codec_kv import kv_of
from pdxfer.bench.codec_quality import Material, Prefill, measure
from pdxfer.bench.codec_texts import calibration, held_out
from pdxfer.bench.report import Report, emit
from pdxfer.codec.base import Codec
from pdxfer.codec.calibrate_model import LoadedModel, Windows, calibrate
from pdxfer.codec.frame import FrameHeader
from pdxfer.codec.tables import TableFolder
from pdxfer.connector.identity import digest_weights
from pdxfer.launcher.demo_model import prepare_demo_model

KL = 0.005
"""At which ratios are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for."""

    model: Path | None
    tables: Path
    texts: tuple[str, ...]
    only: str
    context: int
    positions: int
    windows: int
    chunk: int
    reps: int
    as_json: bool
    out: Path
    kv: str


def main(argv: Sequence[str]) -> int:
    """Run the bench; the exit code."""
    run(parse(argv), list(argv))
    return 0


def parse(argv: Sequence[str]) -> Options:
    """Flags → Options."""
    parser = argparse.ArgumentParser(
        prog="pdxfer bench codec", description=__doc__, epilog="Example: pdxfer bench codec --only klt",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    names = list(held_out())
    parser.add_argument("--model", type=Path, help="model directory (default: the demo model)")
    parser.add_argument("--tables", type=Path, help="folder of calibrated tables (default OUT/codec-tables)")
    parser.add_argument("--texts", default=",".join(names), help=f"of {', '.join(names)} (default all)")
    parser.add_argument("--only", default="", help="measure only arms whose name contains this")
    parser.add_argument("--context", type=int, default=2048, help="tokens whose KV is coded (default 2048)")
    parser.add_argument("--positions", type=int, default=256, help="tokens predicted from it (default 256)")
    parser.add_argument("--windows", type=int, default=7, help="calibration windows (default 7)")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a chunk (default 256)")
    parser.add_argument("--reps", type=int, default=9, help="repetitions of each rate (default 9)")
    parser.add_argument("--kv", choices=["vllm", "transformers"], default="transformers", help="who prefills")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, default=Path("bench/out"), help="where codec.json and .png go")
    args = parser.parse_args(argv)
    chosen = tuple(args.texts.split(","))
    if not set(chosen) <= set(names) or min(args.context, args.positions, args.chunk, args.reps) < 1:
        parser.error(f"--texts are of {', '.join(names)}; numbers are at least 1")
    return Options(
        model=args.model, tables=args.tables or args.out / "codec-tables", texts=chosen, only=args.only,
        context=args.context, positions=args.positions, windows=args.windows, chunk=args.chunk, reps=args.reps,
        as_json=args.json, out=args.out, kv=args.kv,
    )  # fmt: skip


def run(options: Options, argv: list[str]) -> dict[str, Any]:
    """Measure, print, write; the printed object."""
    report = Report("codec", argv)
    directory = options.model or prepare_demo_model(None)
    model = LoadedModel(directory)
    folder = TableFolder(options.tables, digest_weights(directory))
    if folder.current("klt", 0) is None:
        for tables in calibrate(model, calibration(), Windows(count=options.windows), _say):
            folder.put(tables)
    texts = {name: text for name, text in held_out().items() if name in options.texts}
    material = Material(model, texts, options.context, options.positions, _prefill(directory, options))
    families: dict[str, list[tuple[float, float]]] = {}
    for arm in arms(folder):
        if options.only not in arm.name:
            continue
        found = measure(material, arm, options.chunk)
        families.setdefault(arm.family, []).append((found.kl, found.ratio))
        report.add(
            arm=arm.name, ratio=found.ratio, kl=found.kl, kl_95=found.kl_half_width, top1=found.top1,
            ppl_change=found.ppl_change, worst_text_kl=max(found.kl_by_text.values()),
        )  # fmt: skip
        print(f"{arm.name}: ratio {found.ratio:.2f}, KL {found.kl:.5f}", file=sys.stderr)
    report.summary = _summary(families, material.num_positions)
    piece = np.ascontiguousarray(material.contexts[-1].kv[:, :, :, -options.chunk :])
    report.summary |= _rates(timed(folder), piece, options)
    emit(report, as_json=options.as_json, out_dir=options.out, draw=lambda axes: _draw(axes, families))
    return report.to_dict()


def _prefill(directory: Path, options: Options) -> Prefill | None:
    if options.kv != "vllm":
        return None
    return lambda contexts: kv_of(directory, contexts, options.chunk, options.out / "codec-kv.npz")


def _summary(families: dict[str, list[tuple[float, float]]], num_positions: int) -> dict[str, Any]:
    at = {name: ratio_at(points, KL) for name, points in families.items()}
    released = at.get("cachegen released")
    found: dict[str, Any] = {
        f"klt_ratio_at_kl_{KL}": at.get("klt"),
        f"klt_uncal_ratio_at_kl_{KL}": at.get("klt uncalibrated"),
        f"cachegen_ratio_at_kl_{KL}": at.get("cachegen"),
        f"cachegen_released_ratio_at_kl_{KL}": released,
        "lossless_ratio": families["lossless"][0][1] if "lossless" in families else None,
        "num_positions": num_positions,
    }
    for name, key in (("klt", "klt_vs_cachegen_released"), ("klt uncalibrated", "klt_uncal_vs_cachegen_released")):
        ours = at.get(name)
        found[key] = ours / released if ours and released else None
    return found


def _rates(codecs: dict[str, Codec], piece: npt.NDArray[Any], options: Options) -> dict[str, Any]:
    """GB of bfloat16 KV per CPU second of each codec on one chunk from the end of a context. Arms take turns."""
    values, spec = piece.reshape(-1).view(np.uint8), chunk_spec(piece, options.context)
    jobs: dict[str, Callable[[], object]] = {}
    for name, codec in codecs.items():
        if options.only and options.only not in name:
            continue
        encoded = codec.encode(values, spec)
        header = FrameHeader(
            codec=encoded.codec, codec_version=encoded.codec_version, level=encoded.level, dtype=spec.dtype,
            shape=spec.shape, num_tokens=spec.shape[3], first_token=spec.first_token, raw_bytes=values.nbytes,
            payload_bytes=len(encoded.payload), identity=bytes(16), tables=encoded.tables, key=bytes(32),
            payload_xxh3=0,
        )  # fmt: skip
        jobs[f"{name}_enc_gbs"] = _encoding(codec, values, spec)
        jobs[f"{name}_dec_gbs"] = _decoding(codec, memoryview(bytes(encoded.payload)), header, np.empty_like(values))
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(options.reps + 1):
        for name, job in jobs.items():
            start = time.process_time()
            job()
            best[name] = min(best[name], time.process_time() - start)
    return {name: values.nbytes / seconds / 1e9 for name, seconds in best.items()}


def _encoding(codec: Codec, values: npt.NDArray[np.uint8], spec: Any) -> Callable[[], object]:
    return lambda: codec.encode(values, spec)


def _decoding(
    codec: Codec, payload: memoryview, header: FrameHeader, out: npt.NDArray[np.uint8]
) -> Callable[[], object]:
    return lambda: codec.decode(payload, header, out)


def _say(what: str, done: int, total: int) -> None:
    print(f"calibrate: {what} ({done} of {total})", file=sys.stderr)


def _draw(axes: Any, families: dict[str, list[tuple[float, float]]]) -> None:
    least = 1e-5
    for name, points in families.items():
        ordered = sorted(points)
        axes.plot(
            [ratio for _, ratio in ordered], [max(kl, least) for kl, _ in ordered], "o-", label=name, markersize=4
        )
    axes.axhline(KL, color="grey", linewidth=0.8, linestyle=":")
    axes.set_yscale("log")
    axes.set_xlabel("bytes of bfloat16 KV / bytes coded")
    axes.set_ylabel(f"KL to bfloat16 KV (0 drawn at {least:g})")
    axes.set_title("Codecs: smaller is to the right, better is below")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
