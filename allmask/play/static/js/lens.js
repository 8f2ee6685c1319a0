// Two lenses that need the model: attention by layer and head, and measured influence.

import { latest } from "./api.js";
import { debounced, h, put, roving, $ } from "./dom.js";
import { explained, layersText, t } from "./i18n.js";
import { boardRequest, change, onChange, state } from "./state.js";

let attention = null; // { layers, heads, tokens, bytes } of the present board
let audit = null; // { layers, depends, promised } of the present board
let busy = false;

const BOARD = ["tokens", "order", "group", "window", "edits", "model"];
const askAttention = latest("attention");
const askAudit = latest("audit");

export function startLenses() {
  onChange((changed) => {
    const moved = BOARD.some((name) => changed.has(name));
    if (moved) {
      attention = audit = null;
    }
    if ((moved || changed.has("lens")) && state.order.length) fetchSoon();
    if (moved || ["lens", "layer", "head", "layers", "language", "theme"].some((name) => changed.has(name))) show();
  });
}

/** The weight of a cell in the chosen layer and head, or in the mean; null if it is not known yet. */
export function attentionAt(q, k) {
  if (!attention) return null;
  const { layers, heads, tokens, bytes } = attention;
  const each = (chosen, count) => (chosen == null ? [...Array(count).keys()] : [Math.min(chosen, count - 1)]);
  let sum = 0;
  let count = 0;
  for (const layer of each(state.layer, layers)) {
    for (const head of each(state.head, heads)) {
      sum += (bytes[((layer * heads + head) * tokens + q) * tokens + k] / 255) ** 2;
      count += 1;
    }
  }
  return sum / count;
}

/** The measured and the promised influence; null if not known yet. */
export const measured = () => audit;

const fetchSoon = debounced(async () => {
  if (!state.model || !["attention", "measured"].includes(state.lens)) return;
  if (state.lens === "attention" ? attention : audit) return;
  busy = true;
  show();
  try {
    if (state.lens === "attention") {
      const found = await askAttention(boardRequest());
      if (!found) return;
      attention = { ...found, bytes: Uint8Array.from(atob(found.weights), (letter) => letter.charCodeAt(0)) };
    } else {
      const found = await askAudit(boardRequest());
      if (!found) return;
      audit = found;
    }
    busy = false;
    change({ lens: state.lens });
  } catch (error) {
    busy = false;
    $("lens-help").textContent = explained(error);
  }
}, 200);

function show() {
  const model = state.model?.name ?? "";
  const values = { layers: layersText(state.layers), model, where: whereText() };
  if (state.lens === "measured") values.layers = state.model?.layers ?? "";
  const help = [t(`lensHelp.${state.lens}`, values)];
  if (["attention", "measured"].includes(state.lens) && !state.model) help.splice(0, 1, t("noModel"));
  else if (busy) help.push(t(state.lens === "measured" ? "measuring" : "computing"));
  else if (state.lens === "measured" && audit) help.push(auditText());
  $("lens-help").textContent = help.join(" ");
  $("lens-help").classList.toggle("bad", state.lens === "measured" && !!audit && !busy && leaks() > 0);
  showUnder();
}

const count = (test) => audit.depends.flatMap((row, q) => row.filter((cell, k) => test(cell, audit.promised[q][k]))).length;
const leaks = () => count((depends, promised) => depends && !promised);

function auditText() {
  const blind = count((depends, promised) => !depends && promised);
  if (!leaks() && !blind) {
    const pairs = count((depends) => depends);
    return t("measuredHolds", { count: pairs, others: audit.depends.length ** 2 - pairs });
  }
  return [leaks() ? t("measuredLeaks", { count: leaks() }) : "", blind ? t("measuredBlind", { count: blind }) : ""].join(" ").trim();
}

function whereText() {
  if (state.layer == null && state.head == null) return t("meanAll");
  const name = (value) => (value == null ? t("mean") : value);
  return t("layerHead", { layer: name(state.layer), head: name(state.head) });
}

// ---- below the matrix ----------------------------------------------------------------------------------------------------

function showUnder() {
  const panel = $("under");
  const found = { attention, measured: audit }[state.lens];
  panel.hidden = !found;
  if (!found) return put(panel);
  if (state.lens === "measured") return put(panel, promisedAndMeasured());
  const { layers, heads } = attention;
  const buttons = [];
  for (let layer = 0; layer < layers; layer++) {
    for (let head = 0; head < heads; head++) buttons.push(thumbnail(layer, head));
  }
  buttons[chosen(heads)].tabIndex = 0;
  const mean = h("button", { class: "quiet", "aria-pressed": String(state.layer == null), onclick: () => change({ layer: null, head: null }) }, t("meanAll"));
  const grid = h("div", { class: "head-grid", role: "group", "aria-label": t("allHeads"), style: { "--heads": heads }, onkeydown: (event) => roving(event, buttons, heads) }, buttons);
  const focused = panel.contains(document.activeElement);
  put(panel, h("div", { class: "heading" }, h("h3", {}, t("allHeads")), mean), h("div", { class: "scroll" }, grid));
  if (focused) buttons[chosen(heads)].focus({ preventScroll: true });
}

const chosen = (heads) => (state.layer == null ? 0 : state.layer * heads + state.head);

/** A picture with one pixel for each cell; `colour(q, k)` is the name of a colour of the page, and how strong it is. */
function pixels(tokens, colour) {
  const canvas = h("canvas", { width: tokens, height: tokens, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const named = Object.fromEntries(["--accent", "--bad"].map((name) => [name, style.getPropertyValue(name).trim()]));
  for (let q = 0; q < tokens; q++) {
    for (let k = 0; k < tokens; k++) {
      const [name, strength] = colour(q, k);
      context.globalAlpha = strength;
      context.fillStyle = named[name];
      context.fillRect(k, q, 1, 1);
    }
  }
  return canvas;
}

/** Two small pictures side by side: what the order promises, and what was measured, with differences in red. */
function promisedAndMeasured() {
  const { depends, promised } = audit;
  const tokens = depends.length;
  const picture = (colour, words) => h("figure", {}, pixels(tokens, colour), h("figcaption", {}, t(words)));
  const differs = (q, k) => depends[q][k] !== promised[q][k];
  return h("div", { class: "pair" },
    picture((q, k) => ["--accent", promised[q][k]], "promisedPicture"),
    picture((q, k) => (differs(q, k) ? ["--bad", 1] : ["--accent", depends[q][k]]), "measuredPicture"),
  );
}

/** A small picture of one head; pressing it shows that head over the board. */
function thumbnail(layer, head) {
  const { heads, tokens, bytes } = attention;
  const start = (layer * heads + head) * tokens * tokens;
  const canvas = pixels(tokens, (q, k) => ["--accent", bytes[start + q * tokens + k] / 255]);
  const pressed = state.layer === layer && state.head === head;
  const label = t("layerHead", { layer, head });
  return h("button", { class: "thumbnail", tabindex: -1, "aria-pressed": String(pressed), "aria-label": label, title: label, onclick: () => change({ layer, head }) }, canvas);
}
