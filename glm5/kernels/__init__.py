"""One folder per op: `reference.py` is the definition, its neighbours are faster implementations with the same
signature, and the folder's `__init__.py` holds the only public name. `impl="auto"` picks; an explicit name never falls
back. Shape letters: see the legend in `glm5/model/__init__.py`.

Paged ops take a pool of pages [P, Z, .] and a page table: logical key s of request b is
`pool[page_table_BN[b, s // Z], s % Z]`, S = N * Z. Query t belongs to request `row_T[t]` and sees keys 0..end_T[t]-1;
`end_T[t] == 0` marks a padding row. Slots that no query sees may have any content, including NaN.
"""
