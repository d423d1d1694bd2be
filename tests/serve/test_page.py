"""The page at `/` in a browser: the chat against scripted answers, and the picture of an engine."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser, Page, needs_browser
from cases import case
from models import TinyMixtral, pack
from scripted_server import FixedScheduler, Script, app_of, engine_of, random_states, served, state_of
from streaming import budget_for

from moe_pack.formats import Pack
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.serve.http.live import engine_router, live_counts

pytestmark = [needs_browser, pytest.mark.slow]

ANSWER = """Two facts, **both** `measured`:

1. first
2. second
   - nested *part*

```python
if a < b & c:
    print("<b>no markup</b>")
```
<img src=x onerror="document.title='broken'"> & 2*3*4"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@contextmanager
def opened(browser: Browser, script: Script, **options: Any) -> Iterator[Page]:
    """The page of a server that follows a script; nothing may go wrong in it unseen."""
    browser.said.clear()
    with served(app_of(script)) as url:
        page = browser.open(url, **options)
        try:
            yield page
        finally:
            page.close()
    # What a browser logs of answers with an error is no fault of the page.
    assert [line for line in browser.said if "Failed to load resource" not in line] == []


def ask(page: Page, text: str) -> None:
    page.wait("document.querySelector('#model').innerText")
    page.write("#words", text)
    page.press("Enter")


def ended(page: Page) -> None:
    page.wait("!document.querySelector('#send').hidden && document.querySelector('.turn:not(.user) .under')")


def words(text: str) -> list[str]:
    return re.findall(r"\s*\S+", text)


def test_an_answer_streams_below_its_folded_reasoning(browser: Browser) -> None:
    pieces = [("reasoning_content", "First I "), ("reasoning_content", "think.")]
    script = Script([*pieces, *(("content", word) for word in words(ANSWER))], piece_s=0.03)
    with opened(browser, script) as page:
        ask(page, "Why <i>so</i>?\nTell me")
        page.wait("document.querySelector('.thought summary')?.innerText === 'Thinking…'")
        page.wait("document.querySelector('.answer').innerText.includes('Two facts')")
        assert page.run("document.querySelector('.answer').getAttribute('aria-busy')") == "true"
        assert not page.run("document.querySelector('.thought').open") and page.text("#stop") == "Stop"
        ended(page)
        assert page.text(".turn.user").startswith("Why <i>so</i>?")
        assert page.run("document.querySelector('.thought div').textContent") == "First I think."
        assert page.text(".thought summary").startswith("Thought for ")
        assert page.text(".facts") == "42 tokens · 18.3 tokens/s · 120 of 340 prompt tokens cached"
        found = {name: page.text(f".answer {name}") for name in ("strong", "p code", "ol > li:nth-child(2)", "ul em")}
        assert found == {
            "strong": "both",
            "p code": "measured",
            "ol > li:nth-child(2)": "second\nnested part",
            "ul em": "part",
        }
        assert page.text(".answer pre") == 'if a < b & c:\n    print("<b>no markup</b>")'
        assert page.text(".answer figcaption span") == "python"
        assert "<img src=x" in page.text(".answer") and "2*3*4" in page.text(".answer")
        assert page.run("document.querySelectorAll('.answer img, .answer b').length") == 0
        assert page.run("document.title") == "tiny-mixtral \N{EN DASH} moe-serve"
    body = script.asked[0]
    assert body["messages"] == [{"role": "user", "content": "Why <i>so</i>?\nTell me"}]
    assert (body["stream"], body["stream_options"], body["model"]) == (True, {"include_usage": True}, "tiny-mixtral")
    assert not {"temperature", "top_p", "max_tokens", "seed"} & set(body)


def test_what_a_model_repeats_without_end_is_drawn_quickly(browser: Browser) -> None:
    lines = [
        "x " + "`" * 4000,
        "**a" * 3000,
        "*" * 4000,
        "a|b\n" + "-|" * 3000 + "x",
        "- " * 3000,
        "> " * 3000,
        "1. " * 2000,
    ]
    end = "```\nnever ended"
    seconds = list[float]()
    for each in (["word " * (len(line) // 5) for line in lines], lines):
        with opened(browser, Script([("content", line + "\n\n") for line in [*each, end]])) as page:
            begun = time.monotonic()
            ask(page, "Hi")
            page.wait("document.querySelector('.facts')")
            assert page.text(".answer pre").strip() == "never ended"
            seconds.append(time.monotonic() - begun)
    assert seconds[1] < 8 + 20 * seconds[0], "no longer than plain words, but for a factor"


def test_settings_and_the_conversation_are_kept_and_sent(browser: Browser) -> None:
    script = Script()
    with opened(browser, script) as page:
        page.click("#open-settings")
        page.write("#system", "Be short.")
        for name, value in (("temperature", "0.5"), ("top_p", "0.9"), ("max_tokens", "64"), ("seed", "7")):
            page.write(f"#{name}", value)
        ask(page, "One")
        ended(page)
        page.call("Page.reload")
        page.wait("document.querySelectorAll('.turn').length === 2 && document.querySelector('#model')?.innerText")
        ask(page, "Two")
        page.wait("document.querySelectorAll('.facts').length === 2")
        page.click(".again")
        page.wait("!document.querySelector('.again')")
        page.wait("document.querySelectorAll('.facts').length === 2 && document.querySelector('.again')")
        assert page.run("document.querySelectorAll('.turn').length") == 4
        page.click("#new")
        page.call("Page.reload")
        page.wait("document.querySelector('#model')?.innerText")
        assert page.run("document.querySelectorAll('.turn').length") == 0 and "kept" in page.text("#welcome")
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Two"},
    ]
    assert [body["messages"] for body in script.asked] == [messages[:2], messages, messages]
    for body in script.asked:
        sampling = (body["temperature"], body["top_p"], body["max_tokens"], body["seed"])
        assert sampling == (0.5, 0.9, 64, 7)


def test_stop_ends_an_answer_and_its_request(browser: Browser) -> None:
    for how in ("button", "Escape", "new chat"):
        with case(how):
            script = Script([("content", f"word{n} ") for n in range(500)], piece_s=0.02)
            with opened(browser, script) as page:
                ask(page, "Go on")
                page.wait("document.querySelector('.answer')?.innerText.includes('word3')")
                if how == "Escape":
                    page.press("Escape")
                else:
                    page.click("#stop" if how == "button" else "#new")
                page.wait("!document.querySelector('#send').hidden")
                if how == "new chat":
                    assert page.text(".turn") == "" and page.text("#welcome h2") == "tiny-mixtral"
                else:
                    page.wait("document.querySelector('.facts')?.innerText === 'Stopped'")
                    assert "word3" in page.text(".answer") and not page.text(".fault")
                ask(page, "More")
                page.wait("document.querySelector('.turn:last-child .answer')?.innerText.includes('word3')")
                kept = [message["content"][:5] for message in script.asked[1]["messages"]]
                assert kept == (["More"] if how == "new chat" else ["Go on", "word0", "More"])
            assert script.num_left >= 1, "the server sees that the client has left"


def test_a_key_is_asked_for_and_sent(browser: Browser) -> None:
    with opened(browser, Script(key="secret", engine=engine_of(2, 4))) as page:
        page.wait("document.querySelector('#key').offsetParent && document.querySelector('#absent').innerText")
        assert page.run("document.activeElement.id") == "key-text"
        assert "asks for an API key" in page.text("#key") and page.text("#picture") == ""
        page.write("#key-text", "wrong")
        page.press("Enter")
        page.wait("document.querySelector('#key-why').innerText.includes('refused this API key')")
        page.write("#key-text", "secret")
        page.press("Enter")
        ask(page, "Hi")
        ended(page)
        assert page.text(".answer") == "Hello" and page.run("document.querySelector('#key').hidden")
        page.wait("document.querySelector('#link').innerText === 'Live'")
        assert page.run("sessionStorage.length") == 1
        assert "secret" not in page.run("JSON.stringify(localStorage)")


def test_what_goes_wrong_is_one_sentence_and_can_be_tried_again(browser: Browser) -> None:
    late = [("content", "Some ")] * 3
    cases = {
        "refused": (Script(fault="The prompt is too long."), "The prompt is too long.", ""),
        "in the middle": (Script(late, fault="The disk failed.", breaks_at=2), "The disk failed.", "Some Some"),
        "cut": (Script(late, breaks_at=2), "The connection ended before the answer did; try again.", "Some Some"),
    }
    for name, (script, sentence, text) in cases.items():
        with case(name), opened(browser, script) as page:
            ask(page, "Hi")
            ended(page)
            page.wait("document.querySelector('.turn .fault')?.offsetParent")
            assert (page.text(".turn .fault"), page.text(".answer")) == (sentence, text)
            script.fault, script.breaks_at = "", None
            page.click(".again")
            page.wait("document.querySelector('.facts')")
            assert page.text(".turn .fault") == ""
            assert [len(body["messages"]) for body in script.asked] == [1, 1]
    with opened(browser, Script([("content", "x")] * 3, end="length")) as page:
        ask(page, "Hi")
        ended(page)
        assert page.text(".facts").endswith("ended at the limit of tokens")


def test_a_model_without_a_template_continues_text(browser: Browser) -> None:
    script = Script([("content", "upon **a**\n time")], has_chat=False)
    with opened(browser, script) as page:
        page.wait("document.querySelector('#model').innerText")
        assert "no chat template" in page.text("#welcome") and page.text("#send") == "Continue"
        page.click("#open-settings")
        assert page.run("document.querySelector('#system-label').offsetParent") is None
        ask(page, "Once")
        ended(page)
        assert page.text(".answer") == "upon **a**\n time"
    assert script.asked[0]["prompt"] == "Once" and "messages" not in script.asked[0]


def pixels(page: Page, num_layers: int, num_experts: int) -> np.ndarray[Any, Any]:
    """The colours in the middle of all cells, [L, E, 3]; a layer of many experts takes several rows."""
    found = page.run(
        f"""(() => {{ const canvas = document.querySelector('#cells'), {{ columns, fold }} = live, found = [];
        const all = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        for (let l = 0; l < {num_layers}; l++) for (let e = 0; e < {num_experts}; e++) {{
          const x = Math.floor((e % columns + 0.4) * canvas.width / columns);
          const y = Math.floor((l * fold + Math.floor(e / columns) + 0.4) * canvas.height / ({num_layers} * fold));
          found.push(...all.slice(4 * (y * canvas.width + x), 4 * (y * canvas.width + x) + 3));
        }} return found; }})()"""
    )
    return np.array(found, np.int64).reshape(num_layers, num_experts, 3)


def test_the_picture_shows_each_expert_in_its_cell(browser: Browser) -> None:
    cases = [(3, 8, 1280, False), (27, 64, 390, True), (2, 512, 1000, False)]
    cases += [(94, 128, 1280, is_dark) for is_dark in (False, True)]
    for num_layers, num_experts, width, is_dark in cases:
        with case(num_layers, num_experts, width, is_dark):
            resident = np.random.default_rng(4).random((num_layers, num_experts)) < 0.4
            chosen, read = (np.zeros(resident.shape, np.uint32) for _ in range(2))
            chosen[:, 1], chosen[-1, 2], read[0, 2:4] = 1, 300, 2
            states = [state_of(chosen, read, resident)]
            script = Script(engine=engine_of(num_layers, num_experts), states=states, state_s=0.4)
            with opened(browser, script, width=width, is_dark=is_dark) as page:
                page.run("Object.assign(FADE_MS, { chosen: 60000, read: 90000 }), 0")
                page.wait("live.total?.chosen[1] && live.painted > 0")
                page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
                early = pixels(page, num_layers, num_experts)
                blue = early[..., 2] - early[..., 0]
                others = (chosen == 0) & (read == 0)
                assert (blue[chosen > 0] > 40).all(), "chosen is blue"
                assert (blue[read > 0] < -40).all(), "read is orange"
                assert (np.abs(blue[others]) < 30).all(), "the others are grey"
                page.run("Object.assign(FADE_MS, { chosen: 20, read: 20 }), 0")
                page.wait("live.frame === 0")
                late = pixels(page, num_layers, num_experts)
                shown, empty = ({tuple(colour) for colour in late[cells].tolist()} for cells in (resident, ~resident))
                assert len(shown) == len(empty) == 1 and shown != empty
                assert page.run("document.querySelector('#cells').getBoundingClientRect().right <= innerWidth")


def test_the_picture_names_a_cell_by_pointer_and_keys(browser: Browser) -> None:
    chosen, read = np.zeros((2, 4), np.uint32), np.zeros((2, 4), np.uint32)
    chosen[1, 2], read[1, 2] = 3, 1
    resident = np.zeros((2, 4), bool)
    resident[1, 2] = True
    script = Script(engine=engine_of(2, 4, layers=[1, 3]), states=[state_of(chosen, read, resident)] * 2)
    says = "Layer 3, expert 2: resident, chosen 6 times, read 2 times since this page was opened."
    with opened(browser, script) as page:
        page.wait("document.querySelector('#speed').innerText === '18.3' && live.total.read[6] === 2")
        assert "2 layers (rows) of 4 experts (columns)" in page.text("#spot")
        box = page.run("document.querySelector('#cells').getBoundingClientRect().toJSON()")
        x, y = box["left"] + 0.6 * box["width"], box["top"] + 0.7 * box["height"]
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        page.wait("document.querySelector('#spot').innerText.startsWith('Layer')")
        assert page.text("#spot") == says
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=5, y=5)
        page.wait("!document.querySelector('#spot').innerText.startsWith('Layer')")
        page.run("document.querySelector('#cells').focus()")
        for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight"):
            page.press(key)
        assert page.text("#spot") == says


def test_the_picture_counts_what_a_real_engine_does(browser: Browser, tmp_path: Path) -> None:
    pack(TinyMixtral(num_layers=3, num_experts=8).write(tmp_path / "source"), tmp_path / "packed")
    with Pack(tmp_path / "packed") as files:
        options = EngineOptions(budget_bytes=budget_for(files, 7, 48))
        with Engine(files, options, 48) as engine:
            live = live_counts(engine)
            router = engine_router(live, engine, FixedScheduler(), "tiny")
            with served(app_of(Script(), router)) as url:
                page = browser.open(url)
                page.wait("live.total && live.resident")
                for token in range(40):
                    engine.decoder.next_logits([token])
                chosen, read = live.totals()
                assert chosen.sum() == 40 * 3 * 2 and read.sum() > 0
                for name, counts in (("chosen", chosen), ("read", read)):
                    page.wait(f"live.total.{name}.reduce((a, b) => a + b, 0) === {counts.sum()}")
                    assert page.run(f"[...live.total.{name}]") == counts.ravel().tolist()
                weights = engine.offloaded
                assert weights is not None
                assert page.run("[...live.resident]") == weights.resident_experts().ravel().astype(int).tolist()
                page.close()


def test_figures_and_slots(browser: Browser) -> None:
    states = random_states(3, 8, 2, 4, 0.5)
    slots = [{"state": "prefill", "tokens": 2048, "context": 8192}, {"state": "idle", "tokens": 0, "context": 8192}]
    states[-1] |= {"slots": slots, "prefill_tokens_per_s": 310.0, "waiting": 2, "tokens_per_s": 0.0}
    with opened(browser, Script(engine=engine_of(3, 8), states=states)) as page:
        page.wait("document.querySelector('#prefill').innerText.startsWith('prefill')")
        names = ("speed", "prefill", "bytes", "rate", "hits", "memory", "memory-why")
        assert [page.text(f"#{name}") for name in names] == [
            "0.00",
            "prefill 310 a second",
            "41.5 MiB",
            "760.0 MiB a second",
            "87.4%",
            "11.0 GiB",
            "5,120 pages",
        ]
        assert page.text("#slots li").split("\n") == ["Slot 1, prefill", "2,048 of 8,192"]
        assert page.run("document.querySelector('#slots .bar i').style.width") == "25%"
        assert page.run("document.querySelector('#spark polyline').points.length") == 4
    facts = engine_of(3, 8, mode="mapped", budget_bytes=None, pages_total=None)
    nothing = np.zeros((3, 8), np.uint32)
    mapped = state_of(nothing + 1, nothing, None, hit_rate=None)
    with opened(browser, Script(engine=facts, states=[mapped])) as page:
        page.wait("document.querySelector('#bytes').innerText === '41.5 MiB'")
        found = [page.text(f"#{name}") for name in ("hits", "memory", "bytes-name")]
        assert found == [
            "\N{EN DASH}",
            "None",
            "Bytes used a token",
        ]
        assert page.text("#legend").split("\n") == ["Chosen just now", "Not chosen"]
    with opened(browser, Script()) as page:
        page.wait("document.querySelector('#absent').offsetParent")
        assert page.text("#absent") == "This server does not show its engine."


def test_every_control_has_a_name_and_nothing_overflows(browser: Browser) -> None:
    states = random_states(27, 64, 6, 2, 0.5)
    pieces = [("content", "A very" + "long" * 100 + "word\n\n```\n" + "x = 1; " * 60 + "\n```")]
    script = Script(pieces, engine=engine_of(27, 64), states=states)
    for width in (320, 768, 1000):
        with case(width), opened(browser, script, width=width, height=800) as page:
            page.click("#open-settings")
            ask(page, "Hi " + "there" * 80)
            ended(page)
            page.wait("document.querySelector('#slots li')")
            assert page.run("document.documentElement.scrollWidth <= innerWidth")
            controls = "[...document.querySelectorAll('button, input, textarea, a, canvas, summary')]"
            is_named = "node.innerText || node.ariaLabel || (node.labels && node.labels.length)"
            assert page.run(f"{controls}.filter(node => !({is_named})).map(node => node.outerHTML)") == []
            assert page.run("document.querySelector('#cells').tabIndex") == 0


def test_the_picture_comes_back_after_the_connection_was_cut(browser: Browser) -> None:
    script = Script(engine=engine_of(2, 4), num_cut=1)
    with opened(browser, script) as page:
        page.wait("document.querySelector('#link').innerText === 'Connecting again…'")
        page.wait("document.querySelector('#link').innerText === 'Live'")
        assert script.num_watched == 2
