// Starts the page: tabs, language, theme, and the inputs of the board.

import { latest } from "./api.js";
import { startAxis } from "./axis.js";
import { startClaims } from "./claims.js";
import { debounced, h, put, roving, $ } from "./dom.js";
import { currentLanguage, explained, t, useLanguage } from "./i18n.js";
import { startLenses } from "./lens.js";
import { KINDS } from "./mask.js";
import { startMatrix } from "./matrix.js";
import { EXAMPLES, arranged, change, fromAddress, onChange, state } from "./state.js";
import { startTitles } from "./titles.js";
import { startTools } from "./tools.js";
import { startTree } from "./tree.js";
import { startVerdicts } from "./verdicts.js";
import { startWeights } from "./weights.js";
import { startWriting } from "./writing.js";

const TABS = ["board", "writing", "titles", "claims"];
const LENSES = ["mask", "reach", "attention", "measured"];
const MOST_LAYERS = 12;

// ---- tabs ---------------------------------------------------------------------------------------------------------

function startTabs() {
  const buttons = TABS.map((name) => $(`tab-${name}`));
  buttons.forEach((button, i) => button.addEventListener("click", () => change({ tab: TABS[i] })));
  $("tabs").addEventListener("keydown", (event) => {
    if (roving(event, buttons)) change({ tab: TABS[buttons.indexOf(document.activeElement)] });
  });
  onChange((changed) => {
    if (!changed.has("tab")) return;
    TABS.forEach((name, i) => {
      const here = name === state.tab;
      buttons[i].setAttribute("aria-selected", String(here));
      buttons[i].tabIndex = here ? 0 : -1;
      $(`panel-${name}`).hidden = !here;
    });
  });
}

// ---- language and theme -------------------------------------------------------------------------------------------

const remembered = (name) => {
  try {
    return localStorage.getItem(`allmask-${name}`);
  } catch {
    return null; // a browser may forbid it
  }
};

function remember(name, value) {
  try {
    localStorage.setItem(`allmask-${name}`, value);
  } catch {
    // then it is forgotten
  }
}

function startLanguage() {
  $("language").addEventListener("click", () => {
    const language = currentLanguage() === "en" ? "zh" : "en";
    remember("language", language);
    useLanguage(language);
    change({ language });
  });
  useLanguage(remembered("language") ?? (navigator.language.startsWith("zh") ? "zh" : "en"));
}

function startTheme() {
  const themes = ["auto", "light", "dark"];
  let theme = themes.includes(remembered("theme")) ? remembered("theme") : "auto";
  const use = () => {
    document.documentElement.dataset.theme = theme;
    $("theme").textContent = `◐ ${t(theme)}`;
    $("theme").setAttribute("aria-label", `${t("theme")}: ${t(theme)}`);
  };
  $("theme").addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    remember("theme", theme);
    use();
    change({ theme });
  });
  onChange((changed) => changed.has("language") && use());
  use();
}

// ---- text and mask ------------------------------------------------------------------------------------------------

const askTokens = latest("tokens");

/** Ask the model how it splits the texts; `later` is what the address said about the mask. */
async function tokenize(later = null) {
  const { source, target } = state;
  try {
    const found = await askTokens({ source, target });
    if (!found) return;
    $("text-problem").hidden = true;
    Object.assign(state, { tokens: found.tokens, isTarget: found.is_target.map(Boolean), special: found.special });
    change({ ...maskAfter(later), tokens: found.tokens, isTarget: state.isTarget, special: found.special, model: found.model });
  } catch (error) {
    $("text-problem").hidden = false;
    $("text-problem").textContent = explained(error);
  }
}

/** The mask for new tokens: that of the address, if it fits, otherwise the same kind as before. */
function maskAfter(later) {
  const n = state.tokens.length;
  const custom = state.kind === "custom";
  if (!later) return arranged(custom ? "prefix" : state.kind);
  const inside = later.edits.filter((cell) => cell.split(",").every((i) => +i < n));
  const window = later.window;
  if (later.kind !== "custom") return { ...arranged(later.kind, later.seed), window, edits: inside };
  if (later.order?.length !== n) return { ...arranged("prefix"), window };
  const group = later.group?.length === n ? later.group : Array(n).fill(0);
  return { kind: "custom", order: later.order, group, window, edits: inside, path: null };
}

function startTexts() {
  const soon = debounced(tokenize, 120);
  for (const name of ["source", "target"]) {
    $(name).addEventListener("input", () => {
      state[name] = $(name).value;
      soon();
    });
  }
  $("example").addEventListener("click", () => {
    const chinese = /[\u3400-\u9fff]/.test(state.source);
    Object.assign(state, EXAMPLES[chinese ? "en" : "zh"]);
    showTexts();
    tokenize();
  });
}

function showTexts() {
  $("source").value = state.source;
  $("target").value = state.target;
}

/** A row of buttons of which one is chosen. */
function segmented(element, names, key, label, choose) {
  const draw = () => {
    const focused = element.contains(document.activeElement);
    const shown = names();
    const buttons = shown.map((name) =>
      h("button", { role: "radio", "aria-checked": String(state[key] === name), tabindex: state[key] === name ? 0 : -1, onclick: () => choose(name) }, t(`${label}.${name}`)),
    );
    if (!shown.includes(state[key])) buttons[0].tabIndex = 0;
    put(element, buttons);
    if (focused) buttons[Math.max(0, shown.indexOf(state[key]))].focus({ preventScroll: true });
  };
  element.addEventListener("keydown", (event) => {
    const buttons = [...element.children];
    if (roving(event, buttons)) choose(names()[buttons.indexOf(document.activeElement)]);
  });
  onChange((changed) => (changed.has(key) || changed.has("language")) && draw());
}

function startMasks() {
  const kinds = () => (state.kind === "custom" ? [...KINDS, "custom"] : KINDS);
  segmented($("kinds"), kinds, "kind", "kind", (kind) => kind !== "custom" && change(arranged(kind)));
  segmented($("lenses"), () => LENSES, "lens", "lens", (lens) => change({ lens, path: null }));
  $("shuffle").addEventListener("click", () => change(arranged("permutation", state.seed + 1)));
  $("window").addEventListener("change", () => change({ window: $("window").value ? +$("window").value : null, path: null }));
  $("layers").addEventListener("change", () => change({ layers: $("layers").value ? +$("layers").value : null, path: null }));
  onChange((changed) => {
    $("about-kind").textContent = t(`about.${state.kind}`);
    $("shuffle").hidden = state.kind !== "permutation";
    if (["window", "layers", "language", "tokens"].some((name) => changed.has(name))) showChoices();
  });
}

function showChoices() {
  const option = (value, text, chosen) => h("option", { value, selected: chosen === (value === "" ? null : value) }, text);
  const windows = Array.from({ length: Math.max(1, state.tokens.length - 1) }, (_, i) => i + 1);
  put($("window"), option("", t("noWindow"), state.window), windows.map((n) => option(n, String(n), state.window)));
  const layers = Array.from({ length: MOST_LAYERS }, (_, i) => i + 1);
  put($("layers"), layers.map((n) => option(n, String(n), state.layers)), option("", t("any"), state.layers));
}

// ---- start --------------------------------------------------------------------------------------------------------

startTabs();
startLanguage();
startTheme();
startVerdicts(); // first: the others show what it has proven
startLenses();
startMatrix();
startAxis();
startTexts();
startMasks();
startWeights();
startTools();
startWriting();
startTree();
startTitles();
startClaims();

const { now, later } = fromAddress();
Object.assign(state, !later && currentLanguage() === "zh" ? EXAMPLES.zh : {}, now);
showTexts();
change({ tab: state.tab, lens: state.lens, kind: later?.kind ?? state.kind, language: currentLanguage() });
tokenize(later);
addEventListener("hashchange", () => location.reload()); // another address was typed or pasted
