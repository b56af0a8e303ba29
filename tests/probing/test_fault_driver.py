"""Faults of the driver, injected into an emulated GPU: what a real one does when it is ill.

In each case the outcome says what happened, nothing hangs, no process holds memory of the card
afterwards, and the next probe runs. The test process itself computes on another machine.
"""

from __future__ import annotations

import builtins
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.errors import DeviceUnavailable, WorkerFailed
from autofit.measurement import Outcome
from autofit.probing import worker_channel
from autofit.probing.prober import Deadlines, Prober, Target, open_prober
from autofit.probing.worker_channel import WorkerChannel, WorkerProcess
from autofit.registry import load_strategies
from autofit.searching import events
from autofit.training.workload import Workload
from autofit.units import GIB, MIB
from emulated_gpu import Card, Fault, Machine, find_card, inject, new_machine
from emulated_gpu.cards import cards_setting
from emulated_gpu.faults import Call
from emulated_gpu.launch import PREFIX
from tests.faulty_model import (
    NO_FAULT,
    FaultyModel,
    runs_out_in_backward,
    runs_out_in_forward,
)

pytestmark = pytest.mark.cuda

Model = Any
FULL = "1GiB"
"""The budget of most tests: what takes it nearly all comes to the end of memory."""
MIN_SECONDS = 3.0
"""After so long, an impatient probe has hung."""


@contextmanager
def machine_of_workers() -> Iterator[Machine]:
    """A machine on which workers run that are started meanwhile, seen from outside."""
    if f"{PREFIX}MACHINE" not in os.environ:
        pytest.skip("faults of the driver are injected into an emulated GPU alone")
    machine = new_machine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(f"{PREFIX}MACHINE", machine.name)
        yield machine
    machine.remove()


@pytest.fixture
def machine() -> Iterator[Machine]:
    """The machine of a test's workers."""
    with machine_of_workers() as machine:
        yield machine


def strikes(call: Call, error: int | None = None, times: int = 1) -> Callable[..., None]:
    """A model's fault: the next such call of its process fails, or hangs."""

    def fault(model: Model, output: torch.Tensor) -> None:
        inject(Fault(call, error=error, times=times))

    return fault


def then(fault: Callable[..., None], act: Callable[[torch.Tensor], object]) -> Callable[..., None]:
    """A model's fault, followed by what meets it."""

    def both(model: Model, output: torch.Tensor) -> None:
        fault(model, output)
        act(output)

    return both


def once(fault: Callable[..., None]) -> Callable[..., None]:
    """A fault that a process meets once, however many steps it trains."""

    def first(model: Model, output: torch.Tensor) -> None:
        if not hasattr(builtins, "met"):
            vars(builtins)["met"] = True
            fault(model, output)

    return first


def allocates(output: torch.Tensor) -> None:
    output.new_empty(256 * MIB // 4)


def pins(output: torch.Tensor) -> None:
    torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True)


def convolves(output: torch.Tensor) -> None:
    nn.functional.conv1d(output.detach().T[None], output.detach()[:, :, None])


def multiplies_in_a_new_thread(output: torch.Tensor) -> None:
    """Where a handle of cuBLAS must be made."""
    errors: list[BaseException] = []

    def multiply() -> None:
        try:
            torch.mm(output.detach(), output.detach().T)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=multiply)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def fills_memory(act: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], None]:
    """The same, with hardly anything left of the budget."""

    def filled(output: torch.Tensor) -> None:
        held = []
        try:
            while True:
                held.append(output.new_empty(MIB))
        except torch.OutOfMemoryError:
            del held[-4:]
        act(output)

    return filled


# What kills the context, by its words: the code of the next kernel, or of the next wait.
DEADLY: dict[str, Callable[..., None]] = {
    "an illegal memory access": strikes("launch", 700),
    "device-side assert": strikes("launch", 710),
    "misaligned address": strikes("launch", 716),
    "unspecified launch failure": strikes("launch", 719),
    "uncorrectable ECC error": strikes("sync", 214),
    "unknown error": strikes("sync", 999),
    # cuBLAS launches next
    "CUBLAS_STATUS": then(
        strikes("launch", 700), lambda output: torch.mm(output.detach(), output.detach().T)
    ),
}


HANGS = {
    "kernel": strikes("launch"),
    "synchronize": strikes("sync"),
    "allocation": then(strikes("malloc"), allocates),
}
ENDS: dict[str, tuple[Outcome, Callable[..., None]]] = {
    "cuBLAS with room left": (
        Outcome.SIZE_LIMIT,
        then(strikes("cublas", 3), multiplies_in_a_new_thread),
    ),
    "cuBLAS at the end of memory": (
        Outcome.OOM,
        then(strikes("cublas", 3), fills_memory(multiplies_in_a_new_thread)),
    ),
    "cuDNN with room left": (Outcome.SIZE_LIMIT, then(strikes("cudnn", 1), convolves)),
    "cuDNN at the end of memory": (
        Outcome.OOM,
        then(strikes("cudnn", 1), fills_memory(convolves)),
    ),
    "pinned memory": (Outcome.HOST_OOM, then(strikes("host_malloc", 2), pins)),
    "no kernel image": (Outcome.UNSUPPORTED, strikes("launch", 209)),
    "allocation that fails once": (Outcome.OK, once(then(strikes("malloc", 2), allocates))),
    "allocation that fails to the end": (
        Outcome.OK,
        once(then(strikes("malloc", 2, times=3), allocates)),
    ),
}
FAULTS: dict[str, Callable[..., None]] = {
    **DEADLY,
    **HANGS,
    **{name: fault for name, (_, fault) in ENDS.items()},
}
SIZES = {name: size for size, name in enumerate(FAULTS, start=10)}


@pytest.fixture
def shared(open_probing: Any) -> Iterator[tuple[Any, Machine]]:
    """One model for all faults, and its worker; a device has one prober at a time."""
    faults = {SIZES[name]: fault for name, fault in FAULTS.items()}
    with machine_of_workers() as machine:
        yield (
            open_probing(
                FaultyModel(faults), device="cuda", vram_budget=FULL, shortest_s=MIN_SECONDS
            ),
            machine,
        )


def assert_recovered(probing: Any, machine: Machine) -> None:
    """Nobody holds memory, and the next probe runs in a fresh worker."""
    assert probing.worker is None
    assert machine.held_bytes() == {}
    assert probing.at(NO_FAULT).ok
    assert list(machine.held_bytes()) == [probing.worker]


@pytest.mark.parametrize("words", DEADLY)
def test_a_dead_context_costs_one_probe_and_its_worker(
    shared: tuple[Any, Machine], words: str
) -> None:
    probing, machine = shared
    assert probing.at(NO_FAULT).ok
    measurement = probing.at(SIZES[words])
    assert measurement.outcome is Outcome.POISONED
    assert words in measurement.detail
    assert_recovered(probing, machine)


def test_a_device_that_dies_between_two_probes_costs_one(shared: tuple[Any, Machine]) -> None:
    probing, machine = shared
    kill = Fault("sync", error=700)
    probing.prober.run(lambda session: threading.Timer(0.2, inject, [kill]).start())
    time.sleep(0.5)
    measurement = probing.at(NO_FAULT)
    assert measurement.outcome is Outcome.POISONED
    assert measurement.step_times_s == ()
    assert_recovered(probing, machine)


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_in_the_driver_costs_one_probe_and_says_where(
    shared: tuple[Any, Machine], name: str
) -> None:
    probing, machine = shared
    assert probing.at(NO_FAULT).ok
    measurement = probing.at(SIZES[name], patient=False)
    assert measurement.outcome is Outcome.TIMEOUT
    assert "it hung here:\n  File" in measurement.detail
    assert_recovered(probing, machine)


@pytest.mark.parametrize("name", ENDS)
def test_what_a_call_cannot_have_is_named_and_the_worker_lives_on(
    shared: tuple[Any, Machine], name: str
) -> None:
    probing, machine = shared
    before = probing.at(NO_FAULT)
    worker = probing.worker
    measurement = probing.at(SIZES[name])
    assert measurement.outcome is ENDS[name][0], measurement.detail
    after = probing.at(NO_FAULT)
    assert after.ok
    assert after.peak_allocated_bytes == before.peak_allocated_bytes, "something was left behind"
    assert probing.worker == worker
    assert list(machine.held_bytes()) == [worker]


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("DRIVER", "12000", "driver on your system is too old"),
        ("FAULTS", "init@1=35", "driver on your system is too old"),
        ("FAULTS", "init@1=999", "CUDA unknown error"),
        ("FAULTS", "init@1=802", "Error 802: system not yet initialized"),
        ("CARDS", ";", "No CUDA GPUs are available"),
        ("FAULTS", "context@1=46", "busy or unavailable"),
        ("FAULTS", "launch@1=209", "only has kernels for"),
        ("FAULTS", "sync@1=214", "uncorrectable ECC error"),
        ("FAULTS", "host_malloc@1=2", "pinned host memory"),
        ("FAULTS", "malloc@1x9=2", "has no room for a worker"),
        ("FAULTS", "context@1x9=2", "has no room for a worker"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_said_with_the_reason(
    open_probing: Any,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    value: str,
    words: str,
) -> None:
    monkeypatch.setenv(PREFIX + setting, value)
    with pytest.raises(DeviceUnavailable, match=words) as refusal:
        open_probing(FaultyModel(), device="cuda")
    assert "user" not in str(refusal.value)
    assert machine.held_bytes() == {}


@pytest.mark.usefixtures("machine")
def test_a_batch_that_cannot_be_pinned_is_copied_from_other_memory(open_probing: Any) -> None:
    def batch(samples: int) -> torch.Tensor:
        inject(Fault("host_malloc", error=2))
        return torch.ones(samples, 16)

    probing = open_probing(FaultyModel(), device="cuda", vram_budget=FULL, sample_batch=batch)
    assert probing.at(NO_FAULT).ok


@pytest.mark.parametrize(
    ("variable", "value", "error", "words"),
    [
        (f"{PREFIX}FAULTS", "context@1=hang", WorkerFailed, "it hung here"),
        # the layer that gives values
        ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0", DeviceUnavailable, "computed 0"),
    ],
)
def test_a_driver_that_hangs_at_first_is_ended_and_a_gpu_that_computes_wrong_refused(
    open_probing: Any,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    error: type[Exception],
    words: str,
) -> None:
    monkeypatch.setenv(variable, value)
    WorkerProcess().kill()  # so that torch is imported in this environment, which takes longer
    if error is WorkerFailed:
        monkeypatch.setattr(worker_channel, "START_TIMEOUT_S", MIN_SECONDS)
    with pytest.raises(error, match=words):
        open_probing(FaultyModel(), device="cuda")
    assert machine.held_bytes() == {}


@pytest.mark.usefixtures("machine")
def test_where_nobody_named_a_device_a_note_says_why_it_is_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(f"{PREFIX}DRIVER", "12000")
    # Lightning sets it; torch then asks NVML, which no driver is too old for
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    workload = autofit.Workload(FaultyModel(), torch.ones(NO_FAULT, 16))
    with Prober(WorkerChannel(workload), workload) as prober:  # this process has a current device
        survey = prober.survey()
    assert survey.environment.device == "cpu"
    assert any("driver on your system is too old" in note for note in survey.notes)


def needs_two_gib(model: Model, output: torch.Tensor) -> None:
    output.new_empty(2 * GIB // 4)


def test_a_neighbour_comes_between_two_probes_and_leaves(
    open_probing: Any, machine: Machine
) -> None:
    probing = open_probing(FaultyModel({10: needs_two_gib}), device="cuda", vram_budget=None)
    assert probing.at(10).ok
    free = find_card().total_bytes - sum(machine.held_bytes().values())
    machine.hold(free - GIB)
    measurement = probing.at(10)
    assert measurement.outcome is Outcome.OOM
    assert measurement.contended
    assert probing.at(NO_FAULT).ok
    machine.hold(0)
    measurement = probing.at(10)
    assert measurement.ok
    assert not measurement.contended


# NVML tells less than all in containers, under MIG and with drivers of another age.

OF_OTHERS = 2 * GIB
UNTOLD = {"refuse": GIB, "nouuid": GIB, "mig": GIB}
"""Where NVML does not even tell what others held before, our context may be counted so much larger:
see `autofit.devices.nvml.CONTEXT_BYTES`."""


@pytest.mark.parametrize("limits", ["", "refuse", "noproc", "nomem", "hostpid", "nouuid", "mig"])
def test_the_budget_holds_whatever_nvml_tells(
    open_probing: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch, limits: str
) -> None:
    monkeypatch.setenv(f"{PREFIX}NVML", limits)
    machine.hold(OF_OTHERS)
    probing = open_probing(FaultyModel({10: needs_two_gib}), device="cuda", vram_budget="2GiB")
    measurement = probing.at(NO_FAULT)
    assert measurement.ok
    assert not measurement.contended
    held = machine.held_bytes()[probing.worker]
    assert held <= measurement.held_bytes <= held + 64 * MIB + UNTOLD.get(limits, 0)
    too_large = probing.at(10)  # torch's own message asks NVML, and asserts where it refuses
    assert too_large.outcome is Outcome.OOM
    assert probing.at(NO_FAULT).ok


@pytest.mark.usefixtures("machine")
def test_nvml_that_loses_the_gpu_amid_a_search_changes_nothing(open_probing: Any) -> None:
    probing = open_probing(
        FaultyModel({10: strikes("nvml", 15, times=10**6)}), device="cuda", vram_budget=FULL
    )
    assert probing.at(10).ok
    assert probing.at(NO_FAULT).ok


@pytest.mark.usefixtures("machine")
def test_a_slice_of_a_gpu_is_a_gpu_with_less(
    open_probing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an H100 80GB in seven, seen from a container."""
    card = Card("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9_900_000_000, (9, 0), 16, 400 * MIB)
    monkeypatch.setenv(f"{PREFIX}CARDS", cards_setting([card]))
    monkeypatch.setenv(f"{PREFIX}NVML", "mig")
    probing = open_probing(FaultyModel({10: needs_two_gib}), device="cuda", vram_budget=None)
    survey = probing.prober.survey()
    assert survey.environment.total_bytes == card.total_bytes
    assert 0.8 * card.total_bytes < survey.vram_budget_bytes < card.total_bytes
    assert probing.at(10).ok
    assert probing.at(NO_FAULT).held_bytes < GIB
    name = f"MIG-{probing.prober.run(lambda _: str(torch.cuda.get_device_properties(0).uuid))}"
    probing.prober.close()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
    again = open_probing(FaultyModel(), device="cuda", vram_budget=FULL)
    assert again.at(NO_FAULT).ok
    with pytest.raises(DeviceUnavailable, match=name):
        open_probing(FaultyModel(), device="cuda")


# Whole searches.


def searched(model: nn.Module, on_event: Any = None) -> autofit.Report:
    return autofit.search(
        model,
        torch.ones(NO_FAULT, 16),
        device="cuda",
        vram_budget=FULL,
        strategies=[],
        options=autofit.SearchOptions(max_micro_batch=16),
        max_probes=8,
        progress=on_event,
    )


def test_a_search_ends_with_what_it_has_where_the_gpu_is_lost(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It falls off the bus: this process's calls fail, and it is there for no other."""

    def lose(event: object) -> None:
        if isinstance(event, events.ProbeFinished):
            monkeypatch.setenv(f"{PREFIX}FAULTS", "init@1=999")

    model = FaultyModel({size: strikes("launch", 999) for size in range(3, 17)})
    report = searched(model, lose)
    assert report.best.plan.micro_batch == NO_FAULT
    assert "CUDA unknown error" in str(report.record.search.stopped_because)
    assert machine.held_bytes() == {}


# -- Faults of a device that happen by themselves, on a real GPU as on an emulated one.

FAULTY = 64


def asserts_on_the_device(model: Any, output: torch.Tensor) -> None:
    """Asynchronous: nothing in the step looks at the result."""
    output.new_zeros(4)[torch.tensor([10**6], device=output.device)]


def never_ends(model: Any, output: torch.Tensor) -> None:
    torch.cuda._sleep(1 << 45)  # type: ignore[no-untyped-call]  # torch left it so


BY_THEMSELVES = {
    runs_out_in_forward: Outcome.OOM,
    runs_out_in_backward: Outcome.OOM,
    asserts_on_the_device: Outcome.POISONED,
    never_ends: Outcome.TIMEOUT,
}


@pytest.mark.parametrize(("fault", "outcome"), BY_THEMSELVES.items())
def test_after_a_fault_of_the_device_the_search_goes_on(
    open_probing: Any, fault: Any, outcome: Outcome
) -> None:
    model = FaultyModel({FAULTY: fault})
    probing = open_probing(model, device="cuda", vram_budget="1.5GiB", shortest_s=8.0)
    assert probing.at(NO_FAULT).ok
    assert probing.at(FAULTY, patient=False).outcome is outcome
    assert (probing.worker is None) is (outcome is not Outcome.OOM)
    assert probing.at(NO_FAULT).ok


def test_the_cap_is_met_in_the_optimizer(open_probing: Any) -> None:
    """384 MiB of weights: with gradients and Adam's two states 1.5 GiB, at any micro-batch."""
    model = nn.Linear(16, 6 * MIB)
    measurement = open_probing(model, device="cuda", vram_budget="1.5GiB").at(NO_FAULT)
    assert measurement.outcome is Outcome.OOM
    assert "Tried to allocate" in str(measurement.detail)


@pytest.mark.parametrize("least", [NO_FAULT + 1, 1])
def test_a_device_that_dies_as_it_is_looked_at(least: int) -> None:
    """Looks of strategies run more samples than the sample batch has; others do not."""
    faults = dict.fromkeys(range(least, FAULTY), asserts_on_the_device)
    workload = Workload(FaultyModel(faults), torch.ones(NO_FAULT, 16))
    strategies = load_strategies(["checkpointing", "precision"])
    deadlines = Deadlines(shortest_s=30.0)
    with open_prober(workload, strategies, Target("cuda", "4GiB"), deadlines=deadlines) as prober:
        if least == 1:
            with pytest.raises(WorkerFailed, match="index out of range"):
                prober.survey()
            return
        survey = prober.survey()
    note = next(note for note in survey.notes if note.startswith("checkpointing"))
    assert "left out" in note
    assert "assert" in note
    assert list(survey.dimensions) == ["precision.dtype"]
