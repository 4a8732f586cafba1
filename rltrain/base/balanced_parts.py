"""Functions that partition numbers into parts with nearly equal sums.

The partition functions have no side effects, and are fast enough to handle thousands of rows in every optimizer step.
"""

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Sequence

Parts = list[list[int]]
CLOSE = 1.005  # The search for a balanced partition stops if the largest sum is at most 1.005 times its lower bound.
NONE = -1  # Value of an index variable that means "no index".


def least_largest_sum(weights: Sequence[int], parts: int) -> int:
    """Return a lower bound on the largest sum of a part, for any partition of `weights` into `parts` parts.

    The numbers in `weights` are non-negative integers. `least_largest_sum` computes several lower bounds on the largest
    sum of a part, and returns the largest lower bound. If `weights` is empty, `least_largest_sum` returns 0.

    - The sum of all weights divided by `parts` is a lower bound on the largest sum.
    - The heaviest weight is a lower bound on the largest sum.
    - For every integer k >= 1 with k * parts < len(weights), some part contains at least k + 1 of the k * parts + 1
      heaviest weights (pigeonhole principle), so the sum of the k + 1 lightest of the k * parts + 1 heaviest weights is
      a lower bound on the largest sum.
    """
    heaviest = sorted(weights, reverse=True)
    sums = [0, *itertools.accumulate(heaviest)]  # sums[n] is the sum of the n heaviest weights.
    shared = [sums[k * parts + 1] - sums[k * parts - k] for k in range(-(-len(heaviest) // parts))]
    return max([-(-sums[-1] // parts), *shared])


def partition(weights: Sequence[int], parts: int, *, sizes: Sequence[int] | None = None, room: int = 0) -> Parts | None:
    """Partition the indices of `weights` into parts such that the largest sum of weights in a part is small.

    The algorithm first assigns the indices greedily, from the heaviest to the lightest (longest processing time first,
    Graham 1969). The greedy algorithm assigns each index to the part with the smallest sum among the parts in which the
    index fits. Without size limits, the largest sum of the greedy partition is at most 4/3 times the smallest possible
    largest sum. The function `refined` then repeatedly makes the heaviest part lighter, by moving an index to another
    part or by exchanging two indices.

    Args:
        weights: the numbers to partition, non-negative integers.
        parts: number of parts of the partition. If the number of positive weights is at least `parts`, no part is
            empty.
        sizes: for each weight, the size of the item that has this weight, such as the number of tokens of a row. The
            sum of the items' sizes in each part is limited to `room`. If `sizes` is None, parts have no size limit.
        room: limit on the sum of `sizes` in a part.

    Returns:
        For each part, a list of the indices in the part; or None if the greedy assignment finds an index that fits into
        no part.
    """
    sizes = sizes if sizes is not None else [0] * len(weights)
    if parts == 1 and sum(sizes) <= room:
        return [list(range(len(weights)))]
    placed: Parts = [[] for _ in range(parts)]
    left = [room] * parts
    open_parts = [(0, 0, part) for part in range(parts)]  # A heap of tuples (sum of weights, number of indices, part).
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
    """Repeatedly make the heaviest part lighter by moving or exchanging indices, and return the new parts.

    The search ends when no move or exchange makes the heaviest part lighter, or when the sum of the heaviest part is at
    most `CLOSE` times the lower bound on the largest sum.
    """
    parts = [list(part) for part in parts]
    sums = [sum(weights[index] for index in part) for part in parts]
    goal = CLOSE * least_largest_sum(weights, len(parts))
    while True:
        *others, heavy = sorted(range(len(parts)), key=lambda part: (sums[part], part))
        if sums[heavy] <= goal:
            return parts
        for light in others:
            found = _exchange(weights, parts[heavy], parts[light], sizes, room)
            if found is not None:
                parts[heavy], parts[light] = found
                sums[heavy], sums[light] = (sum(weights[index] for index in part) for part in found)
                break
        else:
            return parts


def _exchange(
    weights: Sequence[int], heavy: list[int], light: list[int], sizes: Sequence[int], room: int
) -> tuple[list[int], list[int]] | None:
    """Make the sums of two parts as equal as possible: move one index from `heavy` to `light`, or swap two indices.

    Returns:
        The indices in `heavy` and in `light` after the change, or None if no move or exchange of indices brings the
        sums of the two parts closer together.
    """
    gap = sum(weights[index] for index in heavy) - sum(weights[index] for index in light)
    room_heavy, room_light = (room - sum(sizes[index] for index in part) for part in (heavy, light))
    back = sorted([(0, NONE), *((weights[index], index) for index in light)])
    best, found = gap, None
    for index in heavy:
        at = bisect_left(back, (weights[index] - gap // 2, NONE))
        for weight, other in back[max(at - 1, 0) : at + 1]:
            apart = abs(gap - 2 * (weights[index] - weight))
            # The loop examines a change that moves the item `index` from the part `heavy` to the part `light` and,
            # unless `other` is NONE, moves the item `other` from `light` to `heavy`. `more` is the number by which the
            # change increases the sum of the item sizes in `light`.
            more = sizes[index] - (0 if other == NONE else sizes[other])
            if apart < best and -room_heavy <= more <= room_light:
                best, found = apart, (index, other)
    if found is None:
        return None
    given, taken = found
    kept = [index for index in heavy if index != given] + ([] if taken == NONE else [taken])
    return kept, [index for index in light if index != taken] + [given]
