"""What bytes cost on a tree of network levels: rates of links, and collectives as closed forms.

Notation: n ranks, b bytes a rank, ``alpha`` seconds of latency, ``beta`` bytes/s of a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from semel.planning.cluster import Cluster, Level, Technology
from semel.planning.layout import Layout

Loads: TypeAlias = tuple[tuple[str, float], ...]
"""(Level, bytes a device on it)."""

PACKET = 4096.0
"""Bytes of a packet on a lossy transport (the largest MTU of RoCE)."""


# Closed forms of one level -------------------------------------------------------------------------------------------

def ring_all_reduce(n: int, b: float, alpha: float, beta: float) -> float:
    """Seconds: reduce-scatter and all-gather around a ring, 2 (n-1) (alpha + b / (n beta))."""
    return 2 * (n - 1) * (alpha + b / (n * beta))


def ring_all_gather(n: int, b: float, alpha: float, beta: float) -> float:
    """Seconds; ``b`` is the gathered tensor: (n-1) (alpha + b / (n beta)). A reduce-scatter costs the same."""
    return (n - 1) * (alpha + b / (n * beta))


def tree_all_reduce(n: int, b: float, alpha: float, beta: float) -> float:
    """Seconds of double binary trees (Sanders, Speck, Traeff 2009): the bytes of a ring in 2 log2 n hops."""
    return 2 * math.ceil(math.log2(n)) * alpha + 2 * (n - 1) / n * b / beta if n > 1 else 0.0


def pairwise_all_to_all(n: int, b: float, alpha: float, beta: float, skew: float = 1.0) -> float:
    """Seconds; a rank sends ``b`` in total, its own share included: (n-1) (alpha + skew b / (n beta)).

    ``skew``: bytes of the busiest rank over the mean.
    """
    return (n - 1) * (alpha + skew * b / (n * beta))


def hierarchical_all_reduce(groups: int, members: int, b: float, inside: tuple[float, float],
                            across: tuple[float, float]) -> float:
    """Seconds: reduce-scatter among ``members``, all-reduce of b / members across ``groups``, all-gather inside.

    ``inside``, ``across``: (alpha, beta).
    """
    return (2 * ring_all_gather(members, b, *inside) + ring_all_reduce(groups, b / members, *across))


# What a technology makes of a level ----------------------------------------------------------------------------------

def collision_share(paths: int, flows: float) -> float:
    """Mean over largest load when ``flows`` equal flows a path are hashed to ``paths`` equal paths.

    Balls into bins with many balls: the fullest of n bins holds m/n + sqrt(2 (m/n) ln n) of m balls (Raab and Steger
    1998, theorem 1), and a collective waits for its slowest flow.
    """
    return 1.0 if paths <= 1 else 1.0 / (1.0 + math.sqrt(2.0 * math.log(paths) / flows))


def go_back_n_share(loss: float, window: float) -> float:
    """Goodput share of go-back-N with ``window`` packets in flight: (1-p) / (1-p + p W) (Bertsekas and Gallager, Data
    Networks, section 2.4.2)."""
    return (1.0 - loss) / (1.0 - loss + loss * max(1.0, window))


def queue_pairs(level: Level, technology: Technology) -> int:
    """Flows a device opens to a peer: as many as bandwidth x delay asks for, within the technology's limits."""
    if not technology.most_queue_pairs:
        return technology.queue_pairs
    needed = math.ceil(level.bandwidth * 2 * level.delay / (technology.segment * technology.outstanding))
    return min(technology.most_queue_pairs, max(technology.queue_pairs, needed))


def rate(level: Level, technology: Technology, unit: int = 1) -> float:
    """Bytes/s that a device has across ``level`` when all use it.

    That is after sharing, oversubscription, collisions, loss, the window of its queue pairs, and the headroom that
    lossless flow control needs on a long link.

    ``unit``: devices in a unit of the level below, over which ``sharing = "unit"`` divides the bandwidth.
    """
    port = level.bandwidth / (unit if level.sharing == "unit" else 1)
    flows = queue_pairs(level, technology)
    share = technology.efficiency
    if technology.routing == "ecmp":
        share *= collision_share(technology.paths, flows * level.oversubscription)
    bandwidth = port / level.oversubscription * share
    trip = 2 * level.delay
    window = flows * technology.segment * technology.outstanding
    if trip > 0:
        bandwidth = min(bandwidth, window / trip)
        if technology.lossless and technology.buffer:
            bandwidth = min(bandwidth, technology.buffer / trip)
    if level.loss and not technology.lossless:
        if technology.retransmit == "selective":
            bandwidth *= 1.0 - level.loss
        else:
            bandwidth *= go_back_n_share(level.loss, bandwidth * trip / PACKET)
    return bandwidth


# A group of ranks on the tree ----------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Span:
    """A group of ``n`` ranks over the tree: ``factors[l]`` units of level l-1 are joined at level l; their product is n
    (or a little more where counts do not divide)."""

    n: int
    factors: tuple[int, ...]

    @property
    def top(self) -> int:
        """Index of the outermost level that the group crosses; -1 for a single rank."""
        return max((index for index, factor in enumerate(self.factors) if factor > 1), default=-1)


def span(cluster: Cluster, parts: Sequence[tuple[int, int]]) -> Span:
    """The worst placed group of ranks ``parts``: (stride in devices, ranks), innermost first.

    A group that does not divide its unit straddles two: it is then taken as halved there.
    """
    sizes = cluster.sizes
    factors = [1] * len(sizes)
    total = 1
    for stride, n in parts:
        total *= n
        inside = 1
        for index, size in enumerate(sizes):
            if index == len(sizes) - 1:
                members = n
            elif stride * n <= size:
                members = n if size % (stride * n) == 0 else (n + 1) // 2
            else:
                members = max(1, size // stride)
            members = max(members, inside)
            factors[index] *= -(-members // inside)
            inside = members
    last = len(sizes) - 1
    if last and cluster.units:
        factors[last] = min(factors[last], max(1, cluster.levels[last].count))
    return Span(total, tuple(factors))


@dataclass(frozen=True)
class Fabric:
    """A cluster under one choice of technologies: what transfers cost on it."""

    cluster: Cluster
    levels: tuple[Level, ...]
    technologies: tuple[Technology, ...]
    links: Mapping[str, float]
    """Level -> bytes/s a device."""
    known: dict[tuple, tuple[float, Loads]] = field(default_factory=dict, repr=False, compare=False)
    """What was asked before: a search asks for the same collectives again and again."""

    @classmethod
    def of(cls, cluster: Cluster, layout: Layout) -> Fabric:
        """Raises KeyError for a technology that a level does not have, or a level that the cluster does not have."""
        return cls.choose(cluster, layout.network)

    @classmethod
    def choose(cls, cluster: Cluster, network: Mapping[str, str]) -> Fabric:
        for name in network:
            cluster.level(name)
        chosen = tuple(level.technology(network.get(level.name)) for level in cluster.levels)
        sizes = (1, *cluster.sizes)
        links = {level.name: rate(level, technology, size)
                 for level, technology, size in zip(cluster.levels, chosen, sizes, strict=False)}
        return cls(cluster, cluster.levels, chosen, links)

    def collective(self, kind: str, group: Span, b: float, *, skew: float = 1.0,
                   ratio: Mapping[str, float] | None = None, copies: int = 1, units: int = 0,
                   patterns: Mapping[int, int] | None = None) -> tuple[float, Loads]:
        """(latency, loads) of a collective of ``b`` bytes a rank.

        It goes level by level, pipelined: alone it takes latency + the longest of bytes / rate over its loads. Bytes on
        a link are what it would carry at full rate in the same time: small messages and incast make them more.

        ``b``: the whole tensor for all_reduce, all_gather (gathered) and reduce_scatter; what a rank sends in total for
        all_to_all. ``skew``: busiest rank over mean. ``ratio``: level -> factor on bytes there (compression).
        ``copies``: how many destinations get the same row (top-k experts), of which a hierarchical all-to-all sends one
        a unit, to at most ``units`` of them. ``patterns``: level -> axes that use it, for optical circuits.
        """
        latency, loads = 0.0, [0.0] * len(self.levels)
        inside, steps, slowest, ring = 1, 1, 0.0, False
        for index, factor in enumerate(group.factors):
            if factor <= 1:
                continue
            level, technology = self.levels[index], self.technologies[index]
            alpha, algorithm = level.delay, technology.collective
            if technology.routing == "circuit" and patterns and patterns.get(index, 1) > 1:
                latency += technology.reconfiguration
            if kind == "all_to_all":
                peers = inside * (factor - 1)
                moved = skew * b * peers / group.n
                if algorithm == "hierarchical":
                    peers = factor - 1
                    distinct = factor * (1 - (1 - 1 / factor) ** copies)
                    moved *= min(distinct, units or distinct, copies) / copies
                latency += math.ceil(peers / technology.concurrent) * alpha
                moved /= self._incast(technology, peers, b / group.n)
                if technology.routing == "circuit":
                    moved *= max(1.0, factor / 4)  # mean hops around a ring of direct circuits
            else:
                once = kind != "all_reduce"
                moved = (1 if once else 2) * (factor - 1) / factor * b / inside
                if algorithm == "in-network":
                    latency += (1 if once else 2) * alpha
                    moved = moved if once else b / inside  # up once and down once, at the same time
                elif algorithm == "tree":
                    latency += (1 if once else 2) * math.ceil(math.log2(factor)) * alpha
                elif algorithm == "ring" and not level.domain:
                    steps, slowest, ring = steps * factor, max(slowest, alpha), True  # one ring over all such levels
                else:
                    latency += (1 if once else 2) * (factor - 1) * alpha
            if ratio:
                moved *= ratio.get(level.name, 1.0)
            moved /= level.messages(max(1.0, b / (inside if kind != "all_to_all" else group.n)))
            self._carry(loads, index, moved)
            inside *= factor
        if ring:
            latency += (1 if kind != "all_reduce" else 2) * (steps - 1) * slowest
        return latency, self._named(loads)

    def send(self, index: int, b: float, stride: int = 1,
             patterns: Mapping[int, int] | None = None) -> tuple[float, Loads]:
        """(latency, loads) of ``b`` bytes from each device of a block of ``stride`` to its peer across level ``index``.

        Uplinks of a level are pooled: where a unit holds more devices than the block, the others leave theirs to it,
        but a device's own port, the innermost level of the network, takes all its bytes.
        """
        if index < 0:
            return 0.0, ()
        level, technology = self.levels[index], self.technologies[index]
        latency = level.delay
        if technology.routing == "circuit" and patterns and patterns.get(index, 1) > 1:
            latency += technology.reconfiguration
        loads = [0.0] * len(self.levels)
        b /= level.messages(max(1.0, b))
        sizes = (1, *self.cluster.sizes)
        for each in range(index + 1) if not level.domain else (index,):
            if each < index and self.levels[each].domain:
                continue
            pooled = self.levels[each].sharing == "unit" or any(not below.domain for below in self.levels[:each])
            loads[each] = b * (min(1.0, stride / sizes[each]) if pooled else 1.0)
        return latency, self._named(loads)

    def _carry(self, loads: list[float], index: int, moved: float) -> None:
        loads[index] += moved
        if not self.levels[index].domain:
            for below in range(index):
                if not self.levels[below].domain:
                    loads[below] += moved

    def _named(self, loads: list[float]) -> Loads:
        return tuple((level.name, load) for level, load in zip(self.levels, loads, strict=True) if load > 0)

    def _incast(self, technology: Technology, peers: int, message: float) -> float:
        """Share of the rate that is left when several senders meet in one port's buffer."""
        senders = min(peers, technology.concurrent)
        burst = senders * min(message, technology.segment)
        if not technology.buffer or burst <= technology.buffer:
            return 1.0
        return max(technology.buffer / burst, 1.0 / senders)

    def seconds(self, latency: float, loads: Sequence[tuple[str, float]]) -> float:
        """Of a transfer alone: latency + the slowest of its links."""
        return latency + max((size / self.links[name] for name, size in loads), default=0.0)
