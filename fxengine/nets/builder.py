"""What every step has, whatever its network: signals, counters, inputs, parameters, telemetry, the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fxengine import signals as signal_rows
from fxengine import telemetry as telemetry_rows
from fxengine.driver import Target
from fxengine.graphs import MAPPED, ZEROED, Program, ProgramError, Tensor
from fxengine.nets.sampling import BATCH_STREAM, Sampling
from fxengine.nets.tape import Tape
from fxengine.ops import gather, random, step, values
from fxengine.ops.reduce import SUM
from fxengine.ops.rows import mask_rows
from fxengine.signals import BOUND_FAMILIES, SignalMap
from fxengine.train.groups import ParamGroup, ParamGroups, ParamSpec
from fxengine.train.optimizer import Guard, optimize
from fxengine.train.oracles import oracles
from fxengine.train.spectral import spectral_norm
from fxengine.train.targets import TargetGroup, polyak

if TYPE_CHECKING:
    from fxengine.rl.replay import Replay

#: Telemetry values a step can report.
_REPORT_SLOTS = 128


@dataclass(frozen=True)
class Source:
    """Device-resident data of one input: rows are gathered from it inside the captured step.

    Attributes:
        array: [rows, ...] values, uploaded once; every source of a step has the same number of rows.
    """

    array: NDArray[Any]


class StepBuilder:
    """Declares one step. A network is a function that takes a builder and uses it.

    Ops come from the tape (`linear`, `crossentropy`, ...); `signal` gives a host-owned scalar as a device tensor,
    `report` a telemetry value, `input` a batch tensor, `group` trainable and `fixed` untrained parameters.

    Args:
        target: the device the step is made for.
        precision: of linear products: `fp32`, `tf32` or `bf16`.
        groups: group name by index; defaults to those of the specified step.
        data: inputs that are gathered from device-resident rows instead of being written by the host.
        replay: a replay that fills every input, but for those of `feed`.
        feed: random inputs (`noise`) that the host writes instead.
        with_oracles: run the oracles, if the step has any; most replays leave them out.
        decompose: add the gradient decomposition: the same training, and diagnostics on top.
        evaluation: declare the forward alone: no gradients, no optimizer, no counters. Inputs are written by the host.
    """

    def __init__(
        self,
        target: Target,
        *,
        precision: str = "fp32",
        groups: Mapping[int, str] | None = None,
        data: Mapping[str, Source] | None = None,
        replay: Replay | None = None,
        feed: Collection[str] = (),
        evaluation: bool = False,
        decompose: bool = False,
        with_oracles: bool = True,
    ) -> None:
        self.program = Program(target, precision)
        self.signals = SignalMap(groups)
        self.train = not evaluation
        self.decompose = decompose
        self.with_oracles = with_oracles
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.fixed_parameters: dict[str, Tensor] = {}
        self.reports: list[str] = []
        self._data = dict(data or {})
        self._resident: dict[Tensor, Tensor] = {}
        self._feed = frozenset(feed)
        self.target_parameters: dict[str, Tensor] = {}
        self.persistent: dict[str, Tensor] = {}
        self.spectral_vectors: dict[str, Tensor] = {}
        self._groups: list[ParamGroup] = []
        self.target_groups: list[TargetGroup] = []
        self._spectral: list[str] = []
        self.oracle_every = 0
        self._after_backward: list[Callable[[], None]] = []
        self._at_end: list[Callable[[], None]] = []
        self._mirrored: list[str] = []
        self._tape: Tape | None = None

        self.snapshot = self.program.tensor("signals", (signal_rows.SLOTS,), arena="signals")
        self._reports = self.program.tensor("telemetry.values", (_REPORT_SLOTS,), np.float32, arena=ZEROED)
        if self.train:
            self.counters = step.declare_counters(self.program, arena="counters")
        self.sampling = Sampling(self, replay) if replay is not None else None

    # -- declarations --------------------------------------------------------------------------------------------

    def input(
        self, name: str, shape: Sequence[int], dtype: DTypeLike = np.float32, *, mask: Tensor | None = None
    ) -> Tensor:
        """A batch input [batch, ...]. The host writes it, or it is gathered from `data` by Philox row indices, or the
        replay fills it (`Sampling`).

        Args:
            name: of the input.
            shape: [batch, ...].
            dtype: of an element.
            mask: an input float32 [batch] of this step, or None. Rows where it is 0 are zeros in the tensor returned,
                whatever they hold. Where both are gathered that is the input itself, else a copy of it.

        Raises:
            ProgramError: the data or the replay's field of this input has another row shape or dtype, or the replay
                does not have it; or with a mask the input is not float32 [batch, n].
        """
        resident_mask = self._resident.get(mask) if mask is not None else None
        if self.sampling is not None and name not in self._feed:
            tensor = self.sampling.input(name, shape, dtype)
        elif name in self._data:
            tensor = self._gathered(name, shape, dtype, resident_mask)
            mask = mask if resident_mask is None else None
        else:
            tensor = self.program.tensor(name, shape, dtype, arena="inputs")
        self.inputs[name] = tensor
        if mask is None:
            return tensor
        living = self.program.tensor(f"{name}.living", shape, padded=True)
        mask_rows(self.program, tensor, mask, living, label=living.name)
        return living

    def _gathered(self, name: str, shape: Sequence[int], dtype: DTypeLike, mask: Tensor | None) -> Tensor:
        """The input out of its data, with zeros where `mask` [population] is 0."""
        tensor = self.program.tensor(name, shape, dtype, arena="inputs", padded=mask is not None)
        rows = self._data[name].array
        if rows.shape[1:] != tensor.shape[1:] or rows.dtype != tensor.dtype:
            raise ProgramError(
                f"data of input '{name}' has rows {rows.dtype} {rows.shape[1:]}, "
                f"the step reads {tensor.dtype} {tensor.shape[1:]}"
            )
        resident = self.program.tensor(f"data.{name}", rows.shape, rows.dtype, arena="data", data=rows)
        self._resident[tensor] = resident
        gather.gather(
            self.program,
            resident,
            tensor,
            counters=self.counters,
            stream=BATCH_STREAM,
            mask=mask,
            label=f"gather.{name}",
        )
        return tensor

    def onehots(self, numbers: Tensor, sizes: Sequence[int]) -> Tensor:
        """One-hot codes float32 [batch, sum n_d], side by side, of an input int32 [batch, D]; see `values.onehots`.

        They are gathered as the input is, or made of it.
        """
        codes = self.program.tensor("onehots", (numbers.shape[0], sum(sizes)), padded=True)
        resident = self._resident.get(numbers)
        if resident is None:
            values.onehots(self.program, numbers, codes, sizes=sizes, label="onehots")
        else:
            gather.gather_onehots(
                self.program,
                resident,
                codes,
                sizes=sizes,
                counters=self.counters,
                stream=BATCH_STREAM,
                label="gather.onehots",
            )
        return codes

    def noise(self, name: str, shape: Sequence[int], *, stream: int) -> Tensor:
        """A batch input of uniform numbers in [0, 1): drawn on the device, or written by the host if it is in `feed`.

        Args:
            name: of the input.
            shape: [batch, n].
            stream: number of the Philox stream, one for each input.
        """
        if name in self._feed or not self.train:
            return self.input(name, shape)
        tensor = self.program.tensor(name, shape, arena="inputs")
        random.uniform(self.program, tensor, counters=self.counters, stream=stream, label=name)
        return tensor

    def group(self, name: str, specs: Sequence[ParamSpec], *, target: bool = False) -> ParamGroup:
        """Declare a parameter group, before the first op: its tensors share a norm, `lr.<name>` and `clip.<name>`.

        Args:
            name: one of the groups of the signal map.
            specs: its tensors, in order.
            target: keep a slowly moving copy (`target_parameters`), moved by `polyak_tau` at the end of each step.

        Raises:
            ProgramError: the signal map has no such group, or an op was appended already.
        """
        if self._tape is not None:
            raise ProgramError(f"group '{name}': declare every group before the first op")
        index = {group: g for g, group in self.signals.groups.items()}.get(name)
        if index is None:
            raise ProgramError(f"no group '{name}' in the signal map; it has {list(self.signals.groups.values())}")
        group = ParamGroup(self.program, name, index, specs)
        self._groups.append(group)
        if target:
            copy = TargetGroup(self.program, group)
            self.target_groups.append(copy)
            for parameter in copy:
                self.target_parameters[parameter] = copy[parameter]
                self.persistent[f"target.{parameter}"] = copy[parameter]
        return group

    def fixed(self, name: str, shape: Sequence[int]) -> Tensor:
        """An untrained parameter: initialised and saved like the others, without gradient and moments."""
        tensor = self.program.tensor(f"fixed.{name}", shape, arena="fixed", padded=True)
        self.fixed_parameters[name] = tensor
        return tensor

    def limit_spectral_norm(self, name: str) -> None:
        """Keep the spectral norm of a weight at most `sn_max`; reports `sigma_<name without w_>`."""
        self._spectral.append(name)

    def run_oracles(self, every: int) -> None:
        """Update the bounds of every group by its oracles in every so many-th replay (all others leave them out)."""
        self.oracle_every = every

    def loss_gradient(self, y: Tensor) -> Tensor | None:
        """Where a loss writes the gradient of y; None in an evaluation."""
        return self.tape.training.output(y) if self.train else None

    def after_backward(self, append: Callable[[], None]) -> None:
        """Call `append` behind the backward and before the optimizer: the gradients are complete, nothing has moved."""
        self._after_backward.append(append)

    def mirror(self, names: Iterable[str]) -> None:
        """Report device-owned signals as the step leaves them."""
        self._mirrored.extend(names)

    def at_end(self, append: Callable[[], None]) -> None:
        """Call `append` behind backward and optimizer, for records that must see the step's old state until then."""
        self._at_end.append(append)

    def signal(self, name: str) -> Tensor:
        """One float of the signal snapshot."""
        index = self.signals.slot(name).index
        return self.snapshot.rows(index, index + 1)

    def report(self, name: str) -> Tensor:
        """One float of the telemetry row, read by the host under `name`. Zero unless written in the step."""
        if name in self.reported:
            raise ProgramError(f"telemetry value '{name}' is taken")
        if len(self.reports) == _REPORT_SLOTS:
            raise ProgramError(f"a step reports at most {_REPORT_SLOTS} values; '{name}' does not fit")
        self.reports.append(name)
        return self._reports.rows(len(self.reports) - 1, len(self.reports))

    @property
    def reported(self) -> tuple[str, ...]:
        """Names of all telemetry values, in row order."""
        return (*self.reports, *self._mirrored)

    def output(self, name: str, tensor: Tensor) -> Tensor:
        """Give a tensor a name under which the host reads it after a step."""
        self.outputs[name] = tensor
        return tensor

    @property
    def tape(self) -> Tape:
        """The tape; asking for it closes the declaration of groups."""
        if self._tape is None:
            self._tape = Tape(self.program, ParamGroups(self._groups), report=self.report, train=self.train)
        return self._tape

    @property
    def absent_groups(self) -> tuple[str, ...]:
        """Groups of the signal map that the step does not have: they have no norm, and their bounds stay 0."""
        declared = {group.name for group in self._groups}
        return tuple(name for name in self.signals.groups.values() if name not in declared)

    @property
    def groups(self) -> ParamGroups:
        """All groups."""
        return self.tape.groups

    # -- completion ----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Append backward, optimizer and the closing record. An evaluation needs none of them."""
        if not self.train:
            return
        unused = sorted(set(self._data) - set(self.inputs))
        if unused:
            raise ProgramError(f"data given for {unused}, but the step has inputs {sorted(self.inputs)}")
        self.tape.backward()
        for append in self._after_backward:
            append()
        guard = self._optimize()
        if self.sampling is not None:
            self.sampling.update(guard.skip)
        for append in self._at_end:
            append()
        rows = telemetry_rows.RING_ROWS
        ring = self.program.tensor(
            "telemetry.ring", (rows, telemetry_rows.row_bytes(len(self.reported))), np.uint8, arena=MAPPED
        )
        head = self.program.tensor("telemetry.head", (1,), np.uint64, arena=MAPPED)
        step.end(
            self.program,
            values=self._reports.rows(0, len(self.reports)),
            counters=self.counters,
            guard=guard,
            sums=self._fold_sums(),
            signals=self.snapshot,
            mirrored=[self.signals.slot(name).index for name in self._mirrored],
            ring=ring,
            head=head,
        )

    def _fold_sums(self) -> list[step.Sum]:
        """Sums that only telemetry reads are left to the last node: each of them would be a record of its own."""
        read = {t.offset for r in self.program.launches for t in r.reads if t.storage is self._reports.storage}
        sums, rest = [], []
        for record in self.program.launches:
            target = record.writes[0] if record.family is SUM else None
            if target is None or target.storage is not self._reports.storage or target.offset in read:
                rest.append(record)
                continue
            partials, *denominator = record.reads
            divisor = record.fields["divisor"]
            assert isinstance(divisor, float)
            sums.append(step.Sum(target, partials, denominator[0] if denominator else None, divisor))
        self.program.launches[:] = rest
        return sums

    def _optimize(self) -> Guard:
        """Norms, clip, Adam and most targets, then what follows from the new parameters: spectral norm, oracles.

        Targets of matrices whose spectral norm is limited come behind that, beside the oracles and the end of the step.
        """
        program, groups = self.program, self.groups
        norms = {group.name: self.report(f"grad_norm.{group.name}") for group in groups}
        later = [name for name in self._spectral if name in self.target_parameters]
        guard = optimize(
            program,
            groups,
            signal=self.signal,
            counters=self.counters,
            norms=norms,
            targets=self.target_groups,
            later=later,
        )
        for name in self._spectral:
            short = name.removeprefix("w_")
            w = groups[name].value
            v = program.tensor(f"sn_v_{short}", (w.shape[1],), arena="spectral")
            self.persistent[f"sn_v_{short}"] = self.spectral_vectors[f"sn_v_{short}"] = v
            sigma = self.report(f"sigma_{short}")
            spectral_norm(program, w, v, sigma, signal=self.signal, guard=guard, label=f"spectral.{short}")
        if self.oracle_every:
            self.mirror(f"bound.{family}.{group.name}" for group in groups for family in BOUND_FAMILIES)
            if self.with_oracles:
                oracles(program, groups, signal=self.signal, counters=self.counters, guard=guard, every=1)
        polyak(program, self.target_groups, signal=self.signal, guard=guard, only=later)
        return guard
