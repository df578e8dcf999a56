"""Who owns which page of the cache: reference counts over page ids, nothing else.

A page is in one of three states:

    in use   refs > 0               sequences and copies under way hold one reference each
    idle     refs = 0, kept         only the prefix tree has it: reusable at once, first idle first out
    free     refs = 0, not kept

The tree's claim is the flag "kept", not a reference, so what could be had at once is free + idle without a walk.
Holders let go of a sequence's pages last page first. A page is therefore not idle while a sequence uses one that
continues it, and the order of going idle is both least recently used first and leaves first.
"""

from collections import OrderedDict


class PagePool:
    """`num_pages` pages, all free at first. Misuse (a page released twice, kept while free) is an assertion error."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.refs = [0] * num_pages
        self._kept = bytearray(num_pages)
        # Lowest ids first, last freed first out: the same on every rank.
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """What can be had now: free pages and idle ones, which the tree must give up first."""
        return len(self._free) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """`count` free pages with one reference each."""
        assert count <= len(self._free), f"{count=} {self.num_free=}"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self.refs[page] = 1
        return pages

    def ref(self, page: int) -> None:
        """One more holder of a page that is in use or idle."""
        if self.refs[page] == 0:
            assert self._kept[page], f"{page=} is free"
            del self._idle[page]
        self.refs[page] += 1

    def unref(self, page: int) -> None:
        """One holder less; the last one leaves the page idle, or free if the tree does not have it."""
        assert self.refs[page] > 0, f"{page=} has no holder"
        self.refs[page] -= 1
        if self.refs[page] == 0:
            if self._kept[page]:
                self._idle[page] = None
            else:
                self._free.append(page)

    def keep(self, page: int) -> None:
        """The tree takes a page that is in use."""
        assert self.refs[page] > 0, f"{page=} has no holder"
        assert not self._kept[page], f"{page=} is kept already"
        self._kept[page] = 1

    def forget(self, page: int) -> None:
        """The tree gives a page up; if it was idle, it is free now."""
        assert self._kept[page], f"{page=} is not kept"
        self._kept[page] = 0
        if self.refs[page] == 0:
            del self._idle[page]
            self._free.append(page)

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def is_kept(self, page: int) -> bool:
        return bool(self._kept[page])

    def oldest_idle(self) -> int:
        """The page that has been idle for longest."""
        return next(iter(self._idle))
