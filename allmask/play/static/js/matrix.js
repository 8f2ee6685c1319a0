// The matrix: rows read columns. One grid; a lens says what its cells show.

import { h, put, $ } from "./dom.js";
import { t } from "./i18n.js";
import { promised } from "./mask.js";
import { influence, pathBetween } from "./prover.js";
import { change, nameOf, onChange, state } from "./state.js";
import { proof } from "./verdicts.js";
import { attentionAt, measured } from "./lens.js";

const grid = $("matrix");
const WIDE = /[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]/; // such characters stand upright above a column
let cells = []; // [row][column]
let heads = { rows: [], columns: [] };

export function startMatrix() {
  grid.addEventListener("click", (event) => {
    const cell = event.target.closest("[role=gridcell]");
    if (cell) toggle(+cell.dataset.q, +cell.dataset.k);
  });
  grid.addEventListener("keydown", onKey);
  grid.addEventListener("focusin", (event) => show(event.target));
  grid.addEventListener("pointerover", (event) => show(event.target));
  grid.addEventListener("pointerleave", () => point());
  new ResizeObserver(fit).observe($("matrix-scroll"));
  onChange((changed) => {
    if (changed.has("tokens")) build();
    update();
  });
}

function build() {
  const focused = document.activeElement?.closest?.("#matrix") ? document.activeElement : null;
  heads = {
    columns: state.tokens.map((token, k) => h("div", { role: "columnheader", class: look(k, "top") + (WIDE.test(token) ? " upright" : ""), title: token }, h("span", {}, token))),
    rows: state.tokens.map((token, q) => h("div", { role: "rowheader", class: look(q, "left"), title: token }, token)),
  };
  cells = state.tokens.map((_, q) =>
    state.tokens.map((_, k) => h("div", { role: "gridcell", tabindex: q + k === 0 ? 0 : -1, "data-q": q, "data-k": k })),
  );
  put(
    grid,
    h("div", { role: "row", class: "row" }, h("div", { role: "columnheader", class: "corner" }, h("span", { class: "hidden" }, t("matrix"))), heads.columns),
    cells.map((row, q) => h("div", { role: "row", class: "row" }, heads.rows[q], row)),
  );
  grid.style.setProperty("--tokens", state.tokens.length);
  fit();
  if (focused) cells[Math.min(+focused.dataset.q, cells.length - 1)]?.[0]?.focus();
}

const look = (i, side) => `head ${side}${state.isTarget[i] ? " target" : ""}${state.special[i] ? " special" : ""}`;

/** Cells as large as there is room, but never too small for a finger. */
function fit() {
  const room = $("matrix-scroll").clientWidth - 88;
  grid.style.setProperty("--cell", `${Math.max(24, Math.min(44, Math.floor(room / Math.max(1, state.tokens.length))))}px`);
}

function toggle(q, k) {
  const cell = `${q},${k}`;
  const edits = state.edits.includes(cell) ? state.edits.filter((other) => other !== cell) : [...state.edits, cell];
  change({ edits, path: null });
  lightLeak(q, k);
}

/** After a click that breaks the order: light up a chain of two or more reads that leaks, if there is one. */
function lightLeak(q, k) {
  const { visible } = proof;
  const allowed = influence(promised(state));
  if (!visible[q][k] || allowed[q][k]) return; // nothing new is read, or nothing that was forbidden
  const chains = [];
  for (const [reader, key] of proof.leaks.shifted) chains.push(pathBetween(visible, reader, key));
  visible.forEach((row, reader) => {
    if (row[q] && !row[k] && reader !== q && !allowed[reader][k]) chains.push([reader, q, k]); // over the new cell
    if (visible[k][reader] && !visible[q][reader] && !allowed[q][reader]) chains.push([q, k, reader]);
  });
  const within = chains.filter((path) => path && path.length - 1 <= (state.layers ?? Infinity));
  const crosses = (path) => path.some((at, i) => at === q && path[i + 1] === k);
  const best = within.filter(crosses).sort((a, b) => Number(a.length < 3) - Number(b.length < 3) || a.length - b.length)[0];
  if (best) change({ path: best });
}

function onKey(event) {
  const cell = event.target.closest("[role=gridcell]");
  if (!cell) return;
  const [q, k] = [+cell.dataset.q, +cell.dataset.k];
  const last = cells.length - 1;
  const moves = {
    ArrowUp: [q - 1, k], ArrowDown: [q + 1, k], ArrowLeft: [q, k - 1], ArrowRight: [q, k + 1],
    Home: [q, 0], End: [q, last], PageUp: [0, k], PageDown: [last, k],
  };
  if (event.key === " " || event.key === "Enter") toggle(q, k);
  else if (moves[event.key]) {
    const next = cells[moves[event.key][0]]?.[moves[event.key][1]];
    if (next) {
      cell.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    }
  } else return;
  event.preventDefault();
}

/** Point at the row and the column of a cell; through the lens of reach, light up the chain of reads. */
function show(element) {
  const cell = element.closest("[role=gridcell]");
  if (!cell) return;
  const [q, k] = [+cell.dataset.q, +cell.dataset.k];
  point(q, k);
  if (state.lens === "reach" && q !== k && proof.influence[q][k] && !proof.visible[q][k]) {
    change({ path: pathBetween(proof.visible, q, k) });
  }
}

function point(q, k) {
  heads.rows.forEach((head, i) => head.classList.toggle("pointed", i === q));
  heads.columns.forEach((head, i) => head.classList.toggle("pointed", i === k));
}

/** Show what the lens shows. */
function update() {
  if (!cells.length || cells.length !== state.order.length) return;
  const allowed = influence(promised(state), state.layers);
  const steps = new Map((state.path ?? []).slice(1).map((key, i) => [`${state.path[i]},${key}`, state.path.length - 1 - i]));
  const found = state.lens === "measured" ? measured() : null;
  grid.dataset.lens = state.lens;
  cells.forEach((row, q) =>
    row.forEach((cell, k) => {
      const { kind, label, weight } = shown(q, k, allowed, found);
      const edited = state.edits.includes(`${q},${k}`);
      const step = steps.get(`${q},${k}`);
      cell.className = `${kind}${edited ? " edited" : ""}${step ? " path" : ""}${state.isTarget[k] ? " target" : ""}`;
      cell.textContent = step ?? "";
      if (weight == null) cell.style.removeProperty("--weight");
      else cell.style.setProperty("--weight", `${Math.round(Math.sqrt(weight) * 100)}%`);
      cell.setAttribute("aria-label", label + (edited ? `, ${t("clicked")}` : ""));
      cell.title = label;
    }),
  );
  const onPath = new Set(state.path ?? []);
  [...heads.rows, ...heads.columns].forEach((head, i) => head.classList.toggle("on-path", onPath.has(i % state.tokens.length)));
}

/** What a cell is through the present lens: a class, words, and a weight from 0 to 1 if it is shaded. */
function shown(q, k, allowed, found) {
  const names = { row: nameOf(q), column: nameOf(k), layers: state.layers ?? t("any") };
  const may = proof.visible[q][k];
  if (state.lens === "attention") {
    const weight = attentionAt(q, k);
    if (!may || weight == null) return { kind: may ? "no" : "forbidden", label: t("cellNo", names) };
    return { kind: "weight", weight, label: t("cellWeight", { ...names, weight: weight.toFixed(3) }) };
  }
  if (state.lens === "measured" && found) {
    const [depends, should] = [found.depends[q]?.[k], found.promised[q]?.[k]];
    if (depends && !should) return { kind: "leak", label: t("cellLeak", names) };
    if (!depends && should) return { kind: "blind", label: t("cellFree", names) };
    return depends ? { kind: "yes", label: t("cellReach", { ...names, layers: found.layers }) } : { kind: "no", label: t("cellFree", names) };
  }
  if (state.lens === "reach") {
    const reaches = proof.influence[q][k];
    if (!reaches) return { kind: "no", label: t("cellFree", names) };
    if (!allowed[q][k]) return { kind: may ? "leak" : "leak far", label: t("cellLeak", names) };
    return { kind: may || q === k ? "yes" : "yes far", label: t("cellReach", names) };
  }
  return may ? { kind: "yes", label: t("cellYes", names) } : { kind: "no", label: t("cellNo", names) };
}
