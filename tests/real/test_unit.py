"""The command of the systemd unit, with files of this machine, and the probe of examples/deploy beside it."""

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tk.infer.client.client import Client
from tk.infer.client.connection import Credentials, RemoteError
from tk.tests.infer.serve.serving import WAIT_SECONDS, Command

pytestmark = pytest.mark.real
ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"
CERTIFICATES = ROOT / "tests" / "infer" / "serve" / "certificates"


def arguments_for(model: Path, tokens: Path) -> list[str]:
    """Returns the unit's arguments with a free port, and files that this machine has."""
    [command] = re.findall(
        r"^ExecStart=\S+ (.*)$", (DEPLOY / "tk.service").read_text().replace("\\\n", " "), re.MULTILINE
    )
    own = {
        "/srv/tk/model": str(model),
        "50051": "0",
        "/etc/tk/tls.crt": str(CERTIFICATES / "server.pem"),
        "/etc/tk/tls.key": str(CERTIFICATES / "server.key"),
        "/etc/tk/tokens": str(tokens),
    }
    words = [own.pop(word, word) for word in shlex.split(command)]
    assert not own, "the unit has other files"
    return words


def test_the_units_command_serves_its_tokens_and_answers_the_probe(tiny: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    made = subprocess.run(
        [sys.executable, "-m", "tk", "token", "alice", "--tokens", str(tokens)],
        capture_output=True,
        text=True,
        check=True,
    )
    ca = CERTIFICATES / "ca.pem"
    serving = Command(*arguments_for(tiny, tokens))
    try:
        assert serving.process.stdout is not None
        ready = serving.process.stdout.readline()
        assert ready.startswith("ready 0.0.0.0:"), ready
        target = f"127.0.0.1:{ready.rpartition(':')[2].strip()}"
        probe = [sys.executable, str(DEPLOY / "probe.py"), target]

        def probed(*options: str) -> int:
            return subprocess.run([*probe, *options], capture_output=True, timeout=WAIT_SECONDS).returncode

        assert probed("--tls-ca", str(ca)) == 0
        assert probed("--tls-ca", str(ca), "--service", "tk.v1.Generation") == 0
        assert probed("--tls-ca", str(ca), "--service", "unknown") == 1
        assert probed() == 1, "it is encrypted"
        with Client(target, credentials=Credentials(ca=ca, token=made.stdout.strip())) as client:
            assert client.model_info().name == "tiny-llama"
        with Client(target, credentials=Credentials(ca=ca)) as stranger, pytest.raises(RemoteError, match="token"):
            stranger.model_info()
        assert serving.end(signal.SIGTERM)[0] == 0
    finally:
        serving.close()
