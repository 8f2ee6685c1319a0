// The same weights under the mask of the board: fill, continue, write a title. Results stay, to be compared.

import { post } from "./api.js";
import { h, percent, put, $ } from "./dom.js";
import { explained, t } from "./i18n.js";
import { boardRequest, onChange, state } from "./state.js";

const MOST = 8; // results that are kept
let runs = [];
let hidden = new Set(); // positions that Fill hides

export function startWeights() {
  $("fill").addEventListener("click", () => run("fill"));
  $("continue").addEventListener("click", () => run("continue"));
  $("write").addEventListener("click", () => run("write"));
  $("clear").addEventListener("click", () => {
    runs = [];
    show();
  });
  onChange((changed) => {
    if (changed.has("tokens")) {
      const asked = state.tokens.includes("[MASK]");
      const last = state.special.findLastIndex((special, i) => !special && !state.isTarget[i]); // of the source
      hidden = new Set(asked || last < 0 ? [] : [last]);
    }
    if (["tokens", "model", "language"].some((name) => changed.has(name))) show();
  });
}

/** The mask of the board in a few words. */
function maskName() {
  let name = t(`kind.${state.kind}`);
  if (state.window != null) name = t("withWindow", { kind: name, window: state.window });
  return state.edits.length ? t("edited", { kind: name, count: state.edits.length }) : name;
}

async function run(what) {
  const mask = maskName();
  const buttons = [$("fill"), $("continue"), $("write")];
  buttons.forEach((button) => (button.disabled = true));
  let outcome;
  try {
    if (what === "fill") outcome = filled(await post("fill", { ...boardRequest(), hidden: [...hidden] }));
    else outcome = written(await post("write", { ...boardRequest(), how: what === "write" ? "title" : "continue" }));
  } catch (error) {
    outcome = [h("p", { class: "problem" }, explained(error))];
  }
  runs = [{ what, mask, outcome }, ...runs].slice(0, MOST);
  show();
  buttons.forEach((button) => (button.disabled = false));
  $(what).focus({ preventScroll: true });
}

function filled({ gaps }) {
  return gaps.map((gap) =>
    h("div", { class: "gap-guesses" },
      gap.was == null ? null : h("p", { class: "was" }, t("wasToken", { token: gap.was })),
      gap.guesses.map((guess) => bar(guess.token, guess.probability, gap.was === guess.token)),
    ),
  );
}

/** A token with a bar as long as it is likely. */
export function bar(token, share, right = false) {
  return h("div", { class: `share${right ? " right" : ""}` },
    h("span", { class: "share-token" }, token),
    h("span", { class: "share-line", "aria-hidden": "true" }, h("span", { style: { width: `${Math.max(1, share * 100)}%` } })),
    h("span", { class: "share-number" }, percent(share)),
  );
}

function written({ text, steps }) {
  const chips = steps.filter((step) => !step.ends).map((step) =>
    h("span", { class: "written", style: { "--sure": `${Math.round(step.probability * 100)}%` }, title: percent(step.probability) }, step.token),
  );
  return [h("p", { class: "written-text" }, text || t("nothing")), h("p", { class: "written-line", "aria-hidden": "true" }, chips)];
}

function show() {
  $("weights-help").textContent = state.model ? t("weightsHelp", { model: state.model.name }) : t("noModel");
  [$("fill"), $("continue"), $("write")].forEach((button) => (button.disabled = !state.model));
  $("clear").hidden = !runs.length;
  put($("hiding"), state.tokens.map((token, i) => {
    const flip = (event) => {
      if (!hidden.delete(i)) hidden.add(i);
      event.target.setAttribute("aria-pressed", String(hidden.has(i)));
    };
    return h("button", { class: "chip", "aria-pressed": String(hidden.has(i)), disabled: !!state.special[i], onclick: flip }, token);
  }));
  put($("runs"), runs.map(({ what, mask, outcome }) =>
    h("article", { class: "run" }, h("h3", {}, `${t(what)} · `, h("span", {}, t("under", { mask }))), outcome),
  ));
}
