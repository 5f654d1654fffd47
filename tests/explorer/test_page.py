"""The explorer page in a real browser: it shows the bytes of `mxref explain`, by mouse and by keys, light and dark.

`make test-explorer` runs these tests; MXREF_BROWSER names the browser.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mxref
from explorer.browser import Tab, executable, opened
from mxref import DIALECTS, OperandSpec, Stream
from mxref.explain import explain_block, explorer_link
from mxref.explain.link import EXPLORER, treatment_text
from mxref.formats import BLOCK_FORMATS, MXFP4
from mxref.steps.hadamard import SIZES
from mxref.steps.rounding import Rounding
from mxref.steps.scale import EXPONENT_RULES
from places import ROOT

pytestmark = pytest.mark.skipif(
    "MXREF_BROWSER" not in os.environ, reason="needs a browser, which MXREF_BROWSER names: make test-explorer"
)

HOME = (EXPLORER / "index.html").as_uri()
SHOTS = ROOT / "runs" / "explorer"
SIZES_SHOWN = [(width, dark) for width in (1400, 390) for dark in (False, True)]
STREAM = Stream(2**63 + 5, 7, 3, 4)
SPECS = [
    *(dialect.spec for dialect in DIALECTS.values()),
    OperandSpec(format="mxfp8_e4m3", scale_rule="rceil", rounding="rna"),
    OperandSpec(format="mxfp8_e5m2", scale_rule="ceil", rounding="sr", sr_bits=20, prescale=True),
    OperandSpec(rounding="rtz", hadamard=16, sign_vector="+-" * 8),
    OperandSpec(block="32x32", hadamard=64, signs="fixed", zero_scale=127),
    OperandSpec(format="mxint8", scale_rule="rceil", prescale=True),
    OperandSpec(format="nvfp4", rounding="sr"),
    OperandSpec(format="nvfp4", block="16x16", hadamard=32),
]
BYTES = """(() => {
  const text = (node) => node.firstChild.textContent;
  return Object.fromEntries([...document.querySelectorAll("[data-codes]")].map((codes) => [codes.dataset.codes, {
    scale: text(document.querySelector(`[data-scale=${codes.dataset.codes}]`)),
    codes: [...codes.children].map(text).join(""),
    differs: [...codes.children].map((each) => each.classList.contains("differs")),
  }]));
})()"""
CONTRAST = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    assert executable(), f"MXREF_BROWSER = {os.environ['MXREF_BROWSER']} is not installed"
    SHOTS.mkdir(parents=True, exist_ok=True)
    with opened(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(autouse=True)
def without_errors(tab: Tab) -> Iterator[None]:
    tab.errors.clear()
    yield
    assert not tab.errors


def block_text(block) -> dict[str, str]:
    return {"scale": f"{block.scale.byte:02x}", "codes": block.packed.hex()}


def stored(tab: Tab, side: str = "a") -> dict[str, str]:
    shown = tab.run(BYTES)[side]
    return {"scale": shown["scale"], "codes": shown["codes"]}


def drawn() -> np.ndarray:
    x = np.random.default_rng(5).normal(size=(64, 128)) * np.exp2(np.arange(64)[:, None] - 32.0)
    x[3, 40] = np.nan
    return x.astype(np.float32)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("index", [0, 13, 134])
def test_a_link_shows_the_bytes_of_explain(tab, spec, index):
    x = drawn()
    tab.show(explorer_link(x, spec, STREAM, index=index))
    assert stored(tab) == block_text(explain_block(x, spec, STREAM, index=index))


def words_of(tab: Tab) -> np.ndarray:
    """Return the numbers in the page's address, which it writes a moment after a change."""
    tab.run("new Promise((done) => setTimeout(done, 300))")
    state = dict(part.split("=", 1) for part in tab.run("location.hash.slice(1)").split("&"))
    digits = state["x"]
    words = [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]
    return np.array(words + [0] * (-len(words) % 32), np.uint32).view(np.float32)


def test_two_treatments_are_compared_byte_by_byte(tab):
    x = drawn()[20, :32]
    tab.show(explorer_link(x, "ocp") + "&b=amd,hadamard=16")
    a, b = (
        explain_block(x, "ocp"),
        explain_block(x, OperandSpec(scale_rule="even", zero_scale=127, hadamard=16)),
    )
    shown = tab.run(BYTES)
    for side, block in (("a", a), ("b", b)):
        assert {key: shown[side][key] for key in ("scale", "codes")} == block_text(block)
        assert shown[side]["differs"] == [p != q for p, q in zip(a.packed, b.packed, strict=True)]
    count = sum(shown["a"]["differs"])
    assert f"{count} of 16 code bytes differ." in tab.run(
        "document.querySelector('[data-verdict]').textContent"
    )


CLICKS = [
    *(("format", name) for name in BLOCK_FORMATS),
    *(("scale_rule", rule.value) for rule in EXPONENT_RULES),
    *(("rounding", rounding.value) for rounding in Rounding),
    *(("hadamard", str(n)) for n in (0, *SIZES)),
    ("prescale", "true"), ("zero_scale", "127"), ("block", "32x32"),
]  # fmt: skip


def test_every_choice_is_a_click(tab):
    x = drawn()[9, :32]
    for name, value in CLICKS:
        # A stream of zeros is the page's own where the address names none.
        tab.show(explorer_link(x, "nvidia"))
        tab.run(f"document.querySelector('input[name={name}][value=\"{value}\"]').click()")
        if value == "nvfp4":  # RCEIL is none of its rules
            assert stored(tab) == block_text(explain_block(x, OperandSpec(format="nvfp4")))
            continue
        field = {"true": True, "0": 0, "127": 127}.get(value, int(value) if name == "hadamard" else value)
        spec = OperandSpec(**{"scale_rule": "rceil", name: field})
        shown = explain_block(
            x if name != "block" else np.pad(x[None], [(0, 31), (0, 0)]), spec, Stream(0), pad=True
        )
        assert stored(tab) == block_text(shown), (name, value)
        assert tab.run("document.querySelector('.tab.a code').textContent") == treatment_text(spec)
    nvfp4 = [
        ("scale_rule", "nearest"),
        ("zero_scale", "56"),
        *((f, v) for f, v in CLICKS if f in ("rounding", "hadamard")),
    ]
    for name, value in nvfp4:
        tab.show(explorer_link(x[:16], OperandSpec(format="nvfp4"), amax=7))
        tab.run(f"document.querySelector('input[name={name}][value=\"{value}\"]').click()")
        spec = OperandSpec(**{"format": "nvfp4", name: int(value) if value.isdigit() else value})
        shown = explain_block(x[:16], spec, Stream(0), pad=True, amax=7)
        assert stored(tab) == block_text(shown), (name, value)
        assert tab.run("document.querySelector('.tab.a code').textContent") == treatment_text(spec)
    for name, dialect in DIALECTS.items():
        tab.show(explorer_link(x, "nvidia"))
        tab.run(f"document.querySelector('[data-key=dialect-{name}]').click()")
        assert stored(tab) == block_text(explain_block(x, dialect.spec, Stream(0), pad=True))


def test_choices_that_a_format_does_not_have_are_not_offered(tab):
    x = drawn()[9, :16]
    tab.show(explorer_link(x, OperandSpec(format="nvfp4")))
    offered = tab.run(
        "[...document.querySelectorAll('[data-name=scale_rule] input')].map((each) => each.value)"
    )
    assert offered == ["nearest"]
    assert tab.run("document.querySelectorAll('input[name=prescale]').length") == 0
    assert "Prescalerounding.prescalenot for NVFP4" in tab.run(
        "document.querySelector('#treatment').textContent"
    )
    taken = tab.run(
        "[...document.querySelectorAll('[data-key^=dialect-]')].filter((each) => !each.disabled)"
        ".map((each) => each.textContent)"
    )
    assert taken == ["ocp", *(name for name, each in DIALECTS.items() if each.spec.format is not MXFP4)]
    tab.show(explorer_link(np.pad(x, (0, 16)), OperandSpec()))
    assert tab.run("document.querySelectorAll('[data-key=amax]').length") == 0


def test_the_amax_of_the_tensor_is_an_input(tab):
    x, spec = drawn()[32, :16], OperandSpec(format="nvfp4")
    link = explorer_link(x, spec)
    tab.show(link.partition("&amax=")[0])
    for text, amax in (("260", 260), ("", None), ("0x43820000", 260), ("0", 0)):
        tab.run(
            f"(() => {{ const box = document.querySelector('[data-key=amax]'); box.value = '{text}';"
            "box.dispatchEvent(new Event('change', { bubbles: true })); })()"
        )
        assert stored(tab) == block_text(explain_block(x, spec, amax=amax))
    tab.run("new Promise((done) => setTimeout(done, 300))")
    assert tab.run("location.hash").endswith("&amax=00000000")
    tab.run(
        "(() => { const box = document.querySelector('[data-key=amax]'); box.value = '-1';"
        "box.dispatchEvent(new Event('change', { bubbles: true })); })()"
    )
    assert "no finite magnitude" in tab.run(
        "document.querySelector('#treatment .wrong:not([hidden])').textContent"
    )


def test_ties_of_a_format_with_a_scale_of_the_tensor(tab):
    tab.show(explorer_link(drawn()[9, :16], OperandSpec(format="nvfp4")))
    tab.run("document.querySelector('[data-preset=ties]').click()")
    assert tab.run("document.querySelectorAll('#elements .cell.tie').length") >= 12
    assert stored(tab) == block_text(explain_block(words_of(tab), OperandSpec(format="nvfp4"), amax=2688))


def test_blocks_of_two_lengths_begin_at_the_same_number(tab):
    x = drawn()[30, :64]
    spec = OperandSpec(hadamard=64)
    tab.show(explorer_link(x, spec, index=1) + "&b=ocp,format=nvfp4&e=31&amax=40a00000")
    assert stored(tab) == block_text(explain_block(x, spec, index=1))
    assert stored(tab, "b") == block_text(explain_block(x, OperandSpec(format="nvfp4"), index=2, amax=5))
    tab.run("document.querySelector('[data-key=side-b]').click()")
    assert tab.run("document.querySelector('[data-shown]').dataset.shown") == "15"
    assert "differ" in tab.run("document.querySelector('[data-verdict]').textContent")


def centre(tab: Tab, selector: str) -> tuple[float, float, float]:
    """Return the middle of an element on the screen, and its height."""
    # Scrolling ends in the next frame, and what is pointed at is forgotten then.
    box = tab.run(
        f"(async () => {{ const node = document.querySelector('{selector}');"
        "node.scrollIntoView({ block: 'center' });"
        "for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame);"
        "const box = node.getBoundingClientRect();"
        "return [box.x + box.width / 2, box.y + box.height / 2, box.height]; })()"
    )
    return tuple(box)


def test_a_dragged_number_flips_the_scale(tab):
    x = np.full(32, 0.25, np.float32)
    x[4] = 1
    tab.show(explorer_link(x, "ocp"))
    before = stored(tab)
    across, middle, height = centre(tab, '#numbers .column[data-element="4"]')
    tab.mouse("mouseMoved", across, middle)
    tab.mouse("mousePressed", across, middle)
    scales = []
    for share in (0.1, 0.2, 0.3, 0.45):
        tab.mouse("mouseMoved", across, middle - share * height)
        scales.append(stored(tab)["scale"])
    tab.mouse("mouseReleased", across, middle - 0.45 * height)
    assert before["scale"] == "7d"
    assert scales[0] < scales[-1] == "7e"
    moved = words_of(tab)
    assert moved[4] > 2
    assert np.array_equal(np.delete(moved, 4), np.delete(x, 4))
    assert stored(tab) == block_text(explain_block(moved, "ocp"))


def test_pointing_at_an_element_shows_its_arithmetic(tab):
    tab.show(explorer_link(np.float32([7, -3.5, *[0.25] * 30]), "ocp"))
    across, middle, _ = centre(tab, '#elements .cell[data-element="1"]')
    tab.mouse("mouseMoved", across, middle)
    tip = tab.run("document.querySelector('#tip').textContent")
    assert tip.startswith(
        "1: x = -3.5; |x| / 2\u2070 = 3.5; halfway: to the even code; code 1110 = -4; value -4, error 0.5"
    )
    bar_dot_cell_byte_error = tab.run("document.querySelectorAll('.pointed').length")
    assert bar_dot_cell_byte_error == 5


def test_keys_reach_everything_and_change_numbers(tab):
    x = drawn()[30, :32]
    tab.show(explorer_link(x, "tseng", STREAM, pad=True) + "&b=amd")
    unreached = tab.run("""(() => {
      const controls = "a[href], button, input, select, textarea, summary, [tabindex]";
      window.stops = [...document.querySelectorAll(controls)].filter((node) => node.checkVisibility());
      window.reached = new Set();
      document.body.addEventListener("focusin", (event) => window.reached.add(event.target));
      return window.stops.length;
    })()""")
    for _ in range(unreached):
        tab.press("Tab")
    missed = tab.run("""stops.filter((node) => !reached.has(node)
        && !(node.type === "radio" && [...reached].some((other) => other.name === node.name))
        && !(node.tabIndex === -1 && [...node.parentElement.children].some((other) => reached.has(other))))
      .map((node) => node.outerHTML.slice(0, 120))""")
    assert not missed
    tab.run("document.querySelector('#numbers .column[tabindex=\"0\"]').focus()")
    tab.press("ArrowRight")
    tab.press("ArrowUp", shift=True)
    moved = words_of(tab)
    assert moved[1] == np.nextafter(x[1], np.float32(np.inf))
    assert tab.run("document.activeElement.dataset.element") == "1"


def paste(tab: Tab, text: str) -> str:
    """Type a text over all numbers and return what the page says about it."""
    tab.run(
        f"(() => {{ const area = document.querySelector('textarea'); area.focus(); area.value = {text!r};"
        "area.dispatchEvent(new Event('input', { bubbles: true })); })()"
    )
    return str(tab.run("document.querySelector('#numbers .wrong').textContent"))


def test_pasted_text_and_presets_are_taken(tab):
    tab.show(HOME)
    assert tab.run("document.querySelector('textarea').checkVisibility()"), "open without a click"
    assert paste(tab, "6.5, -3.5 0x3f800000 nan") == ""
    assert stored(tab) == {"scale": "ff", "codes": "00" * 16}
    assert "seven is no float32 number" in paste(tab, "6.5 seven")
    assert stored(tab)["scale"] == "ff"
    for preset in ("ties", "tiny", "outlier", "turn", "normal"):
        tab.run(f"document.querySelector('[data-preset={preset}]').click()")
        assert stored(tab) == block_text(explain_block(words_of(tab), "ocp")), preset
    for generator in ("normal", "laplace", "outlier"):
        tab.run(f"document.querySelector('[data-generator={generator}]').click()")
        assert stored(tab, "b") == block_text(explain_block(words_of(tab), "amd")), generator


def kernel_wrote(tab: Tab, scales: str, codes: str) -> str:
    """Paste bytes of a kernel and return what the page says of them."""
    for key, text in (("scales", scales), ("codes", codes)):
        tab.run(
            f"(() => {{ const area = document.querySelector('[data-key=kernel-{key}]'); area.value = {text!r};"
            "area.dispatchEvent(new Event('input', { bubbles: true })); })()"
        )
    return str(tab.run("document.querySelector('#kernel').textContent"))


def test_the_bytes_of_a_kernel_are_pasted_without_a_click(tab):
    x = np.random.default_rng(2).uniform(-3, 3, 32).astype(np.float32)
    x[7] = 6.5  # RCEIL takes the next power of two, EVEN does not
    tab.show(explorer_link(x, "amd"))
    assert tab.run("document.querySelector('[data-key=kernel-codes]').checkVisibility()")
    right, other = explain_block(x, "amd"), explain_block(x, "nvidia")
    scale, codes = f"{right.scale.byte:02x}", right.packed.hex(" ")
    assert "Equal to this treatment: the scale byte and 16 code bytes." in kernel_wrote(tab, scale, codes)
    text = kernel_wrote(tab, f"0x{other.scale.byte:02x}", other.packed.hex())
    assert "The first step that differs: 3, the scale byte" in text
    assert "All bytes of this block are those of scale_rule = ceil, scale_rule = rceil" in text
    tab.run("document.querySelector('[data-way=\"scale_rule=rceil\"]').click()")
    assert stored(tab, "b") == block_text(explain_block(x, "nvidia"))
    assert stored(tab, "k") == stored(tab, "b")
    assert "Equal to B" in tab.run("document.querySelector('[data-kernel]').textContent")
    assert "2 bytes of scales: a block of MXFP4 has 1." in kernel_wrote(tab, "7e 7f", codes)
    assert "zz is not made of bytes" in kernel_wrote(tab, "zz", codes)


NPY = """(async (files) => {
  const transfer = new DataTransfer();
  for (const [name, text] of files) {
    transfer.items.add(new File([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))], name));
  }
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
  await new Promise((done) => setTimeout(done, 400));
  return document.querySelector("#kernel").textContent;
})"""


def drop(tab: Tab, **arrays: np.ndarray) -> str:
    """Drop .npy files on the page and return what it says of them."""
    files = []
    for name, array in arrays.items():
        buffer = io.BytesIO()
        np.save(buffer, array)
        files.append([f"{name}.npy", base64.b64encode(buffer.getvalue()).decode()])
    return str(tab.run(f"{NPY}({json.dumps(files)})"))


def test_dropped_files_lead_to_the_first_block_that_differs(tab):
    x = drawn()
    x[3, 40] = 1
    q = mxref.quantize(x, "amd")
    tab.show(HOME + "#x=3f800000&a=amd")
    assert "x.npy [64, 128]: now drop the files of its codes and scales." in drop(tab, x=x)
    assert "all 256 blocks are equal." in drop(tab, codes=q.codes, scales=q.scales)
    codes = q.codes.copy()
    codes[20, 40] ^= 0x70
    codes[33, 5] ^= 1
    text = drop(tab, x=x, codes=codes, scales=q.scales)
    assert "2 of 256 blocks differ. Shown is block 2 of row 20." in text
    assert "4, elements on the grid" in text
    assert stored(tab, "k")["codes"] == codes[20, 32:48].tobytes().hex()
    assert stored(tab) == block_text(explain_block(x, "amd", index=20 * 4 + 2))
    tab.run("document.querySelector('[data-key=kernel-next]').click()")
    assert "Shown is block 0 of row 33." in tab.run("document.querySelector('#kernel').textContent")
    tab.run("document.querySelector('[data-key=dialect-nvidia]').click()")
    assert "blocks differ" in tab.run("document.querySelector('#kernel').textContent"), "counted anew"
    swapped = q.codes << 4 | q.codes >> 4
    tab.show(HOME + "#x=3f800000&a=amd")
    text = drop(tab, x=x, codes=swapped, scales=q.scales)
    assert "5, bytes in memory" in text
    assert "mxref layout high_first mxref converts it." in text
    assert "400 bytes; 256 blocks of MXFP4 have 256 bytes of scales and 4096 of codes" in drop(
        tab, s=q.codes.reshape(-1)[:400]
    )
    assert "holds <f8: the page reads float32" in drop(tab, x=x.astype(float))
    assert "is stored by columns" in drop(tab, x=np.asfortranarray(x))


@pytest.mark.parametrize("spec", SPECS[:4] + SPECS[-5:], ids=str)
def test_dropped_arrays_of_any_treatment_are_equal(tab, spec):
    x = drawn()
    q = mxref.quantize(x, spec, placement=mxref.Placement(STREAM))
    tab.show(explorer_link(x, spec, STREAM))
    assert f"all {q.scales.size} blocks are equal." in drop(tab, x=x, codes=q.codes, scales=q.scales)


def test_a_block_of_the_picture_comes_with_its_place(tab):
    tab.show(HOME + "#x=3f800000&a=ocp,rounding=sr&seed=9")
    tab.run("document.querySelector('.view').scrollIntoView({ block: 'center' })")
    box = tab.run(
        "(({ x, y, width, height }) => [x, y, width, height])(document.querySelector('.view').getBoundingClientRect())"
    )
    x, y = box[0] + box[2] * 0.6, box[1] + box[3] * 40.5 / 80
    tab.mouse("mousePressed", x, y)
    tab.mouse("mouseReleased", x, y)
    words = words_of(tab)
    row, block = 40, 2
    assert f"&at={row * 128 + block * 32}" in tab.run("location.hash")
    image = np.zeros((80, 128), np.float32)
    image[row, block * 32 : block * 32 + 32] = words
    spec = OperandSpec(rounding="sr")
    assert stored(tab) == block_text(explain_block(image, spec, Stream(9), index=row * 4 + block))


def test_a_block_of_the_picture_comes_with_the_amax_of_the_picture(tab):
    tab.show(HOME + "#x=3f800000&a=ocp,format=nvfp4")
    tab.run("document.querySelector('.view').focus()")
    tab.press("Enter")
    tab.run("new Promise((done) => setTimeout(done, 300))")
    amax = np.uint32(int(tab.run("location.hash").partition("&amax=")[2][:8], 16)).view(np.float32)
    assert 0.9 < amax <= 1
    block = words_of(tab)[:16]
    assert stored(tab) == block_text(explain_block(block, OperandSpec(format="nvfp4"), amax=float(amax)))


def test_an_address_that_means_nothing_is_said_to(tab):
    tab.show(HOME + "#x=12&a=ocp")
    assert "words of eight hexadecimal digits" in tab.run("document.querySelector('#problem').textContent")
    assert tab.run("document.querySelector('#problem').checkVisibility()")
    tab.run("location.hash = '#x=40e00000&a=amd'; new Promise((done) => setTimeout(done, 50))")
    assert not tab.run("document.querySelector('#problem').checkVisibility()")
    assert stored(tab)["scale"] == "80"


@pytest.mark.parametrize(("width", "dark"), SIZES_SHOWN)
def test_the_page_fits_and_is_readable(tab, width, dark):
    scheme = "dark" if dark else "light"
    x = drawn()[25, :32]
    for name, address in (
        ("first", HOME), ("rotated", explorer_link(x, "tseng", STREAM, pad=True) + "&b=nvidia,format=mxfp8_e4m3"),
        ("nan", explorer_link(drawn()[3, 32:64], "amd")),
        ("nvfp4", explorer_link(x[:16], OperandSpec(format="nvfp4"), amax=260 * float(np.abs(x).max()))),
        ("mxint8", explorer_link(x, OperandSpec(format="mxint8")) + "&b=ocp,format=nvfp4"),
    ):  # fmt: skip
        tab.show(address, width, 900, dark)
        if width == 390:
            tab.run("document.querySelector('#panel').open = true")
        tab.run("document.querySelector('[data-key=kernel-example]').click()")
        tab.screenshot(SHOTS / f"{name}-{width}-{scheme}.png")
        assert tab.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert tab.run("getComputedStyle(document.body).backgroundColor") == (
            "rgb(18, 21, 26)" if dark else "rgb(246, 247, 249)"
        )
        assert tab.run(CONTRAST) == []


def test_the_page_is_there_within_a_second_and_loads_only_its_own_files(tab):
    tab.requests.clear()
    tab.show(HOME)
    assert tab.run("performance.getEntriesByName('ready')[0].startTime") < 1000
    own = {path.as_uri() for path in EXPLORER.iterdir()} | {"data:,", "about:blank"}
    assert set(tab.requests) <= own
    assert len(tab.requests) > 10
