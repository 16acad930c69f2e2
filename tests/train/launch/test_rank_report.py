"""The report of a rank's error, as the launcher reads it: errors of ours, want of memory, and all others."""

import re
from pathlib import Path

import pytest
import torch

from tk.core.errors import ConfigError, TkError
from tk.train.launch.rank_report import ERROR_FOLDER_VARIABLE, MemoryExhausted, read_reports, write_error

OF_CUDA = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.05 GiB is "
    "free. Of the allocated memory 70.00 GiB is allocated by PyTorch. See documentation for Memory Management"
)


def of_a_cpu() -> Exception:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    return caught.value


@pytest.mark.parametrize(
    ("error", "kind", "expected", "text"),
    [
        (ConfigError("a wrong key"), "known", ConfigError, r"a wrong key"),
        (ValueError("a slip"), "unexpected", TkError, r"Rank 3: ValueError: a slip"),
        (MemoryError(), "known", MemoryExhausted, r"Rank 3 found no memory: MemoryError"),
        (of_a_cpu(), "known", MemoryExhausted, r"Rank 3 found no memory: can't allocate memory: .* bytes\. .*"),
        (OF_CUDA, "known", MemoryExhausted, r"Rank 3 found no memory: CUDA out of memory\. .* 1\.05 GiB is free\."),
    ],
)
def test_errors_come_to_the_launcher_in_their_kind(
    error: Exception, kind: str, expected: type[TkError], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ERROR_FOLDER_VARIABLE, str(tmp_path))
    write_error(error, 3, peers_lost=False)
    [report] = read_reports(tmp_path)
    assert (report.kind, type(report.error)) == (kind, expected)
    assert re.fullmatch(text, str(report.error))
