"""Tests of session: when it resyncs, and how it ends when its last steps fail."""

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.peer.member.connection import RunConnection
from shoal.peer.session import Readiness, Session
from shoal.swarm.errors import Diverged, StorageError


def test_threads_end_although_the_last_checkpoint_fails() -> None:
    def fail() -> None:
        raise RuntimeError("for the test")

    ended: list[str] = []
    connection: Any = RunConnection.__new__(RunConnection)
    connection.network = SimpleNamespace(failure=None, stop=lambda: ended.append("network"))
    finishing = SimpleNamespace(finish=lambda: ended.append("finish"))
    copies: Any = SimpleNamespace(
        failure=None, resource=finishing, post=lambda call: call(), stop=lambda: ended.append("copies")
    )
    connection._copies = [copies]
    session: Any = Session.__new__(Session)
    session._connection, session._network = connection, connection.network
    session._replica_or_none = SimpleNamespace(save_checkpoint=fail)
    with pytest.raises(RuntimeError, match="for the test"):
        session.close()
    assert ended == ["network", "finish", "copies"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Diverged("host a new one"), ("diverged", "host a new one")),
        (StorageError("/home/somebody/secret: full"), ("failed", "StorageError; its own output says more")),
        (KeyboardInterrupt(), ("done", "")),
        (None, ("done", "")),
    ],
)
def test_others_are_told_why_a_session_ends(error: BaseException | None, said: tuple[str, str]) -> None:
    connection: Any = RunConnection.__new__(RunConnection)
    client = SimpleNamespace(farewell=("done", ""))
    connection.members = SimpleNamespace(run=SimpleNamespace(client=client))
    connection.network = SimpleNamespace(post=lambda call: call(), stop=lambda: None)
    connection._copies = []
    session: Any = Session.__new__(Session)
    session._connection, session._replica_or_none = connection, None
    session.__exit__(type(error) if error else None, error, None)
    assert client.farewell == said


@pytest.mark.parametrize("phase", ["training", "closing", "averaging"])
def test_a_session_whose_state_is_not_the_runs_starts_afresh(phase: str) -> None:
    reasons: list[str] = []
    session: Any = Session.__new__(Session)
    session._network, session._stopping = SimpleNamespace(failure=None), False
    session._replica_or_none = SimpleNamespace(verdict_is_known=False, exchanging=False, round=3, resync=reasons.append)
    view = SimpleNamespace(round=3, phase=phase, must_resync=True)
    session._member = SimpleNamespace(client=SimpleNamespace(view=view, closes_at_s=None), rejoined=False)
    assert session.settle() is Readiness.NOT_YET
    assert reasons == ["its state is not the run's"]
