"""A mailbox: memory of each device that the others write to, and a way to see that all has come without a barrier.

    device a                                  memory of device b: slots [turn, device, word]

    words ──► 16 bytes a thread, over NVLink ──► [turn, a] ──► read again and again until no word is EMPTY
          ──► and to every other device                        [turn - 1] is EMPTY again meanwhile

No word that is sent is EMPTY, so a word that is not has come, and no flag has to follow the numbers. A thread has the
same words of all slots in every call, 16 bytes or several times as many: it sends those, and reads and empties them
where they come.

| turn | what device b does with its own slots | what others may do |
|---|---|---|
| n | reads [n], empties [n - 1] | write [n], or [n + 1] if they are done with n |
| n + 1 | reads [n + 1], empties [n] | write [n + 1], or [n + 2] |

With three turns that follow each other in a circle nobody writes to what is being read or emptied: a device that writes
[n + 2], where [n - 1] was, is done with n + 1, so b has sent something in n + 1, and was done with n, in which it
emptied [n - 1]. So it is, too, where some thread blocks have words for other devices only, and wait for nobody: in
every call each device has some that wait for all others.

Beside its own words a thread may share two with the threads next to it, of which the first one sends and empties them.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf

from pallas_kernels.between_devices.numbers import Numbers, instruct, word, word_type
from pallas_kernels.between_devices.sizes import SHARED, THREADS, Sizes
from pallas_kernels.by_thread import at_index, global_memory
from pallas_kernels.compat import kernel_on_references
from pallas_kernels.in_place import run_in_place
from pallas_kernels.varying import NOWHERE, unvaried

#: As float32 it is -0.0; of two numbers of 16 bits the second is. Neither is sent: 0.0 is.
EMPTY = -(2**31)
_TURNS = 3
#: A number that all threads of a thread block have.
SCALAR = plgpu.Layout.WG_SPLAT(())
SCALAR_TYPE = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)
#: A device that died sends nothing. Who waits looks so often, which takes minutes, and then ends with an error.
_MOST_LOOKS = 1 << 30


class Memory(NamedTuple):
    """What a device has of a mailbox, int32."""

    slots: jax.Array  # [turns x devices x words of a slot]
    counts: jax.Array  # [blocks], calls so far


@partial(jax.jit, static_argnames="sizes")
@jax.enable_x64(False)  # the kernel counts in int32
def empty(seed: jax.Array, sizes: Sizes) -> Memory:
    """Return a mailbox. All devices have to have theirs before any of them sends something.

    For XLA its numbers are results of a kernel like any other: what depends on them comes after.

    Args:
      seed: int32 [1], any number that only this mailbox depends on, and that a loop computes in every turn. A kernel of
        nothing, or two of the same, XLA might run once for several mailboxes, and copy what it gives.
      sizes: of the mailbox.
    """

    def body(_: Any, slots: Any, counts: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
        def fill(_: Any, slots: Any, counts: Any) -> None:
            box = Box(sizes, slots, counts)
            for turn in range(_TURNS):
                box.empty(word(turn))
            box.set_count(word(0))

        fill(slots, counts)

    shapes = (_TURNS * sizes.devices * sizes.slot,), (sizes.blocks,)
    out_type = [jax.ShapeDtypeStruct(shape, jnp.int32, manual_axis_type=NOWHERE) for shape in shapes]
    return Memory(*_kernel("empty_mailbox", body, out_type, {"blocks": sizes.blocks})(unvaried(seed)))


def call(
    name: str,
    body: Callable[..., None],
    mailbox: Memory,
    inputs: Sequence[jax.Array],
    out_type: Any,
    sizes: Sizes,
    grid: dict[str, int] | None = None,
) -> tuple[Memory, Any]:
    """Call a kernel between devices; return the mailbox for the next call, and the results.

    Args:
      name: of the kernel.
      body: does what a thread block does, with references to inputs, to slots and counts, and to results.
      mailbox: of `empty`, or of the call before.
      inputs: arrays.
      out_type: shapes and dtypes of the results.
      sizes: of the mailbox.
      grid: names and sizes of the thread blocks' dimensions, where these are not one of "blocks".
    """
    kernel = _kernel(name, body, out_type, grid or {"blocks": sizes.blocks})
    results, memory = run_in_place(kernel, [*map(unvaried, inputs)], [*map(unvaried, mailbox)])
    return Memory(*memory), results


def run(
    name: str, thread: Callable[..., None], mailbox: Memory, inputs: Sequence[jax.Array], out_type: Any, sizes: Sizes
) -> tuple[Memory, Any]:
    """Call a kernel between devices that is written thread by thread.

    Args:
      name, mailbox, inputs, out_type, sizes: as in `call`.
      thread: does what one thread does, with the context of the kernel, a `Box`, and references to inputs and results.
    """
    count = len(inputs)

    def body(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def all_of_it(context: Any, *refs: Any) -> None:
            thread(context, Box(sizes, *refs[count : count + 2]), *refs[:count], *refs[count + 2 :])

        all_of_it(*refs)

    return call(name, body, mailbox, inputs, out_type, sizes)


def _kernel(name: str, body: Any, out_type: Any, grid: dict[str, int]) -> Any:
    """Make a kernel whose threads have words of a mailbox; it does not wait for other devices to begin.

    None of them gives others anything through shared memory.
    """
    mesh = plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid))
    return kernel_on_references(name, body, out_type=out_type, scratch_types=[], mesh=mesh, reaches_others=True)


class Box:
    """A mailbox inside of a kernel, as one thread sees it; numbers are values of MLIR."""

    def __init__(self, sizes: Sizes, slots: Any, counts: Any, block: Any = None) -> None:
        """Take the references, and find out which thread this is, of a block whose number is given if it is not x."""
        self.sizes, self._slots, self._counts = sizes, slots, counts
        self._block = arith.index_cast(word_type(), gpu.block_id(gpu.Dimension.x)) if block is None else block
        first = arith.addi(arith.muli(self._block, word(sizes.chunks * THREADS)), mgpu.utils.thread_idx())
        #: The number of each chunk among those of all threads.
        self.chunks = [arith.addi(first, word(i * THREADS)) for i in range(sizes.chunks)]
        #: The first word of each chunk.
        self.firsts = [arith.muli(chunk, word(sizes.width)) for chunk in self.chunks]

    def everyone(self, context: Any, x: Any) -> tuple[Numbers, list[list[Any]]]:
        """Send the numbers of this thread to every device; return how they are stored, and of each chunk all devices'.

        Args:
          context: of the kernel.
          x: reference to an array, of `sizes.words` words.
        """
        numbers, width = Numbers(x.type.element_type, self.sizes.width), self.sizes.width
        own = [each for first in self.firsts for each in numbers.to_words(numbers.load(x, first))]
        come = [words for words, _ in self.exchange(context, own)]
        chunks = [slice(i * width, (i + 1) * width) for i in range(self.sizes.chunks)]
        return numbers, [[numbers.from_words(words[chunk]) for words in come] for chunk in chunks]

    def exchange(
        self,
        context: Any,
        words: list[Any],
        shared: Sequence[Any] = (),
        begun: Sequence[Any] | None = None,
        recipients: Sequence[Any] | None = None,
    ) -> Iterator[tuple[list[Any], list[Any]]]:
        """Send words to the devices, and yield what each of them sent, as it is waited for.

        Args:
          context: of the kernel.
          words: of this thread, one chunk after another; none is EMPTY.
          shared: those that it shares, two of each chunk; none is EMPTY.
          begun: what `begin` returned, if the kernel did that before it had the words.
          recipients: the device that gets each chunk, which is the same on all of them; None where all get all.

        Yields the same two of each device; of a chunk that another device gets, anything.
        """
        count, *slots = _unpacked(self.begin(context) if begun is None else begun)
        own, turn = self.own(context), arith.remui(count, word(_TURNS))
        self._send(own, turn, slots, words, shared, recipients)
        self._clear(count)
        wanted = [None if recipients is None else _equal(recipients[i], own) for i in range(self.sizes.chunks)]
        for device in range(self.sizes.devices):
            yield self._receive(turn, device, wanted)

    def begin(self, context: Any) -> list[Any]:
        """Do what an exchange does before there is something to send; return the words that it needs.

        These are the count, and two of each device.
        """
        count = llvm.load(word_type(), at_index(global_memory(self._counts), [self._block], word_type()))
        return [count, *(half for each in self._slots_of_others(context) for half in _halves(each))]

    def _clear(self, count: Any) -> None:
        """Make the slots of the turn before EMPTY, and count this call."""
        self.empty(arith.remui(arith.addi(count, word(_TURNS - 1)), word(_TURNS)))
        mgpu.utils.warpgroup_barrier()  # all have loaded the count
        self.set_count(arith.addi(count, word(1)))

    def own(self, context: Any) -> Any:
        """Return the number of this device in its group."""
        return arith.remui(arith.divui(context.device_id(), word(self.sizes.stride)), word(self.sizes.devices))

    def set_count(self, count: Any) -> None:
        """Say how many calls there were."""
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            llvm.store(count, at_index(global_memory(self._counts), [self._block], word_type()))

    def empty(self, turn: Any) -> None:
        """Make the slots of a turn EMPTY, where this thread has words."""
        slots, words, shared = global_memory(self._slots), [word(EMPTY)] * self.sizes.width, [word(EMPTY)] * SHARED
        for device in range(self.sizes.devices):
            place = self._place(turn, word(device))
            for i in range(self.sizes.chunks):
                self._store("st.global", slots, place, i, words, shared)

    def _others(self, own: Any) -> list[Any]:
        """Return the numbers of all devices; each begins with another one, and ends with itself."""
        devices = self.sizes.devices
        return [arith.remui(arith.addi(own, word(step + 1)), word(devices)) for step in range(devices)]

    def _slots_of_others(self, context: Any) -> list[Any]:
        """Return pointers to the slots of all devices, in the order of `_others`."""
        own, stride = self.own(context), word(self.sizes.stride)
        group = arith.subi(context.device_id(), arith.muli(own, stride))
        numbers = [arith.addi(group, arith.muli(other, stride)) for other in self._others(own)]
        return [global_memory(context.to_remote(self._slots, number)) for number in numbers]

    def _send(
        self,
        own: Any,
        turn: Any,
        slots_of: Sequence[Any],
        words: Sequence[Any],
        shared: Sequence[Any],
        recipients: Sequence[Any] | None,
    ) -> None:
        width, place = self.sizes.width, self._place(turn, own)
        for other, slots in zip(self._others(own), slots_of, strict=True):
            for i in range(self.sizes.chunks):
                of_chunk = words[i * width : (i + 1) * width], shared[i * SHARED : (i + 1) * SHARED]
                with nullcontext() if recipients is None else mgpu.when(_equal(recipients[i], other)):
                    self._store("st.relaxed.sys.global", slots, place, i, *of_chunk)

    def _receive(self, turn: Any, device: int, wanted: list[Any]) -> tuple[list[Any], list[Any]]:
        place = self._place(turn, word(device))
        words = self._wait([arith.addi(place, first) for first in self.firsts], self.sizes.width, wanted)
        if not self.sizes.sharing:
            return words, []
        return words, self._wait([arith.addi(place, self._shared(chunk)) for chunk in self.chunks], SHARED, wanted)

    def _wait(self, indices: list[Any], width: int, wanted: list[Any]) -> list[Any]:
        """Wait for so many words from each of some indices of the slots on, all or those that are wanted.

        All are asked for at once.
        """
        places = [at_index(global_memory(self._slots), [index], word_type()) for index in indices]
        names = ", ".join(f"${i}" for i in range(width))
        load = f"ld.relaxed.sys.global{_SHAPES[width]} {{{names}}}, [${width}];"
        types = [word_type()] * (1 + width * len(places))
        loop = scf.WhileOp(types, [word(0)])
        before = loop.before.blocks.append(word_type())
        with ir.InsertionPoint(before):
            come = [instruct(load, place, results=width) for place in places]
            missing = [reduce(arith.ori, [_equal(each, word(EMPTY)) for each in words]) for words in come]
            missing = [
                each if want is None else arith.andi(each, want) for each, want in zip(missing, wanted, strict=True)
            ]
            scf.condition(reduce(arith.ori, missing), [*before.arguments, *itertools.chain(*come)])
        after = loop.after.blocks.append(*types)
        with ir.InsertionPoint(after):
            looks = arith.addi(after.arguments[0], word(1))
            with mgpu.when(_equal(looks, word(_MOST_LOOKS))):
                instruct("trap;")
            scf.yield_([looks])
        return list(loop.results)[1:]

    def _place(self, turn: Any, device: Any) -> Any:
        """Return the first word of a slot."""
        return arith.muli(arith.addi(arith.muli(turn, word(self.sizes.devices)), device), word(self.sizes.slot))

    def _shared(self, chunk: Any) -> Any:
        """Return where in a slot the words are that are shared of a chunk."""
        share = arith.divui(chunk, word(self.sizes.sharing))
        return arith.addi(word(self.sizes.words), arith.muli(share, word(SHARED)))

    def _store(
        self, instruction: str, slots: Any, place: Any, i: int, words: Sequence[Any], shared: Sequence[Any]
    ) -> None:
        """Store the words of a chunk in a slot; the first of the threads that share some stores these."""
        _store(instruction, slots, arith.addi(place, self.firsts[i]), words)
        if self.sizes.sharing:
            with mgpu.when(_equal(arith.remui(self.chunks[i], word(self.sizes.sharing)), word(0))):
                _store(instruction, slots, arith.addi(place, self._shared(self.chunks[i])), shared)


def _equal(a: Any, b: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


_SHAPES = {1: ".b32", 2: ".v2.b32", 4: ".v4.b32"}


def _store(instruction: str, slots: Any, index: Any, words: Sequence[Any]) -> None:
    names = ", ".join(f"${i + 1}" for i in range(len(words)))
    text = f"{instruction}{_SHAPES[len(words)]} [$0], {{{names}}};"
    instruct(text, at_index(slots, [index], word_type()), *words)


def begin(slots: Any, counts: Any, block: jax.Array, sizes: Sizes) -> list[jax.Array]:
    """Begin an exchange of a thread block before there is something to send; return what `Box.begin` does."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR), return_type=[SCALAR_TYPE] * (1 + 2 * sizes.devices)
    )
    def of_box(context: Any, slots: Any, counts: Any, block: Any) -> Any:
        return list(map(splat, Box(sizes, slots, counts, only(block)).begin(context)))

    return of_box(slots, counts, block)


def only(array: Any) -> Any:
    """Return the only register of an array: of a scalar, its number."""
    return array.registers.item()


def splat(number: Any) -> Any:
    """Return a scalar of all threads."""
    return mgpu.FragmentedArray.splat(number, (), is_signed=True)


def _halves(pointer: Any) -> tuple[Any, Any]:
    """Return the two words of a pointer to global memory."""
    long = ir.IntegerType.get_signless(64)
    bits = llvm.ptrtoint(long, pointer)
    high = arith.shrui(bits, mgpu.c(32, long))
    return arith.trunci(word_type(), bits), arith.trunci(word_type(), high)


def _unpacked(begun: Sequence[Any]) -> list[Any]:
    """Return the count and the pointers that words of `Box.begin` are."""
    long, (count, *halves) = ir.IntegerType.get_signless(64), begun
    pointers = []
    for low, high in zip(halves[::2], halves[1::2], strict=True):
        bits = arith.ori(arith.extui(long, low), arith.shli(arith.extui(long, high), mgpu.c(32, long)))
        pointers.append(llvm.inttoptr(llvm.PointerType.get(address_space=1), bits))
    return [count, *pointers]
