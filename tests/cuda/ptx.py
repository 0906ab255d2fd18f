"""Runs the assembly of a Triton kernel on the cpu, within Triton's interpreter: the instructions that ``mma_linear``
and ``wgmma_sdpa`` have, for what the threads of a program do with one another.

Threads of a warp go on together where they are at the same instruction, those that are behind first. A warp goes on
until it has to wait for others. What is asynchronous lands as late as it may, and its place holds NaNs until then, as
do registers and shared memory that nothing was written to: what reads too early gives NaNs. Loads and stores outside of
memory, ones that are not aligned, barriers that some threads of a warp never reach and programs that wait forever raise
``Fault``.

Facts of instructions: PTX ISA 9.0, section 9.7.
"""

import ctypes
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

WARP = 32
DYNAMIC = 1024  # where ``global_smem`` is; nothing is below
SHARED_BYTES = 227 << 10
TYPES = {"pred": np.bool_, "b16": np.uint16, "b32": np.uint32, "f32": np.uint32, "b64": np.uint64}
ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.fmax,
              "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "shl": np.left_shift,
              "shr": np.right_shift}  # fmt: skip
NUMPY = {"fp32": np.float32, "int32": np.int32}
COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
               "ge": np.greater_equal}  # fmt: skip


class Fault(Exception):
    """What a card would not have done, or not always."""


@dataclass
class Barrier:
    """An mbarrier: of a phase, arrivals and bytes that are still to come. ``copies`` are on their way, and land when it
    was ``asked`` for twice.
    """

    expected: int
    arrivals: int
    phase: int = 0
    bytes: int = 0
    asked: bool = False
    copies: list = field(default_factory=list)

    def arrive(self) -> None:
        if self.arrivals == 0:
            raise Fault("a barrier has more arrivals than its phase expects")
        self.arrivals -= 1
        self.settle()

    def settle(self) -> None:
        if self.arrivals == 0 and self.bytes == 0:
            self.phase, self.arrivals = self.phase ^ 1, self.expected


class Program:
    """One block of assembly, without ``$`` operands taken apart: a list of instructions, and labels."""

    def __init__(self, text: str):
        body = text.strip()
        body = body[1:-1] if body.startswith("{") else body
        self.registers, self.shared, self.labels, self.instructions = {}, {}, {}, []
        for statement in re.findall(r"\s*([^;]+);", body):
            while label := re.match(r"\s*([A-Za-z_]\w*):\s*", statement):
                self.labels[label.group(1)] = len(self.instructions)
                statement = statement[label.end() :]
            self._add(statement.strip())
        self.labels |= {name: len(self.instructions) for name in re.findall(r"(\w+):\s*$", body)}
        unknown = {i.operands[-1] for i in self.instructions if i.op == "bra"} - self.labels.keys()
        if unknown:
            raise Fault(f"branches to {', '.join(sorted(unknown))}, which is nowhere")

    def _add(self, statement: str) -> None:
        if statement.startswith(".reg"):
            kind, names = re.match(r"\.reg \.(\w+)\s+(.*)", statement).groups()
            for name in names.replace(" ", "").split(","):
                stem, count = re.match(r"(\w+)(?:<(\d+)>)?$", name).groups()
                for register in [stem] if count is None else [f"{stem}{i}" for i in range(int(count))]:
                    if register in self.registers:
                        raise Fault(f"register {register} is declared twice")
                    self.registers[register] = TYPES[kind]
        elif statement.startswith(".shared"):
            align, name, size = re.match(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\]", statement).groups()
            self.shared[name] = int(align), int(size)
        else:
            guard, name, operands = re.match(r"(@!?\w+)?\s*([\w.:]+)\s*(.*)", statement, re.S).groups()
            parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", operands)
            self.instructions.append(Instruction(guard, name, parts))


@dataclass
class Instruction:
    guard: str | None
    name: str
    operands: list[str]

    @property
    def op(self) -> str:
        return self.name.split(".")[0]


class Block:
    """The threads of a program of a kernel at a block of assembly. ``memory``: where what may be read begins, and its
    bytes; ``dynamic``: bytes of shared memory that the kernel reserves.
    """

    def __init__(
        self,
        program: Program,
        operands: list[np.ndarray],
        results: int,
        memory: Sequence[tuple[int, int]] = (),
        dynamic: int = 0,
    ):
        self.program, self.warps, self.memory = program, len(operands[0]) // WARP, memory
        self.shared = np.full(SHARED_BYTES + DYNAMIC, 0xFF, np.uint8)
        self.symbols, at = {"global_smem": DYNAMIC}, len(self.shared)
        for name, (align, size) in program.shared.items():
            at = (at - size) // align * align
            self.symbols[name] = at
        self.end = DYNAMIC + dynamic
        if self.end > at:
            raise Fault(f"{dynamic} bytes and those of {', '.join(program.shared)} are more than {SHARED_BYTES}")
        self.barriers: dict[int, Barrier] = {}
        self.done = 0  # instructions that are not part of waiting
        self.results = [np.zeros(len(operands[0]), np.uint32) for _ in range(results)]
        bits = (operand.view(np.uint32) if operand.dtype == np.float32 else operand for operand in operands)
        self.operands = [operand.astype(np.uint64) for operand in bits]

    def run(self) -> list[np.ndarray]:
        """The results' bits."""
        running = {warp: self.warp(warp) for warp in range(self.warps)}
        at_barrier: set[int] = set()
        while running:
            before = self.done
            for warp in running.keys() - at_barrier:
                why = next(running[warp], "ends")
                if why == "ends":
                    del running[warp]
                elif why == "barrier":
                    at_barrier.add(warp)
            if len(at_barrier) == self.warps:
                at_barrier.clear()
            elif running and self.done == before:
                raise Fault(f"{len(running)} of {self.warps} warps wait forever")
        return self.results

    def loaded(self, address: int, size: int) -> bytes:
        """Of global memory."""
        if address % min(size, 16):
            raise Fault(f"{size} bytes at {address} are not aligned")
        if not any(start <= address and address + size <= start + length for start, length in self.memory):
            raise Fault(f"{size} bytes at {address} are of no operand")
        return ctypes.string_at(address, size)

    def warp(self, number: int) -> Iterator[str]:
        """Goes on until the warp has to wait, and says for what: "barrier", which all have to reach, or "copies"."""
        lanes = slice(number * WARP, number * WARP + WARP)
        inputs = {f"${len(self.results) + i}": operand[lanes] for i, operand in enumerate(self.operands)}
        outputs = {f"${i}": result[lanes] for i, result in enumerate(self.results)}
        state = Warp(self, number, inputs | outputs)
        pc = np.zeros(WARP, int)
        end = len(self.program.instructions)
        while (at := pc.min()) < end:
            active = pc == at
            instruction = self.program.instructions[at]
            taken = active.copy()
            if instruction.guard:
                name = instruction.guard.lstrip("@!")
                value = state.read(name, active)
                taken &= ~value if "!" in instruction.guard else value
            pc[active] = at + 1
            if instruction.op == "bra":
                pc[taken] = self.program.labels[instruction.operands[-1]]
                continue
            if not taken.any():
                continue
            self.done += "try_wait" not in instruction.name
            yield from state.execute(instruction, taken)


class Warp:
    """The registers of a warp and what instructions do to them."""

    def __init__(self, block: Block, number: int, operands: dict[str, np.ndarray]):
        rubbish = {
            name: np.frombuffer(b"\xff" * (WARP * kind(0).nbytes), kind).copy()
            for name, kind in block.program.registers.items()
        }
        self.block, self.number, self.registers = block, number, operands | rubbish
        self.written = defaultdict(lambda: np.zeros(WARP, bool))
        self.groups: list[list[tuple[int, bytes]]] = [[]]  # of copies that are not waited for by a barrier

    # Operands

    def read(self, name: str, active: np.ndarray) -> np.ndarray:
        if name in self.registers:
            register = self.registers[name]
            if register.dtype == np.bool_ and not self.written[name][active].all():
                raise Fault(f"{name} is read before it is set")
            return register
        if name in self.block.symbols:
            return np.full(WARP, self.block.symbols[name], np.uint32)
        if name.startswith("0f"):
            return np.full(WARP, int(name[2:], 16), np.uint32)
        return np.full(WARP, int(name, 0), np.int64)

    def write(self, name: str, value: np.ndarray, active: np.ndarray) -> None:
        if name == "_":
            return
        register = self.registers[name]
        if register.dtype == np.bool_:
            register[active] = value[active]
        else:
            bits = np.asarray(value)
            bits = bits.view(np.uint32) if bits.dtype == np.float32 else bits.astype(np.uint64, copy=False)
            register[active] = bits.astype(register.dtype, copy=False)[active]
        self.written[name][active] = True

    def numbers(self, name: str, active: np.ndarray, kind: str) -> np.ndarray:
        """An operand as ``kind`` says: ``u`` or ``s`` or ``f`` and its bits."""
        value = self.read(name, active)
        if kind == "f32":
            return value.astype(np.uint32).view(np.float32)
        size = {"16": np.uint16, "32": np.uint32, "64": np.uint64}[kind[1:]]
        value = value.astype(np.int64).astype(size) if value.dtype == np.int64 else value.astype(size)
        return value.view({2: np.int16, 4: np.int32, 8: np.int64}[value.itemsize]) if kind[0] == "s" else value

    @staticmethod
    def names(operand: str) -> list[str]:
        return operand.strip("{}").replace(" ", "").split(",")

    def address(self, operand: str, active: np.ndarray) -> np.ndarray:
        name, *offset = operand.strip("[]").replace(" ", "").split("+")
        return self.read(name, active).astype(np.uint64) + np.uint64(int(offset[0]) if offset else 0)

    # Memory

    def place(self, address: int, size: int) -> int:
        if address % size:
            raise Fault(f"{size} bytes at {address} of shared memory are not aligned")
        static = any(
            start <= address and address + size <= start + length
            for start, (_, length) in ((self.block.symbols[n], f) for n, f in self.block.program.shared.items())
        )
        if not static and not DYNAMIC <= address <= self.block.end - size:
            raise Fault(f"{size} bytes at {address} are not of the program's shared memory")
        return address

    def execute(self, instruction: Instruction, active: np.ndarray) -> Iterator[str]:
        handler = self.arithmetic if instruction.op in ARITHMETIC else getattr(self, "do_" + instruction.op, None)
        if handler is None:
            raise Fault(f"{instruction.name} is not known here")
        yield from handler(instruction.name, instruction.operands, active) or ()

    def do_mov(self, name, operands, active):
        to, source = operands
        width = np.uint32(16) if ".b32" in name else np.uint64(32)
        if source.startswith("{"):
            low, high = (self.read(part, active) for part in self.names(source))
            whole = np.uint32 if ".b32" in name else np.uint64
            self.write(to, low.astype(whole) | high.astype(whole) << width, active)
        elif to.startswith("{"):
            low, high = self.names(to)
            value = self.read(source, active)
            self.write(low, value, active)
            self.write(high, value >> width, active)
        else:
            self.write(to, self.read(source, active), active)

    def arithmetic(self, name, operands, active):
        kind = name.split(".")[-1].replace("b", "u")
        with np.errstate(over="ignore", invalid="ignore"):
            value = ARITHMETIC[name.split(".")[0]](*(self.numbers(operand, active, kind) for operand in operands[1:]))
        self.write(operands[0], value, active)

    def do_fma(self, name, operands, active):
        a, b, c = (self.numbers(operand, active, "f32").astype(np.float64) for operand in operands[1:])
        with np.errstate(over="ignore", invalid="ignore"):
            self.write(operands[0], (a * b + c).astype(np.float32), active)

    def do_mad(self, name, operands, active):
        kind = name.split(".")[-1]
        wide = ".wide." in name
        a, b = (self.numbers(operand, active, kind).astype(np.int64) for operand in operands[1:3])
        c = self.numbers(operands[3], active, "u64" if wide else "u32")
        self.write(operands[0], (a * b).astype(np.uint64) + c.astype(np.uint64), active)

    def do_shf(self, name, operands, active):
        low, high, count = (self.numbers(operand, active, "u32").astype(np.uint64) for operand in operands[1:])
        self.write(operands[0], (high << np.uint64(32) | low) >> (count & np.uint64(31)), active)

    def do_lop3(self, name, operands, active):
        a, b, c, table = (self.numbers(operand, active, "u32") for operand in operands[1:])
        value = np.zeros(WARP, np.uint32)
        for case in range(8):
            if table[0] >> case & 1:
                value |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
        self.write(operands[0], value, active)

    def do_prmt(self, name, operands, active):
        a, b, chosen = (self.numbers(operand, active, "u32") for operand in operands[1:])
        both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        value = np.zeros(WARP, np.uint64)
        for i in range(4):
            byte = int(chosen[0]) >> 4 * i & 7
            value |= (both >> np.uint64(8 * byte) & np.uint64(0xFF)) << np.uint64(8 * i)
        self.write(operands[0], value, active)

    def do_setp(self, name, operands, active):
        _, comparison, *rest = name.split(".")
        kind = rest[-1].replace("b", "u")
        value = COMPARISONS[comparison](*(self.numbers(operand, active, kind) for operand in operands[1:3]))
        if len(rest) == 2:
            also = self.read(operands[3], active)
            value = value & also if rest[0] == "and" else value | also
        self.write(operands[0], value, active)

    def do_cvt(self, name, operands, active):
        if name.endswith(".bf16x2.f32"):  # the first is the upper half
            upper, lower = (rounded(self.numbers(operand, active, "u32")) for operand in operands[1:])
            self.write(operands[0], upper << np.uint64(16) | lower, active)
        elif name.endswith(".bf16.f32"):
            self.write(operands[0], rounded(self.numbers(operands[1], active, "u32")), active)
        elif name.endswith(".f32.f16"):
            value = self.numbers(operands[1], active, "u16").view(np.float16)
            self.write(operands[0], value.astype(np.float32), active)
        else:
            self.write(operands[0], self.numbers(operands[1], active, "u32"), active)

    def do_ex2(self, name, operands, active):
        self.write(operands[0], np.exp2(self.numbers(operands[1], active, "f32")), active)

    def do_selp(self, name, operands, active):
        kind = name.split(".")[-1].replace("s", "u")
        first, second = (self.numbers(operand, active, kind) for operand in operands[1:3])
        self.write(operands[0], np.where(self.read(operands[3], active), first, second), active)

    # Shared and global memory

    def words(self, name: str) -> int:
        return int(re.search(r"\.v(\d)", name).group(1)) if ".v" in name else 1

    def do_ld(self, name, operands, active):
        registers, addresses = self.names(operands[0]), self.address(operands[1], active)
        size = 4 * self.words(name)
        values = np.zeros((WARP, self.words(name)), np.uint32)
        for lane in np.flatnonzero(active):
            if ".global" in name:
                values[lane] = np.frombuffer(self.block.loaded(int(addresses[lane]), size), np.uint32)
            else:
                place = self.place(int(addresses[lane]), size)
                values[lane] = self.block.shared[place : place + size].view(np.uint32)
        for i, register in enumerate(registers):
            self.write(register, values[:, i], active)

    def do_st(self, name, operands, active):
        addresses, size = self.address(operands[0], active), 4 * self.words(name)
        values = np.stack([self.numbers(part, active, "u32") for part in self.names(operands[1])], 1)
        for lane in np.flatnonzero(active):
            place = self.place(int(addresses[lane]), size)
            self.block.shared[place : place + size] = np.ascontiguousarray(values[lane]).view(np.uint8)

    def do_cp(self, name, operands, active):
        if "bulk" in name:
            self.copy_in_bulk(operands, active)
        elif "commit_group" in name:
            self.groups.append([])
        elif "wait" in name:
            left = int(operands[0]) + 1 if "wait_group" in name else 0
            while len(self.groups) > left:
                self.land(self.groups.pop(0))
            self.groups = self.groups or [[]]
        else:
            to, source = (self.address(operand, active) for operand in operands[:2])
            known = self.read(operands[3], active) if len(operands) > 3 else np.full(WARP, 16)
            for lane in np.flatnonzero(active):
                place, bytes_known = self.place(int(to[lane]), 16), int(known[lane])
                data = self.block.loaded(int(source[lane]), 16) if bytes_known else b""
                self.block.shared[place : place + 16] = 0xFF
                self.groups[-1].append((place, data[:bytes_known].ljust(16, b"\0")))

    def land(self, copies: list[tuple[int, bytes]]) -> None:
        for to, data in copies:
            self.block.shared[to : to + len(data)] = np.frombuffer(data, np.uint8)

    def copy_in_bulk(self, operands, active):
        (lane,) = np.flatnonzero(active)
        to, source, barrier = (int(self.address(operands[i], active)[lane]) for i in (0, 1, 3))
        size = int(self.read(operands[2], active)[lane])
        if to % 16 or source % 16 or size % 16:
            raise Fault(f"a copy of {size} bytes from {source} to {to} is not of 16 bytes")
        self.place(to - to % 16, 16), self.place(to + size - 16, 16)
        self.block.shared[to : to + size] = 0xFF
        self.block.barriers[barrier].copies.append((to, self.block.loaded(source, size)))

    def do_createpolicy(self, name, operands, active):
        self.write(operands[0], np.zeros(WARP, np.uint64), active)

    # Threads among one another

    def do_mbarrier(self, name, operands, active):
        barriers = self.block.barriers
        for lane in np.flatnonzero(active):
            if "try_wait" in name:
                break
            where = operands[0] if ".init" in name else operands[1]
            at = self.place(int(self.address(where, active)[lane]), 8)
            if ".init" in name:
                count = int(self.read(operands[1], active)[lane])
                barriers[at] = Barrier(count, count)
            else:
                if ".expect_tx" in name:
                    barriers[at].bytes += int(self.read(operands[2], active)[lane])
                barriers[at].arrive()
        if "try_wait" in name:
            at = {int(address) for address in self.address(operands[1], active)[active]}
            parity = {int(p) for p in self.numbers(operands[2], active, "u32")[active]}
            if len(at) > 1 or len(parity) > 1 or not active.all():
                raise Fault("threads of a warp wait for different barriers")
            barrier = barriers[at.pop()]
            asked, barrier.asked = barrier.asked, barrier.phase == min(parity)
            if barrier.asked and asked:
                self.land(barrier.copies)
                barrier.bytes -= sum(len(data) for _, data in barrier.copies)
                barrier.copies = []
                barrier.settle()
            there = barrier.phase != min(parity)
            self.write(operands[0], np.full(WARP, there), active)
            if asked and not there:
                yield "copies"

    def do_bar(self, name, operands, active):
        if not active.all():
            raise Fault(f"only {active.sum()} threads of a warp reach {name}")
        if ".warp" not in name:
            yield "barrier"

    def do_fence(self, name, operands, active):
        pass

    def do_elect(self, name, operands, active):
        first = np.arange(WARP) == np.flatnonzero(active)[0]
        self.write(operands[0].split("|")[1], first, active)

    def do_shfl(self, name, operands, active):
        value, lanes = self.read(operands[1], active), np.arange(WARP)
        source = lanes ^ int(operands[2]) if ".bfly" in name else np.full(WARP, int(operands[2]))
        self.write(operands[0], value[source], active)

    def do_vote(self, name, operands, active):
        self.write(operands[0], np.full(WARP, self.read(operands[1], active)[active].any()), active)

    def do_mma(self, name, operands, active):
        k = int(re.search(r"m16n8k(\d+)", name).group(1))
        pair = np.arange(WARP) % 4 * 2
        b = np.zeros((k, 8))
        for i, part in enumerate(self.names(operands[2])):
            for half, value in enumerate(self.halves(part, active)):
                b[pair + half + 8 * i, np.arange(WARP) // 4] = value
        a = self.fragment(self.names(operands[1]), k, active)
        self.write_products(operands[0], a, b, self.names(operands[3]), active)

    def do_wgmma(self, name, operands, active):
        """As a warp's own product: it has 16 of the 64 rows."""
        if "mma_async" not in name:
            return
        n, turned = int(re.search(r"m64n(\d+)k16", name).group(1)), operands[-1] == "1"
        b = self.described(operands[2], n, 16, turned, active).T
        if operands[1].startswith("{"):
            a = self.fragment(self.names(operands[1]), 16, active)
        else:
            rows = self.number % 4 * 16
            a = self.described(operands[1], 64, 16, operands[-2] == "1", active)[rows : rows + 16]
        adds = self.read(operands[3], active)[0]
        before = self.names(operands[0]) if adds else ["0f00000000"] * len(self.names(operands[0]))
        self.write_products(operands[0], a, b, before, active)

    def fragment(self, names: list[str], k: int, active: np.ndarray) -> np.ndarray:
        """16 rows and ``k`` columns that lie in registers."""
        a = np.zeros((16, k))
        for i, part in enumerate(names):
            for half, value in enumerate(self.halves(part, active)):
                a[np.arange(WARP) // 4 + 8 * (i % 2), np.arange(WARP) % 4 * 2 + half + 8 * (i // 2)] = value
        return a

    def described(self, name: str, rows: int, k: int, turned: bool, active: np.ndarray) -> np.ndarray:
        """``[rows, k]`` of shared memory, by a descriptor of the swizzle of 128 bytes; ``turned``: where ``rows``
        follow one another in memory.
        """
        descriptor = int(self.read(name, active)[0])
        if descriptor >> 62 != 1:
            raise Fault(f"the descriptor {descriptor:#x} is not of the swizzle of 128 bytes")
        start, leading, stride = (16 * (descriptor >> at & 0x3FFF) for at in (0, 16, 32))
        row, column = np.arange(rows)[:, None], np.arange(k)[None, :]
        if turned:
            at = row // 64 * leading + column // 8 * stride + column % 8 * 128 + row % 64 * 2
        else:
            at = row // 8 * stride + row % 8 * 128 + column * 2
        at = start + at
        at ^= (at >> 7 & 7) << 4
        self.place(int(at.min()) & ~1, 2), self.place(int(at.max()) & ~1, 2)
        return (self.block.shared.view(np.uint16)[at // 2].astype(np.uint32) << np.uint32(16)).view(np.float32)

    def write_products(self, to: str, a: np.ndarray, b: np.ndarray, before: list[str], active: np.ndarray) -> None:
        """16 rows of ``a @ b`` and what they begin at: four registers for every eight columns."""
        if not active.all():
            raise Fault("a product of fragments without all threads of a warp")
        group, pair, made = np.arange(WARP) // 4, np.arange(WARP) % 4 * 2, []
        with np.errstate(over="ignore", invalid="ignore"):
            product = np.matmul(a.astype(np.float64), b)
            for i, start in enumerate(before):
                part = product[group + 8 * (i // 2 % 2), i // 4 * 8 + pair + i % 2]
                made.append((self.numbers(start, active, "f32") + part).astype(np.float32))
        for register, value in zip(self.names(to), made):  # which may be where the product began
            self.write(register, value, active)

    def halves(self, name: str, active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The two bfloat16 numbers of a register."""
        bits = self.numbers(name, active, "u32")
        return (bits << np.uint32(16)).view(np.float32), (bits & np.uint32(0xFFFF0000)).view(np.float32)


def rounded(bits: np.ndarray) -> np.ndarray:
    """float32 numbers to bfloat16, the nearest and of two the even one, by their bits."""
    wide = bits.astype(np.uint64)
    near = (wide + np.uint64(0x7FFF) + (wide >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(bits.view(np.float32)), np.uint64(0x7FFF), near)


@contextmanager
def assembly_runs(*operands: torch.Tensor, dynamic: int) -> Iterator[None]:
    """Blocks of assembly of kernels in Triton's interpreter run here. They may read the ``operands`` and have
    ``dynamic`` bytes of ``global_smem``.
    """
    memory = [(tensor.data_ptr(), tensor.nbytes) for tensor in operands]

    def create_inline_asm(builder, asm, constraints, arguments, types, is_pure, pack):
        threads = max(WARP, arguments[0].data.size)
        flat = [np.resize(argument.data, threads) for argument in arguments]
        bits = Block(Program(asm), flat, len(types), memory, dynamic).run()
        shape, kinds = arguments[0].data.shape, [getattr(t, "scalar", t) for t in types]
        made = [b[: arguments[0].data.size].view(NUMPY[str(kind)]).reshape(shape) for b, kind in zip(bits, kinds)]
        handles = [TensorHandle(data, kind) for data, kind in zip(made, kinds)]
        return SimpleNamespace(get_result=handles.__getitem__)

    with patch.object(InterpreterBuilder, "create_inline_asm", create_inline_asm):
        yield
