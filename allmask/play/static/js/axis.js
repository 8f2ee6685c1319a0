// The order axis: time runs to the right, documents stand below each other. Tokens are dragged, or moved by arrow keys.

import { h, put, s, $ } from "./dom.js";
import { t } from "./i18n.js";
import { renumbered } from "./mask.js";
import { change, onChange, state } from "./state.js";

const axis = $("axis");
const MOST_DOCUMENTS = 4;
let chips = [];
let drag = null;

export function startAxis() {
  axis.addEventListener("pointerdown", grab);
  axis.addEventListener("pointermove", move);
  axis.addEventListener("pointerup", drop);
  axis.addEventListener("pointercancel", () => release());
  axis.addEventListener("keydown", onKey);
  new ResizeObserver(drawPath).observe(axis);
  onChange((changed) => {
    if (["tokens", "order", "group", "language"].some((name) => changed.has(name))) build();
    drawPath();
  });
}

function build() {
  const before = new Map(chips.map((chip) => [+chip.dataset.i, chip.getBoundingClientRect()]));
  const focused = chips.indexOf(document.activeElement);
  const { tokens, order, group } = state;
  if (order.length !== tokens.length) return;
  const times = [...new Set(order)].sort((a, b) => a - b);
  const documents = [...new Set(group)].sort((a, b) => a - b);
  chips = tokens.map((token, i) =>
    h("button", {
      class: `chip${state.isTarget[i] ? " target" : ""}${state.special[i] ? " special" : ""}`, "data-i": i,
      "aria-label": t("chipLabel", { token, position: i, time: times.indexOf(order[i]), document: documents.indexOf(group[i]) + 1 }),
    }, token),
  );
  const rows = documents.map((document, row) => {
    const zones = [];
    times.forEach((time, column) => {
      zones.push(h("div", { class: "gap", "data-time": time - 0.5, "data-document": document }));
      const here = chips.filter((_, i) => order[i] === time && group[i] === document);
      zones.push(h("div", { class: "zone", "data-time": time, "data-document": document, "data-label": row ? "" : column }, here));
    });
    zones.push(h("div", { class: "gap", "data-time": times.at(-1) + 0.5, "data-document": document }));
    return h("div", { class: "line" }, documents.length > 1 ? h("span", { class: "line-name" }, t("document", { document: row + 1 })) : null, zones);
  });
  if (documents.length < MOST_DOCUMENTS) {
    rows.push(h("div", { class: "line new", "data-document": Math.max(...documents) + 1 }, t("newDocument")));
  }
  put(axis, rows, s("svg", { class: "arrows", "aria-hidden": "true" }));
  glide(before);
  if (focused >= 0) chips[focused]?.focus({ preventScroll: true });
}

/** Let chips glide from where they were: one sees what moved. */
function glide(before) {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  for (const chip of chips) {
    const old = before.get(+chip.dataset.i);
    if (!old) continue;
    const now = chip.getBoundingClientRect();
    const [x, y] = [old.left - now.left, old.top - now.top];
    if (x || y) chip.animate([{ transform: `translate(${x}px, ${y}px)` }, { transform: "none" }], { duration: 260, easing: "ease-out" });
  }
}

/** Put a token at a time and into a document; a half number stands between two times. */
function place(i, time, document) {
  const order = [...state.order];
  const group = [...state.group];
  order[i] = time;
  group[i] = document;
  const documents = [...new Set(group)].sort((a, b) => a - b);
  const next = { order: renumbered(order), group: group.map((one) => documents.indexOf(one)) };
  if (String(next.order) === String(state.order) && String(next.group) === String(state.group)) return;
  change({ ...next, kind: "custom", edits: [], path: null });
}

// ---- pointer ----------------------------------------------------------------------------------------------------

function grab(event) {
  const chip = event.target.closest(".chip");
  if (!chip || event.button) return;
  drag = { chip, x: event.clientX, y: event.clientY, moved: false, over: null };
  axis.setPointerCapture(event.pointerId);
  chip.focus({ preventScroll: true });
}

function move(event) {
  if (!drag) return;
  const [x, y] = [event.clientX - drag.x, event.clientY - drag.y];
  if (!drag.moved && Math.hypot(x, y) < 5) return;
  drag.moved = true;
  axis.classList.add("dragging");
  drag.chip.classList.add("held");
  drag.chip.style.transform = `translate(${x}px, ${y}px)`;
  const under = document.elementsFromPoint(event.clientX, event.clientY).find((element) => element.dataset?.document && element !== drag.chip);
  if (under !== drag.over) {
    drag.over?.classList.remove("over");
    under?.classList.add("over");
    drag.over = under;
  }
}

function drop() {
  if (!drag) return;
  const { chip, over, moved } = drag;
  release();
  if (!moved || !over) return;
  const i = +chip.dataset.i;
  place(i, over.dataset.time === undefined ? state.order[i] : +over.dataset.time, +over.dataset.document);
}

function release() {
  drag?.chip.classList.remove("held");
  drag?.chip.style.removeProperty("transform");
  drag?.over?.classList.remove("over");
  axis.classList.remove("dragging");
  drag = null;
}

// ---- keyboard ---------------------------------------------------------------------------------------------------

function onKey(event) {
  const chip = event.target.closest(".chip");
  const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (!chip || !way) return;
  event.preventDefault();
  const i = +chip.dataset.i;
  const { order, group } = state;
  const shared = order.some((time, j) => j !== i && time === order[i]);
  const time = order[i] + way[0] * (shared ? 0.5 : 1); // leave the others of this time, or join those of the next
  const documents = new Set(group).size;
  const document = Math.max(0, Math.min(group[i] + way[1], documents, MOST_DOCUMENTS - 1));
  place(i, time, document);
}

// ---- the path of a leak -------------------------------------------------------------------------------------------

/** Arrows from what is read to who reads it, over the chips. */
function drawPath() {
  const svg = axis.querySelector(".arrows");
  if (!svg) return;
  const onPath = new Set(state.path ?? []);
  chips.forEach((chip, i) => chip.classList.toggle("on-path", onPath.has(i)));
  if (!state.path || state.path.some((i) => !chips[i])) return put(svg);
  const frame = axis.getBoundingClientRect();
  svg.setAttribute("width", axis.scrollWidth);
  svg.setAttribute("height", axis.scrollHeight);
  const middle = (i) => {
    const box = chips[i].getBoundingClientRect();
    return [box.left + box.width / 2 - frame.left + axis.scrollLeft, box.top - frame.top + axis.scrollTop, box.bottom - frame.top + axis.scrollTop];
  };
  put(svg, state.path.slice(1).map((key, n) => {
    const [x1, top1] = middle(key);
    const [x2, top2] = middle(state.path[n]);
    const high = Math.max(4, Math.min(top1, top2) - 18);
    const line = `M ${x1} ${top1} C ${x1} ${high}, ${x2} ${high}, ${x2} ${top2}`;
    const side = Math.sign(x2 - x1) || 1;
    const tip = `M ${x2 - 5} ${top2 - 7} L ${x2} ${top2} L ${x2 + 5} ${top2 - 7}`;
    return s("g", { class: `arrow side${side}` }, s("path", { d: line, pathLength: 1 }), s("path", { d: tip, class: "tip" }));
  }));
}
