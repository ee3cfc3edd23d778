"""The server of the review page: routes, and a loop on 127.0.0.1 until Ctrl-C."""

import asyncio
import json
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from nearsay.errors import CANNOT_CREATE, LOCKED, ChangedFile, ImageError, RunError, Stopped
from nearsay.label_issues.corrections import Corrections
from nearsay.review.examples import LARGE, SMALL, Pictures, open_source, read_examples
from nearsay.review.security import MOST_BYTES, Denied, Guard
from nearsay.review.session import Conflict, Refused, Session, Tally
from nearsay.training.checkpoints import COPY, open_run
from nearsay.training.run_folder import read_labels

HOST = "127.0.0.1"
# Seconds that a connection may last, and that a decision may take to arrive.
LONGEST = 20.0
LONGEST_BODY = 10.0
_MOST_CONNECTIONS = 256
_PAGE = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# The address of a picture contains the token of the session, so a picture never changes.
_FOREVER = {"cache-control": "private, max-age=86400, immutable"}


def review_run(
    folder: Path,
    *,
    port: int = 0,
    limit: int | None = None,
    opened: Callable[[str], None] = lambda address: None,
) -> Tally:
    """Serve the page of an audited run until Ctrl-C, and call `opened` with its address.

    Decisions go to `corrections.csv` in the folder, which is locked for other processes. `limit` is
    the number of labels to show, the most suspicious first. Raises RunError if the run has no
    audit, if its files are damaged, or if the port is in use.
    """
    labels = read_labels(folder)
    examples = read_examples(folder, labels)
    with _alone(folder), _listening(port) as listener:
        corrections = Corrections(folder / "corrections.csv", labels)
        source = open_source(folder, len(examples))
        notes = [source.note] if source.note else []
        if corrections.torn:
            torn = corrections.torn
            notes.append(f"An incomplete last row in {corrections.path} was removed: {torn!r}")
        session = Session(
            examples,
            corrections,
            Pictures(source.inputs),
            name=str(folder),
            notes=notes,
            extra=source.extra,
            limit=limit,
        )
        token = secrets.token_urlsafe(24)
        bound = listener.getsockname()[1]
        server = make_server(make_app(session, token=token, port=bound))
        with _stopping(server) as received:
            # Connections already wait in the queue of the listener, so the address is ready.
            opened(f"http://{HOST}:{bound}/{token}/")
            server.run(sockets=[listener])
    if signal.SIGTERM in received:
        raise Stopped(signal.SIGTERM, folder)
    return session.tally()


def make_app(session: Session, *, token: str, port: int) -> ASGIApp:
    """All routes of the page, behind the guard."""

    def read_state(_: Request) -> Response:
        return JSONResponse(session.state())

    def read_example(request: Request) -> Response:
        try:
            return JSONResponse(session.example(request.path_params["index"]))
        except KeyError:
            return PlainTextResponse("there is no such example\n", 404)

    def read_picture(request: Request) -> Response:
        side = SMALL if request.path_params["size"] == "small" else LARGE
        try:
            picture = session.pictures.get(request.path_params["index"], side=side)
        except ImageError as error:
            return PlainTextResponse(f"{error}\n", 404)
        return Response(picture.content, media_type=picture.media_type, headers=_FOREVER)

    def read_changes(request: Request) -> Response:
        return JSONResponse(session.changes(request.path_params["since"]))

    async def decide(request: Request) -> Response:
        try:
            decision = json.loads(await _read_body(request))
        except (ValueError, RecursionError):
            return _error(400, "the body must be JSON")
        return await run_in_threadpool(_decide, session, decision)

    async def read_denied(_: Request, error: Exception) -> Response:
        return PlainTextResponse(f"{error}\n", cast(Denied, error).status)

    routes = [
        Route("/state", read_state, methods=["GET"]),
        Route("/example/{index:int}", read_example, methods=["GET"]),
        Route("/picture/{size}/{index:int}", read_picture, methods=["GET"]),
        Route("/changes/{since:int}", read_changes, methods=["GET"]),
        Route("/decide", decide, methods=["POST"]),
    ]
    for path in sorted(_PAGE.iterdir()):
        name = "" if path.name == "index.html" else path.name
        routes.append(Route(f"/{name}", _static(path), methods=["GET"]))
    app = Starlette(routes=routes, exception_handlers={Denied: read_denied})
    return Guard(app=app, token=token, port=port)


def make_server(app: ASGIApp) -> uvicorn.Server:
    """A server that does not name itself and limits how long a connection lasts."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], _protocol),
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_graceful_shutdown=5,
        )
    )


class _Brief:
    """A connection that ends after `LONGEST` seconds; `inner` does everything else."""

    def __init__(self, inner: asyncio.Protocol) -> None:
        self.inner = inner
        self.data_received, self.eof_received = inner.data_received, inner.eof_received
        self.pause_writing, self.resume_writing = inner.pause_writing, inner.resume_writing
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._timer = asyncio.get_running_loop().call_later(LONGEST, transport.abort)
        self.inner.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.inner.connection_lost(error)


def _protocol(**arguments: Any) -> _Brief:  # the arguments of uvicorn
    return _Brief(H11Protocol(**arguments))


def _decide(session: Session, decision: object) -> Response:
    try:
        return JSONResponse(session.decide(decision))
    except Refused as error:
        return _error(400, str(error))
    except Conflict as error:
        return JSONResponse({"error": str(error), "standing": error.standing}, 409)
    except (ChangedFile, RunError) as error:
        return _error(507, str(error))


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status)


async def _read_body(request: Request) -> bytes:
    """The body of a request, within limits of size and time."""
    content = bytearray()
    try:
        async with asyncio.timeout(LONGEST_BODY):
            async for chunk in request.stream():
                content += chunk
                if len(content) > MOST_BYTES:
                    raise Denied(413, f"a request has at most {MOST_BYTES} bytes")
    except TimeoutError as error:
        raise Denied(408, f"a request has at most {LONGEST_BODY:g} seconds") from error
    except ClientDisconnect as error:
        raise Denied(400, "the request has no end") from error
    return bytes(content)


def _static(path: Path) -> Callable[[Request], Response]:
    content, kind = path.read_bytes(), _TYPES[path.suffix]
    return lambda _: Response(content, media_type=kind)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the run; RunError names the process that holds it."""
    try:
        with open_run(folder, cure=COPY):
            yield
    except RunError as error:
        if error.code != LOCKED:
            raise
        holder = str(error).partition(";")[0]
        raise RunError(f"{holder}. End that process or wait for it.", LOCKED) from error


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    """A socket that only this machine can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
            listener.listen(128)
        except OSError as error:
            raise RunError(
                f"port {port} cannot be used: {error.strerror}. Leave out --port for a free one.",
                CANNOT_CREATE,
            ) from error
        yield listener


@contextmanager
def _stopping(server: uvicorn.Server) -> Iterator[list[int]]:
    """End the server cleanly on Ctrl-C and SIGTERM, also before it handles them itself."""
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        received.append(number)
        server.should_exit = True

    if threading.current_thread() is not threading.main_thread():
        # Python delivers signals to the main thread only.
        yield received
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
