"""The codec bench on a small case: lossy codecs keep their quality on real KV; its arithmetic; the codec commands."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pdxfer.bench.codec import KL, _summary, parse
from pdxfer.bench.codec_arms import Arm, CodecArm, Released, ratio_at
from pdxfer.bench.codec_kv import NoKvError, kv_of
from pdxfer.bench.codec_quality import Material, Quality, measure
from pdxfer.bench.codec_texts import calibration, held_out
from pdxfer.cli.main import run
from pdxfer.codec.calibrate_model import LoadedModel, Windows, calibrate, narrow, widen
from pdxfer.codec.registry import codec as by_name
from pdxfer.codec.tables import MemoryTables, TableFolder
from pdxfer.core.errors import ConfigError
from pdxfer.launcher.demo_model import prepare_demo_model


def test_ratios_are_compared_at_one_kl() -> None:
    """On a log-log line between the two neighbours; nothing is made up beyond the measured."""
    points = [(0.001, 2.0), (0.01, 8.0), (0.1, 9.0)]
    assert ratio_at(points, 0.001) == pytest.approx(2) and ratio_at(points, 0.1) == pytest.approx(9)
    middle = ratio_at(points[::-1], 10**-2.5)
    assert middle is not None and abs(middle - 4.0) < 1e-9
    assert ratio_at(points, 0.0001) is None and ratio_at(points, 0.2) is None and ratio_at([], KL) is None


def test_the_summary_says_what_the_promises_ask() -> None:
    """Ratios at KL 0.005 and against CacheGen as released."""
    found = _summary(
        {"klt": [(0.004, 6.0), (0.006, 6.0)], "cachegen released": [(0.001, 3.0), (0.01, 3.0)],
         "lossless": [(0.0, 1.4)]}, 7,
    )  # fmt: skip
    assert found["klt_ratio_at_kl_0.005"] == pytest.approx(6) and found["lossless_ratio"] == 1.4
    assert found["klt_vs_cachegen_released"] == pytest.approx(2) and found["klt_uncal_ratio_at_kl_0.005"] is None


def test_released_bins_are_lmcaches() -> None:
    """K 32 bins in layers 0 to 9, V in 0 and 1, else 16; finer with the factor; tables are counted."""
    arm = Released(1)
    assert [arm.bins(layer, False) for layer in (0, 9, 10)] == [32, 32, 16]
    assert [arm.bins(layer, True) for layer in (0, 1, 2)] == [32, 32, 16]
    piece = narrow(np.random.default_rng(0).standard_normal((2, 2, 2, 40, 16)).astype(np.float32))
    errors, sizes = [], []
    for factor in (1, 2, 4):
        back, size = Released(factor).through(piece, 0)
        errors.append(float(np.square(widen(back) - widen(piece)).mean()))
        sizes.append(size)
    assert errors == sorted(errors, reverse=True) and sizes == sorted(sizes)


def test_texts_are_apart_and_flags_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """No held-out text is learnt from; four at least; wrong names end with usage."""
    learnt = "".join(calibration())
    assert len(held_out()) >= 4 and all(text[2000:2200] not in learnt for text in held_out().values())
    assert parse(["--texts", "prose,code"]).texts == ("prose", "code")
    with pytest.raises(SystemExit):
        parse(["--texts", "poems"])
    assert "--texts are of" in capsys.readouterr().err


def test_codec_commands_without_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """list shows all; tables and calibrate say what is missing, before anything heavy is imported."""
    assert run(["codec", "list", "--json"]) == 0
    listed = {entry["codec"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert listed["klt"]["kind"] == "lossy" and listed["lossless"]["takes"] == "bytes"
    assert run(["codec", "tables", "--model", str(tmp_path)]) == 2
    assert "has no weight files" in capsys.readouterr().err
    (tmp_path / "model.bin").write_bytes(b"weights")
    settings = ["--set", f"codec.tables_dir={tmp_path / 'tables'}"]
    assert run(["codec", "tables", "--model", str(tmp_path), *settings]) == 0
    assert run(["codec", "calibrate", "--model", str(tmp_path), "--text", str(tmp_path / "none"), *settings]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_kv_of_an_engine_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run left is read while the contexts are the same; others start an engine, whose failure is told."""
    contexts = {"prose": [1, 2, 3, 4], "code": [5, 6]}
    kv = {f"kv-{name}": np.full((1, 2, 1, len(ids), 2), ids[0], np.uint16) for name, ids in contexts.items()}
    np.savez(tmp_path / "kv.npz", wanted=np.array(json.dumps(["m", 2, contexts])), **kv)
    found = kv_of(Path("m"), contexts, 2, tmp_path / "kv.npz")
    assert all(np.array_equal(found[name], kv[f"kv-{name}"]) for name in contexts)
    with pytest.raises(ConfigError, match="multiple of 4"):
        kv_of(Path("m"), contexts, 4, tmp_path / "kv.npz")
    monkeypatch.setattr("sys.executable", "false")
    with pytest.raises(NoKvError, match="ended with 1"):
        kv_of(Path("other"), contexts, 2, tmp_path / "kv.npz")


@pytest.fixture(scope="module")
def model() -> Iterator[LoadedModel]:
    """The demo model."""
    yield LoadedModel(prepare_demo_model())


@pytest.fixture(scope="module")
def tables(model: LoadedModel) -> MemoryTables:
    """From two small windows."""
    return MemoryTables(*calibrate(model, calibration(), Windows(context=320, probe=48, count=3, samples=1), _quiet))


@pytest.fixture(scope="module")
def material(model: LoadedModel) -> Material:
    """Two held-out contexts of 320 tokens, 64 positions each."""
    return Material(model, {name: held_out()[name] for name in ("prose", "code")}, 320, 64)


def _quiet(what: str, done: int, total: int) -> None:
    assert what and 0 <= done <= total


GATES = {
    ("int8", 0): (0.001, 1.8),
    ("fp8", 0): (0.01, 1.85),
    ("int4", 0): (0.03, 2.9),
    ("cachegen", 1): (0.02, 2.8),
    ("klt", 4): (0.012, 3.5),
}
"""Codec and level → KL at most, ratio at least, on a case with short calibration and few positions."""


def _gated(arm: Arm, material: Material, kl: float, ratio: float) -> Quality:
    found = measure(material, arm, 256)
    assert found.kl <= kl and found.ratio >= ratio, f"{arm.name}: {found}"
    assert 0.8 <= found.top1 <= 1 and abs(found.ppl_change) < 0.1
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "level"), list(GATES))
def test_lossy_codecs_keep_their_quality_on_real_kv(
    name: str, level: int, material: Material, tables: MemoryTables
) -> None:
    """KL and ratio of each lossy codec on the demo model's KV."""
    _gated(CodecArm(name, name, by_name(name, level, tables)), material, *GATES[name, level])


@pytest.mark.slow
def test_klt_beats_cachegen_as_released_also_without_tables(material: Material) -> None:
    """At no more KL than the release's doubled bins, clearly smaller."""
    released = measure(material, Released(4), 256)
    ours = _gated(CodecArm("klt", "klt", by_name("klt", 4)), material, 0.02, 3.5)
    assert ours.kl <= released.kl * 1.2 and ours.ratio >= released.ratio * 1.15


@pytest.mark.slow
def test_exact_codecs_cost_no_kl(material: Material) -> None:
    """Bit for bit, and smaller by a third."""
    found = measure(material, CodecArm("lossless", "lossless", by_name("lossless")), 256)
    assert found.kl == 0 and found.top1 == 1 and found.ratio >= 1.33


@pytest.mark.slow
def test_calibration_finds_rope_and_asks_for_enough_text(model: LoadedModel, tmp_path: Path) -> None:
    """The turned keys of the demo model are recognised by a shifted run; short text is refused with numbers."""
    waves = model.inverse_wavelengths()
    assert waves.size == 32 and waves[0] == 1.0 and abs(waves[1] - 100000 ** (-1 / 32)) < 1e-6
    with pytest.raises(ConfigError, match="at least 4096 are needed"):
        calibrate(model, ["too short"], Windows(), _quiet)
    assert TableFolder(tmp_path, "m").current("klt", 0) is None
