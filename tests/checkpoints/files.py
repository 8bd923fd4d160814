"""Builders of safetensors bytes, sound and damaged, for the tests of this folder."""

import json


def header_bytes(entries):
    data = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(data).to_bytes(8, "little") + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def edit_header(path, change, *, data=None):
    """Rewrites the header of a file after `change(header dict)`; the tensor bytes stay unless `data` changes them."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    replaced = change(header)
    body = raw[8 + length :]
    path.write_bytes(header_bytes(header if replaced is None else replaced) + (data(body) if data else body))


def edit_json(path, change):
    root = json.loads(path.read_text())
    change(root)
    path.write_text(json.dumps(root))
