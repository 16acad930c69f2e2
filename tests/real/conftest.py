"""What `make real` has installed, and servers for clients that are not ours."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tk.tests.infer.serve.serving import Serving
from tk.tests.infer.serve.tiny_model import write_tiny_model
from tk.tests.real.browser import Browser

REAL = Path(__file__).resolve().parents[2] / ".build" / "real"


def part(name: str) -> Path:
    """Returns the folder of an installed part; without it the test is skipped, with the reason."""
    if (REAL / name / ".ready").exists():
        return REAL / name
    missing = REAL / f"{name}.missing"
    pytest.skip(missing.read_text() if missing.exists() else f"{name} is not installed: run `make real`")


@pytest.fixture(scope="session")
def node() -> Path:
    return part("node")


@pytest.fixture(scope="session")
def clients() -> Path:
    """The interpreter of an environment without tk."""
    return part("clients") / "venv" / "bin" / "python"


@pytest.fixture(scope="session")
def dialects() -> Path:
    """A folder with two environments: `venv` with the newest clients of OpenAI's dialect, `old` with an old package."""
    return part("dialects")


@pytest.fixture(scope="session")
def harness() -> Path:
    """The interpreter of an environment with the lm-evaluation-harness."""
    return part("harness") / "venv" / "bin" / "python"


@pytest.fixture(scope="session")
def triton() -> Path:
    """The interpreter of an environment with tritonclient, and without tk."""
    return part("triton") / "venv" / "bin" / "python"


@pytest.fixture(scope="session")
def envoy() -> Path:
    return part("envoy") / "envoy" / "_bin" / "envoy"


@pytest.fixture(scope="session")
def generator() -> Path:
    """The script that generates code from the .proto files."""
    part("generator")
    return REAL.parents[1] / "scripts" / "proto"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless browser, which goes from page to page."""
    browser = Browser(part("browser"))
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def smollm() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder."""
    return part("model") / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Serving]:
    """A server that computes 4 sequences and lets none wait; the test may end it while requests of 3,000 tokens run."""
    model = write_tiny_model(tmp_path / "tiny-llama", max_length=4096)
    serving = Serving(str(model), "--kv-blocks", "512", "--max-running", "4", "--max-queued", "0").wait_ready()
    yield serving
    serving.close()
