"""Devices of an island, and runs and roles that take none."""

import pytest
import torch
from tests.integration.harness import run_toml

from shoal.peer.cli.join import Work, _devices_of
from shoal.peer.island.devices import check_island_can_train, choose_devices
from shoal.swarm.errors import DeviceError
from shoal.swarm.memory_account import account_of
from shoal.swarm.protocol.run_file import parse_run_file


def test_processes_on_the_cpu() -> None:
    assert choose_devices("cpu:3") == (torch.device("cpu"),) * 3


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [device.index for device in choose_devices("all")] == [0, 1, 2, 3]
    assert [device.index for device in choose_devices("3,1")] == [3, 1]
    for text, words in (("4", "4 CUDA devices"), ("1,1", "twice"), ("0-3", "expected all"), ("cpu:0", "expected all")):
        with pytest.raises(DeviceError, match=words):
            choose_devices(text)


def test_all_gpus_of_a_machine_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match="cpu:N"):
        choose_devices("all")


def test_options_that_do_not_fit_each_other() -> None:
    assert len(_devices_of(Work(devices="cpu:4", tensor_parallel=2))) == 4
    with pytest.raises(DeviceError, match="no multiple"):
        _devices_of(Work(devices="cpu:3", tensor_parallel=2))
    with pytest.raises(DeviceError, match="no multiple"):
        _devices_of(Work(device="cpu", tensor_parallel=2))
    with pytest.raises(DeviceError, match="one of them"):
        _devices_of(Work(device="cpu", devices="cpu:2"))


def test_other_roles_are_refused() -> None:
    run = parse_run_file(run_toml(rounds=1))
    check_island_can_train(run, "trainer")
    with pytest.raises(DeviceError, match="members that train"):
        check_island_can_train(run, "validator")
    undivided = parse_run_file(run_toml(rounds=1).replace("[inner]", '[inner]\noptimizer = "adafactor"'))
    with pytest.raises(DeviceError, match="Adafactor"):
        check_island_can_train(undivided, "trainer")


def test_the_memory_of_a_machine_is_counted_once() -> None:
    run = parse_run_file(run_toml(rounds=1))
    one, four = account_of(run).demand(), account_of(run, ranks=4).demand()
    assert four.device == one.device / 4, "of each device"
    image, optimizer = 1.0, 2.0
    assert four.host == one.host + image + optimizer
    assert four.shared < one.shared + image + optimizer + 0.01
