"""The page's modules in few files, see kohya_like/packing.py: what they do together, each run once, and what cannot be packed."""

from __future__ import annotations

import json
import re

import pytest

from kohya_like import page as pages
from kohya_like.packing import packed

MODULES = {
    "main.js": """import * as words from "./common/words.js";
import table from "./table.js";
import {
  sum,
  Count as Counter,
} from "./common/sums.js";
ran("main");
export const later = async () => (await import("./later/room.js")).room();
export function all() { return [words.hello(), table.size, sum(2, 3), new Counter().up()]; }
""",
    "table.js": """import { sum } from "./common/sums.js";
ran("table");
export default made({ size: sum(1, 1) });
function made(given) { return given; }
""",
    "common/words.js": """ran("words");
const waited = await new Promise((done) => setTimeout(() => done("hello"), 5));
export const hello = () => waited;
export const here = import.meta.url;
""",
    "common/sums.js": """ran("sums");
const private_ = 1;
export function sum(a, b) { return a + b; }
export class Count { up() { return private_; } }
""",
    "later/room.js": """import { sum } from "../common/sums.js";
import { hello, here } from "../common/words.js";
import { wall } from "./wall.js";
ran("room");
export async function room() { return [sum(4, 4), hello(), wall, here]; }
""",
    "later/wall.js": """const private_ = "wall";
const wall = private_;
ran("wall");
export { wall };
""",
}
RUN = """async (files) => {
  const order = globalThis.order = [];
  globalThis.ran = (name) => order.push(name);
  const addresses = {};
  for (const [name, text] of Object.entries(files).reverse()) {
    const placed = Object.entries(addresses).reduce((all, [other, address]) => all.replaceAll(`"/x/${other}"`, `"${address}"`), text);
    addresses[name] = URL.createObjectURL(new Blob([placed], { type: "text/javascript" }));
  }
  const main = await import(addresses["main.js"]);
  const alone = await import(addresses["later/wall.js"]);
  return JSON.stringify([main.all(), await main.later(), alone.wall, (await import(addresses["table.js"])).default.size, order]); }"""


def test_packed_modules_do_what_they_did_and_each_is_run_once(browser):
    files = {name: packed(MODULES, name, "/x/") for name in ("main.js", "later/room.js", "later/wall.js", "table.js")}
    context = browser.new_context()
    own, later, wall, size, order = json.loads(context.new_page().evaluate(RUN, files))
    context.close()
    assert own == ["hello", 2, 5, 1] and wall == "wall" and size == 2
    assert later == [8, "hello", "wall", "null/x/common/words.js"]  # a page without an address has the origin "null"
    assert sorted(order) == sorted(["words", "sums", "table", "main", "wall", "room"])
    assert order.index("sums") < order.index("table") < order.index("main") < order.index("wall") < order.index("room")


@pytest.mark.parametrize(
    "statement",
    ["export let shown = 1;", "export * from './other.js';", "import './other.js';", "export default function () {}\nexport var x = 1;"],
)
def test_another_form_of_a_statement_is_refused(statement):
    with pytest.raises(ValueError, match=r"^main\.js: packing\.py does not read "):
        packed({"main.js": f"const x = 1;\n{statement}\n"}, "main.js", "/x/")


def test_the_first_view_asks_for_three_files_and_a_tab_for_one(visit, studio):
    view = visit(studio.url, cold=True)
    ours = "performance.getEntriesByType('resource').map(({ name }) => name).filter((name) => name.includes('/kl/web/'))"
    place = pages.folder()

    def asked() -> list[str]:
        return sorted(re.sub(rf".*{place}", "", address) for address in view.page.evaluate(ours))

    first = sorted(("main.js", *pages.FIRST_LIBRARIES))
    assert asked() == first
    view.page.get_by_role("tab", name="Data", exact=True).click()
    view.page.locator("#kl-data .kl-part > *").first.wait_for()
    assert asked() == sorted([*first, "data/data.js"])
