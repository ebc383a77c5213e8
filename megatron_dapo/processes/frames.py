"""Messages between a process and its worker processes: frames of a JSON header and raw parts.

A frame is the sizes of head and body, the head, and the body. The head is JSON: [header, [bytes of each part]]. The
body is the parts: texts, token arrays, any buffer. A received part is a bytearray of its own, so an array made from it
is writable and needs no further copy. Standard library only: tool workers import this file by path.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from collections import deque
from typing import Any

SIZES = struct.Struct("<II")  # bytes of the head, bytes of the body
BUFFER = 1 << 20
FOR_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

Header = dict[str, Any]
Frame = tuple[Header, list[bytearray]]


def encode(header: Header, *parts: Any) -> bytes:
    """Parts have the buffer interface and are contiguous."""
    views = [memoryview(part).cast("B") if len(part) else b"" for part in parts]
    sizes = [len(view) for view in views]
    head = json.dumps([header, sizes], separators=(",", ":")).encode()
    return b"".join([SIZES.pack(len(head), sum(sizes)), head, *views])


class FrameBuffer:
    """Cuts a byte stream into frames, wherever it is split. The buffer is reused."""

    def __init__(self) -> None:
        self._buffer = bytearray(BUFFER)
        self._filled = 0

    def room(self) -> memoryview:
        """Where the next bytes of the stream go; never empty."""
        return memoryview(self._buffer)[self._filled :]

    def received(self, count: int) -> list[Frame]:
        """`count` bytes are in `room()`: the frames that are complete now."""
        self._filled += count
        view, start, frames = memoryview(self._buffer), 0, list[Frame]()
        while (end := start + self._size_of_frame(start)) <= self._filled:
            frames.append(_decode(view[start:end]))
            start = end
        if start:
            view[: self._filled - start] = bytes(view[start : self._filled])
            self._filled -= start
        if (needed := self._size_of_frame(0)) > len(self._buffer):
            self._buffer = self._buffer + bytes(needed - len(self._buffer))
        return frames

    def _size_of_frame(self, start: int) -> int:
        known = self._filled - start >= SIZES.size
        return SIZES.size + (sum(SIZES.unpack_from(self._buffer, start)) if known else 0)


def _decode(frame: memoryview) -> Frame:
    position = SIZES.size + SIZES.unpack_from(frame)[0]
    header, sizes = json.loads(bytes(frame[SIZES.size : position]))
    parts = []
    for size in sizes:
        parts.append(bytearray(frame[position : position + size]))
        position += size
    return header, parts


class Channel:
    """A socket that blocks."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._buffer = FrameBuffer()
        self._frames: deque[Frame] = deque()

    def send(self, header: Header, *parts: Any) -> None:
        self.socket.sendall(encode(header, *parts))

    def receive(self) -> Frame:
        """Raises EOFError when the other side has closed the socket."""
        while not self._frames:
            count = self.socket.recv_into(self._buffer.room())
            if not count:
                raise EOFError
            self._frames.extend(self._buffer.received(count))
        return self._frames.popleft()


def parent_channel() -> Channel:
    """In a worker process: the channel to its parent. Signals that Slurm and terminals send to every process are for
    the trainer. The handlers do nothing, but are not SIG_IGN: programs that a worker starts would inherit that."""
    for number in FOR_THE_TRAINER:
        signal.signal(number, lambda *_: None)
    descriptor = int(sys.argv[-1])
    os.set_inheritable(descriptor, False)
    return Channel(socket.socket(fileno=descriptor))
