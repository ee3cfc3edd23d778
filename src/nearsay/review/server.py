"""The server of the page: routes, and one process that listens on 127.0.0.1 until it is told to stop."""

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
from nearsay.review.examples import read_examples
from nearsay.review.pictures import LARGE, SMALL, Pictures, open_source
from nearsay.review.security import MOST_BYTES, Denied, Guard
from nearsay.review.session import Conflict, Desk, Refused, Tally
from nearsay.training.checkpoints import COPY, open_run
from nearsay.training.run_folder import read_labels

HOST = "127.0.0.1"
LONGEST = 20.0  # seconds that a connection may last, whatever the client does
LONGEST_BODY = 10.0  # seconds that a decision may take to arrive
_MOST_CONNECTIONS = 256
_PAGE = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_FOREVER = {
    "cache-control": "private, max-age=86400, immutable"
}  # the address of a picture is good for one session


def review_run(
    folder: Path,
    *,
    port: int = 0,
    limit: int | None = None,
    opened: Callable[[str], None] = lambda address: None,
) -> Tally:
    """Serve the page of an audited run until Ctrl-C; `opened` is called with its address as soon as it answers.

    Decisions go to `corrections.csv` in the folder, which no other process may write to meanwhile. `limit` is how many
    labels to show, the most suspicious. Raises RunError if the run cannot be reviewed, or the port is taken.
    """
    labels = read_labels(folder)
    examples = read_examples(folder, labels)
    with _alone(folder), _listening(port) as listener:
        corrections = Corrections(folder / "corrections.csv", labels)
        source = open_source(folder, len(examples))
        torn = f"Half a row that a crash had left in {corrections.path} was removed: {corrections.torn!r}"
        desk = Desk(
            examples,
            corrections,
            Pictures(source.inputs),
            name=str(folder),
            notes=[note for note in (source.note, torn if corrections.torn else "") if note],
            extra=source.extra,
            limit=limit,
        )
        token = secrets.token_urlsafe(24)
        bound = listener.getsockname()[1]
        server = make_server(make_app(desk, token=token, port=bound))
        with _stopping(server) as received:
            opened(
                f"http://{HOST}:{bound}/{token}/"
            )  # who connects already waits in the queue of the listener
            server.run(sockets=[listener])
    if signal.SIGTERM in received:
        raise Stopped(signal.SIGTERM, folder)
    return desk.tally()


def make_app(desk: Desk, *, token: str, port: int) -> ASGIApp:
    """All that the page can ask for, behind its guard."""

    def read_state(_: Request) -> Response:
        return JSONResponse(desk.state())

    def read_example(request: Request) -> Response:
        try:
            return JSONResponse(desk.example(request.path_params["index"]))
        except KeyError:
            return PlainTextResponse("there is no such example\n", 404)

    def read_picture(request: Request) -> Response:
        side = SMALL if request.path_params["size"] == "small" else LARGE
        try:
            found = desk.pictures.find(request.path_params["index"], side=side)
        except ImageError as error:
            return PlainTextResponse(f"{error}\n", 404)
        return Response(found.content, media_type=found.media_type, headers=_FOREVER)

    def read_changes(request: Request) -> Response:
        return JSONResponse(desk.changes(request.path_params["since"]))

    async def decide(request: Request) -> Response:
        try:
            asked = json.loads(await _read_body(request))
        except (ValueError, RecursionError):
            return _error(400, "a decision is sent as JSON")
        return await run_in_threadpool(_decide, desk, asked)

    return Guard(
        app=Starlette(
            routes=[
                *(
                    Route(f"/{name}", _static(path), methods=["GET"])
                    for name, path in _pages().items()
                ),
                Route("/state", read_state, methods=["GET"]),
                Route("/example/{index:int}", read_example, methods=["GET"]),
                Route("/picture/{size}/{index:int}", read_picture, methods=["GET"]),
                Route("/changes/{since:int}", read_changes, methods=["GET"]),
                Route("/decide", decide, methods=["POST"]),
            ],
            exception_handlers={
                Denied: lambda _, error: PlainTextResponse(f"{error}\n", cast(Denied, error).status)
            },
        ),
        token=token,
        port=port,
    )


def make_server(app: ASGIApp) -> uvicorn.Server:
    """A server that says nothing of itself and keeps no connection for long."""
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
    """A connection that ends after some seconds; all else is up to `inner`."""

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


def _protocol(**choices: Any) -> _Brief:  # whatever uvicorn makes its protocols from
    return _Brief(H11Protocol(**choices))


def _decide(desk: Desk, asked: object) -> Response:
    try:
        return JSONResponse(desk.decide(asked))
    except Refused as error:
        return _error(400, str(error))
    except Conflict as error:
        return JSONResponse({"error": str(error), "standing": error.standing}, 409)
    except (ChangedFile, RunError) as error:
        return _error(507, str(error))


def _error(status: int, told: str) -> Response:
    return JSONResponse({"error": told}, status)


async def _read_body(request: Request) -> bytes:
    """What was sent, if it is not too long and does not take too long."""
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


def _pages() -> dict[str, Path]:
    """The files of the page by their names; the page itself has none."""
    return {
        "" if path.name == "index.html" else path.name: path for path in sorted(_PAGE.iterdir())
    }


def _static(path: Path) -> Callable[[Request], Response]:
    content, kind = path.read_bytes(), _TYPES[path.suffix]
    return lambda _: Response(content, media_type=kind)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process writes to the run; RunError says which one does."""
    try:
        with open_run(folder, cure=COPY):
            yield
    except RunError as error:
        if error.code != LOCKED:
            raise
        raise RunError(
            f"{str(error).partition(';')[0]}; end it there, or wait for it", LOCKED
        ) from error


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    """A socket that only this machine can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
            listener.listen(128)
        except OSError as error:
            told = f"port {port} cannot be used ({error.strerror}); leave --port out to take a free one"
            raise RunError(told, CANNOT_CREATE) from error
        yield listener


@contextmanager
def _stopping(server: uvicorn.Server) -> Iterator[list[int]]:
    """Let Ctrl-C and SIGTERM end the server in peace, also before it has begun to listen for them itself."""
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        received.append(number)
        server.should_exit = True

    if threading.current_thread() is not threading.main_thread():
        yield received  # Python gives signals to the main thread only
        return
    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
