// What the page knows, who is told when it changes, and the address that says the same.

import { KINDS, arrange, turnsOf } from "./mask.js";

export const EXAMPLES = {
  en: { source: "What would you like to eat", target: "boiled chicken" },
  zh: { source: "你想吃啥", target: "白切鸡" },
};

export const state = {
  ...EXAMPLES.en,
  kind: "prefix", // one of KINDS, or "custom" after tokens were dragged
  seed: 1, // of a permutation
  order: [],
  group: [],
  window: null,
  edits: [], // clicked cells, "row,column"
  layers: 2, // null: any number
  lens: "mask", // mask, reach, attention, measured
  layer: null, // of attention; null: the mean
  head: null,
  path: null, // a chain of reads that is lit up
  tokens: [],
  isTarget: [],
  special: [],
  model: null, // what the server says of the model in use
  tab: "board",
};

const listeners = [];

/** Call `run(changed)` after each change; `changed` has the names of what changed. */
export const onChange = (run) => listeners.push(run);

/** Change some values and tell everybody. */
export function change(values) {
  Object.assign(state, values);
  const changed = new Set(Object.keys(values));
  for (const listener of listeners) listener(changed);
  remember();
}

/** The values of a kind of mask for the present tokens. */
export function arranged(kind, seed = state.seed) {
  return { kind, seed, ...arrange(kind, state.isTarget, seed), edits: [], path: null };
}

/** The board as the server takes it. */
export function boardRequest() {
  const { source, target, order, group, window, edits } = state;
  return { source, target, order, group, window, edits: edits.map((cell) => cell.split(",").map(Number)) };
}

/** The positions that bear loss: those before a token that is written; all of them, if there is none. */
export function scored() {
  const all = [...state.tokens.keys()];
  const written = state.kind === "turns" ? turnsOf(state.isTarget) : state.isTarget;
  return written.some(Boolean) ? all.filter((i) => written[i + 1]) : all;
}

/** A token for people: with its number where the same one stands twice. */
export function nameOf(position) {
  const token = state.tokens[position];
  const twice = state.tokens.filter((other) => other === token).length > 1;
  return twice ? `${token} (${position})` : token;
}

// ---- the address ------------------------------------------------------------------------------------------------

function remember() {
  const words = new URLSearchParams();
  words.set("s", state.source);
  words.set("t", state.target);
  words.set("k", state.kind);
  if (state.kind === "permutation") words.set("n", state.seed);
  if (state.kind === "custom") words.set("o", state.order.join("."));
  if (state.group.some(Boolean) && state.kind === "custom") words.set("g", state.group.join("."));
  if (state.window != null) words.set("w", state.window);
  if (state.edits.length) words.set("x", state.edits.join(";"));
  words.set("l", state.layers ?? "any");
  if (state.lens !== "mask") words.set("v", state.lens);
  if (state.tab !== "board") words.set("p", state.tab);
  history.replaceState(null, "", `#${words}`);
}

const numbers = (text) => (/^\d+([.]\d+)*$/.test(text ?? "") ? text.split(".").map(Number) : null);

/** What the address says: values for `state`, and those that can be set only when the tokens are known. */
export function fromAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  if (!words.has("s")) return { now: {}, later: null };
  const whole = (name, least, most) => {
    const value = Number(words.get(name));
    return words.has(name) && Number.isInteger(value) && value >= least && value <= most ? value : null;
  };
  const kind = [...KINDS, "custom"].includes(words.get("k")) ? words.get("k") : "prefix";
  const now = {
    source: words.get("s").slice(0, 1000),
    target: (words.get("t") ?? "").slice(0, 1000),
    layers: words.get("l") === "any" ? null : (whole("l", 1, 12) ?? 2),
    lens: ["mask", "reach", "attention", "measured"].includes(words.get("v")) ? words.get("v") : "mask",
    tab: ["board", "writing", "titles", "claims"].includes(words.get("p")) ? words.get("p") : "board",
  };
  const edits = (words.get("x") ?? "").split(";").filter((cell) => /^\d+,\d+$/.test(cell));
  return { now, later: { kind, seed: whole("n", 1, 1e6) ?? 1, order: numbers(words.get("o")), group: numbers(words.get("g")), window: whole("w", 1, 64), edits } };
}
