"""The wire gate, the IQN readiness, and what flows back through the wire (`gate.cu`).

    gate.produce(program, nb, labels, q0, signal=step.signal)        # after the aux forward and q_0 of this step
    gate.wire_backward(program, nb, dwire, dnb, alpha=step.signal("alpha_grad"))
    gate.update_readiness(program, iqn_loss, signal=step.signal)     # after every reader of iqn_readiness

The state is owned by the device: single floats, all 0 at first (0 = closed), read and written in place. A wire into
the Q heads is trusted backwards only as far as the auxiliary head has proved right: alpha_grad follows its accuracy
over valid rows through a Schmitt trigger, less where it disagrees with the direction that the Q head would take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, Tensor
from fxengine.ops.checks import require_as

#: State of the gate, in the order of the record.
GATE_STATE = (
    "aux_acc_short", "aux_acc_long", "aux_acc_var", "disagree_ema", "gate_open", "gate_seen", "alpha_grad",
)  # fmt: skip
#: Signals of the gate, in the order of the record.
GATE_SIGNALS = (
    "acc_beta_short", "acc_beta_long", "disagree_beta", "gate_open_margin", "gate_close_margin", "gate_gain",
    "gate_margin", "alpha_beta",
)  # fmt: skip
#: State and signals of the readiness.
READINESS_STATE = ("iqn_seen", "iqn_loss_ema", "iqn_loss_ref", "iqn_readiness")
READINESS_SIGNALS = ("readiness_beta", "readiness_warmup")

#: One float of the signal snapshot, by name.
Lookup = Callable[[str], Tensor]

_TILE_ROWS = 256

GATE = Family("gate", "gate.cu", "fx_gate", "Gate", tiles=lambda fields: 1)
READINESS = Family("readiness", "gate.cu", "fx_readiness", "Readiness", tiles=lambda fields: 1)
WIRE_BACKWARD = Family(
    "wire_backward",
    "gate.cu",
    "fx_wire_backward",
    "WireBackward",
    tiles=lambda fields: -(-int(fields["rows"]) // _TILE_ROWS),
)


def produce(
    program: Program, logits: Tensor, labels: Tensor, q0: Tensor, *, signal: Lookup, label: str = "gate"
) -> None:
    """Append the gate producer: accuracy and disagreement of this batch, then the new state, alpha_grad last.

    Args:
        program: program to append to.
        logits: float32 [B, 2], next-bar logits at s (0 = down, 1 = up).
        labels: int32 [B]; a row whose label is neither 0 nor 1 is not valid.
        q0: float32 [B, n_0], action values of the direction branch at s (0 short, 1 flat, 2 long). Only with
            n_0 = 3 is it read; else the disagreement is 0.
        signal: gives the float32 [1] tensor of each name in `GATE_STATE` and `GATE_SIGNALS`; the state's are written.
        label: shown in tables.

    Raises:
        ValueError: shapes or dtypes do not fit; the message shows both sides.
    """
    rows = _logit_rows(logits, label)
    require_as(labels, (rows,), "labels", f"logits are {logits.shape}", label, np.int32)
    if len(q0.shape) != 2:
        raise ValueError(f"'{label}': q0 must be float32 [{rows}, n_0], got {q0.dtype} {q0.shape}")
    require_as(q0, (rows, q0.shape[1]), "q0", f"logits are {logits.shape}", label)
    state = [_slot(signal, name, label) for name in GATE_STATE]
    signals = [_slot(signal, name, label) for name in GATE_SIGNALS]
    direction = q0 if q0.shape[1] == 3 else None
    program.launch(
        GATE,
        {
            "logits": logits,
            "labels": labels,
            "q": direction or 0,
            "state": tuple(state),
            "signals": tuple(signals),
            "ld_logits": logits.ld,
            "ld_q": q0.ld,
            "rows": rows,
        },
        reads=[logits, labels, direction, *signals, *state],
        writes=state,
        label=label,
    )


def update_readiness(program: Program, loss: Tensor, *, signal: Lookup, label: str = "readiness") -> None:
    """Append the readiness update from this step's IQN loss; a loss that is not finite changes nothing.

    It goes behind the records that read iqn_readiness, which then see the value that the step began with.

    Args:
        program: program to append to.
        loss: float32 [1].
        signal: gives the float32 [1] tensor of each name in `READINESS_STATE` and `READINESS_SIGNALS`; the state's
            are written. iqn_seen counts no further than 2**24, where a float32 stops.
        label: shown in tables.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    require_as(loss, (1,), "loss", "it is one number", label)
    beta, warmup = (_slot(signal, name, label) for name in READINESS_SIGNALS)
    seen, ema, ref, readiness = state = [_slot(signal, name, label) for name in READINESS_STATE]
    program.launch(
        READINESS,
        {
            "loss": loss,
            "beta": beta,
            "warmup": warmup,
            "seen": seen,
            "ema": ema,
            "ref": ref,
            "readiness": readiness,
        },
        reads=[loss, beta, warmup, *state],
        writes=state,
        label=label,
    )


def wire_backward(
    program: Program, logits: Tensor, dwire: Tensor, dlogits: Tensor, *, alpha: Tensor, label: str = "wire.dx"
) -> None:
    """Append: dlogits += alpha * (gradient of wire = p_up - p_down with respect to the logits) * dwire.

    Args:
        program: program to append to.
        logits: float32 [B, 2], next-bar logits (0 = down, 1 = up).
        dwire: float32 [B] or a column [B, 1], gradient of the wire as it leaves the Q heads.
        dlogits: float32 [B, 2], accumulated into. With alpha = 0 its bits stay, whatever dwire holds.
        alpha: float32 [1], usually the state alpha_grad behind `produce`.
        label: shown in tables.

    Raises:
        ValueError: shapes or dtypes do not fit; the message shows both sides.
    """
    rows = _logit_rows(logits, label)
    require_as(dlogits, (rows, 2), "dlogits", f"logits are {logits.shape}", label)
    require_as(alpha, (1,), "alpha", "it is one number", label)
    column = (rows, 1) if len(dwire.shape) == 2 else (rows,)
    require_as(dwire, column, "dwire", f"logits are {logits.shape}", label)
    program.launch(
        WIRE_BACKWARD,
        {
            "logits": logits,
            "dwire": dwire,
            "alpha": alpha,
            "dlogits": dlogits,
            "ld_logits": logits.ld,
            "ld_dlogits": dlogits.ld,
            "dwire_stride": dwire.ld,
            "rows": rows,
        },
        reads=[logits, dwire, alpha, dlogits],
        writes=[dlogits],
        label=label,
    )


# -- references ---------------------------------------------------------------------------------------------


def reference_gate(
    state: Mapping[str, float],
    signals: Mapping[str, float],
    logits: ArrayLike,
    labels: ArrayLike,
    q0: ArrayLike,
) -> dict[str, float]:
    """The gate's state after `produce`, in float64; `state` holds the names of `GATE_STATE`."""
    s = {name: float(state[name]) for name in GATE_STATE}
    guess = [_argmax(row) for row in np.asarray(logits, np.float64)]
    right = [g == label for g, label in zip(guess, np.asarray(labels).tolist(), strict=True) if label in (0, 1)]
    values = np.asarray(q0, np.float64)
    dis = 0.0
    if values.shape[1] == 3:
        pairs = zip(guess, values, strict=True)
        dis = sum((2 * g - 1) * (_argmax(q) - 1) < 0 for g, q in pairs) / len(guess)
    if not right and s["gate_seen"] == 0:
        return s
    if right:
        acc = sum(right) / len(right)
        if s["gate_seen"] == 0:
            s |= {"aux_acc_short": acc, "aux_acc_long": acc, "aux_acc_var": acc * (1 - acc) / len(right)}
            s |= {"disagree_ema": dis, "gate_seen": 1.0}
        else:
            dev = acc - s["aux_acc_long"]
            s["aux_acc_short"] += signals["acc_beta_short"] * (acc - s["aux_acc_short"])
            s["aux_acc_long"] += signals["acc_beta_long"] * dev
            s["aux_acc_var"] += signals["acc_beta_long"] * (dev * dev - s["aux_acc_var"])
            s["disagree_ema"] += signals["disagree_beta"] * (dis - s["disagree_ema"])
    if s["aux_acc_short"] > 0.5 + signals["gate_open_margin"]:
        s["gate_open"] = 1.0
    if s["aux_acc_short"] < 0.5 + signals["gate_close_margin"]:
        s["gate_open"] = 0.0
    with np.errstate(all="ignore"):
        lead = signals["gate_gain"] * (s["aux_acc_short"] - 0.5 - signals["gate_margin"])
        score = np.float64(lead) / np.sqrt(s["aux_acc_var"] + 1e-4)
        raw = s["gate_open"] / (1 + np.exp(-score)) * (1 - s["disagree_ema"])
        alpha = float(s["alpha_grad"] + signals["alpha_beta"] * (raw - s["alpha_grad"]))
    s["alpha_grad"] = min(max(alpha, 0.0), 1.0) if math.isfinite(alpha) else 0.0
    return s


def reference_readiness(state: Mapping[str, float], signals: Mapping[str, float], loss: float) -> dict[str, float]:
    """The readiness' state after `update_readiness`, in float64; `state` holds the names of `READINESS_STATE`."""
    seen, ema, ref, readiness = (float(state[name]) for name in READINESS_STATE)
    beta, raw = signals["readiness_beta"], 0.0
    if math.isfinite(loss):
        if seen < signals["readiness_warmup"]:
            ref += (loss - ref) / (seen + 1)
            ema = ref
        else:
            ema += beta * (loss - ema)
            ref = max(ref, ema)
            raw = min(max(1 - ema / ref, 0.0), 1.0) if ref > 0 else 0.0
        seen += 1
        readiness = min(max(readiness + beta * (raw - readiness), 0.0), 1.0)
    return dict(zip(READINESS_STATE, (seen, ema, ref, readiness), strict=True))


def reference_wire_backward(logits: ArrayLike, dwire: ArrayLike, alpha: float) -> NDArray[np.float64]:
    """What `wire_backward` adds to dlogits [B, 2], in float64."""
    x = np.asarray(logits, np.float64)
    if alpha == 0:
        return np.zeros_like(x)
    odds = np.exp(-np.abs(x[:, 1] - x[:, 0]))
    g = alpha * np.asarray(dwire, np.float64).reshape(-1) * 2 * odds / (1 + odds) ** 2
    return np.stack([-g, g], axis=1)


def _argmax(row: NDArray[np.float64]) -> int:
    """Lowest index of the largest value; NaN never wins, all NaN gives 0."""
    return 0 if np.isnan(row).all() else int(np.nanargmax(row))


# -- checks -------------------------------------------------------------------------------------------------


def _logit_rows(logits: Tensor, label: str) -> int:
    if logits.dtype != np.float32 or len(logits.shape) != 2 or logits.shape[1] != 2:
        raise ValueError(f"'{label}': logits must be float32 [B, 2], got {logits.dtype} {logits.shape}")
    return logits.shape[0]


def _slot(signal: Lookup, name: str, label: str) -> Tensor:
    slot = signal(name)
    require_as(slot, (1,), f"signal '{name}'", "it is one number", label)
    return slot
