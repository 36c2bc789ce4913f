"""The page at `/`: what is served over HTTP, and what it does in a browser, where there is one."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from browser import Browser, browsing, find_chromium
from served_model import NAME, Served, load, save_model, serving
from thinrank.server.page import PAGE_PATHS
from tiny_tokenizers import CHAT_TEMPLATE, save_byte_level

#: In the order of the page: the last turn's parts.
LAST_ANSWER = "[...document.querySelectorAll('.turn.assistant')].at(-1)"
IDLE = "document.querySelector('#stop').hidden"


@pytest.fixture(scope="module")
def low_rank(converted: Callable[[str], Path]) -> Iterator[Served]:
    """A model that can chat, with shared factors and a dense lm_head."""
    llm = load(converted("basis_sharing-share2-20"))
    with serving(llm, chat_template=CHAT_TEMPLATE) as served:
        yield served
        assert served.free_blocks() == served.llm.engine.pool.num_blocks, "a block is lost"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium was found; on Debian: apt-get install chromium")
    with browsing(program) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """Whose page must have nothing to complain of."""
    chromium.errors.clear()
    yield chromium
    assert not chromium.errors


def open_page(browser: Browser, served: Served, **options: Any) -> None:
    browser.open(f"{served.url}/", **options)
    browser.wait("document.querySelector('.cell')")


def ask(browser: Browser, text: str, **settings: Any) -> str:
    """Type a message and send it; the text of the whole answer."""
    for name, value in settings.items():
        browser.evaluate(f"document.querySelector('[name={name}]').value = {json.dumps(value)}")
    browser.evaluate("document.querySelector('#message').focus()")
    browser.type(text)
    browser.press("Enter")
    browser.wait(f"{LAST_ANSWER}?.querySelector('.note, .error')")
    return str(browser.evaluate(f"{LAST_ANSWER}.querySelector('.words')?.textContent ?? ''"))


def fake_answer(browser: Browser, *parts: str) -> None:
    """Completions answer with these parts of a stream from now on; everything else goes to the server."""
    browser.evaluate(f"""
        window.fetch = ((real) => (path, options) => {{
            if (!String(path).includes("completions")) return real(path, options);
            const parts = {json.dumps(parts)}.map((part) => new TextEncoder().encode(part));
            return Promise.resolve(new Response(new ReadableStream({{
                start(controller) {{ parts.forEach((part) => controller.enqueue(part)); controller.close(); }},
            }})));
        }})(window.fetch), 0""")


def event(content: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': content}}]})}\n\n"


# Over HTTP


def test_the_page_and_its_files_are_served(http: httpx.Client) -> None:
    index = http.get("/")
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    linked = set(re.findall(r'(?:href|src)="([^"#]+)"', index.text))
    scripts = {path for path in PAGE_PATHS if path.endswith(".js")}
    imported = {
        f"page/{name}" for path in scripts for name in re.findall(r'from "\./([^"]+)"', http.get(path).text)
    }
    assert {f"/{path}" for path in linked | imported} | {"/"} == PAGE_PATHS
    for path in PAGE_PATHS:
        response = http.get(path)
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy
        assert "unsafe" not in policy and "*" not in policy and "http" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
    types = {http.get(path).headers["content-type"].partition(";")[0] for path in PAGE_PATHS}
    assert types == {"text/html", "text/css", "text/javascript", "image/svg+xml"}


def test_the_page_needs_nothing_from_elsewhere(http: httpx.Client) -> None:
    for path in PAGE_PATHS:
        text = http.get(path).text
        assert set(re.findall(r"https?://[^\"' )]+", text)) <= {"http://www.w3.org/2000/svg"}, path
        assert not re.search(r"""["'(]//|@import|innerHTML|outerHTML|insertAdjacentHTML|eval\(""", text), path
        assert not re.search(r"""<[^>]+\s(style|on\w+)=""", text), "its own policy forbids that"


def test_the_page_is_open_and_its_numbers_are_not(folder: Path) -> None:
    with serving(load(folder), api_keys=("secret",)) as served, served.http() as http:
        assert {http.get(path).status_code for path in PAGE_PATHS} == {200}
        for path in ("/stats", "/ranks", "/page/model", "/page/none.js"):
            assert http.get(path).status_code == 401
            known = path != "/page/none.js"
            authorized = http.get(path, headers={"authorization": "Bearer secret"})
            assert authorized.status_code == (200 if known else 404)


def test_what_the_page_knows_of_the_model(http: httpx.Client) -> None:
    model = http.get("/page/model").json()
    assert model == {"name": NAME, "max_model_len": 16384, "has_chat_template": True, "defaults": {}}


# In a browser


def test_a_conversation(browser: Browser, low_rank: Served) -> None:
    open_page(browser, low_rank)
    assert browser.text("#welcome-title") == f"Chat with {NAME}"
    settings = {"temperature": "0", "max_tokens": "12", "system": "Be brief."}
    messages = [{"role": "system", "content": "Be brief."}]
    client = low_rank.openai()
    for question in ("Hello <b>there</b>", "And now?"):
        answer = ask(browser, question, **settings)
        messages.append({"role": "user", "content": question})
        expected = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=12)  # type: ignore[call-overload]
        assert answer and answer == expected.choices[0].message.content
        messages.append({"role": "assistant", "content": answer})
        note = str(browser.evaluate(f"{LAST_ANSWER}.querySelector('.note').textContent"))
        assert f"{expected.usage.completion_tokens} tokens" in note and "tokens/s" in note
        assert browser.text("#context") == f"{expected.usage.total_tokens} of 2,048 tokens"
    assert browser.evaluate("document.querySelectorAll('.turn').length") == 4
    assert "tuple" not in browser.text("#transcript")

    browser.evaluate("document.querySelector('#new').click()")
    assert browser.evaluate("document.querySelectorAll('.turn').length") == 0
    assert browser.evaluate("document.querySelector('#welcome').isConnected")
    again = ask(browser, "And now?", system="")
    alone = [{"role": "user", "content": "And now?"}]
    expected = client.chat.completions.create(model=NAME, messages=alone, temperature=0, max_tokens=12)  # type: ignore[call-overload]
    assert again == expected.choices[0].message.content


def test_shift_enter_is_a_new_line(browser: Browser, low_rank: Served) -> None:
    open_page(browser, low_rank)
    browser.type("one")
    browser.press("Enter", shift=True)
    browser.type("two")
    assert browser.evaluate("document.querySelector('#message').value") == "one\ntwo"
    browser.evaluate("document.querySelector('#message').value = '  '")
    browser.press("Enter")
    assert browser.evaluate("document.querySelectorAll('.turn').length") == 0, "nothing was said"


@pytest.mark.parametrize("way", ["button", "key"])
def test_stop(browser: Browser, low_rank: Served, way: str) -> None:
    open_page(browser, low_rank)
    browser.evaluate("document.querySelector('[name=max_tokens]').value = '1900'")
    browser.evaluate("""
        window.fetch = ((real) => (path, options = {}) => {
            if (!options.body) return real(path, options);
            return real(path, {...options, body: JSON.stringify({...JSON.parse(options.body), ignore_eos: true})});
        })(window.fetch), 0""")
    browser.type("Hello")
    browser.press("Enter")
    browser.wait(f"{LAST_ANSWER}?.querySelector('.words').textContent.length > 3")
    browser.wait("document.querySelector('#state').dataset.state === 'busy'")
    if way == "button":
        browser.evaluate("document.querySelector('#stop').click()")
    else:
        browser.press("Escape")
    browser.wait(IDLE)
    assert browser.evaluate(f"{LAST_ANSWER}.querySelector('.note').textContent").endswith("stopped")
    browser.wait("document.querySelector('#state').textContent === 'idle'")
    assert not low_rank.llm.engine.has_unfinished
    ask(browser, "Go on", max_tokens="5")
    assert not browser.evaluate("document.querySelectorAll('.turn .error').length")
    assert browser.evaluate("document.querySelectorAll('.turn').length") == 4


def test_text_is_never_markup(browser: Browser, low_rank: Served) -> None:
    open_page(browser, low_rank)
    attack = (
        "<img src=x onerror=\"document.title='attacked'\"><script>document.title='attacked'</script>&amp;"
    )
    fake_answer(browser, event(attack), "data: [DONE]\n\n")
    assert ask(browser, attack) == attack
    assert browser.evaluate("document.querySelector('.turn.user .words').textContent") == attack
    assert not browser.evaluate("document.querySelectorAll('#transcript img, #transcript script').length")
    assert "attacked" not in browser.evaluate("document.title")

    # Whoever forgets that here is stopped by the page's policy.
    assigning = "(() => { try { document.body.innerHTML = 'x' } catch { return true } return false })()"
    assert browser.evaluate(assigning)
    browser.errors.clear()


def test_a_stream_may_be_cut_anywhere(browser: Browser, low_rank: Served) -> None:
    open_page(browser, low_rank)
    stream = event("one\n\n") + event("twö") + "data: [DONE]\n\n"
    fake_answer(browser, *stream)
    assert ask(browser, "x") == "one\n\ntwö"


def test_errors_are_shown_and_the_message_comes_back(browser: Browser, low_rank: Served) -> None:
    open_page(browser, low_rank)
    fake_answer(browser, 'data: {"error": {"message": "the engine <died>"}}\n\n', "data: [DONE]\n\n")
    ask(browser, "x")
    assert browser.evaluate(f"{LAST_ANSWER}.querySelector('.error').textContent") == "the engine <died>"
    assert browser.evaluate("document.querySelector('#message').value") == "x"
    fake_answer(browser, event("half"))
    browser.evaluate("document.querySelector('#message').value = ''")
    assert ask(browser, "y") == "half"
    assert "ended before" in browser.evaluate(f"{LAST_ANSWER}.querySelector('.error').textContent")


def test_what_the_server_refuses(chromium: Browser, low_rank: Served) -> None:
    open_page(chromium, low_rank)
    ask(chromium, "x", max_tokens="5000", temperature="0")
    assert "context of 2048" in chromium.evaluate(f"{LAST_ANSWER}.querySelector('.error').textContent")
    assert ask(chromium, "", max_tokens="5"), "the message is still in the box"


def test_a_model_without_a_template_continues(browser: Browser, tmp_path: Path) -> None:
    def without_template(folder: Path, chat_template: str) -> Path:
        return save_byte_level(folder)

    with serving(load(save_model(tmp_path / "model", without_template))) as served:
        open_page(browser, served)
        assert browser.text("#welcome-title") == f"Write with {NAME}"
        assert browser.evaluate("document.querySelector('#system-field').hidden")
        first = ask(browser, "Once upon", temperature="0", max_tokens="8")
        second = ask(browser, " and")
        client = served.openai()
        prompt = "Once upon"
        for answer, following in ((first, " and"), (second, "")):
            expected = client.completions.create(model=NAME, prompt=prompt, temperature=0, max_tokens=8)
            assert answer == expected.choices[0].text
            prompt += answer + following


def test_the_key_is_asked_for(chromium: Browser, folder: Path) -> None:
    with serving(load(folder), api_keys=("secret",)) as served:
        chromium.open(f"{served.url}/")
        chromium.wait("document.querySelector('#key-dialog').open")
        chromium.press("Escape")
        chromium.type("wrong")
        chromium.press("Enter")
        chromium.wait("document.querySelector('#key-error').textContent")
        chromium.wait("document.querySelector('#key-dialog').open")
        chromium.type("secret")
        chromium.press("Enter")
        chromium.wait("document.querySelector('.cell')")
        assert not chromium.evaluate("document.querySelector('#key-dialog').open")
        assert ask(chromium, "Hello", max_tokens="5", temperature="0")
        assert chromium.evaluate("localStorage.length") == 0 and not chromium.evaluate("document.cookie")
        chromium.open(f"{served.url}/?again")
        chromium.wait("document.querySelector('.cell')")  # of this tab it is still known


def test_live_numbers(browser: Browser, low_rank: Served) -> None:
    open_page(browser, low_rank)
    names = "[...document.querySelectorAll('.tile dt')].map((name) => name.textContent)"
    browser.wait(f"{names}.includes('KV cache')")
    assert "MBU" not in browser.evaluate(names) and "GPU memory" not in browser.evaluate(names)
    ask(browser, "Hello", max_tokens="30", temperature="0")
    values = "[...document.querySelectorAll('.tile .value')].map((value) => value.textContent)"
    browser.wait(f"{values}[0] !== '0' && {values}[1].endsWith('ms')")
    assert all(
        browser.evaluate("[...document.querySelectorAll('.tile .source')].map((e) => e.textContent.trim())")
    )


def test_live_numbers_of_a_gpu(browser: Browser, low_rank: Served) -> None:
    """As /stats would have them: steps of 2 ms that read 4 GB each, on a card that reads 4 TB/s."""
    open_page(browser, low_rank)
    browser.evaluate("""
        window.fetch = ((real) => async (path, options) => {
            if (path !== "stats") return real(path, options);
            const stats = await (await real(path, options)).json();
            const steps = Math.round(stats.time * 500);
            return new Response(JSON.stringify({...stats, device: "NVIDIA H200", read_bandwidth: 4e12,
                decode_step_bytes: 4e9, decode_steps: steps, decode_seconds: steps / 500,
                device_memory_used: 3 * 2 ** 30, device_memory_total: 6 * 2 ** 30}));
        })(window.fetch), 0""")
    tile = "[...document.querySelectorAll('.tile')].find((tile) => tile.textContent.startsWith({}))"
    mbu, memory = tile.format("'MBU'"), tile.format("'GPU memory'")
    browser.wait(f"{mbu}?.querySelector('.value').textContent === '50 %'")
    assert "4.00 TB/s, measured" in browser.evaluate(f"{mbu}.textContent")
    assert "3.00 GiBof 6.00 GiB" in browser.evaluate(f"{memory}.textContent")
    assert browser.evaluate(f"{memory}.querySelector('.bar div').style.width") == "50%"
    assert "NVIDIA H200" in browser.text("#device")


def test_a_server_that_is_gone(chromium: Browser, folder: Path) -> None:
    with serving(load(folder)) as served:
        open_page(chromium, served)
        chromium.wait("document.querySelector('#state').textContent === 'idle'")
    chromium.wait("document.querySelector('#state').textContent.includes('cannot be reached')")
    ask(chromium, "x")
    assert "cannot be reached" in chromium.evaluate(f"{LAST_ANSWER}.querySelector('.error').textContent")


def test_the_ranks_as_a_picture_and_as_a_table(browser: Browser, low_rank: Served) -> None:
    open_page(browser, low_rank)
    modules = low_rank.service.ranks.modules
    count = "document.querySelectorAll('#map {}').length"
    assert browser.evaluate(count.format(".cell")) == len(modules) == 29
    assert browser.evaluate(count.format(".cell.dense")) == 1
    assert browser.evaluate(count.format(".cell circle")) == sum(bool(m.shared_with) for m in modules) > 0
    assert "dense" in browser.text("#legend") and "shares" in browser.text("#legend")
    rows = browser.evaluate(
        "[...document.querySelectorAll('#table tbody tr')].map((row) => [...row.children].map((e) => e.textContent))"
    )
    assert [row[0] for row in rows] == [each.module.removeprefix("model.layers.") for each in modules]
    assert [row[2] for row in rows] == ["dense" if m.rank is None else str(m.rank) for m in modules]

    # By keyboard: the first cell, one down, one to the right.
    browser.evaluate("document.querySelector('#message').focus()")
    browser.evaluate("document.querySelector('#map').focus()")
    browser.press("ArrowDown")
    browser.press("ArrowRight")
    shown = next(each for each in modules if each.module == "model.layers.1.self_attn.k_proj")
    tooltip = browser.text(".tooltip")
    assert shown.module in tooltip and f"rank {shown.rank} of {shown.full_rank}" in tooltip
    assert "shares its factor_in with 0.self_attn.k_proj" in tooltip
    browser.press("Escape")
    assert browser.evaluate("document.querySelector('.tooltip').hidden")

    # And by pointer: a click on the second measure colours every cell anew.
    share = "document.querySelectorAll('#map .cell')[0].style.getPropertyValue('--share')"
    before = browser.evaluate(share)
    browser.evaluate("document.querySelector('[name=measure][value=parameters]').click()")
    assert browser.evaluate(share) != before


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_window(browser: Browser, low_rank: Served, width: int) -> None:
    open_page(browser, low_rank, width=width)
    ask(browser, "W" * 300, max_tokens="5")
    browser.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    for view in ("chat", "engine"):
        browser.evaluate(f"document.querySelector('.views [data-view={view}]').click()")
        for selector in ("html", ".transcript", ".engine"):
            element = f"document.querySelector('{selector}')"
            assert browser.evaluate(f"{element}.scrollWidth <= {element}.clientWidth"), selector
        visible = browser.evaluate("document.querySelector('#message').checkVisibility()")
        assert visible is (width > 1000 or view == "chat")


def test_dark_mode_and_contrast(browser: Browser, low_rank: Served) -> None:
    """Text on its ground at 4.5 to 1 or more, as WCAG's level AA asks."""
    grounds = set()
    for dark in (False, True):
        open_page(browser, low_rank, dark=dark)
        colours = {
            name: browser.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}')")
            for name in (
                "ink",
                "muted",
                "accent",
                "error",
                "on-accent",
                "ground",
                "surface",
                "raised",
                "tint",
            )
        }
        grounds.add(colours["ground"])
        pairs = [(text, ground) for text in ("ink", "muted") for ground in ("ground", "surface", "raised")]
        pairs += [("ink", "tint"), ("on-accent", "accent"), ("error", "surface"), ("error", "ground")]
        for text, ground in pairs:
            assert contrast(colours[text], colours[ground]) >= 4.5, (dark, text, ground)
    assert len(grounds) == 2


def contrast(first: str, second: str) -> float:
    """WCAG 2.2's contrast ratio of two colours "#rrggbb"."""

    def luminance(colour: str) -> float:
        channels = [int(colour.strip()[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)
