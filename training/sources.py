"""Openly licensed English text out of Debian packages: which packages, under which licences, and how each is read.

Nothing here knows about tokens or splits.
"""

from __future__ import annotations

import dataclasses
import gzip
import html
import re
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

Document = tuple[str, str]
"""Name and text."""


@dataclasses.dataclass(frozen=True)
class Source:
    """One Debian package.

    Attributes:
      package: its name.
      licence: of the text used.
      what: for the data card.
      reader: how its files become documents.
      places: globs below the extracted package, or the name of a SWORD module.
      limit: largest share of the corpus, bytes.
    """

    package: str
    licence: str
    what: str
    reader: str
    places: tuple[str, ...]
    limit: int = 16_000_000


SOURCES = (
    Source(
        "r-cran-janeaustenr",
        "public domain (packaging MIT)",
        "the six novels of Jane Austen",
        "r",
        ("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb",),
    ),
    Source("anarchism", "GPL-2", "An Anarchist FAQ", "html", ("usr/share/doc/anarchism/html/*.html",)),
    Source("sword-comm-tdavid", "public domain", "Spurgeon, The Treasury of David", "sword", ("TDavid",)),
    Source("sword-comm-mhcc", "public domain", "Matthew Henry, Concise Commentary", "sword", ("MHCC",)),
    Source("sword-comm-scofield", "public domain", "Scofield Reference Notes, 1917", "sword", ("Scofield",)),
    Source("sword-text-web", "public domain", "World English Bible", "sword", ("engWEB2015eb",)),
    Source("sword-text-kjv", "public domain", "King James Version", "sword", ("engKJV2006eb",)),
    Source(
        "dict-gcide",
        "GPL-3+",
        "GNU Collaborative International Dictionary of English",
        "dict",
        ("usr/share/dictd/*.dict.dz",),
        18_000_000,
    ),
    Source("dict-wn", "WordNet licence", "WordNet 3.0", "dict", ("usr/share/dictd/*.dict.dz",), 6_000_000),
    Source("dict-foldoc", "GFDL-1.1+", "Free On-line Dictionary of Computing", "dict", ("usr/share/dictd/*.dict.dz",)),
    Source("dict-jargon", "public domain", "The Jargon File", "dict", ("usr/share/dictd/*.dict.dz",)),
    Source(
        "debian-handbook",
        "GPL-2+ or CC-BY-SA-3.0",
        "The Debian Administrator's Handbook",
        "html",
        ("usr/share/doc/debian-handbook/html/en-US/*.html",),
    ),
    Source("debian-reference-en", "GPL-2+", "Debian Reference", "html", ("usr/share/debian-reference/*.en.html",)),
    Source(
        "developers-reference",
        "GPL-2+",
        "Debian Developer's Reference",
        "html",
        ("usr/share/developers-reference/[a-z]*.html",),
    ),
    Source("harden-doc", "GPL-2", "Securing Debian Manual", "html", ("usr/share/doc/harden-doc/html/en-US/*.html",)),
    Source(
        "linux-doc-6.12",
        "GPL-2",
        "documentation of the Linux kernel",
        "text",
        ("usr/share/doc/linux-doc-6.12/Documentation/**/*.rst*",),
        18_000_000,
    ),
    Source(
        "python3.11-doc",
        "PSF-2",
        "documentation of Python",
        "text",
        ("usr/share/doc/python3.11/html/_sources/**/*.txt",),
        12_000_000,
    ),
    Source("git-doc", "GPL-2", "documentation of Git", "text", ("usr/share/doc/git-doc/**/*.txt*",), 4_000_000),
    Source("vim-doc", "Vim licence", "the Vim manual", "html", ("usr/share/doc/vim/html/usr_*.html",)),
    Source(
        "gnome-user-docs",
        "CC-BY-SA-3.0",
        "GNOME user documentation",
        "html",
        ("usr/share/help/C/**/*.page",),
        4_000_000,
    ),
    Source(
        "postgresql-doc-15",
        "PostgreSQL licence",
        "documentation of PostgreSQL",
        "html",
        ("usr/share/doc/postgresql-doc-15/html/*.html",),
    ),
    Source("perl-doc", "GPL-1+ or Artistic", "documentation of Perl", "text", ("usr/share/perl/5.36.0/pod/*.pod",)),
    Source(
        "python-django-doc",
        "BSD-3-Clause",
        "documentation of Django",
        "html",
        ("usr/share/doc/python-django-doc/html/**/*.html",),
    ),
    Source(
        "python-sqlalchemy-doc",
        "MIT",
        "documentation of SQLAlchemy",
        "html",
        ("usr/share/doc/python-sqlalchemy-doc/html/**/*.html",),
        6_000_000,
    ),
    Source(
        "apache2-doc",
        "Apache-2.0",
        "documentation of the Apache HTTP server",
        "html",
        ("usr/share/doc/apache2-doc/manual/en/**/*.html",),
    ),
    Source("sqlite3-doc", "public domain", "documentation of SQLite", "html", ("usr/share/doc/sqlite3/*.html",)),
    Source(
        "rust-doc",
        "MIT or Apache-2.0",
        "books on Rust",
        "html",
        tuple(
            f"usr/share/doc/rust-doc/html/{book}/**/*.html"
            for book in ("book", "edition-guide", "embedded-book", "nomicon", "reference", "rustc", "cargo", "rustdoc")
        ),
        8_000_000,
    ),
    Source("nodejs-doc", "MIT", "documentation of Node.js", "text", ("usr/share/doc/nodejs/api/*.md*",), 4_000_000),
)

_DROPPED = re.compile(r"(?is)<(script|style|head|nav)\b.*?</\1>|<!--.*?-->")
_BREAKS = re.compile(r"(?i)</?(p|div|li|tr|h[1-6]|pre|br|dt|dd|table|title|item|section|note|lg|verse)\b[^>]*>")
_TAGS = re.compile(r"<[^<>]*>")


def plain_text(markup: str) -> str:
    """Text of HTML or OSIS markup, a line a block."""
    text = _BREAKS.sub("\n", _DROPPED.sub(" ", markup))
    return html.unescape(_TAGS.sub("", text))


def tidy(text: str) -> str:
    """Trailing blanks and runs of empty lines removed, spaces joined inside lines that are prose."""
    text = text.replace("\r", "").replace("\u00a0", " ").replace("\t", "    ")
    lines = [re.sub(r"(?<=\S)  +", " ", line.rstrip()) for line in text.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def documents(source: Source, root: Path) -> Iterator[Document]:
    """Documents of an extracted package, in a fixed order, up to the source's limit."""
    taken = 0
    for name, text in _READERS[source.reader](source, root):
        text = tidy(text)
        if len(text) < 400:
            continue
        if taken + len(text) > source.limit:
            return
        taken += len(text)
        yield f"{source.package}/{name}", text


def _files(source: Source, root: Path) -> Iterator[Path]:
    for place in source.places:
        yield from sorted(path for path in root.glob(place) if path.is_file())


def _read(path: Path) -> str:
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    return data.decode("utf-8", errors="ignore")


def _html(source: Source, root: Path) -> Iterator[Document]:
    for path in _files(source, root):
        text = plain_text(_read(path))
        yield str(path.relative_to(root)), "\n".join(line.strip() for line in text.split("\n"))


def _text(source: Source, root: Path) -> Iterator[Document]:
    for path in _files(source, root):
        yield str(path.relative_to(root)), _read(path)


def _dict(source: Source, root: Path) -> Iterator[Document]:
    """Entries start at the margin; a document is some pages of them."""
    for path in _files(source, root):
        part: list[str] = []
        size = number = 0
        for line in _read(path).split("\n"):
            if size > 12_000 and line and not line[0].isspace():
                yield f"{path.name}#{number}", "\n".join(part)
                part, size, number = [], 0, number + 1
            part.append(line)
            size += len(line) + 1
        yield f"{path.name}#{number}", "\n".join(part)


def _sword(source: Source, root: Path) -> Iterator[Document]:
    """Entries of one chapter together."""
    output = subprocess.run(
        ["mod2imp", *source.places], env={"SWORD_PATH": str(root / "usr/share/sword")}, capture_output=True, check=True
    ).stdout.decode("utf-8", errors="ignore")
    chapter, part = "", [""]
    seen: set[str] = set()
    for entry in output.split("$$$")[1:]:
        name, _, markup = entry.partition("\n")
        here = name.strip().rpartition(":")[0]
        if here != chapter:
            yield chapter or "start", "\n".join(part)
            chapter, part = here, []
        kept = []
        for paragraph in plain_text(markup).split("\n"):
            paragraph = re.sub(r"\s+", " ", paragraph).strip()
            # A comment on several verses is listed at each of them.
            if paragraph and paragraph not in seen:
                seen.add(paragraph)
                kept.append(paragraph)
        part.append(" ".join(kept))
    yield chapter, "\n".join(part)


def _r(source: Source, root: Path) -> Iterator[Document]:
    """Character vectors of a lazy-load database: deflated blocks, serialized big-endian; one block an object."""
    for path in _files(source, root):
        data = path.read_bytes()
        for number, found in enumerate(re.finditer(rb"\x78[\x01\x5e\x9c\xda]", data)):
            try:
                block = zlib.decompress(data[found.start() :])
            except zlib.error:
                try:
                    block = zlib.decompressobj().decompress(data[found.start() :])
                except zlib.error:
                    continue
            lines = _strings(block)
            if len(lines) < 1000:
                continue
            for chapter, text in enumerate(re.split(r"\n(?=CHAPTER |Chapter )", "\n".join(lines))):
                yield f"{number}#{chapter}", text


def _strings(block: bytes) -> list[str]:
    """CHARSXP records (type 9 and a length) that follow each other."""
    lines, place = [], 0
    while (place := block.find(b"\x00\x04\x00\x09", place)) >= 0 or not lines:
        if place < 0:
            break
        length = int.from_bytes(block[place + 4 : place + 8], "big")
        lines.append(block[place + 8 : place + 8 + length].decode("utf-8", errors="ignore"))
        place += 8 + length
    return lines


_READERS = {"html": _html, "text": _text, "dict": _dict, "sword": _sword, "r": _r}
