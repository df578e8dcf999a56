"""Reference counts of the cache's pages, by page id.

A page is in one of three states:

    in use   refs > 0               sequences and copies under way hold one reference each
    idle     refs = 0, kept         only in the prefix tree: reusable at once, longest idle first
    free     refs = 0, not kept

The prefix tree sets the flag "kept" instead of holding a reference, so the available pages are free + idle, without a
tree walk. A sequence releases its last page first. A page is therefore in use while any page that continues it is,
and the order in which pages become idle is both least recently used first and leaves first.
"""

from collections import OrderedDict


class PagePool:
    """`num_pages` pages, all free at first. Misuse (releasing a page twice, keeping a free one) fails an assertion."""

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
        """Pages that can be allocated now: free ones, and idle ones after their eviction from the tree."""
        return len(self._free) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """`count` free pages with one reference each."""
        assert count <= len(self._free), f"{count=} {self.num_free=}"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self.refs[page] = 1
        return pages

    def ref(self, page: int) -> None:
        """Add a reference to a page that is in use or idle."""
        if self.refs[page] == 0:
            assert self._kept[page], f"{page=} is free"
            del self._idle[page]
        self.refs[page] += 1

    def unref(self, page: int) -> None:
        """Drop a reference. Without any, the page becomes idle, or free if it is not in the tree."""
        assert self.refs[page] > 0, f"{page=} has no holder"
        self.refs[page] -= 1
        if self.refs[page] == 0:
            if self._kept[page]:
                self._idle[page] = None
            else:
                self._free.append(page)

    def keep(self, page: int) -> None:
        """Mark a page in use as part of the tree."""
        assert self.refs[page] > 0, f"{page=} has no holder"
        assert not self._kept[page], f"{page=} is kept already"
        self._kept[page] = 1

    def forget(self, page: int) -> None:
        """Mark a page as no longer in the tree; an idle one becomes free."""
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
