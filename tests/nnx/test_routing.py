"""Placing without a model: documents stay in one place while that costs least, and work is spread by what it costs."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from codec_jax.nnx.routing import COPY_COST, DRAW_COST, Prompt, Router

PAGE_SIZE = 4


class World:
    """Replicas that keep whatever they have computed."""

    def __init__(self, replicas: int) -> None:
        self.router = Router(replicas)
        self.waiting: list[list[tuple[int, list[int], int]]] = [[] for _ in range(replicas)]
        self.cached: list[list[list[int]]] = [[] for _ in range(replicas)]
        self.homes: list[int] = []
        self.ended: list[int] = []  # tokens that each request drew

    def submit(self, tokens: list[int], limit: int) -> int:
        cached, number = [shared(tokens, others) for others in self.cached], len(self.homes)
        prompt = Prompt.of(np.asarray(tokens), PAGE_SIZE)
        home = self.router.ranked(prompt, cached)[0]
        self.router.take(number, home, prompt, cached[home], limit)
        self.waiting[home].append((number, tokens, limit))
        self.homes.append(home)
        return home

    def finish(self, replica: int, drawn: int) -> None:
        """The first that waits is computed and drawn."""
        number, tokens, limit = self.waiting[replica].pop(0)
        self.router.settle(number, limit - drawn, finished=True)
        self.cached[replica].append(tokens)
        self.ended += [drawn] * (drawn > 0)
        for other, _, left in itertools.chain(*self.waiting):
            self.router.settle(other, left, finished=False)

    def finish_all(self, drawn: int) -> None:
        for replica, waiting in enumerate(self.waiting):
            while waiting:
                self.finish(replica, drawn)


class Stated(World):
    """The same, beside a statement of the policy on plain lists of tokens."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.computing: dict[int, int] = {}  # tokens that each request is to compute

    def submit(self, tokens: list[int], limit: int) -> int:
        there = [
            max(shared(tokens, cached), shared(tokens, [other for _, other, _ in waiting]))
            for cached, waiting in zip(self.cached, self.waiting, strict=True)
        ]
        missing = [len(tokens) - count for count in there]
        work = [
            sum(self.computing[number] + DRAW_COST * self.expected(limit) for number, _, limit in waiting)
            for waiting in self.waiting
        ]
        costs = [outstanding + COPY_COST * count for outstanding, count in zip(work, missing, strict=True)]
        home = super().submit(tokens, limit)
        assert home == costs.index(min(costs))
        # No other one has both less to do and more of the prompt.
        assert not any(w < work[home] and m < missing[home] for w, m in zip(work, missing, strict=True))
        self.computing[len(self.homes) - 1] = missing[home]
        return home

    def expected(self, limit: int) -> int:
        return min(limit, -(-sum(self.ended) // len(self.ended))) if self.ended else limit


def shared(tokens: list[int], others: list[list[int]]) -> int:
    """Tokens of the longest common prefix in whole pages."""
    ends = range(0, len(tokens) + 1, PAGE_SIZE)
    return max((end for other in others for end in ends if tokens[:end] == other[:end]), default=0)


@given(
    replicas=st.integers(1, 4),
    events=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(0, 30), st.integers(0, 30)),
        max_size=30,
    ),
)
def test_the_cheapest_replica_takes_a_request(replicas: int, events: list[tuple[list[int], int, int]]) -> None:
    """As the policy is stated; the same calls place alike, and no work is left when all have ended."""
    world, again = Stated(replicas), Stated(replicas)
    for each in (world, again):
        for tokens, limit, drawn in events:
            home = each.submit(tokens, limit)
            if drawn % 2:
                each.finish(home, min(drawn, each.waiting[home][0][-1]))
    assert world.homes == again.homes
    world.finish_all(drawn=0)
    assert world.router.work == [0] * replicas
    assert world.router.ranked(Prompt.of(np.zeros(8, np.int64), PAGE_SIZE), [0] * replicas) == list(range(replicas))


def document(number: int, size: int) -> list[int]:
    return np.random.default_rng(number).integers(0, 1000, size).tolist()


def questions(documents: int, size: int, count: int) -> list[list[int]]:
    """Prompts of a document one after another, each with a question of its own."""
    return [[*document(i, size), *document(1000 * i + k + 1000, 8)] for i in range(documents) for k in range(count)]


def test_documents_stay_in_one_place_and_are_spread() -> None:
    """In whatever order the questions about ten documents come, each is in one place, and work is as even as can be."""
    grouped = questions(10, size=2000, count=30)
    for order in (grouped, [grouped[30 * i + k] for k in range(30) for i in range(10)]):
        world = World(4)
        homes = {}
        for tokens in order:
            homes.setdefault(tuple(tokens[:2000]), set()).add(world.submit(tokens, limit=10))
        assert all(len(of_document) == 1 for of_document in homes.values())
        assert sorted(len(waiting) for waiting in world.waiting) == [60, 60, 90, 90]


def test_they_stay_there_once_they_are_computed() -> None:
    world = World(4)
    for tokens in questions(8, size=400, count=1):
        world.submit(tokens, limit=10)
    world.finish_all(drawn=10)
    homes = list(world.homes)
    for tokens in questions(8, size=400, count=9)[::-1]:
        home = world.submit(tokens, limit=10)
        assert home == homes[next(i for i in range(8) if document(i, 400) == tokens[:400])]


def test_many_requests_for_one_document_spread_when_a_copy_costs_less() -> None:
    world = World(4)
    for tokens in questions(1, size=400, count=1000):
        world.submit(tokens, limit=10)
    counts = [len(waiting) for waiting in world.waiting]
    assert max(counts) - min(counts) <= COPY_COST * 400 / (8 + 10 * DRAW_COST) + 1
    # The second copy comes when the first replica has more to do by what it costs, and not before.
    first = [world.homes.index(replica) for replica in range(4)]
    assert first[1] * (8 + 10 * DRAW_COST) >= 400
    assert all(later > earlier for earlier, later in itertools.pairwise(first))


def test_what_others_drew_is_expected() -> None:
    """Long answers are announced, and short ones come: the next weigh as much as those."""
    world = World(2)
    assert world.submit([1], limit=10_000) == 0
    world.finish(0, drawn=10)
    assert [world.submit([2 + i], limit=10_000) for i in range(4)] == [0, 1, 0, 1]
    assert max(world.router.work) == 2 * (1 + 10 * DRAW_COST)


def test_a_replica_that_forgot_has_nothing_to_do() -> None:
    router, prompt = Router(2), Prompt.of(np.arange(16), PAGE_SIZE)
    for request in range(3):
        router.take(request, request % 2, prompt, 0, 1)
    router.forget(0)
    assert router.work[0] == 0 < router.work[1]
    router.settle(0, 0, finished=True)
    router.settle("unknown", 0, finished=True)
    assert router.ranked(prompt, [0, 0]) == [1, 0]  # it waits there still
    assert router.ranked(Prompt.of(np.arange(5, 9), PAGE_SIZE), [0, 0]) == [0, 1]
