"""The page at "/" of `tk serve --http` in a headless Chromium, as a person uses it: by keys, with errors and tokens."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tk.core.errors import Overloaded, WorkerDied
from tk.infer.engine.request.events import Done, Failed, FinishReason
from tk.infer.engine.schedule.statistics import EngineLoad
from tk.infer.serve.access.tokens import ADMIN, GENERATE, Caller, line_of, token_digest
from tk.tests.infer.serve.fake_engine import FakeEngine, delta, finished, started
from tk.tests.infer.serve.http.http_server import HttpServerThread
from tk.tests.infer.serve.serving import Serving
from tk.tests.infer.serve.tiny_model import write_tiny_model
from tk.tests.real.browser import ENTER, ESCAPE, TAB, Browser
from tk.text.tokenizer_files import TextFiles

pytestmark = pytest.mark.real
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
HOSTILE = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script> & <b>bold</b>"


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """An engine whose model has a chat template."""
    engine = FakeEngine()
    assert engine.tokenizer is not None
    engine.tokenizer.files = TextFiles(Path("a folder"), {"chat_template.jinja": TEMPLATE.encode()})
    yield engine
    engine.close()


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[HttpServerThread]:
    server = HttpServerThread(engine, http_port=0)
    yield server
    server.close()


def visit(browser: Browser, server: HttpServerThread) -> None:
    """Opens the page, which then shows the model; nothing is in the console."""
    browser.open("about:blank")  # the page of the test before asks its server again and again, which is gone
    browser.log()
    browser.open(f"http://localhost:{server.http_port}/")
    browser.wait_for(lambda: browser.text("#name") == "fake")
    assert browser.log() == []


def say(browser: Browser, text: str) -> None:
    browser.type("#prompt", text + ENTER)


def answers(browser: Browser) -> list[str]:
    return browser.texts("article.models .text")


def done(browser: Browser) -> bool:
    return browser.is_shown("#send") and not browser.is_shown("#stop")


def test_a_real_server_is_shown_and_streams(browser: Browser, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny-llama")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    serving = Serving(str(model), "--http", "0").wait_ready()
    try:
        assert serving.process.stdout is not None
        address = serving.process.stdout.readline().removeprefix("http ").strip()
        browser.log()
        browser.open(f"http://{address}/")
        browser.wait_for(lambda: browser.text("#state") == "serving")
        assert browser.text("#name") == "tiny-llama"
        assert "512 tokens per request" in browser.text("#about")
        assert (browser.text("#running"), browser.text("#waiting"), browser.text("#used")) == ("0", "0", "0 %")
        browser.run("document.querySelector('#temperature').value = 0")
        say(browser, "hello")
        browser.wait_for(lambda: done(browser) and answers(browser) != [""])
        pieces = "return document.querySelector('article.models .text').childNodes.length"
        assert browser.run(pieces) > 3, "it came bit by bit"
        assert re.search(r"\n\d+ tokens in \d+\.\d s", browser.text("article.models"))
        browser.wait_for(lambda: int(browser.text("#speed")) > 0)
        assert browser.log() == []
    finally:
        serving.close()
    browser.wait_for(lambda: browser.text("#state") == "The server cannot be reached.")


def test_the_load_is_refreshed(browser: Browser, server: HttpServerThread, engine: FakeEngine) -> None:
    visit(browser, server)
    browser.wait_for(lambda: browser.text("#running") == "0")
    engine.statistics.load_now = EngineLoad(
        running=3, waiting=2, blocks_total=64, blocks_used=16, decode_tokens_per_second=812.4
    )
    browser.wait_for(lambda: browser.text("#running") == "3")
    shown = [browser.text(name) for name in ("#waiting", "#speed", "#used")]
    assert shown == ["2", "812", "25 %"]


def test_the_policy_is_in_force_and_a_break_of_it_would_be_seen(browser: Browser, server: HttpServerThread) -> None:
    visit(browser, server)
    inline = "const e = document.createElement('style'); e.append('*{color:red}'); document.head.append(e)"
    browser.run(inline)
    assert any("style-src" in message for message in browser.log())
    with pytest.raises(AssertionError, match="TrustedHTML"):
        browser.run("document.body.innerHTML = '<b>x</b>'")
    with pytest.raises(AssertionError, match="Failed to fetch"):
        browser.run("return fetch('http://elsewhere.example/')")


def test_markup_in_an_answer_is_shown_as_text(browser: Browser, server: HttpServerThread, engine: FakeEngine) -> None:
    pieces = [HOSTILE[:7], HOSTILE[7:30], HOSTILE[30:]]
    engine.script = lambda request: [started(request), *map(delta, pieces), finished(reason=FinishReason.EOS), Done()]
    visit(browser, server)
    say(browser, HOSTILE)
    browser.wait_for(lambda: done(browser) and answers(browser) == [HOSTILE])
    assert browser.text("article.mine .text") == HOSTILE
    assert browser.run("return document.querySelectorAll('article img, article script, article b').length") == 0
    assert browser.run("return document.title") == "fake"
    assert browser.log() == []


def test_a_conversation_goes_on_and_a_new_one_forgets_it(
    browser: Browser, server: HttpServerThread, engine: FakeEngine
) -> None:
    visit(browser, server)
    for text in ("one", "two"):
        say(browser, text)
        browser.wait_for(lambda: done(browser) and answers(browser)[-1:] == ["abc"])
    assert browser.texts("article.models .quiet")[-1].endswith("cut at the most tokens")
    browser.click("#clear")
    assert browser.texts("article") == []
    say(browser, "three")
    browser.wait_for(lambda: done(browser) and answers(browser) == ["abc"])
    prompts = [bytes(request.token_ids).decode() for request in engine.requests]
    assert prompts == ["<user>one", "<user>one<assistant>abc<user>two", "<user>three"]
    assert engine.requests[0].params.max_new_tokens == 256
    assert engine.requests[0].params.temperature == pytest.approx(0.7)


def test_a_model_without_a_chat_template_continues_a_text(browser: Browser, tmp_path: Path) -> None:
    engine = FakeEngine()
    server = HttpServerThread(engine, http_port=0)
    visit(browser, server)
    browser.wait_for(lambda: "no chat template" in browser.text("#empty"))
    assert browser.text("#prompt-label") == "Text to continue"
    say(browser, "def main(")
    browser.wait_for(lambda: done(browser) and answers(browser) == ["abc"])
    assert bytes(engine.requests[0].token_ids[1:]) == b"def main("
    server.close()
    engine.close()


def test_a_stopped_answer_ends_in_the_engine_and_stays(
    browser: Browser, server: HttpServerThread, engine: FakeEngine
) -> None:
    engine.script = lambda request: [started(request), delta("so far")]
    visit(browser, server)
    stops: tuple[Callable[[], None], ...] = (lambda: browser.press(ESCAPE), lambda: browser.click("#stop"))
    for number, stop in enumerate(stops, 1):
        say(browser, "go on")
        browser.wait_for(lambda: answers(browser) == ["so far"] * number)  # noqa: B023 (it ends here)
        assert browser.is_shown("#stop")
        assert browser.run("return document.querySelector('article:last-child').getAttribute('aria-busy')") == "true"
        stop()
        browser.wait_for(lambda: done(browser))
        engine.wait_for(lambda e: e.num_live == 0)
        assert "stopped" in browser.texts("article.models")[-1]
    assert len(engine.aborted) == 2
    assert browser.focused() == "prompt"


def test_errors_are_readable(browser: Browser, server: HttpServerThread, engine: FakeEngine) -> None:
    visit(browser, server)
    engine.refusal = Overloaded("The queue is full: 4 sequences run.", 2.2)
    say(browser, "hi")
    browser.wait_for(
        lambda: browser.texts("article .error") == ["The queue is full: 4 sequences run. Try again in 3 s."]
    )
    assert browser.run("return document.querySelector('#prompt').value") == "hi", "to send it again"
    engine.refusal = None
    engine.script = lambda request: [started(request), delta("ab"), Failed(WorkerDied("Worker 0 is gone."))]
    browser.press(ENTER)
    browser.wait_for(lambda: browser.texts("article .error")[1:] == ["Worker 0 is gone."])
    assert answers(browser)[-1] == "ab"
    browser.run("document.querySelector('#most').value = 0")
    engine.requests.clear()
    say(browser, "hi")
    browser.wait_for(lambda: len(browser.texts("article .error")) == 3)
    assert browser.texts("article .error")[2] == "max_tokens is 0; it must be 1 or more, or unset."
    assert engine.requests == []


def test_a_server_that_goes_away_in_an_answer(browser: Browser, engine: FakeEngine) -> None:
    engine.script = lambda request: [started(request), delta("ab")]
    server = HttpServerThread(engine, http_port=0)
    visit(browser, server)
    say(browser, "hi")
    browser.wait_for(lambda: answers(browser) == ["ab"])
    server.close()
    [error] = browser.wait_for(lambda: browser.texts("article .error"))
    assert "The server ended before the request did" in error
    browser.wait_for(lambda: browser.text("#state") == "The server cannot be reached.")


def test_a_token_is_asked_for_and_a_wrong_one_is_refused(browser: Browser, engine: FakeEngine, tmp_path: Path) -> None:
    callers = {"users": Caller("alice", frozenset({GENERATE})), "ops": Caller("ops", frozenset({GENERATE, ADMIN}))}
    lines = [line_of(token_digest(token), caller) for token, caller in callers.items()]
    (tmp_path / "tokens").write_text("".join(lines))
    server = HttpServerThread(engine, http_port=0, tokens=tmp_path / "tokens")
    browser.open(f"http://localhost:{server.http_port}/")
    browser.wait_for(lambda: browser.text("#state") == "needs a token")
    assert (browser.text("#name"), browser.text("#access-error")) == ("tk", "")
    browser.type("#token", "guessed" + ENTER)
    browser.wait_for(
        lambda: browser.text("#access-error") == "The token is unknown to this server, or no longer valid."
    )
    browser.run("document.querySelector('#token').value = ''")
    browser.type("#token", "users" + ENTER)
    browser.wait_for(lambda: browser.text("#name") == "fake" and not browser.is_shown("#access"))
    assert browser.focused() == "prompt"
    assert "role admin" in browser.text("#no-load")
    assert not browser.is_shown("#load")
    say(browser, "hi")
    browser.wait_for(lambda: done(browser) and answers(browser) == ["abc"])
    assert engine.requests[0].principal == "alice"
    stored = "return localStorage.length + sessionStorage.length + document.cookie.length"
    assert browser.run(stored) == 0
    server.close()


def test_every_control_is_reached_by_keys(browser: Browser, server: HttpServerThread) -> None:
    visit(browser, server)
    seen = []
    for _ in range(5):
        browser.press(TAB)
        seen.append(browser.focused())
    assert seen == ["log", "prompt", "SUMMARY", "clear", "send"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_without_sideways_scrolling_and_with_contrast(
    browser: Browser, server: HttpServerThread, engine: FakeEngine, scheme: str
) -> None:
    browser.emulate("Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=1, mobile=True)
    browser.emulate("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    try:
        visit(browser, server)
        say(browser, "x" * 60)
        browser.wait_for(lambda: done(browser) and answers(browser) == ["abc"])
        assert browser.run("return document.documentElement.scrollWidth") <= 360
        assert browser.run("return document.querySelector('#send').getBoundingClientRect().bottom") <= 640
        engine.refusal = Overloaded("The queue is full.", 2.2)
        say(browser, "y" * 600)
        browser.wait_for(lambda: browser.texts("article .error"))
        bounds = (
            "return [...document.querySelectorAll('article .error, #ask > label')].map(e => e.getBoundingClientRect())"
        )
        error, label = browser.run(bounds)
        assert error["bottom"] <= label["top"], "it is in sight"
        for selector in ("body", ".error", "article.mine", "article.models", ".quiet", "#send", "dt"):
            assert contrast(browser, selector) >= 4.5, selector
    finally:
        browser.emulate("Emulation.clearDeviceMetricsOverride")
        browser.emulate("Emulation.setEmulatedMedia", features=[])


CONTRAST = """
const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
const element = document.querySelector(arguments[0]);
let behind = element;
while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
return [numbers(getComputedStyle(element).color), numbers(getComputedStyle(behind).backgroundColor)];
"""


def contrast(browser: Browser, selector: str) -> float:
    """The contrast of an element's text to what is behind it, 1 to 21, as WCAG 2 defines it."""

    def luminance(color: list[float]) -> float:
        parts = [value / 255 for value in color[:3]]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in parts]
        return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted(map(luminance, browser.run(CONTRAST, selector)))
    return (light + 0.05) / (dark + 0.05)


def test_pages_of_other_sites_get_nothing(browser: Browser, server: HttpServerThread, engine: FakeEngine) -> None:
    url = f"http://localhost:{server.http_port}"
    other = HttpServerThread(FakeEngine(), http_port=0)
    browser.open(f"http://localhost:{other.http_port}/health")  # a page of another origin, and without a policy
    body: dict[str, Any] = {"method": "POST", "body": '{"prompt": "hi"}'}
    for options in ({}, body, body | {"headers": {"content-type": "application/json"}}):
        for path in ("/v1/models", "/v1/completions"):
            with pytest.raises(AssertionError, match="Failed to fetch"):
                browser.run("return fetch(arguments[0], arguments[1]).then(r => r.text())", url + path, options)
    browser.run("return fetch(arguments[0], arguments[1])", url + "/v1/completions", body | {"mode": "no-cors"})
    other.close()
    browser.open(f"http://rebound.example:{server.http_port}/")
    assert "'rebound.example:" in browser.text("body")
    assert "localhost" in browser.text("body")
    assert engine.requests == []
