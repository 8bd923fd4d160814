"""Runs the few PTX instructions that kernels hand over as inline assembly, on NumPy words."""

import re

import ml_dtypes
import numpy as np


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


def convert_e4m3(word):
    """cvt.rn.f16x2.e4m3x2 of the low half of a word: the low byte goes to the low half."""
    codes = np.stack([word & 255, word >> 8 & 255], axis=-1).astype(np.uint8)
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float16).view(np.uint32).reshape(word.shape)


def run(text, operands):
    """Executes `text`; operands: name -> uint32 array. Returns every register; a 16-bit one is the low half."""
    words = dict(operands)
    shape = next(iter(operands.values())).shape

    def value(token):
        return words[token] if token in words else np.full(shape, int(token, 0), np.uint32)

    for line in text.strip().removeprefix("{").removesuffix("}").split(";"):
        line = line.strip()
        if not line or line.startswith(".reg"):
            continue
        operation, arguments = line.split(None, 1)
        if arguments.startswith("{"):
            low, high, source = re.match(r"{(\w+), (\w+)}, (\S+)", arguments).groups()
            words[low], words[high] = value(source) & np.uint32(0xFFFF), value(source) >> np.uint32(16)
            continue
        target, *tokens = re.split(r",\s*", arguments)
        if operation == "mov.b32":
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
        elif operation == "cvt.rn.f16x2.e4m3x2":
            words[target] = convert_e4m3(value(tokens[0]))
        elif operation == "cvt.f32.f16":
            words[target] = value(tokens[0]).astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        elif operation == "cvt.rn.bf16x2.f32":
            # The first source is the high half.
            halves = np.stack([value(tokens[1]), value(tokens[0])], axis=-1).view(np.float32)
            words[target] = halves.astype(ml_dtypes.bfloat16).view(np.uint32).reshape(shape)
        else:
            raise ValueError(f"no such instruction here: {line}")
    return words
