"""Predicts cycles of products in AMX tiles from the assembly of the native kernels, by a model of Sapphire Rapids.

Times of tiles are assumed: TDPBF16PS begins every 16 cycles and takes 52, a load of a tile takes 8 and 45, a store 16.
Six operations are issued per cycle, in order; 512 are under way. How many operations a tile's loads and stores count as
is not known: one and two per line, or half of that. Memory gives 5 bytes per cycle.
"""

import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from tk.core.native.source import COMMON_FLAGS
from tk.infer.engine.kernels.native.binding.library import SOURCE

BYTES_PER_CYCLE: Final = 5  # of memory: 15 GB/s of a core at 3 GHz
ZEROED: Final = [f"tilezero\t%tmm{i}" for i in range(4)]
BETWEEN: Final = ["leaq\t(%r9), %rbp"] * 28  # about what lies between loops
VECTOR: Final = ("p0", "p5")
SCALAR: Final = ("p1", "p6", "p10")
# Of an instruction's name: its ports, its latency in cycles. The first match counts.
PORTS: Final = (
    (r"tdp", ("tiles",), 52),
    (r"vfm", VECTOR, 4),
    (r"v(add|sub)ps", VECTOR, 3),
    (r"vps[rl]l", ("p0",), 1),
    (r"vperm(ps|d)", ("p5",), 3),
    (r"vpermw", ("p5",), 4),
    (r"v(mov|pxor|xor)|tilezero|xorl", (), 0),
    (r"v", VECTOR, 1),
    (r"imul", ("p1",), 3),
    (r"", SCALAR, 1),
)


class PortUse(NamedTuple):
    """An operation on one of `ports`, which it keeps for some cycles."""

    ports: tuple[str, ...]
    kept: int
    latency: int
    sources: tuple[str, ...]
    target: str


def assembly(compiler: str) -> list[str]:
    """Returns the lines that a compiler makes of the kernels for amx."""
    unit = next(unit for unit in SOURCE.units if unit.name == "amx")
    command = [compiler, *COMMON_FLAGS, *unit.flags, "-S", "-o", "-", str(unit.source)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [line.split("#")[0].rstrip() for line in text.splitlines()]


def inner_loops(lines: Sequence[str], function: str) -> Iterator[list[str]]:
    """Yields the instructions of a function's loops that contain no other loop, without jumps."""
    begin, labels, last = lines.index(function + ":"), dict[str, int](), 0
    for i in range(begin, next(i for i in range(begin, len(lines)) if lines[i].startswith("\t.size\t" + function))):
        if label := re.match(r"(\.L\d+):", lines[i]):
            labels[label[1]] = i
        jump = re.match(r"\tj\w+\t(\.L\d+)", lines[i])
        if jump and labels.get(jump[1], -1) > last:
            last = labels[jump[1]]
            yield [line.strip() for line in lines[last:i] if re.match(r"\t(?!j|\.)", line)]


def parts(line: str, rows: int, per_line: float) -> tuple[list[PortUse], float]:
    """Returns the operations of an instruction, tiles of rows having `rows` rows, and what it counts as."""
    name, _, operands = line.partition("\t")
    split = re.split(r",\s*(?![^(]*\))", operands)
    registers = [tuple(re.findall(r"%\w+", operand)) for operand in split]
    every, memory = tuple(sum(registers, ())), next((i for i, operand in enumerate(split) if "(" in operand), None)
    target = split[-1].split("{")[0]
    if name.startswith("tileload"):
        height = rows if target <= "%tmm5" else 16
        return [PortUse(("l0", "l1"), 1, 45, every[:-1], target)] * height, height * per_line
    if name == "tilestored":
        return [PortUse(("store",), 1, 1, every, "")] * rows, 2 * rows * per_line
    if memory is not None and memory == len(split) - 1 and "mov" in name:
        return [PortUse(("store",), 1, 1, every, "")], 1
    wide, found = "zmm" in operands and "{1to" not in operands, list[PortUse]()
    if memory is not None and not name.startswith("lea"):
        moves, to = "mov" in name or "broadcast" in name, "" if name.startswith("prefetch") else "loaded"
        loads = ("l0", "l1") if wide else ("l2", "l0", "l1")
        found = [PortUse(loads, 1, 8 if name[0] == "v" else 5, registers[memory], target if moves else to)]
        if moves or name.startswith("prefetch"):
            return found, 1
        every += ("loaded",)
    ports, latency = next((ports, latency) for pattern, ports, latency in PORTS if re.match(pattern, name))
    if name == "vpermw":
        found.append(PortUse(("p0",), 1, 0, every[:-1], ""))
    reads = () if name.startswith(("tilezero", "xor")) else every
    if name.startswith("v") and not re.match(r"vfm|vpternlog", name):
        reads = tuple(each for each in every if each != target) or every
    return [*found, PortUse(ports, 16 if name[0] == "t" else 1, latency, reads, target)], 1 + (name == "vpermw")


def cycles(trace: Sequence[tuple[str, int]], per_line: float, times: int = 12) -> float:
    """Returns the cycles of one repetition of instructions, each with the rows of its tiles, among many.

    A line of a tile that is loaded counts as `per_line` operations, one that is stored as twice as many.
    """
    decoded = [parts(line, rows, per_line) for line, rows in trace]
    ready, busy = dict[str, int](), dict[str, set[int]]()
    window, ended, issued, places, ends = deque[tuple[int, float]](), 0, 0.0, 0.0, list[int]()
    for _ in range(times):
        for found, taken in decoded:
            while window and places + taken > 512:
                end, left = window.popleft()
                issued, places = max(issued, float(end)), places - left
            issued += taken / 6
            for part in found:
                start = max((int(issued) + 1, *(ready.get(each, 0) for each in part.sources)))
                free = [(first_free(busy.setdefault(port, set()), start, part.kept), port) for port in part.ports]
                start, port = min(free, default=(start, ""))
                if port:
                    busy[port].update(range(start, start + part.kept))
                ended = max(ended, start + part.latency)
                if part.target:
                    ready[part.target] = start + part.latency
            window.append((ended, taken))
            places += taken
        ends.append(ended)
    return (ends[-1] - ends[times // 2 - 1]) / (times - times // 2)


def first_free(busy: set[int], start: int, kept: int) -> int:
    """Returns the first cycle from `start` on at which a port is free for `kept` cycles."""
    while any(start + i in busy for i in range(kept)):
        start += 1
    return start


def number(loop: Sequence[str], pattern: str) -> int:
    """Returns how many instructions of a loop contain a pattern."""
    return sum(bool(re.search(pattern, line)) for line in loop)


def with_tiles(loops: Sequence[list[str]], bits: int, steps: int, rows: int, per_line: float) -> float:
    """Returns the cycles of a step of 32 columns of two widened panels, of groups of `steps`, times at most 32 rows."""
    wide, together, left = rows > 16, 2 if bits == 4 else 1, rows
    tiles = next(loop for loop in loops if number(loop, "tdp") == (4 if wide else 2))
    adds = next(loop for loop in loops if number(loop, "vfm") == (4 if bits == 4 else 1) and len(loop) < 15)
    stores = [f"tilestored\t%tmm{i}, (%rax)" for i in range(4 if wide else 2)]
    trace = list[str]()
    for k in range(steps * together):
        share = min(-(-32 // (steps * together)), left)
        left -= share
        trace += [*ZEROED * (k % steps == 0), *tiles, *BETWEEN, *adds * (2 * share)]
        trace += stores * (k % steps == steps - 1)
    return cycles([(line, min(rows, 16)) for line in trace], per_line) / (steps * together)


def of_codes(loops: Sequence[list[str]], bits: int, steps: int, rows: int, per_line: float) -> float:
    """Returns the cycles of a step of 32 columns of two panels of codes times rows."""
    widening = "vptern" if bits == 8 else "vpermw"
    widen = next(loop for loop in loops if number(loop, widening) == 4 and not number(loop, "vfm"))
    few = next(loop for loop in loops if number(loop, "vfm") == 128 // bits * rows) if rows <= 2 else []
    if few:  # a line of four panels
        return cycles([(line, 1) for line in few], per_line, 30) * bits / 2
    found = 2 * bits * cycles([(line, 16) for line in widen], per_line, 40)  # a line of each panel, of as many as bits
    for blocks, left in ((rows // 32, 32), (1, rows % 32)):
        found += blocks * with_tiles(loops, bits, steps, left, per_line) if blocks and left else 0
    return found


def main() -> None:
    """Prints the cycles of 32 columns of two panels in bf16, int8 and int4, and their speed beside bf16's."""
    lines = assembly(sys.argv[1] if len(sys.argv) > 1 else "gcc")
    coded, dense = list(inner_loops(lines, "sum_codes")), list(inner_loops(lines, "sum_group"))
    print("| rows | weights | columns of a group | cycles | cycles of memory | of bf16's speed |\n" + "|---" * 6 + "|")
    for rows in (1, 8, 16, 32, 128, 256):
        tile = [(line, min(rows, 16)) for line in dense[0 if rows > 16 else -1]]
        most = cycles(tile, 1, 40) * (rows / 32 if rows > 16 else 1 / 2), 128 * 16 / BYTES_PER_CYCLE
        print(f"| {rows} | bf16 | | {most[0]:.0f} | {most[1]:.0f} | 1 |")
        for bits, steps in ((8, 3), (8, 4), (4, 1)):
            read = (128 * bits + 128 / steps) / BYTES_PER_CYCLE
            found = [of_codes(coded, bits, steps, rows, per_line) for per_line in (1, 0.5)]
            memory = rows <= 32  # of prompts the products alone are compared: more rows pass weights that were read
            speeds = [max(most[: 1 + memory]) / max(each, read * memory) for each in found]
            print(
                f"| {rows} | int{bits} | {32 * steps} | {found[0]:.0f} to {found[1]:.0f} | {read:.0f} "
                f"| {speeds[0]:.2f} to {speeds[1]:.2f} |"
            )


if __name__ == "__main__":
    main()
