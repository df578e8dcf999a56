"""select_keys by the scores of index_score's `tiled`."""

from functools import partial

from glm5.kernels.index_score.tiled import index_score
from glm5.kernels.select_keys.reference import select_in_pieces

select_keys = partial(select_in_pieces, index_score)
