"""The order of sequences. The first in the order is served first; the last gives its blocks up first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice

from octavo.core.block_manager import BlockManager
from octavo.core.sequence import Sequence
from octavo.errors import ConfigError

Place = tuple[int, ...]

# fair: what a token counts. One that is decoded is computed and sampled, and so weighs as much as two of a prompt: a
# prompt's tokens share one pass over the weights, each decoded token has to wait for its own.
COMPUTED = 1
SAMPLED = 1
MOST_IDLE_USERS = 10_000  # fair: whose counters are kept; a salt may be new with every request

CANDIDATES = 64  # longest-prefix: of so many requests the one with the most cached tokens is next
MOST_OVERTAKEN = 64  # longest-prefix: so often a request is overtaken by others; then it is next


class Policy(ABC):
    """Where a sequence stands in the order: from its arrival on, or once the policy has chosen it.

    Those that run, and those that did, have a place that never changes. A policy may keep newcomers undecided, and
    `choose` one of them when there is a seat; that one then stands behind all that have a place.
    """

    # Called for every sequence of a step with the number of tokens that it is to compute; None: nobody asks.
    charge: Callable[[Sequence, int], None] | None = None

    @abstractmethod
    def place(self, sequence: Sequence, arrival: int) -> Place | None:
        """A newcomer's place, or None: it is one of those to choose from. `arrival` counts up."""

    def choose(self, blocks: BlockManager) -> Sequence | None:
        """Takes the next of those that are undecided; None when there are none."""
        return None

    def discard(self, sequence: Sequence) -> None:
        """An undecided sequence has ended."""
        raise KeyError(sequence.seq_id)

    def __len__(self) -> int:
        """How many are undecided."""
        return 0


class Fcfs(Policy):
    """First come, first served; priorities are ignored."""

    def place(self, sequence: Sequence, arrival: int) -> Place:
        return (0, arrival)


class Priority(Policy):
    """The smaller priority number first, then first come, first served."""

    def place(self, sequence: Sequence, arrival: int) -> Place:
        return (sequence.priority, arrival)


class Request:
    """The sequences of one group that are undecided. They are chosen one right after the other, so that the prompt is
    computed once for all of them."""

    __slots__ = ("arrival", "group", "num_cached_blocks", "overtaken", "salt", "sequences")

    def __init__(self, arrival: int, group: int | None, salt: str | None) -> None:
        self.arrival = arrival
        self.group = group
        self.salt = salt
        self.sequences: dict[int, Sequence] = {}  # by seq_id, as they came
        self.num_cached_blocks = -1  # when it was last looked for; before that, no number of blocks
        self.overtaken = 0  # how often a request that came later was chosen before it


class ByRequest(Policy):
    """A policy that chooses among requests. Its requests `enter`, and `leave` when they are picked or have ended."""

    def __init__(self) -> None:
        self._request_of: dict[int, Request] = {}  # by seq_id, of those that are undecided
        self._newest: Request | None = None
        self._picked: Request | None = None

    @abstractmethod
    def enter(self, request: Request) -> None:
        """A request has come."""

    @abstractmethod
    def leave(self, request: Request) -> None:
        """It has been picked, or all of it was aborted."""

    @abstractmethod
    def pick(self, blocks: BlockManager) -> Request:
        """The next one; there is one."""

    def place(self, sequence: Sequence, arrival: int) -> None:
        request = self._newest
        joins = request is not None and sequence.group is not None and sequence.group == request.group
        if request is None or not joins or not (request.sequences or request is self._picked):
            request = self._newest = Request(arrival, sequence.group, sequence.cache_salt)
            self.enter(request)
        request.sequences[sequence.seq_id] = sequence
        self._request_of[sequence.seq_id] = request

    def choose(self, blocks: BlockManager) -> Sequence | None:
        if not self._request_of:
            return None
        request = self._picked
        if request is None or not request.sequences:
            request = self._picked = self.pick(blocks)
            self.leave(request)
        sequence = next(iter(request.sequences.values()))
        del request.sequences[sequence.seq_id], self._request_of[sequence.seq_id]
        return sequence

    def discard(self, sequence: Sequence) -> None:
        request = self._request_of.pop(sequence.seq_id)
        del request.sequences[sequence.seq_id]
        if not request.sequences and request is not self._picked:
            self.leave(request)

    def __len__(self) -> int:
        return len(self._request_of)


class LongestPrefix(ByRequest):
    """Of the first that wait, the one with the most tokens in the prefix cache; of equals, the one that came first.

    Nobody starves: a request with p requests before it is picked after at most p + MOST_OVERTAKEN others. For whoever
    overtakes it overtakes the first in line too, which so is overtaken at least as often.
    """

    def __init__(self) -> None:
        super().__init__()
        self._line: OrderedDict[int, Request] = OrderedDict()  # by arrival

    def enter(self, request: Request) -> None:
        self._line[request.arrival] = request

    def leave(self, request: Request) -> None:
        del self._line[request.arrival]

    def pick(self, blocks: BlockManager) -> Request:
        first = next(iter(self._line.values()))
        if first.overtaken == MOST_OVERTAKEN:
            return first
        candidates = list(islice(self._line.values(), CANDIDATES))
        best = max(candidates, key=lambda request: _look(request, blocks))
        for request in candidates:
            if request is best:
                break
            request.overtaken += 1
        return best


def _look(request: Request, blocks: BlockManager) -> int:
    """How many blocks of the prompt are cached. They are counted anew only if there now seem to be more, or fewer."""
    sequence = next(iter(request.sequences.values()))
    if request.num_cached_blocks < 0 or not blocks.still_ends(sequence, request.num_cached_blocks):
        request.num_cached_blocks = len(blocks.find_prefix(sequence)[0])
    return request.num_cached_blocks


class User:
    """All whose requests have one cache_salt; those that have none are one user too."""

    __slots__ = ("arrival", "counter", "number", "requests", "salt")

    def __init__(self, salt: str | None, number: int) -> None:
        self.salt = salt
        self.number = number  # so that heap entries are never equal
        self.counter = 0  # weighted tokens that were computed for it
        self.requests: OrderedDict[int, Request] = OrderedDict()  # that wait, by arrival
        self.arrival = -1  # of the oldest of them; where there are none, of an older one

    def entry(self) -> tuple[int, int, int, User]:
        return (self.counter, self.arrival, self.number, self)


class Fair(ByRequest):
    """The oldest request of the user who has got the least: the Virtual Token Counter of Sheng et al., "Fairness in
    Serving Large Language Models" (OSDI 2024).

    A user's counter grows with what is computed for it. Whoever waits for nothing earns no credit by that: such a
    counter is never less than the floor, the smallest counter of those that wait, or, when nobody waits, the counter of
    the user who was the last to do so. So a counter below the floor need not be kept, while one above it must be: else
    whoever sends one request at a time would always begin anew.

    The counters of two users who have had requests waiting since they were equal differ by no more than what
    `max_num_seqs - 1 + n` sequences cost, n being the most of one request: so many of one user may have been chosen,
    and not have cost anything yet, since its counter was last the smaller one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._users: dict[str | None, User] = {}
        self._heap: list[tuple[int, int, int, User]] = []  # an entry each, at most as large as it should be
        self._num_waiting = 0  # users
        self._latest: str | None = None  # the user that was the last to wait for something
        self._floor = 0
        self._number = 0

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        samples = sequence.num_computed == len(sequence.tokens)
        user = self._users.get(sequence.cache_salt) or self._meet(sequence.cache_salt)
        user.counter = max(user.counter, self._floor) + COMPUTED * num_tokens + SAMPLED * samples

    def enter(self, request: Request) -> None:
        user = self._users.get(request.salt)
        if user is None or not user.requests:
            self._settle()
            user = self._users.get(request.salt) or self._meet(request.salt)
            user.counter = max(user.counter, self._floor)
            user.arrival = request.arrival
            self._num_waiting += 1
        user.requests[request.arrival] = request

    def leave(self, request: Request) -> None:
        user = self._users[request.salt]
        del user.requests[request.arrival]
        if user.requests:
            user.arrival = next(iter(user.requests))
        else:
            self._num_waiting -= 1
            self._latest = user.salt

    def pick(self, blocks: BlockManager) -> Request:
        self._settle()
        return next(iter(self._heap[0][-1].requests.values()))

    def _settle(self) -> None:
        """Raises the floor, forgets who is below it, and brings the next user to the top of the heap, if one waits."""
        if self._num_waiting == 0 and self._latest in self._users:
            self._floor = max(self._floor, self._users[self._latest].counter)
        heap = self._heap
        while heap:
            counter, arrival, _, user = heap[0]
            if (counter, arrival) != (user.counter, user.arrival):
                heapreplace(heap, user.entry())
            elif user.requests:
                self._floor = counter
                break
            elif self._num_waiting or counter <= self._floor:
                heappop(heap)
                del self._users[user.salt]
            else:
                break

    def _meet(self, salt: str | None) -> User:
        if len(self._users) >= self._num_waiting + MOST_IDLE_USERS:
            self._forgive()
        self._number += 1
        user = self._users[salt] = User(salt, self._number)
        heappush(self._heap, user.entry())
        return user

    def _forgive(self) -> None:
        """Forgets those who wait for nothing and are the least above the floor, half of them."""
        idle = sorted((user for user in self._users.values() if not user.requests), key=lambda user: user.counter)
        for user in idle[: (len(idle) + 1) // 2]:
            del self._users[user.salt]
        self._heap = [user.entry() for user in self._users.values()]
        heapify(self._heap)


_POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs, "priority": Priority, "fair": Fair, "longest-prefix": LongestPrefix}


def make_policy(name: str) -> Policy:
    if name not in _POLICIES:
        raise ConfigError(f"scheduling_policy={name!r}: expected one of {', '.join(_POLICIES)}")
    return _POLICIES[name]()
