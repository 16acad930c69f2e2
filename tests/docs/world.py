"""A folder in which the blocks of pages run: what `tk demo` leaves, and the files that readers have of their own."""

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tk.tests.docs.blocks import ROOT, Block

CERTIFICATES: Final = ROOT / "tests" / "infer" / "serve" / "certificates"
SHORT: Final = "--set train.steps=2 --set optimizer.warmup_steps=1"
SMALL: Final = (
    "model.hidden_size=64 model.intermediate_size=128 model.num_hidden_layers=2 model.num_attention_heads=4 "
    "train.global_batch_size=4 train.micro_batch_size=2 train.seq_len=64 data.eval_fraction=0.1"
)
# All that a block is changed by: folders of the system, a host that does not exist, how long something takes, and, for
# eight GPUs, how large a model is.
CHANGES: Final = (
    ("/etc/tk/", "etc-tk/"),
    ("/opt/tk-kernels", "opt-tk-kernels"),
    ("server.example", "localhost"),
    ("tk train examples/tiny.toml", f"tk train examples/tiny.toml {SHORT}"),
    ("tk train examples/finetune.toml", f"tk train examples/finetune.toml {SHORT} --set train.eval_every=2"),
    (
        "tk train examples/llama-1b.toml --nproc 8",
        f"tk train examples/llama-1b.toml --nproc 2 {SHORT} --set {SMALL.replace(' ', ' --set ')}",
    ),
    ("--vocab-size 32000", "--vocab-size 2000"),
    ("train.steps=700", "train.steps=22"),
    ("steps = 50", "steps = 2"),
    ("--rate 4", "--rate 4 --requests 8"),
)
# What a page expects to be there: a word of its block that shows it, the command of the block that would make it, and
# the command that makes it where the block has none.
EXPECTED: Final = (
    ("runs/demo/hugging-face", "tk export", "tk export runs/demo/run runs/demo/hugging-face"),
    (r"(localhost|127\.0\.0\.1):(50051|8000)", "tk serve", "tk serve runs/demo/run --http 8000"),
)
# A server stays in the background until the next one or the end, and must then have ended well. `top` looks once.
PRELUDE: Final = """\
set -e -o pipefail
server=
stop() { if [ "$server" ]; then kill -TERM "$server"; wait "$server"; server=; fi; }
trap 'stop' EXIT
tk() {
    case "$1" in
    serve)
        stop
        : > served
        command tk serve --port 50051 "${@:2}" > served 2> served.log &
        server=$!
        until grep -q '^ready ' served; do kill -0 "$server" || { cat served.log >&2; return 1; }; sleep 0.1; done
        ;;
    top) command tk "$@" --once ;;
    *) command tk "$@" ;;
    esac
}
"""
ENVIRONMENT: Final = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ADAPTER: Final = """\
model.init = "models/base"
data = { sources = [{ path = "first-chats" }], packing = "documents" }
train = { steps = 1, seq_len = 64, global_batch_size = 2 }
lora = { rank = 4 }
checkpoint.dir = "runs/sql"
"""
MULTIPLY: Final = '__attribute__((visibility("default"))) int multiply_{0}(int a, int b) {{ return a * b; }}\n'


def free_port() -> int:
    """Returns a port of the loopback interface that nothing listens on.

    It is below those that the system gives to others, since seconds pass until a server takes it.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("No port is free.")


class World:
    """A folder for the blocks of one page, which they may change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, script: str, timeout: float = 300) -> str:
        """Runs a script of bash in the folder; returns all that it printed.

        Raises:
            AssertionError: it failed; the message has its output.
        """
        for port in ("50051", "8000"):
            script = script.replace(port, str(free_port()))
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{script}\nended with exit code {done.returncode}:\n{done.stdout}"
        return done.stdout

    @contextmanager
    def copy(self, folder: Path) -> Iterator["World"]:
        """Yields a copy of this world, and removes it."""
        shutil.copytree(self.folder, folder, symlinks=True)
        yield World(folder)
        shutil.rmtree(folder)


def build(folder: Path) -> World:
    """Makes the world: a demo of few steps, and what it needs of a reader's own files."""
    _write_texts(folder)
    (folder / "examples").symlink_to(ROOT / "examples")
    for name, source in (("cert.pem", "server.pem"), ("key.pem", "server.key"), ("ca.pem", "ca.pem")):
        shutil.copy(CERTIFICATES / source, folder / name)
    world = World(folder)
    world.run(
        "set -e\n"
        "tk demo --steps 20\n"
        "tk export --plain runs/demo/run models/base\n"
        "mv chat_template.jinja models/base\n"
        "ln -s ../models/base runs/base\n"
        "tk data prepare chats.jsonl --tokenizer models/base --out first-chats\n"
        "tk train adapter-of-world.toml\n"
        "for name in legal law law-2 lora; do cp -r runs/sql runs/$name; done\n"
        "tk export runs/sql peft/sql\n"
    )
    return world


def _write_texts(folder: Path) -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    for name in ("books", "corpus", "etc-tk", "models", "peft"):
        (folder / name).mkdir(parents=True)
    for name in ("books", "corpus"):
        for page in sorted((ROOT / "docs").glob("*.md")):
            shutil.copy(page, folder / name / f"{page.stem}.txt")
    (folder / "ds_config.json").write_text('{"gradient_clipping": 0.5, "zero_optimization": {"stage": 1}}')
    (folder / "more.jsonl").write_text(json.dumps({"text": text[:2000]}) + "\n")
    (folder / "held-out.txt").write_text(text[:3000])
    chats = [
        [{"role": "user", "content": f"What is {n} + {n}?"}, {"role": "assistant", "content": f"It is {n + n}."}]
        for n in range(60)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "adapter-of-world.toml").write_text(ADAPTER)
    (folder / "kernels.h").write_text("")
    for unit in ("scalar", "avx2"):
        (folder / f"{unit}.c").write_text(MULTIPLY.format(unit))


def script_of(block: Block) -> str:
    """Returns the script of bash that runs a block, with the changes and what the page expects to be there."""
    code = block.code
    for old, new in CHANGES:
        code = code.replace(old, new)
    expected = [
        command
        for shown, maker, command in EXPECTED
        if re.search(shown, code) and not re.search(rf"^ *{maker}", code, re.MULTILINE)
    ]
    if block.kind == "python":
        ranks = re.search(r"torchrun --nproc-per-node (\d+)", code)
        program = f"torchrun --standalone --nproc-per-node {ranks[1]}" if ranks else "python"
        code = f"cat > block.py <<'END_OF_BLOCK'\n{code}END_OF_BLOCK\n{program} block.py"
    return "\n".join([PRELUDE, *expected, code, "stop"])
