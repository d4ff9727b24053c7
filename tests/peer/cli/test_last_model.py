"""The run's end on its host: it is said, and the last model is fetched while the members stay for it."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.peer.cli.last_model import LastModel, keeps_model
from shoal.swarm.errors import NotAdmitted, RecipeError, Unreachable
from shoal.swarm.protocol.invite import TOKEN_BYTES, Invite
from shoal.swarm.protocol.types import Address

INVITE = Invite((Address(host="host.example", control_port=1),), "reef", bytes(32), bytes(32), b"")
HERE = Address(host="127.0.0.1", control_port=7707)


class Service:
    """As much of a coordinator's service as this looks at."""

    def __init__(self) -> None:
        self.scope = SimpleNamespace(has_ended=False, wants_last_state=False, status=self._status)
        self._observers: list[Any] = []

    def _status(self, now_s: float) -> Any:
        return SimpleNamespace(rounds_committed=3, tokens_committed=300, loss=2.5)

    def observe(self, observer: Any) -> None:
        self._observers.append(observer)

    def end(self) -> None:
        self.scope.has_ended = True
        for one in self._observers:
            one(None)


def ended(place: Path | None, *errors: Exception) -> tuple[list[dict[str, Any]], list[Any], list[bool]]:
    """The events, the commands and whether members stayed meanwhile, of a run that ends."""
    events: list[dict[str, Any]] = []
    commands: list[Any] = []
    stayed: list[bool] = []
    service: Any = Service()

    async def run_command(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        commands.append((list(arguments), dict(variables)))
        stayed.append(service.scope.wants_last_state)
        if len(commands) <= len(errors):
            raise errors[len(commands) - 1]

    async def main() -> None:
        token = b"of the start"

        async def make_invite() -> Invite:
            return replace(INVITE, token=token.ljust(TOKEN_BYTES))

        last = LastModel(service, place, run_command, events.append)
        running = asyncio.create_task(last.run(make_invite, HERE))
        await asyncio.sleep(0)
        assert events == []
        token = b"of the end"
        service.end()
        await running

    asyncio.run(main())
    stayed.append(service.scope.wants_last_state)
    return events, commands, stayed


def test_the_last_model_is_fetched_over_this_machine_and_no_secret_is_an_argument(tmp_path: Path) -> None:
    events, commands, stayed = ended(tmp_path / "model.safetensors")
    assert [one["event"] for one in events] == ["run_ended", "model_kept"]
    assert (events[0]["rounds"], events[0]["tokens"], events[0]["loss"]) == (3, 300, 2.5)
    assert events[1]["path"] == str(tmp_path / "model.safetensors")
    ((arguments, variables),) = commands
    assert arguments == ["export", "--out", str(tmp_path / "model.safetensors"), "--replace"]
    (invite,) = variables.values()
    assert Invite.parse(invite).addresses == (HERE,)
    assert Invite.parse(invite).token.startswith(b"of the end"), "who is let in may have been amended"
    assert stayed == [True, False], "members stay as long as it takes"


def test_a_model_that_cannot_be_fetched_is_said_and_members_may_go(tmp_path: Path) -> None:
    events, _, stayed = ended(tmp_path / "model.safetensors", RecipeError("no such recipe"))
    assert events[1]["path"] is None
    assert events[1]["trouble"] == "no such recipe"
    assert stayed == [True, False]


def test_a_fetch_that_lost_its_membership_is_made_once_more(tmp_path: Path) -> None:
    events, commands, stayed = ended(tmp_path / "model.safetensors", NotAdmitted("join again"), Unreachable("gone"))
    assert events[1]["path"] is not None
    assert (len(commands), stayed[-1]) == (3, False)


def test_a_host_that_keeps_no_model_only_says_the_end() -> None:
    events, commands, stayed = ended(None)
    assert [one["event"] for one in events] == ["run_ended"]
    assert (commands, stayed) == ([], [False])


@pytest.mark.parametrize(
    ("wanted", "recipe", "elements", "kept"),
    [
        (None, "gpt", 1_000, True),
        (None, "gpt", 10**9, False),
        (None, "own", 1_000, False),
        (None, "gpt", None, False),
        (True, "gpt", 10**9, True),
        (False, "gpt", 1_000, False),
    ],
)
def test_small_models_are_kept_by_themselves(
    wanted: bool | None, recipe: str, elements: int | None, kept: bool
) -> None:
    pins = None if elements is None else SimpleNamespace(elements=elements)
    run: Any = SimpleNamespace(recipe=SimpleNamespace(name=recipe), pins=pins)
    assert keeps_model(wanted, run) == kept
