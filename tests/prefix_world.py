"""A prefix cache beside plain lists of what its requests hold, and a memory in which K and V are hashes of contexts."""

import itertools
from collections import Counter
from random import Random

import numpy as np
import pytest

from codec_jax import OutOfPagesError, OutOfSlotsError
from codec_jax.forest import PrefixCache

#: What an invariant cache keeps of a token that was drawn, which nobody will share.
DRAWN = -1


def hashes(tokens):
    """Return a number for each token that depends on it and all before it: what its K and V are."""
    return list(itertools.accumulate(tokens, lambda h, token: (h * 1_000_003 + token + 1) % (2**61 - 1), initial=7))[1:]


class Node:
    """A node as a reader of the tree would find it, token by token."""

    def __init__(self, cache, number, pages):
        tree, size = cache.tree, cache.tree.page_size
        self.number, self.parent, self.pages = number, int(tree.parent[number]), pages
        self.length = int(tree.length[number])
        self.slots = [page * size + offset for page in pages for offset in range(size)][: self.length]
        self.tokens = cache.tokens.reshape(-1)[self.slots].tolist()
        self.computed = [slot for slot in self.slots if slot % size < cache.computed[slot // size]]
        self.ends = [request for request, leaf in enumerate(tree.leaf) if leaf == number]


class World:
    """Everything that may happen to a cache, each time with arguments that a `Random` chooses."""

    def __init__(self, num_pages=40, rows=6, page_size=8, alphabet=2, devices=1, invariant=False):
        self.cache = PrefixCache.create(num_pages, page_size, rows, devices=devices, invariant=invariant)
        self.size, self.alphabet, self.devices, self.invariant = page_size, alphabet, devices, invariant
        self.memory = np.full(num_pages * page_size, -1, np.int64)
        self.model = {}  # request -> tokens
        self.slots = {}  # request -> where they lie
        self.flying = {}  # request -> tokens in the pages that are not appended yet
        self.past = [[0]]  # contexts of requests that left
        self.pinned = []  # what `pin` returned, the slots and the tokens of the context

    # ------------------------------------------------------------------ what happens

    def add(self, random: Random):
        lists = [self.text(random) for _ in range(random.choice([1, 1, 2, 3]))]
        before, growing = self.cache, sorted(self.flying)
        if len(lists) > len(before.tree.leaf) - len(self.model):
            with pytest.raises(OutOfSlotsError, match=r"token_lists: \d lists need as many free request slots"):
                before.add(lists, growing)
            return
        needed = before.needed(lists[0], growing=growing)
        try:
            self.cache, new = before.add(lists, growing)
        except OutOfPagesError:
            assert needed > before.available or len(lists) > 1
            return
        if len(lists) == 1:
            assert before.available - self.cache.available <= needed
        assert new.tolist() == sorted(set(range(len(before.tree.leaf))) - set(self.model))[: len(lists)]
        self.model |= dict(zip(new.tolist(), lists, strict=True))

    def text(self, random: Random):
        """Return tokens that begin like others, which may still grow."""
        known = [*self.past[-8:], *self.model.values(), *(self.model[r] + text for r, text in self.flying.items())]
        begin = random.choice(known) if random.random() < 0.8 else []
        if random.random() < 0.6:
            begin = begin[: random.randint(0, len(begin))]
        text = (begin + self.tokens(random, random.choice([0, 0, 1, 2, 9, 17])))[:100]
        return [random.randrange(self.alphabet) if token == DRAWN else token for token in text]

    def tokens(self, random: Random, count):
        return [random.randrange(self.alphabet) for _ in range(count)]

    def prefill(self, random: Random):
        waiting = [r for r, text in self.model.items() if self.cache.computed_tokens(r) < len(text)]
        if not waiting:
            return
        request = random.choice(waiting)
        done = self.cache.computed_tokens(request)
        ends = [end for end in self.ends(request) if end > done]
        end = random.choice([ends[0], ends[-1], *ends])
        forest = self.cache.chunks([(request, end)], rows=2)
        slots = forest.context_slots(0)
        self.memory[slots[done:]] = hashes(self.model[request])[done:end]
        self.cache = self.cache.mark_computed(request, end)

    def ends(self, request):
        """Return where chunks of a request may end: at the ends of pages of a node, and of the node."""
        start, found = 0, set()
        for node in self.path(request):
            found |= {start + offset for offset in range(self.size, node.length, self.size)} | {start + node.length}
            start += node.length
        return sorted(found - {0})

    def launch(self, random: Random):
        """Reserve room, and write what requests generate, as a step does that has not landed."""
        ready = [r for r, text in self.model.items() if self.cache.computed_tokens(r) == len(text)]
        growing = [r for r in ready if random.random() < 0.6]
        if not growing:
            return
        new = {r: self.tokens(random, random.choice([0, 1, 3, 8, 16])) for r in growing}
        room = np.zeros(len(self.cache.tree.leaf), np.int64)
        for r in growing:
            new[r] = [DRAWN] * len(new[r]) if self.invariant else new[r]
            self.flying[r] = self.flying.get(r, []) + new[r]
            room[r] = len(self.flying[r])
        free = self.cache.available
        try:
            self.cache = self.cache.reserve(room, growing)
        except OutOfPagesError:
            assert sum(-(-room // self.size)) > free
            self.flying = {
                r: text[: len(text) - len(new[r])] if r in new else text
                for r, text in self.flying.items()
                if r not in new or len(text) > len(new[r])
            }
            return
        slots = self.cache.view(growing).extend(room).slots(int(room.max()))
        for r in growing:
            h = hashes(self.model[r] + self.flying[r])[len(self.model[r]) :]
            self.memory[slots[r, len(slots[r]) - room[r] :]] = h

    def land(self, random: Random):
        landing = {r: text for r, text in self.flying.items() if random.random() < 0.7}
        # A request may stop before the last token that was written.
        landing = {r: text[: random.choice([len(text), random.randint(0, len(text))])] for r, text in landing.items()}
        self.cache = self.cache.append({r: np.maximum(text, 0) for r, text in landing.items()})
        for r, text in landing.items():
            self.model[r] = self.model[r] + text
            del self.flying[r]

    def fork(self, random: Random):
        sources = [r for r in self.model if r not in self.flying]
        if not sources:
            return
        sources = random.choices(sources, k=random.choice([1, 2]))
        if len(sources) > len(self.cache.tree.leaf) - len(self.model):
            with pytest.raises(OutOfSlotsError, match="forks need as many free request slots"):
                self.cache.fork(sources)
            return
        self.cache, new = self.cache.fork(sources)
        for source, request in zip(sources, new.tolist(), strict=True):
            self.model[request] = self.model[source]

    def retire(self, random: Random, share=0.4):
        gone = [r for r in self.model if random.random() < share]
        readers = self.readers()
        self.cache = self.cache.retire(gone)
        for r in gone:
            self.past.append(self.model.pop(r))
            self.slots.pop(r, None)
            self.flying.pop(r, None)
        lost = readers - self.readers()
        assert all(self.cache.last_used[page] == self.cache.clock for page in set(readers) & set(lost) & self.unread())
        nodes = self.nodes()
        children = Counter(node.parent for node in nodes.values())
        for node in nodes.values():
            full = node.length == len(node.pages) * self.size
            assert node.ends or children[node.number] != 1 or not full

    def forget(self, random: Random):
        """Let a request leave, and with it what nobody else reads."""
        if self.model:
            gone = random.choice(sorted(self.model))
            shared = {page for page, count in self.readers().items() if count > 1}
            pages = {page for node in self.path(gone) for page in node.pages} - shared
            self.cache = self.cache.forget([gone]).retire([gone])
            assert (self.cache.pool.owners > 0)[sorted(pages)].tolist() == (self.cache.pins > 0)[sorted(pages)].tolist()
            self.past.append(self.model.pop(gone))
            self.slots.pop(gone, None)
            self.flying.pop(gone, None)

    def evict(self, random: Random):
        before, count = self.cache, random.choice([0, 1, 2, 5, 20])
        ages = {page: (int(before.last_used[page]), -at) for page, at in self.evictable().items()}
        if count > len(ages):
            with pytest.raises(OutOfPagesError, match=rf"and {len(ages)} cached ones that nobody reads"):
                before.evict(count)
            return
        self.cache = before.evict(count)
        gone = ages.keys() - self.evictable().keys()
        assert sorted(ages[page] for page in gone) == sorted(ages.values())[:count]
        assert self.cache.pool.num_free == before.pool.num_free + count

    def drop(self, random: Random):
        self.cache, self.pinned = self.cache.drop(), []
        assert self.cache.num_cached == 0

    def pin(self, random: Random):
        computed = [r for r, text in self.model.items() if self.cache.computed_tokens(r) == len(text)]
        if computed:
            request = random.choice(computed)
            self.cache, pages = self.cache.pin(request)
            slots = self.path_slots(request)
            assert pages.tolist() == list(dict.fromkeys(slot // self.size for slot in slots))
            self.pinned.append((pages, slots, self.model[request]))

    def unpin(self, random: Random):
        if self.pinned:
            pages, *_ = self.pinned.pop(random.randrange(len(self.pinned)))
            self.cache = self.cache.unpin(pages)

    operations = (add, add, add, prefill, prefill, launch, launch, land, land, fork, retire, forget, evict, pin, unpin)

    # ------------------------------------------------------------------ what must hold

    def nodes(self):
        tree, offset, nodes = self.cache.tree, 0, {}
        for number, count in enumerate(tree.page_count.tolist()):
            if tree.parent[number] >= -1:
                nodes[number] = Node(self.cache, number, tree.page_ids[offset : offset + count].tolist())
            else:
                assert count == tree.length[number] == 0
            offset += count
        assert offset == len(tree.page_ids)
        return nodes

    def path(self, request):
        return self.path_to(int(self.cache.tree.leaf[request]), self.nodes())

    def path_to(self, number, nodes):
        path = []
        while number >= 0:
            path.insert(0, nodes[number])
            number = nodes[number].parent
        return path

    def path_slots(self, request):
        return [slot for node in self.path(request) for slot in node.slots]

    def readers(self):
        """Count the readers of each page."""
        nodes = self.nodes()
        return Counter(
            page for r in self.model for n in self.path_to(int(self.cache.tree.leaf[r]), nodes) for page in n.pages
        )

    def unread(self):
        read = self.readers()
        return {page for node in self.nodes().values() for page in node.pages if page not in read}

    def evictable(self):
        """Return the pages that may be evicted, and where they begin in their contexts."""
        nodes, read = self.nodes(), self.readers()
        return {
            page: sum(above.length for above in self.path_to(node.parent, nodes)) + nth * self.size
            for node in nodes.values()
            for nth, page in enumerate(node.pages)
            if page not in read and not self.cache.pins[page]
        }

    def check(self):
        cache, nodes, read = self.cache, self.nodes(), self.readers()
        owned = [page for node in nodes.values() for page in node.pages]
        np.testing.assert_array_equal(cache.pool.owners, np.bincount(owned, minlength=cache.pool.num_pages))
        assert cache.pool.owners.max(initial=0) <= 1
        free = cache.pool.owners == 0
        assert not cache.computed[free].any()
        assert not cache.pins[free].any()
        assert cache.available == free.sum() + len(self.evictable())
        assert cache.num_nodes == len(nodes)
        assert cache.pool.devices == self.devices

        assert np.flatnonzero(cache.tree.leaf >= 0).tolist() == sorted(self.model)
        for request, text in self.model.items():
            path = self.path_to(int(cache.tree.leaf[request]), nodes)
            assert cache.context(request).tolist() == text
            assert cache.computed_tokens(request) == sum(len(node.computed) for node in path)
            # What a request holds stays where it is, whatever happens.
            slots = [slot for node in path for slot in node.slots]
            assert slots[: len(self.slots.get(request, []))] == self.slots.get(request, [])
            self.slots[request] = slots
        for request, text in self.flying.items():
            leaf = nodes[int(cache.tree.leaf[request])]
            room = [page * self.size + offset for page in leaf.pages for offset in range(self.size)][leaf.length :]
            assert self.memory[room[: len(text)]].tolist() == hashes(self.model[request] + text)[-len(text) or 10**9 :]

        for node in nodes.values():
            path = self.path_to(node.number, nodes)
            tokens = [token for above in path for token in above.tokens]
            expected = hashes(tokens)[len(tokens) - node.length :]
            assert node.length <= len(node.pages) * self.size
            # K and V of every computed token are those of exactly this context, and no hole is before them.
            assert node.computed == node.slots[: len(node.computed)]
            assert self.memory[node.computed].tolist() == expected[: len(node.computed)]
            if node.computed:
                assert all(above.computed == above.slots for above in path[:-1])
            if not self.reads(node, nodes):
                assert node.computed == node.slots != []
                assert len(node.pages) == -(-node.length // self.size)
                assert not read.keys() & set(node.pages)
        for pages, slots, text in self.pinned:
            assert set(pages.tolist()) <= set(owned)
            assert cache.tokens.reshape(-1)[slots].tolist() == text
            assert self.memory[slots].tolist() == hashes(text)
        pins = Counter(page for pages, *_ in self.pinned for page in pages.tolist())
        assert {page: count for page, count in enumerate(cache.pins.tolist()) if count} == pins

    def reads(self, node, nodes):
        """Say whether a request reads a node."""
        return any(node in self.path_to(int(self.cache.tree.leaf[r]), nodes) for r in self.model)

    def check_match(self, tokens, growing=()):
        """Compare `match` with all that may be matched, node by node."""
        nodes, lengths = self.nodes(), [0]
        closed = [int(self.cache.tree.leaf[r]) for r in growing]
        for node in nodes.values():
            above = [token for over in self.path_to(node.parent, nodes) for token in over.tokens]
            rest = tokens[len(above) :]
            if tokens[: len(above)] == above:
                same = [a == b for a, b in zip(node.tokens, rest, strict=False)]
                common = same.index(False) if False in same else len(same)
                if common < node.length or len(rest) - common > 1 or node.number in closed:
                    common -= common % self.size
                lengths += [len(above) + common] if common else []
        found = self.cache.match(tokens, growing)
        assert found.length == max(lengths)
        above = [token for node in self.path_to(found.node, nodes) for token in node.tokens]
        if found.node >= 0:
            above = above[: len(above) - nodes[found.node].length + found.offset]
        assert above == tokens[: found.length]

    def check_view(self, requests):
        forest = self.cache.view(requests)
        for request in range(forest.request_capacity):
            expected = self.path_slots(request) if request in requests else []
            assert forest.context_slots(request).tolist() == expected
            assert forest.request_length[request] == len(expected)
        parents, used = forest.parent.tolist(), int((forest.parent != -2).sum())
        assert -2 not in parents[:used]
        assert (forest.readers[:used] > 0).all()
        children = Counter(parents[:used])
        for node in range(used):
            full = forest.length[node] == forest.page_count[node] * self.size
            assert node in forest.leaf or children[node] > 1 or not full
            below = [r for r in requests if node in forest.path(r)]
            rows = sorted(forest.row_of_request[below].tolist())
            assert rows == list(range(forest.row_lo[node], forest.row_hi[node]))

    def check_chunks(self, pieces, rows):
        forest = self.cache.chunks(pieces, rows)
        assert forest.request_capacity == rows
        pages = forest.used_pages.tolist()
        assert len(set(pages)) == len(pages)
        for row in range(rows):
            expected = self.path_slots(pieces[row][0])[: pieces[row][1]] if row < len(pieces) else []
            assert forest.context_slots(row).tolist() == expected
