"""Prints fine-tuning examples: the `def` lines of functions in Python's standard library, and their docstrings.

python docstrings.py > docstrings.jsonl
"""

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def examples(source: str) -> Iterator[dict[str, str]]:
    """Yields the documented functions of a module: the `def` line as the prompt, the docstring as the response."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and len(docstring) > 20:
                prompt = f"def {node.name}({ast.unparse(node.args)}):\n"
                yield {"prompt": prompt, "response": f'    """{docstring}"""\n'}


def main() -> None:
    """Prints the examples of all modules, shuffled, so that the last ones, which are held out, are a fair sample."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda path: hashlib.sha256(path.name.encode()).digest()):
        if {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}.isdisjoint(path.parts):
            for example in examples(path.read_text(encoding="utf-8")):
                sys.stdout.write(json.dumps(example) + "\n")


if __name__ == "__main__":
    main()
