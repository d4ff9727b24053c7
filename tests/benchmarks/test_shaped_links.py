import socket
import threading
from pathlib import Path
from typing import Any

import pytest

NAMESPACES = Path("/run/netns")


@pytest.fixture
def links() -> Any:
    import shaped_links

    try:
        shaped_links.check_machine()
        with shaped_links.shaped_links([100.0], 1.0):
            pass
    except shaped_links.NoShapedLinks as missing:
        pytest.skip(str(missing))
    return shaped_links


def test_sites_reach_each_other(links: Any) -> None:
    heard: list[bytes] = []
    listening, over = threading.Event(), threading.Event()

    def listen() -> None:
        links.enter(sites[0].namespace)
        with socket.create_server((sites[0].address, 7000)) as server:
            server.settimeout(20)
            listening.set()
            connection, (address, _) = server.accept()
            with connection:
                assert address == sites[1].address
                heard.append(connection.recv(100))
        over.set()

    def call() -> None:
        links.enter(sites[1].namespace)
        with socket.create_connection((sites[0].address, 7000), timeout=20) as connection:
            connection.sendall(b"from the other site")
            over.wait(20)

    with links.shaped_links([100.0, 10.0], 1.0) as sites:
        threads = [threading.Thread(target=listen)]
        threads[0].start()
        assert listening.wait(20)
        threads.append(threading.Thread(target=call))
        threads[1].start()
        for thread in threads:
            thread.join()
    assert heard == [b"from the other site"]
    assert not any((NAMESPACES / site.namespace).exists() for site in sites)


def test_nothing_is_left_after_a_failure(links: Any) -> None:
    made: list[Path] = []

    def fail() -> None:
        with links.shaped_links([100.0, 100.0], 1.0) as sites:
            made.extend(NAMESPACES / site.namespace for site in sites)
            assert all(path.exists() for path in made)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(made) == 2
    assert not any(path.exists() for path in made)


def test_what_a_killed_process_left_is_removed(links: Any) -> None:
    name = f"{links._PREFIX}-{2**22 + 1}-0"  # above Linux' largest process id
    links._ip("netns", "add", name)
    with links.shaped_links([100.0], 1.0):
        assert not (NAMESPACES / name).exists()
