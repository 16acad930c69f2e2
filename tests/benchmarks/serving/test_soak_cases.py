"""The requests of bench_reload_soak.py: all kinds, the same ones each time, constraints that none had before."""

from collections import Counter

from tk.benchmarks.serving.soak_cases import make_cases
from tk.infer.engine.grammar.compiler import Grammars
from tk.infer.engine.grammar.grammar import Constraint, Kind
from tk.proto.v1 import generation_pb2 as pb
from tk.text.tokenizer import Tokenizer

COUNT = 120


def test_requests_of_all_kinds_are_the_same_ones_each_time() -> None:
    cases = make_cases(COUNT, 300)
    assert cases == make_cases(COUNT, 300)
    kinds = Counter(case.kind for case in cases)
    assert set(kinds) == {"stream", "whole", "score", "http"}
    assert min(kinds.values()) >= COUNT // 12


def test_a_fresh_request_has_another_constraint_and_the_same_texts(byte_level: Tokenizer) -> None:
    grammars = Grammars(byte_level, byte_level.vocab_size, (0,))
    seen = set()
    for case in make_cases(COUNT, 300):
        fresh = case.fresh(77)
        if not isinstance(case.message, pb.GenerateRequest) or not isinstance(fresh.message, pb.GenerateRequest):
            assert (fresh != case) == (case.body is not None and "response_format" in case.body[1])
            continue
        kind: Kind | None = case.message.sampling.WhichOneof("constraint")
        assert (fresh == case) == (kind is None)
        if kind is None or kind in seen:
            continue
        seen.add(kind)
        texts = (getattr(message.sampling, kind) for message in (case.message, fresh.message))
        one, other = (grammars.compile(Constraint(kind, text)) for text in texts)
        assert one is not other
        first, second = one.start(), other.start()
        for letter in "[a1":
            [token] = byte_level.encode(letter, special_tokens=False)
            assert first.first_allowed([token]) == second.first_allowed([token])
            first.take(token)
            second.take(token)
    assert seen == {"json_schema", "regex", "grammar"}
