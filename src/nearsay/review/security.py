"""Who may talk to the page: this machine, by the address that was printed, from the page itself.

A request must name a host of ours (so that no other name can be made to point here), carry the token in its path, and
come from no other site. All that is sent says that nothing else may be loaded, framed or guessed.
"""

import hmac
import sys
from dataclasses import dataclass

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES = 2**20  # of a request
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"connection": b"close",  # one request a connection, so that its length can be limited
}
_SITES = (b"same-origin", b"none")  # what a browser says of a request that no other site has caused


class Denied(Exception):
    """A request that is not answered, with the status that says why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Lets requests through to `app`, with the token taken off their path, or says no."""

    app: ASGIApp
    token: str
    port: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        begun = []

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                begun.append(True)
                own = [
                    (name, value)
                    for name, value in message.get("headers", [])
                    if name not in HEADERS
                ]
                if not any(name == b"cache-control" for name, _ in own):
                    own.append((b"cache-control", b"no-store"))
                message = {**message, "headers": [*own, *HEADERS.items()]}
            await send(message)

        try:
            path = self._check(scope)
            await self.app(
                {**scope, "path": path, "raw_path": path.encode(), "root_path": ""},
                receive,
                send_guarded,
            )
        except Denied as error:
            await PlainTextResponse(f"{error}\n", error.status)(scope, receive, send_guarded)
        except Exception as error:  # whatever it is, the page goes on for the others
            print(f"internal error: {type(error).__name__}: {error}", file=sys.stderr)
            if not begun:
                await PlainTextResponse("internal error\n", 500)(scope, receive, send_guarded)

    def _check(self, scope: Scope) -> str:
        """The path below the token; Denied if the request is not to be answered."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        hosts = [f"{name}:{self.port}".encode() for name in ("127.0.0.1", "localhost")]
        host = headers.get(b"host", [])
        if len(host) != 1 or host[0] not in hosts:
            raise Denied(421, "this is not the host that you are looking for")
        token, slash, rest = scope["path"].removeprefix("/").partition("/")
        if (
            not hmac.compare_digest(token.encode(errors="replace"), self.token.encode())
            or not slash
        ):
            raise Denied(403, "open the address that nearsay review has printed")
        if scope["method"] not in ("GET", "HEAD", "POST"):
            raise Denied(405, "there is nothing to do this with")
        origins = headers.get(b"origin", [])
        is_own = origins == [b"http://" + host[0]]
        if (origins or scope["method"] == "POST") and not is_own:
            raise Denied(403, "requests of other sites are not answered")
        is_visit = scope["method"] == "GET" and headers.get(b"sec-fetch-dest") == [
            b"document"
        ]  # a link was followed
        if not is_visit and any(site not in _SITES for site in headers.get(b"sec-fetch-site", [])):
            raise Denied(403, "requests of other sites are not answered")
        if scope["method"] == "POST" and headers.get(b"content-type") != [b"application/json"]:
            raise Denied(415, "decisions are sent as application/json")
        lengths = headers.get(b"content-length", [b"0"])
        if any(not length.isdigit() or int(length[:20]) > MOST_BYTES for length in lengths):
            raise Denied(413, f"a request has at most {MOST_BYTES} bytes")
        return f"/{rest}"
