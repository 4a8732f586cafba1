"""Numbers to parts of nearly equal sums: pure, fast enough for every optimizer step of thousands of rows."""

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Sequence

Parts = list[list[int]]
CLOSE = 1.005  # of the lower bound: a largest sum this near it is not worth more search
FEW, PARTNERS = 12, 8  # indices of two parts that are split anew in every way, and parts tried for that
NONE = -1  # no index


def least_largest_sum(weights: Sequence[int], parts: int) -> int:
    """A bound below which no partition has its largest sum: the mean, the heaviest, and what has to share a part.

    Of the k * parts + 1 heaviest, some part holds k + 1 at least, which weigh no less than the k + 1 lightest of them.
    Non-negative integers; 0 where there are none.
    """
    heaviest = sorted(weights, reverse=True)
    sums = [0, *itertools.accumulate(heaviest)]  # of the so many heaviest
    shared = [sums[k * parts + 1] - sums[k * parts - k] for k in range(-(-len(heaviest) // parts))]
    return max([-(-sums[-1] // parts), *shared])


def partition(weights: Sequence[int], parts: int, *, sizes: Sequence[int] | None = None, room: int = 0) -> Parts | None:
    """Indices of `weights` in parts with a small largest sum: the heaviest first to the lightest part, then exchanges.

    Greedy placing (Graham 1969, longest processing time first) is up to a third above the optimum. While the heaviest
    part can be made lighter by giving an index to another part, by exchanging one for one, or by splitting the few
    indices of both parts anew, that is done.

    Args:
        weights: non-negative integers.
        parts: how many; with as many positive weights as parts, none is empty.
        sizes: of each index, where every part has only `room` for the sum of them.
        room: the bound on a part's sum of sizes.

    Returns:
        Indices of each part, or None where greedy placing finds an index that fits nowhere any more.
    """
    sizes = sizes if sizes is not None else [0] * len(weights)
    placed: Parts = [[] for _ in range(parts)]
    left = [room] * parts
    open_parts = [(0, 0, part) for part in range(parts)]  # sum, count, part: a heap
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], -sizes[i], i)):
        full = []
        while open_parts and left[open_parts[0][2]] < sizes[index]:
            full.append(heapq.heappop(open_parts))
        if not open_parts:
            return None
        total, count, part = open_parts[0]
        heapq.heapreplace(open_parts, (total + weights[index], count + 1, part))
        placed[part].append(index)
        left[part] -= sizes[index]
        for entry in full:
            heapq.heappush(open_parts, entry)
    return refined(weights, placed, sizes=sizes, room=room)


def refined(weights: Sequence[int], parts: Parts, *, sizes: Sequence[int], room: int) -> Parts:
    """The parts after exchanges that make the heaviest lighter, until none does or the bound is near."""
    parts = [list(part) for part in parts]
    sums = [sum(weights[index] for index in part) for part in parts]
    goal = CLOSE * least_largest_sum(weights, len(parts))
    while True:
        *others, heavy = sorted(range(len(parts)), key=lambda part: (sums[part], part))
        if sums[heavy] <= goal:
            return parts
        attempts = itertools.chain(
            ((_exchange, light) for light in others), ((_resplit, light) for light in others[:PARTNERS])
        )
        for attempt, light in attempts:
            found = attempt(weights, parts[heavy], parts[light], sizes, room)
            if found is not None:
                parts[heavy], parts[light] = found
                sums[heavy], sums[light] = (sum(weights[index] for index in part) for part in found)
                break
        else:
            return parts


def _exchange(
    weights: Sequence[int], heavy: list[int], light: list[int], sizes: Sequence[int], room: int
) -> tuple[list[int], list[int]] | None:
    """The two after one index went over, or two changed places, so that their sums come closest; None: no way."""
    gap = sum(weights[index] for index in heavy) - sum(weights[index] for index in light)
    room_heavy, room_light = (room - sum(sizes[index] for index in part) for part in (heavy, light))
    back = sorted([(0, NONE), *((weights[index], index) for index in light)])
    best, found = gap, None
    for index in heavy:
        at = bisect_left(back, (weights[index] - gap // 2, NONE))
        for weight, other in back[max(at - 1, 0) : at + 1]:
            apart = abs(gap - 2 * (weights[index] - weight))
            more = sizes[index] - (0 if other == NONE else sizes[other])  # that the light part would have to hold
            if apart < best and -room_heavy <= more <= room_light:
                best, found = apart, (index, other)
    if found is None:
        return None
    given, taken = found
    kept = [index for index in heavy if index != given] + ([] if taken == NONE else [taken])
    return kept, [index for index in light if index != taken] + [given]


def _resplit(
    weights: Sequence[int], heavy: list[int], light: list[int], sizes: Sequence[int], room: int
) -> tuple[list[int], list[int]] | None:
    """The best of all splits of the two's few indices; None where they are many, or none is better."""
    both = heavy + light
    if len(both) > FEW:
        return None
    held, taken = [0], [0]  # sums of weights and of sizes by subset: bit k of its number says whether both[k] is in
    for index in both:
        held += [total + weights[index] for total in held]
        taken += [total + sizes[index] for total in taken]
    whole, most = held[-1], sum(weights[index] for index in heavy)
    best, subset = min(
        (max(total, whole - total), subset)
        for subset, total in enumerate(held)
        if taken[subset] <= room and taken[-1] - taken[subset] <= room
    )
    if best >= most:
        return None
    inside = [index for bit, index in enumerate(both) if subset >> bit & 1]
    return inside, [index for index in both if index not in inside]
