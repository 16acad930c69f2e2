"""A GPU's choices of attention, forced on a CPU with the kernels of pretended_attention.py: the values of the CPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tk.core.errors import ConfigError
from tk.core.gpu_attention import block_queries
from tk.core.gpu_cards import Capability
from tk.model.attention import Attend
from tk.tests import pretended_attention
from tk.tests.train.engine.test_attention import Windowed, drawn
from tk.train.engine import gpu_attention
from tk.train.engine.attention import attention_within
from tk.train.engine.gpu_attention import GpuAttention, GpuFacts

Drawn = tuple[torch.Tensor, ...]
DOCUMENTS = (40, 3, 20, 17)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were called, in order, in the place of the GPU's."""
    pretended_attention.install(monkeypatch)
    names: list[str] = []
    for name in ("varlen", "flash", "efficient"):
        kernel = getattr(gpu_attention, name)

        def noted(*given: object, name: str = name, kernel: Callable[..., torch.Tensor] = kernel) -> torch.Tensor:
            names.append(name)
            return kernel(*given)

        monkeypatch.setattr(gpu_attention, name, noted)
    return names


def with_gradients(attend: Attend, values: list[torch.Tensor], window: int | None) -> Drawn:
    """Returns the output of attention and the gradients of queries, keys and values."""
    *given, grad = values
    q, k, v = (each.clone().requires_grad_() for each in given)
    out = attend(Windowed(0, window), q, k, v)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))


@pytest.mark.parametrize("window", [None, 2, 5, 40])
@pytest.mark.parametrize("documents", [(), DOCUMENTS])
@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((9, 0), torch.bfloat16, "flash varlen"),
        ((8, 6), torch.float16, "flash varlen"),
        ((9, 0), torch.float32, "efficient efficient"),
    ],
)
def test_choices_of_a_gpu_have_the_values_of_a_cpu(
    called: list[str],
    capability: Capability,
    dtype: torch.dtype,
    expected: str,
    documents: tuple[int, ...],
    window: int | None,
) -> None:
    values = [each.to(dtype) for each in drawn(40)]
    attend = GpuAttention(GpuFacts(capability, False, (2, 11)), documents)
    found = with_gradients(attend, values, window)
    wide = [each.double() for each in values]
    right = with_gradients(attention_within(documents), wide, window)
    bound = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-6}[dtype]
    for mine, true in zip(found, right, strict=True):
        assert mine.dtype == dtype
        assert float((mine.double() - true).norm() / true.norm()) < bound
    whole, uneven = expected.split()
    assert {*called} == {whole if not documents and window in (None, 40) else uneven}


def test_a_window_in_blocks_has_the_values_of_one_mask(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    values = [each.float() for each in drawn(40)]
    whole = with_gradients(GpuAttention(GpuFacts((9, 0), False, (2, 13)), ()), values, 7)
    assert called == ["efficient"]
    monkeypatch.setattr("tk.core.gpu_attention._MOST_QUERIES", 16)
    in_blocks = with_gradients(GpuAttention(GpuFacts((9, 0), False, (2, 13)), ()), values, 7)
    assert called == ["efficient"] * 4
    for one, other in zip(whole, in_blocks, strict=True):
        torch.testing.assert_close(one, other)


def test_documents_go_in_one_call_for_all_layers(called: list[str]) -> None:
    attend = GpuAttention(GpuFacts((9, 0), False, (2, 13)), DOCUMENTS)
    q, k, v, _ = (each.bfloat16() for each in drawn(40))
    for layer in range(3):
        attend(Windowed(layer, None), q, k, v)
    assert called == ["varlen"] * 3
    assert attend._ends is not None
    assert attend._ends.tolist() == [0, 40, 43, 63, 80]


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("release", [(2, 11), (2, 13)])
def test_torchs_varlen_attention_is_called_as_its_page_says(
    monkeypatch: pytest.MonkeyPatch, window: int | None, release: tuple[int, int]
) -> None:
    """A stand-in takes the arguments of torch's function: (W, 0) shows W keys before the query, beside its own."""
    calls: list[dict[str, object]] = []

    def stand_in(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *ends: object, **options: Any) -> torch.Tensor:
        calls.append(options)
        begins, again, longest, _ = ends
        assert begins is again
        assert isinstance(begins, torch.Tensor)
        assert isinstance(longest, int)
        left, right = options["window_size"]
        assert right == 0
        window = None if left < 0 else left + 1
        return pretended_attention.varlen((q, k, v), begins, longest, window, options["scale"])

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_in)
    values = [each.bfloat16() for each in drawn(40)]
    found = with_gradients(GpuAttention(GpuFacts((9, 0), False, release), DOCUMENTS), values, window)
    right = with_gradients(attention_within(DOCUMENTS), [each.double() for each in values], window)
    for mine, true in zip(found, right, strict=True):
        assert float((mine.double() - true).norm() / true.norm()) < 1.5e-2
    assert [call.get("enable_gqa", False) for call in calls] == [release > (2, 11)]


def test_flash_attention_allows_no_other_kernel() -> None:
    """A CPU has a kernel of that name, too."""
    q, k, v, _ = (each.bfloat16().transpose(1, 2) for each in drawn(40))
    expected = pretended_attention.flash(0.3, q, k, v, cudnn=False)
    torch.testing.assert_close(gpu_attention.flash(0.3, q, k, v, cudnn=True), expected)
    with pytest.raises(RuntimeError, match=r"No (viable backend|available kernel)"):
        gpu_attention.efficient(0.3, q, q, q)  # which a CPU has not, nor may anything else take its place


def test_a_gpu_without_bf16_refuses_it() -> None:
    q, k, v, _ = (each.bfloat16() for each in drawn(40))
    with pytest.raises(ConfigError, match=r'compute capability 7.5, has no bf16 .* set precision.params = "fp16"'):
        GpuAttention(GpuFacts((7, 5), False, (2, 13)), ())(Windowed(0, None), q, k, v)


def test_a_window_of_any_length_has_small_masks() -> None:
    assert block_queries(4096) == 1024
    assert block_queries(32768) == 128


def test_a_cpu_has_no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GpuFacts.of(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    facts = GpuFacts.of(torch.device("cuda:0"))
    assert facts is not None
    assert (facts.capability, facts.deterministic) == ((9, 0), False)


@pytest.mark.matrix
@pytest.mark.parametrize("window", [None, 5])
def test_layers_with_whole_rows_compile(called: list[str], window: int | None) -> None:
    """As `train.compile` does it, which leaves attention within documents out; torch's compiler takes seconds."""
    values = [each.bfloat16() for each in drawn(40)]
    attend = GpuAttention(GpuFacts((9, 0), False, (2, 13)), ())
    q, k, v = values[:3]
    compiled = torch.compile(partial(attend, Windowed(0, window)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), attend(Windowed(0, window), q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("documents", [(), (700, 1, 1347)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 20, 200])
def test_the_gpus_kernels_have_the_values_of_a_cpu(
    dtype: torch.dtype, documents: tuple[int, ...], window: int | None, head_dim: int
) -> None:
    """Outputs and gradients against fp64 on the CPU, and no memory for the square of the length."""
    noise = torch.Generator().manual_seed(1)
    values = [torch.randn(1, 2048, heads, head_dim, generator=noise).to(dtype) for heads in (6, 2, 2, 6)]
    facts = GpuFacts.of(torch.device("cuda", 0))
    assert facts is not None
    there = [each.cuda() for each in values]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = with_gradients(GpuAttention(facts, documents), there, window)
    if head_dim == 64:  # scores of all queries and keys alone would take 96 MiB
        assert torch.cuda.max_memory_allocated() - before < 64 << 20
    right = with_gradients(attention_within(documents), [each.double() for each in values], window)
    bound = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-6}[dtype]
    for mine, true in zip(found, right, strict=True):
        assert float((mine.cpu().double() - true).norm() / true.norm()) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 300])
def test_layers_on_a_gpu_compile(window: int | None) -> None:
    noise = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 512, heads, 64, generator=noise).bfloat16().cuda() for heads in (6, 2, 2))
    facts = GpuFacts.of(q.device)
    assert facts is not None
    attend = GpuAttention(facts, ())
    compiled = torch.compile(partial(attend, Windowed(0, window)), fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attend(Windowed(0, window), q, k, v))
