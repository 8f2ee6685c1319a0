// Beams as a tree: a column is a step, a line is as strong as its token is likely.

import { post } from "./api.js";
import { h, percent, put, s, $ } from "./dom.js";
import { explained, t } from "./i18n.js";
import { onChange } from "./state.js";

const COLUMN = 96;
const ROW = 40;
const HALF = 36; // half of the width of a token
let trees = []; // { kind, nodes, texts }

export function startTree() {
  $("beam-go").addEventListener("click", search);
  onChange((changed) => changed.has("language") && trees.length && show());
}

async function search() {
  $("beam-go").disabled = true;
  put($("tree"), h("p", { class: "hint" }, t("computing")));
  try {
    const asked = { source: $("write-text").value, beams: +$("beam-count").value };
    const kinds = $("write-both").checked ? ["prefix", "naive"] : ["prefix"];
    trees = [];
    for (const kind of kinds) trees.push({ kind, ...(await post("beams", { ...asked, kind })) });
    show();
  } catch (error) {
    put($("tree"), h("p", { class: "problem" }, explained(error)));
  } finally {
    $("beam-go").disabled = false;
  }
}

/** Give each node a row. A chain stays in its row; a branch takes the first row below that is free for its length. */
function layOut(nodes) {
  const rank = { best: 0, finished: 1, dropped: 2 };
  const children = nodes.map(() => []);
  nodes.forEach((node) => node.parent != null && children[node.parent].push(node));
  const taken = []; // for each row, the columns in use
  const chains = [[nodes[0]]];
  while (chains.length) {
    const [first] = chains.shift();
    const chain = [first];
    const branches = [];
    for (let node = first; node; ) {
      const below = children[node.id].sort((a, b) => rank[a.fate] - rank[b.fate] || b.log_probability - a.log_probability);
      branches.push(...below.slice(1).map((child) => [child]));
      node = below[0];
      if (node) chain.push(node);
    }
    const columns = chain.map((node) => node.depth);
    if (first.parent != null) columns.push(first.depth - 1); // room for the line that leads here
    let row = first.parent == null ? 0 : nodes[first.parent].row + 1;
    while (columns.some((column) => taken[row]?.has(column))) row++;
    taken[row] = new Set([...(taken[row] ?? []), ...columns]);
    chain.forEach((node) => (node.row = row));
    chains.push(...branches);
  }
  return taken.length;
}

const shortened = (token) => (token.length > 10 ? `${token.slice(0, 9)}…` : token);

function show() {
  put($("tree"), trees.map(drawn));
}

function drawn({ kind, nodes, texts }) {
  const rows = layOut(nodes);
  const depth = Math.max(...nodes.map((node) => node.depth));
  const x = (node) => 14 + node.depth * COLUMN;
  const y = (node) => 20 + node.row * ROW;
  const lines = nodes.slice(1).map((node) => {
    const from = nodes[node.parent];
    const [start, end] = [x(from) + (from.depth ? HALF : 4), x(node) - HALF];
    const middle = (start + end) / 2;
    const line = `M ${start} ${y(from)} C ${middle} ${y(from)}, ${start} ${y(node)}, ${end} ${y(node)}`;
    return s("path", { d: line, class: node.fate, "stroke-width": 1 + 3 * node.probability });
  });
  const names = nodes.slice(1).map((node) =>
    s("g", { class: `node ${node.fate}`, transform: `translate(${x(node)}, ${y(node)})` },
      s("rect", { x: -HALF, y: -13, width: 2 * HALF, height: 30, rx: 6 }),
      s("text", { "text-anchor": "middle", y: 1 }, node.end && node.token.startsWith("[") ? "∎" : shortened(node.token)),
      s("text", { "text-anchor": "middle", y: 14, class: "small" }, percent(node.probability)),
    ),
  );
  const label = t("treeLabel", { count: nodes.length - 1, text: texts[0]?.text ?? "" });
  const svg = s("svg", { width: 60 + depth * COLUMN, height: 30 + rows * ROW, role: "img", "aria-label": label }, lines, names);
  const list = h("ol", { class: "title-list" }, texts.map((one) => h("li", {}, h("span", {}, one.text || t("nothing")), h("small", {}, t("score", { score: one.score })))));
  const frame = { class: "scroll", tabindex: 0, role: "region", "aria-label": `${t("beams")}, ${t(`lane.${kind}`)}` };
  return [h("h3", {}, t(`lane.${kind}`)), h("div", frame, svg), list];
}
