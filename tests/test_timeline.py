"""The timeline of a replay; its log itself needs a GPU."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fxengine.driver import KERNEL_FOLDER, Arena, Device, DeviceNotFound, KernelSource, compile_cubin
from fxengine.engine import Engine
from tools import timeline
from tools.bench_step import MODELS, random_rows


def test_kernels_compile_with_the_log(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("FXENGINE_CACHE", str(tmp_path))
    plain = KernelSource.load("step.cu")
    with timeline.logged():
        logged = KernelSource.load("step.cu")
    assert KernelSource.load("step.cu") == plain != logged
    assert b"fx_log_events" in compile_cubin(logged, "sm_90").read_bytes()
    assert b"fx_log_events" not in compile_cubin(plain, "sm_90").read_bytes()


def test_a_header_without_the_places_for_the_log_is_refused() -> None:
    text = (KERNEL_FOLDER / "fx.cuh").read_text()
    assert timeline.logging(text).count("fx_log(") == 3
    with pytest.raises(ValueError, match=r"fx\.cuh has 0 times .*griddepcontrol\.wait.*expected once"):
        timeline.logging(re.sub("griddepcontrol.wait", "griddepcontrol.weight", text))


def test_entries_and_ends_of_waits_are_paired_by_place() -> None:
    """The last launch of a table counts; an end without an entry, and an entry without an end, do not."""
    events = [(1, 7, 5), (100, 7, 10), (200, 8, 11), (1, 8, 15), (1, 7, 20), (100, 9, 30), (300, 7, 31), (1, 9, 33)]
    assert timeline.pairs(np.array(events, np.uint64)) == {200: (11, 15), 100: (30, 33)}


def test_rows_as_text() -> None:
    rows = [timeline.Row(3, 1, 0.5, 2.25, 12, "gather", (0, 1), "gather.state")]
    assert timeline.table(rows).splitlines()[1].split() == [
        "2.25",
        "0.50",
        "3",
        "1",
        "12",
        "gather",
        "0,1",
        "gather.state",
    ]


def test_a_simulated_device_has_no_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        timeline.main(["--device", "sim"])
    assert "only a GPU has a timer" in capsys.readouterr().err


@pytest.mark.gpu
def test_every_kernel_node_of_a_replay_is_there() -> None:
    config = MODELS["aux"](64)
    try:
        opened = Device.open("cuda:0")
    except DeviceNotFound as error:
        pytest.skip(f"no GPU: {error}")
    with (
        timeline.logged(),
        opened as device,
        Engine(config, device=device, precision="tf32", data=random_rows(config)) as engine,
        Arena(device, "log", 8 * (3 * timeline.EVENTS + 1)) as log,
    ):
        rows = timeline.timeline(engine, log)
        kernels = [i for i, node in enumerate(engine.plan.nodes) if node.parts]
    assert sorted(row.node for row in rows) == kernels
    assert all(0 <= row.entered_us <= row.began_us for row in rows)
    began = {row.node: row.began_us for row in rows}
    assert all(began[d] <= row.began_us for row in rows for d in row.after if d in began)
