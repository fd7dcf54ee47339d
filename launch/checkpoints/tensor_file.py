"""Safetensors files, written and read one tensor at a time, with checksums and a flush to the disk.

`safetensors.torch.save_file` needs all tensors at once and does not flush. The format is the same:
https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from launch.checkpoints.manifest import StoredFile
from recipes import files

BUCKET = 32 * 2**20  # bytes of one copy from a device, and of one update of a checksum
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a new file; `read` gives its numbers at the time of writing, and `seen` is given them.

    On the host `seen` is called in another thread, while the numbers are written.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    seen: Callable[[torch.Tensor], None] = lambda numbers: None

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write(
    path: Path, entries: Iterable[TensorEntry], metadata: dict[str, str] | None = None
) -> StoredFile:
    """Write a new file and wait until it is on the disk; read `entries` one after the other."""
    entries = list(entries)
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for entry in entries:
        start = end
        end = end + entry.bytes
        told = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape)}
        header[entry.name] = {**told, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksum = 0
    with open(path, "xb") as file, ThreadPoolExecutor(1) as beside:
        for part in (len(text).to_bytes(8, "little"), text):
            checksum = zlib.crc32(part, checksum)
            file.write(part)
        for entry in entries:
            checksum = _write_tensor(file.write, entry, checksum, beside)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return StoredFile(size, f"{checksum:08x}")


class Reader:
    """A reader of single tensors of a file. Raises FileError.

    The file is not mapped into memory: if it were cut meanwhile, the process would be killed, and pages read
    would count as its memory.
    """

    def __init__(self, path: Path):
        self.path = path
        self.tensors = files.read_safetensors_header(path)
        self._open()

    def _open(self) -> None:
        try:
            self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115 # closed with this object
        except OSError as error:
            files.refuse(self.path, "cannot be read", str(error.strerror))

    def close(self) -> None:
        """Close the file until it is read again."""
        self._file.close()

    def whole(self, name: str) -> torch.Tensor:
        """Read a tensor in its shape."""
        shape = torch.Size(self.tensors[name].shape)
        return self.elements(name, 0, shape.numel()).view(shape)

    def elements(self, name: str, first: int, count: int) -> torch.Tensor:
        """Read elements [first, first + count) of a tensor, flat."""
        stored = self.tensors.get(name)
        if stored is None or stored.dtype not in DTYPES:
            refused = (
                "holds no"
                if stored is None
                else f"holds as {stored.dtype}, which is no float,"
            )
            files.refuse(self.path, f"{refused} {name}")
        dtype = DTYPES[stored.dtype]
        # Not torch.empty: within `deepspeed.zero.Init` for bf16 it makes another type.
        found = torch.from_numpy(np.empty(count * dtype.itemsize, dtype=np.uint8)).view(
            dtype
        )
        at = stored.start + first * found.itemsize
        left = found.view(torch.uint8).numpy().data
        if self._file.closed:
            self._open()
        try:
            while left and (got := os.preadv(self._file.fileno(), [left], at)):
                left = left[got:]
                at = at + got
        except OSError as error:
            files.refuse(self.path, f"{name} cannot be read", str(error.strerror))
        if left or at > stored.end:
            files.refuse(
                self.path,
                f"ends within {name}",
                "it was cut off, or the tensor is shorter",
            )
        return found


def _write_tensor(
    write: Callable[[memoryview], object],
    entry: TensorEntry,
    checksum: int,
    beside: ThreadPoolExecutor,
) -> int:
    """Write the numbers of one tensor, a bucket at a time; return the updated checksum."""
    tensor = entry.read().detach()
    found = tensor.dtype, tuple(tensor.shape)
    assert found == (entry.dtype, entry.shape), f"{entry.name}: {found}"
    on_host = tensor.device.type == "cpu"
    if not on_host:
        entry.seen(tensor)  # on the stream of this thread
    seeing = beside.submit(entry.seen, tensor) if on_host else None
    for bucket in tensor.contiguous().view(-1).split(BUCKET // entry.dtype.itemsize):
        part = memoryview(bucket.cpu().view(torch.uint8).numpy())
        checksum = zlib.crc32(part, checksum)
        write(part)
    if seeing:
        seeing.result()
    return checksum
