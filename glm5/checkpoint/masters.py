"""Weights given as floats (masters) for a model that holds them quantized: the quantizer's codes and scales.

FP8 in blocks     `quantize_blocks`, as `glm5 convert --dtype fp8`
other formats     the scales of `minmax_scale`, in the precision of the format's files, and the nearest codes, as
                  `glm5 quantize --method minmax` where its recipe neither smooths nor rotates
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from glm5.checkpoint.formats.base import Format, Stored
from glm5.checkpoint.names import SCALE_SUFFIX, slot_of
from glm5.checkpoint.stored import place
from glm5.kernels.block_scaled import quantize_blocks
from glm5.parallel.table import Span, scale_span
from glm5.quant.minmax import quantize
from glm5.quant.qat import minmax_scale


@dataclass(frozen=True)
class Master:
    """How a matrix is held: as `matrix` in `format`; both None: native FP8 in blocks. `trained`: with int4 in view."""

    matrix: Stored | None = None
    format: Format | None = None
    trained: bool = False

    def quantize_into(self, name: str, weight: Tensor, parameters: Mapping[str, Tensor], span: Span | None) -> None:
        """Quantize `weight` [O, I], called `name` on disk, and put `span` of it into the parameters of a model.

        The whole matrix is quantized, since a scale may cover what other ranks have.
        """
        if self.matrix is None or self.format is None:
            slot, (codes, scale) = slot_of(name), quantize_blocks(weight)
            of_scale = slot._replace(parameter=slot.parameter + SCALE_SUFFIX)
            slot.view(parameters[slot.parameter]).copy_(_part(codes, span, 1))
            scales = None if span is None else scale_span(span)
            of_scale.view(parameters[of_scale.parameter]).copy_(_part(scale, scales, 1))
            return
        scheme = self.matrix.scheme
        scale, offset = minmax_scale(weight, scheme.weight, trained=self.trained)
        scale = self.format.stored_scale(scale.float(), scheme).to(scale.dtype)
        tensors = self.matrix.write(quantize(weight, scheme.weight, scale, offset))

        def put(name: str, span: Span | None, per_element: int, consume: Callable[[Tensor], object]) -> None:
            consume(_part(tensors[name], span, per_element))

        place(self.matrix, parameters, span, put)


def _part(tensor: Tensor, span: Span | None, per_element: int) -> Tensor:
    """`span` of a matrix, of whose rows each element stands for `per_element` inputs."""
    if span is None:
        return tensor
    per_element = per_element if span.dim == 1 else 1
    start, stop = span.start // per_element, span.stop // per_element
    return tensor.narrow(span.dim, start, stop - start)
