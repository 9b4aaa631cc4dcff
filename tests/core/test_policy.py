"""Who is next: against a plain restatement of each policy, and by what the policies promise."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core import BlockManager, Policy, Scheduler, Sequence, make_policy, policy
from octavo.errors import ConfigError
from tests.core.helpers import Engine, make_scheduler, make_sequence

PROMPT, NEW = 9, 4  # most tokens of a random request
COST = PROMPT + NEW - 1 + NEW  # the most that its sequences can cost fair: all computed, and the new ones sampled


class Plain:
    """What the choosing policies have in common: requests in the order of arrival, whose sequences stay together."""

    def __init__(self) -> None:
        self.line: list[list[Sequence]] = []
        self.picked: list[Sequence] = []
        self.newest: list[Sequence] = []

    def place(self, sequence: Sequence) -> None:
        known = self.newest is self.picked or any(self.newest is request for request in self.line)
        if known and sequence.group is not None and sequence.group == self.group:
            self.newest.append(sequence)
            return
        self.newest, self.group = [sequence], sequence.group
        self.enter(self.newest)
        self.line.append(self.newest)

    def choose(self, blocks: BlockManager) -> Sequence | None:
        if not self.picked and self.line:
            self.picked = self.pick(blocks)
            self.remove(self.picked)
        return self.picked.pop(0) if self.picked else None

    def discard(self, sequence: Sequence) -> None:
        if sequence in self.picked:
            self.picked.remove(sequence)
            return
        request = next(request for request in self.line if sequence in request)
        if len(request) == 1:
            self.remove(request)
        request.remove(sequence)

    def remove(self, request: list[Sequence]) -> None:
        self.line = [other for other in self.line if other is not request]

    def enter(self, request: list[Sequence]) -> None: ...

    def charge(self, sequence: Sequence, num_tokens: int) -> None: ...

    def pick(self, blocks: BlockManager) -> list[Sequence]:
        raise NotImplementedError


class PlainFair(Plain):
    """The paper's counters, of everybody and for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.counters: Counter[str | None] = Counter()
        self.floor = 0
        self.latest: str | None = None

    def counter(self, salt: str | None) -> int:
        return max(self.counters[salt], self.floor)

    def enter(self, request: list[Sequence]) -> None:
        salt = request[0].cache_salt
        if salt not in [other[0].cache_salt for other in self.line]:
            self.raise_floor()
            self.counters[salt] = self.counter(salt)

    def raise_floor(self) -> None:
        active = [request[0].cache_salt for request in self.line] or [self.latest]
        self.floor = min(self.counter(salt) for salt in active)

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        samples = sequence.num_computed == len(sequence.tokens)
        self.counters[sequence.cache_salt] = self.counter(sequence.cache_salt) + num_tokens + samples

    def pick(self, blocks: BlockManager) -> list[Sequence]:
        self.raise_floor()
        return min(self.line, key=lambda request: self.counter(request[0].cache_salt))

    def remove(self, request: list[Sequence]) -> None:
        super().remove(request)
        salt = request[0].cache_salt
        if salt not in [other[0].cache_salt for other in self.line]:
            self.latest = salt


class PlainLongestPrefix(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.overtaken: Counter[int] = Counter()

    def pick(self, blocks: BlockManager) -> list[Sequence]:
        if self.overtaken[id(self.line[0])] == policy.MOST_OVERTAKEN:
            return self.line[0]
        candidates = self.line[: policy.CANDIDATES]
        cached = [len(blocks.find_prefix(request[0])[0]) for request in candidates]
        best = cached.index(max(cached))
        self.overtaken.update(id(request) for request in candidates[:best])
        self.kept = [*getattr(self, "kept", []), *candidates]  # so that no id is used twice
        return candidates[best]


class Watched(Policy):
    """A policy beside its restatement; keeps a log of what came, was chosen and was aborted while undecided."""

    def __init__(self, inner: Policy, plain: Plain | None) -> None:
        self.inner, self.plain = inner, plain
        self.log: list[tuple[str, Sequence]] = []
        if inner.charge is not None:
            self.charge = self._charge

    def place(self, sequence: Sequence, arrival: int) -> None:
        assert self.inner.place(sequence, arrival) is None
        self.log.append(("came", sequence))
        if self.plain is not None:
            self.plain.place(sequence)

    def choose(self, blocks: BlockManager) -> Sequence | None:
        expected = None if self.plain is None else self.plain.choose(blocks)
        chosen = self.inner.choose(blocks)
        assert self.plain is None or chosen is expected
        if chosen is not None:
            self.log.append(("chosen", chosen))
        return chosen

    def discard(self, sequence: Sequence) -> None:
        self.inner.discard(sequence)
        self.log.append(("gone", sequence))
        if self.plain is not None:
            self.plain.discard(sequence)

    def __len__(self) -> int:
        undecided = sum(1 if event == "came" else -1 for event, _ in self.log)
        assert len(self.inner) == undecided
        return undecided

    def _charge(self, sequence: Sequence, num_tokens: int) -> None:
        assert self.inner.charge is not None
        self.inner.charge(sequence, num_tokens)
        if self.plain is not None:
            self.plain.charge(sequence, num_tokens)


def watch(name: str, plain: Plain | None = None, **options: Any) -> tuple[Engine, Watched]:
    scheduler = make_scheduler(policy=name, **options)
    scheduler.policy = watched = Watched(scheduler.policy, plain)
    return Engine(scheduler), watched


ADD = st.tuples(
    st.sampled_from([None, "a", "b", "c"]),  # user
    st.integers(1, 3),  # whose prompts begin alike
    st.integers(1, PROMPT),
    st.integers(1, NEW),
    st.sampled_from([1, 1, 1, 2, 3]),  # choices
)
OPERATIONS = st.lists(
    st.one_of(ADD, ADD, st.sampled_from(["step", "step", "mate"]), st.integers(0, 30)), min_size=40, max_size=80
)


def drive(engine: Engine, operations: list[Any]) -> None:
    """Adds, steps and aborts (the n-th that is alive), then runs to the end."""
    next_id, latest = 0, None
    for operation in operations:
        alive = list(engine.scheduler.sequences)
        if operation == "step":
            if alive:
                engine.step()
        elif operation == "mate":  # one more choice of the latest request, which may be undecided, or long finished
            if latest is not None:
                add(engine.scheduler, next_id, *latest[1:-1], group=latest[0])
                next_id += 1
        elif isinstance(operation, int):
            if operation < len(alive):
                engine.scheduler.abort(alive[operation])
        else:
            latest = (next_id, *operation)
            add(engine.scheduler, next_id, *operation, group=next_id)
            next_id += operation[-1]
    engine.run()
    assert len(engine.scheduler.policy) == 0
    assert engine.scheduler.stats().num_waiting == engine.scheduler.stats().num_used_blocks == 0


def add(
    scheduler: Scheduler,
    seq_id: int,
    user: str | None,
    family: int,
    prompt: int,
    new: int,
    choices: int = 1,
    group: int | None = None,
) -> None:
    for i in range(choices):
        scheduler.add(make_sequence(seq_id + i, prompt, new, first_token=100 * family, cache_salt=user, group=group))


def check_twins(log: list[tuple[str, Sequence]]) -> None:
    chosen = [sequence.group for event, sequence in log if event == "chosen"]
    changes = [group for before, group in zip([None, *chosen], chosen, strict=False) if group not in (None, before)]
    assert len(changes) == len(set(changes))


class TestAgainstPlainRestatements:
    @settings(deadline=None, max_examples=100)
    @given(OPERATIONS, st.sampled_from([9, 14, 400]), st.integers(1, 4), st.sampled_from([1, 3, 9, 40]))
    def test_fair(self, operations, blocks, seqs, budget):
        """Also where sequences are preempted, recomputed and forgotten."""
        engine, _ = watch("fair", PlainFair(), blocks=blocks, block_size=2, seqs=seqs, budget=budget)
        drive(engine, operations)

    @settings(deadline=None, max_examples=100)
    @given(OPERATIONS, st.integers(1, 4), st.sampled_from([1, 3, 9, 40]), st.booleans())
    def test_longest_prefix(self, operations, seqs, budget, caching):
        """In a pool where nothing is evicted, so that what was found is there for ever."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy, "CANDIDATES", 4)
            patch.setattr(policy, "MOST_OVERTAKEN", 3)
            options = {"blocks": 2000, "block_size": 2, "seqs": seqs, "budget": budget, "caching": caching}
            engine, _ = watch("longest-prefix", PlainLongestPrefix(), **options)
            drive(engine, operations)


class TestBothKinds:
    @pytest.mark.parametrize("name", ["fair", "longest-prefix"])
    def test_alone_it_is_first_come_first_served(self, name):
        engine, watched = watch(name, seqs=2)
        for i in range(10):
            engine.scheduler.add(make_sequence(i, prompt=5))
        engine.run()
        assert [sequence.seq_id for event, sequence in watched.log if event == "chosen"] == list(range(10))

    @pytest.mark.parametrize("name", ["fair", "longest-prefix"])
    def test_choices_of_a_request_share_one_prefill(self, name):
        engine, watched = watch(name, seqs=3)
        for i in range(4):
            add(engine.scheduler, 10 * i, f"user {i}", family=i, prompt=9, new=3, choices=3, group=i)
        engine.run()
        assert engine.scheduler.stats().num_forks == 8
        check_twins(watched.log)

    @pytest.mark.parametrize("name", ["fair", "longest-prefix"])
    def test_a_choice_that_comes_when_the_others_were_chosen_is_next(self, name):
        """Though another user has got less, and another prompt has more cached."""
        engine, watched = watch(name, seqs=1)
        warm(engine, 13)
        watched.log.clear()
        add(engine.scheduler, 1, "a", family=2, prompt=5, new=4, group=1)
        engine.step()
        add(engine.scheduler, 2, "a", family=2, prompt=5, new=4, group=1)
        add(engine.scheduler, 3, None, family=1, prompt=13, new=4)
        add(engine.scheduler, 4, "a", family=2, prompt=5, new=4)
        engine.run()
        assert [sequence.seq_id for event, sequence in watched.log if event == "chosen"] == [1, 2, 3, 4]

    @pytest.mark.parametrize("name", ["fair", "longest-prefix"])
    def test_who_was_preempted_comes_before_all_that_are_undecided(self, name):
        engine, watched = watch(name, blocks=6, block_size=2, seqs=2, caching=False)
        for i in range(4):
            engine.scheduler.add(make_sequence(i, prompt=3, new_tokens=6))
        engine.run()
        assert engine.scheduler.stats().num_preemptions > 0
        assert [s.seq_id for s in engine.finished] == sorted(s.seq_id for s in engine.finished)
        assert [sequence.seq_id for event, sequence in watched.log if event == "chosen"] == list(range(4))

    def test_an_unknown_name_is_refused_with_the_known_ones(self):
        with pytest.raises(ConfigError, match="'lifo': expected one of fcfs, priority, fair, longest-prefix"):
            make_policy("lifo")

    def test_those_with_a_place_are_not_the_policys_to_forget(self):
        for name in ("fcfs", "priority", "fair", "longest-prefix"):
            with pytest.raises(KeyError):
                make_policy(name).discard(make_sequence(0, 1))


def serve(engine: Engine) -> Counter[str | None]:
    """One step; what it cost whom, from the plan."""
    plan = engine.schedule()
    cost: Counter[str | None] = Counter()
    for seq_id, start, count in zip(plan.seq_ids, plan.starts, plan.num_tokens, strict=True):
        sequence = engine.scheduler.sequences[seq_id]
        cost[sequence.cache_salt] += count + (start + count == len(sequence.tokens))
    engine.finished += engine.scheduler.update(plan, engine.worker.execute(plan, engine.sample))
    return cost


class Users:
    """Users who have requests waiting at any time, each of its own size and number of choices."""

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self.engine, self.rng = engine, rng
        self.next_id = 0
        self.served: Counter[str | None] = Counter()

    def add(self, user: str, prompt: int, new: int, choices: int = 1) -> None:
        add(self.engine.scheduler, self.next_id, user, self.next_id + 10, prompt, new, choices, group=self.next_id)
        self.next_id += choices

    def step(self, *backlogged: str, choices: int = 1) -> None:
        """One step in which these users have something waiting from the beginning to the end."""
        waiting = Counter(s.cache_salt for s in self.engine.scheduler.sequences.values() if not s.key)
        for user in backlogged:
            while waiting[user] < self.engine.scheduler.max_num_seqs + 2 * choices:
                n = self.rng.randint(1, choices)
                big = user == backlogged[0]
                self.add(user, PROMPT if big else self.rng.randint(1, PROMPT), NEW if big else 1, n)
                waiting[user] += n
        self.served += serve(self.engine)

    @property
    def gap(self) -> int:
        return abs(self.served["a"] - self.served["b"])


class TestFair:
    @settings(deadline=None, max_examples=40)
    @given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 40), st.integers(0, 2**32))
    def test_users_with_requests_waiting_get_the_same(self, seqs, choices, budget, seed):
        """The bound: what `max_num_seqs - 1 + n` sequences of one user may cost."""
        rng = random.Random(seed)
        users = Users(Engine(make_scheduler(policy="fair", seqs=seqs, budget=budget, blocks=2000)), rng)
        for _ in range(120):
            if rng.random() < 0.3:
                users.add(f"passer-by {rng.randrange(3)}", rng.randint(1, PROMPT), rng.randint(1, NEW))
            users.step("a", "b", choices=choices)
            assert users.gap <= (seqs - 1 + choices) * COST

    def test_first_come_first_served_does_not(self):
        """The same requests, without the policy: nothing holds the one who asks for more back."""
        users = Users(Engine(make_scheduler(policy="fcfs", seqs=2, budget=10, blocks=2000)), random.Random(0))
        for _ in range(200):
            users.step("a", "b")
        assert users.gap > 4 * COST

    def test_who_was_away_has_no_credit(self):
        users = Users(Engine(make_scheduler(policy="fair", seqs=2, budget=10, blocks=5000)), random.Random(0))
        users.add("b", 3, 1)
        for _ in range(300):
            users.step("a")
        assert users.gap > 1000
        users.served.clear()
        for _ in range(300):
            users.step("a", "b")
            assert users.gap <= 2 * COST

    def test_nor_has_who_was_away_while_nobody_waited(self):
        users = Users(Engine(make_scheduler(policy="fair", seqs=2, budget=10, blocks=5000)), random.Random(0))
        for _ in range(100):  # alone, one request at a time
            users.add("a", PROMPT, NEW)
            while users.engine.scheduler.sequences:
                users.served += serve(users.engine)
        assert users.gap > 1000
        users.served.clear()
        for _ in range(300):
            users.step("b", "a")
            assert users.gap <= 2 * COST

    @pytest.mark.parametrize("seqs", [1, 2])
    def test_who_asks_for_one_thing_at_a_time_is_charged_for_it(self, seqs):
        """It has nothing left each time, and yet is not as one who never had anything."""
        users = Users(Engine(make_scheduler(policy="fair", seqs=seqs, budget=10, blocks=5000)), random.Random(0))
        for _ in range(600):
            if not any(s.cache_salt == "b" for s in users.engine.scheduler.sequences.values()):
                users.add("b", PROMPT, NEW)
            users.step("a")
            assert users.served["b"] <= users.served["a"] + (seqs + 1) * COST
        assert users.served["b"] > 100

    def test_who_got_more_is_behind_even_when_nobody_has_waited_meanwhile(self):
        engine, watched = watch("fair", seqs=2)
        add(engine.scheduler, 0, "a", 1, prompt=9, new=4)
        engine.step()  # a has paid 10, and so b begins with 10
        add(engine.scheduler, 1, "b", 2, prompt=1, new=1)
        engine.run()  # a has paid 6 more, b 2
        watched.log.clear()
        for i, user in enumerate(["b", "a", "b"], start=2):
            add(engine.scheduler, i, user, family=i + 1, prompt=1, new=1)
        engine.run()
        assert [sequence.seq_id for event, sequence in watched.log if event == "chosen"] == [2, 4, 3]

    def test_cached_tokens_cost_nothing(self):
        engine = Engine(make_scheduler(policy="fair", seqs=1))
        for i, (user, family, prompt) in enumerate([("a", 1, 9), ("a", 1, 9), ("b", 2, 12), ("b", 3, 9), ("a", 1, 9)]):
            add(engine.scheduler, i, user, family, prompt, new=1, choices=1)
        engine.run()  # a pays 10, b 13, a for what is not cached 2, and again 2
        assert [s.seq_id for s in engine.finished] == [0, 2, 1, 4, 3]

    def test_a_decoded_token_counts_twice(self):
        engine = Engine(make_scheduler(policy="fair", seqs=1))
        for i, (user, prompt, new) in enumerate([("a", 2, 5), ("b", 11, 1), ("b", 1, 1), ("a", 1, 1)]):
            add(engine.scheduler, i, user, i + 1, prompt, new, 1)
        engine.run()  # a pays 3 and 4 times 2, b 12
        assert [s.seq_id for s in engine.finished] == [0, 1, 3, 2]

    def test_users_with_nothing_left_are_forgotten(self):
        engine = Engine(make_scheduler(policy="fair", seqs=4, blocks=1000))
        for i in range(500):
            add(engine.scheduler, i, f"user {i}", i, 5, 2, 1)
            engine.step()
        engine.run()
        assert len(engine.scheduler.policy._users) <= 8

    def test_salts_that_are_always_new_do_not_pile_up(self, monkeypatch):
        """Somebody new waits at any time, and so nobody's counter is ever below all others."""
        monkeypatch.setattr(policy, "MOST_IDLE_USERS", 16)
        engine = Engine(make_scheduler(policy="fair", seqs=4, blocks=1000))
        for i in range(400):
            add(engine.scheduler, i, f"user {i}", i, 5, 1, 1)
            if i > 20:
                engine.step()
            fair = engine.scheduler.policy
            assert len(fair._heap) == len(fair._users) <= len(fair) + 17
        engine.run()


def warm(engine: Engine, prompt: int = 9, family: int = 1) -> None:
    """The full blocks of such a prompt are cached from here on."""
    add(engine.scheduler, 0, None, family, prompt, 1, 1)
    engine.run()
    engine.finished.clear()


class TestLongestPrefix:
    def test_the_longest_comes_first_and_of_equals_the_oldest(self):
        engine = Engine(make_scheduler(policy="longest-prefix", seqs=1))
        warm(engine, 13)
        for i, (family, prompt) in enumerate([(2, 13), (1, 6), (3, 13), (1, 13), (1, 12), (1, 10)], start=1):
            add(engine.scheduler, i, None, family, prompt, 1, 1)
        engine.run()
        assert [s.seq_id for s in engine.finished] == [4, 5, 6, 2, 1, 3]

    def test_what_one_computes_counts_for_the_next(self):
        engine = Engine(make_scheduler(policy="longest-prefix", seqs=1))
        for i, family in enumerate([1, 2, 1, 2, 1]):
            add(engine.scheduler, i, None, family, 9, 1, 1)
        engine.run()
        assert [s.seq_id for s in engine.finished] == [0, 2, 4, 1, 3]

    def test_what_was_evicted_counts_no_more(self):
        engine = Engine(make_scheduler(policy="longest-prefix", seqs=1, blocks=8))
        warm(engine, 9)
        warm(engine, 13, family=2)
        add(engine.scheduler, 1, None, 3, prompt=9, new=1, choices=1)
        add(engine.scheduler, 2, None, 1, prompt=9, new=1, choices=1)  # two blocks, as long as they are there
        add(engine.scheduler, 3, None, 2, prompt=13, new=18, choices=1)  # three blocks; takes all there are
        engine.run()
        assert [s.seq_id for s in engine.finished] == [3, 1, 2]

    def test_a_salt_hides_what_is_cached(self):
        engine = Engine(make_scheduler(policy="longest-prefix", seqs=1))
        warm(engine)
        add(engine.scheduler, 1, "a", 1, 9, 1, 1)
        add(engine.scheduler, 2, None, 1, 9, 1, 1)
        engine.run()
        assert [s.seq_id for s in engine.finished] == [2, 1]

    @pytest.mark.parametrize("ahead", [0, 3])
    def test_a_stream_of_better_cached_requests_starves_nobody(self, ahead):
        """The worst case of the bound, exactly."""
        engine = Engine(make_scheduler(policy="longest-prefix", seqs=1, blocks=400))
        warm(engine)
        for i in range(1, ahead + 2):
            add(engine.scheduler, i, None, 1 + i, 9, 1, 1)  # not cached; how long does the last of them wait?
        next_id = 100
        for _ in range(policy.MOST_OVERTAKEN + 10):
            for _ in range(2):
                add(engine.scheduler, next_id, None, 1, 9, 1, 1)
                next_id += 1
            engine.step()
        assert [s.seq_id for s in engine.finished].index(ahead + 1) == ahead + policy.MOST_OVERTAKEN

    @settings(deadline=None, max_examples=100)
    @given(OPERATIONS, st.sampled_from([9, 14, 40]), st.integers(1, 3), st.integers(0, 4))
    def test_nobody_waits_longer_than_the_bound(self, operations, blocks, seqs, most_overtaken):
        """Also where what was cached is evicted: p requests before it, and MOST_OVERTAKEN others."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy, "CANDIDATES", 4)
            patch.setattr(policy, "MOST_OVERTAKEN", most_overtaken)
            engine, watched = watch("longest-prefix", blocks=blocks, block_size=2, seqs=seqs)
            drive(engine, operations)
        left: dict[int, int] = {}  # by request that waits: how many others may still be picked before it
        undecided: Counter[int] = Counter()  # sequences, by request
        picked = None
        for event, sequence in watched.log:
            request = sequence.seq_id if sequence.group is None else sequence.group
            undecided[request] += 1 if event == "came" else -1
            if event == "came" and undecided[request] == 1 and request != picked:
                left[request] = len(left) + most_overtaken
            elif event == "gone" and undecided[request] == 0:
                left.pop(request, None)
            elif event == "chosen" and request != picked:
                picked = request
                del left[request]
                left = {other: more - 1 for other, more in left.items()}
                assert min(left.values(), default=0) >= 0

    def test_a_prefix_is_looked_for_again_only_if_it_has_changed(self, monkeypatch):
        engine = Engine(make_scheduler(policy="longest-prefix", seqs=1, blocks=1000))
        blocks, looks = engine.scheduler.blocks, []
        warm(engine, 5)
        find_prefix = blocks.find_prefix
        monkeypatch.setattr(blocks, "find_prefix", lambda sequence: looks.append(sequence) or find_prefix(sequence))
        for i in range(1, 101):
            engine.scheduler.add(
                Sequence(i, [100, 101, 102, 103, i, i, i, i, i], make_sequence(0, 1).params, max_length=10)
            )
        counts = []
        for _ in range(4):
            looks.clear()
            engine.step()
            counts.append(len(looks))
        # Each time one of the candidates is new, and whoever comes in is looked at once more.
        assert counts == [policy.CANDIDATES + 1, 2, 2, 2]
