"""The paged key/value cache's bookkeeping: which blocks are free, and what the free ones still hold.

Rules of this file: pure Python, no torch, no trio; the tensor itself is the runner's. A block holds the
keys and values of ``block_size`` consecutive tokens, in every layer. Who takes blocks from the pool gives
them back: that is the scheduler alone.

Prefix caching: a full block may be given a name, a hash of its tokens and of all before them
(``block_hashes``). A named block keeps what it holds when its last user has gone, until its memory is
needed: then those that were given back first lose their names first. Several requests may use it at
once, since nobody writes into a full block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

__all__ = ["BLOCK_SIZE", "BlockPool", "extend_block_hashes", "root_hash"]

# Tokens of one block. Gathering 16, 32 or 64 tokens at a time took the same time on CPU (measured), and
# a small block wastes less at each request's end. It is also vLLM's default.
BLOCK_SIZE = 16

# Bytes of a hash. A collision would give a request another's keys and values: at 128 bits, never.
_HASH_BYTES = 16


def root_hash(cache_salt: str | None) -> bytes:
    """What stands before the first block: requests with different salts share nothing."""
    salt = b"" if cache_salt is None else b"salt:" + cache_salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(salt, digest_size=_HASH_BYTES).digest()


def extend_block_hashes(
    hashes: list[bytes], root: bytes, token_ids: Sequence[int], count: int, block_size: int
) -> None:
    """Extends ``hashes`` to the first ``count`` blocks of ``token_ids``, which must be full."""
    for index in range(len(hashes), count):
        tokens = array("i", token_ids[index * block_size : (index + 1) * block_size]).tobytes()
        parent = hashes[-1] if hashes else root
        hashes.append(hashlib.blake2b(parent + tokens, digest_size=_HASH_BYTES).digest())


class BlockPool:
    """Block numbers ``0 … num_blocks − 1``, each used by some requests or free.

    A free block without a name is given out first, the one that came back last before all others: its
    memory is the warmest, and on CPU memory that no block has touched yet stays uncommitted.
    """

    def __init__(self, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; allowed: at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._users = [0] * num_blocks
        self._nameless = list(range(num_blocks - 1, -1, -1))
        # Free, but named: in the order in which they were given back.
        self._kept: dict[int, None] = {}
        self._name_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, those that are kept for a prefix included."""
        return len(self._nameless) + len(self._kept)

    @property
    def usage(self) -> float:
        """The used share, 0 to 1: free blocks are ``round((1 - usage) * num_blocks)``, exactly."""
        return 1.0 - self.num_free / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks that many tokens need."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks for one user, or None (and nothing taken) if there are not so many."""
        if count > self.num_free:
            return None
        taken = [
            self._nameless.pop() if self._nameless else self._forget_oldest() for _ in range(count)
        ]
        for block in taken:
            self._users[block] = 1
        return taken

    def free(self, block_ids: Sequence[int]) -> None:
        """One user less for each block of a sequence. The end of a sequence is of less use than its
        beginning, so it is given back, and later lost, first."""
        for block in reversed(block_ids):
            self._users[block] -= 1
            if not self._users[block]:
                if block in self._name_of:
                    self._kept[block] = None
                else:
                    self._nameless.append(block)

    # ------------------------------------------------------------------ prefix caching

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known beginning of ``hashes``. Nothing is taken yet."""
        found = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def num_unused(self, block_ids: Iterable[int]) -> int:
        """How many of these count as free so far."""
        return sum(block in self._kept for block in block_ids)

    def share(self, block_ids: Iterable[int]) -> None:
        """One more user for blocks that ``find`` has found."""
        for block in block_ids:
            self._kept.pop(block, None)
            self._users[block] += 1

    def name(self, block: int, name: bytes) -> None:
        """Names a full block, unless it has a name or another block has this one."""
        if name not in self._block_of and block not in self._name_of:
            self._block_of[name], self._name_of[block] = block, name

    def forget_names(self) -> bool:
        """No block is found any more. False, and nothing done, while any block is in use."""
        if self.num_free < self.num_blocks:
            return False
        self._nameless += reversed(self._kept)
        self._kept.clear()
        self._name_of.clear()
        self._block_of.clear()
        return True

    def _forget_oldest(self) -> int:
        block = next(iter(self._kept))
        del self._kept[block]
        del self._block_of[self._name_of.pop(block)]
        return block
