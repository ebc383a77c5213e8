"""Runs inside an SGLang server: a checksum of every tensor that it was sent, computed from the memory that it serves.

The server is started with `--custom-weight-loader megatron_dapo_checksums.install`. One call with that load format
starts it. The first time a tensor arrives, every copy that SGLang's own loader makes of it is recorded: which part of
the tensor goes to which part of which parameter. So fused parameters (qkv, gate and up, experts), tensor and expert
parallelism and padding need no knowledge here. `POST /weights_checker {"action": "sent"}` then sums those parts.

The checksum of a tensor is the sum of bits × weight modulo 2^64, where the weight is a hash of the element's position
in the tensor. It is additive: the parts on all ranks of a server sum to the checksum of the whole. The trainer computes
it with the same functions (`Parts`, `checksums`), from the memory that it sends.

LoRA's adapters are compared by SHA-256 while they are loaded (`serve_adapters`).
"""

import asyncio
import functools
import hashlib
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

log = logging.getLogger(__name__)

ACTION = "sent"
FIELDS = 9
ADDRESS, TENSOR, POSITION, ROWS, COLUMNS, ROW, COLUMN, POSITION_ROW, POSITION_COLUMN = range(FIELDS)
TILE_ROWS, TILE_COLUMNS = 32, 2048  # what one program of the GPU sums
ABORT_SECONDS = 5.0  # until a scheduler has surely aborted a request
VECTOR = 16  # bytes that a thread of the GPU reads at once
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


# ---- the sum, on both sides ----


class Parts:
    """Parts of tensors in memory. A part is a matrix of elements (`FIELDS`; strides and positions in elements,
    addresses in bytes). Element (i, j) is at `address + size × (i × row + j × column)`, and its position in the tensor
    is `position + i × position_row + j × position_column`."""

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[int, ...]]] = {}  # by element size
        # The same, [tiles, FIELDS], of at most TILE_ROWS × TILE_COLUMNS, by element size and whether `_aligned`.
        self.tiles: dict[tuple[int, bool], np.ndarray] = {}
        self._on_device: dict[tuple[int, bool], torch.Tensor] = {}

    def add(self, tensor: int, address: int, size: int, position: int, dims: list[tuple[int, int, int]]) -> None:
        """`dims`: length, stride in memory, stride in positions; outer ones first. At least one element."""
        dims = _merged(dims)
        while len(dims) > 2:  # no loader of today copies such a part
            length, stride, step = dims.pop(0)
            for i in range(1, length):
                self.add(tensor, address + size * i * stride, size, position + i * step, dims)
        (rows, row, up), (columns, column, right) = [(1, 0, 0)] * (2 - len(dims)) + dims
        found = self._parts.setdefault(size, [])
        if rows == 1 and column == right == 1 and columns > TILE_COLUMNS:
            rows, rest = divmod(columns, TILE_COLUMNS)
            row = up = TILE_COLUMNS
            if rest:
                done = rows * TILE_COLUMNS
                found.append((address + size * done, tensor, position + done, 1, rest, 0, 1, 0, 1))
            columns = TILE_COLUMNS
        found.append((address, tensor, position, rows, columns, row, column, up, right))

    def freeze(self) -> None:
        """After the last `add`."""
        for size, parts in self._parts.items():
            tiles = _tiles(np.array(parts, np.int64), size)
            aligned = _aligned(tiles, size)
            self.tiles |= {(size, kind): tiles[aligned == kind] for kind in (True, False) if (aligned == kind).any()}
        self._parts.clear()

    def on(self, device: torch.device, key: tuple[int, bool]) -> torch.Tensor:
        if key not in self._on_device:
            self._on_device[key] = torch.from_numpy(self.tiles[key]).to(device)
        return self._on_device[key]


def _merged(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The same elements with as few dimensions as possible, the one with the smallest stride in memory last."""
    found: list[tuple[int, int, int]] = []
    for length, stride, step in sorted((d for d in dims if d[0] != 1), key=lambda d: -d[1]):
        if found and found[-1][1:] == (length * stride, length * step):
            length *= found.pop()[0]
        found.append((length, stride, step))
    return found or [(1, 1, 1)]


def _tiles(parts: np.ndarray, size: int) -> np.ndarray:
    across = -(-parts[:, COLUMNS] // TILE_COLUMNS)
    counts = -(-parts[:, ROWS] // TILE_ROWS) * across
    tiles, across = np.repeat(parts, counts, axis=0), np.repeat(across, counts)
    number = np.arange(len(tiles)) - np.repeat(np.cumsum(counts) - counts, counts)
    i, j = number // across * TILE_ROWS, number % across * TILE_COLUMNS
    tiles[:, ADDRESS] += size * (i * tiles[:, ROW] + j * tiles[:, COLUMN])
    tiles[:, POSITION] += i * tiles[:, POSITION_ROW] + j * tiles[:, POSITION_COLUMN]
    tiles[:, ROWS] = np.minimum(TILE_ROWS, tiles[:, ROWS] - i)
    tiles[:, COLUMNS] = np.minimum(TILE_COLUMNS, tiles[:, COLUMNS] - j)
    return np.ascontiguousarray(tiles)


def _aligned(tiles: np.ndarray, size: int) -> np.ndarray:
    """[tiles]: whether rows are contiguous and begin at multiples of VECTOR bytes, so that a GPU reads them fast."""
    contiguous = (tiles[:, COLUMN] == 1) & (tiles[:, POSITION_COLUMN] == 1)
    return contiguous & (tiles[:, ADDRESS] % VECTOR == 0) & (tiles[:, ROW] * size % VECTOR == 0)


def checksums(parts: Parts, count: int, device: torch.device, base: int = 0) -> torch.Tensor:
    """[count], int64: the sum of each tensor's parts. `base` is added to all addresses. On a GPU it only launches."""
    total = torch.zeros(count, dtype=torch.int64, device=device)
    for (size, aligned), tiles in parts.tiles.items():
        if device.type == "cuda":
            table = parts.on(device, (size, aligned))
            sums = _sum_on_gpu(table, size, base, aligned=aligned and base % VECTOR == 0)
            total.index_add_(0, table[:, TENSOR].contiguous(), sums)
        else:
            total.index_add_(0, torch.from_numpy(tiles[:, TENSOR].copy()), _sum_on_cpu(tiles, size, base))
    return total


def _weight(position: np.ndarray) -> np.ndarray:
    """Odd, 32 bits. The same as in the kernel."""
    x = position.astype(np.uint32) * np.uint32(0x9E3779B1)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x85EBCA77)
    return (x ^ (x >> np.uint32(13)) | np.uint32(1)).astype(np.uint64)


def _sum_on_cpu(tiles: np.ndarray, size: int, base: int) -> torch.Tensor:
    import ctypes

    sums = np.zeros(len(tiles), np.uint64)
    for number, tile in enumerate(tiles.tolist()):
        rows, columns, row, column = tile[ROWS], tile[COLUMNS], tile[ROW], tile[COLUMN]
        span = size * ((rows - 1) * row + (columns - 1) * column + 1)
        memory = (ctypes.c_uint8 * span).from_address(base + tile[ADDRESS])
        bits = np.ndarray((rows, columns), UNSIGNED[size], memory, strides=(size * row, size * column))
        across = np.arange(columns) * tile[POSITION_COLUMN]
        position = tile[POSITION] + np.arange(rows)[:, None] * tile[POSITION_ROW] + across
        sums[number] = (bits.astype(np.uint64) * _weight(position)).sum(dtype=np.uint64)
    return torch.from_numpy(sums.view(np.int64))


@functools.cache
def _kernel() -> Any:
    """Compiled where there is a GPU; Triton is not needed elsewhere."""
    global tl
    import triton
    import triton.language as tl

    @triton.jit
    def sum_tile(tiles, sums, anchor, base, SIZE: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore
        tile = tiles + tl.program_id(0) * 9  # FIELDS, in the order above
        start = (tl.load(tile) + base) // SIZE  # elements after `anchor`
        position, rows, columns = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
        row, column, up, right = tl.load(tile + 5), tl.load(tile + 6), tl.load(tile + 7), tl.load(tile + 8)
        if ALIGNED:
            start, row = tl.multiple_of(start, 16 // SIZE), tl.multiple_of(row, 16 // SIZE)
            column = 1
            right = 1
        j = tl.arange(0, WIDTH)
        inside = j < columns
        offsets, positions = j * column, (position + j * right).to(tl.uint32)
        total = tl.zeros([WIDTH], tl.uint64)
        for i in range(rows):
            bits = tl.load(anchor + (start + i * row) + offsets, mask=inside, other=0)
            x = (positions + (i * up).to(tl.uint32)) * 0x9E3779B1
            x = (x ^ (x >> 15)) * 0x85EBCA77
            total += bits.to(tl.uint64) * ((x ^ (x >> 13)) | 1).to(tl.uint64)
        tl.store(sums + tl.program_id(0), tl.sum(total, axis=0).to(tl.int64))

    return sum_tile


def _sum_on_gpu(tiles: torch.Tensor, size: int, base: int, *, aligned: bool) -> torch.Tensor:
    """Triton reads vectors only from a pointer that it was given, so addresses are relative to one."""
    sums = torch.empty(len(tiles), dtype=torch.int64, device=tiles.device)
    anchor = torch.empty(VECTOR, dtype=getattr(torch, f"uint{8 * size}"), device=tiles.device)
    launch = _kernel()[(len(tiles),)]
    start = base - anchor.data_ptr()
    launch(tiles, sums, anchor, start, SIZE=size, WIDTH=TILE_COLUMNS, ALIGNED=aligned, num_warps=8)
    return sums


# ---- in the server ----


class Recorder(TorchDispatchMode):
    """Where SGLang's loader puts what it is given. `known`: by tensor, (address in the parameter, parameter, element
    size, position, dims) of each copy, and whether all of them could be followed."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model
        self._given: list[tuple[str, torch.Tensor]] = []
        self.known: dict[str, list[tuple[str, int, int, int, list[tuple[int, int, int]]]]] = {}
        self._parameters: dict[int, tuple[str, torch.Tensor]] = {}  # by the address of their memory
        self._parts: tuple[Any, list[str], Parts] | None = None  # for these addresses of the parameters
        self.at_load: dict[str, str] | None = None  # of a checkpoint, before SGLang processed what it had loaded

    def follow(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self._given.append((name, tensor))
            self.known[name] = []
            yield name, tensor

    def load(self, own: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls SGLang's own loader; copies of tensors that are not known yet are recorded."""
        self.at_load = None
        buckets = isinstance(weights, list | tuple)
        if buckets and all(name in self.known for name, _ in weights):
            return own(weights, *args, **kwargs)
        self._parameters = {_memory(p): (name, p.data) for name, p in _state(self._model)}
        self._parts = None
        with self:
            result = own(self.follow(weights), *args, **kwargs)
        self._given.clear()
        if not buckets:
            self.at_load = self.checksums()
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._record(*args[:2])
        return func(*args, **(kwargs or {}))

    def _record(self, target: torch.Tensor, source: torch.Tensor) -> None:
        name, parameter = self._parameters.get(_memory(target), ("", target))
        if not name or not source.numel():
            return
        for given, tensor in reversed(self._given):
            position = int(source.storage_offset() - tensor.storage_offset())
            same = _memory(source) == _memory(tensor) and source.dtype == tensor.dtype == target.dtype
            if same and 0 <= position < tensor.numel() and tensor.is_contiguous() and source.shape == target.shape:
                address = int(target.storage_offset() - parameter.storage_offset()) * target.element_size()
                dims = list(zip(target.shape, target.stride(), source.stride(), strict=True))
                self.known[given].append((name, address, target.element_size(), position, dims))
                return

    def checksums(self) -> dict[str, str]:
        """By tensor: how many of its elements this rank has, which ones (a hash), and their checksum."""
        parameters = {name: p.data for name, p in _state(self._model)}
        addresses = tuple(p.data_ptr() for p in parameters.values())
        if self._parts is None or self._parts[0] != addresses:
            parts = Parts()
            held = []
            for number, copies in enumerate(self.known.values()):
                for name, address, size, position, dims in copies:
                    parts.add(number, parameters[name].data_ptr() + address, size, position, dims)
                shape = sorted((position, [(d[0], d[2]) for d in dims]) for *_, position, dims in copies)
                elements = sum(int(np.prod([d[0] for d in dims])) for *_, dims in copies)
                held.append(f"{elements}:{zlib.crc32(repr(shape).encode()):x}")
            parts.freeze()
            self._parts = (addresses, held, parts)
        _, held, parts = self._parts
        device = next(iter(parameters.values())).device
        sums = checksums(parts, len(held), device).tolist()
        return {name: f"{which}:{total}" for name, which, total in zip(self.known, held, sums, strict=True)}


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _state(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def install(model: Any, named_tensors: Any) -> None:
    """SGLang's hook for a custom loader. Repeatable."""
    if hasattr(model, "megatron_dapo_recorder"):
        return
    recorder, own = Recorder(model), model.load_weights
    model.megatron_dapo_recorder = recorder
    model.load_weights = functools.partial(recorder.load, own)
    _answer()


def record_again(model: Any, named_tensors: Any) -> None:
    """A checksum was wrong: perhaps the loader puts tensors elsewhere than it did."""
    install(model, named_tensors)
    model.megatron_dapo_recorder.known.clear()
    getattr(model, "megatron_dapo_runs", {}).clear()  # packed experts pass through SGLang's own loader again


@functools.cache
def _answer() -> None:
    """Teaches /weights_checker our actions: this one, and those of megatron_dapo_layers."""
    import megatron_dapo_layers  # type: ignore[import-not-found]

    def answer(model: Any, action: str) -> dict[str, str] | None:
        recorder = getattr(model, "megatron_dapo_recorder", None)
        if recorder is None:  # a draft model
            return None
        if action != ACTION:
            return megatron_dapo_layers.answer(model, action)
        return recorder.checksums() if recorder.at_load is None else recorder.at_load

    teach((ACTION, *megatron_dapo_layers.ACTIONS), answer)


def teach(actions: tuple[str, ...], answer: Callable[[Any, str], dict[str, str] | None]) -> None:
    """`POST /weights_checker` with one of these actions is answered with `answer(model, action)`."""
    from sglang.srt.utils.weight_checker import WeightChecker

    own = WeightChecker.handle

    def handle(self: Any, action: str, *args: Any, **kwargs: Any) -> Any:
        if action not in actions:
            return own(self, action, *args, **kwargs)
        found = answer(self._get_model(), action)
        if found is None:
            return None
        place = self._parallelism_info(**{"role": kwargs["role"]} if "role" in kwargs else {})
        return {"checksums": found, "per_gpu_checksum": "", "parallelism_info": place.model_dump()}

    WeightChecker.handle = handle


# ---- LoRA's adapters ----


def sha256(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Of each tensor's bytes, in many threads: hashlib releases the GIL."""
    names, threads = [*tensors], min(16, len(os.sched_getaffinity(0)))

    def digests(part: list[str]) -> list[tuple[str, str]]:
        flat = ((name, tensors[name].detach().cpu().contiguous().flatten()) for name in part)
        return [(name, hashlib.sha256(tensor.view(torch.uint8).numpy().data).hexdigest()) for name, tensor in flat]

    with ThreadPoolExecutor(threads) as pool:
        return dict(pair for part in pool.map(digests, (names[i::threads] for i in range(threads))) for pair in part)


def serve_adapters() -> None:
    """A plugin of SGLang (adapter_plugin/), for three things. SGLang hashes an adapter in one thread, and generates
    nothing meanwhile: this does the same in many. /weights_checker can share the base (megatron_dapo_base.py). Every
    request releases its adapter. A server without the plugin, or in which it fails, compares as it always does."""
    import megatron_dapo_base  # type: ignore[import-not-found]
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.managers.tp_worker import BaseTpWorker

    receive, load = BaseTpWorker.load_lora_adapter_from_tensors, LoRAManager.load_lora_adapter_from_tensors
    expected: list[dict[str, str]] = []  # of the adapter that is being loaded, until it is compared

    def receive_unchecked(self: Any, request: Any) -> Any:
        sent = getattr(request, "expected_checksums", None)
        expected[:] = [] if sent is None else [sent]
        request.expected_checksums = None
        result = receive(self, request)
        if expected:
            raise RuntimeError("adapter sync: SGLang loaded it without the comparison of its SHA-256")
        return result

    def check_and_load(self: Any, ref: Any, tensors: dict[str, torch.Tensor], *rest: Any, **named: Any) -> Any:
        began, found = time.monotonic(), {}
        if expected:
            sent, found = expected.pop(), sha256(tensors)
            if wrong := sorted(name for name in sent.keys() | found if sent.get(name) != found.get(name)):
                raise RuntimeError(f"adapter sync MISMATCH: {len(wrong)} of {len(sent)} tensors differ: {wrong[:5]}")
        compared = time.monotonic()
        result = load(self, ref, tensors, *rest, **named)
        parts = (len(found), len(tensors), compared - began, time.monotonic() - compared)
        log.info("adapter sync: compared %d of %d tensors in %.3f s, loaded them in %.3f s", *parts)
        return result

    BaseTpWorker.load_lora_adapter_from_tensors = receive_unchecked
    LoRAManager.load_lora_adapter_from_tensors = check_and_load
    teach((megatron_dapo_base.ACTION,), megatron_dapo_base.answer)
    _release_every_request()


def _release_every_request() -> None:
    """SGLang 0.5.17 counts a request as a user of its adapter for ever if it is aborted in the queue or its client is
    gone. The adapter is then never unloaded, and every later one waits for that. Newer ones release each once."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    if hasattr(TokenizerManager, "_release_lora_once"):
        return
    remove = TokenizerManager._remove_req_state

    def remove_and_release(self: Any, *request: Any) -> Any:
        state = remove(self, *request)
        if state is not None and state.obj.lora_path and (adapter := getattr(state.obj, "lora_id", None)):
            state.obj.lora_path = None  # SGLang asks for it where it releases the adapter itself
            asyncio.create_task(release(self.lora_registry, adapter, state.finished))  # noqa: RUF006, as SGLang does
        return state

    async def release(registry: Any, adapter: str, finished: bool) -> None:
        if not finished:  # the client is gone: the scheduler has just been told to abort
            await asyncio.sleep(ABORT_SECONDS)
        await registry.release(adapter)

    TokenizerManager._remove_req_state = remove_and_release
