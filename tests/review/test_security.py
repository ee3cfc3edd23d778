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


def state(*headers):
    return "GET", f"/{TOKEN}/state", headers, ""


def get(target, *headers):
    return "GET", target, (HOST, *headers), ""


def post(*headers, body=DECISION, method="POST", target=DECIDE):
    return method, target, headers, body


def asked(old, new):
    return post(*WRITE, body=DECISION.replace(old, new))


CROSS, PICTURE = "Sec-Fetch-Site: cross-site", f"/{TOKEN}/picture/large"
# What is sent (method, target, headers, body), by the answers that are right.
REFUSED = {
    # another name for this machine: a name of others that was made to point here
    (421,): [
        state("Host: evil.example"),
        state("Host: evil.example:PORT"),
        state("Host: 127.0.0.1"),
        state("Host: 127.0.0.2:PORT"),
        state("Host: 0.0.0.0:PORT"),
        state("Host: localhost.evil.example:PORT"),
        state("Host: evil.example", "X-Forwarded-Host: 127.0.0.1:PORT"),
        post("Host: evil.example", ORIGIN, JSON),
    ],
    # or no name at all
    (400, 421): [state("Host: user@127.0.0.1:PORT"), state(), state(HOST, "Host: evil.example")],
    # no token, or not this one; another site; what another site may send
    (403,): [
        get("/"),
        get("/state"),
        get("//state"),
        get("/picture/large/0"),
        get("/page.js"),
        get(f"/{TOKEN}"),
        get(f"/{TOKEN[:-1]}/state"),
        get(f"/{TOKEN}x/state"),
        get(f"/{TOKEN.upper()}/state"),
        get(f"/x/{TOKEN}/state"),
        get(f"/state?token={TOKEN}"),
        get("/state", f"Cookie: token={TOKEN}"),
        post(*WRITE, target="/decide"),
        get(f"/{TOKEN}/state", "Origin: http://evil.example"),
        get(f"/{TOKEN}/state", CROSS),
        get(f"{PICTURE}/0", "Sec-Fetch-Site: same-site", "Sec-Fetch-Dest: image"),
        get(f"/{TOKEN}/", CROSS, "Sec-Fetch-Dest: iframe"),
        post(HOST, JSON),
        post(HOST, JSON, "Origin: null"),
        post(HOST, JSON, "Origin: http://evil.example"),
        post(HOST, JSON, "Origin: https://127.0.0.1:PORT"),
        post(HOST, JSON, "Origin: http://127.0.0.1:1"),
        post(HOST, JSON, "Origin: http://localhost:PORT"),
        post(HOST, JSON, ORIGIN, "Origin: http://evil.example"),
        post(*WRITE, CROSS, "Sec-Fetch-Dest: document"),
    ],
    (400, 403): [get("/%C3%28/state"), get(f"http://127.0.0.1:PORT/{TOKEN}/state")],
    (403, 405): [post(HOST, "Origin: http://evil.example", method="OPTIONS", body="")],
    # what a form of another site can send
    (415,): [post(HOST, ORIGIN, "Content-Type: text/plain"), post(HOST, ORIGIN)],
    # writes by other methods
    (405,): [
        get(f"{DECIDE}?index=0&decision=drop&seen=0&key=k"),
        post(*WRITE, method="PUT"),
        post(*WRITE, target=f"/{TOKEN}/state"),
        post(*WRITE, "X-HTTP-Method-Override: GET", target=f"/{TOKEN}/"),
    ],
    # paths instead of numbers
    (404,): [
        get(f"/{TOKEN}/../../etc/passwd"),
        get(f"/{TOKEN}/..%2f..%2fetc%2fpasswd"),
        get(f"{PICTURE}/%2fetc%2fpasswd"),
        get(f"{PICTURE}/-1"),
        get(f"{PICTURE}/1347"),
        get(f"{PICTURE}/{'9' * 400}"),
        get(f"{PICTURE}/1e1"),
        get(f"{PICTURE}/0%00.png"),
        get(f"/{TOKEN}/page/page.js"),
        get(f"/{TOKEN}/corrections.csv"),
    ],
    # bodies
    (413,): [post(*WRITE, f"Content-Length: {MOST_BYTES + 1}", body="{")],
    (400, 413): [
        post(*WRITE, "Content-Length: -1", body="{"),
        post(*WRITE, f"Content-Length: {'9' * 5000}", body="{"),
        post(*WRITE, "Content-Length: 5", "Content-Length: 6", body="{"),
    ],
    (400,): [
        post(*WRITE, body=""),
        post(*WRITE, body="null"),
        post(*WRITE, body="[" * 200_000),
        post(*WRITE, body=DECISION[:-1]),
        asked('"index": 0', '"index": 1e999'),
        asked('"index": 0', f'"index": {"9" * 5000}'),
        asked('"index": 0', '"index": "../0"'),
        asked("drop", "erase"),
    ],
    # what is no request
    (400, 403, 405): [get("/" + "a" * 100_000), ("NONSENSE", f"/{TOKEN}/state", (HOST,), "")],
}


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


@pytest.mark.parametrize("right", REFUSED, ids=str)
def test_what_is_not_from_the_page_is_refused_and_changes_nothing(served, original, right):
    for case in REFUSED[right]:
        answer = send(served.port, request(served.port, *case))
        assert int(answer.split(b" ", 2)[1]) in right, (case, answer[:200])
        assert b"root:" not in answer
        assert TOKEN.encode() not in answer
        assert not (original / "corrections.csv").exists()
        assert served.session.changes(0)["version"] == 0


def test_the_page_itself_is_answered(run):
    with serving(run) as page:
        followed = get(f"/{TOKEN}/", CROSS, "Sec-Fetch-Dest: document")
        local = state("Host: localhost:PORT")
        for case in (state(HOST), local, followed, post(*WRITE)):
            assert send(page.port, request(page.port, *case)).startswith(b"HTTP/1.1 200")
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
    known = dict.fromkeys(("", "state", "picture/large/0", "page.js"), 200)
    for path, status in (*known.items(), ("nothing", 404)):
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
