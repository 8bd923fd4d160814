"""Every size, offset, shape and identity of the request memory, declared once.

`V41PoolGeometry` is a pure declaration: it imports nothing of ours and no accelerator package. The host that sizes
the pools, the runner that allocates them and the checkpoint images all read their numbers here (runtime
specification, "Geometry declaration (`V41PoolGeometry`)"). It allocates nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from typing import NamedTuple

STATE_SCHEMA_VERSION = 1
"""Bumped whenever a state field keeps its size but changes its meaning."""

CURSOR_ELEMENT_BYTES = 8
"""Bytes one cursor number is charged in budgets and images, whatever the device array uses."""

_FORMAT_TILE_ROWS = {"fp8": 16, "fp4": 8, "float": 16}
_FLOAT_BYTES = {"float32": 4, "bfloat16": 2}


class GeometryError(ValueError):
    """A geometry that breaks one or more rules; `faults` holds one line each."""

    def __init__(self, faults: list[str]):
        self.faults = tuple(faults)
        super().__init__("; ".join(faults))


class ArraySpec(NamedTuple):
    """One device array of the pools.

    Attributes:
      name: `main[i]`, `index_values[i]`, `index_scales[i]` (i counts owners), `window`, `tail_kv`, `tail_score`,
        `cursor` or `last_token`.
      shape: dimensions in elements.
      dtype: NumPy name (`bfloat16` and `float8_e4m3fn` through ml_dtypes).
      bytes: size of the whole array.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class FieldSpan(NamedTuple):
    """Where a field lies inside a page or a state slot.

    Attributes:
      name: field name.
      offset: first byte, relative to the start of the page or slot.
      bytes: length without alignment padding.
    """

    name: str
    offset: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class V41PoolGeometry:
    """Row formats, page and state layout, budgets and layout identity of one serving configuration.

    Attributes:
      layers: backbone layers.
      owners: (layer, ratio) of every layer that owns compressed rows, ascending by layer.
      block_size: tokens of one PAGE, also the hash block.
      window_size: tokens visible through the sliding window, the query's own included (`W`).
      head_dim: main latent width (`d`).
      index_dim: index key width (`I`).
      history_size: compressed Engram ids a cursor keeps (`Hh`).
      packed: FP4 main rows and FP8 window rows instead of bfloat16.
      index_format: "fp8" or "fp4".
      speculative_tokens: drafted tokens of a verify step (`S`).
      layer_ratios: compression ratio of each backbone (and draft) layer; empty leaves it undeclared.
      index_topk: selected compressed rows per query (`K`); 0 leaves it undeclared.
      unquantized_dtype: None, or "float32" / "bfloat16": main, index and window rows then hold unquantized
        activations of that type (comparison runs; the format name of all three is "float").
      draft_layers: windows appended to the backbone's when `speculative_tokens` is not 0.

    Raises:
      GeometryError: with every broken rule of "Geometry declaration (`V41PoolGeometry`)".
    """

    layers: int
    owners: tuple[tuple[int, int], ...]
    block_size: int
    window_size: int
    head_dim: int
    index_dim: int
    history_size: int = 3
    packed: bool = False
    index_format: str = "fp8"
    speculative_tokens: int = 0
    layer_ratios: tuple[int, ...] = ()
    index_topk: int = 0
    unquantized_dtype: str | None = None
    draft_layers: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "owners", tuple((int(layer), int(ratio)) for layer, ratio in self.owners))
        object.__setattr__(self, "layer_ratios", tuple(self.layer_ratios))
        faults = self._faults()
        if faults:
            raise GeometryError(faults)

    def _faults(self) -> list[str]:
        faults = []
        for name in ("layers", "block_size", "window_size", "head_dim", "index_dim"):
            if getattr(self, name) <= 0:
                faults.append(f"{name} {getattr(self, name)} must be positive")
        for name in ("history_size", "speculative_tokens", "index_topk", "draft_layers"):
            if getattr(self, name) < 0:
                faults.append(f"{name} {getattr(self, name)} must not be negative")
        for name in ("head_dim", "index_dim"):
            if getattr(self, name) % 32:
                faults.append(f"{name} {getattr(self, name)} must be a multiple of 32, the quantization group")
        if self.index_format not in ("fp8", "fp4"):
            faults.append(f"index_format {self.index_format!r} is unknown: use 'fp8' or 'fp4'")
        if self.unquantized_dtype is not None:
            if self.unquantized_dtype not in _FLOAT_BYTES:
                faults.append(f"unquantized_dtype {self.unquantized_dtype!r} is unknown: use 'float32' or 'bfloat16'")
            if self.packed:
                faults.append("packed rows are quantized: packed=True cannot be combined with unquantized_dtype")
        if self.block_size % 32 or self.block_size < 32:
            faults.append(f"block_size {self.block_size} must be a multiple of 32 and at least 32")
        if not self.owners:
            faults.append("owners is empty: at least one layer must own compressed rows")
        owner_layers = [layer for layer, _ in self.owners]
        if owner_layers != sorted(set(owner_layers)):
            faults.append(f"owners {owner_layers} must be ascending, each declared once")
        tile = _FORMAT_TILE_ROWS.get(self.index_plane_format, 16)
        for layer, ratio in self.owners:
            if not 0 <= layer < self.layers:
                faults.append(f"owner layer {layer} is outside 0..{self.layers - 1}")
            if ratio not in (1, 2):
                faults.append(f"owner layer {layer} has ratio {ratio}: only 1 and 2 exist")
                continue
            if self.block_size % ratio:
                faults.append(f"block_size {self.block_size} is not a multiple of ratio {ratio} of layer {layer}")
            elif (self.block_size // ratio) % tile:
                faults.append(
                    f"a page of layer {layer} holds {self.block_size // ratio} index rows, not whole tiles of {tile}"
                )
            if self.layer_ratios and layer < len(self.layer_ratios) and self.layer_ratios[layer] != ratio:
                faults.append(f"owner layer {layer} has ratio {ratio}, layer_ratios says {self.layer_ratios[layer]}")
        if self.layer_ratios and len(self.layer_ratios) < self.layers:
            faults.append(f"layer_ratios has {len(self.layer_ratios)} entries for {self.layers} layers")
        return faults

    # Formats -------------------------------------------------------------------------------------------------

    @property
    def main_format(self) -> str:
        """Format of compressed latent rows: "bf16", "fp4" or "float"."""
        if self.unquantized_dtype is not None:
            return "float"
        return "fp4" if self.packed else "bf16"

    @property
    def index_plane_format(self) -> str:
        """Format of index keys: "fp8", "fp4" or "float"."""
        return "float" if self.unquantized_dtype is not None else self.index_format

    @property
    def window_format(self) -> str:
        """Format of ring rows: "bf16", "fp8" or "float"."""
        if self.unquantized_dtype is not None:
            return "float"
        return "fp8" if self.packed else "bf16"

    @property
    def index_tile_rows(self) -> int:
        """Index rows of one tile."""
        return _FORMAT_TILE_ROWS[self.index_plane_format]

    # Counts --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def ratios(self) -> tuple[int, ...]:
        """Distinct compression ratios, ascending; the order of `BatchStep.plans`."""
        return tuple(sorted({ratio for _, ratio in self.owners}))

    @property
    def max_ratio(self) -> int:
        """Tokens of the largest compressed group."""
        return self.ratios[-1]

    @property
    def ring(self) -> int:
        """Rows of one sliding-window ring, `W + S`; position p lives at `p mod ring`."""
        return self.window_size + self.speculative_tokens

    @property
    def ring_c(self) -> int:
        """Rows of one compressor tail, `max_ratio + S`; position p lives at `p mod ring_c`."""
        return self.max_ratio + self.speculative_tokens

    @property
    def window_layers(self) -> int:
        """Layers that own a ring: the backbone's and, with speculation, the draft's."""
        return self.layers + (self.draft_layers if self.speculative_tokens else 0)

    @functools.cached_property
    def tail_owners(self) -> tuple[int, ...]:
        """Indices into `owners` of those whose groups span tokens (ratio 2), in order: the tails' first axis."""
        return tuple(index for index, (_, ratio) in enumerate(self.owners) if ratio > 1)

    def rows_per_page(self, ratio: int) -> int:
        """Compressed rows (main or index) of one PAGE at `ratio`."""
        return self.block_size // ratio

    def pages_for(self, tokens: int) -> int:
        """PAGEs that cover `tokens` tokens of one request."""
        return -(-tokens // self.block_size)

    # Row bytes -----------------------------------------------------------------------------------------------

    @property
    def main_row_bytes(self) -> int:
        """Bytes of one compressed latent row."""
        if self.main_format == "fp4":
            return self.head_dim // 2 + self.head_dim // 16
        return self.head_dim * self._float_bytes

    @property
    def index_value_bytes(self) -> int:
        """Bytes of one index key without its scales."""
        if self.index_plane_format == "float":
            return self.index_dim * self._float_bytes
        return self.index_dim if self.index_format == "fp8" else self.index_dim // 2

    @property
    def index_scale_bytes(self) -> int:
        """Bytes of one index key's scales: one float32, one E8M0 per 32, or none."""
        return {"fp8": 4, "fp4": self.index_dim // 32, "float": 0}[self.index_plane_format]

    @property
    def index_row_bytes(self) -> int:
        """Bytes of one index key with its scales."""
        return self.index_value_bytes + self.index_scale_bytes

    @property
    def window_row_bytes(self) -> int:
        """Bytes of one ring row."""
        if self.window_format == "fp8":
            return self.head_dim + self.head_dim // 32
        return self.head_dim * self._float_bytes

    @property
    def _float_bytes(self) -> int:
        return _FLOAT_BYTES.get(self.unquantized_dtype or "bfloat16", 2)

    # Page layout ---------------------------------------------------------------------------------------------

    @property
    def alignment(self) -> int:
        """Multiple of field offsets, page size and slot size, in bytes."""
        return 256 if self.packed else 1024

    @functools.cached_property
    def page_fields(self) -> tuple[FieldSpan, ...]:
        """Main rows of each owner inside a page, in owner order."""
        spans = []
        offset = 0
        for index, (_, ratio) in enumerate(self.owners):
            size = self.rows_per_page(ratio) * self.main_row_bytes
            spans.append(FieldSpan(f"main[{index}]", offset, size))
            offset = _round_up(offset + size, self.alignment)
        return tuple(spans)

    @functools.cached_property
    def main_page_bytes(self) -> int:
        """Main bytes of one PAGE, alignment included."""
        last = self.page_fields[-1]
        return _round_up(last.offset + last.bytes, self.alignment)

    @functools.cached_property
    def index_page_bytes(self) -> tuple[int, ...]:
        """Index bytes of one PAGE per owner."""
        return tuple(self.rows_per_page(ratio) * self.index_row_bytes for _, ratio in self.owners)

    @functools.cached_property
    def page_unit_bytes(self) -> int:
        """Budget of one PAGE unit: its main page plus its rows in every index region."""
        return self.main_page_bytes + sum(self.index_page_bytes)

    @property
    def bytes_per_token(self) -> float:
        """`page_unit_bytes` per token."""
        return self.page_unit_bytes / self.block_size

    # State layout --------------------------------------------------------------------------------------------

    @functools.cached_property
    def state_fields(self) -> tuple[FieldSpan, ...]:
        """Fields of one slot: `window`, `tail_kv`, `tail_score`, `cursor`."""
        tail = len(self.tail_owners) * self.ring_c * self.head_dim * 4
        sizes = (
            ("window", self.window_layers * self.ring * self.window_row_bytes),
            ("tail_kv", tail),
            ("tail_score", tail),
            ("cursor", (1 + self.history_size) * CURSOR_ELEMENT_BYTES),
        )
        spans = []
        offset = 0
        for name, size in sizes:
            spans.append(FieldSpan(name, offset, size))
            offset = _round_up(offset + size, self.alignment)
        return tuple(spans)

    @functools.cached_property
    def state_bytes(self) -> int:
        """Budget of one slot, alignment included."""
        last = self.state_fields[-1]
        return _round_up(last.offset + last.bytes, self.alignment)

    @functools.cached_property
    def image_fields(self) -> tuple[FieldSpan, ...]:
        """What a checkpoint image carries, by offset in the slot: all rings and the cursor, never the tails."""
        return tuple(span for span in self.state_fields if span.name in ("window", "cursor"))

    @functools.cached_property
    def image_bytes(self) -> int:
        """Bytes of one checkpoint image."""
        return sum(span.bytes for span in self.image_fields)

    @functools.cached_property
    def units_per_image(self) -> int:
        """PAGE units that one checkpoint image reserves."""
        return -(-self.image_bytes // self.page_unit_bytes)

    # Whole pools ---------------------------------------------------------------------------------------------

    def index_region_offsets(self, num_pages: int) -> tuple[int, ...]:
        """First byte of each owner's index region in one contiguous arena; 256-aligned."""
        offsets = []
        offset = num_pages * self.main_page_bytes
        for size in self.index_page_bytes:
            offset = _round_up(offset, 256)
            offsets.append(offset)
            offset += num_pages * size
        return tuple(offsets)

    def state_offset(self, num_pages: int) -> int:
        """First STATE byte in one contiguous arena."""
        end = self.index_region_offsets(num_pages)[-1] + num_pages * self.index_page_bytes[-1]
        return _round_up(end, self.alignment)

    def total_bytes(self, num_pages: int, num_slots: int) -> int:
        """Bytes of one contiguous arena of `num_pages` PAGE units and `num_slots` slots."""
        return self.state_offset(num_pages) + num_slots * self.state_bytes

    def pages_for_budget(self, budget_bytes: int, num_slots: int) -> int:
        """PAGE units a budget buys once every slot is paid (runtime specification, "Who allocates").

        Raises:
          GeometryError: when not one page fits beside the slots.
        """
        state = num_slots * self.state_bytes
        pages = (budget_bytes - state) // self.page_unit_bytes
        if pages < 1:
            raise GeometryError(
                [
                    f"a budget of {budget_bytes} bytes holds no page of {self.page_unit_bytes} bytes beside "
                    f"{num_slots} slots of {self.state_bytes} bytes: raise the budget or lower max_num_seqs"
                ]
            )
        return pages

    def device_arrays(self, num_pages: int, num_slots: int) -> tuple[ArraySpec, ...]:
        """The arrays of `Pools`, one per region, unpadded; owners in order, absent index scales left out."""
        row_dtype = self.unquantized_dtype or "bfloat16"
        specs = []

        def add(name: str, shape: tuple[int, ...], dtype: str, element: int) -> None:
            specs.append(ArraySpec(name, shape, dtype, math.prod(shape) * element))

        for index, (_, ratio) in enumerate(self.owners):
            plane = (num_pages, self.rows_per_page(ratio))
            if self.main_format == "fp4":
                add(f"main[{index}]", (*plane, self.main_row_bytes), "uint8", 1)
            else:
                add(f"main[{index}]", (*plane, self.head_dim), row_dtype, self._float_bytes)
            if self.index_plane_format == "float":
                add(f"index_values[{index}]", (*plane, self.index_dim), row_dtype, self._float_bytes)
            elif self.index_plane_format == "fp8":
                add(f"index_values[{index}]", (*plane, self.index_dim), "uint8", 1)
                add(f"index_scales[{index}]", plane, "float32", 4)
            else:
                add(f"index_values[{index}]", (*plane, self.index_dim // 2), "uint8", 1)
                add(f"index_scales[{index}]", (*plane, self.index_dim // 32), "uint8", 1)
        rings = (self.window_layers, num_slots, self.ring)
        if self.window_format == "fp8":
            add("window", (*rings, self.window_row_bytes), "uint8", 1)
        else:
            add("window", (*rings, self.head_dim), row_dtype, self._float_bytes)
        tails = (len(self.tail_owners), num_slots, self.ring_c, self.head_dim)
        add("tail_kv", tails, "float32", 4)
        add("tail_score", tails, "float32", 4)
        add("cursor", (num_slots, 1 + self.history_size), "int32", 4)
        add("last_token", (num_slots,), "int32", 4)
        return tuple(specs)

    # Identity ------------------------------------------------------------------------------------------------

    @functools.cached_property
    def layout_id(self) -> str:
        """Canonical identity of saved state; images of another identity are unusable.

        Source: runtime specification, "Layout identity".
        """
        dtype = f"-{self.unquantized_dtype}" if self.unquantized_dtype else ""
        parts = [
            f"v41-state-{STATE_SCHEMA_VERSION}",
            f"main={self.main_format}{dtype}",
            f"index={self.index_plane_format}",
            f"layers={self.window_layers}",
            "owners=" + ",".join(f"{layer}r{ratio}" for layer, ratio in self.owners),
            f"page={self.block_size}",
            f"window={self.window_size}",
            f"d={self.head_dim}",
            f"i={self.index_dim}",
            f"history={self.history_size}",
            f"tile={self.index_tile_rows}",
            f"bytes={sys.byteorder}",
        ]
        if self.speculative_tokens:
            parts.append(f"drafts={self.speculative_tokens}")
        return ";".join(parts)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
