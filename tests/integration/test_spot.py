"""Machines that are taken back: a spot notice and SIGTERM end `shoal join` in order, with the code for "again"."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.integration.harness import LEAVE_S, SHOAL, START_S, Member, Swarm, run_toml
from tests.integration.namespaces import Namespaces, NoNamespaces, check_machine

from shoal.peer.guest.spot import METADATA
from shoal.peer.options import TERMINATED

pytestmark = [pytest.mark.integration, pytest.mark.matrix]


@contextmanager
def metadata_service(spaces: Namespaces, name: str) -> Iterator[threading.Event]:
    """The service of Google at its own address in a namespace; the event that it yields makes it say "preempted"."""
    preempted = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"TRUE" if preempted.is_set() else b"FALSE"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    spaces.ip(name, f"addr add {METADATA[0]}/32 dev lo")
    server = spaces.call(name, lambda: ThreadingHTTPServer(METADATA, Handler))
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    try:
        yield preempted
    finally:
        server.shutdown()
        server.server_close()
        serving.join()


def has_left_in_order(member: Member) -> None:
    assert member.exit_code(LEAVE_S) == TERMINATED, member.tail()
    left = member.events("left")[-1]
    assert left["anchor_version"] is not None
    assert left["tokens_trained"] > 0
    assert list((member.folder / "state").glob("*/*/checkpoints/*")), "it has saved nothing"


def test_members_that_are_taken_back_leave_in_order_and_say_so(swarm: Swarm) -> None:
    spaces = Namespaces()
    try:
        check_machine()
        spaces.make("cloud")
    except NoNamespaces as error:
        spaces.close()
        pytest.skip(str(error))
    try:
        with metadata_service(spaces, "cloud") as preempted:
            inside = (*spaces.inside("cloud"), *SHOAL)
            host = swarm.host(run_toml(), launcher=inside)
            spot = swarm.member(host.invite, "spot", inside, extra=("--spot", "gcp"))
            batch = swarm.member(host.invite, "batch", inside)
            for member in (spot, batch):
                member.committed(within_s=START_S)
            preempted.set()
            has_left_in_order(spot)
            assert "takes this machine back (preempted)" in spot.text()
            spot.start()  # as a service manager would on a machine that is about to end
            assert spot.exit_code(START_S) == TERMINATED, spot.tail()
            assert not spot.events("joined"), "it has joined again"
            batch.send(signal.SIGTERM)
            has_left_in_order(batch)
            host.stop()
    finally:
        spaces.close()
