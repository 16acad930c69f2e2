"""The syntax of modules, parsed once for all tests of the house."""

import ast
from functools import cache


@cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """Returns every node of a module's syntax, in the order of `ast.walk`."""
    return tuple(ast.walk(ast.parse(text)))
