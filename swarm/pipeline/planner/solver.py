"""Search for the fastest plan: where to cut the layers, and which peer holds which span.

Max-min allocation is NP-hard. For a given cut, peers choose their spans one after the other by a smooth stand-in for
the minimum, the sum of -exp(-sharpness x load), which grows sharper from pass to pass; then pairs of peers choose
together. Cuts come from dynamic programs over all ranges of layers and are improved by shifting single boundaries.
Small swarms are solved exactly by branch and bound. Effort is counted and not timed: equal inputs give equal plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import TypeAlias

import numpy as np

from shoal.swarm.pipeline.planner.model import Flags, Floats, Indices, PlanningProblem, SpanTable

# Sharpness is in units of 1 / the best rate that could be reached.
SHARPNESS = tuple(float(one) for one in np.geomspace(0.3, 128, 24))
"""Sharpness of each pass: from where all stages count alike to where only the slowest ones do."""
FEW_SHARPNESS = SHARPNESS[1::2]
"""Sharpness of each pass for large swarms, where single peers matter less."""
LARGE = 80
"""Number of peers from which a swarm is large."""
PAIR_SHARPNESS = (60.0, 200.0)
PAIR_EFFORT = 100_000
"""Effort for pairs: about as many microseconds, counted and not timed."""
CLOSE_ENOUGH = 0.999
FLOOR = 1e-12
CEILING = 1e9
"""Limits of exponentials, so that sums still tell the small ones apart."""


def dual_prices(table: SpanTable, steps: int = 40) -> tuple[Floats, float]:
    """Dual prices of the stages, ``(stages,)`` with sum 1, and the upper bound on any rate that they prove.

    With prices w no assignment is faster than the sum over peers of their best span's rate times its price: the
    dual of the linear program in which a peer may share its time among spans. Multiplicative weights find w.
    """
    weights = np.full(table.stages, 1.0 / table.stages)
    best, bound = weights, np.inf
    for step in range(steps):
        worth = np.concatenate([[0.0], np.cumsum(weights)])
        values = table.rates * (worth[table.last + 1] - worth[table.first])
        choice = values.argmax(axis=1)
        value = float(values.max(axis=1).sum())
        if value < bound:
            best, bound = weights, value
        load = table.load(choice)
        mean = float(load.mean())
        if mean <= 0:
            break
        weights = weights * np.exp(-np.clip(load / mean - 1, -2, 2) * 0.5 / (1 + 0.1 * step))
        weights /= weights.sum()
    return best, bound


def assign(table: SpanTable, start: Indices | None = None, movable: Flags | None = None) -> Indices:
    """Assign spans to peers: ``(peers,)`` span indices, -1 for a peer that can hold none.

    Peers that are not ``movable`` keep what they have in ``start``. The rate is never below that of ``start``.
    """
    able = table.rates.max(axis=1, initial=0.0) > 0
    movable = able if movable is None else movable & able
    choice = np.full(len(able), -1, dtype=np.int64) if start is None else start.copy()
    if not movable.any():
        return choice
    _, bound = dual_prices(table)
    # The strongest first: the weak ones then even out what these leave.
    order = [int(one) for one in np.argsort(-table.rates.max(axis=1), kind="stable") if movable[one]]
    best, best_rate = choice.copy(), table.rate(choice)
    passes = SHARPNESS if len(order) < LARGE else FEW_SHARPNESS
    for sharpness in passes if start is None else passes[len(passes) // 2 :]:
        _sweep(table, choice, order, sharpness / bound)
        if (rate := table.rate(choice)) > best_rate:
            best, best_rate = choice.copy(), rate
            if rate >= CLOSE_ENOUGH * bound:
                break
    return place_idle_peers(table, best, movable)


def place_idle_peers(table: SpanTable, choice: Indices, movable: Flags) -> Indices:
    """Place every movable peer that is idle and can hold a span: where it helps most."""
    choice = choice.copy()
    idle = [int(one) for one in np.flatnonzero((choice < 0) & movable & (table.rates.max(axis=1, initial=0.0) > 0))]
    if idle:
        idle.sort(key=lambda one: -float(table.rates[one].max()))
        _sweep(table, choice, idle, SHARPNESS[-1] / _rate_unit(table, choice))
    return choice


def _sweep(table: SpanTable, choice: Indices, order: list[int], scale: float) -> None:
    """Let each peer in turn choose again, given all others' choices. Changes ``choice``."""
    load = table.load(choice)
    gains = -np.expm1(-scale * table.rates)
    first, stop = table.first, table.last + 1
    sums = np.zeros(table.stages + 1)
    for peer in order:
        old = int(choice[peer])
        if old >= 0:
            load[first[old] : stop[old]] -= table.rates[peer, old]
        # Without the common factor exp(-scale x the least load), and a floor, everything could be zero.
        worth = np.exp(scale * (np.minimum.reduce(load) - load))
        np.maximum(worth, FLOOR, out=worth)
        np.add.accumulate(worth, out=sums[1:])
        value = gains[peer] * (sums[stop] - sums[first])
        new = int(value.argmax())
        if old < 0 or value[new] > value[old] * (1 + 1e-9):
            choice[peer] = new
        else:
            new = old
        load[first[new] : stop[new]] += table.rates[peer, new]


def improve_in_pairs(table: SpanTable, start: Indices, effort: int = PAIR_EFFORT) -> Indices:
    """Move pairs of peers as long as that makes the slowest stages faster and effort is left."""
    choice = start.copy()
    for sharpness in PAIR_SHARPNESS:
        rate = table.rate(choice)
        if rate <= 0:
            break
        pairs = _PairSearch(table, sharpness / rate)
        while effort > 0:
            tried, better = pairs.improved(choice, effort)
            effort -= tried
            if better is None:
                break
            choice = better
    return choice if table.rate(choice) >= table.rate(start) else start


class _PairSearch:
    """Moves of pairs: one peer moves to the slowest stage, then the peer that gains most moves."""

    def __init__(self, table: SpanTable, scale: float) -> None:
        self._table, self._scale = table, scale
        stages = np.arange(table.stages)
        self._covers = ((table.first[:, None] <= stages) & (stages <= table.last[:, None])).astype(np.float64)
        self._gains = -np.expm1(-scale * table.rates)
        self._each = 20 + table.rates.size // 50
        """Effort of evaluating all answers to one move."""

    def improved(self, choice: Indices, effort: int) -> tuple[int, Indices | None]:
        """Find a better assignment; returns the effort spent and the assignment, None if none was found."""
        table = self._table
        own = np.where(choice[:, None] >= 0, self._own(np.arange(len(choice)), choice), 0.0)
        load = own.sum(axis=0)
        least = load.min()
        current = self._cost(load, least)
        tried = 0
        for span in np.flatnonzero(self._covers[:, int(load.argmin())]):
            for peer in np.flatnonzero((table.rates[:, span] > 0) & (choice != span)):
                tried += self._each
                if tried > effort:
                    return tried, None
                moved = load - own[peer] + table.rates[peer, span] * self._covers[span]
                other, answer = self._answer(moved, own, least, int(peer))
                after = moved if other == peer else moved - own[other] + self._own(other, answer)
                if other == peer:
                    answer = int(span)
                if self._cost(after, least) < current * (1 - 1e-6):
                    better = choice.copy()
                    better[peer], better[other] = span, answer
                    return tried, better
        return tried, None

    def _answer(self, moved: Floats, own: Floats, least: float, peer: int) -> tuple[int, int]:
        """Best second move: a peer and its span; ``peer`` itself if no other should move."""
        without = np.clip(np.exp(np.minimum(self._scale * (least - moved + own), 60)), FLOOR, CEILING)
        sums = np.zeros((len(own), self._table.stages + 1))
        np.cumsum(without, axis=1, out=sums[:, 1:])
        cost = sums[:, -1:] - (sums[:, self._table.last + 1] - sums[:, self._table.first]) * self._gains
        cost[peer] = np.inf
        at = int(cost.argmin())
        other, answer = divmod(at, cost.shape[1])
        if cost.flat[at] >= self._cost(moved, least) or self._table.rates[other, answer] <= 0:
            return peer, 0
        return other, answer

    def _own(self, peers: Indices | int, spans: Indices | int) -> Floats:
        rates = np.asarray(self._table.rates[peers, spans])
        own: Floats = rates[..., None] * self._covers[spans]
        return own

    def _cost(self, load: Floats, least: float) -> float:
        return float(np.exp(np.minimum(self._scale * (least - load), 600)).sum())


def _rate_unit(table: SpanTable, choice: Indices) -> float:
    """Rate in whose inverse sharpness is counted."""
    rate = table.rate(choice)
    return rate if rate > 0 else max(float(table.rates.max(initial=0.0)), 1e-9)


def smooth_minimum(load: Floats, scale: float) -> float:
    """Smooth minimum of ``(stages,)`` loads; the second slowest stage counts a little, too."""
    least = float(load.min())
    return least - float(np.log(np.exp(scale * (least - load)).sum())) / scale


MORE = 1 + 1e-9
"""Factor of a clearly faster rate, beyond rounding differences."""


class Budget:
    """Budget of search nodes; counted and not timed, so that equal inputs give equal plans."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def take(self) -> bool:
        """Take one node; False if none is left."""
        self.nodes -= 1
        return self.nodes >= 0


def branch_and_bound(
    tables: Iterable[SpanTable], found: tuple[SpanTable, Indices] | None, budget: Budget
) -> tuple[SpanTable, Indices] | None:
    """Find the fastest assignment to any of the tables; ``found`` if none is clearly faster.

    It is optimal if the budget has nodes left afterwards.
    """
    rate = found[0].rate(found[1]) if found else 0.0
    bounded = [(dual_prices(table), table) for table in tables]
    for (weights, bound), table in sorted(bounded, key=lambda one: (-one[0][1], one[1].boundaries)):
        if bound <= rate * MORE:
            break
        choice = _BranchAndBound(table, weights, rate, budget).run()
        if choice is not None:
            found, rate = (table, choice), table.rate(choice)
    return found


class _BranchAndBound:
    """Branch and bound, depth first over peers, the strongest first, and each one's spans."""

    def __init__(self, table: SpanTable, weights: Floats, rate: float, budget: Budget) -> None:
        self._table, self._weights, self._budget = table, weights, budget
        self._rate = rate
        self._best: Indices | None = None
        self._order = [int(one) for one in np.argsort(-table.rates.max(axis=1), kind="stable")]
        worth = np.concatenate([[0.0], np.cumsum(weights)])
        values = table.rates * (worth[table.last + 1] - worth[table.first])
        stages = np.arange(table.stages)
        covers = (table.first[:, None] <= stages) & (stages <= table.last[:, None])
        by_stage = (table.rates[:, :, None] * covers).max(axis=1)
        # By n: the most that peers after the first n can add to the priced sum, and to each stage.
        self._values_left = _remaining(values.max(axis=1)[self._order])
        self._load_left = _remaining(by_stage[self._order])
        # Peers that can hold nothing go on with "none".
        self._options = [np.flatnonzero(table.rates[peer] > 0) for peer in self._order]
        self._ranked = [
            [int(one) for one in options[np.argsort(-values[peer, options], kind="stable")]]
            for peer, options in zip(self._order, self._options, strict=True)
        ]

    def run(self) -> Indices | None:
        """Find an assignment clearly faster than the given rate; None if none was found."""
        self._descend(0, np.zeros(self._table.stages), np.full(len(self._order), -1, dtype=np.int64))
        return self._best

    def _descend(self, depth: int, load: Floats, choice: Indices) -> None:
        if depth == len(self._order):
            if (rate := float(load.min())) > self._rate * MORE:
                self._rate, self._best = rate, choice.copy()
            return
        peer = self._order[depth]
        for span in [*self._ranked[depth]] or [-1]:
            if not self._budget.take():
                return
            new = load
            if span >= 0:
                new = load.copy()
                new[self._table.first[span] : self._table.last[span] + 1] += self._table.rates[peer, span]
            priced = float(new @ self._weights) + self._values_left[depth + 1]
            each = float((new + self._load_left[depth + 1]).min())
            if min(priced, each) <= self._rate * MORE:
                continue
            choice[peer] = span
            self._descend(depth + 1, new, choice)
            choice[peer] = -1


def _remaining(values: Floats) -> Floats:
    """``(n + 1, ...)``: suffix sums."""
    summed = np.cumsum(values[::-1], axis=0)[::-1]
    return np.concatenate([summed, np.zeros((1, *values.shape[1:]))])


NODES = 20_000
"""Moves that the search for a cover may try; small swarms need far fewer."""
MOST_WAYS = 200
"""Covers with equally few moves that are compared."""


def cover_empty_stages(table: SpanTable, choice: Indices, moved_lately: Flags | None = None) -> Indices | None:
    """Change ``choice`` so that no stage is empty, moving as few placed peers as possible.

    Among equally few moves: the fewest ``moved_lately`` peers; then the highest rate; then the first
    peers. None: no cover exists, or none was found within the budget.
    """
    moved_lately = np.zeros(len(choice), dtype=np.bool_) if moved_lately is None else moved_lately
    holders = np.zeros(table.stages, dtype=np.int64)
    for span in choice[choice >= 0]:
        holders[table.first[span] : table.last[span] + 1] += 1
    search = _CoverSearch(table, choice, Budget(NODES))
    for moves in range(int((choice >= 0).sum()) + 1):
        if search.budget.nodes <= 0:
            break
        best, best_score = None, (-len(choice), -1.0)
        for count, way in enumerate(search.ways(moves, choice.copy(), holders)):
            changed = (choice >= 0) & (way != choice)
            score = (-int((changed & moved_lately).sum()), table.rate(way))
            if score > best_score:
                best, best_score = way, score
            if count >= MOST_WAYS:
                break
        if best is not None:
            return best
    return None


class _CoverSearch:
    """Search for covers, depth first: the first empty stage gets each peer that can hold it, then the next one."""

    def __init__(self, table: SpanTable, start: Indices, budget: Budget) -> None:
        self._table, self.budget = table, budget
        self._placed: Flags = start >= 0
        # By stage: peers and the longest spans by which they could cover it (shorter ones cover nothing more).
        fits = table.rates > 0
        self._options: list[list[tuple[int, int]]] = [[] for _ in range(table.stages)]
        for row in range(len(fits)):
            for span in _longest(table, np.flatnonzero(fits[row])):
                for stage in range(table.first[span], table.last[span] + 1):
                    self._options[stage].append((row, span))
        # Idle peers first, as they cost no move; then peers that leave no stage empty.

    def ways(
        self, moves: int, choice: Indices, holders: Indices, touched: frozenset[int] = frozenset()
    ) -> Iterator[Indices]:
        """Yield all covers with at most ``moves`` more moves that move no peer twice."""
        empty = np.flatnonzero(holders == 0)
        if not len(empty):
            yield choice.copy()
            return
        for row, span in self._in_order(int(empty[0]), choice, holders):
            if row in touched or moves < int(self._placed[row]):
                continue
            if not self.budget.take():
                return
            old = int(choice[row])
            after = holders.copy()
            if old >= 0:
                after[self._table.first[old] : self._table.last[old] + 1] -= 1
            after[self._table.first[span] : self._table.last[span] + 1] += 1
            choice[row] = span
            yield from self.ways(moves - int(self._placed[row]), choice, after, touched | {row})
            choice[row] = old

    def _in_order(self, stage: int, choice: Indices, holders: Indices) -> list[tuple[int, int]]:
        # Idle peers first, as they cost no move; then peers that leave no stage empty.
        def harm(option: tuple[int, int]) -> tuple[int, int]:
            row = option[0]
            if not self._placed[row]:
                return 0, 0
            old = int(choice[row])
            left = int((holders[self._table.first[old] : self._table.last[old] + 1] == 1).sum()) if old >= 0 else 0
            return 1, left

        return sorted(self._options[stage], key=harm)


def _longest(table: SpanTable, spans: Indices) -> list[int]:
    """Spans that lie in no other one."""
    made: list[int] = []
    for span in sorted((int(one) for one in spans), key=lambda one: (table.first[one], -table.last[one])):
        if not made or table.last[span] > table.last[made[-1]]:
            made.append(span)
    return made


Piece: TypeAlias = tuple[int, int, int]
"""Row of a peer, and the layers [start, stop) that it holds."""

CHAIN_PEERS = 48
"""Most peers that are tried as a chain, each with layers of its own; larger swarms have replicas anyway."""


class LayerRanges:
    """All ranges of layers, with every peer's rate as their holder."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.layers = problem.layers
        starts, stops = np.triu_indices(problem.layers + 1, k=1)
        self.starts, self.stops = starts.astype(np.int64), stops.astype(np.int64)
        self.rates, _ = problem.stages(self.starts, self.stops)
        self.least_memory = problem.least_memory(self.starts, self.stops).scarcest()
        total = self.rates.sum(axis=0)
        # If peers shared their time among stages, these costs of the stages would add up to 1 / the plan's rate.
        self.cost = np.divide(1.0, total, out=np.full(len(total), np.inf), where=total > 0)

    def square(self, values: Floats, missing: float) -> Floats:
        """``values`` as a matrix ``(layers + 1, layers + 1)``, by start and stop."""
        made = np.full((self.layers + 1, self.layers + 1), missing)
        made[self.starts, self.stops] = values
        return made

    def cuts(self, costs: Floats, most: int, *, add: bool) -> tuple[Floats, list[tuple[int, ...] | None]]:
        """Cheapest cuts into 1 to ``most`` stages, by the sum (``add``) or the maximum of the stages' costs.

        Costs ``(most,)``, infinite where there is no cut; cuts as boundaries.
        """
        square = self.square(costs, np.inf)
        reached = square[0].copy()
        origins: list[Indices] = []
        totals = np.full(most, np.inf)
        found: list[tuple[int, ...] | None] = [None] * most
        for count in range(1, most + 1):
            if count > 1:
                both = reached[:, None] + square if add else np.maximum(reached[:, None], square)
                origins.append(both.argmin(axis=0).astype(np.int64))
                reached = both.min(axis=0)
            totals[count - 1] = reached[self.layers]
            if np.isfinite(reached[self.layers]):
                found[count - 1] = _backwards(self.layers, origins)
        return totals, found

    def chains(self, stages: int) -> Iterator[tuple[tuple[int, ...], list[Piece]]]:
        """Cuts for peers in a chain, in several orders, each with layers of its own or none.

        Fewer pieces than stages: boundaries are added in the middle of the longest.
        """
        peers = len(self.rates)
        if not 0 < peers <= CHAIN_PEERS:
            return
        squares = [self.square(rates, 0.0) for rates in self.rates]
        reach = (self.rates > 0).sum(axis=1)
        whole = self.rates.max(axis=1)
        orders = [np.argsort(-reach, kind="stable"), np.argsort(-whole, kind="stable")]
        for order in [*orders, *(one[::-1] for one in orders), np.arange(peers)]:
            pieces = self._chain([int(one) for one in order], squares, stages)
            if pieces:
                yield _halved([0, *(stop for _, _, stop in pieces)], stages), pieces

    def _chain(self, order: Sequence[int], squares: Sequence[Floats], stages: int) -> list[Piece]:
        """Best chain of at most ``stages`` pieces; empty if there is none."""
        size = self.layers + 1
        pieces = min(stages, len(order))
        rates = np.zeros((pieces + 1, size))
        rates[0, 0] = np.inf
        origins = np.full((len(order), pieces + 1, size), -1, dtype=np.int64)
        for place, peer in enumerate(order):
            both = np.minimum(rates[:-1, :, None], squares[peer])
            with_it = both.max(axis=1)
            better = with_it > rates[1:]
            origins[place, 1:][better] = both.argmax(axis=1)[better]
            rates[1:] = np.where(better, with_it, rates[1:])
        count, at = int(rates[:, -1].argmax()), self.layers
        chain: list[Piece] = []
        if rates[count, -1] <= 0:
            return chain
        for place in range(len(order) - 1, -1, -1):
            if count and (origin := int(origins[place, count, at])) >= 0:
                chain.append((order[place], origin, at))
                at, count = origin, count - 1
        return chain[::-1]


def _halved(cut: list[int], stages: int) -> tuple[int, ...]:
    while len(cut) - 1 < stages:
        longest = max(range(len(cut) - 1), key=lambda at: cut[at + 1] - cut[at])
        cut.insert(longest + 1, (cut[longest] + cut[longest + 1]) // 2)
    return tuple(cut)


def _backwards(layers: int, origins: Sequence[Indices]) -> tuple[int, ...]:
    cut = [layers]
    for origin in reversed(origins):
        cut.append(int(origin[cut[-1]]))
    return (0, *reversed(cut))


def shifted_cuts(cut: tuple[int, ...], at: int) -> Iterator[tuple[int, ...]]:
    """Cuts with the inner boundary ``at`` moved elsewhere; near ones first."""
    low, high = cut[at - 1] + 1, cut[at + 1] - 1
    for place in sorted(range(low, high + 1), key=lambda one: (abs(one - cut[at]), one)):
        if place != cut[at]:
            yield (*cut[:at], place, *cut[at + 1 :])


Found: TypeAlias = tuple[SpanTable, Indices]

EXACT_CUTS = 300
"""Most cuts, and below most peers and layers, for which the optimum is searched."""
EXACT_PEERS = 8
EXACT_LAYERS = 8
NUMBERS, NUMBERS_OF_LARGE = 6, 3
"""Numbers of stages that are tried with "auto", besides some special ones: those that look best."""
REFINED, REFINED_OF_LARGE = 3, 1
"""Numbers of stages, of those tried, that are refined: the ones with the best seeds."""
EXACT_NODES = 4_000
"""Nodes of branch and bound for one number of stages."""
EFFORT = 300_000
"""Effort of shifting boundaries, for all numbers of stages: about as many microseconds, counted and not timed."""


class PlanSearch:
    """Search of one problem for any number of stages."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self.ranges = LayerRanges(problem)
        self.is_large = len(problem.peers) >= LARGE
        self.is_small = len(problem.peers) <= EXACT_PEERS and problem.layers <= EXACT_LAYERS

    def numbers(self) -> list[int]:
        """Numbers of stages to try: all in a small swarm, else those that look best if peers could share their time."""
        peers, layers = len(self.problem.peers), self.problem.layers
        if self.is_small:
            return list(range(1, layers + 1))
        # The spans of so many peers begin and end at so many boundaries at most.
        most = min(layers, max(2 * peers - 1, 1))
        costs, _ = self.ranges.cuts(self.ranges.cost, most, add=True)
        ranked = [count for count in range(1, most + 1) if np.isfinite(costs[count - 1])]
        ranked.sort(key=lambda count: (float(costs[count - 1]), count))
        chosen = ranked[: NUMBERS_OF_LARGE if self.is_large else NUMBERS]
        if not self.is_large:
            # As many stages as peers, or nearly: where everybody can hold but a little, that is the only way.
            chosen += [count for count in (peers, peers - 1, peers // 2) if 1 <= count <= most]
        return sorted(set(chosen))

    def promising(self, rates: Mapping[int, float]) -> list[int]:
        """Numbers of stages to refine, by the rates of their seeds."""
        if self.is_small:
            return sorted(rates)
        ranked = sorted(rates, key=lambda count: (-rates[count], count))
        return sorted(ranked[: REFINED_OF_LARGE if self.is_large else REFINED])

    def seed(self, stages: int) -> Found | None:
        """Best plan among a few cuts."""
        found: Found | None = None
        for cut, start in self._seeds(stages):
            found = self._better(cut, found, start)
        return found

    def refined(self, stages: int, found: Found | None, effort: int) -> Found | None:
        """Improve a seed: to the optimum in a small swarm, as far as the effort allows in a large one."""
        cuts = comb(self.problem.layers - 1, stages - 1)
        if found is not None:
            found = self._in_pairs(self._shifted(found, effort))
        if cuts <= EXACT_CUTS and 0 < len(self.problem.peers) <= EXACT_PEERS:
            inner = combinations(range(1, self.problem.layers), stages - 1)
            tables = (self.problem.table((0, *cut, self.problem.layers)) for cut in inner)
            found = branch_and_bound(tables, found, Budget(EXACT_NODES))
        return found

    def _seeds(self, stages: int) -> Iterable[tuple[tuple[int, ...], Indices | None]]:
        for cut, pieces in self.ranges.chains(stages):
            choice = np.full(len(self.problem.peers), -1, dtype=np.int64)
            for row, start, stop in pieces:
                first, last = cut.index(start), cut.index(stop) - 1
                choice[row] = first * stages - first * (first - 1) // 2 + last - first
            yield cut, choice
        cuts: dict[tuple[int, ...], None] = {}
        kinds = [(self.ranges.cost, True), (self.ranges.least_memory, False), (self.ranges.cost, False)]
        for costs, add in kinds if not self.is_large else kinds[:2]:
            if (cut_found := self.ranges.cuts(costs, stages, add=add)[1][-1]) is not None:
                cuts[cut_found] = None
        yield from cuts.items()

    def _better(self, cut: tuple[int, ...], found: Found | None, start: Indices | None = None) -> Found | None:
        """Plan with this cut if that is faster, else ``found``."""
        table = self.problem.table(cut)
        rate = found[0].rate(found[1]) if found else 0.0
        _, bound = dual_prices(table, steps=5)
        if bound <= rate:
            return found
        if start is not None:
            # Spans keep their numbers when a boundary shifts, but may not fit any more.
            fits = (start >= 0) & (table.rates[np.arange(len(start)), start] > 0)
            start = np.where(fits, start, -1)
        choice = assign(table, start)
        if table.rate(choice) <= 0 and found is None and (covering := cover_empty_stages(table, choice)) is not None:
            choice = assign(table, covering)
        return (table, choice) if table.rate(choice) > rate else found

    def _in_pairs(self, found: Found) -> Found:
        table, choice = found
        return table, improve_in_pairs(table, choice)

    def _shifted(self, found: Found, effort: int) -> Found:
        """Shift single boundaries, the slowest stage's first, as long as that helps and effort is left."""
        table, choice = found
        each = 1_500 + len(self.problem.peers) * (200 + table.rates.shape[1] // 2)
        improved = True
        while improved and effort >= each:
            improved = False
            for cut in _shifts(table, choice):
                if (effort := effort - each) < 0:
                    break
                better = self._better(cut, (table, choice), choice)
                if better is not None and better[0] is not table:
                    (table, choice), improved = better, True
                    break
        return table, choice


def _shifts(table: SpanTable, choice: Indices) -> Iterator[tuple[int, ...]]:
    load = table.load(choice)
    by_need = sorted(range(1, table.stages), key=lambda at: (min(load[at - 1], load[at]), at))
    for at in by_need:
        yield from shifted_cuts(table.boundaries, at)
