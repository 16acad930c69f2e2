"""Files of layouts: what `tk parity --json` prints is read, and wrong files are refused by name and place."""

import json
from pathlib import Path

import pytest

from tk.core.errors import ConfigError
from tk.parity.layout import ParityLayout
from tk.parity.layouts_file import read_layouts
from tk.parity.subject import Subject


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    return Subject.built_in(tmp_path, 10, "fp32")


def test_the_json_output_is_a_file_of_layouts(subject: Subject, tmp_path: Path) -> None:
    layouts = (
        ParityLayout(tp=2, sequence_parallel=True, recompute="full", tied=True, kv_heads="fewer than tp"),
        ParityLayout(pp=2, dp=2, schedule="interleaved", num_virtual_stages=2, zero=3, shard_size=1, tied=False),
        ParityLayout(dp=4, zero=2, offload_optimizer="disk", offload_gradients="cpu", foreign=True),
    )
    path = tmp_path / "again.json"
    path.write_text(json.dumps({"layouts": [{"layout": layout.to_json(), "loss": 0.0} for layout in layouts]}))
    assert read_layouts(path, subject, 8) == layouts
    (tmp_path / "mine.toml").write_text("[[layouts]]\ntp = 2\n[[layouts]]\ntp = 2\n[[layouts]]\npp = 2\nzero = 3\n")
    assert read_layouts(tmp_path / "mine.toml", subject, 8) == (ParityLayout(tp=2), ParityLayout(pp=2, zero=3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[layouts]]\ntpp = 2", "layout 1: unknown key 'tpp'; did you mean 'tp'"),
        ("[[layouts]]\ntp = 3", "layout 1: tp = 3 does not fit"),
        ("[[layouts]]\ntp = 8\npp = 2", "more than 8 ranks"),
        ('[[layouts]]\n[[layouts]]\nschedule = "interleaved"', 'layout 2: .*"interleaved" needs 2 or more'),
        (
            "[[layouts]]\nforeign = true\ntp = 2",
            "a foreign module supports only dp, zero, shard_size, offload_.*: leave out tp",
        ),
        ('[[layouts]]\noffload_gradients = "cpu"', 'layout 1: .*gradients = "cpu" needs optimizer = "cpu" or "disk"'),
        ('[[layouts]]\noffload_optimizer = "nvme"', "layout 1: 'offload_optimizer' = 'nvme'"),
        ("[[layouts]]\nforeign = true\ndp = 3", "4 micro-batches: dp = 3 must divide that"),
        ("layouts = [1]", "layout 1: 1 must be a table"),
        ("tp = 2", 'no list "layouts"'),
        ("[[", "is not valid TOML"),
    ],
)
def test_a_wrong_file_of_layouts_is_refused(subject: Subject, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "layouts.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_layouts(path, subject, 8)
    assert str(path) in str(caught.value)
