"""Strict request parsing that does not depend on chunk boundaries."""

from __future__ import annotations

import contextlib
import itertools

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.api.http import HttpRefusal
from potluck.gateway.http.limits import HttpLimits
from potluck.gateway.http.parser import SINGLE_FIELDS, RequestReader

SMALL = HttpLimits(line_bytes=200, head_bytes=600, fields=8, body_bytes=500)
HOST = b"Host: here\r\n"
GET, POST = b"GET / HTTP/1.1\r\n" + HOST, b"POST / HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"

Seen = list[tuple[object, ...]]


def read_requests(pieces: list[bytes], limits: HttpLimits = SMALL) -> tuple[Seen, bool]:
    """The requests that came whole, and whether a refusal came after them."""
    reader, seen = RequestReader(limits), []
    try:
        for piece in pieces:
            reader.feed(piece)
            while (got := reader.take()) is not None:
                seen.append(
                    (
                        got.method,
                        got.path,
                        got.query,
                        dict(got.headers),
                        got.http_1_1,
                        got.keep_alive,
                        got.body,
                    )
                )
    except HttpRefusal:
        return seen, True
    return seen, False


def refusal(data: bytes, limits: HttpLimits = SMALL) -> HttpRefusal:
    reader = RequestReader(limits)
    reader.feed(data)
    with pytest.raises(HttpRefusal) as caught:
        reader.take()
    assert str(caught.value)
    return caught.value


def chunked_at(data: bytes, places: list[int]) -> list[bytes]:
    marks = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(marks)]


SMUGGLED = {
    "both lengths": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde",
    "equal lengths": POST + b"Content-Length: 4\r\nContent-Length: 4\r\n\r\nabcd",
    "a list of lengths": POST + b"Content-Length: 4, 4\r\n\r\nabcd",
    "a signed length": POST + b"Content-Length: +4\r\n\r\nabcd",
    "a hex length": POST + b"Content-Length: 0x4\r\n\r\nabcd",
    "an empty length": POST + b"Content-Length:\r\n\r\nabcd",
    "another digit": "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: ٤\r\n\r\nabcd".encode(),
    "another coding": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "an odd coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "two codings": POST + b"Transfer-Encoding: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked in 1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "space before colon": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "tab before colon": POST + b"Content-Length\t: 4\r\n\r\nabcd",
    "tab after the colon": POST + b"Transfer-Encoding:\tchunked\r\n\r\n0\r\n\r\n",
    "tab after the coding": POST + b"Transfer-Encoding: chunked\t\r\n\r\n0\r\n\r\n",
    "tab before a length": POST + b"Content-Length:\t4\r\n\r\nabcd",
    "a length in a trailer": CHUNKED + b"0\r\nContent-Length: 4\r\n\r\n",
    "folded": POST + b"X: a\r\n b\r\nContent-Length: 4\r\n\r\nabcd",
    "folded at once": b"POST / HTTP/1.1\r\n Host: here\r\n\r\n",
    "bare LF": b"GET / HTTP/1.1\nHost: here\n\n",
    "bare LF in a header": GET + b"X: a\nContent-Length: 4\r\n\r\nabcd",
    "bare CR in a header": GET + b"X: a\rContent-Length: 4\r\n\r\nabcd",
    "NUL": GET + b"X: a\0b\r\n\r\n",
    "NUL in a name": GET + b"X\0: b\r\n\r\n",
    "two hosts": GET + HOST + b"\r\n",
    "no host": b"GET / HTTP/1.1\r\nX: y\r\n\r\n",
    "no name": GET + b": y\r\n\r\n",
    "no colon": GET + b"nothing\r\n\r\n",
    "absolute form without host": b"GET http:///x HTTP/1.1\r\n" + HOST + b"\r\n",
    "absolute form with empty host": b"GET http://:80/x HTTP/1.1\r\n" + HOST + b"\r\n",
    "absolute form of another scheme": b"GET ftp://there/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "absolute form without slashes": b"GET http:there HTTP/1.1\r\n" + HOST + b"\r\n",
    "absolute form with userinfo": b"GET http://me:word@there/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "absolute form with a bad port": b"GET http://there:99999/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "absolute form with an odd host": b"GET http://th<ere/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "absolute form with a bad address": b"GET http://[::1/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "absolute form with a fragment": b"GET http://there/#a HTTP/1.1\r\n" + HOST + b"\r\n",
    "absolute form without the Host header": b"GET http://there/ HTTP/1.1\r\n\r\n",
    "absolute form with two Host headers": b"GET http://there/ HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
    "absolute form of CONNECT": b"CONNECT http://there/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "authority form of GET": b"GET there:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "authority form": b"CONNECT there:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "a star": b"GET * HTTP/1.1\r\n" + HOST + b"\r\n",
    "two spaces": b"GET  / HTTP/1.1\r\n" + HOST + b"\r\n",
    "a space in the path": b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n",
    "no version": b"GET /\r\n" + HOST + b"\r\n",
    "another version": b"GET / HTTP/2.0\r\n" + HOST + b"\r\n",
    "a long version": b"GET / HTTP/1.10\r\n" + HOST + b"\r\n",
    "a bad size": CHUNKED + b"0x4\r\nabcd\r\n0\r\n\r\n",
    "a negative size": CHUNKED + b"-4\r\nabcd\r\n0\r\n\r\n",
    "a huge size": CHUNKED + b"f" * 17 + b"\r\n",
    "a short size": CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n",
    "LF after a size": CHUNKED + b"4\nabcd\r\n0\r\n\r\n",
    "LF after a chunk": CHUNKED + b"4\r\nabcd\n0\r\n\r\n",
    "CR in an extension": CHUNKED + b"4;a\rb\r\nabcd\r\n0\r\n\r\n",
    "a bad trailer": CHUNKED + b"0\r\nnothing\r\n\r\n",
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.mark.parametrize("data", SMUGGLED.values(), ids=SMUGGLED.keys())
def test_ambiguous_messages_are_refused_for_any_chunking(data: bytes) -> None:
    assert read_requests([data]) == ([], True)
    assert read_requests([data[i : i + 1] for i in range(len(data))]) == ([], True)
    assert refusal(data).status in (400, 501, 505)


ABSOLUTE = {
    b"GET http://there:80/v1/models": (b"/v1/models", b"", b"there:80"),
    b"GET HTTP://There/v1/x?a=b?c/": (b"/v1/x", b"a=b?c/", b"There"),
    b"POST https://there/a//b": (b"/a//b", b"", b"there"),
    b"GET http://there": (b"/", b"", b"there"),
    b"GET http://there:": (b"/", b"", b"there:"),
    b"GET http://there?a=b": (b"/", b"a=b", b"there"),
    b"GET http://[::1]:8000/x": (b"/x", b"", b"[::1]:8000"),
    b"GET http://there/http://else/": (b"/http://else/", b"", b"there"),
    b"OPTIONS http://there": (b"*", b"", b"there"),
    b"OPTIONS http://there/": (b"/", b"", b"there"),
    b"OPTIONS http://there?a=b": (b"/", b"a=b", b"there"),
}


@pytest.mark.parametrize("line", ABSOLUTE)
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_absolute_form_target_gives_path_and_replaces_host(line: bytes, version: bytes) -> None:
    path, query, host = ABSOLUTE[line]
    plain = b"GET /x HTTP/1.1\r\n" + HOST + b"\r\n"
    data = line + b" HTTP/" + version + b"\r\nHost: here\r\nX: y\r\nConnection: keep-alive\r\n\r\n"
    expected = (line.split()[0], path, query, {b"host": host, b"x": b"y", b"connection": b"keep-alive"})
    for pieces in ([data + plain], [data[i : i + 1] for i in range(len(data))] + [plain]):
        seen, refused = read_requests(pieces)
        assert not refused
        assert seen[0][:4] == expected
        if version == b"1.1":
            assert seen[1][1:4] == (b"/x", b"", {b"host": b"here"}), "the next request has its own host"


def test_absolute_form_target_counts_against_the_line_limit() -> None:
    assert refusal(b"GET http://there/" + b"a" * 300 + b" HTTP/1.1\r\n" + HOST + b"\r\n").status == 414


NAMES = [*b"TE\t|TE | TE|\tTE|T E|T\tE|TE\x0b|TE\xa0|(TE)||Transfer-Encoding\t".split(b"|")]


@pytest.mark.parametrize("name", NAMES)
def test_header_name_with_white_space_is_refused_before_the_head_ends(name: bytes) -> None:
    """Nobody waits for the rest of what can never be read."""
    begun = POST + name + b": chunked"
    assert refusal(begun).status == 400
    assert read_requests([begun[i : i + 1] for i in range(len(begun))]) == ([], True)
    later = POST + b"X: a b\tc: d\r\nTE"
    assert read_requests([later]) == ([], False)
    assert read_requests([later, b"\t"]) == ([], True)
    assert read_requests([later, b"\r\n"]) == ([], True)


def test_oversized_line_head_and_body_are_refused_with_different_statuses() -> None:
    assert refusal(b"GET /" + b"a" * 300 + b" HTTP/1.1\r\n" + HOST + b"\r\n").status == 414
    assert refusal(b"G" * 300).status == 414
    assert refusal(GET + b"x: y\r\n" * 8 + b"\r\n").status == 431
    assert refusal(GET + b"x: " + b"y" * 600 + b"\r\n\r\n").status == 431
    assert refusal(GET + b"x: " + b"y" * 600).status == 431
    assert refusal(POST + b"Content-Length: 501\r\n\r\n").status == 413
    chunk = b"7f\r\n" + b"x" * 127 + b"\r\n"
    assert refusal(CHUNKED + chunk * 5).status == 413
    assert refusal(POST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n").status == 400
    assert refusal(POST + b"Content-Length: 4\r\nExpect: wine\r\n\r\n").status == 417


def test_body_at_the_size_limit_is_accepted() -> None:
    head = b"POST /a?b=c HTTP/1.1\r\n" + HOST
    seen, refused = read_requests([head + b"Content-Length: 500\r\n\r\n" + b"x" * 500])
    assert not refused
    assert seen[0][-1] == b"x" * 500
    assert seen[0][:3] == (b"POST", b"/a", b"b=c")


def test_continue_is_sent_only_while_the_body_has_not_arrived() -> None:
    head = POST + b"Content-Length: 4\r\nExpect: 100-Continue\r\n\r\n"
    reader = RequestReader(SMALL)
    reader.feed(head)
    assert reader.take() is None
    assert reader.awaits_continue
    reader.feed(b"abcd")
    got = reader.take()
    assert got is not None
    assert got.body == b"abcd"
    assert not reader.awaits_continue
    reader.feed(head + b"ab")
    assert reader.take() is None
    assert not reader.awaits_continue


@pytest.mark.parametrize(
    ("version", "said", "stays"),
    [
        (b"1.1", b"", True),
        (b"1.1", b"Connection: close\r\n", False),
        (b"1.1", b"Connection: foo, Close\r\n", False),
        (b"1.1", b"Connection: keep-alive\r\n", True),
        (b"1.0", b"", False),
        (b"1.0", b"Connection: keep-alive\r\n", False),
    ],
)
def test_connection_persistence_follows_version_and_header(version: bytes, said: bytes, stays: bool) -> None:
    seen, _ = read_requests([b"GET / HTTP/" + version + b"\r\n" + HOST + said + b"\r\n"])
    assert seen[0][5] is stays


def test_repeated_header_field_is_joined_or_refused() -> None:
    seen, _ = read_requests([GET + b"X-A: 1\r\nx-a: 2\r\n\r\n"])
    assert seen[0][3] == {b"host": b"here", b"x-a": b"1, 2"}
    for name in SINGLE_FIELDS - {b"host"}:
        assert refusal(GET + name + b": 1\r\n" + name.upper() + b": 1\r\n\r\n").status == 400


# Properties.

names = st.sampled_from([b"X-A", b"Accept", b"user-agent", b"Expect"])
values = st.sampled_from([b"", b"a", b" a b ", b"100-continue", "é".encode(), b"a:b"])
bodies = st.binary(max_size=40)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    head = (
        draw(st.sampled_from([b"GET /", b"POST /v1/x?a=b", b"HEAD /", b"OPTIONS *"]))
        + b" HTTP/1.1\r\n"
        + HOST
    )
    for name, value in draw(st.dictionaries(names, values, max_size=3)).items():
        head += name + b": " + value + b"\r\n"
    body = draw(bodies)
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return head + b"\r\n"
    if kind == 1:
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    chunks = b""
    for piece in chunked_at(body, draw(st.lists(st.integers(0, 40), max_size=4))):
        chunks += (
            b"%x%b\r\n%b\r\n" % (len(piece), draw(st.sampled_from([b"", b";a=b"])), piece) if piece else b""
        )
    return (
        head
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + chunks
        + b"0\r\n"
        + draw(st.sampled_from([b"", b"T: u\r\n"]))
        + b"\r\n"
    )


@st.composite
def damaged_messages(draw: st.DrawFn) -> bytes:
    """Some messages in a row, with a few bytes changed or not."""
    data = bytearray(b"".join(draw(st.lists(messages(), min_size=1, max_size=4))))
    for at in draw(st.lists(st.integers(0, 10_000), max_size=2)):
        data[at % len(data)] = draw(st.sampled_from(b"\r\n\0 :;,0a\xff"))
    return bytes(data)


@given(damaged_messages(), st.lists(st.integers(0, 10_000), max_size=12))
def test_request_parsing_does_not_depend_on_chunk_boundaries(data: bytes, places: list[int]) -> None:
    assert read_requests(chunked_at(data, places)) == read_requests([data])


class LlhttpOracle:
    """What httptools (llhttp) makes of the same bytes."""

    def __init__(self) -> None:
        self.seen: list[tuple[bytes, bytes, dict[bytes, bytes], bytes]] = []
        self.parser = httptools.HttpRequestParser(self)
        self._url, self._body, self._headers = b"", b"", {}

    def on_message_begin(self) -> None:
        self._url, self._body, self._headers = b"", b"", {}

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._headers[name] = self._headers[name] + b", " + value if name in self._headers else value

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.seen.append((self.parser.get_method(), self._url, self._headers, self._body))


@given(damaged_messages())
def test_parsed_requests_equal_those_of_llhttp(data: bytes) -> None:
    """What we take as whole, llhttp reads in the same way: the same requests in the same places."""
    ours, _ = read_requests([data])
    oracle = LlhttpOracle()
    with contextlib.suppress(httptools.HttpParserError):
        oracle.parser.feed_data(data)
    for mine, theirs in zip(ours, oracle.seen, strict=False):
        target = mine[1] + (b"?" + mine[2] if mine[2] else b"")  # type: ignore[operator]
        assert (mine[0], target, mine[6]) == (theirs[0], theirs[1].rstrip(b"?"), theirs[3])
    methods = {mine[0] for mine in ours}
    ends = [
        place for place, mine in enumerate(ours, 1) if not mine[5]
    ]  # It reads no more on such a connection.
    if b";" not in data and methods <= {
        b"GET",
        b"POST",
        b"HEAD",
        b"OPTIONS",
    }:  # It knows few, reads extensions.
        assert min([len(ours), *ends]) <= len(oracle.seen)


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_invalid_bytes_are_refused_or_awaited(data: bytes, places: list[int]) -> None:
    seen, _ = read_requests(chunked_at(data, places))
    assert seen == []


@given(bodies, st.lists(st.integers(0, 40), max_size=5), st.lists(st.integers(0, 400), max_size=8))
def test_chunked_body_is_returned_unchanged_and_next_request_follows(
    body: bytes, pieces: list[int], places: list[int]
) -> None:
    sent = b"".join(b"%X\r\n%b\r\n" % (len(piece), piece) for piece in chunked_at(body, pieces) if piece)
    data = CHUNKED + sent + b"0\r\n\r\n" + GET + b"\r\n"
    seen, refused = read_requests(chunked_at(data, places))
    assert not refused
    assert [request[-1] for request in seen] == [body, b""]


def test_chunked_body_with_empty_lines_is_read_to_its_end() -> None:
    text = b"a\r\n\r\nGET / HTTP/1.1\r\n\r\n"
    chunks = b"%x\r\n%b\r\n2\r\n\r\n\r\n0\r\nT: u\r\n\r\n" % (len(text), text)
    data = CHUNKED + chunks + GET + b"\r\n"
    for pieces in ([data], [data[i : i + 1] for i in range(len(data))]):
        seen, refused = read_requests(pieces)
        assert not refused
        assert [request[-1] for request in seen] == [text + b"\r\n", b""]


def test_chunk_extensions_much_larger_than_the_body_are_refused() -> None:
    assert refusal(CHUNKED + b"1;" + b"a" * 700).status == 400


@pytest.mark.parametrize(
    "framed",
    [
        b"\r\n",
        b"Content-Length: 4\r\n\r\nabcd",
        b"Transfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n0\r\n\r\n",
    ],
)
def test_upgrade_to_http_2_is_ignored_and_next_request_is_read(framed: bytes) -> None:
    """Java's HTTP client offers the upgrade with its first request."""
    data = POST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n" + framed + GET + b"\r\n"
    for pieces in ([data], [data[i : i + 1] for i in range(len(data))]):
        seen, refused = read_requests(pieces)
        assert not refused
        assert [request[0] for request in seen] == [b"POST", b"GET"]
        assert seen[0][-1] == (b"abcd" if b"abcd" in framed else b"")
