# SPDX-License-Identifier: Apache-2.0
"""How long a layer over ranks takes, by counting: bytes, messages, latency, products, and what chunks hide of it.

``python -m fusedmoe.distributed.forecast`` prints a table for Qwen3-30B-A3B on links of public documents. A model, not a measurement:
bench/ep.py sets its prediction for this machine beside what was measured.
"""

from dataclasses import dataclass, replace
from math import comb


@dataclass(frozen=True)
class Link:
    """What joins a device to the others: GB/s in one direction, and seconds that a message takes whatever its size."""

    gbytes: float
    latency: float
    efficiency: float = 0.8  # of the rate on paper; vendors report 0.8 to 0.95 for all-to-all of large rows

    def seconds(self, nbytes: float, messages: float) -> float:
        return messages * self.latency + nbytes / (self.gbytes * 1e9 * self.efficiency)


# NVLink 4: 900 GB/s for both directions of an H100 or H200, NDR InfiniBand: 400 Gbit/s a port (NVIDIA's data sheets). HCCS of an Atlas
# 800T A2: 392 GB/s for both directions and 200 Gbit/s of RoCE, as they are commonly quoted; sgl-kernel-npu reports 102 (dispatch) and 152
# GB/s (combine) on 8 NPUs, which fits. Latencies are guesses for one small message.
NVLINK, INFINIBAND = Link(450, 2e-6), Link(50, 5e-6)
HCCS, ROCE = Link(196, 5e-6), Link(25, 10e-6)


@dataclass(frozen=True)
class Machine:
    """Devices of one kind in nodes of one size."""

    inside: Link
    outside: Link
    node: int
    tflops: float  # that products of experts reach


H200 = Machine(NVLINK, INFINIBAND, 8, 600.0)
ATLAS = Machine(HCCS, ROCE, 8, 200.0)


@dataclass(frozen=True)
class Layer:
    """T: tokens of each rank."""

    T: int
    H: int
    I: int
    E: int
    k: int
    element: int = 2  # bytes
    mode: str = "exact"
    chunks: int = 1
    back: int = 4  # bytes of an element of the rows that come back in the exact mode: f32 on the CPU, the layer's dtype on a device


QWEN3_30B = Layer(4096, 2048, 768, 128, 8, back=2)


def ranks_of_a_token(E: int, k: int, ranks: int) -> float:
    """On how many ranks a token has experts, k of E drawn evenly, E/ranks on each (rank r: r*E//ranks to (r+1)*E//ranks)."""
    sizes = [(r + 1) * E // ranks - r * E // ranks for r in range(ranks)]
    return sum(1 - comb(E - n, k) / comb(E, k) for n in sizes)


def traffic(layer: Layer, ranks: int) -> dict[str, float]:
    """Bytes that a rank sends in a forward, as fusedmoe does it and as others would: rows once for each (token, rank), back a row
    for each (token, expert) (exact) or one in the layer's dtype for each (token, rank) (lean)."""
    away = (ranks - 1) / ranks
    rows, pairs = layer.T * ranks_of_a_token(layer.E, layer.k, ranks) * away, layer.T * layer.k * away
    row = layer.H * layer.element
    back = pairs * layer.H * layer.back if layer.mode == "exact" else rows * row
    own = dict(counts=(ranks - 1) * 8 * (3 + 2 * layer.chunks), pairs=8 * pairs, out=rows * row, back=back)
    return dict(own, total=sum(own.values()), k_rows=2 * pairs * row, all_gather=2 * layer.T * (ranks - 1) * row)


def _exchange(machine: Machine, ranks: int, nbytes: float) -> float:
    """One all-to-all: to the peers of the node and to the others at once."""
    near, far = min(machine.node, ranks) - 1, max(0, ranks - machine.node)
    if ranks == 1:
        return 0.0
    return max(machine.inside.seconds(nbytes * near / (ranks - 1), near), machine.outside.seconds(nbytes * far / (ranks - 1), far))


def forward(layer: Layer, machine: Machine, ranks: int) -> dict[str, float]:
    """Seconds of a forward: products, exchanges, all of it, and which share of the exchanges of rows is hidden behind products.

    Chunks: the first must come and the last must go home before and after the products; the rest runs beside them.
    """
    sent = traffic(layer, ranks)
    products = 6 * layer.T * layer.k * layer.H * layer.I / (machine.tflops * 1e12)
    first = _exchange(machine, ranks, sent["counts"]) + _exchange(machine, ranks, sent["pairs"])
    rows = sum(_exchange(machine, ranks, sent[way] / layer.chunks) for way in ("out", "back")) * layer.chunks
    exposed = rows / layer.chunks + max(0.0, (rows - products) * (1 - 1 / layer.chunks))
    return dict(products=products, exchange=first + rows, total=first + products + exposed, hidden=1 - exposed / rows if rows else 0.0)


def table(layer: Layer = QWEN3_30B, sizes: tuple[int, ...] = (8, 16, 32, 64, 128)) -> str:
    lines = ["| machine | ranks | mode | chunks | MB out + back | products ms | exchange ms | layer ms | hidden |", "|---" * 9 + "|"]
    for name, machine in (("H200, NVLink, NDR", H200), ("Atlas A2, HCCS, RoCE", ATLAS)):
        for ranks in sizes:
            for mode, chunks in (("exact", 1), ("lean", 1), ("lean", 4)):
                one = replace(layer, mode=mode, chunks=chunks)
                sent, time = traffic(one, ranks), forward(one, machine, ranks)
                ms = [f"{1e3 * time[key]:.2f}" for key in ("products", "exchange", "total")]
                cells = name, ranks, mode, chunks, f"{(sent['out'] + sent['back']) / 1e6:.0f}", *ms, f"{time['hidden']:.0%}"
                lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
