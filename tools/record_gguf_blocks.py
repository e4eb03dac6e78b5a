#!/usr/bin/env python3
"""Records what an independent implementation makes of quantised blocks, for the tests of dequantisation: tests/data/gguf_blocks.json.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install gguf==0.19.0
    /tmp/venv/bin/python tools/record_gguf_blocks.py tests/data/gguf_blocks.json

Blocks are random bytes (every value of every field occurs sooner or later) whose half-precision scales are replaced by finite ones, ordinary
and extreme. Each entry has the bytes and the bits of the float values, both in hexadecimal.
"""
import json
import sys
from importlib.metadata import version

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import quants

# type, bytes of a block, places of its half-precision fields
FORMATS = [
    (Type.F32, 4, []),
    (Type.F16, 2, [0]),
    (Type.BF16, 2, []),
    (Type.Q8_0, 34, [0]),
    (Type.Q4_1, 20, [0, 2]),
    (Type.Q4_K, 144, [0, 2]),
    (Type.Q6_K, 210, [208]),
]
# Ordinary, negative, zero, negative zero, smallest and largest subnormal, smallest normal, largest.
SCALES = [0x2E66, 0x1419, 0xB24D, 0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF]
PLAIN = {
    Type.F32: [b"\x00\x00\x80\x3f", b"\x00\x00\x00\x80", b"\x01\x00\x00\x00", b"\x00\x00\x80\x7f", b"\xdb\x0f\x49\xc0"],
    Type.F16: [int(bits).to_bytes(2, "little") for bits in SCALES + [0x3C00, 0xBC00, 0x3555, 0x7C00, 0xFC00, 0x03FF, 0x8001, 0xFBFF]],
    Type.BF16: [int(bits).to_bytes(2, "little") for bits in [0x3F80, 0xBF80, 0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x4049, 0x7F7F]],
}


def blocks_of(kind, size, halves, draw):
    if kind in PLAIN:
        yield from PLAIN[kind]
        return
    for i in range(len(SCALES)):
        block = bytearray(draw.integers(0, 256, size, dtype=np.uint8).tobytes())
        for j, place in enumerate(halves):
            block[place : place + 2] = SCALES[(i + 2 * j) % len(SCALES)].to_bytes(2, "little")
        yield bytes(block)


def main():
    draw = np.random.default_rng(20260101)
    formats = {}
    for kind, size, halves in FORMATS:
        formats[kind.name] = entries = []
        for block in blocks_of(kind, size, halves, draw):
            data = np.frombuffer(block, dtype=np.uint8)
            if kind == Type.F32:
                values = data.view(np.float32)
            elif kind == Type.F16:
                values = data.view(np.float16).astype(np.float32)
            else:
                values = quants.dequantize(data, kind)
            bits = np.ascontiguousarray(values, dtype=np.float32).reshape(-1).view(np.uint32)
            entries.append({"block": block.hex(), "values": "".join(f"{value:08x}" for value in bits)})
    with open(sys.argv[1], "w", encoding="ascii") as out:
        json.dump({"made_by": f"tools/record_gguf_blocks.py with gguf {version('gguf')}", "formats": formats}, out, indent=1)
        out.write("\n")


if __name__ == "__main__":
    main()
