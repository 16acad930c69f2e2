"""Memory for copies: it starts on a page, and CUDA pins exactly the bytes that were asked for."""

import pytest
import torch

from tk.core.errors import TkError
from tk.core.state_pieces import PAGE
from tk.train.zero.states.buffer import PageBuffer


class Cudart:
    """Stands for CUDA's runtime; it remembers what is registered."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.registered = code, dict[int, int]()
        self.cudaHostRegister = self._register
        self.cudaHostUnregister = self.registered.pop

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        self.registered[address] = nbytes
        return self.code


@pytest.mark.parametrize("nbytes", [0, 1, 5000, 2**20 + 1])
def test_memory_starts_on_a_page_and_has_the_size_that_was_asked_for(nbytes: int) -> None:
    buffer = PageBuffer(nbytes)
    assert len(buffer.memory) == buffer.values.numel() == nbytes
    assert buffer.values.data_ptr() % PAGE == 0
    assert not buffer.values.any()
    if nbytes >= 16:
        buffer.view(8, 2, torch.float32).fill_(1.0)
        assert bytes(buffer.memory[8:16]) == b"\x00\x00\x80\x3f" * 2


def test_exactly_its_bytes_are_pinned_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    buffer = PageBuffer(2**20 + 1, pinned=True)
    assert cudart.registered == {buffer.values.data_ptr(): 2**20 + 1}, "torch's own allocator would take 2 MiB"
    buffer.close()
    buffer.close()
    assert cudart.registered == {}


def test_memory_that_cannot_be_pinned_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(2))
    with pytest.raises(TkError, match=r"cannot pin 4096 bytes .* \(ulimit -l\)"):
        PageBuffer(4096, pinned=True)


def test_memory_that_there_is_not_is_refused_with_its_size() -> None:
    with pytest.raises(TkError, match=f"gives no {2**60} bytes of memory for offload: Cannot allocate memory"):
        PageBuffer(2**60)
