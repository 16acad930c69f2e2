"""Fine-tuning examples on standard output: how functions of Python's own library begin, and what their docstrings say.

python examples/docstrings.py > docstrings.jsonl
"""

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def examples(source: str) -> Iterator[dict[str, str]]:
    """The documented functions of a module: `def` line as the prompt, docstring as the response."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and len(docstring) > 20:
                prompt = f"def {node.name}({ast.unparse(node.args)}):\n"
                yield {"prompt": prompt, "response": f'    """{docstring}"""\n'}


def main() -> None:
    """Every module of the library, mixed, so that the last of them, which are held out, are a fair sample."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda path: hashlib.sha256(path.name.encode()).digest()):
        if {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}.isdisjoint(path.parts):
            for example in examples(path.read_text(encoding="utf-8")):
                sys.stdout.write(json.dumps(example) + "\n")


if __name__ == "__main__":
    main()
