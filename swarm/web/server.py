"""The page's server: HTTP in a thread of its own, so that the run never waits for a browser.

Read-only, with a strict content security policy and bounded connections. Behind a reverse proxy it can be had under any
path, as the page asks for relative addresses only."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from shoal.swarm.aio import task_scope
from shoal.swarm.errors import ShoalError, Unreachable, UserError
from shoal.swarm.protocol.addresses import join_host_port
from shoal.swarm.system import allow_files
from shoal.swarm.web.event_stream import stream
from shoal.swarm.web.feed import encode
from shoal.swarm.web.files import STATIC_FILES, static_file
from shoal.swarm.web.metrics import exposition, process_readings
from shoal.swarm.web.run_page import RunPage
from shoal.swarm.web.source import PageSource

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

MOST_CONNECTIONS = 2_048
METRICS_CONNECTIONS = 16
"""Connections with a server of metrics alone; a Prometheus keeps one."""
_LEAST_CONNECTIONS = 64
_MOST_STREAMS_SHARE = 0.75
"""Share of the connections that may be event streams; the rest is for those who come."""
_IDLE_S = 10.0
"""Time in which a connection that waits for no answer has to move: a request to come, what was sent to be read."""
_MAX_HEADERS_BYTES = 16_384

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_BYTE_HEADERS = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]

log = logging.getLogger(__name__)


def connections_beside(descriptors: int) -> int:
    """Connections that a page may have in a process that needs ``descriptors`` for other things: as many as it may
    open, whose limit is raised if that is possible."""
    return allow_files(descriptors + MOST_CONNECTIONS) - descriptors


class PageServer:
    """Pages of runs at one address, served by a thread of its own until ``close``."""

    def __init__(self, place: tuple[str, int], most_connections: int, *, only_metrics: bool = False) -> None:
        """Listens at once. ``most_connections``: see ``connections_beside``; a page is allowed a few always.
        ``only_metrics``: serve no page, but ``/metrics`` alone. Raises ``UserError`` without the extra ``web``, or
        ``metrics``, and ``Unreachable`` where this machine cannot listen."""
        self._option = "--metrics" if only_metrics else "--web"
        self._pages: dict[str, RunPage] = {}
        if not only_metrics:
            most_connections = max(_LEAST_CONNECTIONS, most_connections)
        self._most_streams = int(most_connections * _MOST_STREAMS_SHARE)
        self._streams = 0
        app = self._app()
        self._socket = _listen(place, self._option)
        self._server = _make_server(app, most_connections)
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="shoal-page", daemon=True)
        self._thread.start()
        started.wait()

    @property
    def url(self) -> str:
        """The page's address as this machine knows it, or that of the metrics."""
        host, port = self._socket.getsockname()[:2]
        shown = join_host_port({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)
        return f"http://{shown}/{'metrics' if self._option == '--metrics' else ''}"

    @contextmanager
    def showing(self, source: PageSource, network: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Show a run, whose network runs in the loop ``network``, until the context ends."""
        name = source.run_file().run.name
        self._call(self._add, name, source, network)
        try:
            yield
        finally:
            self._call(self._remove, name)

    def close(self) -> None:
        """End all connections, and wait for the thread."""
        self._call(self._end)
        self._thread.join()
        self._socket.close()

    # The page's thread ------------------------------------------------------------------------------------

    def _run(self, started: threading.Event) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            async with task_scope() as self._tasks:
                started.set()
                await self._server.serve(sockets=[self._socket])
                for task in list(self._looking.values()):
                    task.cancel()

        self._looking: dict[str, asyncio.Task[None]] = {}
        try:
            asyncio.run(main())
        except Exception:  # the run goes on without its page
            log.exception("the page has failed, and is not served any more")
            started.set()

    def _end(self) -> None:
        for name in list(self._pages):
            self._remove(name)
        self._server.should_exit = True

    def _call(self, call: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(call, *args)

    def _add(self, name: str, source: PageSource, network: asyncio.AbstractEventLoop) -> None:
        self._remove(name)
        page = self._pages[name] = RunPage(source, network)
        self._looking[name] = self._tasks.create_task(self._keep_looking(name, page))

    async def _keep_looking(self, name: str, page: RunPage) -> None:
        """Follow a run. An error that nobody expected ends its page, and not those of others."""
        try:
            await page.keep_looking()
        except Exception:
            log.exception("the page of the run %s has failed, and is not served any more", name)
            if self._pages.get(name) is page:
                self._remove(name)

    def _remove(self, name: str) -> None:
        if name in self._pages:
            self._pages.pop(name).ended.set()  # those who follow it ask again, and find it if it begins anew
            self._looking.pop(name).cancel()

    # Answers ----------------------------------------------------------------------------------------------

    def _app(self) -> Starlette:
        only_metrics = self._option == "--metrics"
        try:
            import uvicorn  # noqa: F401, named in the same sentence
            from starlette.applications import Starlette
            from starlette.responses import Response
            from starlette.routing import Route

            if only_metrics:
                import prometheus_client  # noqa: F401, named in the same sentence
        except ImportError as error:
            extra = self._option.removeprefix("--")
            raise UserError(f"{self._option} needs a package: pip install 'shoal[{extra}]' ({error})") from error

        def document(answer: Callable[[RunPage, Request], Awaitable[bytes]]) -> Callable[..., Awaitable[Response]]:
            async def endpoint(request: Request) -> Response:
                page = self._page_of(request)
                if page is None:
                    return _refusal(404, "no such run here: see runs.json")
                try:
                    return _json(await answer(page, request))
                except _NoNumber:
                    return _refusal(400, "expected the number of a round")
                except KeyError:
                    return _refusal(404, "no such round")
                except (ShoalError, TimeoutError):
                    return _refusal(503, "the run does not answer at the moment")
                except Exception:
                    log.debug("the page has no answer", exc_info=True)
                    return _refusal(500, "the page has failed at that")

            return endpoint

        def static(name: str) -> Callable[..., Awaitable[Response]]:
            data = static_file(name)
            headers = _HEADERS | {"ETag": f'"{hashlib.sha256(data).hexdigest()[:32]}"', "Cache-Control": "no-cache"}

            async def endpoint(request: Request) -> Response:
                if request.headers.get("if-none-match") == headers["ETag"]:
                    return Response(status_code=304, headers=headers)
                return Response(data, headers=headers, media_type=STATIC_FILES[name])

            return endpoint

        async def runs(request: Request) -> Response:
            return _json(encode(await asyncio.gather(*(page.card() for page in self._pages.values()))))

        async def facts(page: RunPage, request: Request) -> bytes:
            return page.facts()

        async def status(page: RunPage, request: Request) -> bytes:
            return await page.status()

        async def rounds(page: RunPage, request: Request) -> bytes:
            return await page.rounds(_number(request, "from"))

        async def detail(page: RunPage, request: Request) -> bytes:
            return await page.round_detail(_number(request, "round"))

        async def metrics(request: Request) -> Response:
            try:
                data, media_type = await self._metrics(request.headers.get("accept", ""))
            except ImportError as error:
                return _refusal(501, f"the metrics need a package: pip install 'shoal[metrics]' ({error})")
            return Response(data, headers=_HEADERS | {"Cache-Control": "no-store"}, media_type=media_type)

        scraped = Route("/metrics", metrics, methods=["GET"])
        if only_metrics:
            return Starlette(routes=[scraped])
        documents = {"/run.json": facts, "/status.json": status, "/rounds.json": rounds, "/round.json": detail}
        routes = [Route(path, document(answer), methods=["GET"]) for path, answer in documents.items()]
        routes += [Route(f"/{name}", static(name), methods=["GET"]) for name in STATIC_FILES]
        routes += [
            Route("/", static("index.html"), methods=["GET"]),
            Route("/runs.json", runs, methods=["GET"]),
            scraped,
            Route("/events", _Streams(self)),
        ]
        return Starlette(routes=routes)

    async def _metrics(self, accept: str) -> tuple[bytes, str]:
        """The metrics of all runs here and of this process. Raises ``ImportError`` without their package."""
        runs = await asyncio.gather(*(page.readings() for page in self._pages.values()))
        return exposition([*(reading for run in runs for reading in run), *process_readings()], accept)

    def _page_of(self, request: Request) -> RunPage | None:
        """The page of the run that a request names; the only one if it names none."""
        name = request.query_params.get("run")
        if name is None and len(self._pages) == 1:
            return next(iter(self._pages.values()))
        return self._pages.get(name or "")

    async def follow(self, request: Request, receive: Receive, send: Send) -> Response | None:
        """Send a run's events until the browser has gone. Returns a refusal, if that is the answer."""
        page = self._page_of(request)
        if request.method != "GET":
            return _refusal(405, "GET only")
        if page is None:
            return _refusal(404, "no such run here: see runs.json")
        if self._streams >= self._most_streams:
            return _refusal(503, "too many follow this page already")
        self._streams += 1
        page.watch()
        try:
            await stream(page.feed, _BYTE_HEADERS, page.ended, receive, send)
        finally:
            self._streams -= 1
            page.unwatch()
        return None


class _Streams:
    """The endpoint of the events, an ASGI application as it decides itself when to send more."""

    def __init__(self, server: PageServer) -> None:
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.requests import Request

        refusal = await self._server.follow(Request(scope), receive, send)
        if refusal is not None:
            await refusal(scope, receive, send)


class _NoNumber(Exception):
    pass


def _number(request: Request, name: str) -> int:
    """Raises ``_NoNumber``."""
    try:
        return int(request.query_params.get(name, "0")[:20])
    except ValueError as error:
        raise _NoNumber from error


def _json(data: bytes) -> Response:
    from starlette.responses import Response

    return Response(data, headers=_HEADERS | {"Cache-Control": "no-store"}, media_type="application/json")


def _refusal(code: int, words: str) -> Response:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(f"{words}\n", code, _HEADERS | ({"Retry-After": "15"} if code == 503 else {}))


def _listen(place: tuple[str, int], option: str) -> socket.socket:
    host, port = place
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=256
        )
    except OSError as error:
        raise Unreachable(
            f"{option} {join_host_port(host, port)}: this machine cannot listen there: {error}; give another address"
        ) from error


class _Quiet(logging.Handler):
    """Takes what uvicorn logs: strangers cause it, with requests that are none, and the terminal is the host's."""

    def emit(self, record: logging.LogRecord) -> None:
        log.debug("uvicorn: %s", record.getMessage(), exc_info=record.exc_info)


def _cut_off(transport: asyncio.Transport) -> None:
    """Reset a connection: closed only, what the kernel holds for who does not read would stay for minutes."""
    with suppress(OSError):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _make_server(app: Starlette, most_connections: int) -> uvicorn.Server:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    theirs = logging.getLogger("uvicorn")
    theirs.handlers, theirs.propagate = [_Quiet()], False

    class Bounded(H11Protocol):
        """A connection that is cut off if there are too many, or if its browser neither asks nor reads."""

        _seen: object = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most_connections:
                _cut_off(transport)
            else:
                self.loop.call_later(_IDLE_S, self._look)

        def _look(self) -> None:
            """Closing is not enough: a closed connection stays until all that was sent to it has been read."""
            if self not in self.connections:
                return
            answers = self.cycle is not None and not self.cycle.response_complete
            seen = self.cycle, answers, self.transport.is_closing(), self.transport.get_write_buffer_size()
            if seen == self._seen and not (answers and seen[2:] == (False, 0)):
                _cut_off(self.transport)
            else:
                self._seen = seen
                self.loop.call_later(_IDLE_S, self._look)

    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=Bounded,
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=_MAX_HEADERS_BYTES,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=2,
        )
    )
