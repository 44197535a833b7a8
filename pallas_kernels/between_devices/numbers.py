"""Numbers of a thread inside of a kernel: as they are stored, as words of 32 bits, and as vectors of float32."""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.by_thread import at_index, global_memory


class Numbers:
    """What is stored in a few words that follow each other; all are values of MLIR."""

    def __init__(self, element: Any, width: int) -> None:
        """Take the type of a number, and how many words there are."""
        count = width * 32 // element.width
        self._words = ir.VectorType.get((width,), word_type())
        self._stored = ir.VectorType.get((count,), element)
        self._wide = ir.VectorType.get((count,), ir.F32Type.get())

    def load(self, ref: Any, word: Any) -> Any:
        """Return the numbers of an array from a word on, float32."""
        return self._as_wide(vector.bitcast(self._stored, llvm.load(self._words, _at(ref, word))))

    def store(self, numbers: Any, ref: Any, word: Any) -> None:
        """Round numbers, and store them in an array from a word on."""
        llvm.store(vector.bitcast(self._words, self._as_stored(numbers)), _at(ref, word))

    def to_words(self, numbers: Any) -> list[Any]:
        """Return words of numbers, none of which is -0.0: it becomes 0.0, and so does what rounds to it."""
        rounded, zero = self._as_wide(self._as_stored(numbers)), mgpu.c(0.0, ir.F32Type.get())
        kept = vector.bitcast(self._words, self._as_stored(arith.addf(rounded, self._all(zero))))
        return [vector.extract(kept, [], [i]) for i in range(self._words.shape[0])]

    def from_words(self, words: list[Any]) -> Any:
        """Return the numbers that words hold, float32."""
        return self._as_wide(self.stored_from_words(words))

    def stored_from_words(self, words: list[Any]) -> Any:
        """Return the numbers that words hold, as they are stored."""
        return vector.bitcast(self._stored, vector.from_elements(self._words, words))

    def times(self, numbers: Any, factor: Any) -> Any:
        """Multiply numbers with one, float32."""
        return arith.mulf(numbers, self._all(factor))

    def _all(self, number: Any) -> Any:
        return vector.broadcast(self._wide, number)

    def _as_wide(self, numbers: Any) -> Any:
        return numbers if self._stored == self._wide else arith.extf(self._wide, numbers)

    def _as_stored(self, numbers: Any) -> Any:
        return numbers if self._stored == self._wide else arith.truncf(self._stored, numbers)


def word_type() -> Any:
    """Return the type of a word."""
    return ir.IntegerType.get_signless(32)


def word(number: int) -> Any:
    """Return a word that is a number."""
    return mgpu.c(number, word_type())


def instruct(text: str, *values: Any, results: int = 0) -> list[Any]:
    """Run an instruction of PTX with words, or a pointer, as `$i`, those that it returns first."""
    letters = ["=r"] * results + ["r" if value.type == word_type() else "l" for value in values]
    types = [word_type()] * results
    returned = {0: ir.Type.parse("!llvm.void"), 1: word_type()}.get(results) or llvm.StructType.get_literal(types)
    result: Any = llvm.inline_asm(returned, list(values), text, ",".join(letters), has_side_effects=True)
    return [result][:results] if results < 2 else [llvm.extractvalue(word_type(), result, [i]) for i in range(results)]


def _at(ref: Any, index: Any) -> Any:
    return at_index(global_memory(ref), [index], word_type())
