"""Cards, faults and machines, as they are written for the emulated driver."""

from __future__ import annotations

import os
from typing import Any

import pytest

from emulated_gpu.cards import Card, cards_setting, find_card
from emulated_gpu.errors import InvalidArgument, Unavailable
from emulated_gpu.faults import Fault, faults_setting, inject, parse_fault
from emulated_gpu.machines import Machine, new_machine
from emulated_gpu.sizes import GIB, MIB, parse_size


def test_a_card_is_that_of_the_table() -> None:
    card = find_card("L4")
    assert (card.name, card.capability, card.multiprocessors) == ("NVIDIA L4", (8, 9), 58)
    assert f"total={card.total_bytes}," in card.setting
    assert "capability=8.9" in card.setting


def test_a_size_stands_for_a_card_with_that_memory() -> None:
    assert find_card(memory="24GiB").total_bytes == 24 * GIB


def test_cards_may_differ() -> None:
    both = cards_setting([find_card("L4"), find_card("T4", held_by_others_bytes=GIB)])
    assert both.count("name=") == 2
    assert both.endswith(f"others={GIB}")


def test_a_card_too_small_for_its_context_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="less than its context"):
        Card("small", 500 * MIB, (9, 0), 132, context_bytes=620 * MIB)


def test_a_machine_has_at_most_eight_cards() -> None:
    with pytest.raises(InvalidArgument, match="at most 8"):
        cards_setting([find_card()] * 9)


@pytest.mark.parametrize(
    "text", ["launch@60=700", "sync@3=hang", "malloc@5x2=2", "init@1=35@train.py"]
)
def test_a_fault_is_read_as_it_is_written(text: str) -> None:
    assert parse_fault(text).setting == text


def test_faults_are_written_one_after_another() -> None:
    faults = [Fault("malloc", 3, error=2), Fault("sync", error=None, process="worker")]
    assert faults_setting(faults) == "malloc@3=2,sync@1=hang@worker"


@pytest.mark.parametrize("text", ["", "launch", "launch@=1", "sync@3=never", "launch@1=700@"])
def test_another_form_of_a_fault_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="a fault is given as"):
        parse_fault(text)


@pytest.mark.parametrize(
    "arguments", [("free", 1), ("malloc", 0), ("malloc", 1, 2, 0), ("malloc", 1, 2, 1, "a b")]
)
def test_a_fault_that_no_call_can_have_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidArgument):
        Fault(*arguments)


def test_no_fault_is_injected_into_a_process_without_an_emulated_gpu() -> None:
    if "EMULATED_GPU_MACHINE" in os.environ:
        pytest.skip("this process has an emulated GPU")
    with pytest.raises(Unavailable, match="runs on no emulated GPU"):
        inject(Fault("launch", error=700))


def test_a_machine_that_nobody_uses_holds_nothing() -> None:
    assert new_machine().held_bytes() == {}


def test_a_removed_machine_leaves_no_file() -> None:
    machine = new_machine()
    part = Machine(f"{machine.name}.gw0")
    for each in (machine, part):
        each.hold(GIB)
        assert each.path.exists()
    machine.remove()
    assert not machine.path.exists()
    assert not part.path.exists()


def test_a_machine_is_named_by_a_word() -> None:
    with pytest.raises(InvalidArgument, match="letters, digits"):
        Machine("../other")


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * GIB), ("24 GB", 24 * 10**9), ("24G", 24 * GIB), ("1.5m", MIB * 3 // 2)],
)
def test_a_size_is_read_as_the_field_writes_it(text: str, size: int) -> None:
    assert parse_size(text) == size
