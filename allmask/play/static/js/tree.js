// Beams as a tree: a column is a step, a line is as strong as its token is likely.

import { post } from "./api.js";
import { h, percent, put, s, $ } from "./dom.js";
import { t } from "./i18n.js";
import { onChange } from "./state.js";

const COLUMN = 92;
const ROW = 34;
let found = null;

export function startTree() {
  $("beam-go").addEventListener("click", search);
  onChange((changed) => changed.has("language") && found && show());
}

async function search() {
  $("beam-go").disabled = true;
  put($("tree"), h("p", { class: "hint" }, t("computing")));
  try {
    found = await post("beams", { source: $("write-text").value, beams: +$("beam-count").value });
    show();
  } catch (error) {
    put($("tree"), h("p", { class: "problem" }, `${error.message}. ${error.hint}`));
  } finally {
    $("beam-go").disabled = false;
  }
}

/** Give each leaf a row; a node stands at the height of its first child, and the best path runs along the top. */
function layOut(nodes) {
  const rank = { best: 0, finished: 1, dropped: 2 };
  const children = nodes.map(() => []);
  nodes.forEach((node) => node.parent != null && children[node.parent].push(node));
  let row = 0;
  const place = (node) => {
    const below = children[node.id].sort((a, b) => rank[a.fate] - rank[b.fate] || b.log_probability - a.log_probability);
    if (!below.length) node.row = row++;
    else {
      below.forEach(place);
      node.row = below[0].row;
    }
  };
  place(nodes[0]);
  return row;
}

function show() {
  const { nodes, texts } = found;
  const rows = layOut(nodes);
  const depth = Math.max(...nodes.map((node) => node.depth));
  const x = (node) => 14 + node.depth * COLUMN;
  const y = (node) => 20 + node.row * ROW;
  const lines = nodes.slice(1).map((node) => {
    const from = nodes[node.parent];
    const middle = x(from) + 24;
    const line = `M ${x(from) + 4} ${y(from)} C ${middle} ${y(from)}, ${middle - 16} ${y(node)}, ${x(node) - 26} ${y(node)}`;
    return s("path", { d: line, class: node.fate, "stroke-width": 1 + 3 * node.probability });
  });
  const names = nodes.slice(1).map((node) =>
    s("g", { class: `node ${node.fate}`, transform: `translate(${x(node)}, ${y(node)})` },
      s("text", { "text-anchor": "middle", y: 1 }, node.end && node.token.startsWith("[") ? "∎" : node.token),
      s("text", { "text-anchor": "middle", y: 14, class: "small" }, percent(node.probability)),
    ),
  );
  const label = t("treeLabel", { count: nodes.length - 1, text: texts[0]?.text ?? "" });
  const svg = s("svg", { width: 60 + depth * COLUMN, height: 30 + rows * ROW, role: "img", "aria-label": label }, lines, names);
  const list = h("ol", { class: "title-list" }, texts.map((one) => h("li", {}, h("span", {}, one.text || t("nothing")), h("small", {}, t("score", { score: one.score })))));
  put($("tree"), svg, list);
}
