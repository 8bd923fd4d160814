"""Where the bytes of an image come from: OpenAI content parts with data URLs, allowed files or allowed servers.

Nothing outside the request is read unless the operator allowed it: no directory and no remote origin is open by
default. Decoding is `image_processing`.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import http.client
import os
import stat
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from v41jax.image_planning import ImageError
from v41jax.image_processing import DEFAULT_LIMITS, ImageLimits

IMAGE_PART_TYPES = ("image_url", "input_image", "image")
"""Content part types that give an image (protocol specification, "Preprocessing, in order", content lists)."""

REMOTE_PORTS = {"http": 80, "https": 443}


@dataclasses.dataclass(frozen=True)
class ImageSources:
    """What the operator lets a request read.

    Attributes:
      directories: files below these may be named by `file:` URLs; symbolic links are resolved first.
      remote_origins: `scheme://host[:port]` of servers that images may be fetched from; none by default. Redirects are
        not followed, so that an allowed server cannot send the fetch elsewhere.
      remote_timeout_s: seconds a fetch may wait for the server at a time.
      max_images: images of one request.
      limits: cost of one image.
    """

    directories: tuple[Path, ...] = ()
    remote_origins: frozenset[str] = frozenset()
    remote_timeout_s: float = 10.0
    max_images: int = 32
    limits: ImageLimits = DEFAULT_LIMITS

    def __post_init__(self) -> None:
        faults = [f"{origin!r} is no origin" for origin in self.remote_origins if _origin(origin) != origin]
        faults += [f"{str(path)!r} is no directory" for path in self.directories if not path.is_dir()]
        if faults:
            raise ImageError(
                f"image sources: {'; '.join(faults)}; write scheme://host[:port] in lower case and existing directories"
            )


def load_images(parts: Iterable[Mapping[str, Any]], sources: ImageSources) -> list[bytes]:
    """Reads the images of a request.

    Args:
      parts: its image content parts, in rendered order.
      sources: what may be read.

    Returns:
      the encoded bytes of each, at most `sources.limits.max_bytes` long.

    Raises:
      ImageError: too many images, or every image that cannot be read, by number, in one message.
    """
    parts = list(parts)
    if len(parts) > sources.max_images:
        raise ImageError(f"the request has {len(parts)} images; at most {sources.max_images} are accepted")
    images, faults = [], []
    for number, part in enumerate(parts):
        try:
            images.append(load_image(image_url(part), sources))
        except ImageError as error:
            faults.append(f"image {number}: {error}")
    if faults:
        raise ImageError("; ".join(faults))
    return images


def image_url(part: Mapping[str, Any]) -> str:
    """The URL of an image content part: `image_url` (a string or an object with `url`), `url` or `image`.

    Raises:
      ImageError: not an image part, or no such string in it.
    """
    if part.get("type") not in IMAGE_PART_TYPES:
        raise ImageError(f"content part type {part.get('type')!r} is no image; expected one of {IMAGE_PART_TYPES}")
    for key in ("image_url", "url", "image"):
        value = part.get(key)
        if isinstance(value, Mapping):
            value = value.get("url")
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ImageError(
                    f"the image URL contains a lone surrogate, which is not text: {error.reason}"
                ) from error
            return value
    raise ImageError("the image part has no URL; give image_url as a string or as an object with url")


def load_image(url: str, sources: ImageSources) -> bytes:
    """Reads the bytes behind one URL: `data:`, `file:`, `http:` or `https:`.

    Raises:
      ImageError: a scheme or place that is not allowed, a malformed URL, a missing file, or too many bytes. The message
        for a path outside the allowed directories does not depend on whether the file exists.
    """
    scheme = url.partition(":")[0].lower()
    limit = sources.limits.max_bytes
    if scheme == "data":
        return _data_url(url, limit)
    if scheme == "file":
        return _file_url(url, sources.directories, limit)
    if scheme in REMOTE_PORTS:
        return _remote_url(url, sources)
    raise ImageError(f"image URLs of scheme {scheme[:20]!r} are not accepted; send a data: URL")


def _data_url(url: str, limit: int) -> bytes:
    header, comma, payload = url[len("data:") :].partition(",")
    media_type, *parameters = header.split(";")
    if not comma or not media_type.lower().startswith("image/") or "base64" not in (p.lower() for p in parameters):
        raise ImageError("the data: URL must read data:image/<type>;base64,<data>")
    characters = urllib.parse.unquote_to_bytes(payload)
    size = len(characters) // 4 * 3  # two more than the data has, at most
    if size > limit + 2:
        raise ImageError(f"the data: URL holds about {size} bytes; at most {limit} are accepted")
    try:
        return _limited(base64.b64decode(characters, validate=True), limit)
    except binascii.Error as error:
        raise ImageError(f"the data: URL is not valid base64: {error}") from error


def _file_url(url: str, directories: tuple[Path, ...], limit: int) -> bytes:
    parsed = _split(url)
    if parsed.netloc not in ("", "localhost") or parsed.query or parsed.fragment:
        raise ImageError("a file: URL must read file:///absolute/path, special characters percent-encoded")
    path = urllib.parse.unquote(parsed.path)
    if not directories:
        raise ImageError("file: images are switched off; send a data: URL or allow a directory of images")
    refusal = ImageError("the file is not below a directory that images may be read from")
    if not path.startswith("/") or "\0" in path:
        raise refusal
    try:
        resolved = Path(path).resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise refusal from error
    for directory in (candidate.resolve() for candidate in directories):
        if resolved != directory and resolved.is_relative_to(directory):
            return _read_below(directory, resolved.relative_to(directory), limit)
    raise refusal


def _read_below(directory: Path, relative: Path, limit: int) -> bytes:
    """Reads a regular file without following any link below `directory`.

    The path was resolved before; walking it again link-free closes the gap in which a component could be exchanged.
    """
    handle = -1
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        for depth, name in enumerate(relative.parts):
            last = depth == len(relative.parts) - 1
            # Non-blocking: opening a pipe would wait for its writer.
            flags = os.O_RDONLY | os.O_NOFOLLOW | (os.O_NONBLOCK if last else os.O_DIRECTORY)
            parent, handle = handle, os.open(name, flags, dir_fd=handle)
            os.close(parent)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ImageError(f"{relative.name!r} is no regular file")
        with open(handle, "rb", closefd=False) as file:
            return _read_limited(file, limit)
    except OSError as error:
        raise ImageError(f"the image file {relative.name!r} cannot be read: {error.strerror}") from error
    finally:
        if handle >= 0:
            os.close(handle)


def _remote_url(url: str, sources: ImageSources) -> bytes:
    if not sources.remote_origins:
        raise ImageError("fetching remote images is switched off; send the image as a data: URL")
    origin = _origin(url)
    if origin is None or origin not in sources.remote_origins:
        raise ImageError(f"images may not be fetched from {origin or 'this URL'}; send a data: URL")
    opener = urllib.request.build_opener(_NoRedirect())
    try:
        with opener.open(url, timeout=sources.remote_timeout_s) as response:
            return _read_limited(response, sources.limits.max_bytes)
    except ImageError:
        raise
    except (OSError, ValueError, http.client.HTTPException) as error:  # refused, timed out, or malformed replies
        raise ImageError(f"the image could not be fetched from {origin}: {error}") from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: object, **kwargs: object) -> None:
        """Refuses: the response then counts as an error."""


def _origin(url: str) -> str | None:
    """`scheme://host[:port]` in lower case without a default port; None for other schemes or with credentials."""
    try:
        parsed = _split(url)
        port = parsed.port
    except (ImageError, ValueError):
        return None
    if parsed.scheme not in REMOTE_PORTS or not parsed.hostname or "@" in parsed.netloc:
        return None
    host = f"[{parsed.hostname}]" if ":" in parsed.hostname else parsed.hostname
    suffix = "" if port in (None, REMOTE_PORTS[parsed.scheme]) else f":{port}"
    return f"{parsed.scheme}://{host}{suffix}"


def _split(url: str) -> urllib.parse.SplitResult:
    # `urlsplit` drops tabs and newlines silently; whoever reads the URL next may not.
    if any(ord(character) <= 32 or ord(character) == 127 for character in url):
        raise ImageError("the image URL contains spaces or control characters; percent-encode them")
    try:
        return urllib.parse.urlsplit(url)
    except ValueError as error:
        raise ImageError(f"the image URL is malformed: {error}") from error


def _read_limited(file: IO[bytes], limit: int) -> bytes:
    return _limited(file.read(limit + 1), limit)


def _limited(data: bytes, limit: int) -> bytes:
    if len(data) > limit:
        raise ImageError(f"the image file has more than {limit} bytes, the most accepted")
    return data
