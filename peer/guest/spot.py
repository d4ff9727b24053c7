"""Spot notices: whether the provider of a rented machine is about to take it back, by the machine's metadata service.

That service answers at one link-local address, ``METADATA``, on the machine itself: nothing else is ever asked. Whoever
answers there can make this peer leave its run, and nothing more, so it is asked only where the owner says so.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)

METADATA = ("169.254.169.254", 80)
"""Address of the metadata service, the same at all three providers."""

ASK_EVERY_S = 2.0
"""Time between two looks. The shortest notice is 30 s, at Google and Azure; at Amazon it is 120 s."""

_WITHIN_S = 2.0
_MAX_ANSWER_BYTES = 65_536
_MAX_WORDS = 100

_TOKEN_S = 21_600
_TOKEN_PATH, _ACTION_PATH = "/latest/api/token", "/latest/meta-data/spot/instance-action"
_PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted"
_EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_TAKEN_BACK = ("Preempt", "Terminate")
"""Azure's events after which the machine does not come back; others are reboots and short freezes."""


class SpotProvider(StrEnum):
    """Providers whose notices are understood."""

    aws = "aws"
    gcp = "gcp"
    azure = "azure"


class MetadataService:
    """HTTP client of the metadata service, with bounded answers, no redirects and no proxies."""

    def __init__(self, address: tuple[str, int] = METADATA) -> None:
        self._address = address

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> tuple[int, bytes]:
        """Return status and body of an answer. Raises ``OSError``, ``HTTPException`` and ``ValueError``."""
        import http.client  # slow to import, and most machines are no spot machines

        connection = http.client.HTTPConnection(*self._address, timeout=_WITHIN_S)
        try:
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            body = response.read(_MAX_ANSWER_BYTES + 1)
        finally:
            connection.close()
        if len(body) > _MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of more than {_MAX_ANSWER_BYTES:,} bytes")
        return response.status, body


class SpotNotices:
    """Looks for a notice of one provider; for one thread at a time."""

    def __init__(self, provider: SpotProvider, service: MetadataService | None = None) -> None:
        self._service = service or MetadataService()
        self._look = {
            SpotProvider.aws: self._look_at_amazon,
            SpotProvider.gcp: self._look_at_google,
            SpotProvider.azure: self._look_at_azure,
        }[provider]
        self._provider = provider
        self._token = self._name = self._trouble = ""

    def look(self) -> str:
        """Return what the provider is about to do with this machine, in a few words; empty if nothing.

        A service that does not answer, or not as it should, is told once, and counts as nothing."""
        from http.client import HTTPException

        try:
            found = self._look()
        except (OSError, HTTPException, ValueError) as error:
            trouble = str(error) or type(error).__name__
            if trouble != self._trouble:
                self._trouble = trouble
                log.warning(
                    "no spot notices are to be had here (--spot %s): %s. Is this a machine of that provider, and may "
                    "this process, or its container, reach %s?",
                    self._provider,
                    _printable(trouble),
                    METADATA[0],
                )
            return ""
        self._trouble = ""
        return _printable(found)

    def _look_at_amazon(self) -> str:
        """IMDSv2: a token, then the notice, which is not there (404) until there is one."""
        if not self._token:
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            status, body = self._service.ask(_TOKEN_PATH, lifetime, "PUT")
            self._token = _expect(status, body)
        status, body = self._service.ask(_ACTION_PATH, {"X-aws-ec2-metadata-token": self._token})
        if status == 404:
            return ""
        if status == 401:  # the token is too old: the next look gets another one
            self._token = ""
            return ""
        notice = json.loads(_expect(status, body))
        if not isinstance(notice, dict) or not isinstance(notice.get("action"), str):
            raise ValueError("a notice without an action")
        return f"{notice['action']} at {notice.get('time', 'a time that it does not say')}"

    def _look_at_google(self) -> str:
        status, body = self._service.ask(_PREEMPTED_PATH, {"Metadata-Flavor": "Google"})
        answer = _expect(status, body)
        if answer not in ("TRUE", "FALSE"):
            raise ValueError(f"neither TRUE nor FALSE, but {answer!r}")
        return "preempted" if answer == "TRUE" else ""

    def _look_at_azure(self) -> str:
        """Scheduled events, which may be of other machines of the same group."""
        asked = {"Metadata": "true"}
        if not self._name:
            self._name = _expect(*self._service.ask(_NAME_PATH, asked)).casefold()
        document = json.loads(_expect(*self._service.ask(_EVENTS_PATH, asked)))
        events = document.get("Events") if isinstance(document, dict) else None
        if not isinstance(events, list):
            raise ValueError("a document without events")
        for event in events:
            if not isinstance(event, dict) or event.get("EventType") not in _TAKEN_BACK:
                continue
            machines = event.get("Resources")
            if isinstance(machines, list) and any(str(one).casefold() == self._name for one in machines):
                return f"{event['EventType']}, not before {event.get('NotBefore') or 'now'}"
        return ""


def _expect(status: int, body: bytes) -> str:
    if status != 200:
        raise ValueError(f"the metadata service answers {status}")
    return body.decode(errors="replace").strip()


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_MAX_WORDS])


class SpotThread:
    """Looks for a notice beside the training, until its context ends. ``notice``: what was found, empty if nothing."""

    def __init__(self, notices: SpotNotices, on_notice: Callable[[str], None], every_s: float = ASK_EVERY_S) -> None:
        """``on_notice``: called once, on this thread."""
        self.notice = ""
        self._notices = notices
        self._on_notice = on_notice
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-spot", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(_WITHIN_S)  # a service that drips its answer keeps nobody here

    def _run(self) -> None:
        while not self._ended.is_set():
            self.notice = self._notices.look()
            if self.notice:
                self._on_notice(self.notice)
                return
            self._ended.wait(self._every_s)
