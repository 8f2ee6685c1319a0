// The verdicts: proven here at once, and again by the prover in Python, which has the last word.

import { latest } from "./api.js";
import { debounced, h, put, $ } from "./dom.js";
import { explained, layersText, t } from "./i18n.js";
import { promised } from "./mask.js";
import { influence, pathBetween, prove } from "./prover.js";
import { boardRequest, change, nameOf, onChange, scored, state } from "./state.js";

const SHOWN = 6;
export let proof = null; // of the present board

const MASK = ["tokens", "order", "group", "window", "edits", "layers"];

export function startVerdicts() {
  onChange((changed) => {
    if (state.order.length !== state.tokens.length || !state.tokens.length) return;
    if (MASK.some((name) => changed.has(name))) {
      proof = prove(state, state.layers, scored());
      askProver();
    }
    if (proof) show();
  });
}

function show() {
  const items = [orderVerdict(), reachVerdict(), shiftedVerdict(), cacheVerdict()];
  if (!proof.is_order) items.push(streamVerdict());
  if (proof.empty_rows.length) items.push(item("v.empty", "bad", t("emptyRows", { tokens: list(proof.empty_rows.map(nameOf)) })));
  put($("verdicts"), items, pathCard());
}

function item(key, mood, ...words) {
  const sign = { good: "✓", bad: "✕", plain: "·" }[mood];
  return h("div", { class: `verdict ${mood}` }, h("span", { class: "sign", "aria-hidden": "true" }, sign), h("div", {}, h("h3", {}, t(key)), h("p", {}, words)));
}

function list(names, between = ", ") {
  const rest = names.length - SHOWN;
  return names.slice(0, SHOWN).join(between) + (rest > 0 ? ` ${t("more", { count: rest })}` : "");
}

function why() {
  const [a, b, c] = proof.witness.positions.map(nameOf);
  return t(`why.${proof.witness.kind}`, { a, b, c });
}

/** Whether something reaches a token that the order, through any number of layers, would hide from it. */
function against() {
  const allowed = influence(promised({ ...state, window: null }));
  return proof.influence.flatMap((row, q) => row.map((cell, k) => cell && !allowed[q][k])).filter(Boolean).length;
}

function orderVerdict() {
  if (proof.is_order) return item("v.order", "good", t("orderYes"));
  if (!state.edits.length) return item("v.order", "plain", t("orderWindow", { why: why() }));
  return item("v.order", "bad", t("orderNo", { why: why() }));
}

function reachVerdict() {
  const direct = influence(proof.visible, 1);
  const more = proof.influence.flatMap((row, q) => row.map((cell, k) => cell && !direct[q][k])).filter(Boolean).length;
  const layers = layersText(state.layers);
  const wrong = against();
  const words = more ? t("reachMore", { layers, count: more }) : t("reachExact", { layers });
  return item("v.reach", wrong ? "bad" : "good", words, wrong ? ` ${t("reachAgainst", { count: wrong })}` : null);
}

function shiftedVerdict() {
  const { shifted } = proof.leaks;
  const count = proof.scored.length;
  if (!shifted.length) return item("v.shifted", "good", t("noLeak", { count }));
  const buttons = shifted.slice(0, SHOWN).map(([q, k]) => {
    const light = () => change({ path: pathBetween(proof.visible, q, k) });
    return h("button", { class: "leak-item", onclick: light }, t("leakItem", { reader: nameOf(q), key: nameOf(k) }));
  });
  const rest = shifted.length - SHOWN;
  return item("v.shifted", "bad", t("leak", { leaks: shifted.length, count }), h("span", { class: "chips" }, buttons, rest > 0 ? h("span", {}, t("more", { count: rest })) : null));
}

function streamVerdict() {
  const count = proof.leaks.two_stream.length;
  return item("v.stream", count ? "bad" : "good", count ? t("streamLeak", { count }) : t("streamOk"));
}

function cacheVerdict() {
  const { blocks } = proof.cache;
  const names = blocks.map((block) => block.map((i) => state.tokens[i]).join("+"));
  if (blocks.length === 1) return item("v.cache", "plain", t("cacheNo", { count: blocks[0].length }));
  if (blocks.every((block) => block.length === 1)) return item("v.cache", "good", t("cacheLine", { line: list(names, " → ") }));
  if (blocks.slice(1).every((block) => block.length === 1)) {
    return item("v.cache", "good", t("cachePrefill", { count: blocks[0].length, line: list(names.slice(1), " → ") }));
  }
  return item("v.cache", "good", t("cacheBlocks", { line: list(names, " → ") }));
}

/** The chain of reads that is lit up, step by step: what is read first comes first. */
function pathCard() {
  if (!state.path || state.path.length < 2) return null;
  const steps = state.path.slice(1).map((key, i) => [nameOf(state.path[i]), nameOf(key)]).reverse();
  return h(
    "div", { class: "path-card" },
    h("h3", {}, t("pathTitle")),
    h("ol", {}, steps.map(([reader, key], i) => h("li", {}, t("pathStep", { layer: i + 1, reader, key })))),
    h("p", {}, t("pathSo", { reader: nameOf(state.path[0]), key: nameOf(state.path.at(-1)), count: steps.length })),
    h("button", { class: "quiet", onclick: () => change({ path: null }) }, t("hidePath")),
  );
}

// ---- the prover in Python -----------------------------------------------------------------------------------------

const request = latest("prove");

const askProver = debounced(async () => {
  $("prover").textContent = t("waiting");
  const asked = proof;
  try {
    const found = await request({ ...boardRequest(), layers: state.layers, scored: scored(), tokens: state.tokens });
    if (!found || asked !== proof) return; // the board has changed meanwhile
    const agrees = ["is_order", "visible", "influence", "leaks"].every((name) => JSON.stringify(found[name]) === JSON.stringify(asked[name]))
      && JSON.stringify(found.cache.blocks) === JSON.stringify(asked.cache.blocks);
    $("prover").textContent = t(agrees ? "agrees" : "disagrees");
    $("prover").classList.toggle("bad", !agrees);
    $("proof").textContent = found.text;
  } catch (error) {
    $("prover").textContent = explained(error);
  }
}, 250);
