"""Runs the few PTX instructions that kernels hand over as inline assembly, on NumPy words."""

import re

import ml_dtypes
import numpy as np


def permute(a, b, selector):
    """prmt.b32 in its default mode."""
    source = np.stack([(word >> np.uint32(8 * i)) & 255 for word in (a, b) for i in range(4)])
    result = np.zeros_like(a)
    for place in range(4):
        nibble = (selector >> (4 * place)) & 15
        byte = source[nibble & 7]
        if nibble & 8:
            byte = np.where(byte & 128, 255, 0).astype(np.uint32)
        result |= byte.astype(np.uint32) << np.uint32(8 * place)
    return result


def multiply_pairs(a, b):
    """mul.rn.bf16x2, subnormal operands and results included."""
    product = a.view(ml_dtypes.bfloat16).astype(np.float64) * b.view(ml_dtypes.bfloat16).astype(np.float64)
    return product.astype(ml_dtypes.bfloat16).view(np.uint32)


def logic(a, b, c, table):
    """lop3.b32: each bit of the result is the bit of `table` that the three bits name."""
    result = np.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            parts = [word if index & bit else ~word for word, bit in ((a, 4), (b, 2), (c, 1))]
            result |= parts[0] & parts[1] & parts[2]
    return result


def half_pair(pair):
    """cvt.rn.f16x2.e4m3x2 of the E4M3 codes in the two low bytes."""
    codes = np.stack([pair & 255, pair >> 8 & 255], axis=-1).astype(np.uint8)
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float16).view(np.uint32)[..., 0]


def run(text, operands):
    """Executes `text`; operands: name -> uint32 array. Returns every register."""
    words = dict(operands)
    shape = next(iter(operands.values())).shape

    def value(token):
        return words[token] if token in words else np.full(shape, int(token, 0), np.uint32)

    for line in text.strip().removeprefix("{").removesuffix("}").split(";"):
        line = line.strip()
        if not line or line.startswith(".reg"):
            continue
        operation, arguments = line.split(None, 1)
        target, *tokens = re.split(r",\s*(?![^{]*})", arguments)
        if operation == "mov.b32" and target.startswith("{"):
            low, high = re.split(r",\s*", target.strip("{}"))
            words[low], words[high] = value(tokens[0]) & np.uint32(0xFFFF), value(tokens[0]) >> np.uint32(16)
        elif operation == "cvt.rn.f16x2.e4m3x2":
            words[target] = half_pair(value(tokens[0]))
        elif operation == "mov.b32":
            words[target] = value(tokens[0])
        elif operation == "shl.b32":
            words[target] = value(tokens[0]) << np.uint32(int(tokens[1]))
        elif operation == "shr.b32":
            words[target] = value(tokens[0]) >> np.uint32(int(tokens[1]))
        elif operation == "and.b32":
            words[target] = value(tokens[0]) & value(tokens[1])
        elif operation == "prmt.b32":
            words[target] = permute(value(tokens[0]), value(tokens[1]), int(tokens[2], 0))
        elif operation == "lop3.b32":
            words[target] = logic(*map(value, tokens[:3]), int(tokens[3], 0))
        elif operation == "mul.rn.bf16x2":
            words[target] = multiply_pairs(value(tokens[0]), value(tokens[1]))
        else:
            raise ValueError(f"no such instruction here: {line}")
    return words
