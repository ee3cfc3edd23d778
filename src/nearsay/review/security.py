"""Who may talk to the review page: only this machine, at the printed address, from the page itself.

The page serves private images and takes decisions, while any web site that is open in the same
browser can send requests to 127.0.0.1. So every request must
- name one of our two host names (another name could be made to point here: DNS rebinding),
- carry the secret token in its path,
- come from the page itself, as `Origin` and `Sec-Fetch-Site` show (no cross-site requests).
The headers of every answer forbid the browser to load, frame or guess anything else.
"""

import hmac
import sys
from dataclasses import dataclass

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Of the body of a request.
MOST_BYTES = 2**20
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
    # One request per connection, so that the length of a connection can be limited.
    b"connection": b"close",
}
# The values of Sec-Fetch-Site for a request that no other site has caused.
_OWN_SITES = (b"same-origin", b"none")


class Denied(Exception):
    """The request is refused with this HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Passes valid requests to `app`, without the token in their path, and refuses the others."""

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
                headers = {b"cache-control": b"no-store", **dict(message.get("headers", []))}
                message = {**message, "headers": list({**headers, **HEADERS}.items())}
            await send(message)

        try:
            path = self._check(scope)
            inner = {**scope, "path": path, "raw_path": path.encode(), "root_path": ""}
            await self.app(inner, receive, send_guarded)
        except Denied as error:
            await PlainTextResponse(f"{error}\n", error.status)(scope, receive, send_guarded)
        except Exception as error:
            # One failed request must not end the page for the others.
            print(f"internal error: {type(error).__name__}: {error}", file=sys.stderr)
            if not begun:
                await PlainTextResponse("internal error\n", 500)(scope, receive, send_guarded)

    def _check(self, scope: Scope) -> str:
        """The path below the token; Denied if the request breaks a rule."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        hosts = [f"{name}:{self.port}".encode() for name in ("127.0.0.1", "localhost")]
        host = headers.get(b"host", [])
        if len(host) != 1 or host[0] not in hosts:
            raise Denied(421, "the Host header must name this server")
        token, slash, rest = scope["path"].removeprefix("/").partition("/")
        # Comparing in constant time does not reveal how much of a guessed token is right.
        is_token = hmac.compare_digest(token.encode(errors="replace"), self.token.encode())
        if not is_token or not slash:
            raise Denied(403, "open the address that nearsay review has printed")
        if scope["method"] not in ("GET", "HEAD", "POST"):
            raise Denied(405, "the method must be GET, HEAD or POST")
        origins = headers.get(b"origin", [])
        is_own = origins == [b"http://" + host[0]]
        if (origins or scope["method"] == "POST") and not is_own:
            raise Denied(403, "requests of other sites are not answered")
        # Following a link to the page is allowed from anywhere.
        is_visit = scope["method"] == "GET" and headers.get(b"sec-fetch-dest") == [b"document"]
        sites = headers.get(b"sec-fetch-site", [])
        if not is_visit and any(site not in _OWN_SITES for site in sites):
            raise Denied(403, "requests of other sites are not answered")
        if scope["method"] == "POST" and headers.get(b"content-type") != [b"application/json"]:
            raise Denied(415, "the content type must be application/json")
        lengths = headers.get(b"content-length", [b"0"])
        if any(not length.isdigit() or int(length[:20]) > MOST_BYTES for length in lengths):
            raise Denied(413, f"a request has at most {MOST_BYTES} bytes")
        return f"/{rest}"
