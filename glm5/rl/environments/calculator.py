"""Arithmetic for a policy, exact and bounded: numbers, + - * / // % **, parentheses. Nothing else is evaluated."""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from glm5.rl.environments.answers import is_short, spelled

MAX_CHARS = 200
MAX_EXPONENT, MAX_BITS = 64, 2000

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> str:
    """The result: exact if it is short, else with 10 significant digits. Raises ValueError with a reason."""
    if len(expression) > MAX_CHARS:
        raise ValueError(f"an expression of {len(expression)} characters; allowed are {MAX_CHARS}")
    try:
        text = expression.strip()
        result = _value(ast.parse(text, mode="eval").body, text)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("the expression cannot be read; allowed are numbers, + - * / // % ** and ( )") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    return spelled(result) if is_short(result) else f"{float(result):.10g}"


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return _bounded(_number(ast.get_source_segment(text, node) or ""))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, text)
        case ast.UnaryOp(op=ast.UAdd()):
            return _value(node.operand, text)
        case ast.BinOp(op=ast.Pow()):
            return _power(_value(node.left, text), _value(node.right, text))
        case ast.BinOp() if type(node.op) in _OPERATORS:
            left, right = _value(node.left, text), _value(node.right, text)
            return _bounded(Fraction(_OPERATORS[type(node.op)](left, right)))
        case _:
            raise ValueError("allowed are numbers, + - * / // % ** and ( )")


def _number(literal: str) -> Fraction:
    """A number as it was written: 0.1 is a tenth."""
    if re.search(r"[eE][+-]?\d{4}", literal):
        raise ValueError(f"{literal}: an exponent of more than three digits")
    return Fraction(literal)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ValueError(f"exponents are integers from -{MAX_EXPONENT} to {MAX_EXPONENT}")
    return _bounded(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
        raise ValueError(f"a number of more than {MAX_BITS} bits")
    return value
