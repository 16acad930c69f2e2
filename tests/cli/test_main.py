"""`tk` itself: fast help, the nearest command, and every error as one paragraph with its exit code."""

import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tk.cli.main import COMMANDS, CommandEntry, command_group, main
from tk.core import errors

FAULTS: dict[str, Exception] = {
    "config": errors.ConfigError("train.toml: unknown key 'stpes'; did you mean 'steps'?"),
    "checkpoint": errors.ShardCorrupt("step-00000010/model-0.safetensors: tensor 'lm_head.weight' is damaged"),
    "worker": errors.WorkerDied("rank 1 of 2 exited with code -9"),
    "system": PermissionError(13, "Permission denied", "/root/run"),
    "bug": KeyError("exp_avg"),
    "interrupt": click.Abort(),
}


@click.command()
@click.argument("fault", required=False)
@click.option("--code", type=int, default=0)
@click.pass_context
def probe(ctx: click.Context, fault: str | None, code: int) -> None:
    """Fail as asked."""
    if fault == "ctrl-c":
        raise KeyboardInterrupt
    if fault:
        raise FAULTS[fault]
    ctx.exit(code)


@click.group()
def box() -> None:
    """Hold the probe."""


box.add_command(probe)

TABLE = {
    "probe": CommandEntry(f"{__name__}:probe", "Fail as asked."),
    "box": CommandEntry(f"{__name__}:box", "Hold the probe."),
}


def run(*args: str) -> int:
    return main(args, command_group(TABLE))


def tk(*args: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tk", *args], capture_output=True, text=True, timeout=timeout)


@pytest.mark.parametrize(
    ("fault", "code"),
    [("config", 2), ("checkpoint", 3), ("worker", 1), ("system", 1), ("bug", 1), ("interrupt", 130), ("ctrl-c", 130)],
)
def test_errors_become_one_paragraph_and_a_code(fault: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("probe", fault) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    if isinstance(FAULTS.get(fault), errors.TkError):
        assert err == f"error: {FAULTS[fault]}\n"


def test_a_bug_is_reported_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    run("probe", "bug")
    assert (
        "KeyError: 'exp_avg'\nThis is a bug in tk: run the command with --debug for a traceback."
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "words",
    [("--debug", "probe", "config"), ("probe", "config", "--debug"), ("box", "probe", "--debug", "config")],
)
def test_debug_adds_the_traceback_wherever_it_stands(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert err.endswith(f"error: {FAULTS['config']}\n")


def test_commands_choose_their_exit_code() -> None:
    assert [run("probe"), run("probe", "--code", "130")] == [0, 130]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("prob",), "Did you mean 'probe'?"),
        (("nothing-like-it",), "Commands: probe, box."),
        (("probe", "--cod", "1"), "--code"),
        (("box", "prob"), "prob"),
        (("probe", "--code", "many"), "many"),
    ],
)
def test_wrong_usage_is_explained_with_code_2(
    words: tuple[str, ...], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    assert hint in capsys.readouterr().err


def test_help_lists_every_command_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = {tuple(line.split(maxsplit=1)) for line in capsys.readouterr().out.splitlines()}
    assert {(name, entry.summary) for name, entry in COMMANDS.items()} <= lines


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: tk {name}")
    assert "--debug" in out


# Scripts rely on these names. A command may offer more.
PROMISED = {
    "demo": {"--out"},
    "examples": {"--out", "--force"},
    "init": {"--text", "--model", "--lora", "--minutes"},
    "train": {"--set", "--nproc", "--resume", "--dry-run"},
    "plan": {"--set", "--nproc", "--json"},
    "plot": {"-o"},
    "doctor": {"--json", "--build"},
    "data prepare": {"--tokenizer", "--out"},
    "tokenizer train": {"--vocab-size", "--out"},
    "reshard": {"--tp", "--pp", "--dtype", "--weights-only", "--dry-run", "--force"},
    "parity": {"--layouts", "--json", "--steps", "--nproc", "--resume", "-o"},
    "export": {"--plain", "--link"},
    "inspect": {"--json"},
    "verify": {"--json"},
    "diff": {"--json"},
    "serve": {"--tp", "--host", "--port", "--dtype", "--kv-dtype", "--kv-memory", "--kv-blocks", "--max-model-len"}
    | {"--threads", "--weight-dtype", "--follow"}
    | {"--max-running", "--max-queued", "--max-step-ms", "--drain-timeout", "--default-max-new-tokens", "--insecure"}
    | {"--max-queued-tokens", "--quota-sequences", "--quota-tokens", "--admin-port"}
    | {"--log-prompts", "--health-port", "--otlp-endpoint"}
    | {"--tls-cert", "--tls-key", "--tls-client-ca", "--tokens"}
    | {
        "--no-prefix-cache",
        "--speculate",
        "--draft",
        "--draft-weight-dtype",
        "--metrics-port",
        "--metrics-host",
        "--slow-step-ms",
    },
    "top": {"--interval", "--once", "--json", "--tls", "--tls-ca", "--tls-cert", "--tls-key"},
    "token": {"--role", "--weight", "--tokens"},
    "generate": {"--max-new-tokens", "--temperature", "--top-k", "--top-p", "--seed", "--json", "--chat", "--tp"}
    | {"--json-schema", "--regex", "--grammar", "--tls", "--tls-ca", "--tls-cert", "--tls-key"}
    | {"--threads", "--dtype", "--weight-dtype", "--kv-dtype", "--kv-memory", "--max-model-len", "--kernels"}
    | {"--no-prefix-cache", "--speculate", "--draft", "--draft-weight-dtype"},
    "bench serve": {"--rate", "--concurrency", "--requests", "--prompt-tokens", "--new-tokens", "--json", "-o"},
    "eval": {
        "--data",
        "--context",
        "--stride",
        "--limit",
        "--tp",
        "--dtype",
        "--weight-dtype",
        "--kv-dtype",
        "--kernels",
        "--threads",
        "--json",
    },
}


@pytest.mark.parametrize("words", PROMISED)
def test_promised_options_exist(words: str) -> None:
    name, *inner = words.split()
    command = COMMANDS[name].load()
    for word in inner:
        assert isinstance(command, click.Group)
        command = command.commands[word]
    assert {option for param in command.params for option in param.opts} >= PROMISED[words]


def test_every_command_keeps_a_promise() -> None:
    assert {words.split()[0] for words in PROMISED} == set(COMMANDS)


HELP_MODULES = """
import json, sys
from tk.cli.main import main
main(["--help"])
ours = sorted(name for name in sys.modules if name.split(".")[0] == "tk")
tops = sorted({name.split(".")[0] for name in sys.modules} - sys.stdlib_module_names)
print(json.dumps([ours, tops]))
"""
# Modules that the interpreter loads for an environment, before any line of tk runs.
START_UP = ("__editable__", "__main__", "_distutils_hack", "_virtualenv", "sitecustomize", "usercustomize")


def test_help_loads_only_its_own_modules() -> None:
    output = subprocess.run([sys.executable, "-c", HELP_MODULES], capture_output=True, text=True, check=True).stdout
    ours, tops = json.loads(output.splitlines()[-1])
    cli, core = ("tk.cli", "tk.cli.invocation", "tk.cli.main"), ("tk.core", "tk.core.errors", "tk.core.public_names")
    assert ours == ["tk", *cli, *core]
    assert {name for name in tops if not name.startswith(START_UP)} <= {"tk", "click", "typing_extensions"}


def processor_seconds(*arguments: str) -> float:
    """The least processor time of a few runs of Python."""
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(seconds)


def test_help_answers_at_once() -> None:
    """It takes 1.3 times what its parser takes; numpy alone would make that 4 times."""
    assert processor_seconds("-m", "tk", "--help") < 2.5 * processor_seconds("-c", "import click")


def test_python_dash_m_tk_exits_with_the_code() -> None:
    assert tk("--version").stdout.startswith("tk 0.")
    run = tk("srve")
    assert (run.returncode, run.stdout) == (2, "")
    assert "Did you mean 'serve'?" in run.stderr


def test_a_removed_directory_is_named(tmp_path: Path) -> None:
    (gone := tmp_path / "gone").mkdir()
    command = f"rmdir {shlex.quote(str(gone))}; exec {shlex.quote(sys.executable)} -P -m tk inspect {tmp_path}"
    done = subprocess.run(command, shell=True, cwd=gone, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: The current directory was removed. Change to one that exists: cd ~\n"


def test_a_closed_pipe_ends_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        run = subprocess.run([sys.executable, "-m", "tk", "--help"], stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert "Traceback" not in run.stderr
