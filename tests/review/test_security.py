"""Who may talk to the page: only clients that know the token, and no other web site."""

import json
import socket

import pytest

from nearsay.review import server as server_module
from nearsay.review.security import MOST_BYTES
from review.conftest import TOKEN, serving

DECISION = json.dumps({"key": "k", "index": 0, "decision": "drop", "seen": 0})
JSON = "Content-Type: application/json"
HOST = "Host: 127.0.0.1:PORT"
ORIGIN = "Origin: http://127.0.0.1:PORT"
WRITE = (HOST, ORIGIN, JSON)
DECIDE = f"/{TOKEN}/decide"

# What is sent (method, target, headers, body), and the answers that are right.
REFUSED = [
    # another name for this machine: a name of others that was made to point here, or no name at all
    ("GET", f"/{TOKEN}/state", ("Host: evil.example",), "", (421,)),
    ("GET", f"/{TOKEN}/state", ("Host: evil.example:PORT",), "", (421,)),
    ("GET", f"/{TOKEN}/state", ("Host: 127.0.0.1",), "", (421,)),
    ("GET", f"/{TOKEN}/state", ("Host: 127.0.0.1:1",), "", (421,)),
    ("GET", f"/{TOKEN}/state", ("Host: 127.0.0.2:PORT",), "", (421,)),
    ("GET", f"/{TOKEN}/state", ("Host: 0.0.0.0:PORT",), "", (421,)),
    ("GET", f"/{TOKEN}/state", ("Host: [::1]:PORT",), "", (421,)),
    ("GET", f"/{TOKEN}/state", ("Host: 127.0.0.1.evil.example:PORT",), "", (421,)),
    ("GET", f"/{TOKEN}/state", ("Host: localhost.evil.example:PORT",), "", (421,)),
    ("GET", f"/{TOKEN}/state", ("Host: user@127.0.0.1:PORT",), "", (400, 421)),
    ("GET", f"/{TOKEN}/state", ("Host: ",), "", (400, 421)),
    ("GET", f"/{TOKEN}/state", (), "", (400, 421)),
    ("GET", f"/{TOKEN}/state", (HOST, "Host: evil.example"), "", (400, 421)),
    (
        "GET",
        f"/{TOKEN}/state",
        ("Host: evil.example", "X-Forwarded-Host: 127.0.0.1:PORT"),
        "",
        (421,),
    ),
    ("POST", DECIDE, ("Host: evil.example", ORIGIN, JSON), DECISION, (421,)),
    # no token, or not this one
    ("GET", "/", (HOST,), "", (403,)),
    ("GET", "/state", (HOST,), "", (403,)),
    ("GET", "//state", (HOST,), "", (403,)),
    ("GET", "/example/0", (HOST,), "", (403,)),
    ("GET", "/picture/large/0", (HOST,), "", (403,)),
    ("GET", "/page.js", (HOST,), "", (403,)),
    ("GET", f"/{TOKEN}", (HOST,), "", (403,)),
    ("GET", f"/{TOKEN[:-1]}/state", (HOST,), "", (403,)),
    ("GET", f"/{TOKEN}x/state", (HOST,), "", (403,)),
    ("GET", f"/{TOKEN.upper()}/state", (HOST,), "", (403,)),
    ("GET", f"/x/{TOKEN}/state", (HOST,), "", (403,)),
    ("GET", f"//{TOKEN}/state", (HOST,), "", (403,)),
    ("GET", f"/state?token={TOKEN}", (HOST,), "", (403,)),
    ("GET", "/state", (HOST, f"Cookie: token={TOKEN}"), "", (403,)),
    ("GET", "/state", (HOST, f"Authorization: Bearer {TOKEN}"), "", (403,)),
    ("GET", "/%C3%28/state", (HOST,), "", (400, 403)),
    ("GET", f"http://127.0.0.1:PORT/{TOKEN}/state", (HOST,), "", (400, 403)),
    ("POST", "/decide", WRITE, DECISION, (403,)),
    # another site
    ("GET", f"/{TOKEN}/state", (HOST, "Origin: http://evil.example"), "", (403,)),
    ("GET", f"/{TOKEN}/state", (HOST, "Sec-Fetch-Site: cross-site"), "", (403,)),
    (
        "GET",
        f"/{TOKEN}/picture/large/0",
        (HOST, "Sec-Fetch-Site: same-site", "Sec-Fetch-Dest: image"),
        "",
        (403,),
    ),
    (
        "GET",
        f"/{TOKEN}/page.js",
        (HOST, "Sec-Fetch-Site: cross-site", "Sec-Fetch-Dest: script"),
        "",
        (403,),
    ),
    (
        "GET",
        f"/{TOKEN}/",
        (HOST, "Sec-Fetch-Site: cross-site", "Sec-Fetch-Dest: iframe"),
        "",
        (403,),
    ),
    ("POST", DECIDE, (HOST, JSON), DECISION, (403,)),
    ("POST", DECIDE, (HOST, JSON, "Origin: null"), DECISION, (403,)),
    ("POST", DECIDE, (HOST, JSON, "Origin: http://evil.example"), DECISION, (403,)),
    ("POST", DECIDE, (HOST, JSON, "Origin: https://127.0.0.1:PORT"), DECISION, (403,)),
    ("POST", DECIDE, (HOST, JSON, "Origin: http://127.0.0.1"), DECISION, (403,)),
    ("POST", DECIDE, (HOST, JSON, "Origin: http://127.0.0.1:1"), DECISION, (403,)),
    ("POST", DECIDE, (HOST, JSON, "Origin: http://localhost:PORT"), DECISION, (403,)),
    ("POST", DECIDE, (HOST, JSON, ORIGIN, "Origin: http://evil.example"), DECISION, (403,)),
    ("POST", DECIDE, (*WRITE, "Sec-Fetch-Site: cross-site"), DECISION, (403,)),
    (
        "POST",
        DECIDE,
        (*WRITE, "Sec-Fetch-Site: cross-site", "Sec-Fetch-Dest: document"),
        DECISION,
        (403,),
    ),
    (
        "OPTIONS",
        DECIDE,
        (HOST, "Origin: http://evil.example", "Access-Control-Request-Method: POST"),
        "",
        (403, 405),
    ),
    # what a form of another site can send
    ("POST", DECIDE, (HOST, ORIGIN, "Content-Type: text/plain"), DECISION, (415,)),
    (
        "POST",
        DECIDE,
        (HOST, ORIGIN, "Content-Type: application/x-www-form-urlencoded"),
        DECISION,
        (415,),
    ),
    ("POST", DECIDE, (HOST, ORIGIN), DECISION, (415,)),
    # writes by other methods
    ("GET", f"{DECIDE}?index=0&decision=drop&seen=0&key=k", (HOST,), "", (405,)),
    ("HEAD", DECIDE, (HOST,), "", (405,)),
    ("PUT", DECIDE, WRITE, DECISION, (405,)),
    ("DELETE", DECIDE, WRITE, "", (405,)),
    ("PATCH", DECIDE, WRITE, DECISION, (405,)),
    ("TRACE", DECIDE, (HOST,), "", (405,)),
    ("POST", f"/{TOKEN}/state", WRITE, DECISION, (405,)),
    ("POST", f"/{TOKEN}/", (*WRITE, "X-HTTP-Method-Override: GET"), DECISION, (405,)),
    # paths instead of numbers
    ("GET", f"/{TOKEN}/../../etc/passwd", (HOST,), "", (404,)),
    ("GET", f"/{TOKEN}/..%2f..%2fetc%2fpasswd", (HOST,), "", (404,)),
    ("GET", f"/{TOKEN}/picture/large/../../../etc/passwd", (HOST,), "", (404,)),
    ("GET", f"/{TOKEN}/picture/large/%2fetc%2fpasswd", (HOST,), "", (404,)),
    ("GET", f"/{TOKEN}/picture/large/-1", (HOST,), "", (404,)),
    ("GET", f"/{TOKEN}/picture/large/1347", (HOST,), "", (404,)),
    ("GET", f"/{TOKEN}/picture/large/{'9' * 400}", (HOST,), "", (404,)),
    ("GET", f"/{TOKEN}/picture/large/{'9' * 5000}", (HOST,), "", (404, 500)),
    ("GET", f"/{TOKEN}/picture/large/1e1", (HOST,), "", (404,)),
    ("GET", f"/{TOKEN}/picture/large/0%00.png", (HOST,), "", (404,)),
    ("GET", f"/{TOKEN}/picture/large/audit.csv", (HOST,), "", (404,)),
    ("GET", f"/{TOKEN}/example/99999999", (HOST,), "", (404,)),
    ("GET", f"/{TOKEN}/page/page.js", (HOST,), "", (404,)),
    ("GET", f"/{TOKEN}/server.py", (HOST,), "", (404,)),
    ("GET", f"/{TOKEN}/corrections.csv", (HOST,), "", (404,)),
    # bodies
    ("POST", DECIDE, (*WRITE, "Content-Length: 1000000000"), "{", (413,)),
    ("POST", DECIDE, (*WRITE, f"Content-Length: {MOST_BYTES + 1}"), "{", (413,)),
    ("POST", DECIDE, (*WRITE, "Content-Length: -1"), "{", (400, 413)),
    ("POST", DECIDE, (*WRITE, f"Content-Length: {'9' * 5000}"), "{", (400, 413)),
    ("POST", DECIDE, (*WRITE, "Content-Length: 5", "Content-Length: 6"), "{", (400, 413)),
    ("POST", DECIDE, WRITE, "", (400,)),
    ("POST", DECIDE, WRITE, "null", (400,)),
    ("POST", DECIDE, WRITE, "{" * 5000, (400,)),
    ("POST", DECIDE, WRITE, "[" * 200_000, (400,)),
    ("POST", DECIDE, WRITE, DECISION[:-1], (400,)),
    ("POST", DECIDE, WRITE, DECISION.replace('"index": 0', '"index": 1e999'), (400,)),
    ("POST", DECIDE, WRITE, DECISION.replace('"index": 0', f'"index": {"9" * 5000}'), (400,)),
    ("POST", DECIDE, WRITE, DECISION.replace('"index": 0', '"index": "../0"'), (400,)),
    ("POST", DECIDE, WRITE, DECISION.replace("drop", "erase"), (400,)),
    # what is no request
    ("GET", "/" + "a" * 100_000, (HOST,), "", (400, 403)),
    ("NONSENSE", f"/{TOKEN}/state", (HOST,), "", (400, 405)),
]


@pytest.fixture(scope="module")
def served(original):
    with serving(original) as page:
        yield page


def send(port, content, wait=5.0):
    """What is answered until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as line:
        line.sendall(content)
        answer = b""
        while chunk := _received(line):
            answer += chunk
    return answer


def _received(line):
    try:
        return line.recv(65536)
    # It was closed while more was on its way.
    except ConnectionResetError:
        return b""


def request(port, method, target, headers, body):
    lines = [f"{method} {target} HTTP/1.1", *headers]
    if body and not any(line.lower().startswith("content-length") for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", body]).replace("PORT", str(port)).encode()


def test_the_table_is_long_enough():
    assert len(REFUSED) >= 60
    assert len({case[:4] for case in REFUSED}) == len(REFUSED)


@pytest.mark.parametrize(
    "case", REFUSED, ids=[f"{number}-{case[0]}" for number, case in enumerate(REFUSED)]
)
def test_what_is_not_from_the_page_is_refused_and_changes_nothing(served, original, case):
    answer = send(served.port, request(served.port, *case[:4]))
    status = int(answer.split(b" ", 2)[1])
    assert status in case[4], answer[:200]
    assert b"root:" not in answer
    assert TOKEN.encode() not in answer
    assert not (original / "corrections.csv").exists()
    assert served.session.changes(0)["version"] == 0


def test_the_page_itself_is_answered(run):
    with serving(run) as page:
        for name in (b"127.0.0.1", b"localhost"):
            content = request(page.port, "GET", f"/{TOKEN}/state", (HOST,), "").replace(
                b"127.0.0.1", name
            )
            assert send(page.port, content).startswith(b"HTTP/1.1 200")
        followed = (HOST, "Sec-Fetch-Site: cross-site", "Sec-Fetch-Dest: document")
        assert send(page.port, request(page.port, "GET", f"/{TOKEN}/", followed, "")).startswith(
            b"HTTP/1.1 200"
        )
        assert send(page.port, request(page.port, "POST", DECIDE, WRITE, DECISION)).startswith(
            b"HTTP/1.1 200"
        )
        assert page.session.changes(0)["version"] == 1


def test_a_body_without_a_length_is_read_up_to_the_limit(served, original):
    head = request(served.port, "POST", DECIDE, (*WRITE, "Transfer-Encoding: chunked"), "")
    chunk = b"10000\r\n" + b"[" * 65536 + b"\r\n"
    try:
        answer = send(served.port, head + chunk * 20)
    # It stopped listening in the middle.
    except (BrokenPipeError, ConnectionResetError):
        answer = b"HTTP/1.1 413"
    assert b" 413 " in answer[:20] + b" "
    assert not (original / "corrections.csv").exists()


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"GET /" + TOKEN.encode(),
        f"GET /{TOKEN}/state HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nX-Slow: ".encode(),
        f"POST {DECIDE} HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nOrigin: http://127.0.0.1:PORT\r\n"
        f"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode(),
    ],
)
def test_a_slow_client_delays_no_other_and_is_disconnected(run, monkeypatch, beginning):
    with serving(run) as page:
        content = beginning.replace(b"PORT", str(page.port).encode())
        for limit in (60.0, 0.2):
            monkeypatch.setattr(server_module, "LONGEST", limit)
            monkeypatch.setattr(server_module, "LONGEST_BODY", limit / 2)
            with socket.create_connection(("127.0.0.1", page.port), timeout=30) as slow:
                slow.sendall(content)
                assert page.ask("GET", "state").status == 200
                while limit < 1 and _received(slow):
                    pass


def test_only_this_machine_is_listened_to(served):
    with socket.socket() as other:
        other.settimeout(2)
        try:
            own = socket.gethostbyname(socket.gethostname())
        except OSError:
            own = "127.0.0.1"
        if own.startswith("127."):
            # Every address of 127/8 is this machine, but one only is listened to.
            own = "127.0.0.2"
        assert other.connect_ex((own, served.port)) != 0


def test_every_answer_says_what_a_browser_may_do_with_it(served):
    for path, status in (
        ("", 200),
        ("state", 200),
        ("picture/large/0", 200),
        ("nothing", 404),
        ("page.js", 200),
    ):
        answer = served.ask("GET", path)
        assert answer.status == status
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["server"] is None
        assert "access-control-allow-origin" not in answer.headers
        is_picture = path.startswith("picture")
        assert ("no-store" in answer.headers["cache-control"]) == (not is_picture)
