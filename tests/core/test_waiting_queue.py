import random

import pytest

from octavo.core import Status
from octavo.core.waiting_queue import WaitingQueue
from tests.core.helpers import make_sequence


def sequence(key: tuple[int, int]):
    made = make_sequence(key[1], 1)
    made.key = key
    return made


def test_the_first_in_the_order_is_on_top():
    queue = WaitingQueue()
    for key in [(0, 2), (-1, 5), (0, 1), (3, 0)]:
        queue.push(sequence(key))
    assert [queue.pop().key for _ in range(4)] == [(-1, 5), (0, 1), (0, 2), (3, 0)]
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


@pytest.mark.parametrize("seed", range(20))
def test_discarded_sequences_are_never_seen_again(seed):
    """Against a plain sorted list, with discards at the top, in the middle and of nearly everything."""
    rng = random.Random(seed)
    queue, model = WaitingQueue(), []
    for arrival in range(400):
        choice = rng.random()
        if choice < 0.5 or not model:
            model.append(sequence((rng.randrange(3), arrival)))
            queue.push(model[-1])
        elif choice < 0.85:
            gone = model.pop(rng.randrange(len(model)))
            gone.status = Status.FINISHED
            queue.discard(gone)
        else:
            model.sort(key=lambda s: s.key)
            assert queue.pop() is model.pop(0)
        assert len(queue) == len(model)
        assert queue.peek() is min(model, key=lambda s: s.key, default=None)


def test_discarded_sequences_do_not_pile_up():
    queue = WaitingQueue()
    queue.push(sequence((0, 0)))
    for arrival in range(1, 1000):
        gone = sequence((1, arrival))
        queue.push(gone)
        gone.status = Status.FINISHED
        queue.discard(gone)
        assert len(queue._heap) <= 4
    assert len(queue) == 1
