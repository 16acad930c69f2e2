"""Values that a user wrote into parameters between steps (EMA copies, clamps): they become the masters' values.

No counter sees every write: `.data`, numpy views and kept references pass by autograd's. So the parameters' memory is
compared with the masters, rounded: an element whose bits differ was written since the engine last wrote it. The cost is
6 bytes read per element, a third of an AdamW update.
"""

from typing import Final

import torch

_CHUNK: Final = 2**17  # elements whose rounded values stay in the processor's cache
_CHUNK_ON_GPU: Final = 2**22  # elements of which there are copies at once
_BITS: Final = {2: torch.int16, 4: torch.int32}  # by the size of an element
_WORD: Final = 8


def take_written(master: torch.Tensor, parameters: torch.Tensor) -> None:
    """Copies elements that were written into `parameters` to `master`.

    An element that still is its master rounded keeps the master's full precision.

    Args:
        master: the masters, fp32 [n].
        parameters: the same elements as the module holds them, in fp32, bf16 or fp16 [n].
    """
    if master.data_ptr() == parameters.data_ptr():  # fp32 parameters are their own masters
        return
    on_cpu = master.device.type == "cpu"
    size = _CHUNK if on_cpu else _CHUNK_ON_GPU
    for part, now in zip(master.split(size), parameters.split(size), strict=True):
        rounded = part.to(now.dtype)
        bits = _BITS[now.element_size()]
        if not on_cpu:  # the host would wait for the answer whether anything was written
            part.copy_(torch.where(rounded.view(bits) != now.view(bits), now.float(), part))
        elif not torch.equal(_words(rounded), _words(now)):
            written = rounded.view(bits) != now.view(bits)
            part[written] = now[written].float()


def _words(values: torch.Tensor) -> torch.Tensor:
    """Returns the bits of a 1-D tensor, in words of 8 bytes where they are aligned, which are compared the fastest."""
    size = values.element_size()
    aligned = not (values.storage_offset() * size % _WORD or values.numel() * size % _WORD)
    return values.view(torch.int64 if aligned else _BITS[size])
