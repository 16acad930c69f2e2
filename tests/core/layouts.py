"""Random tables and layouts, for tests of properties that hold for all of them."""

from dataclasses import replace

from hypothesis import strategies as st

from tk.core.layout import Layout
from tk.core.tensors import Split, TensorSpec, with_slots

HEAD = 4
SLOTS = {"weight": "BF16", "master": "F32", "exp_avg": "F32"}
OTHER_SLOTS = {"weight": "BF16", "momentum": "BF16"}
CUTS = (
    Layout(),
    Layout(tp=2, dp=2, zero=2, bucket_size=2000),
    Layout(tp=2, pp=2, dp=2, zero=1, bucket_size=500, virtual_stages=2),
    Layout(dp=3, zero=3, bucket_size=1000),
    Layout(tp=4, dp=4, zero=3, shard_size=2, sharding="dim0"),
)


@st.composite
def tables(draw: st.DrawFn) -> tuple[TensorSpec, ...]:
    """Draws models with fused, padded, replicated, column-split and tied tensors, some with other slots than others.

    Two layers may have experts, as many as the largest ep.
    """
    hidden, heads = draw(st.sampled_from([(16, 4), (32, 8), (12, 4)]))
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    inner, vocab = draw(st.sampled_from([8, 24])), draw(st.integers(5, 70))
    tied, sparse = draw(st.booleans()), draw(st.booleans())
    query, kv = Split(0, HEAD, of="num_attention_heads"), Split(0, HEAD, "replicate", "num_key_value_heads")
    specs = [TensorSpec("embed", (vocab, hidden), Split(0, rule="pad"))]
    for layer in range(draw(st.integers(4, 6))):
        specs += [
            TensorSpec(f"{layer}.norm", (hidden,), None, layer),
            TensorSpec(f"{layer}.q", (heads * HEAD, hidden), query, layer, f"{layer}.qkv"),
            TensorSpec(f"{layer}.k", (kv_heads * HEAD, hidden), kv, layer, f"{layer}.qkv"),
            TensorSpec(f"{layer}.v", (kv_heads * HEAD, hidden), kv, layer, f"{layer}.qkv"),
            TensorSpec(f"{layer}.o", (hidden, heads * HEAD), Split(1, HEAD), layer),
            TensorSpec(f"{layer}.bias", (inner,), Split(0), layer),
            TensorSpec(f"{layer}.down", (hidden, inner), Split(1), layer),
            TensorSpec(f"{layer}.fused", (hidden, 3 * heads * HEAD), Split(1, HEAD, sections=3), layer),
            TensorSpec(f"{layer}.fused.bias", (3 * heads * HEAD,), Split(0, HEAD, sections=3), layer),
        ]
        for expert in range(4 if sparse and layer in (1, 2) else 0):
            name = f"{layer}.experts.{expert}"
            specs += [
                TensorSpec(f"{name}.up", (inner, hidden), Split(0), layer, f"{layer}.experts.up", expert=expert),
                TensorSpec(f"{name}.out", (hidden, inner), Split(1), layer, expert=expert),
                TensorSpec(f"{name}.bias", (hidden,), None, layer, expert=expert),
            ]
    specs.append(TensorSpec("head", (vocab, hidden), Split(0, rule="pad"), "last", alias="embed" if tied else ""))
    params = sorted({spec.param or spec.name for spec in specs})
    frozen, buffers, other = (draw(st.sets(st.sampled_from(params), max_size=most)) for most in (8, 2, 20))
    specs = [
        replace(spec, trainable=name not in frozen | buffers, buffer=name in buffers)
        for spec in specs
        for name in [spec.param or spec.name]
    ]
    return tuple(
        with_slots([spec], OTHER_SLOTS if (spec.alias or spec.param or spec.name) in other else SLOTS)[0]
        for spec in specs
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, dp, cp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 1, 2]))
    ep, expert_tp = draw(
        st.sampled_from([(1, 0)] * 3 + [(e, t) for e in (1, 2, 4) for t in (1, 2) if tp * dp * cp % (e * t) == 0])
    )
    return Layout(
        tp=tp,
        pp=draw(st.sampled_from([1, 2])),
        dp=dp,
        cp=cp,
        ep=ep,
        expert_tp=expert_tp,
        virtual_stages=draw(st.sampled_from([1, 2])),
        shard_size=draw(st.sampled_from([0, *(n for n in range(1, dp * cp + 1) if dp * cp % n == 0)])),
        zero=draw(st.integers(0, 3)),
        bucket_size=draw(st.sampled_from([64, 1000, 2**24])),
        sharding=draw(st.sampled_from(["flat", "dim0"])),
        layer_buckets=draw(st.booleans()),
    )
