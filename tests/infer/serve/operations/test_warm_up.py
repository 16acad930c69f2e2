"""The server's own first request."""

import pytest

from tk.core.errors import TkError
from tk.infer.engine.request.events import Failed
from tk.infer.serve.operations.model_switch import warm_up
from tk.tests.infer.serve.fake_engine import FakeEngine


def test_one_token_is_computed_past_the_cache(engine: FakeEngine) -> None:
    warm_up(engine)
    [request] = engine.requests
    assert request.params.max_new_tokens == 1
    assert request.cache.bypass


def test_an_engine_that_cannot_answer_is_not_warm(engine: FakeEngine) -> None:
    engine.script = lambda request: [Failed(TkError("not finite"))]
    with pytest.raises(TkError, match="not finite"):
        warm_up(engine)
