"""The bytes of a page unit and of a STATE image as they travel outside the device, taken from the geometry.

This is the one description that every store, file and replica shares. It is versioned by the layout identity: bytes of
another identity are never offered to a request.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from scheduler.pool_geometry import CURSOR_ELEMENT_BYTES, V41PoolGeometry

TRANSFER_VERSION = 1
"""Bumped whenever the order or the meaning of transferred bytes changes while the geometry stays."""


class PlaneSpan(NamedTuple):
    """Where one plane lies inside a transferred unit.

    Attributes:
      name: `main[i]`, `index_values[i]`, `index_scales[i]` (i counts owners); `window` or `cursor` in an image.
      offset: first byte.
      bytes: length; planes follow each other without padding.
      shape: of the plane in one unit, in elements.
      dtype: NumPy name; little-endian.
    """

    name: str
    offset: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class TransferLayout:
    """What is transferred.

    A STATE image is the stream of its planes cut into `image_segments` pieces of `unit_bytes`, the last one filled up
    with zeros: the image travels as page units do.

    Attributes:
      layout_id: identity of the bytes.
      page: planes of a page unit: main rows of every owner, then each owner's index values and scales.
      image: planes of a STATE image: every ring, then the cursor.
    """

    layout_id: str
    page: tuple[PlaneSpan, ...]
    image: tuple[PlaneSpan, ...]

    @classmethod
    def of(cls, geometry: V41PoolGeometry) -> TransferLayout:
        """The layout a geometry implies (runtime specification, "Operations per batch, in this order")."""
        arrays = {spec.name: spec for spec in geometry.device_arrays(1, 1)}
        owners = range(len(geometry.owners))
        order = [f"main[{index}]" for index in owners]
        for index in owners:
            order += [name for name in (f"index_values[{index}]", f"index_scales[{index}]") if name in arrays]
        page = plane_spans([(name, arrays[name].shape[1:], arrays[name].dtype, arrays[name].bytes) for name in order])
        window = arrays["window"]
        layers, _, *rest = window.shape
        history = 1 + geometry.history_size
        image = plane_spans(
            [
                ("window", (layers, *rest), window.dtype, window.bytes),
                ("cursor", (history,), "int64", history * CURSOR_ELEMENT_BYTES),
            ]
        )
        return cls(f"v41-transfer-{TRANSFER_VERSION};{geometry.layout_id}", page, image)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one page unit."""
        return self.page[-1].offset + self.page[-1].bytes

    @property
    def image_bytes(self) -> int:
        """Bytes of one STATE image."""
        return self.image[-1].offset + self.image[-1].bytes

    @property
    def image_segments(self) -> int:
        """Pieces of `unit_bytes` that carry one STATE image."""
        return math.ceil(self.image_bytes / self.unit_bytes)

    def cut_image(self, image: bytes) -> list[bytes]:
        """The pieces of an image.

        Raises:
          ValueError: it has another length than `image_bytes`.
        """
        if len(image) != self.image_bytes:
            raise ValueError(f"an image of {len(image)} bytes is not one of {self.image_bytes} bytes")
        whole = image.ljust(self.image_segments * self.unit_bytes, b"\0")
        return [whole[start : start + self.unit_bytes] for start in range(0, len(whole), self.unit_bytes)]

    def join_image(self, segments: list[bytes]) -> bytes:
        """The image that `cut_image` cut."""
        return b"".join(segments)[: self.image_bytes]

    def published(self, copies_state: bool) -> dict[str, Any]:
        """What `get_kv_transfer_tensors` tells a connector, as plain values.

        Args:
          copies_state: STATE images are transferred; without them STATE is rebuilt by bounded replay.
        """
        return {
            "layout_id": self.layout_id,
            "unit_bytes": self.unit_bytes,
            "page": [span._asdict() for span in self.page],
            "image_bytes": self.image_bytes if copies_state else 0,
            "image_segments": self.image_segments if copies_state else 0,
            "image": [span._asdict() for span in self.image] if copies_state else [],
        }


def plane_spans(planes: list[tuple[str, tuple[int, ...], str, int]]) -> tuple[PlaneSpan, ...]:
    """Planes of these (name, shape, dtype, bytes), one after the other."""
    spans, offset = [], 0
    for name, shape, dtype, size in planes:
        spans.append(PlaneSpan(name, offset, size, shape, dtype))
        offset += size
    return tuple(spans)
