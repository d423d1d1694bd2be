"""The page at `/` in a browser: the chat against scripted answers, and the picture of an engine."""

import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.browser import Browser, Page, needs_browser
from support.cases import case
from support.models import TinyMixtral, pack
from support.scripted_server import PACK, FixedScheduler, Script, app_of, engine_of, random_states, served, state_of
from support.streaming import budget_for

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


SETTINGS = {"temperature": 0.33, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 64, "seed": 7}


def test_settings_are_kept_and_sent_and_what_is_empty_is_not(browser: Browser) -> None:
    script = Script(defaults={"temperature": 0.699999988079071, "top_p": 1, "top_k": 0, "min_p": 0.1, "max_tokens": -1})
    with opened(browser, script) as page:
        page.wait("document.querySelector('#temperature').placeholder")
        placeholders = {name: page.run(f"document.querySelector('#{name}').placeholder") for name in SETTINGS}
        assert list(placeholders.values()) == ["0.7", "1", "0", "0.1", "Default", "Random"]
        ask(page, "Nothing is set")
        ended(page)
        page.click("#open-settings")
        page.write("#system", "Be short.")
        for name, value in SETTINGS.items():
            page.write(f"#{name}", str(value))
        page.run(
            "(thinking => { thinking.value = 'off'; thinking.dispatchEvent(new Event('input', { bubbles: true })); })"
            "(document.querySelector('#thinking'))"
        )
        page.click("#close-settings")
        page.call("Page.reload")
        page.wait("document.querySelector('#model')?.innerText && document.querySelector('#seed').value === '7'")
        ask(page, "All")
        page.wait("document.querySelectorAll('.facts').length === 2")
        page.click("#open-settings")
        page.click("#reset")
        page.write("#top_p", "3")
        page.click("#close-settings")
        assert page.run("document.querySelector('#settings').open && document.activeElement.id") == "top_p"
        page.press("Escape")
        page.wait("!document.querySelector('#settings').open")
        ask(page, "Refused")
        assert page.run("document.querySelector('#settings').open"), "a field that is wrong is not left out unseen"
        page.click("#reset")
        page.click("#close-settings")
        page.press("Escape")
        page.run("document.querySelector('#words').focus()")
        page.press("Enter")
        page.wait("document.querySelectorAll('.facts').length === 3")
    nothing, everything, again = script.asked
    for body in (nothing, again):
        assert not {*SETTINGS, "chat_template_kwargs"} & set(body)
        assert body["messages"][0]["role"] == "user"
    assert {name: everything[name] for name in SETTINGS} == SETTINGS
    assert everything["chat_template_kwargs"] == {"enable_thinking": False}
    assert everything["messages"][0] == {"role": "system", "content": "Be short."}


def test_without_props_placeholders_say_default(browser: Browser) -> None:
    with opened(browser, Script()) as page:
        page.wait("document.querySelector('#temperature').placeholder === 'Default'")


def titles(page: Page) -> list[str]:
    found: list[str] = page.run("[...document.querySelectorAll('#list .open')].map(node => node.textContent)")
    return found


def turns(page: Page) -> list[str]:
    """The texts of all messages and answers of the conversation on the screen."""
    found: list[str] = page.run("[...document.querySelectorAll('.words, .answer')].map(node => node.textContent)")
    return found


def test_conversations_are_kept_renamed_and_deleted(browser: Browser) -> None:
    script = Script()
    for width in (1280, 390):
        with case(width), opened(browser, script, width=width) as page:
            ask(page, "One")
            ended(page)
            page.click("#new")
            assert turns(page) == [] and "this browser alone" in page.text("#welcome")
            page.call("Page.reload")
            page.wait("document.querySelector('#model')?.innerText")
            assert turns(page) == [], "a new conversation stays one"
            ask(page, "Two\nlines")
            ended(page)
            page.call("Page.reload")
            page.wait("document.querySelectorAll('.turn').length === 2 && document.querySelector('#model').innerText")
            assert turns(page) == ["Two\nlines", "Hello"]
            page.click("#open-chats")
            assert titles(page) == ["Two lines", "One"] and "this browser alone" in page.text("#kept")
            assert page.run("document.querySelector('#chats').matches(':modal')") == (width == 390)
            page.click("#list li:nth-child(2) .open")
            assert turns(page) == ["One", "Hello"]
            assert page.run("document.querySelector('#chats').open") == (width == 1280), "a drawer closes"
            if width == 390:
                page.click("#open-chats")
            page.click("#list li:nth-child(2) [title=Rename]")
            page.run("document.querySelector('#list input').select()")
            page.call("Input.insertText", text="Renamed <b>")
            page.press("Enter")
            assert titles(page) == ["Two lines", "Renamed <b>"]
            page.click("#list li:nth-child(2) [title=Rename]")
            page.call("Input.insertText", text="Not this")
            page.press("Escape")
            assert titles(page) == ["Two lines", "Renamed <b>"] and page.run("document.querySelector('#chats').open")
            page.click("#list li:nth-child(2) [title=Delete]")
            assert len(titles(page)) == 2 and page.text("#list li:nth-child(2) .sure") == "Delete?"
            page.click("#list li:nth-child(2) .sure")
            assert titles(page) == ["Two lines"] and turns(page) == ["Two\nlines", "Hello"]
            page.call("Page.reload")
            page.wait("document.querySelectorAll('.turn').length === 2")
            assert titles(page) == ["Two lines"]
            assert page.run("Object.keys(localStorage).filter(key => key.startsWith('moe-serve.chat.')).length") == 1


def test_an_answer_goes_on_while_another_conversation_is_shown(browser: Browser) -> None:
    script = Script([("content", f"word{n} ") for n in range(60)], piece_s=0.03)
    with opened(browser, script) as page:
        ask(page, "First")
        page.wait("document.querySelector('.answer')?.innerText.includes('word3')")
        page.click("#new")
        assert page.text("#send") and not page.text("#stop")
        ask(page, "Second")
        page.wait("document.querySelector('.answer')?.innerText.includes('word1')")
        page.click("#list li:nth-child(2) .open")
        assert page.text("#stop") and turns(page)[0] == "First"
        ended(page)
        assert turns(page)[1].endswith("word59 ") or turns(page)[1].endswith("word59")
        page.click("#list li:nth-child(1) .open")
        ended(page)
        assert turns(page)[0] == "Second" and "word59" in turns(page)[1]
    assert [[message["content"] for message in body["messages"]] for body in script.asked] == [["First"], ["Second"]]
    assert script.num_left == 0


def test_a_message_is_edited_and_asked_again(browser: Browser) -> None:
    script = Script()
    with opened(browser, script) as page:
        for number, text in enumerate(("One", "Two", "Three")):
            ask(page, text)
            page.wait(f"document.querySelectorAll('.facts').length === {number + 1}")
        page.click(".turn.user:nth-of-type(3) .edit")
        assert page.run("document.activeElement.value") == "Two" and "replaced" in page.text(".editor small")
        page.press("Escape")
        assert page.run("document.activeElement.className").endswith("edit") and turns(page)[2] == "Two"
        page.click(".turn.user:nth-of-type(3) .edit")
        page.run("document.activeElement.select()")
        page.call("Input.insertText", text="Second")
        page.press("Enter")
        page.wait("document.querySelectorAll('.facts').length === 2 && document.querySelector('.again')")
        assert turns(page) == ["One", "Hello", "Second", "Hello"]
        page.click(".again")
        page.wait("document.querySelectorAll('.facts').length === 2 && document.querySelector('.again')")
        page.call("Page.reload")
        page.wait("document.querySelectorAll('.turn').length === 4")
        assert turns(page) == ["One", "Hello", "Second", "Hello"]
    asked = [[message["content"] for message in body["messages"]] for body in script.asked]
    assert asked[3:] == [["One", "Hello", "Second"]] * 2


def test_a_browser_without_storage_or_room_chats_all_the_same(browser: Browser) -> None:
    none = "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no', 'SecurityError'); } })"
    full = "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }"
    for name, script in (("none", none), ("full", full)):
        with case(name), opened(browser, Script()) as page:
            page.call("Page.addScriptToEvaluateOnNewDocument", source=script)
            page.call("Page.reload")
            page.wait("document.querySelector('#model')?.innerText")
            for text in ("One", "Two"):
                ask(page, text)
                page.wait(f"document.querySelectorAll('.facts').length === {['One', 'Two'].index(text) + 1}")
            assert "no room" in page.text("#unkept")
            page.click("#new")
            page.click("#open-chats")
            assert titles(page) == ["New chat", "One"] and not page.text("#unkept")
            page.click("#list li:nth-child(2) .open")
            assert len(turns(page)) == 4


def test_what_is_kept_is_bounded_and_foreign_entries_do_no_harm(browser: Browser) -> None:
    with opened(browser, Script()) as page:
        page.run(
            """(() => { const put = (id, value) => localStorage.setItem('moe-serve.chat.' + id, value);
            const turn = text => ({ role: 'user', text });
            for (let n = 0; n < 130; n++) put(`old${n}`, JSON.stringify({ at: n, turns: [turn(`chat ${n}`)] }));
            put('long', JSON.stringify({ at: 200, turns: [turn('x'.repeat(3900000))] }));
            put('a', '{'); put('b', 'null'); put('c', '{"turns": 3}'); put('d', '{"turns": [null, {"role": 4}]}');
            localStorage.setItem('moe-serve.settings', '[1]'); localStorage.setItem('other', 'stays'); })()"""
        )
        page.call("Page.reload")
        page.wait("document.querySelector('#model')?.innerText")
        page.click("#new")
        ask(page, "y" * 200000)
        ended(page)
        kept = page.run("Object.keys(localStorage).filter(key => key.startsWith('moe-serve.chat.'))")
        assert "moe-serve.chat.long" not in kept and "moe-serve.chat.old0" not in kept and len(kept) <= 102
        assert page.run("localStorage.getItem('other')") == "stays" and not page.text("#unkept")


def test_what_another_tab_changes_is_seen(browser: Browser) -> None:
    with opened(browser, Script()) as page:
        ask(page, "One")
        ended(page)
        page.run(
            """(() => { const key = 'moe-serve.chat.other', turns = [{ role: 'user', text: 'Elsewhere' }];
            const tell = newValue => dispatchEvent(new StorageEvent('storage', { key, newValue }));
            tell(JSON.stringify({ at: 1, turns })); window.tell = tell; })()"""
        )
        assert titles(page) == ["One", "Elsewhere"]
        page.run("tell(null)")
        assert titles(page) == ["One"] and turns(page) == ["One", "Hello"]


def test_a_message_whose_answer_was_lost_can_be_asked_again(browser: Browser) -> None:
    script = Script([("content", f"word{n} ") for n in range(500)], piece_s=0.02)
    with opened(browser, script) as page:
        ask(page, "Go on")
        page.wait("document.querySelector('.answer')?.innerText.includes('word3')")
        page.call("Page.reload")
        page.wait(
            "document.querySelector('.facts')?.innerText === 'Stopped' && document.querySelector('#model').innerText"
        )
        assert "word3" in turns(page)[1] and page.text(".again") == "Regenerate"
        page.run(
            "localStorage.setItem(Object.keys(localStorage).find(key => key.includes('chat.')), "
            "JSON.stringify({ turns: [{ role: 'user', text: 'Lost' }] })), 0"
        )
        page.call("Page.reload")
        page.wait("document.querySelector('.turn .fault')?.offsetParent && document.querySelector('#model').innerText")
        page.click(".again")
        page.wait("document.querySelector('.answer')?.innerText.includes('word3')")
    assert [[message["content"] for message in body["messages"]] for body in script.asked] == [["Go on"], ["Lost"]]


def test_a_server_that_loads_or_was_started_again_is_waited_for(browser: Browser) -> None:
    script = Script(health="loading", engine=engine_of(2, 4), num_cut=1)
    with opened(browser, script) as page:
        page.wait("document.querySelector('#welcome-name').innerText === 'Loading the model…'")
        assert not page.text("#trouble") and not page.text("#absent"), "loading is no fault"
        script.health = "ok"
        page.wait("document.querySelector('#link').innerText === 'Live'")
        script.health, script.model = "failed", "another"
        page.wait("document.querySelector('#trouble').innerText.includes('engine has failed')")
        script.health = "ok"
        page.wait("document.querySelector('#model').innerText === 'another'")
        page.wait("document.querySelector('#link').innerText === 'Live'")
        assert not page.text("#trouble")
        ask(page, "Hi")
        ended(page)
    assert script.asked[0]["model"] == "another"


def test_calls_empty_answers_and_other_scripts_are_shown(browser: Browser) -> None:
    first = [{"index": 0, "function": {"name": "weather", "arguments": '{"city"'}}]
    calls = [first, [{"index": 0, "function": {"arguments": ': "<b>Oslo</b>"}'}}]]
    with opened(browser, Script([("tool_calls", json.dumps(call)) for call in calls], end="tool_calls")) as page:
        ask(page, "Hi")
        ended(page)
        assert page.text(".turn figcaption span") == "Calls weather"
        assert page.text(".turn pre") == '{"city": "<b>Oslo</b>"}'
    with opened(browser, Script([])) as page:
        ask(page, "Hi")
        ended(page)
        assert page.text(".waits") == "The answer is empty."
    hebrew = "\N{HEBREW LETTER SHIN}\N{HEBREW LETTER LAMED}"
    with opened(browser, Script([("content", f"{hebrew}\n\nplain\n\n- {hebrew}")])) as page:
        ask(page, hebrew)
        ended(page)
        directions = (
            "[...document.querySelectorAll('.words, .answer > *')].map(node => getComputedStyle(node).direction)"
        )
        assert page.run(directions) == ["rtl", "rtl", "ltr", "rtl"]


def test_stop_ends_an_answer_and_its_request(browser: Browser) -> None:
    for how in ("button", "Escape"):
        with case(how):
            script = Script([("content", f"word{n} ") for n in range(500)], piece_s=0.02)
            with opened(browser, script) as page:
                ask(page, "Go on")
                page.wait("document.querySelector('.answer')?.innerText.includes('word3')")
                if how == "Escape":
                    page.press("Escape")
                else:
                    page.click("#stop")
                page.wait("!document.querySelector('#send').hidden")
                page.wait("document.querySelector('.facts')?.innerText === 'Stopped'")
                assert "word3" in page.text(".answer") and not page.text(".fault")
                ask(page, "More")
                page.wait("document.querySelector('.turn:last-child .answer')?.innerText.includes('word3')")
                kept = [message["content"][:5] for message in script.asked[1]["messages"]]
                assert kept == ["Go on", "word0", "More"]
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
        assert page.run("Object.keys(sessionStorage).sort()") == ["moe-serve.current", "moe-serve.key"]
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
        shown = "[...document.querySelectorAll('#settings label')].filter(node => node.checkVisibility())"
        assert page.run(f"{shown}.map(node => node.firstChild.textContent)") == [
            "Temperature",
            "Top-p",
            "Top-k",
            "Min-p",
            "Most tokens",
            "Seed",
        ]
        page.click("#close-settings")
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
                assert page.run("[...live.resident]") == weights.resident_experts().ravel().astype(int).tolist()
                page.close()


def test_figures_and_slots(browser: Browser) -> None:
    with opened(browser, Script(engine=engine_of(3, 8))) as page:
        page.wait("document.querySelector('#link').innerText === 'Live'")
        assert [page.text(f"#{name}") for name in ("hits", "hits-why")] == ["Not yet", "no expert was chosen"]
        assert page.run("getComputedStyle(document.querySelector('#spark')).visibility") == "hidden", "a stray line"
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
        assert page.run("getComputedStyle(document.querySelector('#spark')).visibility") == "visible"
        assert page.run("document.querySelector('#pack').textContent.split(' \N{MIDDLE DOT}')") == [
            "152.0 MiB",
            "experts 2.90 bits",
            "loss 0.0094 nats",
            "perplexity +0.57%",
            "KV cache f32",
            "numerics fast",
        ]
    unmeasured = PACK | {"loss": None}
    facts = engine_of(3, 8, mode="mapped", budget_bytes=None, pages_total=None, pack=unmeasured)
    nothing = np.zeros((3, 8), np.uint32)
    mapped = state_of(nothing + 1, nothing, None, hit_rate=None)
    with opened(browser, Script(engine=facts, states=[mapped])) as page:
        page.wait("document.querySelector('#bytes').innerText === '41.5 MiB'")
        assert page.text("#figures").count("\N{EN DASH}") == page.text("#figures").count("None") == 0
        assert page.run("document.querySelector('#figures').dataset.tiles") == "2"
        assert page.text("#bytes-name") == "Bytes used a token"
        assert page.text("#legend").split("\n") == ["Chosen just now", "Not chosen"]
    with opened(browser, Script()) as page:
        page.wait("document.querySelector('#absent').offsetParent")
        assert page.text("#absent") == "This server does not show its engine."


IS_NAMED = "node.innerText || node.ariaLabel || (node.labels && node.labels.length)"
# What leaves the window, or its own box where it does not scroll, and buttons of more than one line.
FAULTY = """[...document.querySelectorAll('body *')].filter(node => {
  if (!node.checkVisibility() || node.closest('.wide, pre, svg, .unseen, #list, .axis, canvas')) return false;
  const box = node.getBoundingClientRect(), style = getComputedStyle(node);
  const isTall = node.tagName === 'BUTTON' && box.height > 2 * parseFloat(style.lineHeight) + 8;
  return isTall || box.right > innerWidth + 1 || box.left < -1;
}).map(node => node.outerHTML.slice(0, 200))"""


def test_every_control_has_a_name_and_nothing_overflows(browser: Browser) -> None:
    text = "A very" + "long" * 100 + "word\n\n```\n" + "x = 1; " * 60 + "\n```\n\n" + "|a" * 40 + "\n" + "|-" * 40
    slots = [{"state": "idle", "tokens": 131072, "context": 131072}] * 64
    shapes = {
        (320, 700): (27, 64),
        (390, 844): (58, 256),
        (768, 800): (24, 32),
        (1000, 800): (32, 8),
        (1280, 860): (58, 256),
    }
    for ((width, height), (num_layers, num_experts)), is_dark in itertools.product(shapes.items(), (False, True)):
        states = random_states(num_layers, num_experts, 4, 2, 0.5)
        states[-1] |= {"slots": slots, "waiting": 1000}
        script = Script([("content", text)], engine=engine_of(num_layers, num_experts), states=states)
        script.model = "a-model-with-a-name-that-is-" + "very-" * 20 + "long"
        script.engine["model"] = script.model
        with case(width, is_dark), opened(browser, script, width=width, height=height, is_dark=is_dark) as page:
            page.wait("document.querySelector('#model').innerText")
            assert page.run(FAULTY) == []
            ask(page, "Hi " + "there" * 80)
            ended(page)
            page.wait("document.querySelectorAll('#slots li').length === 64")
            for opens, closes in (
                ("#open-chats", "#close-chats"),
                ("#open-settings", "#close-settings"),
                (".edit", ".editor .row button"),
            ):
                page.click(opens)
                assert page.run(FAULTY) == []
                assert page.run("document.documentElement.scrollWidth <= innerWidth")
                controls = "[...document.querySelectorAll('button, input, textarea, select, a, canvas, summary')]"
                assert page.run(f"{controls}.filter(node => !({IS_NAMED})).map(node => node.outerHTML)") == []
                page.click(closes)
            tops = page.run("[...document.querySelectorAll('#figures > div')].map(node => node.offsetTop)")
            assert Counter(Counter(tops).values()) in ({2: 2}, {4: 1}), "no tile is alone in a row"
            assert page.run("document.querySelector('#cells').tabIndex") == 0


def test_the_picture_comes_back_after_the_connection_was_cut(browser: Browser) -> None:
    script = Script(engine=engine_of(2, 4), num_cut=1)
    with opened(browser, script) as page:
        page.wait("document.querySelector('#link').innerText === 'Connecting again…'")
        page.wait("document.querySelector('#link').innerText === 'Live'")
        assert script.num_watched == 2
