"""What one chip of each accelerator offers: the only place such figures are written.

Source of the TPUs: the Cloud TPU documentation (cloud.google.com/tpu/docs), pages "TPU v5e", "TPU v5p", "TPU v6e" and
"TPU7x (Ironwood)", tables of key chip specifications. Figures are per JAX device: a tpu7x chip is two devices, each
with half of the chip's memory, bandwidth and matrix units. Source of the MI355X: the kernel specification, "Common
rules, hardware, decision table" (matrix rate, bandwidth), and AMD's public data sheet (memory, links).
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device of a generation.

    Attributes:
      memory_bytes: HBM.
      memory_rate: HBM bandwidth, bytes per second.
      matrix_rate: peak bfloat16 operations per second (a multiply and an add are two).
      link_rate: bytes per second one device can send over all its interchip links together, in one direction: half of
        the documented bidirectional figure.
      devices_per_chip: JAX devices of one chip.
      compiled: libtpu compiles for it without one; otherwise plans are counted from shapes alone.
      most: devices of one host, where topologies are of one host.
    """

    memory_bytes: int
    memory_rate: float
    matrix_rate: float
    link_rate: float
    devices_per_chip: int = 1
    compiled: bool = True
    most: int = 0


CHIPS: dict[str, Chip] = {
    # 16 GB, 819 GB/s, 197 TFLOP/s, 400 GB/s bidirectional.
    "v5e": Chip(16 * 2**30, 819e9, 197e12, 200e9),
    # 95 GB, 2,765 GB/s, 459 TFLOP/s, 1,200 GB/s bidirectional.
    "v5p": Chip(95 * 2**30, 2765e9, 459e12, 600e9),
    # 32 GB, 1,638 GB/s, 918 TFLOP/s, 800 GB/s bidirectional.
    "v6e": Chip(32 * 2**30, 1638e9, 918e12, 400e9),
    # 192 GB, 7,380 GB/s, 2,307 TFLOP/s, 1,200 GB/s bidirectional, over two devices.
    "tpu7x": Chip(96 * 2**30, 3690e9, 1153.5e12, 300e9, devices_per_chip=2),
    # 288 GB and seven links of 153.6 GB/s bidirectional to the other GPUs of a host, the vendor's public figures; about
    # 2,500 TFLOP/s and 8 TB/s.
    "mi355x": Chip(288 * 2**30, 8e12, 2500e12, 7 * 76.8e9, compiled=False, most=8),
}


def chip_of(topology: str) -> Chip:
    """The chip of a topology named as `v5p:4x4x4`.

    Raises:
      ValueError: an unknown generation.
    """
    generation = topology.partition(":")[0]
    if generation not in CHIPS:
        raise ValueError(f"topology {topology!r}: the generation {generation!r} is none of {', '.join(CHIPS)}")
    return CHIPS[generation]
