import base64
import http.server
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from v41jax.image_planning import ImageError
from v41jax.image_processing import ImageLimits
from v41jax.image_sources import ImageSources, image_url, load_image, load_images

CLOSED = ImageSources()
SMALL = ImageLimits(max_bytes=100)


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.fixture
def allowed(tmp_path):
    """An allowed directory with an image beside a secret it must not reach."""
    directory = tmp_path / "images"
    (directory / "deep").mkdir(parents=True)
    (directory / "a.png").write_bytes(b"pixels")
    (directory / "deep" / "b c.png").write_bytes(b"deeper")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "images-secret").mkdir()
    (tmp_path / "images-secret" / "x.png").write_bytes(b"secret")
    return directory


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:x", "detail": "high"}},
        {"type": "image_url", "image_url": "data:x"},
        {"type": "input_image", "image_url": "data:x"},
        {"type": "image", "url": "data:x"},
        {"type": "image", "image": "data:x"},
    ],
)
def test_the_url_of_every_accepted_part(part):
    assert image_url(part) == "data:x"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "text", "text": "hello"}, "type 'text' is no image"),
        ({"type": "image_url"}, "has no URL"),
        ({"type": "image_url", "image_url": {"url": 3}}, "has no URL"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,\ud800"}}, "lone surrogate"),
        ({"type": "image", "image": "file:///\ud800"}, "lone surrogate"),
    ],
)
def test_other_parts_are_refused(part, message):
    with pytest.raises(ImageError, match=message):
        image_url(part)


@given(st.binary(max_size=100))
def test_a_data_url_gives_its_bytes(data):
    assert load_image(data_url(data), ImageSources(limits=SMALL)) == data


def test_a_percent_encoded_data_url_is_decoded():
    data = bytes(range(250, 256)) * 3
    assert (
        load_image(data_url(data).replace("+", "%2B").replace("/", "%2F").replace("image%2F", "image/"), CLOSED) == data
    )


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64,@@@", "not valid base64"),
        ("data:image/png;base64,QUJ", "not valid base64"),
        ("data:image/png,abc", "must read data:image"),
        ("data:text/html;base64,QUJD", "must read data:image"),
        ("data:image/png;base64", "must read data:image"),
        (data_url(bytes(101)), r"more than 100 bytes"),
        (data_url(bytes(4000)), r"about 400\d bytes; at most 100"),
        ("ftp://host/a.png", "scheme 'ftp' are not accepted"),
        ("a.png", "are not accepted"),
        ("", "are not accepted"),
        ("FILE:///etc/passwd", "file: images are switched off"),
        ("https://example.org/a.png", "remote images is switched off"),
        ("HTTP://example.org/a.png", "remote images is switched off"),
    ],
)
def test_what_is_refused_by_default(url, message):
    with pytest.raises(ImageError, match=message):
        load_image(url, ImageSources(limits=SMALL))


def test_files_below_an_allowed_directory_are_read(allowed):
    sources = ImageSources(directories=(allowed,))
    assert load_image(f"file://{allowed}/a.png", sources) == b"pixels"
    assert load_image(f"file://localhost{allowed}/deep/b%20c.png", sources) == b"deeper"
    assert load_image(f"file://{allowed}/deep/../a.png", sources) == b"pixels"


def test_links_that_stay_inside_are_followed_and_others_are_not(allowed):
    sources = ImageSources(directories=(allowed,))
    (allowed / "inside.png").symlink_to(allowed / "deep" / "b c.png")
    (allowed / "outside.png").symlink_to(allowed.parent / "secret.png")
    (allowed / "up").symlink_to(allowed.parent)
    assert load_image(f"file://{allowed}/inside.png", sources) == b"deeper"
    for name in ("outside.png", "up/secret.png", "up/images-secret/x.png"):
        with pytest.raises(ImageError, match="not below a directory"):
            load_image(f"file://{allowed}/{name}", sources)


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.png",
        "/%2e%2e/secret.png",
        "/deep/%2e%2e/../../secret.png",
        "/../missing.png",
        "-secret/x.png",
        "",
        "/a.png%00.txt",
    ],
)
def test_no_path_leads_out_and_none_tells_what_exists(allowed, path):
    with pytest.raises(ImageError, match=r"^the file is not below a directory that images may be read from$"):
        load_image(f"file://{allowed}{path}", ImageSources(directories=(allowed,)))


def test_an_allowed_directory_may_itself_be_a_link(allowed, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(allowed)
    assert load_image(f"file://{link}/a.png", ImageSources(directories=(link,))) == b"pixels"


def test_a_file_exchanged_for_a_link_after_the_check_is_not_followed(allowed, monkeypatch):
    victim = allowed / "a.png"
    honest = Path.resolve

    def exchange(self, strict=False):
        resolved = honest(self, strict)
        if self == victim:
            victim.unlink()
            victim.symlink_to(allowed.parent / "secret.png")
        return resolved

    monkeypatch.setattr(Path, "resolve", exchange)
    with pytest.raises(ImageError, match=r"'a\.png' cannot be read"):
        load_image(f"file://{victim}", ImageSources(directories=(allowed,)))


def test_missing_files_directories_pipes_and_loops_are_refused(allowed):
    sources = ImageSources(directories=(allowed,))
    os.mkfifo(allowed / "pipe")
    (allowed / "loop").symlink_to(allowed / "loop")
    for name, message in [
        ("missing.png", r"'missing\.png' cannot be read: No such file"),
        ("deep", "'deep' is no regular file"),
        ("pipe", "'pipe' is no regular file"),
        ("loop", "cannot be read|not below"),
        ("a.png/b", "cannot be read"),
        ("x" * 5000, "cannot be read|not below"),
    ]:
        with pytest.raises(ImageError, match=message):
            load_image(f"file://{allowed}/{name}", sources)


@pytest.mark.parametrize("suffix", ["?x=1", "#y"])
def test_a_file_url_is_only_a_path(allowed, suffix):
    sources = ImageSources(directories=(allowed,))
    for url in (f"file://{allowed}/a.png{suffix}", f"file://otherhost{allowed}/a.png", f"file://{allowed}/a\n.png"):
        with pytest.raises(ImageError, match=r"must read file:///|control characters"):
            load_image(url, sources)


def test_the_byte_limit_holds_for_files(allowed):
    (allowed / "large.png").write_bytes(bytes(101))
    with pytest.raises(ImageError, match="more than 100 bytes"):
        load_image(f"file://{allowed}/large.png", ImageSources(directories=(allowed,), limits=SMALL))


def test_all_faults_of_a_request_are_told_together():
    parts = [{"type": "image_url", "image_url": url} for url in ("ftp://a", data_url(b"ok"), "https://b/c")]
    with pytest.raises(ImageError, match=r"image 0: .*'ftp'.*; image 2: fetching remote"):
        load_images(parts, CLOSED)
    assert load_images(parts[1:2], CLOSED) == [b"ok"]


def test_the_number_of_images_is_limited():
    parts = [{"type": "image_url", "image_url": data_url(b"ok")}] * 3
    with pytest.raises(ImageError, match="has 3 images; at most 2"):
        load_images(parts, ImageSources(max_images=2))


class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = bytes(101) if self.path == "/large" else b"fetched"
        self.send_response({"/missing": 404, "/away": 302}.get(self.path, 200))
        if self.path == "/away":
            self.send_header("Location", "/image")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        """Quiet."""


@pytest.fixture
def origin(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_allowed_origin_is_fetched_within_the_limits(origin):
    sources = ImageSources(remote_origins=frozenset({origin}), limits=SMALL)
    assert load_image(f"{origin}/image", sources) == b"fetched"
    for path, message in [("/large", "more than 100 bytes"), ("/missing", "404"), ("/away", "302")]:
        with pytest.raises(ImageError, match=message):
            load_image(origin + path, sources)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/image",
        "https://images.example.org.evil.test/a",
        "https://images.example.org:8443/a",
        "http://images.example.org/a",
        "https://images.example.org@evil.test/a",
        "https://user:secret@images.example.org/a",
        "https://evil.test\\@images.example.org/a",
        "https://images.example.org:port/a",
        "https://[::1/a",
        "https://images.exam\nple.org/a",
    ],
)
def test_other_origins_are_not_fetched(url):
    with pytest.raises(ImageError, match="may not be fetched from"):
        load_image(url, ImageSources(remote_origins=frozenset({"https://images.example.org"})))


def test_an_allowed_server_that_does_not_answer_is_an_image_error(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    sources = ImageSources(remote_origins=frozenset({"http://127.0.0.1:9"}), remote_timeout_s=2)
    with pytest.raises(ImageError, match=r"could not be fetched from http://127\.0\.0\.1:9"):
        load_image("http://127.0.0.1:9/a.png", sources)


def test_faulty_settings_are_told_together(tmp_path):
    with pytest.raises(ImageError, match=r"'https://x\.org/path' is no origin.*is no directory"):
        ImageSources(directories=(tmp_path / "missing",), remote_origins=frozenset({"https://x.org/path"}))
